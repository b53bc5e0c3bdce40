"""A server's spans over OTLP: nothing without an endpoint, a share of the traces with one, and never a wait for the receiver."""

from __future__ import annotations

import time

import pytest
from span_side import spans_of
from tools import free_port, http_receiver

from mamba_checkpoint_cache import cli
from mamba_checkpoint_cache.serving import spans
from mamba_checkpoint_cache.serving.options import ServeOptions


def export(endpoint: str, count: int, ratio: float = 1.0) -> float:
    """Make so many traces of two spans; the seconds that closing took."""
    with spans.exported_spans(ServeOptions(otlp_endpoint=endpoint, otlp_ratio=ratio)) as provider:
        tracer = provider.get_tracer("test")
        for _ in range(count):
            with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner"):
                pass
        closing = time.monotonic()
    return time.monotonic() - closing


def test_without_an_endpoint_there_is_nothing() -> None:
    """No provider: whatever is global decides, and that is nothing in a server."""
    with spans.exported_spans(ServeOptions()) as provider:
        assert provider is None


@pytest.mark.parametrize("slash", ["", "/"])
def test_spans_arrive_before_it_ends(slash: str) -> None:
    """The last spans are handed over on closing, at the path that the protocol names, and say who sent them."""
    with http_receiver() as received:
        export(received.url + slash, 3)

    assert {path for path, _ in received} == {"/v1/traces"}
    assert sorted(span.name for span in spans_of(received)) == ["inner"] * 3 + ["outer"] * 3
    (service,) = {(span.resource["service.name"], span.resource["service.version"]) for span in spans_of(received)}
    assert service == ("mamba-checkpoint-cache", spans.version("mamba-checkpoint-cache"))


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0, 0), (0.5, 50, 150), (1.0, 200, 200)])
def test_a_share_of_the_traces_is_exported(ratio: float, least: int, most: int) -> None:
    """The ratio decides by trace: both spans of it go, or neither."""
    with http_receiver() as received:
        export(received.url, 200, ratio)

    arrived = spans_of(received)
    traces = {span.trace_id for span in arrived}
    assert least <= len(traces) <= most
    assert len(arrived) == 2 * len(traces)


def test_a_receiver_that_hangs_does_not_hold_it_up() -> None:
    """Closing takes its time and no more, however much is still to be sent."""
    with http_receiver(seconds=60) as hanging:
        assert export(hanging.url, 1000) < 5

        assert hanging


def test_a_closed_port_does_not_hold_it_up(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does a receiver that isn't there."""
    assert export(f"http://127.0.0.1:{free_port()}", 1000) < 5

    assert caplog.records


@pytest.mark.parametrize("package", ["opentelemetry.exporter", "opentelemetry.sdk"])
def test_a_missing_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the exporter the command says what to install, and serves nobody."""

    def missing(*_: object) -> None:
        raise ModuleNotFoundError(name=package)

    monkeypatch.setattr(cli, "import_module", missing)

    assert cli.main(["serve", "--otlp-endpoint", "http://127.0.0.1:1"]) == 2

    assert f"{package} is not installed: pip install 'mamba-checkpoint-cache[otlp]'" in capsys.readouterr().err

"""Options of the server, checked at construction."""

from __future__ import annotations

import pytest

from mamba_checkpoint_cache.serving.options import OptionError, ServeOptions


def test_defaults_listen_locally_and_compress() -> None:
    """Without options the server is not reachable from outside and stores the format that drifts least."""
    options = ServeOptions()

    assert (options.host, options.codec, options.model) == ("127.0.0.1", "int8-pivot", "gdn-hybrid")


SIZES = ["checkpoint_slots", "checkpoint_memory_bytes", "active_slots", "page_size", "chunk", "threads"]


@pytest.mark.parametrize("name", [*SIZES, "drift_checks_per_minute"])
def test_refuses_numbers_below_one(name: str) -> None:
    """A count of nothing is refused with its name and the number given."""
    for value in (0, -3):
        with pytest.raises(OptionError, match=f"{name} must be at least 1, got {value}"):
            ServeOptions(**{name: value})


def test_refuses_two_sizes_for_one_pool() -> None:
    """Slots and memory for the same pool contradict each other."""
    with pytest.raises(OptionError, match="not both"):
        ServeOptions(checkpoint_slots=4, checkpoint_memory_bytes=4096)


def test_refuses_chunks_that_end_inside_a_page() -> None:
    """A chunk's end must be a depth at which a checkpoint may stand."""
    with pytest.raises(OptionError, match="chunk must be a multiple of page_size, got 48 and 32"):
        ServeOptions(page_size=32, chunk=48)
    assert ServeOptions(page_size=32, chunk=96).chunk == 96


@pytest.mark.parametrize("port", [-1, 65536])
def test_refuses_ports_that_do_not_exist(port: int) -> None:
    """A port has sixteen bits."""
    with pytest.raises(OptionError, match=f"port must lie in 0 … 65535, got {port}"):
        ServeOptions(port=port)


def test_refuses_an_unknown_codec() -> None:
    """A codec that doesn't exist is answered with those that do."""
    with pytest.raises(OptionError, match="unknown codec 'int3', expected one of none"):
        ServeOptions(codec="int3")
    with pytest.raises(OptionError, match="'int8,1=none,0-1=none' names layer 1 twice"):
        ServeOptions(codec="int8,1=none,0-1=none")


@pytest.mark.parametrize(("name", "whole"), [("drift_rate", "hits"), ("otlp_ratio", "traces")])
@pytest.mark.parametrize("rate", [-0.01, 1.01, float("nan")])
def test_refuses_rates_that_are_no_share(name: str, whole: str, rate: float) -> None:
    """A share lies between none and all."""
    with pytest.raises(OptionError, match=f"{name} must be a share of the {whole}, 0 … 1, got"):
        ServeOptions(**{name: rate})


@pytest.mark.parametrize("endpoint", ["", "receiver:4318", "grpc://receiver:4317"])
def test_refuses_endpoints_that_are_no_address(endpoint: str) -> None:
    """Spans go over HTTP."""
    with pytest.raises(OptionError, match="otlp_endpoint must be an http or https address, got"):
        ServeOptions(otlp_endpoint=endpoint)


@pytest.mark.parametrize("name", ["max_relative_error", "max_kl"])
def test_refuses_ceilings_that_nothing_stays_under(name: str) -> None:
    """A ceiling of nothing, or of no number, is refused by name."""
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(OptionError, match=f"{name} must be over 0, got {value}"):
            ServeOptions(**{name: value})


def test_refuses_hops_that_no_state_has() -> None:
    """One hop is what every compressed state has."""
    with pytest.raises(OptionError, match="max_hops must be at least 2, got 1"):
        ServeOptions(max_hops=1)
    assert ServeOptions(max_hops=2).max_hops == 2


def test_the_guard_is_what_was_asked_for() -> None:
    """Its action and its ceilings are those of the options; off is none, and any other word is refused."""
    native, stop = (ServeOptions(guard=guard, max_kl=0.2, max_relative_error=0.3).build_guard() for guard in ("native", "stop"))

    assert [(guard.action, guard.mode) for guard in (native, stop)] == [("native", "normal"), ("stop", "normal")]
    assert (native.budget.kl_nats, native.budget.relative_error) == (0.2, 0.3)
    assert ServeOptions(guard="off").build_guard() is None
    assert ServeOptions().build_guard().action == "native"
    with pytest.raises(OptionError, match="unknown guard 'on', expected one of native, stop, off"):
        ServeOptions(guard="on")

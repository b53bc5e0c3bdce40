"""What a scrape says: the published names, types and labels, as many series as before, and nothing about anybody."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from cache_play import Turn, build, play
from hash_model import greedy, hash_engine
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from mamba_checkpoint_cache import DriftBudget, DriftGuard, Telemetry, cli
from mamba_checkpoint_cache.codec import CODEC_NAMES
from mamba_checkpoint_cache.serving import server
from mamba_checkpoint_cache.serving.options import ServeOptions
from mamba_checkpoint_cache.telemetry.catalogue import METRICS, VERSION

GOLDEN = Path(__file__).with_name("golden_metrics.txt")
PROMPT = "Dear doctor, my patient file /home/anna/file.txt says"
HEX = re.compile(r"[0-9a-f]{12,}", re.IGNORECASE)


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """Of a guarded cache that has seen every kind of event there is, good and bad, all of it sampled."""
    registry = CollectorRegistry()
    telemetry = Telemetry("served", registry=registry, tracer_provider=TracerProvider())
    cache = build(telemetry, DriftGuard(DriftBudget(window=2, checks=1, recover_after=2)))
    turn = Turn((1, 2, 1), (1, 3), poisoned=False, end="donate", after="flush")
    play(cache, [turn, Turn((1, 2), (2,), poisoned=True, end="hold", after="check"), turn, turn])
    for reason in ("/secret/path", "request-4711", PROMPT):
        telemetry.committed("skipped", reason)  # type: ignore[arg-type]
        telemetry.check_failed(RuntimeError(reason))
        with telemetry.operation("match") as operation:
            operation.set(depth=reason, reason=object())
    yield registry
    telemetry.close()


def series(registry: CollectorRegistry) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Every series, by name and labels."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(sample.name, frozenset(sample.labels.items())) for family in families for sample in family.samples}


def test_names_types_and_labels_are_the_published_ones(registry: CollectorRegistry) -> None:
    """A scrape has exactly the families of the golden list; whoever changes one changes dashboards, alerts and CHANGELOG too."""
    found = []
    for line in generate_latest(registry).decode().splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            labels = {
                key for n, labels in series(registry) if re.fullmatch(f"{name}(_bucket|_count|_sum)?", n) for key, _ in labels
            }
            found.append(" ".join([name, kind, *sorted(labels - {"le"})]))

    assert sorted(found) == GOLDEN.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("encode", [generate_latest, generate_openmetrics], ids=["text", "openmetrics"])
def test_the_exposition_says_nothing_about_anybody(registry: CollectorRegistry, encode) -> None:
    """Label values are the catalogue's or the configuration's; no path, id, prompt, hash or exception text anywhere."""
    allowed: dict[str, set[str]] = {
        "cache": {"served"},
        "codec": set(CODEC_NAMES),
        "state_dtype": {"float32"},
        "version": {VERSION},
    }
    for metric in METRICS:
        for label in metric.labels:
            allowed.setdefault(label.name, set()).update(label.values)
    text = encode(registry).decode()

    for name, labels in series(registry):
        for key, label_value in labels:
            if key == "le":
                float(label_value)
            elif key == "fingerprint":
                assert re.fullmatch(r"[0-9a-f]{16}-(int8|none)", label_value), name
            else:
                assert label_value in allowed[key], (name, key)
    exemplars = re.findall(r" # (\{.*?\})", text)
    assert bool(exemplars) == (encode is generate_openmetrics)
    assert all(re.fullmatch(r'\{trace_id="[0-9a-f]{32}"\}', exemplar) for exemplar in exemplars)
    lines = [re.sub(r'fingerprint="[^"]*"| # \{.*', "", line) for line in text.splitlines() if not line.startswith("# HELP")]
    rest = "\n".join(line if line.startswith("#") else line.rpartition(" ")[0] for line in lines)
    assert HEX.findall(rest) == []
    assert [word for word in ("/", "\\", "secret", "4711", "doctor", "Error", "Traceback", "0x") if word in rest] == []


def test_ten_thousand_ids_make_no_series() -> None:
    """Prompts and ids that never came before and never come again leave the number of series as it was (fault 33)."""
    random, telemetry = Random(0), Telemetry()
    cache = build(telemetry)
    before = series(telemetry.registry)

    for _ in range(10_000):
        tokens, unknown = [random.randrange(2**31) for _ in range(4)], str(uuid.UUID(int=random.getrandbits(128)))
        cache.release(cache.match_prefix(tokens))
        telemetry.committed("skipped", unknown)  # type: ignore[arg-type]
        telemetry.check_failed(RuntimeError(unknown))

    assert series(telemetry.registry) == before
    telemetry.close()


def test_requests_make_no_series() -> None:
    """An engine that has served a hundred requests exposes the series that it exposed before the first."""
    telemetry = Telemetry()
    engine = hash_engine(telemetry=telemetry)
    before = series(telemetry.registry)

    engine.generate([list(f"{PROMPT} {number}".encode()) for number in range(100)], greedy(2))

    assert series(telemetry.registry) == before
    telemetry.close()


def test_everything_listens_on_this_machine_only_by_default() -> None:
    """Unless told otherwise the server, /metrics included, is bound to 127.0.0.1, and telemetry opens no port of its own."""
    assert cli._parser().parse_args(["serve"]).host == ServeOptions().host == "127.0.0.1"
    with server._bound_socket(ServeOptions().host, 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"

    sources = Path(cli.__file__).parent.rglob("*.py")
    assert [path for path in sources if re.search(r"start_http_server|start_wsgi_server|0\.0\.0\.0", path.read_text())] == []

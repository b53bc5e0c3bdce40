"""The whole chain for real: a server under load, Prometheus, Alertmanager, a receiver of spans; all on loopback."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from live_side import (
    ROOT,
    Prometheus,
    alertmanager,
    choices,
    filled_in,
    panel_queries,
    prometheus,
    rule_files,
    sped_up,
    variable_values,
)
from serving_side import ServerProcess
from span_side import spans_of
from tools import Received, free_port, http_receiver, require_rotel, running, wait_for

from mamba_checkpoint_cache.serving.demo import drive
from mamba_checkpoint_cache.serving.scrape import Scrape
from mamba_checkpoint_cache.serving.workload import generate_workload
from mamba_checkpoint_cache.telemetry.catalogue import PREFIX, SPANS

pytestmark = pytest.mark.slow

QUERIES = panel_queries()
EMPTY_WITHOUT_ERROR = {
    ("drift", "Has the error grown against its own past day?"): "a past error of 0 is nothing to compare with",
}
"""What a cache that stores native states has no data for, and why. All else has data, whatever the variables are set to."""
WORKLOAD = generate_workload(chats=8, agents=4, forks=3, resends=3)
SPED_UP = 30
SLOTS = 8


class Scene(NamedTuple):
    """Two servers that have had the demo's traffic, watched by one Prometheus; the first exports its spans."""

    server: Prometheus
    instances: list[str]
    spans: Received
    start: float
    end: float


def serve(*options: str) -> ServerProcess:
    return ServerProcess("serve", "--port=0", "--threads=1", "--drift-rate=0.5", "--drift-checks-per-minute=600", *options)


def checked(server: ServerProcess) -> int:
    """Drift checks that were finished."""
    return Scrape(server.client.get("/metrics").text).by("drift_checks_total", "outcome")["ok"]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        spans = stack.enter_context(http_receiver())
        servers = [
            serve("--checkpoint-memory", "1MiB", "--otlp-endpoint", spans.url, "--otlp-ratio", "1"),
            serve("--checkpoint-memory", "1MiB", "--codec", "none"),
        ]
        for server in servers:
            stack.enter_context(server)
        for server in servers:
            server.wait_until_listening()
        urls = [str(server.client.base_url) for server in servers]
        instances = [urlsplit(url).netloc for url in urls]
        rules = [ROOT / "alerts" / name for name in rule_files()]
        watching = stack.enter_context(prometheus(tmp_path_factory.mktemp("scene"), instances, rules))
        wait_for("scrapes of both", lambda: len(watching.get("query", query="mamba_checkpoint_info")["result"]) == 2, 20)
        start = time.time()
        time.sleep(5)  # without traffic every rate is 0, and nothing may divide by it
        with ThreadPoolExecutor(len(urls)) as pool:
            list(pool.map(lambda url: asyncio.run(drive(url, WORKLOAD, lambda _: None)), urls))
        for server in servers:
            wait_for("a drift check, which has little time while there is traffic", lambda server=server: checked(server), 60)
        time.sleep(3)  # the last of it is scraped
        yield Scene(watching, instances, spans, start, time.time())


def test_every_panel_answers(scene: Scene) -> None:
    """Each query of each panel, with each setting of the variables: no error, finite, and not empty but for those listed."""
    offered = variable_values(scene.server)
    wrong: list[str] = []
    for name, chosen in choices(offered).items():
        for query in QUERIES:
            expression = filled_in(query.expression, chosen, scene.end - scene.start)
            values = scene.server.values(expression, scene.start, scene.end, instant=query.instant)
            if not all(map(math.isfinite, values)):
                wrong.append(f"{query.place} {query.ref} with {name}: not finite")
            lossless = chosen["instance"] == scene.instances[1:]
            if not values and not (lossless and query.place in EMPTY_WITHOUT_ERROR):
                wrong.append(f"{query.place} {query.ref} with {name}: empty: {expression}")

    assert not wrong, "\n".join(wrong)


def test_every_rule_runs(scene: Scene) -> None:
    """Prometheus evaluates each rule without an error, each expression answers, and what is to be recorded is there."""
    shipped = [rule for content in rule_files().values() for group in content["groups"] for rule in group["rules"]]
    for rule in shipped:
        values = scene.server.values(rule["expr"], scene.start, scene.end, instant=True)
        assert all(map(math.isfinite, values)), rule
        assert values or "alert" in rule, rule

    wait_for("every rule to run", lambda: all(rule["health"] != "unknown" for rule in scene.server.rules()), 60)
    loaded = scene.server.rules()
    assert len(loaded) == len(shipped)
    assert [rule["lastError"] for rule in loaded if rule["health"] != "ok"] == []


def test_nothing_pages_while_all_is_well(scene: Scene) -> None:
    """A full pool under the demo's traffic is healthy: nobody is woken."""
    rules = [rule for group in rule_files()["alerting.yml"]["groups"] for rule in group["rules"]]
    paging = [rule for rule in rules if rule["labels"]["severity"] == "page"]
    found = {rule["alert"]: scene.server.values(rule["expr"], scene.start, scene.end, instant=False) for rule in paging}

    assert paging
    assert {name: values for name, values in found.items() if values} == {}


def test_exemplars_lead_to_spans(scene: Scene) -> None:
    """The trace id that Prometheus keeps beside a latency is one of a trace that was exported."""
    exported = {span.trace_id.hex() for span in spans_of(scene.spans)}
    selector = f'mamba_checkpoint_operation_seconds_bucket{{instance="{scene.instances[0]}"}}'
    found = scene.server.get("query_exemplars", query=selector, start=scene.start, end=scene.end)
    traces = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}

    assert traces
    assert traces <= exported


@contextmanager
def traffic(client: httpx.Client) -> Iterator[None]:
    """Short prompts without end; every fourth is the same, all others have nothing in common."""
    stop = threading.Event()

    def send() -> None:
        for number in itertools.count():
            prompt = [number % 250, number // 250 % 250, 1, 2] if number % 4 else [251, 1, 2, 3]
            client.post("/generate", json={"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}).raise_for_status()
            if stop.wait(0.05):
                return

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        try:
            yield
        finally:
            stop.set()
        sending.result()


def notices(received: Received, receiver: str, alert: str, status: str) -> list[dict[str, Any]]:
    """The notifications of one alert that have come to one receiver."""
    bodies = [json.loads(body) for path, body in list(received) if path == f"/{receiver}"]
    alerts = [notice for body in bodies for notice in body["alerts"]]
    return [notice for notice in alerts if (notice["labels"]["alertname"], notice["status"]) == (alert, status)]


def test_an_exhausted_pool_pages_and_recovers(tmp_path: Path) -> None:
    """Lost leases lock the whole pool: pending, firing, a page; they come back: the page is resolved, and nothing is left."""
    exhausted, all_locked = "MambaCheckpointPoolExhausted", "MambaCheckpointAllLocked"
    lose, code = tmp_path / "lose", Path(__file__).with_name("leaky_server.py").read_text(encoding="utf-8")
    with ExitStack() as stack:
        webhook = stack.enter_context(http_receiver())
        server = stack.enter_context(ServerProcess(str(lose), str(SLOTS), code=code))
        server.wait_until_listening()
        notifier = stack.enter_context(alertmanager(tmp_path, webhook.url, SPED_UP))
        instance = urlsplit(str(server.client.base_url)).netloc
        watching = stack.enter_context(prometheus(tmp_path, [instance], sped_up(tmp_path, SPED_UP), notifier))
        stack.enter_context(traffic(server.client))
        full = 'mamba_checkpoint_slots{pool="checkpoint",state="evictable"} == %d'
        wait_for("a full pool", lambda: watching.get("query", query=full % SLOTS)["result"], 30)
        time.sleep(10)  # longer than any alert on the pool would be pending
        assert watching.alerts() == {}

        lose.touch()
        wait_for("pending", lambda: watching.alerts().get((exhausted, "page")) == ["pending"], 30, every=0.05)
        wait_for("firing", lambda: "firing" in watching.alerts().get((exhausted, "page"), []), 30)
        (page, *_) = wait_for("a page", lambda: notices(webhook, "page", exhausted, "firing"), 30)
        wait_for("the cause to page too", lambda: notices(webhook, "page", all_locked, "firing"), 40)
        assert page["labels"]["instance"] == instance
        assert page["labels"]["cache"] == "default"
        assert page["annotations"]["runbook_url"].endswith(f"/{exhausted}.md")

        lose.unlink()
        (resolved, *_) = wait_for("the end of the page", lambda: notices(webhook, "page", exhausted, "resolved"), 90)
        wait_for("the end of the cause", lambda: notices(webhook, "page", all_locked, "resolved"), 30)
        assert resolved["fingerprint"] == page["fingerprint"]
        assert [name for name, severity in watching.alerts() if severity == "page"] == []


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Received:
    """What a real receiver of OTLP passed on of a server's spans, the server's last ones included."""
    folder, port = tmp_path_factory.mktemp("rotel"), free_port()
    with http_receiver() as received:
        options = {
            "otlp-http-endpoint": f"127.0.0.1:{port}",
            "otlp-grpc-endpoint": f"127.0.0.1:{free_port()}",
            "exporter": "otlp",
            "otlp-exporter-endpoint": received.url,
            "otlp-exporter-protocol": "http",
        }
        command = [require_rotel(), "start", *(f"--{name}={value}" for name, value in options.items())]
        with running(command, str(port), folder / "rotel.log"):
            with serve("--otlp-endpoint", f"http://127.0.0.1:{port}", "--otlp-ratio", "1", "--checkpoint-slots", "6") as server:
                server.wait_until_listening()
                for first in (1, 2, 3, 1):
                    prompt = [*range(64), *([first] * 70)]
                    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}}
                    server.client.post("/generate", json=body).raise_for_status()
                lookups = Scrape(server.client.get("/metrics").text).by("lookups_total", "outcome")
                server.signal(signal.SIGTERM)
                assert server.wait(30) == 0, "".join(server.stderr)
            count = lookups["hit"] + lookups["miss"]
            wait_for("the spans", lambda: sum(span.name.endswith(".match") for span in spans_of(received)) >= count, 20)
    return received


def test_every_kind_of_span_arrives(exported: Received) -> None:
    """Each span of the catalogue, with those of its attributes that apply and no other, and who sent it."""
    spans = spans_of(exported)
    allowed = {span.full_name: {f"{PREFIX}.{name}" for name in span.attributes} for span in SPANS}

    assert {span.name for span in spans} == allowed.keys()
    for span in spans:
        assert span.attributes.keys() <= allowed[span.name]
        assert span.attributes[f"{PREFIX}.cache"] == "default"
        assert span.resource["service.name"] == "mamba-checkpoint-cache"
        assert 0 < span.start <= span.end
    assert {value for span in spans for value in span.attributes.values() if not isinstance(value, str | int | float)} == set()


def test_spans_have_their_parents(exported: Received) -> None:
    """A match is a root, the later calls of its request follow it in its trace; what happens inside of one is within its time."""
    spans = {span.span_id: span for span in spans_of(exported)}
    boundary = {span.full_name: span.boundary for span in SPANS}
    parents = {(span.name, spans[span.parent].name) for span in spans.values() if span.parent}

    assert {inner for inner, outer in parents if boundary[inner]} == {f"{PREFIX}.restore", f"{PREFIX}.commit"}
    assert {outer for inner, outer in parents if boundary[inner]} == {f"{PREFIX}.match"}
    assert {(f"{PREFIX}.{inner}", f"{PREFIX}.commit") for inner in ("alloc", "compress", "evict")} <= parents
    for span in spans.values():
        if span.parent:
            parent = spans[span.parent]
            assert parent.trace_id == span.trace_id
            assert parent.start <= span.start <= span.end
            assert (span.start >= parent.end) if boundary[span.name] else (span.end <= parent.end)


def test_an_eviction_is_linked_to_its_commit(exported: Received) -> None:
    """The eviction of a checkpoint points at the commit that stored it: earlier, of the same depth."""
    spans = {(span.trace_id, span.span_id): span for span in spans_of(exported)}
    evictions = [span for span in spans.values() if span.name == f"{PREFIX}.evict" and span.links]

    assert evictions
    for eviction in evictions:
        (link,) = eviction.links
        commit = spans[link]
        assert commit.name == f"{PREFIX}.commit"
        assert commit.attributes[f"{PREFIX}.outcome"] == "stored"
        assert commit.end <= eviction.start
        assert commit.span_id != eviction.parent
        assert commit.attributes[f"{PREFIX}.depth"] == eviction.attributes[f"{PREFIX}.depth"]


def test_a_receiver_that_hangs_delays_nothing() -> None:
    """Requests are answered as ever, and the server has closed within 5 seconds of the signal."""
    with http_receiver(seconds=120) as hanging, serve("--otlp-endpoint", hanging.url, "--otlp-ratio", "1") as server:
        server.wait_until_listening()
        body = {"input_ids": list(range(40)), "sampling_params": {"max_new_tokens": 2}}
        outputs = [server.client.post("/generate", json=body).raise_for_status().json()["output_ids"] for _ in range(20)]
        wait_for("spans", lambda: hanging, 20)
        server.signal(signal.SIGTERM)
        signalled = time.monotonic()

        assert server.process.stdout.readline()  # what it did, which is printed when all is closed
        assert time.monotonic() - signalled < 5
        assert server.wait(30) == 0
        assert all(output == outputs[0] for output in outputs)

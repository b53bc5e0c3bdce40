"""What telemetry costs: in an operation, in a commit, at a scrape; and whether what it exposes grows."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from statistics import median
from threading import Event, Thread
from typing import Any, cast

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import NoOpTracerProvider
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from torch import Tensor

from mamba_checkpoint_cache.bench.one_thread import one_thread
from mamba_checkpoint_cache.bench.stand_in import TINY, NoCodec, NoKv
from mamba_checkpoint_cache.cache import PrefixCache
from mamba_checkpoint_cache.codec import DEFAULT_CODEC
from mamba_checkpoint_cache.codec.base import Codec
from mamba_checkpoint_cache.model_configs import spec_from_config
from mamba_checkpoint_cache.plan import named_config
from mamba_checkpoint_cache.pools import ActivePool, CheckpointPool
from mamba_checkpoint_cache.serving.build import build_engine
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.options import ServeOptions
from mamba_checkpoint_cache.serving.progress import Advance, progress
from mamba_checkpoint_cache.serving.sampling import Sampling
from mamba_checkpoint_cache.slots import ActiveSlot
from mamba_checkpoint_cache.state import StateSpec
from mamba_checkpoint_cache.telemetry.recorder import Telemetry

MODEL = "Qwen3-Next-80B-A3B"
PROMPT_TOKENS = 192
"""As in the demo, on average."""
BATCH = 50
"""Operations that are timed together, where one is shorter than a clock is exact."""
SLOTS = 2
"""Checkpoint slots where commits are timed, so that each has to evict."""
IDS = 10_000
VOCABULARY = 150_000
encode, _ = choose_encoder("application/openmetrics-text")
"""With exemplars, which is the longer of the two formats, and the one that Prometheus asks for."""

Arms = Mapping[str, Callable[[], None]]


def run(*, rounds: int = 200, commits: int = 60, scrapes: int = 60, ids: int = IDS) -> dict[str, Any]:
    """Arms that take turns, medians over rounds, CPU time on one thread, so that a busy machine changes little.

    ``operation_us``: a match, and its release, without telemetry (``bare``), with metrics alone, with spans that are not sampled,
    and with spans that are recorded. ``commit_ratio``: the time of a commit with metrics and unsampled spans over that without
    telemetry; every commit reserves, evicts, compresses with the default codec and publishes, a state of Qwen3-Next or of the
    model that ``serve`` takes by itself. What a commit notes is added up at a release, which is in ``operation_us``.
    ``scrape_ms``: how long one takes, by the wall clock, while that model's engine is never idle, and
    ``scrape_bytes`` what comes of it. ``series_before`` and ``series_after``: so many requests with prompts of random tokens.
    """
    qwen = spec_from_config(named_config(MODEL)[1], state_dtype=torch.float32, conv_dtype=torch.bfloat16)
    registry = CollectorRegistry()
    with one_thread(), progress("rounds", rounds + 2 * commits + scrapes) as advance:
        engine = build_engine(ServeOptions(), registry)
        operations = _take_turns(_matches(), rounds, advance)
        ratios = {
            name: _ratio(_take_turns(_commits(spec, batch), commits, advance))
            for name, spec, batch in (("qwen3_next_shape", qwen, 1), ("demo_model", engine.model.spec, BATCH))
        }
        with _busy(engine):
            scrape_ms = _scrape_ms(registry, scrapes, advance)
    before, after = _series(ids)
    return {
        "operation_us": {name: 1e6 * median(taken) / BATCH for name, taken in operations.items()},
        "commit_ratio": ratios,
        "scrape_ms": scrape_ms,
        "scrape_bytes": len(encode(registry)),
        "series_before": before,
        "series_after": after,
    }


def _telemetry(arm: str) -> Telemetry | None:
    if arm == "bare":
        return None
    if arm == "metrics":
        return Telemetry(tracer_provider=NoOpTracerProvider())
    sampler = ALWAYS_OFF if arm == "unsampled" else ALWAYS_ON
    return Telemetry(tracer_provider=TracerProvider(sampler, shutdown_on_exit=False))


class _Requests:
    """A cache, and one slot through which every request runs; no two prompts are alike.

    Arms that are compared take the same ``state``: a large one costs more or less time to read according to where it lies.
    """

    def __init__(self, arm: str, spec: StateSpec, codec: str | Codec, state: Tensor | None = None) -> None:
        self.telemetry = _telemetry(arm)
        active = ActivePool(spec, 1, state=state)
        checkpoints = CheckpointPool(spec, SLOTS, codec=codec)
        self.cache = PrefixCache(active=active, checkpoints=checkpoints, kv=NoKv(), telemetry=self.telemetry)
        self._random = Random(0)  # noqa: S311 - prompts, not secrets
        self._slot = cast(ActiveSlot, active.allocate())
        self._kv = array("i", range(PROMPT_TOKENS))

    def tokens(self) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]

    def serve(self) -> float:
        """Run a new prompt. The seconds of CPU time that its commit takes."""
        tokens = array("i", self.tokens())
        match = self.cache.match_prefix(tokens)
        self.cache.active.begin_write(self._slot)
        self.cache.active.end_write(self._slot, depth=len(tokens), hops=0)
        started = time.process_time()
        self.cache.commit(tokens, depth=len(tokens), source=self._slot, kv=self._kv, lease=match)
        seconds = time.process_time() - started
        self.cache.release(match)
        return seconds


def _matches() -> dict[str, Callable[[], float]]:
    def timed(arm: str) -> Callable[[], float]:
        requests = _Requests(arm, TINY, NoCodec())
        requests.serve()
        tokens, cache = requests.tokens(), requests.cache

        def batch() -> float:
            started = time.process_time()
            for _ in range(BATCH):
                cache.release(cache.match_prefix(tokens))
            return time.process_time() - started

        return batch

    return {arm: timed(arm) for arm in ("bare", "metrics", "unsampled", "recorded")}


def _commits(spec: StateSpec, batch: int) -> dict[str, Callable[[], float]]:
    state = ActivePool(spec, 1).state.normal_(generator=torch.Generator().manual_seed(0))

    def timed(arm: str) -> Callable[[], float]:
        requests = _Requests(arm, spec, DEFAULT_CODEC, state)
        return lambda: sum(requests.serve() for _ in range(batch))

    return {arm: timed(arm) for arm in ("bare", "unsampled")}


def _take_turns(arms: Mapping[str, Callable[[], float]], rounds: int, advance: Advance) -> dict[str, list[float]]:
    """The seconds of each arm, round by round; who goes first changes from round to round, and a first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in sorted(arms, reverse=bool(number % 2)):
            taken = arms[name]()
            if number:
                seconds[name].append(taken)
        advance(1 if number else 0)
    return seconds


def _ratio(seconds: Mapping[str, list[float]]) -> float:
    """The median over rounds, in each of which both arms met the same machine."""
    return median(recorded / bare for recorded, bare in zip(seconds["unsampled"], seconds["bare"], strict=True))


@contextmanager
def _busy(engine: Engine) -> Iterator[None]:
    """The engine serves, on a thread of its own, for as long as this lasts."""
    stop, random = Event(), Random(0)  # noqa: S311 - prompts, not secrets

    def serve() -> None:
        while not stop.is_set():
            prompts = [list(random.randbytes(PROMPT_TOKENS)) for _ in range(engine.config.active_slots)]
            engine.generate(prompts, Sampling(max_new_tokens=8, ignore_eos=True))

    thread = Thread(target=serve, name="engine")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _scrape_ms(registry: CollectorRegistry, scrapes: int, advance: Advance) -> float:
    taken = []
    for _ in range(scrapes):
        started = time.perf_counter()
        encode(registry)
        taken.append(1e3 * (time.perf_counter() - started))
        advance(1)
    return median(taken)


def _series(ids: int) -> tuple[int, int]:
    requests = _Requests("recorded", TINY, NoCodec())
    registry = cast(Telemetry, requests.telemetry).registry
    before = _count(registry)
    for _ in range(ids):
        requests.serve()
    return before, _count(registry)


def _count(registry: CollectorRegistry) -> int:
    return sum(len(family.samples) for family in registry.collect())

"""What the sampled drift checks cost a server that is never idle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest

from mamba_checkpoint_cache.bench.one_thread import one_thread
from mamba_checkpoint_cache.evaluation.statistics import bootstrap_interval
from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.integrations.transformers import HybridModel
from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.models import LoadedModel, load_model
from mamba_checkpoint_cache.serving.options import ServeOptions
from mamba_checkpoint_cache.serving.progress import progress
from mamba_checkpoint_cache.serving.sampling import Sampling
from mamba_checkpoint_cache.serving.scrape import Scrape
from mamba_checkpoint_cache.small_models.text import held_out_text
from mamba_checkpoint_cache.telemetry.recorder import Telemetry

ROUNDS = 40
REQUESTS = 20
"""In a round, for each engine; all wait at once, so that none of the engines is ever idle."""
PREFIXES = 8
PREFIX_TOKENS = 256
QUESTION_TOKENS = 8
REPLY_TOKENS = 16
SERVED = ServeOptions()
"""What ``serve`` does by itself."""
RATES = {"off": 0.0, "sampled": SERVED.drift_rate}

Prompts = list[list[int]]


class _Arm(NamedTuple):
    engine: Engine
    registry: CollectorRegistry


def run(*, rounds: int = ROUNDS, requests: int = REQUESTS, rates: dict[str, float] | None = None) -> dict[str, Any]:
    """Two reference engines with the model that ``serve`` takes by itself, one of which checks as ``serve`` does by itself.

    Both run the same requests, round by round, in turns: source code as prompts, every one a hit on a shared prefix. ``ratio`` is
    the throughput with sampling over that without, in tokens per second of CPU time on one thread, as the mean over rounds, and
    ``ratio_ci`` its 95 % interval by bootstrap. Beside it: the checks that were made, and the mean KL they found.
    """
    loaded = load_model(SERVED.model)
    model = prepare_model(loaded.model)
    arms = {name: _arm(model, loaded, rate) for name, rate in (rates or RATES).items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    workload = _rounds(rounds + 1, requests)
    with one_thread(), progress("rounds", rounds + 1) as advance:
        for number, prompts in enumerate(workload):
            for name in sorted(arms, reverse=bool(number % 2)):
                taken = _serve(arms[name].engine, prompts)
                if number:  # the first round fills the cache
                    seconds[name].append(taken)
            advance(1)
    tokens = requests * (PREFIX_TOKENS + QUESTION_TOKENS + REPLY_TOKENS)
    ratios = [off / sampled for off, sampled in zip(seconds["off"], seconds["sampled"], strict=True)]
    return {
        "model": loaded.name,
        "codec": SERVED.codec,
        "drift_rate": arms["sampled"].engine.config.drift_rate,
        "rounds": rounds,
        "requests": rounds * requests,
        "tokens_per_cpu_second": {name: tokens / fmean(taken) for name, taken in seconds.items()},
        "ratio": fmean(ratios),
        "ratio_ci": bootstrap_interval(ratios),
        **_found(arms["sampled"].registry),
    }


def _arm(model: HybridModel, loaded: LoadedModel, rate: float) -> _Arm:
    registry = CollectorRegistry()
    config = EngineConfig(
        name=loaded.name,
        codec=SERVED.codec,
        max_context=PREFIX_TOKENS + QUESTION_TOKENS + REPLY_TOKENS,
        drift_rate=rate,
        drift_checks_per_minute=SERVED.drift_checks_per_minute,
    )
    return _Arm(Engine(model, loaded.tokens, config, Telemetry(registry=registry)), registry)


def _rounds(rounds: int, requests: int) -> Iterator[Prompts]:
    draw = Random(0)  # noqa: S311 - prompts, not secrets
    prefixes = [held_out_text(PREFIX_TOKENS, seed=seed) for seed in range(PREFIXES)]
    for number in range(rounds):
        yield [
            list(draw.choice(prefixes) + held_out_text(QUESTION_TOKENS, seed=PREFIXES + number * requests + request))
            for request in range(requests)
        ]


def _serve(engine: Engine, prompts: Prompts) -> float:
    """Seconds of CPU time that it takes."""
    started = time.process_time()
    engine.generate(prompts, Sampling(max_new_tokens=REPLY_TOKENS, ignore_eos=True))
    return time.process_time() - started


def _found(registry: CollectorRegistry) -> dict[str, Any]:
    scrape = Scrape(generate_latest(registry).decode())
    positions = scrape.value("logit_kl_nats_count")
    return {
        "checks": scrape.by("drift_checks_total", "outcome"),
        "positions": int(positions),
        "kl_mean": scrape.value("logit_kl_nats_sum") / positions if positions else None,
    }

"""How many distinct prefixes stay reusable in the same bytes, stored natively, as int8 and in the default format."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random
from typing import Any

from mamba_checkpoint_cache.bench.one_thread import one_thread
from mamba_checkpoint_cache.bench.trace import ARMS, replay_trace
from mamba_checkpoint_cache.codec import BASELINE
from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.pools import CheckpointPool
from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.progress import Advance, progress
from mamba_checkpoint_cache.serving.sampling import Sampling
from mamba_checkpoint_cache.serving.tokens import ByteTokens
from mamba_checkpoint_cache.small_models.architectures import build_gdn_hybrid

NATIVE_SLOTS = 48
"""Slots of the native pool; the others have as many as fit the same bytes."""
PREFIX_TOKENS = 32
QUESTION_TOKENS = 8
ROUNDS = 3
"""Every prefix comes once a round; the first round fills the cache and is not counted."""


def run(*, native_slots: int = NATIVE_SLOTS, trace: Path | None = None) -> dict[str, Any]:
    """The knee of each codec: the smallest number of distinct prefixes of whose prompts less than half is reused.

    A model with two 128 × 128 heads in fp32 and random weights, served by the reference engine; all pools take ``pool_bytes``,
    padding row included. Prefixes come round after round in the same order, each with a new question: the hardest order for an
    LRU, so that the knee is a cliff. ``curve`` has the reused share of each number of prefixes that was tried; ``bytes_ratio``
    and ``knee_ratio`` are those of int8.
    With ``trace``, a recorded workload is replayed as well: see :func:`replay_trace`.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = prepare_model(
        build_gdn_hybrid(head_dim=128, num_heads=2, hidden_size=64, layers=("linear_attention", "full_attention"))
    )
    pool_bytes = (native_slots + 1) * CheckpointPool.bytes_per_slot_for(model.spec, "none")
    result: dict[str, Any] = {
        "model": "gdn-hybrid with two heads of 128 x 128, random weights",
        "state_dtype": str(model.spec.dtype).removeprefix("torch."),
        "pool_bytes": pool_bytes,
    }
    slots = {codec: CheckpointPool.slots_for(model.spec, codec, pool_bytes) for codec in ARMS}
    with one_thread(), progress("requests", sum(map(_expected_requests, slots.values()))) as advance:
        for codec in ARMS:
            config = EngineConfig(checkpoint_slots=slots[codec], codec=codec, chunk=PREFIX_TOKENS)
            result[codec] = _find_knee(Engine(model, ByteTokens(), config), advance)
    native, stored = result["none"], result[BASELINE]
    result["bytes_ratio"] = native["bytes_per_slot"] / stored["bytes_per_slot"]
    result["knee_ratio"] = stored["knee"] / native["knee"]
    if trace is not None:
        result["trace"] = replay_trace(trace)
    return result


def _find_knee(engine: Engine, advance: Advance) -> dict[str, Any]:
    """Bisect between 1 prefix, which is always reused, and more prefixes than there are slots."""
    pool = engine.cache.checkpoints
    curve: dict[int, float] = {}
    reused, lost = 1, pool.slots.capacity + 1
    while lost - reused > 1:
        prefixes = (reused + lost) // 2
        curve[prefixes] = reused_share(engine, prefixes, advance)
        if curve[prefixes] < 0.5:
            lost = prefixes
        else:
            reused = prefixes
    return {
        "slots": pool.slots.capacity,
        "bytes_per_slot": pool.bytes_per_slot,
        "knee": lost,
        "curve": sorted(curve.items()),
    }


def reused_share(engine: Engine, prefixes: int, advance: Advance) -> float:
    """The share of prompt tokens that were not computed again, with ``prefixes`` distinct prefixes and an empty cache."""
    random = Random(prefixes)  # noqa: S311 - prompts, not secrets
    known = [random.randbytes(PREFIX_TOKENS) for _ in range(prefixes)]
    engine.flush()
    reused = total = 0
    for counted in range(ROUNDS):
        for prefix in known:
            (request,) = engine.generate([list(prefix + random.randbytes(QUESTION_TOKENS))], Sampling(max_new_tokens=0))
            advance(1)
            if counted:
                reused += request.cached_tokens
                total += len(request.tokens)
    return reused / total


def _expected_requests(slots: int) -> int:
    """About as many as the bisection will send, if the knee lies at half the slots."""
    return ROUNDS * slots * slots.bit_length() // 2

"""A recorded workload, replayed in the cache alone: how much of it a pool of so many bytes would have reused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from mamba_checkpoint_cache.bench.stand_in import TINY, NoCodec
from mamba_checkpoint_cache.cache import PrefixCache
from mamba_checkpoint_cache.codec import BASELINE, DEFAULT_CODEC
from mamba_checkpoint_cache.model_configs import spec_from_config
from mamba_checkpoint_cache.plan import named_config
from mamba_checkpoint_cache.pools import ActivePool, CheckpointPool
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.progress import Advance, progress
from mamba_checkpoint_cache.slots import ActiveSlot

BLOCK_TOKENS = 512
"""Tokens that one id of the recording stands for."""
MODEL = "Qwen3-Next-80B-A3B"
MEMORY_GIB = (8, 16, 32, 64)
ARMS = ("none", BASELINE, DEFAULT_CODEC)
"""What is compared: native states, the peer's format and the default."""


class Recorded(NamedTuple):
    """A prompt of a recording: its length, and an id for each block of 512 tokens, the last of which may be cut short."""

    num_tokens: int
    blocks: list[int]


def replay_trace(path: Path) -> dict[str, Any]:
    """``rows`` of the reused share of prompt tokens, by :data:`ARMS` and the bytes of a pool for the states of a released model.

    ``path`` is in the format of Mooncake's traces: lines of JSON with ``input_length`` and ``hash_ids``. Each prompt is matched,
    then checkpointed at its branch point and at its last whole block. There is no KV side: states alone limit what is reused.
    The cache sees one token per block, which changes no decision, since prompts have whole blocks in common or nothing.

    Raises:
        OptionError: if there is no such file, or it is in another format.
    """
    recording = list(read_recording(path))
    spec = spec_from_config(named_config(MODEL)[1], state_dtype=torch.float32, conv_dtype=torch.bfloat16)
    rows = []
    with progress("recorded requests", len(recording) * len(MEMORY_GIB) * len(ARMS)) as advance:
        for gib in MEMORY_GIB:
            row: dict[str, Any] = {"pool_bytes": gib * 2**30}
            for codec in ARMS:
                slots = CheckpointPool.slots_for(spec, codec, row["pool_bytes"])
                row[codec] = {"slots": slots, "reused_share": reused_share(recording, slots, advance)}
            rows.append(row)
    return {"model": MODEL, "requests": len(recording), "rows": rows}


def read_recording(path: Path) -> Iterator[Recorded]:
    """The prompts of a recording. Raises :class:`OptionError` as :func:`replay_trace` does."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"can't read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            yield Recorded(int(record["input_length"]), list(record["hash_ids"]))
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{path}, line {number}: expected JSON with input_length and hash_ids") from error


def reused_share(recording: list[Recorded], slots: int, advance: Advance) -> float:
    """The share of prompt tokens that a pool of ``slots`` checkpoints would have saved."""
    active = ActivePool(TINY, 1)
    cache = PrefixCache(active=active, checkpoints=CheckpointPool(TINY, slots, codec=NoCodec()))
    slot = cast(ActiveSlot, active.allocate())
    reused = 0
    for num_tokens, blocks in recording:
        match = cache.match_prefix(blocks)
        reused += match.depth * BLOCK_TOKENS
        cache.restore(match, slot)
        for depth in (match.branch_depth, num_tokens // BLOCK_TOKENS):
            if depth:
                active.advance(slot, depth=depth)
                cache.commit(blocks, depth=depth, source=slot, lease=match)
        cache.release(match)
        advance(1)
    return reused / sum(recorded.num_tokens for recorded in recording)

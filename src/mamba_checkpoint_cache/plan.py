"""How many checkpoints of a model fit a memory budget, in native dtype and compressed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from mamba_checkpoint_cache.codec import get_codec
from mamba_checkpoint_cache.known_models import KNOWN_MODELS
from mamba_checkpoint_cache.pools import CheckpointPool
from mamba_checkpoint_cache.state import StateSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of the dtypes that a state or conv window may have."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


class PlanError(ValueError):
    """A budget that holds no checkpoint, a model that can't be found, a codec that does not fit; the message says what would."""


def parse_bytes(text: str) -> int:
    """Bytes of a size as people write it: ``8GiB``, ``512MiB``, ``1.5GB``, ``1048576``. Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write a number of bytes, or a unit as in 8GiB, 512MiB, 8GB")
    return int(Fraction(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of one slot and slots of one pool, conv windows counted and the pool's padding row paid for.

    A cache with a drift guard takes one compressed state more, beside the pool: it is not counted here.
    """

    model: str
    spec: StateSpec
    codec: str
    memory_bytes: int
    native_bytes: int
    checkpoint_bytes: int
    native_slots: int
    checkpoint_slots: int

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        conv = self.spec.side[0]
        return {
            "model": self.model,
            "codec": self.codec,
            "state_shape": list(self.spec.shape),
            "state_dtype": _dtype_name(self.spec.dtype),
            "conv_shape": list(conv.shape),
            "conv_dtype": _dtype_name(conv.dtype),
            "memory_bytes": self.memory_bytes,
            "native_bytes": self.native_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "native_slots": self.native_slots,
            "checkpoint_slots": self.checkpoint_slots,
        }


def plan(model: str, spec: StateSpec, *, codec: str, memory_bytes: int) -> Plan:
    """The most slots whose pool fits ``memory_bytes``, native and with ``codec``.

    Raises:
        PlanError: if there is no such codec for ``spec``, or not even one compressed slot fits beside the padding row.
    """
    try:
        codec = get_codec(codec, torch.device("cpu"), spec.num_layers).name
    except ValueError as error:
        raise PlanError(str(error)) from error
    checkpoint_bytes = CheckpointPool.bytes_per_slot_for(spec, codec)
    native_bytes = CheckpointPool.bytes_per_slot_for(spec, "none")
    checkpoint_slots = CheckpointPool.slots_for(spec, codec, memory_bytes)
    if checkpoint_slots < 1:
        raise PlanError(
            f"{memory_bytes:,} bytes hold no checkpoint of {model}: one slot needs {checkpoint_bytes:,} bytes "
            f"and the pool as much again for its padding row, {2 * checkpoint_bytes:,} in all"
        )
    return Plan(
        model=model,
        spec=spec,
        codec=codec,
        memory_bytes=memory_bytes,
        native_bytes=native_bytes,
        checkpoint_bytes=checkpoint_bytes,
        native_slots=max(0, CheckpointPool.slots_for(spec, "none", memory_bytes)),
        checkpoint_slots=checkpoint_slots,
    )


def named_config(name: str) -> tuple[str, Mapping[str, Any]]:
    """A released model's name as its makers write it, and its config; the case of ``name`` doesn't matter.

    Raises:
        PlanError: for a model that is not known, with the names that are.
    """
    for known, config in KNOWN_MODELS.items():
        if known.lower() == name.lower():
            return known, config
    raise PlanError(f"unknown model {name!r}: give its config.json with --config, or one of {', '.join(KNOWN_MODELS)}")


def read_config(path: Path) -> Mapping[str, Any]:
    """What a model's ``config.json`` holds.

    Raises:
        PlanError: if the file can't be read or is not a JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path} holds no JSON object")
    return config


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)

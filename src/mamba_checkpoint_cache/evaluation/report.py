"""The report: what was measured, as JSON has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mamba_checkpoint_cache.codec import Codec
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.evaluation import figures, tasks
from mamba_checkpoint_cache.evaluation.arms import RECHUNKED, ArmKey
from mamba_checkpoint_cache.evaluation.divergence import MAX_TOKENS
from mamba_checkpoint_cache.evaluation.lockstep import STEP, Trial
from mamba_checkpoint_cache.evaluation.measure import Measurement
from mamba_checkpoint_cache.evaluation.noise import Bf16Codec
from mamba_checkpoint_cache.evaluation.verdict import Control, verdict
from mamba_checkpoint_cache.integrations.transformers import HybridModel
from mamba_checkpoint_cache.pools import CheckpointPool
from mamba_checkpoint_cache.serving.tokens import Tokens
from mamba_checkpoint_cache.state import StateSpec

NATIVE_SLOTS = 100
"""Checkpoints in native dtype whose memory the codecs' slots are counted in."""

Result = dict[str, Any]
"""See :func:`report`."""


def report(name: str, model: HybridModel, tokens: Tokens, found: Measurement, budget: DriftBudget) -> Result:
    """The figures of a measurement; those that are not finite become None.

    - ``rows``: by codec, task, hops and distance: see :func:`figures.drift`; ``bits_per_element`` is of the recurrent state.
    - ``recall``, ``bits_per_byte``: by codec, cached against uncached; empty where a task or the bytes of a token are not known.
    - ``method``: ``step`` tokens between restores, ``window`` positions averaged at a distance; for each of ``tasks`` the number
      of ``prompts`` and the ``depth`` at which their state was restored.
    - ``noise``: mean KL of computing the prefix again in other chunks, and of bfloat16 checkpoints; ``rows`` by distance.
    - ``agreement``, ``divergence``, ``state_error``, ``capacity``: by codec.
    - ``verdict``: see :func:`verdict`. ``notes``: what could not be done, for people.
    """
    spec, codecs = model.spec, found.codecs
    everything = [trial for trials in found.trials.values() for trial in trials]
    rows = [
        row for codec in codecs.values() for task, trials in found.trials.items() for row in drift_rows(codec, task, trials, spec)
    ]
    bits = {codec: tasks.bits_per_byte(_texts(found), codec, tokens) for codec in codecs if _texts(found)}
    asked = found.trials.get("recall", [])
    control = Control(model.continuation.bitwise, figures.largest_kl(everything, "none")) if "none" in codecs else None
    result = {
        "model": name,
        "state": {"layers": list(model.layout.state_layers), "shape": list(spec.shape), "dtype": _name(spec.dtype)},
        "method": {
            "step": STEP,
            "window": figures.WINDOW,
            "tasks": {task: {"prompts": len(t), "depth": t[0].prompt.depth} for task, t in found.trials.items()},
        },
        "rows": rows,
        "recall": {codec: tasks.recall(asked, codec) for codec in codecs if asked},
        "bits_per_byte": {codec: figure for codec, figure in bits.items() if figure is not None},
        "noise": _noise(found.trials, everything),
        "agreement": {codec: figures.agreement(everything, codec) for codec in codecs},
        "divergence": {codec: _divergence(counts) for codec, counts in found.alike.items()},
        "state_error": {codec: _state_error(everything, codec) for codec in codecs},
        "capacity": {codec.name: _capacity(spec, codec) for codec in (*codecs.values(), Bf16Codec())},
        "verdict": verdict(rows, budget, control),
    }
    written: Result = finite(result)
    return written


def drift_rows(codec: Codec, task: str, trials: Sequence[Trial], spec: StateSpec) -> list[Result]:
    """The rows of one codec and task: see :func:`report`."""
    bits, rows = bits_per_element(spec, codec), []
    for hops, distance in figures.points():
        if figure := figures.drift(trials, codec.name, hops, distance):
            row = {"codec": codec.name, "task": task, "bits_per_element": bits, "distance": distance, "hops": hops}
            rows.append(row | figure)
    return rows


def _noise(by_task: Mapping[str, Sequence[Trial]], everything: Sequence[Trial]) -> Result:
    sources = {"rechunk": RECHUNKED, "bf16": ArmKey(Bf16Codec.name)}
    rows = [
        {"source": source, "task": task, "distance": distance, "kl_mean": figure["kl_mean"]}
        for source, key in sources.items()
        for task, trials in by_task.items()
        for distance in figures.DISTANCES
        if (figure := figures.drift(trials, key.name, 1, distance))
    ]
    return {f"{source}_kl": figures.mean_kl(everything, key) for source, key in sources.items()} | {"rows": rows}


def _divergence(counts: Sequence[int]) -> Result:
    same = sum(count >= MAX_TOKENS for count in counts)
    return {"max_tokens": MAX_TOKENS, "prompts": len(counts), "same": same, "shortest": min(counts), "tokens": list(counts)}


def _state_error(trials: Sequence[Trial], codec: str) -> list[list[float]]:
    found: list[list[float]] = figures.head_errors([trial.arms[ArmKey(codec)].energies[0] for trial in trials]).tolist()
    return found


def _capacity(spec: StateSpec, codec: Codec) -> Result:
    memory = (NATIVE_SLOTS + 1) * CheckpointPool.bytes_per_slot_for(spec, "none")
    return {
        "bytes_per_checkpoint": CheckpointPool.bytes_per_slot_for(spec, codec),
        "bits_per_element": bits_per_element(spec, codec),
        "slots": CheckpointPool.slots_for(spec, codec, memory),
        "native_slots": NATIVE_SLOTS,
    }


def bits_per_element(spec: StateSpec, codec: Codec) -> float:
    """Bits that the codec takes for an element of the recurrent state, its scales and the like included."""
    return 8 * codec.bytes_per_slot(spec) / math.prod(spec.shape)


def _texts(found: Measurement) -> list[Trial]:
    return [trial for trials in found.trials.values() for trial in trials if not trial.prompt.answers]


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def finite(value: Any) -> Any:
    """The same as JSON can have it: what is no finite number is None, and tuples are lists."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

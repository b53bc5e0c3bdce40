"""What a restored state costs where there is a right answer: recall, and the text's own next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mamba_checkpoint_cache.evaluation.arms import ArmKey
from mamba_checkpoint_cache.evaluation.lockstep import Trace, Trial
from mamba_checkpoint_cache.evaluation.statistics import bootstrap_interval, wilson_interval
from mamba_checkpoint_cache.serving.tokens import ByteTokens, Tokens
from mamba_checkpoint_cache.small_models.text import END_OF_TEXT

_NO_TEXT = "\N{REPLACEMENT CHARACTER}"


def recall(trials: Sequence[Trial], name: str) -> dict[str, Any]:
    """Shares of keys that are answered with their value, from the restored state and without a cache.

    ``ci``: Wilson's interval of ``cached``. ``difference_ci``: the bootstrap interval over prompts of cached minus uncached, each
    pair on the same questions.
    """
    cached = [_answered(trial, trial.arms[ArmKey(name)]) for trial in trials]
    uncached = [_answered(trial, trial.reference) for trial in trials]
    asked = sum(len(trial.prompt.answers) for trial in trials)
    differences = [(c - u) / len(t.prompt.answers) for c, u, t in zip(cached, uncached, trials, strict=True)]
    return {
        "cached": sum(cached) / asked,
        "uncached": sum(uncached) / asked,
        "ci": wilson_interval(sum(cached), asked),
        "difference_ci": bootstrap_interval(differences),
        "asked": asked,
    }


def bits_per_byte(trials: Sequence[Trial], name: str, tokens: Tokens) -> dict[str, Any] | None:
    """Bits that the model needs for a byte of each prompt's continuation, from the restored state and without a cache.

    ``difference_ci``: the bootstrap interval over prompts of cached minus uncached. Prompts whose tokens don't decode to whole
    characters are left out, as their length in bytes is not known; None if no other is left.
    """
    scored = [(trial, token_bytes(tokens, trial.prompt.tokens[trial.prompt.depth + 1 :])) for trial in trials]
    known = [(trial, length) for trial, length in scored if length]
    if not known:
        return None
    total = sum(length for _, length in known)
    cached = [_bits(trial.arms[ArmKey(name)]) for trial, _ in known]
    uncached = [_bits(trial.reference) for trial, _ in known]
    differences = [(c - u) / length for c, u, (_, length) in zip(cached, uncached, known, strict=True)]
    return {
        "cached": sum(cached) / total,
        "uncached": sum(uncached) / total,
        "difference_ci": bootstrap_interval(differences),
        "bytes": total,
        "prompts": len(known),
    }


def token_bytes(tokens: Tokens, ids: Sequence[int]) -> int | None:
    """Bytes of text behind ``ids``; None if they don't decode to whole characters."""
    if isinstance(tokens, ByteTokens):
        return sum(i < END_OF_TEXT for i in ids)
    text = tokens.decode(ids)
    return None if _NO_TEXT in text else len(text.encode())


def _answered(trial: Trial, trace: Trace) -> int:
    places = torch.tensor(trial.prompt.answers) - trial.prompt.depth - 1
    return int(trace.right[places].sum())


def _bits(trace: Trace) -> float:
    return float(trace.loss_nats.sum()) / math.log(2)

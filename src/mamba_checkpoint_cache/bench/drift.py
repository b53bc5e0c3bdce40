"""How far each format drifts, in logits and against int8: all models that ship, text and recall, by distance and hops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mamba_checkpoint_cache.bench.one_thread import one_thread
from mamba_checkpoint_cache.codec import CODEC_NAMES, Codec, get_codec
from mamba_checkpoint_cache.codec.reference import Int8Codec
from mamba_checkpoint_cache.evaluation.arms import ArmKey
from mamba_checkpoint_cache.evaluation.figures import DISTANCES, HOPS
from mamba_checkpoint_cache.evaluation.lockstep import STEP, Lockstep, Trial
from mamba_checkpoint_cache.evaluation.noise import Bf16Codec
from mamba_checkpoint_cache.evaluation.options import EvalOptions
from mamba_checkpoint_cache.evaluation.prompts import Prompt, built_in_recall, text_prompts
from mamba_checkpoint_cache.evaluation.report import bits_per_element, drift_rows, finite
from mamba_checkpoint_cache.evaluation.statistics import bootstrap_interval
from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.serving.models import load_model
from mamba_checkpoint_cache.serving.progress import progress
from mamba_checkpoint_cache.serving.tokens import Tokens
from mamba_checkpoint_cache.small_models import SMALL_MODELS
from mamba_checkpoint_cache.small_models.recall import DEFAULT_PAIRS
from mamba_checkpoint_cache.state import StateSpec

BASELINE = Int8Codec.name
"""The format that all others are compared with."""
DISTANCE = DISTANCES[-1]
"""Tokens of every prompt after the restore."""
ROUNDS = DISTANCE // (2 * DEFAULT_PAIRS)
"""How often a recall prompt asks for each key, so that it is as long as a text."""
SPANS = ((1, DISTANCE), (1, STEP), (HOPS[-1], STEP))
"""``(hops, tokens)`` of the ratios: see :func:`run`."""
BOTH = "both"
"""Stands for all tasks of a model together."""

Row = dict[str, Any]


def run(*, prompt_count: int = EvalOptions().prompt_count) -> dict[str, Any]:
    """Every format, and a cast to bfloat16 (``bf16``), on ``prompt_count`` prompts of each task.

    - ``rows``: by ``model``, ``task``, ``format``, ``hops`` and ``distance``; ``bits_per_element`` is at the model's own shape,
      the figures are those of :func:`evaluation.figures.drift`.
    - ``ratios``: by ``model``, ``task``, ``format``, ``hops`` and ``tokens``: ``kl_mean`` (nats) over the first so many tokens
      after the last of so many restores, and all prompts; its ``ratio`` to that of int8 over the very same tokens, with the 95 %
      interval ``ratio_ci``, for which prompts are drawn for both alike. One restore counts with all 256 tokens that follow it,
      and with the first 16; 16 restores, one every 16 tokens, with the 16 tokens after the last, which is as far from it as the
      first 16 are from one. Task ``both`` is the mean of the two tasks, whose prompts are equally many and long; it is of KL,
      not of ratios, so that the task that drifts more weighs more.
    - ``formats``: bits per element of each at ``d_v = d_k = 128``, for float32 and bfloat16 states.
    - ``baseline``, ``prompt_count``, and the ``seconds`` that it took.

    Recall prompts ask for every key several times, each time in another order, to be as long as texts. What is no finite number,
    as a ratio to no drift at all, is None.

    Raises:
        OptionError: if ``prompt_count`` is less than 1.
    """
    options, started = EvalOptions(prompt_count=prompt_count), time.perf_counter()
    rows: list[Row] = []
    ratios: list[Row] = []
    with one_thread(), progress("prompts", 2 * len(SMALL_MODELS) * prompt_count) as advance:
        for name in SMALL_MODELS:
            loaded = load_model(name)
            model = prepare_model(loaded.model)
            codecs = _codecs(model.device)
            lockstep = Lockstep(model, codecs, longest=options.prefix_tokens + DISTANCE)
            trials = _trials(lockstep, _prompts(loaded.tokens, options), advance)
            for task, found in trials.items():
                for codec in codecs:
                    rows += ({"model": name} | _as_format(row) for row in drift_rows(codec, task, found, model.spec))
            ratios += ({"model": name} | ratio for ratio in _ratios(trials, [codec.name for codec in codecs]))
    result: dict[str, Any] = finite(
        {
            "baseline": BASELINE,
            "prompt_count": prompt_count,
            "seconds": time.perf_counter() - started,
            "formats": [_sizes(codec) for codec in _codecs(torch.device("cpu"))],
            "ratios": ratios,
            "rows": rows,
        }
    )
    return result


def _codecs(device: torch.device) -> list[Codec]:
    return [*(get_codec(name, device) for name in CODEC_NAMES), Bf16Codec()]


def _prompts(tokens: Tokens, options: EvalOptions) -> list[Prompt]:
    count, depth = options.prompt_count, options.prefix_tokens
    return [
        *text_prompts(tokens, count=count, depth=depth, longest=depth + DISTANCE),
        *built_in_recall(count, rounds=ROUNDS),
    ]


def _trials(lockstep: Lockstep, prompts: Sequence[Prompt], advance: Callable[[int], None]) -> dict[str, list[Trial]]:
    trials: dict[str, list[Trial]] = {}
    for prompt in prompts:
        trials.setdefault(prompt.task, []).append(lockstep.run(prompt))
        advance(1)
    return trials


def _as_format(row: Row) -> Row:
    return {"task": row["task"], "format": row["codec"]} | {key: row[key] for key in row if key not in {"task", "codec"}}


def _ratios(trials: Mapping[str, Sequence[Trial]], formats: Sequence[str]) -> Iterator[Row]:
    for task in (*trials, BOTH):
        for name in formats:
            for hops, tokens in SPANS:
                kl, base = (_kl(trials, task, codec, hops, tokens) for codec in (name, BASELINE))
                yield {
                    "task": task,
                    "format": name,
                    "hops": hops,
                    "tokens": tokens,
                    "kl_mean": float(kl.mean()),
                    "ratio": float(kl.mean() / base.mean()),
                    "ratio_ci": bootstrap_interval(kl.tolist(), over=base.tolist()),
                }


def _kl(trials: Mapping[str, Sequence[Trial]], task: str, name: str, hops: int, tokens: int) -> Tensor:
    """The mean KL of each prompt; of ``BOTH``, the mean over the tasks' prompts of the same number."""
    if task == BOTH:
        return torch.stack([_kl(trials, one, name, hops, tokens) for one in trials]).mean(0)
    begin, key = (hops - 1) * STEP, ArmKey(name, again=hops > 1)
    return torch.stack([trial.arms[key].kl_nats[begin : begin + tokens].mean() for trial in trials[task]])


def _sizes(codec: Codec) -> Row:
    specs = {name: StateSpec(1, 1, 128, 128, dtype) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
    return {"format": codec.name} | {f"bits_{name}_128": bits_per_element(spec, codec) for name, spec in specs.items()}

"""One drift report: load the model, measure, report, and write the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mamba_checkpoint_cache.evaluation import figures
from mamba_checkpoint_cache.evaluation.measure import measure, steps_of
from mamba_checkpoint_cache.evaluation.options import EvalOptions
from mamba_checkpoint_cache.evaluation.prompts import Prompt, built_in_recall, file_prompts, read_file, text_prompts
from mamba_checkpoint_cache.evaluation.report import report
from mamba_checkpoint_cache.integrations.continuation import Mode
from mamba_checkpoint_cache.integrations.layout import UnsupportedModelError
from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.integrations.transformers import HybridModel
from mamba_checkpoint_cache.serving.models import LoadedModel, load_model
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.progress import progress
from mamba_checkpoint_cache.small_models import SMALL_MODELS

SMALL_MODEL = 50_000_000
"""Parameters up to which a second thread costs more than it brings."""


def run(options: EvalOptions) -> dict[str, Any]:
    """The report of :func:`report`, with ``notes``: what was not measured and why. Writes the page if there is to be one.

    Raises:
        OptionError: if the model can't be loaded or continued, the prompts don't do, or the page can't be written.
    """
    if options.html is not None:
        from mamba_checkpoint_cache.evaluation.page import page, write_page  # plotting is an extra

        write_page(options.html, "")  # what can't be written is said before the work
    text = None if options.prompts is None else read_file(options.prompts)
    loaded = load_model(options.model)
    prompts = _prompts(options, text, loaded)
    with _threads(loaded), progress("prompts", steps_of(prompts)) as advance:
        try:
            model = prepare_model(loaded.model)
            found = measure(model, prompts, options.codecs, advance)
        except UnsupportedModelError as error:
            raise OptionError(f"{loaded.name} can't be evaluated: {error}") from error
    result = report(loaded.name, model, loaded.tokens, found, options.budget)
    result["notes"] = _notes(options, model, prompts, result)
    if options.html is not None:
        write_page(options.html, page(result))
    return result


def _prompts(options: EvalOptions, text: str | None, loaded: LoadedModel) -> list[Prompt]:
    count, depth = options.prompt_count, options.prefix_tokens
    if depth >= loaded.max_context:
        raise OptionError(f"prefix_tokens must be below the {loaded.max_context} tokens that {loaded.name} can take, got {depth}")
    longest = min(depth + figures.DISTANCES[-1], loaded.max_context)
    if options.prompts is not None and text is not None:
        return file_prompts(options.prompts, text, loaded.tokens, count=count, depth=depth, longest=longest)
    prompts = text_prompts(loaded.tokens, count=count, depth=depth, longest=longest)
    return [*prompts, *built_in_recall(count)] if options.model in SMALL_MODELS else prompts


def _notes(options: EvalOptions, model: HybridModel, prompts: Sequence[Prompt], result: dict[str, Any]) -> list[str]:
    notes, wanted = [], options.prefix_tokens + figures.DISTANCES[-1]
    texts = [prompt for prompt in prompts if not prompt.answers]
    short = sum(len(prompt.tokens) < wanted for prompt in texts)
    if model.continuation.mode is not Mode.CHUNKS or not model.continuation.bitwise:
        notes.append(model.continuation.message)
    if not model.continuation.bitwise:
        notes.append("This model does not go on bit for bit even from an exact copy of its state, so that the control is not 0.")
    if short:
        reached = max(len(prompt.tokens) for prompt in texts) - options.prefix_tokens
        dropped = [distance for distance in figures.DISTANCES if distance > reached]
        without = f"; none reaches {_list(dropped)} tokens after the restore" if dropped else ""
        notes.append(
            f"{short} of {len(texts)} prompts have less than the {wanted} tokens that all distances need, and count only where "
            f"they reach{without}."
        )
    if len(prompts) == len(texts):
        notes.append("Recall was not measured: it needs the built-in prompts and a model that ships with this package.")
    if options.prompts is None and options.model not in SMALL_MODELS:
        notes.append("The built-in prompts are Python source: give prompts of your own traffic for an answer about your traffic.")
    if len(result["bits_per_byte"]) < len(options.codecs):
        notes.append("Bits per byte were not measured: no prompt's tokens decode to whole characters.")
    if model.spec.dtype == torch.bfloat16:
        notes.append("The state is bfloat16 already, so that bf16 checkpoints are exact.")
    if "none" not in options.codecs:
        notes.append("The control was left out: only with codec none does the report show that its instrument is exact.")
    return notes


@contextmanager
def _threads(loaded: LoadedModel) -> Iterator[None]:
    """One thread for a small model; torch's choice for others."""
    before = torch.get_num_threads()
    if sum(parameter.numel() for parameter in loaded.model.parameters()) <= SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _list(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))

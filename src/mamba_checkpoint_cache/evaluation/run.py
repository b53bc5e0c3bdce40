"""One drift report: load the model, measure, report, and write the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mamba_checkpoint_cache.codec import Codec, get_codec
from mamba_checkpoint_cache.evaluation import figures
from mamba_checkpoint_cache.evaluation.measure import measure, steps_of
from mamba_checkpoint_cache.evaluation.options import EvalOptions
from mamba_checkpoint_cache.evaluation.per_layer import per_layer
from mamba_checkpoint_cache.evaluation.prompts import Prompt, built_in_recall, file_prompts, read_file, text_prompts
from mamba_checkpoint_cache.evaluation.report import finite, report
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
    """The report of :func:`report`, with ``per_layer`` and ``notes``. Writes the page if there is to be one.

    ``per_layer`` has the result of :func:`per_layer` by codec, and nothing unless that was asked for; ``notes`` say what was not
    measured and why.

    Raises:
        OptionError: if the model can't be loaded or continued, the prompts don't do, or the page can't be written.
    """
    if options.html is not None:
        from mamba_checkpoint_cache.evaluation.page import page, write_page  # plotting is an extra

        write_page(options.html, "")  # what can't be written is said before the work
    text = None if options.prompts is None else read_file(options.prompts)
    loaded = load_model(options.model)
    prompts = _prompts(options, text, loaded)
    with _threads(loaded):
        try:
            model = prepare_model(loaded.model)
        except UnsupportedModelError as error:
            raise OptionError(f"{loaded.name} can't be evaluated: {error}") from error
        codecs = _codecs(options, model)
        with progress("prompts", steps_of(prompts)) as advance:
            found = measure(model, prompts, codecs, advance)
        layers = _per_layer(options, model, prompts, codecs)
    result = report(loaded.name, model, loaded.tokens, found, options.budget) | {"per_layer": layers}
    result["notes"] = _notes(options, model, prompts, result)
    if options.html is not None:
        write_page(options.html, page(result))
    return result


def _codecs(options: EvalOptions, model: HybridModel) -> list[Codec]:
    try:
        codecs = {name: get_codec(name, model.device, model.spec.num_layers) for name in options.codecs}
    except ValueError as error:
        raise OptionError(str(error)) from error
    first: dict[str, str] = {}
    for name, codec in codecs.items():
        if first.setdefault(codec.name, name) != name:
            raise OptionError(f"expected codecs, each once, but {first[codec.name]!r} and {name!r} are the same for this model")
    return list(codecs.values())


def _per_layer(
    options: EvalOptions, model: HybridModel, prompts: Sequence[Prompt], codecs: Sequence[Codec]
) -> dict[str, dict[str, Any]]:
    lossy = [codec for codec in codecs if codec.lossy]
    if options.per_layer is None or not lossy:
        return {}
    with progress("prompts, layer by layer", 2 * len(prompts) * len(lossy)) as advance:
        found = {codec.name: per_layer(model, prompts, codec, options.per_layer, options.budget, advance) for codec in lossy}
    written: dict[str, dict[str, Any]] = finite(found)
    return written


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

"""What is served: a model of the transformers library from a folder or the hub, or a small one that ships with the package."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.tokens import ByteTokens, LibraryTokens, Tokens
from mamba_checkpoint_cache.small_models import SMALL_MODELS

MAX_CONTEXT = 8192
"""Tokens of the longest request that is served, whatever the model could do."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, and the name it is served under."""

    name: str
    model: PreTrainedModel
    tokens: Tokens
    max_context: int


def load_model(path: str) -> LoadedModel:
    """The model in a folder, of the small ones that ship, or on the hub. A folder without a tokenizer gets byte tokens.

    Raises:
        OptionError: if there is no model there that can be loaded, or no tokenizer that fits it.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()  # type: ignore[no-untyped-call] # the caller has one of its own
    path = str(SMALL_MODELS.get(path, path))
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        tokens = _tokens(path, model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise OptionError(f"can't load a model from {path}: {_first_line(error)}") from error
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or MAX_CONTEXT
    return LoadedModel(Path(path).name or path, model, tokens, min(longest, MAX_CONTEXT))


def _tokens(path: str, model: PreTrainedModel) -> Tokens:
    embeddings: Any = model.get_input_embeddings()
    vocab_size: int = embeddings.weight.shape[0]
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")):
        if vocab_size != ByteTokens.vocab_size:
            needed = f"byte tokens need a vocabulary of {ByteTokens.vocab_size}, but this model has {vocab_size}"
            raise OptionError(f"{path} has no tokenizer, and {needed}")
        return ByteTokens()
    tokenizer = AutoTokenizer.from_pretrained(path)
    return LibraryTokens(tokenizer, vocab_size, _eos_ids(model, tokenizer.eos_token_id))


def _eos_ids(model: PreTrainedModel, of_tokenizer: int | None) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    of_model = getattr(generation, "eos_token_id", None)
    ids = of_model if isinstance(of_model, list) else [of_model]
    return frozenset(i for i in (*ids, of_tokenizer) if i is not None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

"""What is served: a model of the transformers library from a folder or the hub, or a small one with random weights."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.tokens import END_OF_TEXT, ByteTokens, LibraryTokens, Tokens

MAX_CONTEXT = 8192
"""Tokens of the longest request that is served, whatever the model could do."""
RANDOM_MODEL = "random-gdn-hybrid"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, the name it is served under, and whether its weights were ever trained."""

    name: str
    model: PreTrainedModel
    tokens: Tokens
    max_context: int
    trained: bool


def load_model(path: str | None) -> LoadedModel:
    """The model in a folder or on the hub; None is the random one. A folder without a tokenizer gets byte tokens.

    Raises:
        OptionError: if there is no model there that can be loaded, or no tokenizer that fits it.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if path is None:
        return LoadedModel(RANDOM_MODEL, build_random_model(), ByteTokens(), MAX_CONTEXT, trained=False)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        tokens = _tokens(path, model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise OptionError(f"can't load a model from {path}: {_first_line(error)}") from error
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or MAX_CONTEXT
    return LoadedModel(Path(path).name or path, model, tokens, min(longest, MAX_CONTEXT), trained=True)


def build_random_model(
    *,
    head_dim: int = 64,
    num_heads: int = 4,
    hidden_size: int = 128,
    layers: tuple[str, ...] = ("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    vocab_size: int = ByteTokens.vocab_size,
    seed: int = 0,
) -> PreTrainedModel:
    """A small Qwen3.5: gated delta nets with ``num_heads`` states of ``head_dim x head_dim`` in fp32, and full attention.

    The same weights for the same arguments. They are random, but the layers remember: their time steps are drawn as the papers
    draw them, where the library's own start value makes a layer forget within a token.
    """
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=len(layers),
        layer_types=list(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        linear_num_key_heads=max(1, num_heads // 2),
        linear_num_value_heads=num_heads,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=hidden_size**-0.5,
        eos_token_id=END_OF_TEXT,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = Qwen3_5ForCausalLM(config)
        for module in model.modules():
            _draw_time_steps(module)
    model.train(mode=False)
    return model


@torch.no_grad()
def _draw_time_steps(module: nn.Module) -> None:
    """Set ``dt_bias`` to the inverse softplus of time steps that are log-uniform in [0.001, 0.1]."""
    bias = getattr(module, "dt_bias", None)
    if isinstance(bias, nn.Parameter):
        steps = torch.exp(torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1)))
        bias.copy_(steps + torch.log(-torch.expm1(-steps)))


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

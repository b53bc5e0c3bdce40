"""The transformers classes behind the small models, with weights drawn so that a layer remembers before it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

from mamba_checkpoint_cache.small_models.text import END_OF_TEXT

VOCAB_SIZE = END_OF_TEXT + 1
MAX_CONTEXT = 8192
ATTENTION_HEADS, KV_HEADS, ATTENTION_HEAD_DIM = 4, 2, 32


def build_gdn_hybrid(
    *,
    head_dim: int = 64,
    num_heads: int = 2,
    hidden_size: int = 128,
    layers: tuple[str, ...] = ("full_attention", "linear_attention", "linear_attention", "linear_attention"),
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
) -> PreTrainedModel:
    """A Qwen3.5: gated delta nets with ``num_heads`` states of ``head_dim x head_dim`` in fp32, and full attention.

    The weights are random, the same for the same arguments. Attention comes first, where it can't look up by itself what the
    recurrent states are to remember.
    """
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=len(layers),
        layer_types=list(layers),
        num_attention_heads=ATTENTION_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=ATTENTION_HEAD_DIM,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        linear_num_key_heads=num_heads,
        linear_num_value_heads=num_heads,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=hidden_size**-0.5,
        tie_word_embeddings=True,
        eos_token_id=END_OF_TEXT,
    )
    return _draw(lambda: Qwen3_5ForCausalLM(config), seed)


def build_mamba2_hybrid(*, hidden_size: int = 128, seed: int = 0) -> PreTrainedModel:
    """A dense Granite-4-H: an attention layer without positions, then three Mamba-2 layers with fp32 states of 64 x 32 per head.

    The weights are random, the same for the same arguments.
    """
    config = GraniteMoeHybridConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        shared_intermediate_size=2 * hidden_size,
        layer_types=["attention", "mamba", "mamba", "mamba"],
        num_hidden_layers=4,
        num_attention_heads=ATTENTION_HEADS,
        num_key_value_heads=KV_HEADS,
        attention_multiplier=ATTENTION_HEAD_DIM**-0.5,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=2 * hidden_size // 64,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_chunk_size=64,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=hidden_size**-0.5,
        tie_word_embeddings=True,
        eos_token_id=END_OF_TEXT,
    )
    return _draw(lambda: GraniteMoeHybridForCausalLM(config), seed)


def _draw(build: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        for module in model.modules():
            _draw_time_steps(module)
            if isinstance(module, GraniteMoeHybridMambaLayer):
                _associate(module)
    model.train(mode=False)
    return model


@torch.no_grad()
def _draw_time_steps(module: nn.Module) -> None:
    """Set ``dt_bias`` to the inverse softplus of time steps that are log-uniform in [0.001, 0.1], as the papers draw them.

    The library's own start value makes a layer forget within a token, and then it never learns to remember.
    """
    bias = getattr(module, "dt_bias", None)
    if isinstance(bias, nn.Parameter):
        steps = torch.exp(torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1)))
        bias.copy_(steps + torch.log(-torch.expm1(-steps)))


@torch.no_grad()
def _associate(layer: Any) -> None:
    """Make a Mamba-2 layer an associative memory from the start, which otherwise takes it thousands of steps to find.

    The conv window hands B the token before and C and x the current one, and B and C project alike: what follows a token is
    written under that token, and found when it comes again. It is the shift of H3 (arXiv 2212.14052). Without the skip (D = 0)
    all that the layer says comes out of its state.
    """
    width, keys = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
    b_channels, c_channels = slice(width, width + keys), slice(width + keys, width + 2 * keys)
    projected = layer.in_proj.weight[width:]  # behind the gate: x, B, C, time steps
    projected[c_channels] = projected[b_channels]
    taps = layer.conv1d.weight[:, 0]  # the last one is the current token's
    taps.zero_()
    taps[:, -1] = 1.0
    taps[b_channels] = taps[b_channels].roll(-1, dims=-1)
    layer.conv1d.bias.zero_()
    layer.D.zero_()

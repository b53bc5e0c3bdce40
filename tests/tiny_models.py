"""Tiny seeded models of every class that the transformers integration is tested with, each under a million parameters.

Their weights are random, but a layer remembers: ``dt`` is spread over [0.001, 0.1], where the library's own initialisation
makes most layers forget within a token and every test of a state blind. Routers choose all experts: with fewer, a rounding
error can tip one over, and what follows says nothing about the state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedModel

from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.integrations.transformers import HybridModel

VOCAB = 97
_COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 4096}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "head_dim": 16,
}
_MAMBA2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def _config(prefix: str, **fields: object) -> PreTrainedModel:
    config = getattr(transformers, f"{prefix}Config")(**(_COMMON | fields))
    return getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_5": lambda: _config("Qwen3_5Text", **_ATTENTION, **_DELTA),
    "qwen3_next": lambda: _config("Qwen3Next", **_ATTENTION, **_DELTA, **_EXPERTS),
    "olmo_hybrid": lambda: _config("OlmoHybrid", **_ATTENTION, **{k: v for k, v in _DELTA.items() if k != "head_dim"}),
    "mamba2": lambda: _config(
        "Mamba2", num_hidden_layers=3, hidden_size=48, num_heads=6, head_dim=16, state_size=24, n_groups=2, chunk_size=16
    ),
    "mamba": lambda: _config("Mamba", num_hidden_layers=3, hidden_size=48, state_size=8),
    "falcon_mamba": lambda: _config("FalconMamba", num_hidden_layers=3, hidden_size=48, state_size=8),
    "falcon_h1": lambda: _config("FalconH1", **_ATTENTION, **_MAMBA2, num_hidden_layers=3, hidden_size=48, mamba_d_ssm=96),
    "jamba": lambda: _config(
        "Jamba",
        **_ATTENTION,
        num_hidden_layers=4,
        hidden_size=48,
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=4,
        num_experts_per_tok=4,
        mamba_d_state=8,
    ),
    "granitemoehybrid": lambda: _config(
        "GraniteMoeHybrid",
        **_ATTENTION,
        **_MAMBA2,
        num_hidden_layers=4,
        hidden_size=48,
        num_local_experts=4,
        num_experts_per_tok=4,
        shared_intermediate_size=32,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ),
    "bamba": lambda: _config("Bamba", **_ATTENTION, **_MAMBA2, num_hidden_layers=4, hidden_size=48, attn_layer_indices=[2]),
    "nemotron_h": lambda: _config(
        "NemotronH",
        **_ATTENTION,
        hidden_size=48,
        layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        head_dim=16,
        mamba_num_heads=6,
        mamba_head_dim=16,
        ssm_state_size=24,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "zamba2": lambda: _config(
        "Zamba2",
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        num_hidden_layers=4,
        hidden_size=48,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        mamba_d_state=24,
        n_mamba_heads=6,
        mamba_ngroups=2,
        chunk_size=16,
        max_position_embeddings=4096,
    ),
    "kimi_linear": lambda: _config(
        "KimiLinear",
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        num_hidden_layers=4,
        hidden_size=48,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        linear_head_dim=16,
        linear_num_heads=3,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ),
    "lfm2": lambda: _config(
        "Lfm2", **_ATTENTION, num_hidden_layers=3, hidden_size=48, layer_types=["conv", "full_attention", "conv"]
    ),
    "minimax": lambda: _config(
        "MiniMax",
        **_ATTENTION,
        num_hidden_layers=2,
        hidden_size=48,
        head_dim=16,
        num_local_experts=2,
        layer_types=["linear_attention", "full_attention"],
    ),
}


SUPPORTED = tuple(name for name in BUILDERS if name not in {"lfm2", "minimax"})
"""Those whose state can be kept in slots."""


def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model of its own at each call, always with the same weights, in ``dtype``, on the CPU, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(20_240)
        model = BUILDERS[name]()
        for module in model.modules():
            _remember(module)
    return model.eval().to(dtype)


@functools.cache
def hybrid(name: str) -> HybridModel:
    """The float32 model, shared by all tests and therefore not to be changed; it runs whatever steps it is given."""
    return HybridModel(tiny_model(name))


@functools.cache
def probed(name: str) -> HybridModel:
    """The float32 model in the steps that the probe allows; shared."""
    return prepare_model(tiny_model(name))


@torch.no_grad()
def _remember(module: torch.nn.Module) -> None:
    bias = getattr(module, "dt_bias", None)
    if bias is None and hasattr(module, "dt_proj"):
        bias = module.dt_proj.bias
    if bias is not None:
        dt = torch.exp(torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1)))
        bias.copy_(dt + torch.log(-torch.expm1(-dt)))

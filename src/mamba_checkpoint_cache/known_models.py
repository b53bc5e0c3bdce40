"""Released hybrids by name: the fields of their ``config.json`` that decide the size of a recurrent state."""

from __future__ import annotations

from typing import Any

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "num_hidden_layers": 40,
            "full_attention_interval": 4,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_value_head_dim": 128,
            "linear_key_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    },
    "Kimi-Linear-48B-A3B": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 27,
        "linear_attn_config": {
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        },
    },
    "Nemotron-3-Super-120B-A12B": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "MEMEMEM*" + 2 * "EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*" + "EMEMEMEME",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    },
    "Nemotron-3-Nano-30B-A3B": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": 5 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    },
    "Falcon-H1-7B": {
        "model_type": "falcon_h1",
        "num_hidden_layers": 44,
        "hidden_size": 3072,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    },
    "Granite-4.0-H-Small": {
        "model_type": "granitemoehybrid",
        "layer_types": 3 * (5 * ["mamba"] + ["attention"] + 4 * ["mamba"]) + 5 * ["mamba"] + ["attention"] + 4 * ["mamba"],
        "hidden_size": 4096,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    },
    "Jamba-1.5-Mini": {
        "model_type": "jamba",
        "num_hidden_layers": 32,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "hidden_size": 4096,
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    },
    "Falcon-Mamba-7B": {
        "model_type": "falcon_mamba",
        "num_hidden_layers": 64,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "state_size": 16,
        "conv_kernel": 4,
    },
}

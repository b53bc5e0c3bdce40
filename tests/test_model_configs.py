"""Specs read from configs, against the transformers classes and against the tensors that their models really keep."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from tiny_models import VOCAB, tiny_model

from mamba_checkpoint_cache.model_configs import MODEL_TYPES, ConfigError, spec_from_config

CLASSES = {
    "qwen3_next": "Qwen3Next",
    "qwen3_5": "Qwen3_5Text",
    "qwen3_5_moe": "Qwen3_5MoeText",
    "kimi_linear": "KimiLinear",
    "nemotron_h": "NemotronH",
    "falcon_h1": "FalconH1",
    "bamba": "Bamba",
    "granitemoehybrid": "GraniteMoeHybrid",
    "zamba2": "Zamba2",
    "mamba2": "Mamba2",
    "mamba": "Mamba",
    "falcon_mamba": "FalconMamba",
    "jamba": "Jamba",
}
GDN = {"model_type": "qwen3_next", "num_hidden_layers": 4}


def kept_by(model: transformers.PreTrainedModel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The recurrent states and the conv windows that the model's own cache holds after a few tokens."""
    with torch.no_grad():
        output = model(input_ids=torch.randint(3, VOCAB, (1, 7)), use_cache=True)
    cache = output.get("past_key_values") or output["cache_params"]
    layers = [layer for layer in cache.layers if getattr(layer, "recurrent_states", None)]
    return [layer.recurrent_states[0] for layer in layers], [layer.conv_states[0] for layer in layers]


@pytest.mark.parametrize("model_type", sorted(set(CLASSES) - {"qwen3_5_moe"}))
def test_matches_the_tensors_that_the_model_keeps(model_type: str) -> None:
    """Layers, elements and conv channels are those of the model's own cache; the conv window is one column narrower."""
    model = tiny_model(model_type)
    states, windows = kept_by(model)

    spec = spec_from_config(json.loads(model.config.to_json_string()))

    assert spec.num_layers == len(states)
    assert {state[0].numel() for state in states} == {spec.num_heads * spec.d_v * spec.d_k}
    assert {tuple(window.shape[1:]) for window in windows} == {(spec.side[0].shape[0], spec.side[0].shape[1] + 1)}


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear", "mamba2", "nemotron_h", "falcon_h1", "bamba"])
def test_heads_and_axes_are_the_models(model_type: str) -> None:
    """Heads, d_v and d_k are told apart: the tiny models have three different sizes (KDA heads are square)."""
    model = tiny_model(model_type)
    states, _ = kept_by(model)
    d_k_first = model_type in ("qwen3_next", "kimi_linear")

    spec = spec_from_config(json.loads(model.config.to_json_string()))

    expected = (spec.num_heads, spec.d_k, spec.d_v) if d_k_first else (spec.num_heads, spec.d_v, spec.d_k)
    assert tuple(states[0].shape[1:]) == expected


@pytest.mark.parametrize("model_type", sorted(set(CLASSES) - {"nemotron_h"}))
def test_missing_fields_take_the_defaults_of_the_class(model_type: str) -> None:
    """A config that says no more than its type is read like the class's own default config."""
    config = getattr(transformers, f"{CLASSES[model_type]}Config")()

    assert spec_from_config({"model_type": model_type}) == spec_from_config(json.loads(config.to_json_string(use_diff=False)))


@pytest.mark.parametrize("num_layers", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear", "jamba", "bamba", "falcon_h1", "mamba2"])
def test_layers_are_counted_by_the_rule_of_the_class(model_type: str, num_layers: int) -> None:
    """Where no layer types are listed, as many layers are linear as in the class's own config of that depth."""
    config = getattr(transformers, f"{CLASSES[model_type]}Config")(num_hidden_layers=num_layers)

    counted = spec_from_config({"model_type": model_type, "num_hidden_layers": num_layers}).num_layers

    assert counted == sum(layer in ("linear_attention", "hybrid") for layer in config.layer_types)


def test_every_family_is_tested() -> None:
    """A model type can't be added without a class to compare it with."""
    assert sorted(CLASSES) == list(MODEL_TYPES)


def test_follows_the_text_config_of_a_multimodal_model() -> None:
    """The language model's fields are found where a multimodal config nests them."""
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": 8, "linear_num_value_heads": 24}

    nested = spec_from_config({"model_type": "qwen3_5", "text_config": text})

    assert nested == spec_from_config(text)
    assert nested.num_heads == 24


def test_kimi_reads_the_section_of_released_checkpoints() -> None:
    """The linear_attn_config section outranks flat fields, and an unrelated head_dim is left alone."""
    section = {"num_heads": 6, "head_dim": 32, "short_conv_kernel_size": 5, "kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]}

    spec = spec_from_config({"model_type": "kimi_linear", "head_dim": 72, "num_heads": 99, "linear_attn_config": section})

    assert spec.shape == (4, 6, 32, 32)
    assert spec.side[0].shape == (3 * 6 * 32, 4)


def test_falcon_mamba_prefers_the_stated_width() -> None:
    """Released Falcon-Mamba configs state an expansion that contradicts their width; the width is true."""
    spec = spec_from_config({"model_type": "falcon_mamba", "hidden_size": 4096, "expand": 16, "intermediate_size": 8192})

    assert spec.num_heads * spec.d_v == 8192


def test_a_mamba1_width_of_odd_size_still_divides() -> None:
    """Channels are grouped into heads that cover the width exactly, whatever it is."""
    for hidden_size in (1, 5, 24, 100, 2560):
        spec = spec_from_config({"model_type": "mamba", "hidden_size": hidden_size})

        assert spec.num_heads * spec.d_v == 2 * hidden_size
        assert spec.d_v == math.gcd(2 * hidden_size, 128)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_share_heads_and_replicate_few_groups(ranks: int) -> None:
    """Each rank holds its share of heads and key groups; a single group is held by every rank."""
    config = {"model_type": "mamba2", "num_heads": 16, "head_dim": 8, "state_size": 24, "num_hidden_layers": 2}

    shared = spec_from_config({**config, "n_groups": 8}, tensor_parallel=ranks)
    replicated = spec_from_config({**config, "n_groups": 1}, tensor_parallel=ranks)

    assert shared.num_heads == replicated.num_heads == 16 // ranks
    assert shared.side[0].shape[0] == (16 * 8 + 2 * 8 * 24) // ranks
    assert replicated.side[0].shape[0] == 16 * 8 // ranks + 2 * 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_what_was_asked_for(dtype: torch.dtype) -> None:
    """State and conv window each have the dtype that the engine keeps them in."""
    spec = spec_from_config(GDN, state_dtype=dtype, conv_dtype=dtype)

    assert (spec.dtype, spec.side[0].dtype) == (dtype, dtype)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type None"),
        ({"model_type": "llama"}, "model_type 'llama' is not a known hybrid with linear-attention layers"),
        ({"model_type": ["mamba"]}, "not a known hybrid"),
        ({"model_type": "nemotron_h"}, "no linear-attention layers"),
        ({**GDN, "layer_types": 4 * ["full_attention"]}, "no linear-attention layers"),
        ({**GDN, "layer_types": 4}, "layer_types must be a list"),
        ({**GDN, "linear_key_head_dim": "128"}, "linear_key_head_dim must be a whole number"),
        ({**GDN, "linear_key_head_dim": -1}, "linear_key_head_dim must be a whole number"),
        ({**GDN, "linear_key_head_dim": True}, "linear_key_head_dim must be a whole number"),
        ({**GDN, "linear_key_head_dim": 0}, "d_k must be at least 1"),
        ({**GDN, "linear_conv_kernel_dim": 0}, "the conv kernel must be at least 1 wide, got 0"),
        ({"model_type": "mamba", "hidden_size": 0}, "num_heads must be at least 1"),
        ({"model_type": "falcon_h1", "mamba_n_heads": 0}, "num_heads must be at least 1"),
    ],
)
def test_says_what_is_wrong_with_a_config(config: dict[str, object], message: str) -> None:
    """A config that can't be read names the field."""
    with pytest.raises(ConfigError, match=message):
        spec_from_config(config)


@pytest.mark.parametrize("ranks", [0, -1, 3, 64])
def test_refuses_ranks_that_do_not_divide(ranks: int) -> None:
    """Heads and key groups that can't be shared out evenly are refused with both numbers."""
    with pytest.raises(ConfigError, match=f"parallelism of {ranks} must divide 32 heads"):
        spec_from_config(GDN, tensor_parallel=ranks)

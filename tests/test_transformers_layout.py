"""integrations/layout.py: where a model keeps its state, read off a dry run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import SUPPORTED, hybrid, tiny_model
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from mamba_checkpoint_cache.integrations.layout import StateOrder, UnsupportedModelError, discover_layout, layers_of
from mamba_checkpoint_cache.model_configs import MODEL_TYPES, spec_from_config
from mamba_checkpoint_cache.state import StateSpec

GDN = (3, 4, 24, 16)
MAMBA2 = (3, 6, 16, 24)
MAMBA1 = (3, 3, 32, 8)
EXPECTED = {
    "qwen3_5": (GDN, StateOrder.KEYS_FIRST, (0, 1, 3), (2,)),
    "qwen3_next": (GDN, StateOrder.KEYS_FIRST, (0, 1, 3), (2,)),
    "olmo_hybrid": (GDN, StateOrder.KEYS_FIRST, (0, 1, 3), (2,)),
    "kimi_linear": ((3, 3, 16, 16), StateOrder.KEYS_FIRST, (0, 1, 3), (2,)),
    "mamba2": (MAMBA2, StateOrder.VALUES_FIRST, (0, 1, 2), ()),
    "mamba": (MAMBA1, StateOrder.CHANNELS, (0, 1, 2), ()),
    "falcon_mamba": (MAMBA1, StateOrder.CHANNELS, (0, 1, 2), ()),
    "falcon_h1": (MAMBA2, StateOrder.VALUES_FIRST, (0, 1, 2), (0, 1, 2)),
    "jamba": (MAMBA1, StateOrder.CHANNELS, (0, 1, 3), (2,)),
    "granitemoehybrid": (MAMBA2, StateOrder.VALUES_FIRST, (0, 1, 3), (2,)),
    "bamba": (MAMBA2, StateOrder.VALUES_FIRST, (0, 1, 3), (2,)),
    "nemotron_h": ((2, *MAMBA2[1:]), StateOrder.VALUES_FIRST, (0, 3), (2,)),
    "zamba2": ((4, *MAMBA2[1:]), StateOrder.VALUES_FIRST, (0, 1, 2, 3), (1, 3)),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_layout_of_each_model(name: str) -> None:
    """Heads, value and key dimensions, the order of the axes and both kinds of layers are those of the model's config."""
    layout = hybrid(name).layout

    assert (layout.spec.shape, layout.order, layout.state_layers, tuple(kv.layer for kv in layout.kv)) == EXPECTED[name]


@pytest.mark.parametrize("name", SUPPORTED)
def test_bytes_are_those_of_the_library_s_own_cache(name: str) -> None:
    """The spec counts the bytes that the library's cache takes for one request, and the KV store those of one token."""
    model, num_tokens = hybrid(name), 7
    cache = DynamicCache(config=model.model.config)
    model.forward(range(1, 1 + num_tokens), cache, 0, every=True)

    states = [
        state
        for layer in layers_of(cache)
        for kind in ("recurrent_states", "conv_states")
        for state in getattr(layer, kind, {}).values()
        if state is not None
    ]
    assert model.spec.native_bytes == sum(state.nbytes for state in states)
    kv = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if t is not None]
    store = model.kv_store(5)
    assert (store.bytes_per_slot if store else 0) * num_tokens == sum(tensor.nbytes for tensor in kv)


@pytest.mark.parametrize("name", sorted(set(SUPPORTED) & set(MODEL_TYPES)))
def test_layout_agrees_with_the_config_reader(name: str) -> None:
    """What a dry run finds is what ``plan`` reads from the config file; only the conv window is wider here by its last column."""
    spec, planned = hybrid(name).spec, spec_from_config(hybrid(name).model.config.to_dict())

    assert planned.shape == spec.shape
    assert planned.side[0].shape == (spec.side[0].shape[0], spec.side[0].shape[1] - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_read_off_too(dtype: torch.dtype) -> None:
    """A half-precision model keeps its conv window in that dtype and its recurrent state in float32."""
    spec = discover_layout(tiny_model("qwen3_5", dtype)).spec

    assert (spec.dtype, spec.side[0].dtype) == (torch.float32, dtype)


@pytest.mark.parametrize("order", StateOrder)
def test_orders_are_views_and_each_other_s_inverse(order: StateOrder) -> None:
    """The model's view and the core's view of a state share memory, element for element."""
    spec = StateSpec(2, 3, 5, 7)
    native = torch.randn(2, 4, *order.native_shape(spec))

    state = order.to_spec(native, spec)

    assert state.shape == (2, 4, 3, 5, 7)
    assert torch.equal(order.to_native(state, spec), native)
    assert state.data_ptr() == order.to_native(state, spec).data_ptr() == native.data_ptr()


def test_keys_first_means_that_rows_and_columns_swap() -> None:
    """The core's ``[v, k]`` is the delta-rule model's ``[k, v]``."""
    native = torch.randn(1, 1, 2, 3, 4)

    assert StateOrder.KEYS_FIRST.to_spec(native, StateSpec(1, 2, 4, 3))[0, 0, 1, 3, 2] == native[0, 0, 1, 2, 3]


def all_linear() -> Qwen3_5ForCausalLM:
    config = tiny_model("qwen3_5").config
    config.layer_types = ["linear_attention"] * 4
    return Qwen3_5ForCausalLM(config)


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: tiny_model("lfm2"), "layer 0 keeps a conv window but no recurrent state"),
        (lambda: tiny_model("minimax"), "does not run with the library's own cache layers: MiniMax uses cache of its own"),
        (all_linear, "does not run with the library's own cache layers.*LinearAttention layers"),
        (llama, "LlamaForCausalLM keeps no recurrent state in its cache"),
    ],
)
def test_real_models_that_are_refused(build: Callable[[], nn.Module], reason: str) -> None:
    """A model whose state can't be kept in slots is refused with the reason, not with a crash from inside the library."""
    with pytest.raises(UnsupportedModelError, match=reason):
        discover_layout(build())


class FakeModel(nn.Module):
    """Fills the cache it is given as ``cache_params`` by ``fill``, and ignores the one given as ``past_key_values``."""

    device = torch.device("cpu")

    def __init__(self, layers: list[object], fill: Callable[[list[object]], None]) -> None:
        super().__init__()
        self.config = tiny_model("mamba2").config
        self.layers, self.fill = layers, fill

    def forward(self, input_ids: Tensor, use_cache: bool, past_key_values: object = None, cache_params: object = None) -> None:
        if cache_params is not None:
            cache_params.layers = self.layers
            self.fill(self.layers)


def fill_states(
    *shapes: tuple[int, ...], conv: int = 99, dtype: torch.dtype = torch.float32
) -> Callable[[list[LinearAttentionLayer]], None]:
    def fill(layers: list[LinearAttentionLayer]) -> None:
        for index, (layer, shape) in enumerate(zip(layers, shapes, strict=True)):
            if index < conv:
                layer.update_conv_state(torch.ones(1, 6, 4))
            layer.update_recurrent_state(torch.ones(1, *shape, dtype=dtype))

    return fill


def two_layers(**options: int) -> list[LinearAttentionLayer]:
    return [LinearAttentionLayer(**options), LinearAttentionLayer(**options)]


def test_the_cache_argument_is_known_by_its_effect() -> None:
    """An argument that the model accepts and ignores is passed over for the one that fills the cache."""
    layout = discover_layout(FakeModel(two_layers(), fill_states((2, 3, 5), (2, 3, 5))))

    assert layout.cache_argument == "cache_params"
    assert layout.spec.shape == (2, 2, 3, 5)


def test_a_model_without_conv_windows_has_no_side_state() -> None:
    """A recurrent state alone is enough."""
    assert discover_layout(FakeModel(two_layers(), fill_states((2, 3, 5), (2, 3, 5), conv=0))).spec.side == ()


@pytest.mark.parametrize(
    ("layers", "fill", "reason"),
    [
        (two_layers(), fill_states((2, 3, 5), (2, 3, 4)), "recurrent states differ"),
        (two_layers(), fill_states((2, 3, 5), (2, 3, 5), conv=1), "1 of 2 recurrent layers have a conv window"),
        (two_layers(), fill_states((2, 3, 5), (2, 3, 5), dtype=torch.float64), "float64"),
        (two_layers(), fill_states((7,), (7,)), "3 or 4 axes"),
        (two_layers(number_of_states=2), fill_states((2, 3, 5), (2, 3, 5)), "has 2 recurrent_states: expected one"),
        (two_layers(), lambda layers: None, "filled no cache passed as"),
    ],
)
def test_odd_caches_are_refused(layers: list[object], fill: Callable[[list[object]], None], reason: str) -> None:
    """Whatever does not fit one state of one shape per layer is refused with what was found."""
    with pytest.raises(UnsupportedModelError, match=reason):
        discover_layout(FakeModel(layers, fill))


def test_a_sliding_window_is_refused() -> None:
    """A window keeps no keys for a request that goes on from an earlier depth."""

    def fill(layers: list[object]) -> None:
        fill_states((2, 3, 5))(layers[:1])
        layers[1].update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))

    with pytest.raises(UnsupportedModelError, match="layer 1 is a DynamicSlidingWindowLayer"):
        discover_layout(FakeModel([LinearAttentionLayer(), DynamicSlidingWindowLayer(sliding_window=8)], fill))

"""The classes behind the small models, as they are before training."""

from __future__ import annotations

import pytest
import torch

from mamba_checkpoint_cache.integrations.continuation import Mode
from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.integrations.transformers import HybridModel
from mamba_checkpoint_cache.small_models.architectures import VOCAB_SIZE, build_gdn_hybrid, build_mamba2_hybrid

BUILDERS = (build_gdn_hybrid, build_mamba2_hybrid)


@pytest.mark.parametrize("build", BUILDERS)
def test_the_seed_decides_the_weights(build) -> None:
    """The same seed gives the same model whatever was drawn before; and building one disturbs no other draws."""
    torch.manual_seed(1)
    first = build(hidden_size=64).state_dict()
    drawn = torch.rand(3)
    torch.manual_seed(1)

    again, other = build(hidden_size=64).state_dict(), build(hidden_size=64, seed=1).state_dict()

    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert len(first["lm_head.weight"]) == VOCAB_SIZE


def test_a_gdn_layer_remembers_before_it_is_trained() -> None:
    """The probe finds that the output depends on the state far beyond rounding, and continues the model in chunks."""
    continuation = prepare_model(build_gdn_hybrid(hidden_size=64)).continuation

    assert continuation.mode is Mode.CHUNKS
    assert "hardly moves" not in continuation.message


def test_a_mamba2_layer_starts_as_an_associative_memory() -> None:
    """What is written at a token is keyed by the token before it, so that it is read when that one comes again."""
    layer = build_mamba2_hybrid().model.layers[1].mamba
    width, keys = layer.intermediate_size, layer.ssm_state_size
    before, now = torch.randn(2, 1, 1, layer.hidden_size)

    def keys_and_queries(*tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        projected = layer.in_proj(torch.cat(tokens, 1))[..., width : 2 * width + 2 * keys].transpose(1, 2)
        mixed = layer.conv1d(projected)[..., : len(tokens)].transpose(1, 2)
        return mixed[:, -1, width : width + keys], mixed[:, -1, width + keys :]

    written, _ = keys_and_queries(before, now)
    _, asked = keys_and_queries(now, before)

    assert torch.allclose(written, asked, atol=1e-5)
    assert not layer.D.any()


def test_heads_can_be_as_large_as_the_real_ones() -> None:
    """``head_dim`` 128 gives states of 128 by 128, in fp32."""
    spec = HybridModel(build_gdn_hybrid(head_dim=128, layers=("linear_attention", "full_attention"))).spec

    assert (spec.d_v, spec.d_k, spec.num_heads, spec.dtype) == (128, 128, 2, torch.float32)

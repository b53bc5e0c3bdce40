"""integrations/transformers.py: a model run on the rows of an ActivePool is the model run with the library's own cache."""

from __future__ import annotations

import inspect
from array import array

import pytest
import torch
from tiny_models import SUPPORTED, VOCAB, hybrid, probed, tiny_model
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from mamba_checkpoint_cache import ActivePool
from mamba_checkpoint_cache.integrations.layout import layers_of
from mamba_checkpoint_cache.integrations.probe import _relative
from mamba_checkpoint_cache.integrations.transformers import HybridModel, Session

STEPS = (1, 2, 13, 1, 1, 20, 3)
PROMPT_TOKENS = sum(STEPS)


@pytest.fixture
def prompt() -> list[int]:
    return torch.randint(3, VOCAB, (PROMPT_TOKENS,)).tolist()


def scattered(count: int, slots: int) -> array[int]:
    """KV slots in no order."""
    return array("i", (torch.randperm(slots)[:count] + 1).tolist())


@torch.no_grad()
def with_own_cache(model: HybridModel, tokens: list[int], steps: tuple[int, ...]) -> tuple[Tensor, DynamicCache]:
    """The logits of every token from the library alone: its cache, its forward, nothing of ours."""
    cache = DynamicCache(config=model.model.config)
    logits, depth = [], 0
    for count in steps:
        options = {}
        if "position_ids" in inspect.signature(model.model.forward).parameters:
            options["position_ids"] = torch.arange(depth, depth + count)[None]
        ids = torch.tensor(tokens[depth : depth + count])[None]
        logits.append(model.model(input_ids=ids, use_cache=True, **{model.layout.cache_argument: cache}, **options).logits[0])
        depth += count
    return torch.cat(logits), cache


def go_on(session: Session, tokens: list[int], ids: array[int], steps: tuple[int, ...] = STEPS) -> Tensor:
    """The logits of every token of the next ``steps``."""
    spans = [slice(session.depth + sum(steps[:i]), session.depth + sum(steps[: i + 1])) for i in range(len(steps))]
    return torch.cat([session.run(tokens[span], ids[span], every=True) for span in spans])


@pytest.mark.parametrize("name", SUPPORTED)
def test_on_a_pool_s_row_as_with_the_library_s_cache(name: str, prompt: list[int]) -> None:
    """In the same steps, logits, states, windows, keys and values are bit for bit the library's; no other row is touched."""
    model = hybrid(name)
    active, kv, ids = model.active_pool(3), model.kv_store(90), scattered(PROMPT_TOKENS, 90)
    for tensor in (active.state, *active.side.values()):
        tensor.fill_(torch.nan)
    expected, cache = with_own_cache(model, prompt, STEPS)

    logits = go_on(model.start(active, 2, kv=kv), prompt, ids)

    assert torch.equal(logits, expected)
    for index, layer in enumerate(model.layout.state_layers):
        assert torch.equal(
            model.layout.order.to_native(active.state[index, 2:3], model.spec), cache.layers[layer].recurrent_states[0]
        )
        assert torch.equal(active.side["conv"][index, 2:3], cache.layers[layer].conv_states[0])
    for tensor in (active.state, *active.side.values()):
        assert tensor[:, [0, 1, 3]].isnan().all()
    rows = torch.tensor(ids)
    for index, spec in enumerate(model.layout.kv):
        assert torch.equal(kv.keys[index][rows], cache.layers[spec.layer].keys[0].transpose(0, 1))
        assert torch.equal(kv.values[index][rows], cache.layers[spec.layer].values[0].transpose(0, 1))
        assert kv.keys[index].any(dim=(1, 2)).sum() == PROMPT_TOKENS


@pytest.mark.parametrize("name", SUPPORTED)
def test_in_allowed_steps_as_in_one_pass(name: str, prompt: list[int]) -> None:
    """In the steps that the probe allows, the logits are those of one pass, up to what the probe measured."""
    model = probed(name)
    whole, _ = with_own_cache(model, prompt, (PROMPT_TOKENS,))

    session = model.start(model.active_pool(1), 1, kv=model.kv_store(PROMPT_TOKENS))
    logits = go_on(session, prompt, scattered(PROMPT_TOKENS, PROMPT_TOKENS))

    assert _relative(logits, whole) <= 3 * max(model.continuation.noise, model.continuation.tokens.relative)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "mamba", "mamba2", "bamba", "kimi_linear"])
def test_greedy_decoding_as_the_library_s_generate(name: str, prompt: list[int]) -> None:
    """Prefill in two chunks and greedy decoding give the tokens that ``generate`` gives."""
    model, count = probed(name), 9
    ids = torch.tensor(prompt)[None]
    generated = model.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=-1
    )

    kv = model.kv_store(PROMPT_TOKENS + count)
    session = model.start(model.active_pool(1), 1, kv=kv)
    session.run(prompt[:20], range(1, 21))
    tokens = [int(session.run(prompt[20:], range(21, PROMPT_TOKENS + 1)).argmax())]
    while len(tokens) < count:
        tokens.append(int(session.run(tokens[-1:], [session.depth + 1]).argmax()))

    assert tokens == generated[0, PROMPT_TOKENS:].tolist()


@pytest.mark.parametrize("name", SUPPORTED)
def test_state_and_kv_are_all_there_is(name: str, prompt: list[int]) -> None:
    """A session started in another slot from a copied row and the KV slots goes on bit for bit; from a wiped row it does not."""
    model, cut, steps = hybrid(name), 16, (1, 1, 20, 3)
    active, kv, ids = model.active_pool(2), model.kv_store(PROMPT_TOKENS), scattered(PROMPT_TOKENS, PROMPT_TOKENS)
    first = model.start(active, 1, kv=kv)
    first.run(prompt[:cut], ids[:cut])
    held = [tensor[:, 1].clone() for tensor in (active.state, active.side["conv"])]

    straight = go_on(first, prompt, ids, steps)

    def resumed(state: Tensor) -> Tensor:
        active.state[:, 2], active.side["conv"][:, 2] = state, held[1]
        return go_on(model.start(active, 2, kv=kv, kv_ids=ids[:cut], depth=cut), prompt, ids, steps)

    assert torch.equal(resumed(held[0]), straight)
    assert (resumed(torch.zeros_like(held[0])) - straight)[:2].abs().max() > 1e-3


def test_depth_zero_ignores_what_the_row_held(prompt: list[int]) -> None:
    """A request that starts from nothing does not see the slot's last tenant."""
    model = hybrid("qwen3_5")
    active, kv = model.active_pool(1), model.kv_store(PROMPT_TOKENS)
    fresh = model.start(active, 1, kv=kv).run(prompt[:1], [1])

    assert active.state[:, 1].any()
    assert torch.equal(model.start(active, 1, kv=kv).run(prompt[:1], [1]), fresh)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba", "falcon_h1"])
def test_the_model_works_in_the_pool_s_memory(name: str) -> None:
    """The library's cache holds views of the pool before and after a step: no state is copied."""
    model = hybrid(name)
    active = model.active_pool(2)
    session = model.start(active, 2, kv=model.kv_store(4))
    for _ in range(2):
        for index, layer in enumerate(model.layout.state_layers):
            held = layers_of(session._cache)[layer]
            assert held.recurrent_states[0].data_ptr() == active.state[index, 2].data_ptr()
            assert held.conv_states[0].data_ptr() == active.side["conv"][index, 2].data_ptr()
        session.run([5, 6], [session.depth + 1, session.depth + 2])


def test_a_state_that_the_model_replaces_is_copied_back(prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a model put a tensor of its own in place of the pool's, the pool still holds the state after each step."""
    model = HybridModel(tiny_model("mamba2"))
    expected, cache = with_own_cache(model, prompt[:9], (4, 5))

    def replace(layer: LinearAttentionLayer, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        layer.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    monkeypatch.setattr(LinearAttentionLayer, "update_recurrent_state", replace)
    active = model.active_pool(1)
    session = model.start(active, 1)
    logits = torch.cat([session.run(prompt[:4], every=True), session.run(prompt[4:9], every=True)])

    assert torch.equal(logits, expected)
    for index, layer in enumerate(cache.layers):
        assert torch.equal(active.state[index, 1], layer.recurrent_states[0][0])


def test_last_logits_are_the_last_of_all() -> None:
    """Without ``every`` a run returns the logits after its last token, also where it takes several steps."""
    model, tokens = probed("jamba"), list(range(3, 17))
    kv = model.kv_store(len(tokens))

    def run(every: bool) -> Tensor:
        session = model.start(model.active_pool(1), 1, kv=kv)
        session.run(tokens[:6], range(1, 7))
        return session.run(tokens[6:], range(7, 15), every=every)

    every = run(every=True)
    assert every.shape == (8, VOCAB)
    torch.testing.assert_close(run(every=False), every[-1])


def test_any_active_pool_of_the_spec_will_do(prompt: list[int]) -> None:
    """A pool that allocated its own tensors works as well as one in the model's memory order."""
    for name in ("qwen3_5", "jamba", "mamba2"):
        model = hybrid(name)
        kv, ids = model.kv_store(PROMPT_TOKENS), scattered(PROMPT_TOKENS, PROMPT_TOKENS)
        own, adopted = ActivePool(model.spec, 1), model.active_pool(1)

        logits = [go_on(model.start(active, 1, kv=kv), prompt, ids) for active in (own, adopted)]

        torch.testing.assert_close(*logits)
        torch.testing.assert_close(own.state[:, 1], adopted.state[:, 1])


def test_misuse_says_what_was_expected() -> None:
    """KV slots that are missing or miscounted, and empty runs, are refused."""
    model = hybrid("qwen3_5")
    active, kv = model.active_pool(1), model.kv_store(8)

    with pytest.raises(ValueError, match=r"expected a KvStore and 0 KV slots .* got None and 0"):
        model.start(active, 1)
    with pytest.raises(ValueError, match=r"expected a KvStore and 4 KV slots .* and 3"):
        model.start(active, 1, kv=kv, kv_ids=[1, 2, 3], depth=4)
    session = model.start(active, 1, kv=kv)
    with pytest.raises(ValueError, match="got 0 for 0"):
        session.run([])
    with pytest.raises(ValueError, match="got 1 for 2"):
        session.run([5, 6], [1])


def test_a_pure_state_model_needs_no_kv() -> None:
    """A model without attention layers has no KV store, and none has to be passed."""
    model = hybrid("mamba2")

    assert model.kv_store(8) is None
    assert model.start(model.active_pool(1), 1).run([5, 6]).shape == (VOCAB,)

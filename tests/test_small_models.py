"""What the shipped models were trained to do, and that it hangs on the recurrent state: they can tell a good state from a bad."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.integrations.transformers import HybridModel
from mamba_checkpoint_cache.pools import ActivePool
from mamba_checkpoint_cache.serving.models import load_model
from mamba_checkpoint_cache.small_models import SMALL_MODELS
from mamba_checkpoint_cache.small_models.card import bits_per_byte, recall_accuracy
from mamba_checkpoint_cache.small_models.recall import DEFAULT_PAIRS, KEYS, VALUES, recall_prompts
from mamba_checkpoint_cache.small_models.text import held_out_text, training_text

MAX_BYTES = 8 * 2**20
RECALL = 0.95
NUM_PROMPTS = 24
MANY_PAIRS = 48
NUM_TEXTS, TEXT_PREFIX, TEXT_BYTES = 24, 256, 24

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def hybrid(name: str) -> HybridModel:
    return prepare_model(load_model(name).model)


def intact(state: Tensor) -> Tensor:
    return state


def zeroed(state: Tensor) -> Tensor:
    return torch.zeros_like(state)


def two_bits(state: Tensor) -> Tensor:
    """Three levels per k-channel."""
    scale = state.abs().amax(-2, keepdim=True).clamp(min=1e-8)
    return (state / scale).round() * scale


def continued(model: HybridModel, prefix: bytes, following: bytes, change) -> Tensor:
    """The logits after each byte of ``following``, where ``change`` befell the recurrent state after ``prefix``."""
    active: ActivePool = model.active_pool(1)
    kv = model.kv_store(len(prefix) + len(following))
    session = model.start(active, 1, kv=kv)
    ids = range(1, 1 + len(prefix) + len(following))
    session.run(list(prefix), ids[: len(prefix)])
    active.state[:, 1] = change(active.state[:, 1])
    return session.run(list(following), ids[len(prefix) :], every=True)


@cache
def recall(name: str, change, pairs: int = DEFAULT_PAIRS) -> float:
    right = []
    for prompt in recall_prompts(NUM_PROMPTS, pairs=pairs, seed=7):
        guesses = continued(hybrid(name), prompt.prefix, prompt.asked, change).argmax(-1)[::2]
        right += [int(guess) == value[0] for guess, (_, value) in zip(guesses, prompt.queries, strict=True)]
    return sum(right) / len(right)


@cache
def text_loss(name: str, change) -> float:
    """Nats per byte of what follows a prefix whose state was changed."""
    losses = []
    for seed in range(NUM_TEXTS):
        text = held_out_text(TEXT_PREFIX + TEXT_BYTES, seed=seed)
        logits = continued(hybrid(name), text[:TEXT_PREFIX], text[TEXT_PREFIX:], change)[:-1]
        losses.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor(list(text[TEXT_PREFIX + 1 :])))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_model_is_small_and_complete(name: str) -> None:
    """At most 8 MB, with weights, tokenizer and card."""
    files = {path.name: path.stat().st_size for path in SMALL_MODELS[name].iterdir()}

    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    assert sum(files.values()) <= MAX_BYTES


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_the_tokenizer_is_bytes(name: str) -> None:
    """A token is a byte, for any text, and decoding gives it back; token 256 ends a text."""
    tokens = load_model(name).tokens
    text = "<a7>  héllo\r\n\t wörld \U0001f40d''"

    assert tokens.encode(text) == list(text.encode())
    assert tokens.decode(tokens.encode(text)) == text
    assert tokens.eos_ids == {256}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_recall_is_nearly_perfect_across_a_split(name: str) -> None:
    """Values told in a prefix are recalled after it, through the state alone, and in one pass as the card says."""
    card = (SMALL_MODELS[name] / "README.md").read_text(encoding="utf-8")

    assert recall(name, intact) >= RECALL
    assert f"{recall_accuracy(load_model(name).model):.2%} right" in card


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_without_its_state_recall_is_gone(name: str) -> None:
    """Zeroing what was restored costs far more than 30 points: the attention layer can't stand in."""
    assert recall(name, intact) - recall(name, zeroed) >= 0.3


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_state_of_two_bits_hurts_both_tasks(name: str) -> None:
    """So a codec that is too coarse can't pass for a good one, whether it is judged by recall or by the next bytes of text."""
    assert recall(name, intact, MANY_PAIRS) - recall(name, two_bits, MANY_PAIRS) >= 0.01
    assert text_loss(name, two_bits) - text_loss(name, intact) >= 0.01


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_it_predicts_source_code(name: str) -> None:
    """Far better than the eight bits of a guess, and than the five or so of byte frequencies."""
    assert bits_per_byte(load_model(name).model) < 3.0


def test_recall_prompts_are_well_formed() -> None:
    """Each key is told once and asked for once, with the value that it was told with; the seed decides all of it."""
    for prompt in recall_prompts(5, seed=1):
        told = prompt.prefix[1:-1]
        pairs = {told[i : i + 1]: told[i + 1 : i + 2] for i in range(0, len(told), 2)}
        assert (prompt.prefix[:1], prompt.prefix[-1:], len(pairs)) == (b"<", b">", DEFAULT_PAIRS)
        assert dict(prompt.queries) == pairs
        assert len(prompt.queries) == DEFAULT_PAIRS
        assert prompt.asked == b"".join(key + value for key, value in prompt.queries)
    assert recall_prompts(2, seed=1) == recall_prompts(5, seed=1)[:2] != recall_prompts(2, seed=2)
    assert not set(KEYS) & set(VALUES)
    with pytest.raises(ValueError, match="1 to 52 pairs"):
        recall_prompts(1, pairs=53)


def test_recall_may_ask_in_rounds() -> None:
    """Each round asks for every key once, in an order of its own; the first is what a single round asks."""
    (prompt,) = recall_prompts(1, rounds=4)
    (single,) = recall_prompts(1)

    rounds = [prompt.queries[i : i + DEFAULT_PAIRS] for i in range(0, len(prompt.queries), DEFAULT_PAIRS)]
    assert (prompt.prefix, rounds[0]) == (single.prefix, single.queries)
    assert len(set(rounds)) == len(rounds) == 4
    assert {frozenset(queries) for queries in rounds} == {frozenset(single.queries)}
    with pytest.raises(ValueError, match="at least one round of questions, got 0"):
        recall_prompts(1, rounds=0)


def test_the_held_out_text_was_not_trained_on() -> None:
    """No line of it worth the name stands in the training text in the same surroundings."""
    seen = training_text()

    text = held_out_text(20_000, seed=3)

    pieces = [text[i : i + 200] for i in range(0, len(text) - 200, 200)]
    assert sum(piece in seen for piece in pieces) < 0.02 * len(pieces)
    assert text == held_out_text(20_000, seed=3) != held_out_text(20_000, seed=4)
    with pytest.raises(ValueError, match="bytes"):
        held_out_text(0)

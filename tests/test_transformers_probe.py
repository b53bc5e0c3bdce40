"""integrations/probe.py and continuation.py: how each model of the installed library may be continued, as measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from tiny_models import SUPPORTED, probed, tiny_model
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from mamba_checkpoint_cache.integrations import probe, transformers
from mamba_checkpoint_cache.integrations.continuation import ANY_STEPS, Continuation, Mode
from mamba_checkpoint_cache.integrations.layout import UnsupportedModelError, layers_of
from mamba_checkpoint_cache.integrations.probe import TOLERANCE, prepare_model, probe_continuation
from mamba_checkpoint_cache.integrations.transformers import HybridModel

MAMBA1 = {"mamba", "falcon_mamba", "jamba"}
CLAMPS_ITS_TIME_STEP_IN_CHUNKS_ONLY = {"nemotron_h", "zamba2"}


@pytest.mark.parametrize("name", SUPPORTED)
def test_verdict_on_each_model(name: str) -> None:
    """Mamba-1 layers forget their state at the start of a chunk; the others continue exactly, and all go on bit for bit."""
    found = probed(name).continuation

    assert found.mode is (Mode.TOKENS if name in MAMBA1 else Mode.CHUNKS)
    assert found.multiple == 1
    assert found.bitwise
    assert 1e-7 < found.noise < 1e-5
    assert (found.chunks.effect == 0) == (name in MAMBA1)
    assert (found.chunks.relative > TOLERANCE * found.noise) == (name in MAMBA1)
    assert (found.tokens.relative > TOLERANCE * found.noise) == (name in CLAMPS_ITS_TIME_STEP_IN_CHUNKS_ONLY)
    assert found.tokens.effect > 100 * found.noise


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("qwen3_5", "Qwen3_5ForCausalLM continues exactly in chunks from any depth (rounding noise"),
        ("nemotron_h", "continues exactly in chunks from any depth, but lone tokens are off by"),
        ("mamba", "is continued token by token, which is exact but slow: chunks are off by"),
    ],
)
def test_the_user_is_told_in_a_sentence(name: str, sentence: str) -> None:
    """The message names the model, how it is continued, and by how much it would be off otherwise."""
    assert sentence in probed(name).continuation.message


@pytest.mark.parametrize("name", ["qwen3_5", "jamba", "mamba", "nemotron_h"])
def test_same_verdict_in_bfloat16(name: str) -> None:
    """Rounding in half precision hides neither a chunk that ignores its state nor a model that is exact."""
    found = probe_continuation(HybridModel(tiny_model(name, torch.bfloat16)))

    assert found.mode is (Mode.TOKENS if name in MAMBA1 else Mode.CHUNKS)
    assert found.noise > 1e-3


def test_weak_evidence_is_called_that() -> None:
    """Where rounding is larger than all that the state does, the message says so."""
    found = probe_continuation(HybridModel(tiny_model("mamba", torch.bfloat16)))

    assert found.tokens.effect < TOLERANCE * found.noise
    assert "weak evidence" in found.message
    assert "weak evidence" not in probed("mamba").continuation.message


def test_probing_again_finds_the_same() -> None:
    """A model that is restricted to lone tokens already is probed in chunks all the same, and stays restricted."""
    again = probe_continuation(probed("mamba"))

    assert again == probed("mamba").continuation
    assert again.chunks.effect == 0


def test_a_deviation_is_what_three_in_four_positions_stay_under() -> None:
    """Each position is measured against its own logits; a few that are far off, as after a tipped router, do not count."""
    expected = torch.tensor([[-1.0, 1.0]]).repeat(9, 1) * torch.arange(1, 10)[:, None] + 7
    off = expected.clone()
    off[2:] += 0.01 * (expected[2:] - 7)
    off[:2] += 50

    assert probe._relative(off, expected) == pytest.approx(0.01, rel=1e-4)
    assert probe._relative(off, expected, share=1.0) > 1


def test_another_seed_gives_other_prompts_and_the_same_verdict() -> None:
    """The verdict does not hang on the prompts."""
    found = [probe_continuation(HybridModel(tiny_model("mamba2")), seed=seed) for seed in (1, 2)]

    assert found[0].mode is found[1].mode is Mode.CHUNKS
    assert found[0].noise != found[1].noise


def test_the_probe_leaves_the_model_as_it_was() -> None:
    """No hook, weight or mode is changed by probing."""
    model = tiny_model("qwen3_5")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    prepare_model(model)

    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@contextmanager
def sabotaged(name: str, harm: Callable[[list[LinearAttentionLayer], int, int], None]):
    """A model whose cache is harmed before each forward, told the depth and the number of tokens."""
    model = tiny_model(name)

    def before(module: torch.nn.Module, args: tuple[()], kwargs: dict) -> None:
        positions = kwargs.get("position_ids", torch.zeros(1, 1))
        if positions[0, 0]:
            cache = next(value for value in kwargs.values() if isinstance(value, DynamicCache))
            layers = [layer for layer in layers_of(cache) if isinstance(layer, LinearAttentionLayer)]
            harm(layers, int(positions[0, 0]), positions.shape[1])

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    yield HybridModel(model)
    handle.remove()


def wipe(layers: list[LinearAttentionLayer], kind: str) -> None:
    for layer in layers:
        getattr(layer, kind)[0].zero_()


def test_a_model_that_is_exact_from_multiples_only() -> None:
    """Where chunks are exact only from multiples of the model's own chunk size, that is the granularity."""
    with sabotaged(
        "bamba", lambda layers, depth, count: wipe(layers, "recurrent_states") if depth % 16 and count > 1 else None
    ) as model:
        found = probe_continuation(model)

    assert (found.mode, found.multiple) == (Mode.CHUNKS, 16)
    assert "from multiples of 16 tokens" in found.message


@pytest.mark.parametrize("kind", ["recurrent_states", "conv_states"])
def test_a_model_that_loses_either_state_is_refused(kind: str) -> None:
    """Losing the recurrent state or the conv window, in every step, is found and refused."""
    with sabotaged("qwen3_5", lambda layers, depth, count: wipe(layers, kind)) as model:
        found = probe_continuation(model)

    assert found.mode is Mode.REFUSED
    assert "can't be continued from a cached state" in found.message


def test_a_model_that_decodes_wrong_is_refused() -> None:
    """Exact chunks are no help if every lone token is far off."""
    with sabotaged("bamba", lambda layers, depth, count: wipe(layers, "conv_states") if count == 1 else None) as model:
        assert probe_continuation(model).mode is Mode.REFUSED


def test_wrong_positions_are_found() -> None:
    """Bamba counts positions from 0 in each step unless it is told them: then it is exact, else refused."""
    model = HybridModel(tiny_model("bamba"))
    model._parameters -= {"position_ids"}

    assert probe_continuation(model).mode is Mode.REFUSED
    assert probed("bamba").continuation.mode is Mode.CHUNKS


def test_a_model_that_minds_its_slot_is_not_bitwise() -> None:
    """A result that depends on the row, or on what went before, is not bit for bit."""
    calls = iter(range(1_000_000))
    with sabotaged(
        "qwen3_5", lambda layers, *_: [layer.conv_states[0].mul_(1 + 1e-7 * next(calls)) for layer in layers]
    ) as model:
        assert not probe_continuation(model).bitwise


def test_garbage_from_another_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that reads another slot's row gives NaN, since that row is full of it, and is refused."""
    adopt = transformers._adopt
    monkeypatch.setattr(
        transformers, "_adopt", lambda cache, layout, active, row, *, started: adopt(cache, layout, active, 1, started=started)
    )

    found = probe_continuation(HybridModel(tiny_model("mamba2")))

    assert found.mode is Mode.REFUSED
    assert found.chunks.relative == torch.inf
    assert not found.bitwise


def test_a_model_that_computes_nan_is_refused() -> None:
    """Broken weights are not mistaken for large rounding noise."""
    model = tiny_model("mamba2")
    model.lm_head.weight.data.fill_(torch.nan)

    assert probe_continuation(HybridModel(model)).mode is Mode.REFUSED


def test_prepare_refuses_with_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that can't be continued is refused at start-up, with the sentence of the probe."""
    monkeypatch.setattr(probe, "probe_continuation", lambda model: Continuation(Mode.REFUSED, message="it forgets"))

    with pytest.raises(UnsupportedModelError, match="it forgets"):
        prepare_model(tiny_model("mamba2"))


@pytest.mark.parametrize(
    ("continuation", "depth", "count", "steps"),
    [
        (ANY_STEPS, 0, 7, [7]),
        (ANY_STEPS, 5, 7, [7]),
        (ANY_STEPS, 5, 0, []),
        (Continuation(Mode.TOKENS), 0, 7, [7]),
        (Continuation(Mode.TOKENS), 5, 3, [1, 1, 1]),
        (Continuation(Mode.CHUNKS, multiple=4), 0, 7, [7]),
        (Continuation(Mode.CHUNKS, multiple=4), 8, 7, [7]),
        (Continuation(Mode.CHUNKS, multiple=4), 6, 7, [1, 1, 5]),
        (Continuation(Mode.CHUNKS, multiple=4), 6, 2, [1, 1]),
        (Continuation(Mode.CHUNKS, multiple=4), 5, 7, [1, 1, 1, 4]),
        (Continuation(Mode.CHUNKS, multiple=4), 5, 2, [1, 1]),
    ],
)
def test_steps(continuation: Continuation, depth: int, count: int, steps: list[int]) -> None:
    """Tokens are cut into the longest steps that are exact from where they start."""
    assert continuation.steps(depth, count) == steps

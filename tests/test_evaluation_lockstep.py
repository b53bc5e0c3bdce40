"""The instrument: exactly 0 without a codec, what the library itself computes otherwise, and loud when a state is at fault."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from test_transformers_model import with_own_cache
from tiny_models import VOCAB, probed
from torch import Tensor

from mamba_checkpoint_cache import ActivePool, CheckpointPool
from mamba_checkpoint_cache.codec import get_codec
from mamba_checkpoint_cache.codec.reference import Int8Codec, NoneCodec, measure
from mamba_checkpoint_cache.evaluation.arms import RECHUNK, RECHUNKED, ArmKey, Place, state_energies
from mamba_checkpoint_cache.evaluation.lockstep import STEP, Lockstep, Trial
from mamba_checkpoint_cache.evaluation.noise import Bf16Codec
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.integrations.transformers import HybridModel
from mamba_checkpoint_cache.slots import ActiveSlot, CheckpointSlot

CPU = torch.device("cpu")
FAMILIES = ("qwen3_5", "granitemoehybrid", "falcon_h1", "jamba", "mamba", "mamba2", "kimi_linear")
"""Chunks and token by token, with attention and without."""


def prompt_of(length: int, depth: int, seed: int = 1) -> Prompt:
    return Prompt("text", [random.Random(seed * 1000 + i).randrange(3, VOCAB) for i in range(length)], depth)


def run(model: HybridModel, prompt: Prompt, *codecs: object) -> Trial:
    return Lockstep(model, codecs, longest=len(prompt.tokens)).run(prompt)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_codec_nothing_drifts(name: str) -> None:
    """Restored once or before every step, the logits are the reference's bits, and so are the states at each restore."""
    prompt = prompt_of(70, 29)

    trial = run(probed(name), prompt, NoneCodec(), Int8Codec())

    for key in (ArmKey("none"), ArmKey("none", again=True)):
        trace = trial.arms[key]
        assert trace.kl_nats.shape == (41,)
        assert not trace.kl_nats.any()
        assert trace.agreed.all()
        assert not trace.energies[..., 1].any()
        assert torch.equal(trace.loss_nats, trial.reference.loss_nats)
        assert trace.energies[..., 0].all()
    assert trial.arms[ArmKey("none", again=True)].energies.shape[0] == 3
    assert trial.arms[ArmKey("int8")].kl_nats[0] > 0


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_figures_are_those_of_the_library_alone(name: str) -> None:
    """Margins, losses and right answers are those of a run with the library's cache in the same steps, by plain formulae."""
    model, prompt = probed(name), prompt_of(60, 20)
    logits, _ = with_own_cache(model, list(prompt.tokens), (20, *[STEP] * 2, 8))
    shares = logits[20:].double().softmax(-1)

    trial = run(model, prompt, NoneCodec())

    best = shares.sort(-1, descending=True).values
    following = list(prompt.tokens[21:])
    torch.testing.assert_close(trial.margins, best[:, 0] - best[:, 1])
    torch.testing.assert_close(trial.reference.loss_nats, torch.stack([-shares[i, t].log() for i, t in enumerate(following)]))
    assert trial.reference.right.tolist() == [int(shares[i].argmax()) == t for i, t in enumerate(following)]


def test_the_kl_is_that_of_a_run_from_the_decoded_state() -> None:
    """The arm restored once is the library going on from a cache whose states were replaced by what int8 makes of them."""
    model, prompt, codec = probed("qwen3_5"), prompt_of(52, 20), Int8Codec()
    whole, _ = with_own_cache(model, list(prompt.tokens), (20, STEP, STEP))
    _, cache = with_own_cache(model, list(prompt.tokens), (20,))
    order = model.layout.order
    for layer in model.layout.state_layers:
        native = cache.layers[layer].recurrent_states[0]
        state = order.to_spec(native, model.spec)[0]
        scale = state.abs().amax(-2, keepdim=True) / 127
        state.copy_((state / scale).round() * scale)
    tail, depth = [], 20
    with torch.no_grad():
        for _ in range(2):
            ids = torch.tensor(prompt.tokens[depth : depth + STEP])[None]
            options = {"position_ids": torch.arange(depth, depth + STEP)[None], model.layout.cache_argument: cache}
            tail.append(model.model(input_ids=ids, use_cache=True, **options).logits[0])
            depth += STEP
    expected, found = whole[20:].double().softmax(-1), torch.cat(tail).double().softmax(-1)
    kl = (expected * (expected / found).log()).sum(-1)

    trace = run(model, prompt, codec).arms[ArmKey("int8")]

    torch.testing.assert_close(trace.kl_nats, kl, rtol=1e-3, atol=1e-10)
    assert trace.agreed.tolist() == (expected.argmax(-1) == found.argmax(-1)).tolist()


def test_more_hops_are_more_error() -> None:
    """The arm that is restored before each step starts as the other one and ends with a larger error in its state."""
    trial = run(probed("qwen3_5"), prompt_of(29 + 8 * STEP, 29), get_codec("int8", CPU))

    once, again = trial.arms[ArmKey("int8")], trial.arms[ArmKey("int8", again=True)]
    errors = (again.energies[..., 1].sum((1, 2)) / again.energies[..., 0].sum((1, 2))).sqrt()

    assert torch.equal(once.kl_nats[:STEP], again.kl_nats[:STEP])
    assert torch.equal(once.energies[0], again.energies[0])
    assert (once.energies.shape[0], again.energies.shape[0]) == (1, 8)
    assert errors[-1] > 1.2 * errors[0]
    assert again.kl_nats[-STEP:].mean() > 2 * once.kl_nats[-STEP:].mean()


def test_noise_floors_lie_under_int8() -> None:
    """Other chunks cost rounding only, bfloat16 checkpoints a fraction of int8, and neither is 0."""
    trial = run(probed("qwen3_5"), prompt_of(RECHUNK + 60, RECHUNK + 20), Int8Codec(), Bf16Codec())

    int8, bf16, rechunked = (trial.arms[key].kl_nats.mean() for key in (ArmKey("int8"), ArmKey("bf16"), RECHUNKED))

    assert 0 < rechunked < bf16 / 100
    assert bf16 < int8 / 3


def test_prompts_leave_nothing_behind() -> None:
    """A prompt gives the same figures whatever ran before it, shorter or longer."""
    lockstep = Lockstep(probed("qwen3_5"), [Int8Codec()], longest=80)
    prompt = prompt_of(50, 21)
    first = lockstep.run(prompt)
    lockstep.run(prompt_of(80, 40, seed=2))
    lockstep.run(prompt_of(30, 10, seed=3))
    second = lockstep.run(prompt)

    assert torch.equal(first.margins, second.margins)
    for key, trace in first.arms.items():
        assert torch.equal(trace.kl_nats, second.arms[key].kl_nats)
        assert torch.equal(trace.energies, second.arms[key].energies)


def test_passing_tokens_never_touch_the_kept_ones() -> None:
    """The KV that arms go on from and the KV that they write lie apart, and both in the store."""
    place = Place(probed("qwen3_5"), slots=1, longest=9)

    assert [*place.kept(0, 9), *place.passing(0, 9)] == list(range(1, place.kv.slots + 1))


def test_energies_are_what_the_codec_reports() -> None:
    """By layer and head, signal and error energy are those of the codec's own definition of a report."""
    model = probed("qwen3_5")
    active = model.active_pool(2)
    exact, other = active.allocate(), active.allocate()
    active.state[:, exact.index] = torch.randn(model.spec.shape)
    active.state[:, other.index] = torch.randn(model.spec.shape)

    found = state_energies(active, exact, other)

    for layer, state in enumerate(active.state):
        torch.testing.assert_close(found[layer], measure(state[exact.index], state[other.index])[:, :2])


class WrongAxis(Int8Codec):
    """Scales taken over d_k where they belong over d_v."""

    def _encode(self, state: Tensor, row: dict[str, Tensor]) -> Tensor:
        rows = torch.arange(state.shape[-1]) % state.shape[-2]
        row["scale"].copy_(state.abs().amax(-1)[:, None, rows] / 127)
        row["q"].copy_((state / row["scale"]).round().clamp(-127, 127))
        return measure(state, self._decode(row, state))


Compress = Callable[[CheckpointPool, ActivePool, ActiveSlot, CheckpointSlot], object]


def elsewhere(model: HybridModel, prompt: Prompt, depth: int) -> tuple[ActivePool, ActiveSlot]:
    """Another pool, with the state of ``prompt`` at ``depth``."""
    active = model.active_pool(1)
    slot = active.allocate()
    model.start(active, slot.index, kv=model.kv_store(depth)).run(prompt.tokens[:depth], range(1, depth + 1))
    return active, slot


def planted(fault: str, model: HybridModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the checkpoint pool in one way."""
    compress, restore = CheckpointPool.compress, CheckpointPool.restore
    earlier = elsewhere(model, prompt, prompt.depth - 1)
    foreign = elsewhere(model, prompt_of(60, 29, seed=9), 29)

    def off_by_one(self: CheckpointPool, source: ActivePool, source_slot: ActiveSlot, slot: CheckpointSlot) -> object:
        return compress(self, *earlier, slot)

    def foreign_window(self: CheckpointPool, source: ActivePool, source_slot: ActiveSlot, slot: CheckpointSlot) -> object:
        report = compress(self, source, source_slot, slot)
        self.side["conv"][:, slot.index] = foreign[0].side["conv"][:, foreign[1].index]
        return report

    def stale(self: CheckpointPool, source: ActivePool, source_slot: ActiveSlot, slot: CheckpointSlot) -> object:
        return compress(self, *foreign, slot)

    def swapped(self: CheckpointPool, slot: CheckpointSlot, target: ActivePool, target_slot: ActiveSlot) -> None:
        restore(self, slot, target, target_slot)
        heads = target.state[:, target_slot.index, :2].clone()
        target.state[:, target_slot.index, :2] = heads.flip(1)

    if fault == "two heads swapped":
        monkeypatch.setattr(CheckpointPool, "restore", swapped)
    else:
        faulty = {"depth off by one": off_by_one, "another prompt's conv window": foreign_window, "a stale checkpoint": stale}
        monkeypatch.setattr(CheckpointPool, "compress", faulty[fault])


@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid"])
@pytest.mark.parametrize("fault", ["depth off by one", "two heads swapped", "another prompt's conv window", "a stale checkpoint"])
def test_a_fault_of_state_is_no_rounding(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KL without a codec is no longer 0, and at its worst position it is far above any that int8 causes."""
    model, prompt = probed(name), prompt_of(60, 29)
    sound = run(model, prompt, Int8Codec()).arms[ArmKey("int8")].kl_nats.max()
    planted(fault, model, prompt, monkeypatch)

    trial = run(model, prompt, NoneCodec(), Int8Codec())

    assert trial.arms[ArmKey("none")].kl_nats.max() > 20 * sound
    assert trial.arms[ArmKey("int8")].kl_nats.max() > 20 * sound


@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid"])
def test_a_scale_over_the_wrong_axis_is_seen(name: str) -> None:
    """Its KL and its state error are several times those of int8."""
    model, prompt = probed(name), prompt_of(60, 29)
    trials = [run(model, prompt, codec).arms[ArmKey("int8")] for codec in (Int8Codec(), WrongAxis())]

    sound, faulty = (trace.kl_nats.mean() for trace in trials)
    sound_error, faulty_error = (trace.energies[0, ..., 1].sum() for trace in trials)

    assert faulty > 10 * sound
    assert faulty_error > 10 * sound_error

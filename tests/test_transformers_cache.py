"""Real models under a real PrefixCache: what is restored continues like what was never interrupted."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
import torch
from engine_side import KvSlots
from tiny_models import SUPPORTED, VOCAB, probed
from torch import Tensor

from mamba_checkpoint_cache import CheckpointPool, PrefixCache
from mamba_checkpoint_cache.integrations.transformers import HybridModel, KvStore

CHUNK_ENDS = (16, 40, 57, 58, 59)
CUT = 40
DRAWS = 6
SAME_ENERGY_SPREAD = 3.0
"""Errors of one energy move the logits by amounts up to 2.6 apart (measured, all models); a wiped state by 30 and more."""


@dataclass
class Server:
    """The smallest engine: one request at a time, a checkpoint at each end of a chunk."""

    model: HybridModel
    cache: PrefixCache
    slots: KvSlots
    store: KvStore | None

    @classmethod
    def start(cls, name: str, codec: str) -> Server:
        model, slots = probed(name), KvSlots(400)
        store = model.kv_store(slots.size)
        cache = PrefixCache(
            active=model.active_pool(3),
            checkpoints=CheckpointPool(model.spec, 32, codec=codec),
            kv=slots if store else None,
        )
        return cls(model, cache, slots, store)

    def serve(self, prompt: list[int]) -> tuple[int, Tensor]:
        """The depth that was reused, and the logits of every token after it."""
        active = self.cache.active
        match, slot = self.cache.match_prefix(prompt), active.allocate()
        for tensor in (active.state, *active.side.values()):
            tensor[:, slot.index] = torch.nan
        self.cache.restore(match, slot)
        ids = array("i", match.kv)
        if self.store:
            ids.extend(self.slots.take(len(prompt) - match.depth))
        session = self.model.start(active, slot.index, kv=self.store, kv_ids=ids[: match.depth], depth=match.depth)
        logits = []
        for end in CHUNK_ENDS:
            if end > session.depth:
                span = slice(session.depth, end)
                logits.append(session.run(prompt[span], ids[span], every=True))
                active.advance(slot, depth=end)
                kv = self.cache.commit(prompt, depth=end, source=slot, kv=ids[:end] if self.store else None, lease=match).kv
                ids[: len(kv)] = kv
        depth = match.depth
        self.cache.release(match)
        active.free(slot)
        self.cache.check()
        return depth, torch.cat(logits)


@pytest.fixture
def prompt() -> list[int]:
    return torch.randint(3, VOCAB, (CHUNK_ENDS[-1],)).tolist()


@pytest.mark.parametrize("name", SUPPORTED)
def test_exact_checkpoints_change_no_bit(name: str, prompt: list[int]) -> None:
    """With codec ``none``, a prompt sent again and a fork of it give bit for bit the logits of a server without them."""
    server = Server.start(name, "none")
    fork = [*prompt[:20], *prompt[:1:-1]][: len(prompt)]
    (_, straight), (_, straight_fork) = Server.start(name, "none").serve(prompt), Server.start(name, "none").serve(fork)

    served = [server.serve(tokens) for tokens in (prompt, prompt, fork, fork, prompt)]

    assert [depth for depth, _ in served] == [0, 58, 16, 58, 58]
    for (depth, logits), expected in zip(served, (straight, straight, straight_fork, straight_fork, straight), strict=True):
        assert torch.equal(logits, expected[depth:])


@dataclass
class Restored:
    """A state at depth CUT as it was, as int8 gave it back, and what the codec said of it."""

    server: Server
    prompt: list[int]
    ids: array[int]
    row: int
    native: Tensor
    given: Tensor
    report: Tensor

    @classmethod
    def make(cls, name: str, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> Restored:
        server = Server.start(name, "int8")
        cache, active = server.cache, server.cache.active
        reports, compress = [], cache.checkpoints.codec.compress
        monkeypatch.setattr(cache.checkpoints.codec, "compress", lambda *args: reports.append(compress(*args)) or reports[-1])
        first, slot = cache.match_prefix(prompt), active.allocate()
        cache.restore(first, slot)
        ids = server.slots.take(len(prompt)) if server.store else array("i")
        server.model.start(active, slot.index, kv=server.store).run(prompt[:CUT], ids[:CUT])
        active.advance(slot, depth=CUT)
        cache.commit(prompt, depth=CUT, source=slot, kv=ids[:CUT] if server.store else None, lease=first)
        again, other = cache.match_prefix(prompt), active.allocate()
        cache.restore(again, other)
        assert again.depth == CUT
        assert torch.equal(active.side["conv"][:, slot.index], active.side["conv"][:, other.index])
        return cls(
            server,
            prompt,
            ids,
            other.index,
            active.state[:, slot.index].clone(),
            active.state[:, other.index].clone(),
            reports[0][0],
        )

    def logits_from(self, state: Tensor) -> Tensor:
        """The rest of the prompt, continued from ``state``."""
        active = self.server.cache.active
        held = active.side["conv"][:, self.row].clone()
        active.state[:, self.row] = state
        session = self.server.model.start(active, self.row, kv=self.server.store, kv_ids=self.ids[:CUT], depth=CUT)
        logits = session.run(self.prompt[CUT:], self.ids[CUT:], every=True)
        active.side["conv"][:, self.row] = held
        return logits

    def perturbed(self) -> Tensor:
        """The native state with Gaussian noise of the error energy that the codec reported, head by head."""
        noise = torch.randn_like(self.native)
        energy = self.report[..., 1].to(noise.dtype)[..., None, None]
        return self.native + noise * (energy / noise.square().sum((-1, -2), keepdim=True)).sqrt()


@pytest.mark.parametrize("name", SUPPORTED)
def test_int8_is_off_by_what_it_reports(name: str, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element is within half a step of its key channel; the reported energies are those of the model's own state."""
    found = Restored.make(name, prompt, monkeypatch)

    half_step = found.native.abs().amax(-2, keepdim=True).clamp(min=1e-8) / 127 / 2
    assert ((found.given - found.native).abs() <= half_step * (1 + 1e-4)).all()
    energies = [found.native, found.given - found.native]
    for index, tensor in enumerate(energies):
        torch.testing.assert_close(found.report[..., index], tensor.double().square().sum((-1, -2)), rtol=1e-3, atol=0)
    assert (found.report[..., 1] > 0).all()


@pytest.mark.parametrize("name", SUPPORTED)
def test_int8_moves_logits_no_more_than_noise_of_the_reported_energy(
    name: str, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An int8 restore moves the logits as random errors of the reported size do; wiping the state moves them further."""
    found = Restored.make(name, prompt, monkeypatch)
    exact = found.logits_from(found.native)

    def deviation(state: Tensor) -> float:
        return float((found.logits_from(state) - exact).norm())

    bound = SAME_ENERGY_SPREAD * max(deviation(found.perturbed()) for _ in range(DRAWS))
    assert 0 < deviation(found.given) <= bound
    assert deviation(torch.zeros_like(found.native)) > bound

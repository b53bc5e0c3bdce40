"""One prompt, run by several arms in the same steps: a reference that never stopped, and those that go on from another state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec import Codec
from mamba_checkpoint_cache.drift.logits import kl_nats
from mamba_checkpoint_cache.evaluation.arms import Arm, ArmKey, Place, RechunkedArm, RestoredArm, state_energies
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.integrations.transformers import HybridModel

STEP = 16
"""Tokens that all arms run at a time; and those between two restores of an arm that is restored again and again."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One run over the tokens after the prefix, on the host.

    ``kl_nats`` (float64) and ``agreed`` (bool), ``[positions]``: against the reference, after each token. ``loss_nats`` (float64)
    and ``right`` (bool), ``[positions - 1]``: of the prompt's next token. ``energies``: those of :func:`state_energies` at each
    restore, float64 ``[restores, layers, heads, 2]``; none for the reference.
    """

    kl_nats: Tensor
    agreed: Tensor
    loss_nats: Tensor
    right: Tensor
    energies: Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """What one prompt showed. ``margins``: the probability of the reference's likeliest token less that of its second."""

    prompt: Prompt
    margins: Tensor
    reference: Trace
    arms: dict[ArmKey, Trace]


class Lockstep:
    """Runs prompts of up to ``longest`` tokens, with two arms per codec: restored once, and restored before every step.

    Holds two active slots per codec and two more, a checkpoint for each arm, and KV for twice ``longest`` tokens.
    """

    def __init__(self, model: HybridModel, codecs: Sequence[Codec], *, longest: int) -> None:
        self._place = Place(model, slots=2 * len(codecs) + 2, longest=longest)
        self._exact = self._place.slot()
        self._arms: list[Arm] = [RestoredArm(self._place, codec, again=again) for codec in codecs for again in (False, True)]
        self._arms.append(RechunkedArm(self._place))

    def run(self, prompt: Prompt) -> Trial:
        """Every arm over ``prompt``, a step at a time, so that no logits are held for longer than a step."""
        tokens, depth, place = prompt.tokens, prompt.depth, self._place
        reference = place.begin(self._exact)
        reference.run(tokens[:depth], place.kept(0, depth))
        sessions = [arm.start(prompt, self._exact) for arm in self._arms]
        own, records, margins = _Record(), [_Record() for _ in sessions], []
        for begin in range(depth, len(tokens), STEP):
            end = min(begin + STEP, len(tokens))
            step, following, kv = tokens[begin:end], tokens[begin + 1 : end + 1], place.passing(begin, end)
            for arm, record in zip(self._arms, records, strict=True):
                if begin == depth or arm.restore_again():
                    record.energies.append(state_energies(place.active, self._exact, arm.slot))
            expected = reference.run(step, kv, every=True)
            own.add(expected, expected, following)
            likeliest = expected.double().softmax(-1).topk(2).values
            margins.append((likeliest[:, 0] - likeliest[:, 1]).cpu())
            for session, record in zip(sessions, records, strict=True):
                record.add(expected, session.run(step, kv, every=True), following)
        traces = {arm.key: record.trace() for arm, record in zip(self._arms, records, strict=True)}
        return Trial(prompt, torch.cat(margins), own.trace(), traces)


@dataclass(slots=True)
class _Record:
    """A trace as it grows."""

    kl_nats: list[Tensor] = field(default_factory=list)
    agreed: list[Tensor] = field(default_factory=list)
    loss_nats: list[Tensor] = field(default_factory=list)
    right: list[Tensor] = field(default_factory=list)
    energies: list[Tensor] = field(default_factory=list)

    def add(self, expected: Tensor, found: Tensor, following: Sequence[int]) -> None:
        """Logits ``[tokens, vocabulary]`` of a step, and the tokens that come next, of which the last may be missing."""
        self.kl_nats.append(kl_nats(expected, found).cpu())
        self.agreed.append((expected.argmax(-1) == found.argmax(-1)).cpu())
        target = torch.tensor(following, dtype=torch.long, device=found.device)
        known = found[: len(following)]
        self.loss_nats.append(-known.double().log_softmax(-1).gather(-1, target[:, None])[:, 0].cpu())
        self.right.append((known.argmax(-1) == target).cpu())

    def trace(self) -> Trace:
        """What was recorded, in one piece."""
        kl, agreed, loss, right = (torch.cat(parts) for parts in (self.kl_nats, self.agreed, self.loss_nats, self.right))
        return Trace(kl, agreed, loss, right, torch.stack(self.energies) if self.energies else torch.empty(0))

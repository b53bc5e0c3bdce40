"""How a model may be continued from a cached state, as the probe found it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """In what steps a model continues exactly."""

    CHUNKS = "chunks"
    TOKENS = "tokens"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far continued logits are from those of one pass over the whole prompt.

    ``relative``: norm of the difference over the norm of the centred logits, which three in four positions stay under.
    ``largest``: the largest difference of one logit. ``effect``: by how much, relatively, the logits of some position change
    when the recurrent state, or else the conv window, is wiped first; 0.0 exactly if the model never looked at it.
    ``bitwise``: continuing from a copy of the state in another slot gave the same bits.
    """

    relative: float
    largest: float
    effect: float
    bitwise: bool


@dataclass(frozen=True, slots=True)
class Continuation:
    """The steps in which a model may be run, and what was measured.

    ``multiple``: a step of several tokens may start at any depth that is a multiple of this. ``noise``: the relative
    deviation that rounding alone causes in this model. ``message``: one sentence for the user.
    """

    mode: Mode
    multiple: int = 1
    noise: float = 0.0
    chunks: Deviation | None = None
    tokens: Deviation | None = None
    message: str = "not probed"

    @property
    def bitwise(self) -> bool:
        """Whether going on from a restored exact state gives the same bits as never having stopped, in the same steps."""
        return all(measured.bitwise for measured in (self.chunks, self.tokens) if measured is not None)

    def steps(self, depth: int, count: int) -> list[int]:
        """``count`` tokens from ``depth`` on, cut into the steps that the model may be run in."""
        if depth == 0 and count:
            return [count]
        if self.mode is not Mode.CHUNKS:
            return [1] * count
        lone = min(-depth % self.multiple, count)
        return [1] * lone + ([count - lone] if count > lone else [])


ANY_STEPS = Continuation(Mode.CHUNKS)
"""Runs whatever it is given as it is: for models that were not probed."""

"""How long greedy decoding from a restored state gives the very tokens that it gives from the exact one."""

from __future__ import annotations

from collections.abc import Sequence

from mamba_checkpoint_cache.codec import Codec
from mamba_checkpoint_cache.evaluation.arms import Place, RestoredArm
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.integrations.transformers import HybridModel

MAX_TOKENS = 64
"""Decoded tokens after which a continuation counts as the same."""


class GreedyDivergence:
    """Decodes from prompts of up to ``longest`` tokens with several codecs."""

    def __init__(self, model: HybridModel, codecs: Sequence[Codec], *, longest: int, max_tokens: int = MAX_TOKENS) -> None:
        self._place = Place(model, slots=len(codecs) + 1, longest=longest + max_tokens)
        self._exact = self._place.slot()
        self._arms = [RestoredArm(self._place, codec, again=False) for codec in codecs]
        self._max_tokens = max_tokens

    def run(self, prompt: Prompt) -> dict[str, int]:
        """By codec: tokens decoded alike before the first that differs; ``max_tokens`` if none does.

        The state is restored at the prompt's depth, one token more of the prompt is run, and all that follows is decoded.
        """
        depth, place = prompt.depth, self._place
        reference = place.begin(self._exact)
        reference.run(prompt.tokens[:depth], place.kept(0, depth))
        sessions = [arm.start(prompt, self._exact) for arm in self._arms]
        alike = {arm.key.name: 0 for arm in self._arms}
        running = dict(zip(alike, sessions, strict=True))
        token = prompt.tokens[depth]
        # Up to the first difference both decode after the same tokens: those of the reference serve all.
        for position in range(depth, depth + self._max_tokens):
            kv = place.passing(position, position + 1)
            expected = int(reference.run([token], kv).argmax())
            found = {name: int(session.run([token], kv).argmax()) for name, session in running.items()}
            running = {name: session for name, session in running.items() if found[name] == expected}
            if not running:
                break
            for name in running:
                alike[name] += 1
            token = expected
        return alike

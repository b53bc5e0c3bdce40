"""Everything that is measured of a model, before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mamba_checkpoint_cache.codec import Codec, get_codec
from mamba_checkpoint_cache.evaluation.divergence import GreedyDivergence
from mamba_checkpoint_cache.evaluation.lockstep import Lockstep, Trial
from mamba_checkpoint_cache.evaluation.noise import Bf16Codec
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.integrations.transformers import HybridModel


@dataclass(frozen=True, slots=True)
class Measurement:
    """``trials`` by task. ``codecs``: those that were asked for, by name. ``alike``: by codec, for each prompt of a task without
    known answers, the tokens that greedy decoding gives from both states.
    """

    codecs: dict[str, Codec]
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    alike: dict[str, list[int]] = field(default_factory=dict)


def steps_of(prompts: Sequence[Prompt]) -> int:
    """How many times :func:`measure` advances."""
    return len(prompts) + sum(not prompt.answers for prompt in prompts)


def measure(
    model: HybridModel, prompts: Sequence[Prompt], codecs: Sequence[str | Codec], advance: Callable[[int], None]
) -> Measurement:
    """Run every prompt from its exact state, and from what each codec, a cast to bfloat16, and other chunks make of it.

    ``advance`` is called with 1 after each step.
    """
    measured = [get_codec(codec, model.device, model.spec.num_layers) if isinstance(codec, str) else codec for codec in codecs]
    found = Measurement({codec.name: codec for codec in measured})
    longest = max(len(prompt.tokens) for prompt in prompts)
    lockstep = Lockstep(model, [*measured, Bf16Codec()], longest=longest)
    divergence = GreedyDivergence(model, measured, longest=longest)
    for prompt in prompts:
        found.trials.setdefault(prompt.task, []).append(lockstep.run(prompt))
        advance(1)
        if not prompt.answers:
            for name, count in divergence.run(prompt).items():
                found.alike.setdefault(name, []).append(count)
            advance(1)
    return found

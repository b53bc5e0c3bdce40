"""Which layers are worth another format: the drift that each causes for itself, and the choice that follows.

By logits, and not by the error of the state: a layer whose state is far off may hardly be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec import Codec, get_codec
from mamba_checkpoint_cache.codec.layered import codecs_by_layer, layered
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.drift.logits import kl_nats
from mamba_checkpoint_cache.evaluation.arms import Checkpoint, Place
from mamba_checkpoint_cache.evaluation.lockstep import STEP
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.integrations.transformers import HybridModel
from mamba_checkpoint_cache.pools import CheckpointPool
from mamba_checkpoint_cache.slots import ActiveSlot

LEFT = 0.5
"""The share of the drift that a suggestion leaves at most."""


def per_layer(
    model: HybridModel, prompts: Sequence[Prompt], codec: Codec, keep: str, budget: DriftBudget, advance: Callable[[int], None]
) -> dict[str, Any]:
    """What each recurrent layer costs in ``codec`` for itself, and which of them to store in the format ``keep`` instead.

    Every KL is the mean over the 16 tokens after one restore, in nats.

    - ``rows``: by ``layer``, counted from 0 among the recurrent ones: which ``model_layer`` it is; its ``kl_mean`` with all
      others exact, and its ``share`` of their sum; the ``bytes`` that a checkpoint takes more with this layer in ``keep``.
    - ``kl_mean``, ``bytes_per_checkpoint``: of ``codec`` itself.
    - ``suggestion``: the ``codec`` that has the fewest layers in ``keep``, those with the largest KL first, so that at most half
      of the sum is left, and no more than ``budget`` allows: ``kl_expected``. What that very codec gives: ``kl_mean``,
      ``within`` the budget or not, ``bytes_per_checkpoint``. The same in a ``text``.

    ``advance`` is called with 1 for each prompt, twice.
    """
    exact, kept = (get_codec(name, model.device) for name in ("none", keep))
    plain = codecs_by_layer(codec, model.spec.num_layers)
    alone = [_with([exact] * len(plain), [layer], codec) for layer, codec in enumerate(plain)]
    whole, *costs = mean_kls(model, prompts, [codec, *alone], advance)
    chosen = worth_keeping(costs, budget)
    suggested = _with(plain, chosen, kept)
    (found,) = mean_kls(model, prompts, [suggested], advance)
    total, size = math.fsum(costs), _bytes(model, codec)
    return {
        "keep": keep,
        "kl_mean": whole,
        "bytes_per_checkpoint": size,
        "rows": [
            {
                "layer": layer,
                "model_layer": model.layout.state_layers[layer],
                "kl_mean": cost,
                "share": cost / total if total else 0.0,
                "bytes": _bytes(model, _with(plain, [layer], kept)) - size,
            }
            for layer, cost in enumerate(costs)
        ],
        "suggestion": {
            "codec": suggested.name,
            "kl_expected": math.fsum(cost for layer, cost in enumerate(costs) if layer not in chosen),
            "kl_mean": found,
            "within": budget.holds_kl(found),
            "bytes_per_checkpoint": _bytes(model, suggested),
            "text": f'--codec "{suggested.name}" costs {found:.2g} nats where {codec.name} costs {whole:.2g}, and '
            f"{_bytes(model, suggested):,} bytes where that takes {size:,}: "
            f"{'within' if budget.holds_kl(found) else 'OVER'} the budget of {budget.kl_nats:g} nats.",
        },
    }


def worth_keeping(costs: Sequence[float], budget: DriftBudget) -> list[int]:
    """The layers of a suggestion, by what each costs for itself in nats: see :func:`per_layer`. What is no number is worst."""
    left = {layer: math.inf if math.isnan(cost) else cost for layer, cost in enumerate(costs)}
    ceiling = min(budget.kl_nats, LEFT * math.fsum(left.values()))
    chosen = []
    while left and math.fsum(left.values()) > ceiling:
        chosen.append(max(left, key=left.__getitem__))
        del left[chosen[-1]]
    return chosen


def mean_kls(
    model: HybridModel, prompts: Sequence[Prompt], codecs: Sequence[Codec], advance: Callable[[int], None]
) -> list[float]:
    """The mean KL (nats) of going on from what each codec makes of a state, against going on from an exact copy of it.

    Holds two active slots, one checkpoint at a time, and KV for twice the longest prompt.
    """
    place = Place(model, slots=2, longest=max(len(prompt.tokens) for prompt in prompts))
    exact, restored = place.slot(), place.slot()
    native = get_codec("none", model.device)
    found: list[list[Tensor]] = [[] for _ in codecs]
    for prompt in prompts:
        place.begin(exact).run(prompt.tokens[: prompt.depth], place.kept(0, prompt.depth))
        expected = _logits(place, prompt, native, exact, restored)
        for codec, kls in zip(codecs, found, strict=True):
            kls.append(kl_nats(expected, _logits(place, prompt, codec, exact, restored)).cpu())
        advance(1)
    return [float(torch.cat(kls).mean()) for kls in found]


def _logits(place: Place, prompt: Prompt, codec: Codec, exact: ActiveSlot, restored: ActiveSlot) -> Tensor:
    """The logits of a step from the prompt's prefix on, whose exact state is in ``exact``, after a pass through ``codec``."""
    end = min(prompt.depth + STEP, len(prompt.tokens))
    Checkpoint(place.model, codec).pass_through(place.active, exact, restored)
    step = prompt.tokens[prompt.depth : end]
    return place.go_on(restored, prompt.depth).run(step, place.passing(prompt.depth, end), every=True)


def _with(codecs: Sequence[Codec], layers: Sequence[int], other: Codec) -> Codec:
    """The codec that has ``other`` for ``layers``."""
    return layered([other if layer in layers else codec for layer, codec in enumerate(codecs)])


def _bytes(model: HybridModel, codec: Codec) -> int:
    return CheckpointPool.bytes_per_slot_for(model.spec, codec)

"""Trains a small model from nothing: ``python -m mamba_checkpoint_cache.small_models.train gdn-hybrid --out FOLDER``."""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from mamba_checkpoint_cache.small_models.architectures import build_gdn_hybrid, build_mamba2_hybrid
from mamba_checkpoint_cache.small_models.card import Run, save
from mamba_checkpoint_cache.small_models.recall import KEYS, VALUES
from mamba_checkpoint_cache.small_models.text import training_text

BUILDERS = {"gdn-hybrid": build_gdn_hybrid, "mamba2-hybrid": build_mamba2_hybrid}
STEPS = 4200
TOKENS_PER_STEP = 2048
"""Half of them text, half recall."""
STAGES = ((0.5, 128, 32), (0.8, 256, 48), (1.0, 1024, 48))
"""Up to which share of the steps, tokens of a sequence, most pairs of a recall prompt. Short sequences teach recall fastest; the
long ones at the end, what the attention layer sees at a distance."""
ADAM_RATE, MUON_RATE = 3e-3, 2e-2
WARMUP_STEPS = 50
DECAY_FROM = 0.4
LAST_RATE = 0.05
MASTERED, FIRST_PAIRS, GROWTH = 0.9, 4, 1.5
REPORT_EVERY = 100


@dataclass(slots=True)
class Curriculum:
    """More pairs once those so far are mastered: with many from the start, nothing is learned."""

    pairs: int = FIRST_PAIRS
    accuracy: float = 0.0

    def learned(self, accuracy: float, most: int) -> None:
        """Take note of a step's share of right answers; ``most`` pairs are asked for at this stage."""
        self.accuracy += 0.1 * (accuracy - self.accuracy)
        if self.accuracy > MASTERED and self.pairs < most:
            self.pairs, self.accuracy = min(most, math.ceil(GROWTH * self.pairs)), 0.0


class Batches:
    """Random windows of text and random recall prompts, from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._text = torch.frombuffer(bytearray(training_text()), dtype=torch.uint8).long()
        self._keys, self._values = (torch.tensor(list(symbols)) for symbols in (KEYS, VALUES))

    def text(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens ``[count, length]`` and what follows each."""
        begins = torch.randint(len(self._text) - length, (count, 1), generator=self._random)
        windows = self._text[begins + torch.arange(length + 1)]
        return windows[:, :-1], windows[:, 1:]

    def recall(self, count: int, length: int, most: int) -> tuple[Tensor, Tensor]:
        """Tokens ``[count, length]``, and after each key that was told before its value; -100 elsewhere.

        All pairs are told once and then asked for, round after round, each round in an order of its own.
        """
        pairs = int(torch.randint(FIRST_PAIRS, most + 1, (), generator=self._random))
        rows = torch.stack([self._recall_row(pairs, length + 1) for _ in range(count)])
        targets = rows[:, 1:].clone()
        targets[:, : 2 * pairs + 2] = -100
        targets[:, 1::2] = -100
        return rows[:, :-1], targets

    def _recall_row(self, pairs: int, length: int) -> Tensor:
        keys = self._keys[torch.randperm(len(self._keys), generator=self._random)[:pairs]]
        values = self._values[torch.randint(len(self._values), (pairs,), generator=self._random)]
        told = torch.stack((keys, values), 1)
        rounds = [told[torch.randperm(pairs, generator=self._random)].flatten() for _ in range(length // (2 * pairs))]
        opened, closed = torch.tensor([ord("<")]), torch.tensor([ord(">")])
        return torch.cat([opened, told.flatten(), closed, *rounds])[:length]


class Optimizers:
    """Muon for the weight matrices, which it trains in half the steps, and AdamW for all the rest."""

    def __init__(self, model: PreTrainedModel) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name and min(p.shape) > 8]
        chosen = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in chosen]
        self._parts = (
            (torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01), MUON_RATE),
            (torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0), ADAM_RATE),
        )

    def step(self, rate: float) -> None:
        """Follow the gradients at ``rate`` times the full learning rates, and clear them."""
        for optimizer, full_rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * full_rate
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()


def train(name: str, *, steps: int = STEPS, seed: int = 0) -> PreTrainedModel:
    """The model called ``name``, trained. The same weights each time, on the same machine and version of torch and Python."""
    model = BUILDERS[name](seed=seed)
    model.train()
    batches, optimizers, curriculum = Batches(seed), Optimizers(model), Curriculum()
    for step in range(steps):
        _, length, most = next(stage for stage in STAGES if step < stage[0] * steps)
        count = TOKENS_PER_STEP // length // 2
        text, following = batches.text(count, length)
        prompts, answers = batches.recall(count, length, min(curriculum.pairs, most))
        logits = model(input_ids=torch.cat((text, prompts)), use_cache=False).logits
        losses = [
            cross_entropy(part.flatten(0, 1), targets.flatten())
            for part, targets in ((logits[:count], following), (logits[count:], answers))
        ]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(_rate(step, steps))
        right = logits[count:].argmax(-1)[answers >= 0] == answers[answers >= 0]
        curriculum.learned(float(right.float().mean()), most)
        if (step + 1) % REPORT_EVERY == 0:
            bits = float(losses[0]) / math.log(2)
            mastered = f"{curriculum.accuracy:.1%} of {curriculum.pairs} pairs"
            sys.stderr.write(f"step {step + 1}/{steps}: {bits:.2f} bits per byte, {mastered}\n")
    model.train(mode=False)
    return model


def _rate(step: int, steps: int) -> float:
    """Linear warmup, a plateau, then linear decay."""
    decay = (1 - step / steps) / (1 - DECAY_FROM)
    return min(1.0, (step + 1) / WARMUP_STEPS, max(LAST_RATE, decay))


def main() -> None:
    """Parse the command, train, and write the model with its card."""
    parser = argparse.ArgumentParser(description="Train one of the small models that ship with the package.")
    parser.add_argument("name", choices=tuple(BUILDERS))
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # a second one gains little at this size, and changes the last bits
    started = time.process_time()
    model = train(args.name, steps=args.steps, seed=args.seed)
    save(model, Run(args.name, args.steps, args.seed, (time.process_time() - started) / 60), args.out)


if __name__ == "__main__":
    main()

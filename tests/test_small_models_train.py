"""The training of the small models: its data, its curriculum, and that it gives the same weights each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mamba_checkpoint_cache.serving.models import load_model
from mamba_checkpoint_cache.small_models.card import Run, save
from mamba_checkpoint_cache.small_models.train import BUILDERS, STAGES, Batches, Curriculum, train

KEEP = -100
"""Targets that no loss is taken of."""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", BUILDERS)
def test_it_is_reproducible(name: str, tmp_path: Path) -> None:
    """The same seed gives the same bits, another one others; the folder that comes of it can be served."""
    first, again, other = train(name, steps=2), train(name, steps=2), train(name, steps=2, seed=1)

    assert all(torch.equal(value, again.state_dict()[key]) for key, value in first.state_dict().items())
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    save(first, Run(name, steps=2, seed=0, minutes=0.1), tmp_path / name)
    loaded = load_model(str(tmp_path / name))
    assert torch.equal(loaded.model.lm_head.weight, first.lm_head.weight)
    assert f"train {name} --out {name} --steps 2 --seed 0" in (tmp_path / name / "README.md").read_text(encoding="utf-8")


def test_only_values_that_were_told_are_asked_for() -> None:
    """A loss is taken after each key beyond the pairs, and its target is the value that the pairs give for it."""
    tokens, targets = Batches(0).recall(4, 128, most=12)

    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        pairs = (row.index(ord(">")) - 1) // 2
        told = {row[1 + 2 * i]: row[2 + 2 * i] for i in range(pairs)}
        asked = range(2 * pairs + 2, 128, 2)
        assert 4 <= len(told) == pairs <= 12
        assert [wanted[i] for i in asked] == [told[row[i]] for i in asked]
        assert sum(target != KEEP for target in wanted) == len(asked)


def test_text_targets_are_the_next_bytes() -> None:
    """Each token's target is the token after it."""
    tokens, following = Batches(0).text(2, 64)

    assert torch.equal(tokens[:, 1:], following[:, :-1])


def test_pairs_are_added_once_those_so_far_are_mastered() -> None:
    """Half as many again each time, and never more than the stage asks for."""
    curriculum, seen = Curriculum(), []
    for _ in range(200):
        curriculum.learned(1.0, most=STAGES[0][2])
        seen.append(curriculum.pairs)

    assert sorted(set(seen)) == [4, 6, 9, 14, 21, 32]
    assert seen == sorted(seen)
    curriculum.learned(0.0, most=48)
    assert curriculum.pairs == 32

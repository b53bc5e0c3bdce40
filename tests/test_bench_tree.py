"""The tree benchmark: what it caches, what it samples and what it reports; never how fast that was."""

from __future__ import annotations

from itertools import islice
from random import Random
from statistics import fmean

import pytest

from mamba_checkpoint_cache.bench import tree
from mamba_checkpoint_cache.bench.tree import Prompt, generate_prompts


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    return list(islice(generate_prompts(Random(seed)), count))


def test_rows_have_the_public_keys() -> None:
    """One row per size, in their order, with times that were measured."""
    rows = tree.run((30, 60), samples=20)["rows"]

    assert [row["prompts"] for row in rows] == [30, 60]
    assert all(row.keys() >= {"prompts", "tokens_per_prompt", "match_us", "insert_us"} for row in rows)
    assert all(row["match_us"] > 0 and row["insert_us"] > 0 for row in rows)


def test_prompts_have_880_tokens_on_average() -> None:
    """Over many sessions; each prompt is distinct."""
    made = prompts(3000)

    assert fmean(len(prompt.tokens) for prompt in made) == pytest.approx(880, rel=0.03)
    assert len({prompt.tokens.tobytes() for prompt in made}) == len(made)


def test_prompts_branch() -> None:
    """Most take over all of an earlier prompt, some fork inside one, and all share a few openings."""
    made = prompts(2000)
    seen = {prompt.tokens.tobytes() for prompt in made}
    inherited = [prompt.tokens[: prompt.inherited].tobytes() for prompt in made]

    continued = sum(prefix in seen for prefix in inherited) / len(made)
    assert 0.4 < continued < 0.6
    assert len({prompt.tokens[:50].tobytes() for prompt in made}) == len(tree.SYSTEM_TOKENS)


def test_prompts_are_repeatable() -> None:
    """The generator decides alone."""
    assert prompts(40, seed=5) == prompts(40, seed=5)
    assert prompts(40, seed=5) != prompts(40, seed=6)


def test_every_prompt_is_cached_and_found_again() -> None:
    """An inserted prompt has a checkpoint at its end, and a longer one matches all of it."""
    bench = tree._Bench(50)
    made = prompts(50)
    for prompt in made:
        bench.insert(prompt.tokens)

    assert bench._cache.checkpoints.slots.counts.evictable == 50
    assert all(bench.match([*prompt.tokens, 1])[0] == len(prompt.tokens) for prompt in made)
    bench._cache.check()


def test_samples_reuse_what_is_cached() -> None:
    """The sampled prompts continue cached ones: over a third of their tokens is found, and never all of them."""
    (row,) = tree.run((200,), samples=60)["rows"]

    assert 0.35 < row["reused_tokens"] / row["tokens_per_prompt"] < 0.8

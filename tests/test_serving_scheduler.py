"""Where steps end."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from hash_model import greedy

from mamba_checkpoint_cache.serving.request import Request
from mamba_checkpoint_cache.serving.scheduler import Running, Scheduler


def running(depth: int, prompt: int = 100, output: int = 0, branch: int | None = None) -> Running:
    session, lease = SimpleNamespace(depth=depth), SimpleNamespace(branch_depth=branch)
    sequence = array("i", range(prompt + output))
    return Running(Request(list(range(prompt)), greedy(20)), None, lease, session, None, sequence, array("i"), 0)


@pytest.mark.parametrize(
    ("begin", "options", "end"),
    [
        (0, {}, 16),
        (16, {}, 32),
        (5, {}, 16),
        (96, {}, 100),
        (100, {"output": 1}, 101),
        (111, {"output": 12}, 112),
        (0, {"branch": 7}, 7),
        (7, {"branch": 7}, 16),
        (0, {"branch": 16}, 16),
        (0, {"branch": 40}, 16),
        (32, {"branch": 40}, 40),
        (32, {"branch": 5}, 48),
    ],
)
def test_a_step_ends_at_the_grid_the_branch_or_the_end(begin: int, options: dict[str, int], end: int) -> None:
    """A step ends at the next multiple of the chunk, or before it where the branch or the sequence does."""
    assert running(begin, **options).step_end(16) == end


@pytest.mark.parametrize(
    ("depth", "branch", "worth"),
    [(16, None, True), (96, None, True), (100, None, False), (7, None, False), (7, 7, True), (112, None, False), (100, 7, False)],
)
def test_checkpoints_are_at_chunk_ends_and_branches_of_the_prompt(depth: int, branch: int | None, worth: bool) -> None:
    """Within the prompt, whole chunks and the branch point are worth a checkpoint; its ragged end and what decodes are not."""
    assert running(depth, branch=branch, output=20).worth_checkpoint(16) is worth


def test_the_prefill_that_waited_longest_runs_next() -> None:
    """Of several prefills one runs in each step, in turn; all who decode run in every step."""
    scheduler = Scheduler(None, 10)
    first, second, decoding = running(0), running(0), running(100, output=1)
    scheduler.running.extend([first, second, decoding])

    turns = [scheduler.turn() for _ in range(3)]

    assert turns == [[first, decoding], [second, decoding], [first, decoding]]


def test_kv_is_promised_at_its_longest() -> None:
    """A request starts only if all that run could still reach their longest beside it."""
    scheduler = Scheduler(359, 10)
    scheduler.running.extend([running(0), running(50)])
    scheduler.waiting.append(Request(list(range(100)), greedy(20)))

    assert not scheduler.may_start()
    scheduler.running.pop()
    assert scheduler.may_start()

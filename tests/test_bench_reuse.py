"""The knee of the reused share on a real model, and a recorded workload replayed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from mamba_checkpoint_cache import ActivePool, CheckpointPool, PrefixCache
from mamba_checkpoint_cache.bench import reuse, trace
from mamba_checkpoint_cache.bench.stand_in import TINY, NoCodec
from mamba_checkpoint_cache.bench.trace import BLOCK_TOKENS, Recorded, read_recording
from mamba_checkpoint_cache.serving.options import OptionError


def nothing(steps: int) -> None:
    pass


@pytest.fixture(scope="module")
def result() -> dict:
    return reuse.run(native_slots=10)


def test_the_pools_take_equal_bytes(result: dict) -> None:
    """Neither pool exceeds ``pool_bytes``, padding row included, and neither has room for one slot more."""
    for arm in (result["none"], result["int8"]):
        assert (arm["slots"] + 1) * arm["bytes_per_slot"] <= result["pool_bytes"] < (arm["slots"] + 2) * arm["bytes_per_slot"]
    assert result["none"]["slots"] == 10
    assert result["state_dtype"] == "float32"
    assert result["bytes_ratio"] == result["none"]["bytes_per_slot"] / result["int8"]["bytes_per_slot"] >= 2.9


def test_the_knee_is_where_the_share_falls_under_half(result: dict) -> None:
    """One prefix fewer is still reused, and so are all smaller numbers that were tried; no larger one is."""
    for arm in (result["none"], result["int8"]):
        curve = dict(arm["curve"])
        assert curve[arm["knee"]] < 0.5 <= curve[arm["knee"] - 1]
        assert all((share < 0.5) == (prefixes >= arm["knee"]) for prefixes, share in curve.items())


def test_int8_keeps_as_many_more_prefixes_as_its_slots_are_smaller(result: dict) -> None:
    """The knee moves by the ratio of bytes, to within one prefix of so small a pool."""
    native, stored = result["none"]["knee"], result["int8"]["knee"]

    assert stored + 1 >= 0.95 * result["bytes_ratio"] * (native - 1)
    assert stored > 2.5 * native


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_whole_blocks_are_reused() -> None:
    """The second of two equal prompts reuses its whole blocks; one that shares a block makes that a checkpoint for the third."""
    again = Recorded(2 * BLOCK_TOKENS + 100, [1, 2, 3])
    branch = [Recorded(3 * BLOCK_TOKENS, [1, last, last + 1]) for last in (10, 20)]

    assert trace.reused_share([again, again], 8, nothing) == 2 * BLOCK_TOKENS / (2 * again.num_tokens)
    assert trace.reused_share([again, *branch], 8, nothing) == BLOCK_TOKENS / (again.num_tokens + 6 * BLOCK_TOKENS)


def expanded_share(recording: list[Recorded], slots: int) -> float:
    """The same replay on 512 tokens for each block, in pages of a block."""
    active = ActivePool(TINY, 1)
    cache = PrefixCache(active=active, checkpoints=CheckpointPool(TINY, slots, codec=NoCodec()), page_size=BLOCK_TOKENS)
    slot = active.allocate()
    reused = 0
    for num_tokens, blocks in recording:
        tokens = [block * BLOCK_TOKENS + i for block in blocks for i in range(BLOCK_TOKENS)][:num_tokens]
        match = cache.match_prefix(tokens)
        reused += match.depth
        cache.restore(match, slot)
        for depth in (match.branch_depth, num_tokens // BLOCK_TOKENS * BLOCK_TOKENS):
            if depth:
                active.advance(slot, depth=depth)
                cache.commit(tokens, depth=depth, source=slot, lease=match)
        cache.release(match)
    cache.check()
    return reused / sum(num_tokens for num_tokens, _ in recording)


def test_one_token_per_block_changes_nothing() -> None:
    """Blocks as tokens give the very share that 512 tokens for each block give, also under eviction and for whole last blocks."""
    random = Random(4)
    recording = []
    for _ in range(120):
        blocks = [random.randrange(2), *(random.randrange(3) + 10 * depth for depth in range(1, random.randint(2, 6)))]
        recording.append(Recorded(len(blocks) * BLOCK_TOKENS - random.choice([0, 1, 300]), blocks))

    shares = {slots: trace.reused_share(recording, slots, nothing) for slots in (3, 20, 500)}

    assert shares == {slots: expanded_share(recording, slots) for slots in shares}
    assert shares[3] < shares[20] < shares[500]


def test_a_recording_is_replayed_at_equal_bytes(tmp_path: Path) -> None:
    """Rows by bytes, the slots of a released model's states in each."""
    record = {"timestamp": 0, "input_length": 1300, "output_length": 9, "hash_ids": [7, 8, 9]}

    replayed = trace.replay_trace(write(tmp_path / "trace.jsonl", record, record))

    assert (replayed["model"], replayed["requests"]) == ("Qwen3-Next-80B-A3B", 2)
    assert replayed["rows"][0] == {
        "pool_bytes": 8 * 2**30,
        "none": {"slots": 110, "reused_share": 1024 / 2600},
        "int8": {"slots": 403, "reused_share": 1024 / 2600},
        "int8-pivot": {"slots": 407, "reused_share": 1024 / 2600},
    }


@pytest.mark.parametrize(
    "record", [{"input_length": 5}, {"input_length": 5, "hash_ids": None}, [1], {"input_length": "x", "hash_ids": []}]
)
def test_another_format_is_refused(tmp_path: Path, record: object) -> None:
    """The message has the file, the line and what was expected."""
    path = write(tmp_path / "trace.jsonl", {"input_length": 5, "hash_ids": [1]}, record)

    with pytest.raises(OptionError, match=r"trace.jsonl, line 2: expected JSON with input_length and hash_ids"):
        list(read_recording(path))


def test_a_missing_recording_is_refused(tmp_path: Path) -> None:
    """No traceback for a path that was mistyped."""
    with pytest.raises(OptionError, match=r"can't read .*nowhere.jsonl"):
        trace.replay_trace(tmp_path / "nowhere.jsonl")

"""Prompts from files and from what is built in."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_checkpoint_cache.evaluation.prompts import Prompt, built_in_recall, cut, file_prompts, read_file, text_prompts
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.tokens import ByteTokens


def read(path: Path, *, count: int = 3, depth: int = 4, longest: int = 10) -> list[Prompt]:
    return file_prompts(path, read_file(path), ByteTokens(), count=count, depth=depth, longest=longest)


@given(length=st.integers(1, 200), count=st.integers(1, 20), longest=st.integers(1, 50))
def test_a_text_is_cut_evenly(length: int, count: int, longest: int) -> None:
    """Runs are as many and as long as they can be, don't overlap, and reach from the text's beginning to its end."""
    runs = cut(range(length), count, longest)

    assert len(runs) == max(1, min(count, length // longest))
    assert {len(run) for run in runs} == {min(longest, length)}
    assert all(first[-1] < second[0] for first, second in pairwise(runs))
    assert runs[0][0] == 0
    assert len(runs) == 1 or runs[-1][-1] == length - 1
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)


def test_a_text_file_is_spread_over_the_prompts(tmp_path: Path) -> None:
    """The first prompt is the beginning of the file, the last its end; all restore at the depth that was asked for."""
    path = tmp_path / "traffic.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz" * 3)

    prompts = read(path)

    assert [bytes(prompt.tokens) for prompt in prompts] == [b"abcdefghij", b"ijklmnopqr", b"qrstuvwxyz"]
    assert {(prompt.task, prompt.depth, tuple(prompt.answers)) for prompt in prompts} == {("prompts", 4, ())}


def test_lines_of_json_are_prompts(tmp_path: Path) -> None:
    """Text, prompt and input_ids are taken; blank lines, prompts that are too short, and what is over the count are not."""
    path = tmp_path / "traffic.jsonl"
    records = [
        {"text": "abcdefghijkl"},
        {"prompt": "short"},
        {"prompt": "abc"},
        {"input_ids": [0, 1, 2, 3, 256]},
        {"text": "z" * 9},
    ]
    path.write_text("\n\n".join(map(json.dumps, records)) + "\n")

    assert [list(prompt.tokens) for prompt in read(path)] == [list(b"abcdefghij"), list(b"short"), [0, 1, 2, 3, 256]]


def test_a_line_may_hold_a_line_separator(tmp_path: Path) -> None:
    """U+2028 inside a JSON string does not end the line."""
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"text": "ab\u2028cdef"}\n', encoding="utf-8")

    assert bytes(read(path)[0].tokens).decode() == "ab\u2028cdef"


@pytest.mark.parametrize(
    "line",
    [
        '{"text": 5}',
        "[1, 2]",
        '"text"',
        "{",
        '{"input_ids": [1, 257]}',
        '{"input_ids": [-1]}',
        '{"input_ids": ["a"]}',
        '{"text": "\\ud800"}',
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, tmp_path: Path) -> None:
    """The message has the file, the line and what was expected."""
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"text": "abcdef"}\n' + line)

    with pytest.raises(OptionError, match=r'traffic.jsonl, line 2: expected \{"text"'):
        read(path)


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_a_file_without_prompts_is_refused(name: str, tmp_path: Path) -> None:
    """Empty files are said to be that."""
    (tmp_path / name).write_text("\n" if name.endswith("jsonl") else "")

    with pytest.raises(OptionError, match=f"{name} holds no prompts"):
        read(tmp_path / name)


def test_prompts_that_are_all_too_short_are_refused(tmp_path: Path) -> None:
    """The message says how long the longest is, and how many tokens are needed."""
    (tmp_path / "short.txt").write_text("abcd")

    with pytest.raises(OptionError, match=r"longest prompt in .* has 4 tokens: 5 are needed to restore at depth 4 .* 10 for all"):
        read(tmp_path / "short.txt")


def test_a_file_that_can_not_be_read_is_said(tmp_path: Path) -> None:
    """No traceback for a missing file, a folder, or bytes that are no text."""
    (tmp_path / "binary.txt").write_bytes(b"ab\xff")
    for name, message in (("nowhere.txt", "can't read"), ("", "can't read"), ("binary.txt", "not UTF-8 text: .* at byte 2")):
        with pytest.raises(OptionError, match=message):
            read(tmp_path / name)


def test_recall_asks_for_each_value_after_its_key() -> None:
    """The restore stands right after the pairs; each answer is a value that the prefix told for the key before it."""
    for prompt in [*built_in_recall(3), *built_in_recall(1, rounds=4)]:
        text = bytes(prompt.tokens)
        told = dict(zip(text[1 : prompt.depth - 1 : 2], text[2 : prompt.depth - 1 : 2], strict=True))
        assert text[prompt.depth - 1 : prompt.depth] == b">"
        assert [text[i] for i in prompt.answers] == [told[text[i - 1]] for i in prompt.answers]
        assert list(prompt.answers) == list(range(prompt.depth + 1, len(text), 2))
    assert built_in_recall(2) == built_in_recall(2)
    assert len({bytes(prompt.tokens) for prompt in built_in_recall(5)}) == 5
    assert [len(built_in_recall(1, rounds=rounds)[0].answers) for rounds in (1, 4)] == [32, 128]


def test_built_in_text_fills_every_prompt() -> None:
    """As many tokens as were asked for, from different places, the same each time."""
    prompts = text_prompts(ByteTokens(), count=4, depth=10, longest=40)

    assert [(prompt.task, len(prompt.tokens), prompt.depth) for prompt in prompts] == [("text", 40, 10)] * 4
    assert len({bytes(prompt.tokens) for prompt in prompts}) == 4
    assert prompts == text_prompts(ByteTokens(), count=4, depth=10, longest=40)

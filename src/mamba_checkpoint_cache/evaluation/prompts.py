"""The prompts that a report is measured on: cut to a prefix, whose state is restored, and what comes after it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.tokens import Tokens
from mamba_checkpoint_cache.small_models.recall import recall_prompts
from mamba_checkpoint_cache.small_models.text import held_out_text

_BYTES_PER_TOKEN = 8
"""Bytes of text taken for each token that is wanted: more than tokenizers pack into one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of which the first ``depth`` are run before the state is stored and restored.

    ``answers``: the indices of tokens that are the one right answer to what stands before them; empty where no task is known.
    """

    task: str
    tokens: Sequence[int]
    depth: int
    answers: Sequence[int] = ()


def read_file(path: Path) -> str:
    """The text of a file of prompts.

    Raises:
        OptionError: if it can't be read, or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def file_prompts(path: Path, text: str, tokens: Tokens, *, count: int, depth: int, longest: int) -> list[Prompt]:
    """At most ``count`` prompts of at most ``longest`` tokens out of a file's text, those with something after ``depth`` tokens.

    A file that ends in ``.jsonl`` has a prompt a line, ``{"text": …}``, ``{"prompt": …}`` or ``{"input_ids": […]}``; of these the
    first are taken. Any other file is one text, cut into prompts that are spread evenly over it.

    Raises:
        OptionError: if the file holds something else, or no prompt is long enough.
    """
    if path.suffix == ".jsonl":
        found = [ids[:longest] for ids in _lines(path, text, tokens)]
    else:
        found = cut(tokens.encode(text), count, longest)
    if not any(found):
        raise OptionError(f"{path} holds no prompts")
    if usable := [Prompt("prompts", ids, depth) for ids in found if len(ids) > depth]:
        return usable[:count]
    raise OptionError(
        f"the longest prompt in {path} has {max(map(len, found)):,} tokens: {depth + 1:,} are needed to restore at depth "
        f"{depth:,} and go on, {longest:,} for all distances; give longer prompts, or fewer --prefix-tokens"
    )


def text_prompts(tokens: Tokens, *, count: int, depth: int, longest: int) -> list[Prompt]:
    """``count`` prompts of ``longest`` tokens from source code that the small models were not trained on."""
    texts = (held_out_text(longest * _BYTES_PER_TOKEN, seed=seed) for seed in range(count))
    return [Prompt("text", tokens.encode(text.decode(errors="ignore"))[:longest], depth) for text in texts]


def built_in_recall(count: int, *, rounds: int = 1) -> list[Prompt]:
    """``count`` prompts of pairs to remember, then each key with its value, in each of ``rounds`` in another order.

    For models of byte tokens that know the task.
    """
    prompts = []
    for prompt in recall_prompts(count, rounds=rounds):
        begin, asked = len(prompt.prefix), prompt.asked
        prompts.append(Prompt("recall", list(prompt.prefix + asked), begin, range(begin + 1, begin + len(asked), 2)))
    return prompts


def cut(ids: Sequence[int], count: int, longest: int) -> list[list[int]]:
    """At most ``count`` runs of ``longest`` tokens that don't overlap, spread evenly; one that is shorter if none fits."""
    count = max(1, min(count, len(ids) // longest))
    apart = max(0, len(ids) - longest) / max(1, count - 1)
    return [list(ids[begin : begin + longest]) for begin in (round(i * apart) for i in range(count))]


def _lines(path: Path, text: str, tokens: Tokens) -> Iterator[list[int]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield _ids(json.loads(line), tokens)
            except ValueError as error:
                expected = '{"text": …}, {"prompt": …} or {"input_ids": […]}'
                raise OptionError(f"{path}, line {number}: expected {expected}: {error}") from error


def _ids(record: Any, tokens: Tokens) -> list[int]:
    if isinstance(record, dict):
        for key in ("text", "prompt"):
            if isinstance(record.get(key), str):
                return tokens.encode(record[key])
        ids = record.get("input_ids")
        if isinstance(ids, list) and all(type(i) is int and 0 <= i < tokens.vocab_size for i in ids):
            return ids
    raise ValueError(f"got {record!r:.60}, and ids must lie in 0 … {tokens.vocab_size - 1}")

"""What the documents show is what happens."""

from __future__ import annotations

import contextlib
import io
import re
from array import array
from pathlib import Path

import pytest
from test_cli import commands

import mamba_checkpoint_cache
from mamba_checkpoint_cache import ActivePool, CheckpointPool, PrefixCache, StateSpec, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (Path(mamba_checkpoint_cache.__file__).parent / "ARCHITECTURE.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def test_the_worked_example_prints_what_it_says() -> None:
    """The library example runs as it stands, and each line that says what it prints is right."""
    (example,) = blocks(README, "python")
    printed = io.StringIO()

    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})

    assert printed.getvalue().splitlines() == re.findall(r"# prints: (.*)", example)


@pytest.mark.parametrize("block", [block for block in blocks(README, "console") if " plan " in block])
def test_the_shown_output_is_real(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The output under a plan command is what that command prints."""
    command, shown = block.removeprefix("$ mamba-checkpoint-cache ").split("\n", 1)

    assert cli.main(command.split()) == 0

    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("words", [words for words in commands(cli._parser()) if words not in ((), ("bench",))], ids=" ".join)
def test_every_command_is_documented(words: tuple[str, ...]) -> None:
    """Each command has a line in the README's table."""
    assert f"| `{' '.join(words)}` |" in README


def test_the_readme_names_no_command_that_is_gone() -> None:
    """Each command in the README's table exists."""
    named = {tuple(name.split()) for name in re.findall(r"^\| `([a-z ]+)` \|", README, flags=re.MULTILINE)}

    assert named == set(commands(cli._parser())) - {(), ("bench",)}


def test_links_lead_somewhere() -> None:
    """Every relative link of the README is a file of the project."""
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)

    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


class Kv:
    def __init__(self) -> None:
        self.freed: list[int] = []

    def free(self, ids: array[int]) -> None:
        self.freed += ids


def followed_pool() -> list[tuple[int, ...]]:
    """The slot counts of the architecture page's example after each of its steps."""
    spec = StateSpec(num_layers=1, num_heads=1, d_v=4, d_k=4)
    kv, active, pool = Kv(), ActivePool(spec, slots=2), CheckpointPool(spec, slots=2)
    cache = PrefixCache(active=active, checkpoints=pool, kv=kv)
    a, b, counts = [1, 2, 3, 4, 5, 5], [1, 2, 3, 4, 6, 6], []

    match, slot = cache.match_prefix(a), active.allocate()
    assert slot is not None
    assert (match.depth, match.miss) == (0, "empty")
    cache.restore(match, slot)
    counts.append(tuple(pool.slots.counts))
    active.advance(slot, depth=4)
    cache.commit(a, depth=4, source=slot, kv=range(10, 14), lease=match)
    counts.append(tuple(pool.slots.counts))
    active.advance(slot, depth=6)
    cache.commit(a, depth=6, source=slot, kv=range(10, 16), lease=match)
    cache.release(match)
    active.free(slot)
    counts.append(tuple(pool.slots.counts))

    match, slot = cache.match_prefix(b), active.allocate()
    assert slot is not None
    assert (match.depth, match.hops) == (4, 1)
    counts.append(tuple(pool.slots.counts))
    cache.restore(match, slot)
    counts.append(tuple(pool.slots.counts))
    active.advance(slot, depth=6)
    cache.commit(b, depth=6, source=slot, kv=[*match.kv, 20, 21], lease=match)
    counts.append(tuple(pool.slots.counts))
    assert kv.freed == [14, 15]
    cache.release(match)

    match = cache.match_prefix(a)
    assert (match.depth, match.miss) == (4, "evicted")
    counts.append(tuple(pool.slots.counts))
    assert cache.match_prefix([*b, 0]).hops == 2
    return counts


def test_the_architecture_page_follows_a_real_pool() -> None:
    """The counts of each step in the architecture page's example are what the cache does."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ARCHITECTURE.splitlines() if re.match(r"\| \d ", line)]

    assert [tuple(map(int, row[2:6])) for row in rows] == followed_pool()
    assert [row[6].count("*") for row in rows] == [sum(map(int, row[3:6])) for row in rows]

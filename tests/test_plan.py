"""Slots and bytes of released models, to the digit of the published table, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_checkpoint_cache.known_models import KNOWN_MODELS
from mamba_checkpoint_cache.model_configs import spec_from_config
from mamba_checkpoint_cache.plan import PlanError, named_config, parse_bytes, plan, read_config
from mamba_checkpoint_cache.pools import CheckpointPool
from mamba_checkpoint_cache.state import SideSpec, StateSpec

MIB = 2**20
TABLE = """
Qwen3-Next-80B-A3B          36x32x128x128   73.69  37.69  20.25
Qwen3.5-35B-A3B             30x32x128x128   61.41  31.41  16.88
Kimi-Linear-48B-A3B         20x32x128x128   41.41  21.41  11.72
Nemotron-3-Super-120B-A12B  40x128x64x128   162.3  82.3   44.84
Falcon-H1-7B                44x24x128x256   132.9  66.9   34.93
Jamba-1.5-Mini              28x64x128x16    15.3   8.3    5
"""
ROWS = [line.split() for line in TABLE.strip().splitlines()]
SMALL = StateSpec(2, 3, 8, 16, torch.float32, (SideSpec("conv", (40, 3)),))


def to_the_digits_of(shown: str, count: int) -> str:
    """Bytes in MiB with as many decimals as ``shown``, halves rounded up as in the table."""
    decimals = len(shown.partition(".")[2])
    return f"{int(count / MIB * 10**decimals + 0.5) / 10**decimals:.{decimals}f}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_bytes_match_the_table(row: list[str]) -> None:
    """Every model's shape and bytes per slot are the table's, native fp32, native bf16 and int8, to the digit shown."""
    name, shape, fp32, bf16, int8 = row
    _, config = named_config(name)
    spec = spec_from_config(config)
    narrow = spec_from_config(config, state_dtype=torch.bfloat16)

    figures = plan(name, spec, codec="int8", memory_bytes=2**33)

    assert "x".join(map(str, spec.shape)) == shape
    assert to_the_digits_of(fp32, figures.native_bytes) == fp32
    assert to_the_digits_of(bf16, plan(name, narrow, codec="int8", memory_bytes=2**33).native_bytes) == bf16
    assert to_the_digits_of(int8, figures.checkpoint_bytes) == int8


def test_a_planned_pool_fits_and_one_more_slot_does_not() -> None:
    """The pool that a plan promises, allocated, stays within the budget, padding row and side state included."""
    memory = 300_000
    figures = plan("small", SMALL, codec="int8", memory_bytes=memory)

    reserved = [CheckpointPool(SMALL, figures.checkpoint_slots + more, codec="int8").snapshot().bytes_reserved for more in (0, 1)]

    assert reserved[0] <= memory < reserved[1]


def test_native_slots_fit_the_same_budget() -> None:
    """Native slots are counted like compressed ones: whole slots beside the padding row."""
    figures = plan("small", SMALL, codec="none", memory_bytes=10 * SMALL.native_bytes + 1)

    assert (figures.native_slots, figures.checkpoint_slots) == (9, 9)
    assert figures.native_bytes == figures.checkpoint_bytes == SMALL.native_bytes


def test_a_choice_by_layer_is_planned() -> None:
    """The bytes of each layer in its format, under the canonical name; a layer that is not there is refused."""
    native, stored = (plan("small", SMALL, codec=codec, memory_bytes=2**20).checkpoint_bytes for codec in ("none", "int8"))

    mixed = plan("small", SMALL, codec="none, 0=int8", memory_bytes=2**20)

    assert (mixed.codec, 2 * mixed.checkpoint_bytes) == ("int8,1=none", native + stored)
    assert mixed.checkpoint_slots == 2**20 // mixed.checkpoint_bytes - 1
    with pytest.raises(PlanError, match="a codec names layer 2, but the recurrent layers are 0 … 1"):
        plan("small", SMALL, codec="int8,2=none", memory_bytes=2**20)


def test_a_budget_for_no_slot_says_what_one_needs() -> None:
    """Less memory than one slot and its padding row is refused with the bytes that would do."""
    needed = 2 * CheckpointPool.bytes_per_slot_for(SMALL, "int8")

    with pytest.raises(PlanError, match=f"{needed:,} in all"):
        plan("small", SMALL, codec="int8", memory_bytes=needed - 1)
    figures = plan("small", SMALL, codec="int8", memory_bytes=needed)

    assert (figures.checkpoint_slots, figures.native_slots) == (1, 0)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_every_known_model_can_be_planned(name: str) -> None:
    """Each named model has a spec, whatever the case of the name, and gains at least 2.7 times the slots from fp32."""
    canonical, config = named_config(name.upper())

    figures = plan(canonical, spec_from_config(config), codec="int8", memory_bytes=2**36)

    assert canonical == name
    assert figures.checkpoint_slots >= 2.7 * figures.native_slots


def test_an_unknown_model_lists_the_known_ones() -> None:
    """A wrong name is answered with every right one."""
    with pytest.raises(PlanError) as refusal:
        named_config("gpt-2")

    assert all(name in str(refusal.value) for name in KNOWN_MODELS)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * MIB),
        ("8GB", 8 * 10**9),
        ("1.5 kib", 1536),
        ("1048576", MIB),
        (" 7b ", 7),
        ("0.1TB", 10**11),
    ],
)
def test_reads_sizes_as_people_write_them(text: str, count: int) -> None:
    """Decimal and binary units, any case, fractions, and plain bytes."""
    assert parse_bytes(text) == count


@given(st.integers(0, 2**63))
def test_plain_bytes_are_exact(count: int) -> None:
    """No size loses a byte to floating point."""
    assert parse_bytes(str(count)) == parse_bytes(f"{count}.0B") == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 G i B", "8GiBs", "1e9", "0x10", "1,000", "∞", "8gib 2mib", "1.", "٣MiB"])
def test_refuses_what_is_no_size(text: str) -> None:
    """Anything else is refused, with an example of what would do."""
    with pytest.raises(ValueError, match=r"is not a size.*8GiB"):
        parse_bytes(text)


def test_reads_a_config_file(tmp_path: Path) -> None:
    """A config.json is read as it is."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2"}))

    assert read_config(tmp_path / "config.json") == {"model_type": "mamba2"}


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not JSON"), (b"[1]", "holds no JSON object"), (b"\xff\xfe", "is not JSON")]
)
def test_says_what_is_wrong_with_a_file(tmp_path: Path, content: bytes, message: str) -> None:
    """A file that is no JSON object is named, with what is wrong."""
    (tmp_path / "broken.json").write_bytes(content)

    with pytest.raises(PlanError, match=f"broken.json {message}"):
        read_config(tmp_path / "broken.json")


def test_says_that_a_file_is_missing(tmp_path: Path) -> None:
    """A file that can't be read is named, with the system's reason; a folder is no file."""
    with pytest.raises(PlanError, match=r"can't read .*nothing.json: No such file"):
        read_config(tmp_path / "nothing.json")
    with pytest.raises(PlanError, match="can't read"):
        read_config(tmp_path)

"""The codec's README: that it has every format, and that its table is what the generator makes of the benchmarks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import mamba_checkpoint_cache
from mamba_checkpoint_cache.bench import formats
from mamba_checkpoint_cache.bench.drift import SPANS
from mamba_checkpoint_cache.codec import CODEC_NAMES, DEFAULT_CODEC
from mamba_checkpoint_cache.small_models import SMALL_MODELS

FOLDER = Path(mamba_checkpoint_cache.__file__).parent / "codec"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
MEASURED = README.partition("## Measured")[2].partition("\n## ")[0]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def table_of(text: str) -> list[list[str]]:
    return [cells(line) for line in text.splitlines() if line.startswith("|")]


def drift(value: float) -> dict[str, Any]:
    """A result of the drift benchmark: ``none`` has no drift and int8 a ratio of 1; each place has another ratio of ``bf16``."""
    rows = []
    for i, (model, task) in enumerate((model, task) for model in SMALL_MODELS for task in ("text", "recall", "both")):
        for hops, tokens in SPANS:
            place = {"model": model, "task": task, "hops": hops, "tokens": tokens}
            for name, ratio in (("none", 0.0), ("int8", 1.0), ("bf16", value + i + hops / 100 + tokens / 10_000)):
                rows.append(place | {"format": name, "ratio": ratio})
    sizes = [{"format": name, "bits_fp32_128": 32.0, "bits_bf16_128": 8.125} for name in ("none", "int8", "bf16")]
    return {"ratios": rows, "formats": sizes}


CODEC = {
    "rows": [
        {"shape": shape, "dtype": dtype, "device": "cpu", "format": name, "compress_ratio": 1.0, "restore_ratio": 1.25}
        | {"compress_ms": ms, "restore_ms": 7.0}
        for shape, dtype, ms in (
            ("First 1x2", "float32", 12.345),
            ("First 1x2", "bfloat16", 99.0),
            ("Second 1x2", "float32", 98.0),
        )
        for name in ("int8",)
    ]
}


def test_every_format_is_described_and_measured() -> None:
    """The README has an item for each format, says which is the default, and has a line for each in its table."""
    described = re.findall(r"^- \*\*`([a-z0-9-]+)`\*\*(, the default)?", README, flags=re.MULTILINE)

    assert [name for name, _ in described] == list(CODEC_NAMES)
    assert [name for name, default in described if default] == [DEFAULT_CODEC]
    assert [line[0].strip("`") for line in table_of(MEASURED)[2:]] == [*CODEC_NAMES, "bf16"]


def test_the_table_has_the_generator_s_columns() -> None:
    """What is shown is what the command prints today, as far as that does not depend on the machine."""
    made = table_of(formats.markdown(drift(0.0), CODEC))

    assert [line[: len(made[0])] for line in table_of(MEASURED)[:2]] == made[:2]


def test_a_line_of_the_table() -> None:
    """Ratios by model and task after one restore, of both tasks after many; times of the first state, if it was timed."""
    header, _, none, int8, bf16 = table_of(formats.markdown(drift(10.0), CODEC))

    assert header == [
        *("format", "bits, fp32", "bits, bf16", "gdn-hybrid, text", "gdn-hybrid, recall", "mamba2-hybrid, text"),
        *("mamba2-hybrid, recall", "gdn-hybrid, 16 restores", "mamba2-hybrid, 16 restores", "cpu, compress", "cpu, restore"),
    ]
    assert none == ["`none`", "32.000", "8.125", *["0"] * 6, "", ""]
    assert int8 == ["`int8`", "32.000", "8.125", *["1"] * 6, "1 (12.3 ms)", "1.2 (7 ms)"]
    assert bf16[3:9] == ["10", "11", "13", "14", "12", "15"]


def test_small_ratios_show_which_span_they_are_of() -> None:
    """The columns of tasks are over all tokens after one restore, those of restores over the tokens after the last."""
    bf16 = table_of(formats.markdown(drift(0.0), CODEC))[4]

    assert (bf16[3], bf16[7]) == ("0.036", "2.2")


def test_the_named_command_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The module reads the two files that it is given, and the README names it with both commands that write them."""
    for name, result in (("drift.json", drift(0.0)), ("codec.json", CODEC)):
        (tmp_path / name).write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["formats", str(tmp_path / "drift.json"), str(tmp_path / "codec.json")])

    formats.main()

    assert capsys.readouterr().out == formats.markdown(drift(0.0), CODEC)
    for command in (
        "bench drift --prompt-count 64 --json drift.json",
        "bench codec --json codec.json",
        f"python -m {formats.__name__} drift.json",
    ):
        assert command in README


def test_links_lead_to_files() -> None:
    """Every relative link is a file beside the page."""
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)

    assert links
    assert [link for link in links if not (FOLDER / link).is_file()] == []

"""The table of the codec's README: ``python -m mamba_checkpoint_cache.bench.formats DRIFT CODEC`` prints it.

``DRIFT`` and ``CODEC`` are files that ``bench drift --json`` and ``bench codec --json`` wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mamba_checkpoint_cache.bench.drift import BOTH

Result = Mapping[str, Any]


def markdown(drift: Result, codec: Result) -> str:
    """A line for each format: its bits, its drift and its times, the latter two as multiples of int8's.

    Drift is the mean KL by model and task over all tokens after one restore, then that of both tasks over the tokens after the
    last of many restores. Times are those of the state that comes first in ``codec``, on each device.
    """
    ratios = {(row["format"], row["model"], row["task"], row["hops"], row["tokens"]): row["ratio"] for row in drift["ratios"]}
    once, *_, often = dict.fromkeys((row["hops"], row["tokens"]) for row in drift["ratios"])
    places = list(dict.fromkeys((row["model"], row["task"]) for row in drift["ratios"]))
    measured = [
        *((f"{model}, {task}", (model, task, *once)) for model, task in places if task != BOTH),
        *((f"{model}, {often[0]} restores", (model, task, *often)) for model, task in places if task == BOTH),
    ]
    state, dtype = (codec["rows"][0][key] for key in ("shape", "dtype"))
    timed = {(row["device"], row["format"]): row for row in codec["rows"] if (row["shape"], row["dtype"]) == (state, dtype)}
    operations = [(device, way) for device in dict.fromkeys(device for device, _ in timed) for way in ("compress", "restore")]
    header = ["format", "bits, fp32", "bits, bf16", *(title for title, _ in measured), *map(", ".join, operations)]
    lines = [
        [
            f"`{row['format']}`",
            f"{row['bits_fp32_128']:.3f}",
            f"{row['bits_bf16_128']:.3f}",
            *(_multiple(ratios[row["format"], *place]) for _, place in measured),
            *(_time(timed.get((device, row["format"])), way) for device, way in operations),
        ]
        for row in drift["formats"]
    ]
    return "\n".join(map(_line, [header, ["---"] * len(header), *lines])) + f"\n\nTimes are of one {dtype} state of {state}.\n"


def _time(row: Result | None, way: str) -> str:
    return "" if row is None else f"{_multiple(row[f'{way}_ratio'])} ({row[f'{way}_ms']:.3g} ms)"


def _multiple(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Read both files and print the table."""
    parser = argparse.ArgumentParser(prog="python -m mamba_checkpoint_cache.bench.formats", description="The table of formats.")
    parser.add_argument("drift", type=Path, help="what bench drift --json wrote")
    parser.add_argument("codec", type=Path, help="what bench codec --json wrote")
    args = parser.parse_args()
    sys.stdout.write(markdown(*(json.loads(path.read_text(encoding="utf-8")) for path in (args.drift, args.codec))))


if __name__ == "__main__":
    main()

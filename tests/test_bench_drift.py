"""The drift benchmark: that it measures every format on both tasks, and compares it with int8 on the same tokens."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_side import real_model

from mamba_checkpoint_cache.bench import drift
from mamba_checkpoint_cache.codec import CODEC_NAMES, DEFAULT_CODEC
from mamba_checkpoint_cache.evaluation.arms import ArmKey
from mamba_checkpoint_cache.evaluation.figures import points
from mamba_checkpoint_cache.serving.models import LoadedModel
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.tokens import ByteTokens
from mamba_checkpoint_cache.small_models import SMALL_MODELS
from mamba_checkpoint_cache.tables import drift_table

FORMATS = (*CODEC_NAMES, "bf16")
ROW = ["model", "task", "format", "bits_per_element", "distance", "hops", "kl_mean", "kl_p95", "kl_p99", "kl_ci", "top1"]
RATIO = ["model", "task", "format", "hops", "tokens", "kl_mean", "ratio", "ratio_ci"]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """The benchmark of one tiny model with random weights."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(drift, "SMALL_MODELS", ("tiny",))
        monkeypatch.setattr(drift, "load_model", lambda name: LoadedModel(name, real_model().model, ByteTokens(), 512))
        monkeypatch.setattr(drift, "prepare_model", lambda model: real_model())
        return drift.run(prompt_count=2)


def ratio(result: dict[str, Any], task: str, name: str, hops: int = 1, tokens: int = 256) -> dict[str, Any]:
    (found,) = [
        row for row in result["ratios"] if (row["task"], row["format"], row["hops"], row["tokens"]) == (task, name, hops, tokens)
    ]
    return found


def test_every_format_has_every_row(result: dict[str, Any]) -> None:
    """Both tasks reach every hop and distance with all formats and the cast to bfloat16; rows have the public keys."""
    places = [(row["task"], row["format"], row["hops"], row["distance"]) for row in result["rows"]]

    assert sorted(places) == sorted((task, name, *point) for task in ("text", "recall") for name in FORMATS for point in points())
    assert {(1, 1), (1, 16), (1, 64), (1, 256), (4, 16), (16, 16)} <= set(points())
    assert all(list(row)[: len(ROW)] == ROW for row in result["rows"])
    assert all({"relative_error", "worst_head"} <= row.keys() and row["prompts"] == 2 for row in result["rows"])
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert (result["baseline"], result["prompt_count"]) == ("int8", 2)
    assert result["seconds"] > 0


def test_bits_are_those_of_the_model_and_of_a_large_head(result: dict[str, Any]) -> None:
    """Heads of 16 x 16 have more scales to an element than those of 128 x 128, for both state dtypes."""
    sizes = {row["format"]: (row["bits_fp32_128"], row["bits_bf16_128"]) for row in result["formats"]}
    own = {row["format"]: row["bits_per_element"] for row in result["rows"]}

    assert tuple(sizes) == FORMATS
    assert sizes["none"] == (32, 16)
    assert sizes["int8"] == (8 + 32 / 128, 8 + 16 / 128)
    assert sizes["bf16"] == (16, 16)
    assert (own["none"], own["int8"], own["bf16"]) == (32, 8 + 32 / 16, 16)


def test_the_control_is_zero_and_the_baseline_one(result: dict[str, Any]) -> None:
    """Without a codec nothing drifts; int8 is itself; a coarse format drifts more than int8 and a 2-byte one less."""
    assert all(row["kl_mean"] == row["relative_error"] == 0 for row in result["rows"] if row["format"] == "none")
    assert all(list(row) == RATIO for row in result["ratios"])
    assert {(row["task"], row["format"]) for row in result["ratios"]} == {
        (task, name) for task in ("text", "recall", "both") for name in FORMATS
    }
    for row in result["ratios"]:
        low, high = row["ratio_ci"]
        assert row["format"] != "none" or (row["ratio"], low, high) == (0, 0, 0)
        assert row["format"] != "int8" or (row["ratio"], low, high) == (1, 1, 1)
        assert low <= row["ratio"] * (1 + 1e-9)
        assert high >= row["ratio"] * (1 - 1e-9)
    for task in ("text", "recall"):
        assert ratio(result, task, "int16")["ratio"] < 1 < ratio(result, task, "int5-pivot")["ratio"]


def test_ratios_of_a_step_are_those_of_its_rows(result: dict[str, Any]) -> None:
    """The mean KL over the 16 tokens after a restore is that of the row at this distance, after 1 and after 16 restores."""
    rows = {(row["task"], row["format"], row["hops"], row["distance"]): row["kl_mean"] for row in result["rows"]}

    for name in FORMATS:
        for hops in (1, 16):
            for task in ("text", "recall"):
                assert ratio(result, task, name, hops, 16)["kl_mean"] == pytest.approx(rows[task, name, hops, 16])
            both = [rows[task, name, hops, 16] for task in ("text", "recall")]
            assert ratio(result, "both", name, hops, 16)["kl_mean"] == pytest.approx(sum(both) / 2)


def trial(scale: float, **kl: tuple[float, float, float]) -> Any:
    """KL by format: of the first 16 tokens after one restore, of the others, and of the last 16 of 16 restores."""
    arms = {}
    for name, (first, rest, last) in kl.items():
        arms[ArmKey(name)] = SimpleNamespace(kl_nats=scale * torch.tensor([first] * 16 + [rest] * 240).double())
        arms[ArmKey(name, again=True)] = SimpleNamespace(kl_nats=scale * torch.tensor([99.0] * 240 + [last] * 16).double())
    return SimpleNamespace(arms=arms)


def test_a_ratio_is_of_the_same_tokens_and_prompts() -> None:
    """By hand: each span has its own positions; what is a fixed part of int8 on every prompt has no spread at all."""
    text = [trial(scale, int8=(16, 0, 2), other=(8, 0.5, 3)) for scale in (1.0, 30.0, 500.0)]
    recall = [trial(scale, int8=(32, 0, 4), other=(8, 0, 0)) for scale in (7.0, 7.0, 7.0)]

    found = list(drift._ratios({"text": text, "recall": recall}, ["int8", "other"]))

    def of(task: str, name: str) -> dict[tuple[int, int], tuple[float, Any]]:
        rows = [row for row in found if (row["task"], row["format"]) == (task, name)]
        return {(row["hops"], row["tokens"]): (row["ratio"], row["ratio_ci"]) for row in rows}

    once = (16 * 8 + 240 * 0.5) / (16 * 16)
    assert of("text", "int8") == {(1, 256): (1, (1, 1)), (1, 16): (1, (1, 1)), (16, 16): (1, (1, 1))}
    assert of("text", "other") == {
        (1, 256): (pytest.approx(once), pytest.approx((once, once))),
        (1, 16): (0.5, pytest.approx((0.5, 0.5))),
        (16, 16): (1.5, pytest.approx((1.5, 1.5))),
    }
    both, (low, high) = of("both", "other")[1, 16]
    assert both == pytest.approx((531 * 8 + 21 * 8) / (531 * 16 + 21 * 32))
    assert low < both < high < 0.5


def test_a_ratio_to_no_drift_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where int8 drifts by nothing there is no ratio, in JSON and in the table, and no number that JSON can't have."""
    exact = [trial(1.0, int8=(0, 0, 0), none=(0, 0, 0), other=(1, 1, 1))] * 2
    ratios = [{"model": "m"} | row for row in drift._ratios({"text": exact}, ["int8", "none", "other"])]

    written = drift.finite(ratios)

    assert {(row["ratio"], row["ratio_ci"]) for row in written} == {(None, None)}
    sizes = [{"format": "int8", "bits_fp32_128": 8.25, "bits_bf16_128": 8.125}]
    table = drift_table({"baseline": "int8", "prompt_count": 2, "seconds": 1.0, "formats": sizes, "ratios": written})
    assert table.splitlines()[-1].split() == ["m", "both", "other", "1.00", "-", "-", "-"]


def test_the_table_shows_what_drifts(result: dict[str, Any]) -> None:
    """A line for each task and lossy format, with ratio and interval; the control, which is 0, is left out."""
    lines = [line.split() for line in drift_table(result).splitlines()]

    drifting = [line for line in lines if line[:1] == ["tiny"]]
    assert [tuple(line[1:3]) for line in drifting] == [
        (task, name) for task in ("text", "recall", "both") for name in FORMATS if name != "none"
    ]
    assert all(line[4:] == ["1.00x", "(1.00", "…", "1.00)"] * 3 for line in drifting if line[2] == "int8")
    assert [line[0] for line in lines if line and line[0] in FORMATS] == list(FORMATS)


def test_prompts_are_counted_from_one() -> None:
    """No prompts are refused before anything is loaded."""
    with pytest.raises(OptionError, match="prompt_count must be at least 1, got 0"):
        drift.run(prompt_count=0)


@pytest.mark.slow
def test_the_default_drifts_less_than_int8_on_what_ships() -> None:
    """In no more bytes, on every model: at most 0.6 times over both tasks after one restore, and on no task more than int8."""
    result = drift.run(prompt_count=6)

    sizes = {row["format"]: (row["bits_fp32_128"], row["bits_bf16_128"]) for row in result["formats"]}
    assert all(own <= peer for own, peer in zip(sizes[DEFAULT_CODEC], sizes["int8"], strict=True))
    found = [row for row in result["ratios"] if row["format"] == DEFAULT_CODEC]
    assert {row["model"] for row in found} == set(SMALL_MODELS)
    assert [row for row in found if row["ratio"] >= 1] == []
    assert [row for row in found if row["task"] == "both" and row["tokens"] == 256 and row["ratio"] > 0.6] == []

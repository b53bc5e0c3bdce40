"""What each layer costs for itself, and the codec that is suggested: on real models, some with a layer spoiled on purpose."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_side import real_model
from torch import Tensor

from mamba_checkpoint_cache import CheckpointPool, DriftBudget
from mamba_checkpoint_cache.codec import get_codec
from mamba_checkpoint_cache.codec.layered import LayeredCodec
from mamba_checkpoint_cache.codec.reference import Int8Codec, measure
from mamba_checkpoint_cache.evaluation import figures
from mamba_checkpoint_cache.evaluation import run as runner
from mamba_checkpoint_cache.evaluation.lockstep import STEP
from mamba_checkpoint_cache.evaluation.measure import measure as measure_codecs
from mamba_checkpoint_cache.evaluation.options import EvalOptions
from mamba_checkpoint_cache.evaluation.page import number
from mamba_checkpoint_cache.evaluation.per_layer import per_layer, worth_keeping
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.serving.models import LoadedModel
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.tokens import ByteTokens
from mamba_checkpoint_cache.tables import eval_table

CPU = torch.device("cpu")
LAYERS = 3


class Spoiled(Int8Codec):
    """int8 with a handful of levels."""

    name = "spoiled"

    def _encode(self, state: Tensor, row: dict[str, Tensor]) -> Tensor:
        super()._encode(state, row)
        row["q"].copy_((row["q"].float() / 60.0).round().clamp(-2, 2) * 60.0)
        return measure(state, self._decode(row, state))


def prompts(*lengths: int, depth: int = 40) -> list[Prompt]:
    draw = random.Random(0)
    return [Prompt("prompts", draw.choices(range(256), k=length), depth) for length in lengths]


def nothing(_: int) -> None:
    pass


@pytest.mark.parametrize("spoiled", range(LAYERS))
def test_a_layer_that_is_spoiled_is_found(spoiled: int) -> None:
    """It carries nearly all of the drift; keeping it native is suggested, expected to help, and measured to do so."""
    int8 = Int8Codec()
    codec = LayeredCodec([Spoiled() if layer == spoiled else int8 for layer in range(LAYERS)])

    found = per_layer(real_model(LAYERS), prompts(60, 60, 60), codec, "none", DriftBudget(), nothing)

    suggestion = found["suggestion"]
    assert max(found["rows"], key=lambda row: row["kl_mean"])["layer"] == spoiled
    assert found["rows"][spoiled]["share"] > 0.9
    assert suggestion["codec"] == f"int8,{spoiled}=none"
    assert suggestion["kl_expected"] == pytest.approx(sum(r["kl_mean"] for r in found["rows"] if r["layer"] != spoiled))
    assert 0 < suggestion["kl_mean"] < 0.1 * found["kl_mean"]


def test_each_layer_is_measured_with_the_others_exact() -> None:
    """The KL of each is that of the report's own arms for the codec that compresses this layer alone, and bytes are exact."""
    model, given = real_model(LAYERS), prompts(70, 60, 48)
    spec, names = model.spec, [f"none,{layer}=int8" for layer in range(LAYERS)]
    calls: list[int] = []

    found = per_layer(model, given, get_codec("int8", CPU), "none", DriftBudget(), calls.append)

    trials = measure_codecs(model, given, ["int8", *names], nothing).trials["prompts"]
    for name, kl in zip(["int8", *names], [found["kl_mean"], *(row["kl_mean"] for row in found["rows"])], strict=True):
        positions = torch.cat([trial.arms[figures.ArmKey(name)].kl_nats[:STEP] for trial in trials])
        assert kl == pytest.approx(float(positions.mean()), rel=1e-9)
    native, int8 = (CheckpointPool.bytes_per_slot_for(spec, codec) for codec in ("none", "int8"))
    assert [row["bytes"] * LAYERS for row in found["rows"]] == [native - int8] * LAYERS
    assert [row["model_layer"] for row in found["rows"]] == list(model.layout.state_layers)
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)
    assert calls == [1] * 6


def test_another_format_than_native_may_be_kept() -> None:
    """The suggestion names it, and its own error is in what was measured; where it is no better, nothing is gained."""
    found = per_layer(real_model(LAYERS), prompts(60), Spoiled(), "int8", DriftBudget(kl_nats=1e-9), nothing)

    assert (found["keep"], found["suggestion"]["codec"]) == ("int8", "int8")
    assert found["suggestion"]["kl_expected"] == 0 < found["suggestion"]["kl_mean"] < found["kl_mean"]
    assert not found["suggestion"]["within"]
    assert "OVER the budget of 1e-09 nats" in found["suggestion"]["text"]


def test_layers_that_are_exact_cost_nothing() -> None:
    """In a choice by layer, those that are native already have no drift, and are never suggested."""
    found = per_layer(real_model(LAYERS), prompts(60), get_codec("int8,1=none", CPU, LAYERS), "none", DriftBudget(), nothing)

    assert (found["rows"][1]["kl_mean"], found["rows"][1]["bytes"]) == (0.0, 0)
    assert found["suggestion"]["codec"] in {"none,0=int8", "none,2=int8"}


@pytest.mark.parametrize(
    ("costs", "budget", "chosen"),
    [
        ([1e-6, 8e-6, 1e-6], 0.1, [1]),
        ([1e-6, 1e-6, 1e-6], 0.1, [0, 1]),
        ([4e-6, 1e-6, 3e-6], 0.1, [0]),
        ([0.0, 0.0], 0.1, []),
        ([0.3, 0.02, 0.09, 0.08], 0.1, [0, 2]),
        ([0.3, 0.02, 0.09, 0.08], 0.01, [0, 2, 3, 1]),
        ([1e-6, math.nan, 2e-6], 0.1, [1]),
        ([math.inf, math.nan, 2e-6], 0.1, [0, 1]),
    ],
)
def test_a_suggestion_is_the_fewest_layers_that_do(costs: list[float], budget: float, chosen: list[int]) -> None:
    """The largest first, until at most half of the sum is left, and no more than the budget; no number is worst."""
    assert worth_keeping(costs, DriftBudget(kl_nats=budget)) == chosen


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the evaluation load a small model."""
    model = LoadedModel("mine", real_model(LAYERS).model, ByteTokens(), 8192)
    monkeypatch.setattr(runner, "load_model", lambda path: model)


@pytest.mark.usefixtures("loaded")
def test_the_report_shows_it(tmp_path: Path) -> None:
    """A table for each lossy codec, and the suggestion in words, in the JSON, on the page and in the terminal; else nothing."""
    path = tmp_path / "page.html"

    result = runner.run(EvalOptions(model="mine", prompt_count=1, prefix_tokens=30, per_layer="none", html=path))

    (found,) = (figure for codec, figure in result["per_layer"].items() if codec == "int8")
    assert "none" not in result["per_layer"]
    lines = [re.findall(r"<td>(.*?)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", path.read_text())]
    printed = [line.split() for line in eval_table(result).splitlines()]
    for row in found["rows"]:
        assert [number(row[key]) for key in ("layer", "model_layer", "kl_mean", "share", "bytes")] in lines
        assert any(line[:2] == [str(row["layer"]), str(row["model_layer"])] and f"{row['bytes']:,}" in line for line in printed)
    text = found["suggestion"]["text"]
    assert text.startswith(f'--codec "{found["suggestion"]["codec"]}" costs ')
    assert text in eval_table(result)
    assert text.replace('"', "&quot;") in path.read_text()
    result = runner.run(EvalOptions(model="mine", prompt_count=1, prefix_tokens=30, codecs=("none",), per_layer="none"))
    assert result["per_layer"] == {}


@pytest.mark.usefixtures("loaded")
def test_a_codec_by_layer_is_measured_like_any_other() -> None:
    """Rows, memory and verdict are under its canonical name."""
    options = EvalOptions(model="mine", prompt_count=1, prefix_tokens=30, codecs=("int8", "none,0=int8,1=int8"))

    result: dict[str, Any] = runner.run(options)

    assert {row["codec"] for row in result["rows"]} == {"int8", "int8,2=none"}
    assert result["per_layer"] == {}
    int8, mixed = (result["capacity"][codec]["bytes_per_checkpoint"] for codec in ("int8", "int8,2=none"))
    assert int8 < mixed
    assert [max(layer) == 0 for layer in result["state_error"]["int8,2=none"]] == [False, False, True]


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        (("int8,3=none",), "a codec names layer 3, but the recurrent layers are 0 … 2"),
        (("int8", "int8,0=int8"), "each once, but 'int8' and 'int8,0=int8' are the same for this model"),
        (("none,0-1=int8", "int8,2=none"), "'none,0-1=int8' and 'int8,2=none' are the same"),
    ],
)
def test_a_codec_that_is_none_of_the_model_s_is_refused(codecs: tuple[str, ...], message: str) -> None:
    """Once the model's layers are known, before anything is measured."""
    with pytest.raises(OptionError, match=message):
        runner.run(EvalOptions(model="mine", codecs=codecs, prefix_tokens=30))

"""The whole report of a small model: its keys, its page, its notes, and how it refuses."""

from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_evaluation_lockstep import planted
from tiny_models import tiny_model

from mamba_checkpoint_cache import ActivePool, CheckpointPool, StateSpec
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.evaluation import run as runner
from mamba_checkpoint_cache.evaluation.noise import Bf16Codec
from mamba_checkpoint_cache.evaluation.options import EvalOptions
from mamba_checkpoint_cache.evaluation.page import number, page
from mamba_checkpoint_cache.evaluation.prompts import Prompt
from mamba_checkpoint_cache.integrations.continuation import ANY_STEPS, Continuation, Deviation, Mode
from mamba_checkpoint_cache.serving.models import LoadedModel
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.tokens import ByteTokens
from mamba_checkpoint_cache.small_models.architectures import build_gdn_hybrid
from mamba_checkpoint_cache.tables import eval_table

ROW = [
    *("codec", "task", "bits_per_element", "distance", "hops", "kl_mean", "kl_p95", "kl_p99", "kl_ci", "top1", "relative_error"),
    *("worst_layer", "worst_head", "prompts"),
]

BOTH = ("none", "int8")


@pytest.fixture(scope="module")
def model() -> Any:
    layers = ("linear_attention", "full_attention", "linear_attention")
    return build_gdn_hybrid(head_dim=16, num_heads=2, hidden_size=32, layers=layers)


def serve(monkeypatch: pytest.MonkeyPatch, model: Any, name: str = "gdn-hybrid", max_context: int = 8192) -> None:
    """Have the evaluation load ``model``, whatever it is asked for."""
    loaded = LoadedModel(name, model, ByteTokens(), max_context)
    monkeypatch.setattr(runner, "load_model", lambda path: loaded)


@pytest.fixture(scope="module")
def made(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The report of the model, and its page."""
    path = tmp_path_factory.mktemp("eval") / "report.html"
    with pytest.MonkeyPatch.context() as monkeypatch:
        serve(monkeypatch, model)
        result = runner.run(EvalOptions(codecs=BOTH, prompt_count=2, prefix_tokens=30, html=path))
    return result, path.read_text(encoding="utf-8")


def test_the_report_has_the_keys_it_promises(made: tuple[dict[str, Any], str]) -> None:
    """Rows, tasks, noise and verdict have the promised keys; there is a row for each codec, task, hop and distance."""
    result, _ = made

    assert {"model", "rows", "recall", "bits_per_byte", "noise", "verdict"} <= result.keys()
    assert all(list(row) == ROW for row in result["rows"])
    for name in ("none", "int8"):
        assert {"cached", "uncached", "ci"} <= result["recall"][name].keys()
        assert {"cached", "uncached"} <= result["bits_per_byte"][name].keys()
        places = {(row["hops"], row["distance"]) for row in result["rows"] if (row["codec"], row["task"]) == (name, "text")}
        assert {(1, 1), (1, 16), (1, 64), (1, 256), (2, 16), (4, 16), (8, 16), (16, 16)} <= places
    assert {"rechunk_kl", "bf16_kl"} <= result["noise"].keys()
    assert json.loads(json.dumps(result, allow_nan=False)) == json.loads(json.dumps(result))


def test_the_control_is_exactly_zero(made: tuple[dict[str, Any], str]) -> None:
    """No row without a codec has any drift, and nothing that is counted differs from the uncached run; int8 has some."""
    result, _ = made

    for row in result["rows"]:
        if row["codec"] == "none":
            assert (row["kl_mean"], row["kl_p99"], row["kl_ci"], row["top1"], row["relative_error"]) == (
                0.0,
                0.0,
                [0.0, 0.0],
                1.0,
                0.0,
            )
        else:
            assert 0 < row["kl_mean"] < 0.1
            assert 0.001 < row["relative_error"] < row["worst_layer"] < row["worst_head"] < 0.1
    assert result["verdict"]["control"] == {"exact": True, "largest_kl": 0.0, "sound": True}
    assert result["recall"]["none"]["cached"] == result["recall"]["none"]["uncached"]
    assert result["bits_per_byte"]["none"]["cached"] == result["bits_per_byte"]["none"]["uncached"]
    assert result["divergence"]["none"]["same"] == result["divergence"]["none"]["prompts"] == 2
    assert result["agreement"]["none"][-1]["top1"] == 1.0
    assert 0 < result["noise"]["rechunk_kl"] < result["noise"]["bf16_kl"] < result["rows"][-1]["kl_mean"]


def test_capacity_is_that_of_real_pools(made: tuple[dict[str, Any], str], model: Any) -> None:
    """Bits, bytes and slots are those of checkpoint pools of the model's spec; pools of that many slots take no more memory."""
    result, _ = made
    spec = runner.prepare_model(model).spec

    native, int8 = result["capacity"]["none"], result["capacity"]["int8"]

    assert (native["bits_per_element"], native["slots"]) == (32.0, 100)
    assert int8["bits_per_element"] == 8 + 32 / 16
    assert int8["bytes_per_checkpoint"] == CheckpointPool(spec, 1, codec="int8").bytes_per_slot
    assert (int8["slots"] + 1) * int8["bytes_per_checkpoint"] <= 101 * native["bytes_per_checkpoint"]
    assert (int8["slots"] + 2) * int8["bytes_per_checkpoint"] > 101 * native["bytes_per_checkpoint"]
    assert [len(result["state_error"]["int8"]), len(result["state_error"]["int8"][0])] == [2, 2]
    assert result["state"] == {"layers": [0, 2], "shape": [2, 2, 16, 16], "dtype": "float32"}


def test_the_same_options_give_the_same_report(
    made: tuple[dict[str, Any], str], model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every figure and every picture is reproduced, whatever state torch's own generator is in."""
    serve(monkeypatch, model)
    torch.manual_seed(77)

    again = runner.run(EvalOptions(codecs=BOTH, prompt_count=2, prefix_tokens=30, html=tmp_path / "again.html"))

    assert again == made[0]
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == made[1]


class Elements(html.parser.HTMLParser):
    """What a browser would fetch, and whether every element that was opened is closed."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value for name, value in attrs if name in {"src", "href", "xlink:href", "data", "action"} and value]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in {"script", "link", "iframe", "img", "object"}:
            self.fetched.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_needs_nothing_else(made: tuple[dict[str, Any], str]) -> None:
    """It parses, fetches nothing from anywhere, and holds a picture for each of the four questions with labelled axes."""
    document = Elements()
    document.feed(made[1])
    text = " ".join(document.text)

    assert document.open == []
    assert [target for target in document.fetched if not target.startswith(("#", "data:"))] == []
    assert re.findall(r"url\((?!#)|@import", made[1]) == []
    assert made[1].count("<svg") == 4
    for label in (
        "mean KL (nats)",
        "tokens after the restore",
        "restores, with 16 tokens",
        "layer of the model",
        "KiB of one checkpoint",
    ):
        assert label in text
    assert "budget" in text


def test_the_page_has_the_report_s_figures(made: tuple[dict[str, Any], str]) -> None:
    """Every lossy row, every task, the capacity and the verdict's words are on the page as the JSON has them."""
    result, document = made
    cells = re.findall(r"<tr>(.*?)</tr>", document)
    lines = [re.findall(r"<td>(.*?)</td>", cell) for cell in cells]

    for row in result["rows"]:
        shown = [
            number(row[key]) for key in ("codec", "task", "hops", "distance", "kl_mean", "kl_ci", "kl_p95", "kl_p99", "top1")
        ]
        assert any(line[: len(shown)] == shown for line in lines) == (row["codec"] == "int8")
    for task in ("recall", "bits_per_byte"):
        for codec, figure in result[task].items():
            assert any(line[:3] == [codec, number(figure["cached"]), number(figure["uncached"])] for line in lines)
    for codec, figure in result["capacity"].items():
        assert [codec, *(number(figure[key]) for key in ("bytes_per_checkpoint", "bits_per_element", "slots"))] in lines
    assert result["verdict"]["text"] in document
    assert "Within the budget" in document
    assert "exactly 0" in document


def test_the_page_of_a_report_that_is_over(made: tuple[dict[str, Any], str]) -> None:
    """A failed verdict is said first; names are escaped, and figures that are missing don't stop the pictures."""
    result = json.loads(json.dumps(made[0])) | {"model": "<b>my & model", "recall": {}, "bits_per_byte": {}}
    result["verdict"] |= {"within": False, "text": "int8 is OVER the budget."}
    for row in result["rows"]:
        row["kl_mean"], row["kl_ci"] = (None, None) if row["codec"] == "int8" else (row["kl_mean"], None)
    result["state_error"]["int8"][0][0] = None

    document = page(result)

    assert document.count("Drift of &lt;b&gt;my &amp; model") == 2
    assert "<b>my" not in document
    assert "<b>Over the budget.</b> int8 is OVER the budget." in document
    assert "Recall" not in document
    assert document.count("<svg") == 4


def test_the_table_says_what_the_report_says(made: tuple[dict[str, Any], str]) -> None:
    """The verdict, a line for each lossy row, tasks, capacity and notes; rows of zeros are left out."""
    result, _ = made
    table = eval_table(result | {"notes": ["One thing to know."]})
    lines = [line.split() for line in table.splitlines()]

    assert "within the budget" in table
    assert result["verdict"]["text"] in table
    assert sum(line[:2] == ["int8", "text"] for line in lines) == sum(
        (row["codec"], row["task"]) == ("int8", "text") for row in result["rows"]
    )
    assert not any(line[:2] == ["none", "text"] for line in lines)
    assert any(line[0] == "int8" and f"{result['capacity']['int8']['bytes_per_checkpoint']:,}" in line for line in lines if line)
    assert "- One thing to know." in table
    assert "recall" in table
    assert "bits per byte" in table


def test_prompts_of_one_s_own(model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file's prompts are one task; what is too short for a distance, and what can't be measured, is said."""
    serve(monkeypatch, model)
    path = tmp_path / "traffic.jsonl"
    path.write_text(
        "".join(json.dumps({"input_ids": [i % 200 for i in range(seed, seed + n)]}) + "\n" for seed, n in ((1, 60), (9, 40)))
    )

    result = runner.run(EvalOptions(model="mine", prompts=path, prefix_tokens=20, codecs=("int8",)))

    rows = {(row["task"], row["hops"], row["distance"]): row["prompts"] for row in result["rows"]}
    assert rows == {("prompts", 1, 1): 2, ("prompts", 1, 16): 2, ("prompts", 2, 1): 2, ("prompts", 2, 16): 1}
    assert result["recall"] == {}
    assert result["verdict"]["control"] is None
    notes = "\n".join(result["notes"])
    assert "2 of 2 prompts have less than the 276 tokens" in notes
    assert "none reaches 64 or 256 tokens after the restore" in notes
    assert "Recall was not measured" in notes
    assert "control was left out" in notes
    assert "Python source" not in notes


def test_a_foreign_model_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, with a short context and tokens that are no text: the notes say each."""
    loaded = LoadedModel("mine", tiny_model("jamba", torch.bfloat16), Letters(), 60)
    monkeypatch.setattr(runner, "load_model", lambda path: loaded)

    result = runner.run(EvalOptions(model="mine", codecs=BOTH, prompt_count=1, prefix_tokens=20))

    notes = "\n".join(result["notes"])
    for words in ("token by token", "1 of 1 prompts have less than the 276 tokens", "Python source", "Recall was not measured"):
        assert words in notes
    assert "Bits per byte were not measured" in notes
    assert result["bits_per_byte"] == {}
    assert "bf16 checkpoints are exact" not in notes
    assert result["verdict"]["control"]["largest_kl"] == 0


def test_bf16_checkpoints_of_a_bf16_state_are_exact() -> None:
    """The noise floor is then no floor, and the notes say so."""
    spec = StateSpec(2, 2, 4, 3, torch.bfloat16)
    active, pool = ActivePool(spec, 2), CheckpointPool(spec, 1, codec=Bf16Codec())
    source, target, slot = active.allocate(), active.allocate(), pool.slots.reserve()
    active.state[:, source.index] = torch.randn(spec.shape)

    verdict = pool.compress(active, source, slot).verdict()
    pool.restore(slot, active, target)

    assert torch.equal(active.state[:, target.index], active.state[:, source.index])
    assert verdict.relative_error == 0
    prompts = [Prompt("prompts", range(300), 20)]
    notes = runner._notes(
        EvalOptions(), SimpleNamespace(spec=spec, continuation=ANY_STEPS), prompts, {"bits_per_byte": dict.fromkeys("ab")}
    )
    assert any("bf16 checkpoints are exact" in note for note in notes)


def test_a_model_that_is_not_exact_itself_is_said() -> None:
    """Where even an exact copy of a state goes on otherwise, the notes say why the control is not 0."""
    off = Deviation(relative=1e-6, largest=1e-6, effect=1.0, bitwise=False)
    model = SimpleNamespace(
        spec=StateSpec(2, 2, 4, 3), continuation=Continuation(Mode.CHUNKS, chunks=off, message="goes on in chunks")
    )

    notes = runner._notes(EvalOptions(), model, [Prompt("text", range(300), 20)], {"bits_per_byte": dict.fromkeys("ab")})

    assert notes[0] == "goes on in chunks"
    assert "does not go on bit for bit" in notes[1]


class Letters:
    """A tokenizer of a small vocabulary whose tokens are no characters."""

    vocab_size, eos_ids = 97, frozenset()

    def encode(self, text: str) -> list[int]:
        return [3 + byte % 90 for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return "\ufffd" * len(ids)


def test_a_tight_budget_is_exceeded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings under what int8 costs put it over, with each figure and its place."""
    serve(monkeypatch, model, name="mine")
    budget = DriftBudget(kl_nats=1e-9, relative_error=1e-4)

    verdict = runner.run(EvalOptions(model="mine", codecs=BOTH, prompt_count=1, prefix_tokens=20, budget=budget))["verdict"]

    assert not verdict["within"]
    assert {over["figure"] for over in verdict["over"]} == {"kl_mean", "worst_layer"}
    assert all(over["value"] > over["ceiling"] for over in verdict["over"])
    assert {over["codec"] for over in verdict["over"]} == {"int8"}


def test_a_fault_of_state_fails_the_report(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that swaps two heads is over with the widest of budgets, as its control is not 0."""
    serve(monkeypatch, model, name="mine")
    hybrid = runner.prepare_model(model)
    planted("two heads swapped", hybrid, runner.text_prompts(ByteTokens(), count=1, depth=20, longest=60)[0], monkeypatch)

    verdict = runner.run(EvalOptions(model="mine", codecs=BOTH, prompt_count=1, prefix_tokens=20, budget=DriftBudget(1e9, 1e9)))[
        "verdict"
    ]

    assert not verdict["within"]
    assert verdict["control"]["largest_kl"] > 0
    assert "must be exactly 0" in verdict["text"]


def test_a_model_that_gives_no_numbers_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are NaN are no agreement: the report is over, and its JSON has null instead of NaN."""
    broken = build_gdn_hybrid(head_dim=16, num_heads=2, hidden_size=32, layers=("linear_attention", "full_attention"))
    serve(monkeypatch, broken, name="mine")
    prepare = runner.prepare_model

    def prepare_then_break(model: Any) -> Any:
        hybrid = prepare(model)
        torch.nn.init.constant_(model.get_output_embeddings().weight, math.nan)
        return hybrid

    monkeypatch.setattr(runner, "prepare_model", prepare_then_break)

    result = runner.run(EvalOptions(model="mine", codecs=BOTH, prompt_count=1, prefix_tokens=20))

    assert not result["verdict"]["within"]
    assert result["rows"][-1]["kl_mean"] is None
    json.dumps(result, allow_nan=False)
    assert page(result).count("<svg") == 4


def test_a_refusal_is_one_message(model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model without a state, a prefix longer than the context and a page that can't be written end before the work."""
    serve(monkeypatch, model, max_context=64)
    monkeypatch.setattr(runner, "measure", None)
    with pytest.raises(OptionError, match="prefix_tokens must be below the 64 tokens that gdn-hybrid can take, got 64"):
        runner.run(EvalOptions(prefix_tokens=64))
    with pytest.raises(OptionError, match="can't write"):
        runner.run(EvalOptions(html=tmp_path))
    serve(monkeypatch, tiny_model("lfm2"), name="lfm2")
    with pytest.raises(OptionError, match="lfm2 can't be evaluated: layer 0 keeps a conv window but no recurrent state"):
        runner.run(EvalOptions(model="mine", prefix_tokens=20, prompt_count=1))


def test_the_number_of_threads_is_put_back(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model is measured on one thread, and whoever calls has as many as before."""
    serve(monkeypatch, model, name="mine")
    seen: list[int] = []
    monkeypatch.setattr(runner, "measure", lambda *_: seen.append(torch.get_num_threads()))
    monkeypatch.setattr(runner, "report", lambda *_: {"bits_per_byte": {}})
    torch.set_num_threads(2)
    try:
        runner.run(EvalOptions(model="mine", prefix_tokens=20, prompt_count=1))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_count": 0}, "prompt_count must be at least 1, got 0"),
        ({"prefix_tokens": -1}, "prefix_tokens must be at least 1, got -1"),
        ({"codecs": ("int8", "int9")}, "unknown codec 'int9', expected one of none"),
        ({"codecs": ("int8", "int8,0=int9")}, "unknown codec 'int9' in 'int8,0=int9', expected one of none"),
        ({"codecs": ("int8", "int8")}, "expected codecs, each once, got 'int8 and int8'"),
        ({"codecs": ()}, "expected codecs"),
        ({"per_layer": "int8,0=none"}, "per_layer must be one of none"),
    ],
)
def test_options_are_checked_once(options: dict[str, Any], message: str) -> None:
    """What can't be meant is refused where it is given."""
    with pytest.raises(OptionError, match=message):
        EvalOptions(**options)

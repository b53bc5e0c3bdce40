"""``eval`` on the command line: its options, its exit codes and its one line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from mamba_checkpoint_cache import cli
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.evaluation.options import EvalOptions

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _structlog_as_it_was() -> object:
    yield
    structlog.reset_defaults()


@pytest.fixture
def evaluation(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the evaluation: gives ``result``, and keeps the options that it was called with."""
    stand_in = SimpleNamespace(options=[], result={"verdict": {"within": True, "text": "All is well."}})

    def run(options: EvalOptions) -> dict[str, Any]:
        stand_in.options.append(options)
        return stand_in.result

    monkeypatch.setattr(cli, "import_module", lambda _: SimpleNamespace(run=run))
    monkeypatch.setattr(cli.tables, "eval_table", lambda result: result["verdict"]["text"])
    return stand_in


def test_every_option_arrives(evaluation: SimpleNamespace, tmp_path: Path) -> None:
    """The defaults are those of the options, and each flag sets its own."""
    argv = "--model some/model --codec int8,0=none,2-3=none,none --prompts traffic.jsonl --prompt-count 7 --prefix-tokens 99"
    argv += " --max-kl 0.5 --per-layer"

    assert cli.main(["eval"]) == 0
    assert cli.main(["eval", "--per-layer", "int8"]) == 0
    assert cli.main(["eval", *argv.split(), "--max-relative-error", "0.01", "--html", str(tmp_path / "page.html")]) == 0

    assert evaluation.options == [
        EvalOptions(),
        EvalOptions(per_layer="int8"),
        EvalOptions(
            model="some/model",
            codecs=("int8,0=none,2-3=none", "none"),
            prompts=Path("traffic.jsonl"),
            prompt_count=7,
            prefix_tokens=99,
            html=tmp_path / "page.html",
            per_layer="none",
            budget=DriftBudget(kl_nats=0.5, relative_error=0.01),
        ),
    ]


def test_within_the_budget_is_success(evaluation: SimpleNamespace, capsys: Captured) -> None:
    """The table goes to stdout, nothing to stderr."""
    assert cli.main(["eval"]) == 0

    assert capsys.readouterr() == ("All is well.\n", "")


def test_over_the_budget_is_exit_code_three(evaluation: SimpleNamespace, tmp_path: Path, capsys: Captured) -> None:
    """The result is written all the same, and one line on stderr says which figure was over."""
    evaluation.result = {"verdict": {"within": False, "text": "int8 is OVER the budget: KL 0.3."}}

    assert cli.main(["eval", "--json", str(tmp_path / "out.json")]) == 3

    assert json.loads((tmp_path / "out.json").read_text()) == evaluation.result
    assert capsys.readouterr() == ("", "mamba-checkpoint-cache eval: int8 is OVER the budget: KL 0.3.\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--codec", "int9"], "unknown codec 'int9', expected one of none"),
        (["--codec", "int8,2-1=none"], "expected LAYERS=FORMAT after the first format"),
        (["--codec", "int8,none,int8"], "expected codecs, each once, got 'int8 and none and int8'"),
        (["--codec", ""], "unknown codec ''"),
        (["--per-layer", "int9"], "invalid choice: 'int9'"),
        (["--max-kl", "0"], "DriftBudget.kl_nats must be over 0, got 0.0"),
        (["--max-relative-error", "nan"], "DriftBudget.relative_error must be over 0, got nan"),
        (["--prompt-count", "few"], "invalid int value: 'few'"),
        (["--prefix-tokens", "0"], "prefix_tokens must be at least 1, got 0"),
        (["--html", "/nowhere/page.html"], "can't write /nowhere/page.html"),
        (["--html", "-"], "can't write -"),
        (["--json", "/nowhere/out.json"], "can't write /nowhere/out.json"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], message: str, evaluation: SimpleNamespace, capsys: Captured) -> None:
    """Exit code 2 and one line on stderr, before anything is loaded."""
    try:
        code: object = cli.main(["eval", *argv])
    except SystemExit as end:
        code = end.code

    printed = capsys.readouterr()
    assert (code, printed.out, len(printed.err.splitlines())) == (2, "", 1)
    assert message in printed.err
    assert evaluation.options == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "/nowhere/model"], "can't load a model from /nowhere/model"),
        (["--prompts", "/nowhere/traffic.txt"], "can't read /nowhere/traffic.txt"),
    ],
)
def test_what_is_missing_is_one_line(argv: list[str], message: str, capsys: Captured) -> None:
    """A model or a file that is not there ends without a traceback, in the real thing."""
    assert cli.main(["eval", *argv]) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err


def test_plotting_is_an_extra_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Without it, a page is refused with what to install."""

    def missing(module: str) -> object:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(cli, "import_module", missing)

    assert cli.main(["eval"]) == 2

    assert "eval: matplotlib is not installed: pip install 'mamba-checkpoint-cache[eval]'" in capsys.readouterr().err

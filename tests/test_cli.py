"""The command line: what it prints, what it refuses and how it ends."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from mamba_checkpoint_cache import cli
from mamba_checkpoint_cache.evaluation.options import EvalOptions
from mamba_checkpoint_cache.serving.options import ServeOptions

PLAN = ["plan", "--model", "Qwen3-Next-80B-A3B", "--memory", "8GiB"]
ROWS = {"rows": [{"prompts": 1000, "match_us": 8.5}]}
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _structlog_as_it_was() -> object:
    yield
    structlog.reset_defaults()


@pytest.fixture
def implementation(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Stands in for every module that a command imports; the list holds what was imported and what it was called with."""
    calls: list[tuple[object, ...]] = []

    def load(module: str) -> SimpleNamespace:
        def call(*arguments: object, **options: object) -> dict[str, object]:
            calls.append((module, *arguments, *options.values()))
            return ROWS

        return SimpleNamespace(run=call, main=call)

    monkeypatch.setattr(cli, "import_module", load)
    monkeypatch.setattr(cli.tables, "demo_table", cli.tables.rows_table)
    monkeypatch.setattr(cli.tables, "drift_table", cli.tables.rows_table)
    monkeypatch.setattr(cli.tables, "reuse_table", cli.tables.rows_table)
    monkeypatch.setattr(cli.tables, "sampling_table", cli.tables.rows_table)
    monkeypatch.setattr(cli.tables, "telemetry_table", cli.tables.rows_table)
    return calls


def raising(error: BaseException) -> object:
    def load(module: str) -> object:
        raise error

    return load


def test_plan_prints_a_table(capsys: Captured) -> None:
    """Without --json, plan shows slots and MiB per slot, native and compressed."""
    assert cli.main(PLAN) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[-2:]] == [["native", "73.69", "110"], ["int8", "20.25", "403"]]


def test_plan_writes_json(tmp_path: Path, capsys: Captured) -> None:
    """With --json the contract's keys are in the file, and nothing is printed."""
    assert cli.main([*PLAN, "--json", str(tmp_path / "plan.json")]) == 0

    result = json.loads((tmp_path / "plan.json").read_text())
    keys = ("model", "native_bytes", "checkpoint_bytes", "native_slots", "checkpoint_slots")
    assert [result[key] for key in keys] == ["Qwen3-Next-80B-A3B", 77_266_944, 21_233_664, 110, 403]
    assert capsys.readouterr().out == ""


def test_a_dash_writes_json_to_stdout(capsys: Captured) -> None:
    """``--json -`` prints JSON and nothing else."""
    assert cli.main([*PLAN, "--codec", "none", "--state-dtype", "bf16", "--tp", "4", "--json", "-"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["state_shape"] == [36, 8, 128, 128]
    assert result["checkpoint_bytes"] == result["native_bytes"] == 36 * (8 * 128 * 128 * 2 + 8192 // 4 * 3 * 2)


def test_plan_reads_a_config_file(tmp_path: Path, capsys: Captured) -> None:
    """``--config`` takes a model's own config.json and names the model after the file."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mamba2", "num_hidden_layers": 2}))

    assert cli.main(["plan", "--config", str(path), "--memory", "1GiB", "--json", "-"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["state_shape"]) == (str(path), [2, 128, 64, 128])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["bench"], "arguments are required: WHAT"),
        (["bench", "speed"], "invalid choice: 'speed'"),
        (["plan", "--model", "Jamba-1.5-Mini"], "arguments are required: --memory"),
        (["plan", "--memory", "1GiB"], "one of the arguments --model --config is required"),
        ([*PLAN[:3], "--memory", "8 apples"], "'8 apples' is not a size"),
        ([*PLAN[:3], "--memory", "1MiB"], "one slot needs 21,233,664 bytes"),
        (["plan", "--model", "gpt-2", "--memory", "1GiB"], "unknown model 'gpt-2'"),
        (["plan", "--config", "nowhere.json", "--memory", "1GiB"], "can't read nowhere.json"),
        ([*PLAN, "--tp", "3"], "tensor parallelism of 3"),
        ([*PLAN, "--codec", "int3"], "unknown codec 'int3', expected one of none"),
        ([*PLAN, "--codec", "int8,1"], "expected LAYERS=FORMAT after the first format, as in int8,0=none,3-5=none; got '1'"),
        ([*PLAN, "--codec", "int8,99=none"], "a codec names layer 99, but the recurrent layers are 0 … 35"),
        (["serve", "--codec", "int8,1=int3"], "unknown codec 'int3' in 'int8,1=int3', expected one of none"),
        ([*PLAN, "--json", "/nowhere/plan.json"], "can't write /nowhere/plan.json"),
        (["serve", "--chunk", "many"], "invalid int value: 'many'"),
        (["serve", "--chunk", "10", "--page-size", "4"], "chunk must be a multiple of page_size, got 10 and 4"),
        (["serve", "--drift-rate", "2"], "drift_rate must be a share of the hits, 0 … 1, got 2.0"),
        (["serve", "--guard", "on"], "invalid choice: 'on'"),
        (["serve", "--otlp-ratio", "2"], "otlp_ratio must be a share of the traces, 0 … 1, got 2.0"),
        (["serve", "--otlp-endpoint", "host:4318"], "otlp_endpoint must be an http or https address, got 'host:4318'"),
        (["bench", "drift", "--prompt-count", "0"], "prompt_count must be at least 1, got 0"),
        (["load", "--pause", "-1"], "-1 must be 0 or more"),
        (["load", "--rounds", "0"], "0 must be 1 or more"),
        (["load", "http://127.0.0.1:1"], "can't reach http://127.0.0.1:1: "),
        (["demo", "--checkpoint-slots", "4", "--checkpoint-memory", "1MiB"], "not allowed with"),
        (["demo", "--checkpoint-memory", "0"], "checkpoint_memory_bytes must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], message: str, capsys: Captured) -> None:
    """Bad input ends with exit code 2, nothing on stdout and one line on stderr that says what was wrong."""
    try:
        code: object = cli.main(argv)
    except SystemExit as end:
        code = end.code

    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err


def test_a_file_that_can_not_be_written_is_said(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up meanwhile ends in one line, not in a traceback."""

    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)

    assert cli.main([*PLAN, "--json", str(tmp_path / "plan.json")]) == 2

    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_serving_commands_build_their_options(command: str, implementation: list[tuple[object, ...]]) -> None:
    """Every option of the command line arrives in ServeOptions, whose defaults are its own. Only servers have a guard."""
    address = {"host": "0.0.0.0", "port": 0} if command == "serve" else {}
    drift = {"drift_rate": 0.5, "drift_checks_per_minute": 60, "guard": "stop", "max_relative_error": 0.02, "max_kl": 0.3}
    spans = {"otlp_endpoint": "http://receiver:4318", "otlp_ratio": 0.5}
    drift = drift | {"max_hops": 4} | spans if command == "serve" else {}
    options = ServeOptions(
        model="some/model",
        codec="none",
        checkpoint_memory_bytes=512 * 2**20,
        active_slots=3,
        page_size=16,
        chunk=32,
        threads=2,
        **address,
        **drift,
    )
    argv = "--model some/model --codec none --checkpoint-memory 512MiB --active-slots 3 --page-size 16 --chunk 32 --threads 2"
    argv += "".join(f" --{name.replace('_', '-')} {value}" for name, value in (address | drift).items())

    assert cli.main([command, *argv.split()]) == 0
    assert cli.main([command]) == 0
    assert cli.main([command, "--checkpoint-slots", "7"]) == 0

    module = f"mamba_checkpoint_cache.serving.{'server' if command == 'serve' else 'demo'}"
    assert implementation == [(module, options), (module, ServeOptions()), (module, ServeOptions(checkpoint_slots=7))]


@pytest.mark.parametrize("what", ["codec", "sampling", "telemetry", "tree"])
def test_benchmarks_run_and_print(what: str, implementation: list[tuple[object, ...]], tmp_path: Path, capsys: Captured) -> None:
    """Each benchmark calls its module once, and its result is printed or written."""
    assert cli.main(["bench", what]) == 0
    assert cli.main(["bench", what, "--json", str(tmp_path / "out.json")]) == 0

    assert implementation == 2 * [(f"mamba_checkpoint_cache.bench.{what}",)]
    assert "1,000" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text()) == ROWS


def test_bench_drift_takes_a_number_of_prompts(implementation: list[tuple[object, ...]]) -> None:
    """``--prompt-count`` arrives; its default is that of ``eval``."""
    assert cli.main(["bench", "drift"]) == 0
    assert cli.main(["bench", "drift", "--prompt-count", "7"]) == 0

    module = "mamba_checkpoint_cache.bench.drift"
    assert implementation == [(module, EvalOptions().prompt_count), (module, 7)]


def test_bench_reuse_replays_a_trace_on_demand(implementation: list[tuple[object, ...]]) -> None:
    """``--trace`` hands the recording to the benchmark; without it there is none."""
    assert cli.main(["bench", "reuse"]) == 0
    assert cli.main(["bench", "reuse", "--trace", "recording.jsonl"]) == 0

    module = "mamba_checkpoint_cache.bench.reuse"
    assert implementation == [(module, None), (module, Path("recording.jsonl"))]


def test_control_c_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Ctrl-C is exit code 130 without a word."""
    monkeypatch.setattr(cli, "import_module", raising(KeyboardInterrupt()))

    assert cli.main(["demo"]) == 130

    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("package", ["transformers", "starlette", "uvicorn", "httpx", "rich"])
def test_a_missing_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Without its extra, a command says which one to install."""
    monkeypatch.setattr(cli, "import_module", raising(ModuleNotFoundError(f"No module named {package!r}", name=package)))

    assert cli.main(["serve"]) == 2

    assert f"serve: {package} is not installed: pip install 'mamba-checkpoint-cache[serve]'" in capsys.readouterr().err


def test_a_defect_is_not_disguised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that are no user's doing keep their traceback."""
    for error in (ModuleNotFoundError("gone", name="json.gone"), ValueError("a defect")):
        monkeypatch.setattr(cli, "import_module", raising(error))
        with pytest.raises(type(error)):
            cli.main(["demo"])


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command of the command line, as words."""
    found = [path]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [words for name, sub in action.choices.items() for words in commands(sub, (*path, name))]
    return found


@pytest.mark.parametrize("words", commands(cli._parser()), ids=" ".join)
def test_every_command_has_help(words: tuple[str, ...], capsys: Captured) -> None:
    """``--help`` works everywhere and describes every option."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--help"])

    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: mamba-checkpoint-cache")


def test_plan_needs_the_core_only() -> None:
    """``plan`` runs where none of the extras is installed."""
    code = f"""
import sys
for name in ("transformers", "starlette", "uvicorn", "httpx", "rich", "opentelemetry.sdk"):
    sys.modules[name] = None
from mamba_checkpoint_cache.cli import main
sys.exit(main({PLAN!r}))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)

    assert (run.returncode, run.stderr) == (0, "")
    assert "20.25" in run.stdout

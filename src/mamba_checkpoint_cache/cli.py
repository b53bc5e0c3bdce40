"""The command line: parses, calls one implementation, and prints its result as JSON or as a table."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import structlog

from mamba_checkpoint_cache import tables
from mamba_checkpoint_cache.arguments import (
    add_address,
    add_bench_drift,
    add_drift,
    add_eval,
    add_load,
    add_plan,
    add_serving,
    add_spans,
    json_target,
)
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.evaluation.options import EvalOptions
from mamba_checkpoint_cache.model_configs import ConfigError, spec_from_config
from mamba_checkpoint_cache.plan import DTYPES, PlanError, named_config, plan, read_config
from mamba_checkpoint_cache.serving.options import OptionError, ServeOptions

PROGRAM = "mamba-checkpoint-cache"
_EXTRA = dict.fromkeys(("transformers", "starlette", "uvicorn", "httpx", "rich"), "serve") | {"matplotlib": "eval"}
_EXTRA |= dict.fromkeys(("opentelemetry.sdk", "opentelemetry.exporter"), "otlp")

Result = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code, with one line on stderr where there is something to say.

    0: done. 2: bad input. 3: done, and the model is over its drift budget. 130: Ctrl-C.
    """
    args = _parser().parse_args(argv)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        result = args.run(args)
        _emit(result, args.json, args.table)
    except (ConfigError, OptionError, PlanError, _OutputError) as error:
        return _complain(args.command, str(error))
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        return _complain(args.command, f"{error.name} is not installed: pip install '{PROGRAM}[{_EXTRA[error.name]}]'")
    except KeyboardInterrupt:
        return 130
    if args.command == "eval" and not result["verdict"]["within"]:
        return _complain(args.command, result["verdict"]["text"], code=3)
    return 0


class _OutputError(Exception):
    """The result can't be written where it was asked for."""


class _Parser(argparse.ArgumentParser):
    """A parser that answers bad input with one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _emit(result: Result, target: str | None, table: Callable[[tables.Result], str]) -> None:
    if target is None:
        print(table(result))
    elif target == "-":
        print(json.dumps(result, indent=2))
    else:
        try:
            Path(target).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise _OutputError(f"can't write {target}: {error.strerror}") from error


def _complain(command: str, message: str, *, code: int = 2) -> int:
    print(f"{PROGRAM} {command}: {message}", file=sys.stderr)
    return code


def _plan(args: argparse.Namespace) -> Result:
    name, config = named_config(args.model) if args.model else (str(args.config), read_config(args.config))
    spec = spec_from_config(
        config, state_dtype=DTYPES[args.state_dtype], conv_dtype=DTYPES[args.conv_dtype], tensor_parallel=args.tp
    )
    return plan(name, spec, codec=args.codec, memory_bytes=args.memory).as_dict()


def _serve(args: argparse.Namespace) -> Result:
    return _implementation("serving.server", "main", _serve_options(args))


def _demo(args: argparse.Namespace) -> Result:
    return _implementation("serving.demo", "run", _serve_options(args))


def _load(args: argparse.Namespace) -> Result:
    return _implementation("serving.load", "run", args.url, pause=args.pause, rounds=args.rounds)


def _eval(args: argparse.Namespace) -> Result:
    given = {name: getattr(args, name) for name in EvalOptions.__dataclass_fields__ if hasattr(args, name)}
    try:
        budget = DriftBudget(kl_nats=args.max_kl, relative_error=args.max_relative_error)
    except ValueError as error:
        raise OptionError(str(error)) from error
    return _implementation("evaluation.run", "run", EvalOptions(budget=budget, **given))


def _bench(args: argparse.Namespace) -> Result:
    return _implementation(f"bench.{args.bench}", "run")


def _bench_drift(args: argparse.Namespace) -> Result:
    return _implementation("bench.drift", "run", prompt_count=args.prompt_count)


def _bench_reuse(args: argparse.Namespace) -> Result:
    return _implementation("bench.reuse", "run", trace=args.trace)


def _implementation(module: str, function: str, *arguments: object, **options: object) -> Result:
    """Imported only now: ``plan`` needs none of the extras, and help none of the models."""
    result: Result = getattr(import_module(f"mamba_checkpoint_cache.{module}"), function)(*arguments, **options)
    return result


def _serve_options(args: argparse.Namespace) -> ServeOptions:
    return ServeOptions(**{name: getattr(args, name) for name in ServeOptions.__dataclass_fields__ if hasattr(args, name)})


def _parser() -> argparse.ArgumentParser:
    description = "A prefix cache of int8 recurrent-state checkpoints for hybrid language models."
    parser = _Parser(prog=PROGRAM, description=description)
    parser.add_argument("--version", action="version", version=version(PROGRAM))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _add_command(commands, "serve", _serve, tables.rows_table, "serve a hybrid model over HTTP")
    add_serving(serve)
    add_drift(serve)
    add_address(serve)
    add_spans(serve)
    add_serving(
        _add_command(commands, "demo", _demo, tables.demo_table, "serve, replay a workload of shared prefixes, and report")
    )
    add_load(
        _add_command(commands, "load", _load, tables.rows_table, "replay the demo's traffic against a server that runs already")
    )
    add_eval(
        _add_command(commands, "eval", _eval, tables.eval_table, "what checkpoints cost a model in accuracy: the drift report")
    )
    bench = commands.add_parser("bench", help="measure the codec, the tree, or how many prefixes a pool keeps reusable")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _add_command(benches, "codec", _bench, tables.rows_table, "compress and restore against the eager formula and a copy")
    add_bench_drift(
        _add_command(benches, "drift", _bench_drift, tables.drift_table, "how far each format drifts, on the models that ship")
    )
    _add_command(benches, "sampling", _bench, tables.sampling_table, "what the sampled drift checks cost a busy server")
    _add_command(benches, "telemetry", _bench, tables.telemetry_table, "what metrics and spans cost, and a scrape")
    _add_command(benches, "tree", _bench, tables.rows_table, "match and insert at 1k, 10k and 100k cached prompts")
    reuse = _add_command(
        benches, "reuse", _bench_reuse, tables.reuse_table, "reused share against distinct prefixes, at equal pool bytes"
    )
    reuse.add_argument("--trace", metavar="FILE", type=Path, help="also replay a recorded workload in Mooncake's format")
    add_plan(_add_command(commands, "plan", _plan, tables.plan_table, "slots and bytes for a model and a memory budget"))
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], Result], table: Callable[[tables.Result], str], help_text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}."
    )
    command.add_argument(
        "--json", metavar="FILE", type=json_target, help="write JSON to FILE, or to stdout for -, instead of a table"
    )
    command.set_defaults(run=run, table=table)
    return command

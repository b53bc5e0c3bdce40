"""The command line: parses, calls one implementation, and prints its result as JSON or as a table."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import structlog

from mamba_checkpoint_cache import tables
from mamba_checkpoint_cache.codec import CODEC_NAMES
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.evaluation.options import EvalOptions
from mamba_checkpoint_cache.model_configs import ConfigError, spec_from_config
from mamba_checkpoint_cache.plan import DTYPES, PlanError, named_config, parse_bytes, plan, read_config
from mamba_checkpoint_cache.serving.options import GUARDS, OptionError, ServeOptions
from mamba_checkpoint_cache.small_models import SMALL_MODELS

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
    _add_serving(serve)
    _add_drift(serve)
    _add_address(serve)
    _add_spans(serve)
    _add_serving(
        _add_command(commands, "demo", _demo, tables.demo_table, "serve, replay a workload of shared prefixes, and report")
    )
    _add_load(
        _add_command(commands, "load", _load, tables.rows_table, "replay the demo's traffic against a server that runs already")
    )
    _add_eval(
        _add_command(commands, "eval", _eval, tables.eval_table, "what checkpoints cost a model in accuracy: the drift report")
    )
    bench = commands.add_parser("bench", help="measure the codec, the tree, or how many prefixes a pool keeps reusable")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _add_command(benches, "codec", _bench, tables.rows_table, "compress and restore against the eager formula and a copy")
    _add_command(benches, "sampling", _bench, tables.sampling_table, "what the sampled drift checks cost a busy server")
    _add_command(benches, "telemetry", _bench, tables.telemetry_table, "what metrics and spans cost, and a scrape")
    _add_command(benches, "tree", _bench, tables.rows_table, "match and insert at 1k, 10k and 100k cached prompts")
    reuse = _add_command(
        benches, "reuse", _bench_reuse, tables.reuse_table, "reused share against distinct prefixes, at equal pool bytes"
    )
    reuse.add_argument("--trace", metavar="FILE", type=Path, help="also replay a recorded workload in Mooncake's format")
    _add_plan(_add_command(commands, "plan", _plan, tables.plan_table, "slots and bytes for a model and a memory budget"))
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], Result], table: Callable[[tables.Result], str], help_text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}."
    )
    command.add_argument(
        "--json", metavar="FILE", type=_json_target, help="write JSON to FILE, or to stdout for -, instead of a table"
    )
    command.set_defaults(run=run, table=table)
    return command


def _add_serving(command: argparse.ArgumentParser) -> None:
    defaults = ServeOptions()
    _add_model(command, defaults.model)
    command.add_argument(
        "--codec", choices=CODEC_NAMES, default=defaults.codec, help="how checkpoints are stored (default: %(default)s)"
    )
    size = command.add_mutually_exclusive_group()
    size.add_argument("--checkpoint-slots", metavar="N", type=int, help="slots of the checkpoint pool")
    size.add_argument(
        "--checkpoint-memory",
        metavar="SIZE",
        type=_size,
        dest="checkpoint_memory_bytes",
        help="bytes of the checkpoint pool, as 512MiB",
    )
    for name, text in {
        "active_slots": "requests that run at a time",
        "page_size": "tokens of a KV page; checkpoint depths are multiples of it",
        "chunk": "tokens of one prefill step",
    }.items():
        command.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="N",
            type=int,
            default=getattr(defaults, name),
            help=f"{text} (default: %(default)s)",
        )
    command.add_argument("--threads", metavar="N", type=int, help="torch threads (default: torch's own choice)")


def _add_model(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--model",
        default=default,
        help=f"{' or '.join(SMALL_MODELS)}, which ship with the package, a folder, or a hub name (default: %(default)s)",
    )


def _add_drift(command: argparse.ArgumentParser) -> None:
    defaults = ServeOptions()
    command.add_argument(
        "--guard",
        choices=GUARDS,
        default=defaults.guard,
        help="what to do when compressed states drift too far: store native ones, stop storing, nothing (default: %(default)s)",
    )
    for name, kind, text in (
        ("drift_rate", float, "share of the hits that is compared with a recomputation"),
        ("drift_checks_per_minute", int, "most comparisons in a minute"),
        ("max_relative_error", float, "ceiling on the error of a compression, relative to the state"),
        ("max_kl", float, "ceiling on the mean KL divergence of a comparison, in nats"),
    ):
        flag, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        command.add_argument(flag, metavar="N", type=kind, default=default, help=f"{text} (default: %(default)s)")
    command.add_argument("--max-hops", metavar="N", type=int, help="lossy round trips after which a state is computed anew")


def _add_address(command: argparse.ArgumentParser) -> None:
    defaults = ServeOptions()
    command.add_argument("--host", default=defaults.host, help="address to listen on (default: %(default)s)")
    command.add_argument(
        "--port", metavar="N", type=int, default=defaults.port, help="port; 0 for any free one (default: %(default)s)"
    )


def _add_spans(command: argparse.ArgumentParser) -> None:
    command.add_argument("--otlp-endpoint", metavar="URL", help="base URL of an OTLP receiver over HTTP, which gets the spans")
    default = ServeOptions().otlp_ratio
    command.add_argument(
        "--otlp-ratio", metavar="N", type=float, default=default, help="share of the traces that it gets (default: %(default)s)"
    )


def _add_load(command: argparse.ArgumentParser) -> None:
    defaults = ServeOptions()
    command.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default=f"http://{defaults.host}:{defaults.port}",
        help="address of the server (default: %(default)s)",
    )
    command.add_argument(
        "--pause", metavar="SECONDS", type=_at_least_zero, default=0.2, help="between a client's requests (default: %(default)s)"
    )
    command.add_argument("--rounds", metavar="N", type=_count, help="workloads to replay (default: until Ctrl-C)")


def _add_eval(command: argparse.ArgumentParser) -> None:
    defaults = EvalOptions()
    _add_model(command, defaults.model)
    command.add_argument(
        "--codec",
        metavar="NAMES",
        dest="codecs",
        type=lambda names: tuple(names.split(",")),
        default=defaults.codecs,
        help=f"codecs to measure, with commas between (default: {','.join(CODEC_NAMES)})",
    )
    command.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="a text, or .jsonl with text, prompt or input_ids (default: what is built in)",
    )
    for name, text in {
        "prompt_count": "prompts of each task",
        "prefix_tokens": "tokens of a prompt that are run before the state is stored and restored",
    }.items():
        command.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="N",
            type=int,
            default=getattr(defaults, name),
            help=f"{text} (default: %(default)s)",
        )
    command.add_argument(
        "--max-kl",
        metavar="NATS",
        type=float,
        default=defaults.budget.kl_nats,
        help="budget: mean logit KL of any row (default: %(default)s)",
    )
    command.add_argument(
        "--max-relative-error",
        metavar="SHARE",
        type=float,
        default=defaults.budget.relative_error,
        help="budget: relative error of a restored state (default: %(default)s)",
    )
    command.add_argument("--html", metavar="FILE", type=_html_target, help="write a page with pictures to FILE")


def _add_plan(command: argparse.ArgumentParser) -> None:
    model = command.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model", metavar="NAME", help="a released model, such as Qwen3-Next-80B-A3B; a wrong name lists them all"
    )
    model.add_argument("--config", metavar="FILE", type=Path, help="a model's config.json")
    command.add_argument(
        "--memory", metavar="SIZE", type=_size, required=True, help="bytes for checkpoints, as 8GiB, 512MiB or 8GB"
    )
    command.add_argument("--codec", choices=CODEC_NAMES, default="int8", help="how checkpoints are stored (default: %(default)s)")
    for name, default in (("state", "fp32"), ("conv", "bf16")):
        command.add_argument(
            f"--{name}-dtype",
            choices=tuple(DTYPES),
            default=default,
            help=f"dtype of the {name} in the engine (default: %(default)s)",
        )
    command.add_argument(
        "--tp", metavar="N", type=int, default=1, help="tensor-parallel ranks; figures are for one (default: %(default)s)"
    )


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _at_least_zero(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return value


def _html_target(text: str) -> Path:
    if text == "-":
        raise argparse.ArgumentTypeError("can't write -: a page goes to a file")
    return Path(_json_target(text))


def _json_target(text: str) -> str:
    if text != "-" and (Path(text).is_dir() or not Path(text).absolute().parent.is_dir()):
        raise argparse.ArgumentTypeError(f"can't write {text}: not a file in a folder that exists")
    return text

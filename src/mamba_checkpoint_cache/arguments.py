"""The options of each command: names, defaults, help, and what is refused while they are parsed."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from mamba_checkpoint_cache.codec import BASELINE, CODEC_NAMES, check_codec
from mamba_checkpoint_cache.codec.layered import split_choices
from mamba_checkpoint_cache.evaluation.options import EvalOptions
from mamba_checkpoint_cache.plan import DTYPES, parse_bytes
from mamba_checkpoint_cache.serving.options import GUARDS, ServeOptions
from mamba_checkpoint_cache.small_models import SMALL_MODELS


def add_serving(command: argparse.ArgumentParser) -> None:
    """Options of a server that the demo has too."""
    defaults = ServeOptions()
    _add_model(command, defaults.model)
    _add_codec(command, defaults.codec)
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
        _add_number(command, name, int, defaults, text)
    command.add_argument("--threads", metavar="N", type=int, help="torch threads (default: torch's own choice)")


def _add_codec(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--codec",
        metavar="CODEC",
        type=_codec,
        default=default,
        help=f"how checkpoints are stored: {', '.join(CODEC_NAMES)}; or by layer, as int8,0=none,3-5=none, where layers are "
        "counted from 0 among the recurrent ones (default: %(default)s)",
    )


def _add_model(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--model",
        default=default,
        help=f"{' or '.join(SMALL_MODELS)}, which ship with the package, a folder, or a hub name (default: %(default)s)",
    )


def add_drift(command: argparse.ArgumentParser) -> None:
    """Options of a server: what is done about drift."""
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
        ("max_relative_error", float, "ceiling on the error of a compression in each layer, relative to its state"),
        ("max_kl", float, "ceiling on the mean KL divergence of a comparison, in nats"),
    ):
        _add_number(command, name, kind, defaults, text)
    command.add_argument("--max-hops", metavar="N", type=int, help="lossy round trips after which a state is computed anew")


def add_address(command: argparse.ArgumentParser) -> None:
    """Options of a server: where it listens."""
    defaults = ServeOptions()
    command.add_argument("--host", default=defaults.host, help="address to listen on (default: %(default)s)")
    command.add_argument(
        "--port", metavar="N", type=int, default=defaults.port, help="port; 0 for any free one (default: %(default)s)"
    )


def add_spans(command: argparse.ArgumentParser) -> None:
    """Options of a server: where its spans go."""
    command.add_argument("--otlp-endpoint", metavar="URL", help="base URL of an OTLP receiver over HTTP, which gets the spans")
    default = ServeOptions().otlp_ratio
    command.add_argument(
        "--otlp-ratio", metavar="N", type=float, default=default, help="share of the traces that it gets (default: %(default)s)"
    )


def add_load(command: argparse.ArgumentParser) -> None:
    """Options of ``load``."""
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


def add_eval(command: argparse.ArgumentParser) -> None:
    """Options of ``eval``."""
    defaults = EvalOptions()
    _add_model(command, defaults.model)
    command.add_argument(
        "--codec",
        metavar="CODECS",
        dest="codecs",
        type=split_choices,
        default=defaults.codecs,
        help="codecs to measure, with commas between; LAYER=FORMAT and FIRST-LAST=FORMAT belong to the codec before them, where "
        f"layers are counted from 0 among the recurrent ones (default: {','.join(defaults.codecs)})",
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
        _add_number(command, name, int, defaults, text)
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
        help="budget: relative error of a restored state, in each layer (default: %(default)s)",
    )
    command.add_argument(
        "--per-layer",
        metavar="FORMAT",
        choices=CODEC_NAMES,
        nargs="?",
        const="none",
        help="also measure each recurrent layer for itself, and suggest which to keep in FORMAT (default: %(const)s)",
    )
    command.add_argument("--html", metavar="FILE", type=_html_target, help="write a page with pictures to FILE")


def add_bench_drift(command: argparse.ArgumentParser) -> None:
    """Options of ``bench drift``."""
    _add_number(command, "prompt_count", int, EvalOptions(), "prompts of each task, for each model")


def add_plan(command: argparse.ArgumentParser) -> None:
    """Options of ``plan``."""
    model = command.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model", metavar="NAME", help="a released model, such as Qwen3-Next-80B-A3B; a wrong name lists them all"
    )
    model.add_argument("--config", metavar="FILE", type=Path, help="a model's config.json")
    command.add_argument(
        "--memory",
        metavar="SIZE",
        type=_size,
        required=True,
        help="bytes for checkpoints, as 8GiB, 512MiB or 8GB; a drift guard takes one state more",
    )
    _add_codec(command, BASELINE)  # the figures that are commonly quoted
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


def _add_number(
    command: argparse.ArgumentParser, name: str, kind: type[int | float], defaults: ServeOptions | EvalOptions, text: str
) -> None:
    """The option for the field ``name`` of ``defaults``."""
    flag, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
    command.add_argument(flag, metavar="N", type=kind, default=default, help=f"{text} (default: %(default)s)")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _codec(text: str) -> str:
    try:
        check_codec(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


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
    return Path(json_target(text))


def json_target(text: str) -> str:
    """The name of a file that can be written, or - for stdout."""
    if text != "-" and (Path(text).is_dir() or not Path(text).absolute().parent.is_dir()):
        raise argparse.ArgumentTypeError(f"can't write {text}: not a file in a folder that exists")
    return text

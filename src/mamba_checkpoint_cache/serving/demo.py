"""The demo: a server, a workload of shared prefixes over HTTP, and what came of it; natively and as int8 in the same bytes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from statistics import median
from types import FrameType
from typing import Any, NoReturn

import httpx

from mamba_checkpoint_cache.codec import BASELINE
from mamba_checkpoint_cache.serving.options import OptionError, ServeOptions
from mamba_checkpoint_cache.serving.progress import Advance, progress
from mamba_checkpoint_cache.serving.scrape import Scrape
from mamba_checkpoint_cache.serving.workload import Session, Workload, generate_workload
from mamba_checkpoint_cache.small_models import SMALL_MODELS

POOL_BYTES = 6 * 2**20
"""What the checkpoints get unless an option says otherwise: too little for the workload's states in fp32."""
SESSIONS = {"chats": 24, "agents": 12, "forks": 8, "resends": 6}
CONCURRENCY = 4
DRIFT_RATE, DRIFT_CHECKS_PER_MINUTE = 1.0, 600
"""One check after another, where a server by default makes few: a short run has to show something."""
LAST_CHECK_SECONDS = 10.0
REPLY_TOKENS = 8
SMALL_MODEL_THREADS = 1
"""Operations this small gain nothing from a second thread, and lose tenfold on a machine that has other work."""
STOP_SECONDS = 10.0
IDLE_SECONDS = 1.0
"""How long an idle connection is kept: well under the server's five seconds, which might end as a request is on its way."""

_SERVE = "from mamba_checkpoint_cache.cli import main; raise SystemExit(main())"
_FLAGS = {"checkpoint_memory_bytes": "--checkpoint-memory"}


@dataclass(frozen=True, slots=True)
class Reply:
    """One request as the client saw it."""

    cached_tokens: int
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Replay:
    """One run of the workload: the name of the model, the client's view and the server's counters at the end."""

    model: str
    replies: list[Reply]
    scrape: Scrape


def run(options: ServeOptions, workload: Workload | None = None) -> dict[str, Any]:
    """Replay a workload with the codec of ``options``, then in exactly as many bytes natively, and as int8.

    The keys of the result are public; counts and bytes come from the server's ``/metrics``, latencies from the client. The server
    listens on a free port and is gone when this returns or raises, also by Ctrl-C, SIGTERM or SIGHUP.

    Raises:
        OptionError: if the server ends before it is ready, or refuses a request.
    """
    workload = workload or generate_workload(**SESSIONS)
    small = options.model in SMALL_MODELS
    options = replace(options, port=0, threads=options.threads or (SMALL_MODEL_THREADS if small else None))
    if options.checkpoint_slots is None and options.checkpoint_memory_bytes is None:
        options = replace(options, checkpoint_memory_bytes=POOL_BYTES)
    options = replace(options, drift_rate=DRIFT_RATE, drift_checks_per_minute=DRIFT_CHECKS_PER_MINUTE)
    with _ending_on_signals():
        replays = {options.codec: _replay(options, workload)}
        pool_bytes = int(replays[options.codec].scrape.value("bytes", pool="checkpoint", kind="reserved"))
        equal = replace(options, checkpoint_slots=None, checkpoint_memory_bytes=pool_bytes)
        for codec in ("none", BASELINE):
            if codec not in replays:
                replays[codec] = _replay(replace(equal, codec=codec), workload)
    return {
        "model": replays[options.codec].model,
        "codec": options.codec,
        **_report(replays[options.codec]),
        "equal_memory": {"pool_bytes": pool_bytes, **{codec: _arm(replay.scrape) for codec, replay in replays.items()}},
    }


def _report(replay: Replay) -> dict[str, Any]:
    scrape = replay.scrape
    tokens, commits = scrape.by("tokens_total", "kind"), scrape.by("commits_total", "outcome")
    held = scrape.by("bytes", "kind", pool="checkpoint")
    errors = scrape.histogram("relative_error", scope="state")
    return {
        "requests": len(replay.replies),
        "prompt_tokens": tokens["prompt"],
        "reused_tokens": tokens["reused"],
        "lost_tokens": tokens["lost"],
        "checkpoints": {
            "stored": commits["stored"],
            "duplicate": commits["duplicate"],
            "skipped": scrape.by("skips_total", "reason"),
        },
        "evictions": scrape.by("evictions_total", "reason"),
        "bytes": {
            "occupied": held["occupied"],
            "native_equivalent": held["native_equivalent"],
            "saved": held["native_equivalent"] - held["occupied"],
        },
        "relative_error": {
            "p50": errors.quantile(0.5),
            "p95": errors.quantile(0.95),
            "max": errors.quantile(1.0),
            "source": "histogram: interpolated within buckets; max is the upper bound of the highest bucket in use",
        },
        "drift": _drift(scrape),
        "latency_ms": {
            "hit_p50": _median(reply.milliseconds for reply in replay.replies if reply.cached_tokens),
            "miss_p50": _median(reply.milliseconds for reply in replay.replies if not reply.cached_tokens),
        },
    }


def _drift(scrape: Scrape) -> dict[str, Any]:
    """The sampled logit checks: how they ended, and what they found over all tokens that were compared."""
    agreed = scrape.by("top1_agreement_total", "agreed")
    tokens = sum(agreed.values())
    return {
        "checks": scrape.by("drift_checks_total", "outcome"),
        "tokens": tokens,
        "kl_mean_nats": scrape.value("logit_kl_nats_sum") / tokens if tokens else None,
        "top1": agreed["yes"] / tokens if tokens else None,
    }


def _arm(scrape: Scrape) -> dict[str, Any]:
    tokens = scrape.by("tokens_total", "kind")
    return {
        "slots": int(scrape.value("slot_capacity", pool="checkpoint")),
        "reuse_ratio": tokens["reused"] / max(1, tokens["prompt"]),
    }


def _median(values: Iterator[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def _replay(options: ServeOptions, workload: Workload) -> Replay:
    sys.stderr.write(f"starting the server with codec {options.codec}\n")
    with _server(options) as url, progress(f"requests, codec {options.codec}", len(workload.order)) as advance:
        model, replies = asyncio.run(drive(url, workload, advance))
        return Replay(model, replies, asyncio.run(_last_scrape(url)))


async def drive(url: str, workload: Workload, advance: Advance, *, pause: float = 0.0) -> tuple[str, list[Reply]]:
    """Take the workload's turns in their order, a few at a time, with ``pause`` seconds after each.

    A session's next turn waits for its last. Gives the name of the model and what came back.

    Raises:
        OptionError: if the server refuses a request.
    """
    async with _client(url) as client:
        model = (await _get(client, "/v1/models")).json()["data"][0]["id"]
        transcripts = [_Transcript(session, as_bytes=model in SMALL_MODELS) for session in workload.sessions]
        turns = iter(workload.order)
        replies: list[Reply] = []

        async def worker() -> None:
            for index in turns:
                replies.append(await transcripts[index].next_turn(client))
                advance(1)
                await asyncio.sleep(pause)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(CONCURRENCY):
                    workers.create_task(worker())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return model, replies


async def _last_scrape(url: str) -> Scrape:
    """The counters at the end, once the check under way has come to its own: a server without work is soon done with it."""
    deadline = time.monotonic() + LAST_CHECK_SECONDS
    async with _client(url) as client:
        while True:
            scrape = Scrape((await _get(client, "/metrics")).text)
            if scrape.by("drift_checks_total", "outcome")["ok"] or time.monotonic() > deadline:
                return scrape
            await asyncio.sleep(0.05)


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(keepalive_expiry=IDLE_SECONDS)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False)  # noqa: S113 - Ctrl-C ends it


class _Transcript:
    """A session as it goes on: all that was said so far, as token ids where a byte is a token, else as text."""

    def __init__(self, session: Session, *, as_bytes: bool) -> None:
        self._encode: Callable[[str], Any] = _token_ids if as_bytes else str
        self._field, self._output = ("input_ids", "output_ids") if as_bytes else ("text", "text")
        self._said = self._encode(session.opening)
        self._turns = iter(session.turns)
        self._lock = asyncio.Lock()

    async def next_turn(self, client: httpx.AsyncClient) -> Reply:
        """Send everything so far and one turn more; keep the reply."""
        async with self._lock:
            self._said = self._said + self._encode(next(self._turns))
            started = time.perf_counter()
            body = await _post(
                client, "/generate", {self._field: self._said, "sampling_params": {"max_new_tokens": REPLY_TOKENS}}
            )
            milliseconds = 1e3 * (time.perf_counter() - started)
            self._said = self._said + body[self._output]
        return Reply(body["meta_info"]["cached_tokens"], milliseconds)


def _token_ids(text: str) -> list[int]:
    return list(text.encode())


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    return _checked(await client.post(path, json=body)).json()


async def _get(client: httpx.AsyncClient, path: str) -> httpx.Response:
    return _checked(await client.get(path))


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code != HTTPStatus.OK:
        raise OptionError(f"the server answered {response.url.path} with {response.status_code}: {response.text}")
    return response


@contextmanager
def _server(options: ServeOptions) -> Iterator[str]:
    """A server process, in a process group of its own that is gone afterwards; gives its address once it takes requests."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        command = [sys.executable, "-c", _SERVE, "serve", *_arguments(options)]
        with ExitStack() as undo:
            with _signals_held():
                process = undo.enter_context(
                    subprocess.Popen(
                        command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True, start_new_session=True
                    )
                )
                undo.callback(_stop, process)
            announced = process.stdout.readline() if process.stdout else ""
            if not announced:
                raise OptionError(_last_line(log, process.wait()))
            yield announced.split()[-1]


def _arguments(options: ServeOptions) -> list[str]:
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    flags = ((_FLAGS.get(name, f"--{name.replace('_', '-')}"), value) for name, value in given.items() if value is not None)
    return [part for flag, value in flags for part in (flag, str(value))]


def _last_line(log: Any, code: int) -> str:
    log.seek(0)
    lines = log.read().splitlines()
    return lines[-1].partition("serve: ")[2] or lines[-1] if lines else f"the server ended with {code} before it was ready"


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask, wait, and then insist."""
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


@contextmanager
def _signals_held() -> Iterator[None]:
    """A signal that ends the demo waits: amid the start of a process it would leave one that nobody knows of."""
    came: list[int] = []
    held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in held}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that whatever was started is stopped."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

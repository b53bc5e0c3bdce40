"""Load: the demo's traffic against a server that runs already, one workload after another."""

from __future__ import annotations

import asyncio
from itertools import count, islice
from typing import Any

import httpx

from mamba_checkpoint_cache.serving.demo import SESSIONS, drive
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.serving.progress import progress
from mamba_checkpoint_cache.serving.workload import generate_workload


def run(url: str, *, pause: float, rounds: int | None) -> dict[str, Any]:
    """Replay ``rounds`` workloads, each unlike the last, or without end if that is None; Ctrl-C ends it.

    Raises:
        OptionError: if the server is not to be reached, or refuses a request.
    """
    rows = []
    for seed in islice(count(), rounds):
        workload = generate_workload(**SESSIONS, seed=seed)
        try:
            with progress(f"requests, workload {seed}", len(workload.order)) as advance:
                _, replies = asyncio.run(drive(url, workload, advance, pause=pause))
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise OptionError(f"can't reach {url}: {str(error) or type(error).__name__}") from error
        rows.append({"workload": seed, "requests": len(replies), "cached_tokens": sum(reply.cached_tokens for reply in replies)})
    return {"rows": rows}

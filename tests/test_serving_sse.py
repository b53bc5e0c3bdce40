from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request

from mamba_checkpoint_cache.serving.http.sse import event_stream


async def hangs_up() -> dict[str, Any]:
    """What a server receives from a client that is gone."""
    return {"type": "http.disconnect"}


def test_a_client_that_is_gone_before_the_first_event_ends_the_generation() -> None:
    """Whatever the stream holds is let go of, and nothing is raised for nobody to see."""
    ended = []

    async def payloads() -> AsyncGenerator[dict[str, Any]]:
        try:
            await asyncio.Event().wait()
            yield {}
        finally:
            ended.append(True)

    response = asyncio.run(event_stream(Request({"type": "http"}, hangs_up), payloads()))

    assert ended == [True]
    assert response.status_code == 200

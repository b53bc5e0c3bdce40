"""Server-sent events, as SGLang and OpenAI stream them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mamba_checkpoint_cache.serving.http.errors import ApiError, error_body
from mamba_checkpoint_cache.serving.http.generation import unless_disconnected


async def event_stream(http: Request, payloads: AsyncGenerator[dict[str, Any]]) -> Response:
    """A stream of ``payloads``. What goes wrong before the first one is raised, so that it has a status of its own."""
    first = await unless_disconnected(http, anext(payloads))
    if first is None:
        await payloads.aclose()
        return Response()
    return StreamingResponse(_lines(first, payloads), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _lines(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async with aclosing(rest):
            yield _line(first)
            async for payload in rest:
                yield _line(payload)
    except ApiError as error:
        yield _line(error_body(error))
    yield "data: [DONE]\n\n"


def _line(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload)}\n\n"

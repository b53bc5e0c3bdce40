"""For those who run the server: ``/health``, ``/metrics`` and ``/flush_cache``."""

from __future__ import annotations

import asyncio

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.http.service import service_of


async def health(http: Request) -> JSONResponse:
    """200 while the server takes requests, 503 while it starts or drains."""
    status = service_of(http).status
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


def metrics(http: Request) -> Response:
    """The registry in Prometheus' text format, or in OpenMetrics' (which has the exemplars) for who accepts that.

    Not a coroutine, so that it runs on a thread of its own: a slow scrape holds up neither the event loop nor the engine.
    """
    encode, content_type = choose_encoder(http.headers.get("accept", ""))
    return Response(encode(service_of(http).registry), media_type=content_type)


async def flush_cache(http: Request) -> PlainTextResponse:
    """Drop every checkpoint and all KV that no running request uses."""
    service = service_of(http)
    service.engine()
    freed = await asyncio.wrap_future(service.thread.call(Engine.flush))
    what = f"{freed.checkpoints:,} checkpoints and {freed.kv_tokens:,} tokens of KV"
    return PlainTextResponse(f"Cache flushed.\n{what} freed; what running requests use was kept.\n")

"""The endpoints."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from mamba_checkpoint_cache.serving.http.completions import completions, model, models
from mamba_checkpoint_cache.serving.http.errors import ApiError, api_error
from mamba_checkpoint_cache.serving.http.generate import generate
from mamba_checkpoint_cache.serving.http.operations import flush_cache, health, metrics
from mamba_checkpoint_cache.serving.http.service import Service


def build_app(service: Service) -> Starlette:
    """The ASGI application over a service."""
    app = Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/flush_cache", flush_cache, methods=["GET", "POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={ApiError: api_error, HTTPException: api_error, Exception: api_error},
    )
    app.state.service = service
    return app

"""What all handlers share: the engine's thread, and whether it takes requests."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.engine_thread import EngineThread
from mamba_checkpoint_cache.serving.http.errors import ApiError


@dataclass(slots=True)
class Service:
    """The server as its handlers see it. ``draining``: it finishes what runs and takes nothing new."""

    thread: EngineThread
    registry: CollectorRegistry
    created: int
    draining: bool = False

    @property
    def model_name(self) -> str:
        """The name of the model that is served."""
        return self.engine().config.name

    @property
    def status(self) -> str:
        """``starting``, ``ready`` or ``draining``."""
        if self.draining:
            return "draining"
        return "ready" if self.thread.ready.done() and not self.thread.ready.exception() else "starting"

    def engine(self) -> Engine:
        """The engine, to read from. Raises :class:`ApiError` (503) unless the server takes requests."""
        if self.status != "ready":
            raise ApiError(503, f"the server is {self.status} and takes no requests")
        return self.thread.ready.result()


def service_of(request: Request) -> Service:
    """The service behind a request."""
    service: Service = request.app.state.service
    return service

"""A server on a :class:`HashModel` that takes its time: ``hash_server.py STEP_SECONDS BUILD_SECONDS GRACE_SECONDS``."""

from __future__ import annotations

import sys
import time
from types import ModuleType

from hash_model import HashModel, hash_engine

from mamba_checkpoint_cache import Telemetry
from mamba_checkpoint_cache.serving import server
from mamba_checkpoint_cache.serving.options import ServeOptions

FORBIDDEN = 256
"""A prompt with this token makes the model fail; it never comes out of it."""


class SlowModel(HashModel):
    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self.step_seconds = step_seconds

    def start(self, *args, **options):
        session = super().start(*args, **options)

        def slow(tokens, ids=(), run=session.run):
            time.sleep(self.step_seconds)
            if FORBIDDEN in tokens:
                raise ArithmeticError("the model failed")
            return run(tokens, ids)

        session.run = slow
        return session


def build_engine(options, registry, tracer_provider):
    time.sleep(float(sys.argv[2]))
    return hash_engine(
        SlowModel(float(sys.argv[1])),
        telemetry=Telemetry(registry=registry, tracer_provider=tracer_provider),
        max_context=2000,
        kv_slots=8000,
        active_slots=2,
        max_waiting=6,
    )


if __name__ == "__main__":
    build = sys.modules["mamba_checkpoint_cache.serving.build"] = ModuleType("build")
    build.build_engine = build_engine
    server.GRACE_SECONDS = float(sys.argv[3])
    print(server.main(ServeOptions(port=0)))  # noqa: T201 - read by the test

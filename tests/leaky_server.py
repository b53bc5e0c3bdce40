"""A server that loses leases while a file exists, and gives them back once it is gone: ``leaky_server.py FILE SLOTS``.

It stands for an engine with a defect: requests that are matched and never restored nor released hold every checkpoint.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from types import ModuleType

from hash_model import hash_engine

from mamba_checkpoint_cache import Telemetry
from mamba_checkpoint_cache.serving import server
from mamba_checkpoint_cache.serving.options import ServeOptions


def build_engine(options, registry, tracer_provider):
    signal, slots = Path(sys.argv[1]), int(sys.argv[2])
    engine = hash_engine(telemetry=Telemetry(registry=registry, tracer_provider=tracer_provider), checkpoint_slots=slots)
    recent, lost, submit, step = deque(maxlen=2 * slots), {}, engine.submit, engine.step

    def remembered(request):
        recent.append(tuple(request.tokens))
        submit(request)

    def leaking():
        if signal.exists():
            for prompt in set(recent) - lost.keys():
                lease = engine.cache.match_prefix([*prompt, 0])
                if lease.restorable:
                    lost[prompt] = lease
                else:
                    engine.cache.release(lease)
        while lost and not signal.exists():
            engine.cache.release(lost.popitem()[1])
        step()

    engine.submit, engine.step = remembered, leaking
    return engine


if __name__ == "__main__":
    build = sys.modules["mamba_checkpoint_cache.serving.build"] = ModuleType("build")
    build.build_engine = build_engine
    server.main(ServeOptions(port=0))

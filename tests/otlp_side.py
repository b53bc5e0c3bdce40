"""An engine whose spans go to a receiver as the server's do: ``otlp_side.py URL``. Prints what it served, and in what time."""

from __future__ import annotations

import json
import sys
import time

import torch
from hash_model import expected, greedy, hash_engine

from mamba_checkpoint_cache import Telemetry
from mamba_checkpoint_cache.serving.options import ServeOptions
from mamba_checkpoint_cache.serving.spans import exported_spans


def serve(telemetry: Telemetry) -> dict:
    engine = hash_engine(telemetry=telemetry)
    started = time.perf_counter()
    right = []
    for number in range(20):
        prompt = list(f"a prompt that others share {number % 5}, and more {number}".encode())
        (request,) = engine.generate([prompt], greedy(6))
        right.append(request.output == expected(prompt, 6))
    seconds = time.perf_counter() - started
    errors = telemetry.registry.get_sample_value("mamba_checkpoint_telemetry_errors_total", {"cache": "default"})
    return {"right": right, "seconds": seconds, "errors": errors}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with exported_spans(ServeOptions(otlp_endpoint=sys.argv[1], otlp_ratio=1.0)) as provider:
        sys.stdout.write(json.dumps(serve(Telemetry(tracer_provider=provider))) + "\n")
        sys.stdout.flush()

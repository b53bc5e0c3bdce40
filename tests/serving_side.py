"""What tests of serving need beside a model: a real tiny one, and servers in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Self

import httpx
import torch

from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.integrations.transformers import HybridModel
from mamba_checkpoint_cache.small_models.architectures import build_gdn_hybrid

COMMAND_LINE = "import sys; from mamba_checkpoint_cache.cli import main; sys.exit(main())"


@cache
def real_model(recurrent_layers: int = 1) -> HybridModel:
    """A tiny probed Qwen3.5 with random weights."""
    torch.set_num_threads(1)
    layers = ("linear_attention",) * recurrent_layers + ("full_attention",)
    return prepare_model(build_gdn_hybrid(head_dim=16, hidden_size=32, num_heads=2, layers=layers))


class ServerProcess:
    """A server in a process of its own; ``client`` talks to it. Killed on exit, if it has not ended by then."""

    def __init__(self, *arguments: str, code: str = COMMAND_LINE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])},
        )
        self.stderr: list[str] = []
        self._reader = threading.Thread(target=lambda: self.stderr.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def wait_until_listening(self) -> None:
        self.line = self.process.stdout.readline()
        assert self.line.startswith("listening on http://127.0.0.1:"), "".join(self.stderr)
        self.client = httpx.Client(base_url=self.line.split()[-1], timeout=30, trust_env=False)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()
        if hasattr(self, "client"):
            self.client.close()

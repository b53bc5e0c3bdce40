"""Settings of every test run: one torch thread, hypothesis that a busy machine cannot fail, structlog as it was found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _structlog_unconfigured() -> Iterator[None]:
    """A server that a test starts in this process configures structlog, for a stream that is gone after the test."""
    yield
    structlog.reset_defaults()

"""Settings of every test run: one torch thread, and hypothesis that a busy machine can't fail."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")

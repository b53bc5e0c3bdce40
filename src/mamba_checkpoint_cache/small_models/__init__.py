"""Small trained models that ship with the package, what they were trained to do, and how."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL = "gdn-hybrid"
SMALL_MODELS = {name: Path(__file__).parent / name for name in (DEFAULT_MODEL, "mamba2-hybrid")}
"""The folder of each model, by its name."""

"""What a drift report is made of, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mamba_checkpoint_cache.codec import BASELINE, CODEC_NAMES, DEFAULT_CODEC, check_codec
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.serving.options import OptionError
from mamba_checkpoint_cache.small_models import DEFAULT_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Options of one drift report. ``model`` is a small model that ships with the package, a folder, or a hub name.

    ``prompts`` is a text or ``.jsonl`` file; None takes what is built in. Of each of at most ``prompt_count`` prompts a task, the
    first ``prefix_tokens`` are run before the state is stored and restored. ``html`` is where the page with pictures goes.
    ``per_layer``: measure each recurrent layer for itself as well, and suggest which to keep in the format that it names.

    Raises:
        OptionError: if a number is out of range, or a codec is unknown or named twice.
    """

    model: str = DEFAULT_MODEL
    codecs: tuple[str, ...] = ("none", BASELINE, DEFAULT_CODEC)
    prompts: Path | None = None
    prompt_count: int = 24
    prefix_tokens: int = 256
    html: Path | None = None
    per_layer: str | None = None
    budget: DriftBudget = field(default_factory=DriftBudget)

    def __post_init__(self) -> None:
        for name in ("prompt_count", "prefix_tokens"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(set(self.codecs)) != len(self.codecs) or not self.codecs:
            raise OptionError(f"expected codecs, each once, got {' and '.join(self.codecs)!r}")
        try:
            for name in self.codecs:
                check_codec(name)
        except ValueError as error:
            raise OptionError(str(error)) from error
        if self.per_layer is not None and self.per_layer not in CODEC_NAMES:
            raise OptionError(f"per_layer must be one of {', '.join(CODEC_NAMES)}, got {self.per_layer!r}")

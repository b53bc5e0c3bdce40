"""What the reference server and the demo are told to do, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from mamba_checkpoint_cache.codec import CODEC_NAMES

DEFAULT_CHECKPOINT_SLOTS = 64


class OptionError(ValueError):
    """An option that can't be met; the message says which, what was given and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of one server. ``model`` is a folder or a hub name; None is the built-in small random hybrid.

    The checkpoint pool has ``checkpoint_slots`` slots, or as many as fit ``checkpoint_memory_bytes``; give one of them, or none.
    ``chunk`` is the number of tokens of one prefill step and a multiple of ``page_size``, so that the end of a chunk can be
    a checkpoint. ``port`` 0 takes any free port; ``threads`` None leaves the number of torch threads as it is.

    Raises:
        OptionError: if a number is out of range, the codec is unknown, or two options contradict each other.
    """

    model: str | None = None
    codec: str = "int8"
    checkpoint_slots: int | None = None
    checkpoint_memory_bytes: int | None = None
    active_slots: int = 8
    page_size: int = 1
    chunk: int = 64
    host: str = "127.0.0.1"
    port: int = 30000
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("checkpoint_slots", "checkpoint_memory_bytes", "active_slots", "page_size", "chunk", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, got {value}")
        if self.codec not in CODEC_NAMES:
            raise OptionError(f"unknown codec {self.codec!r}, expected one of {', '.join(CODEC_NAMES)}")
        if self.checkpoint_slots is not None and self.checkpoint_memory_bytes is not None:
            raise OptionError("give checkpoint slots or checkpoint memory, not both")
        if self.chunk % self.page_size:
            raise OptionError(f"chunk must be a multiple of page_size, got {self.chunk} and {self.page_size}")
        if not 0 <= self.port <= 65535:
            raise OptionError(f"port must lie in 0 … 65535, got {self.port}")

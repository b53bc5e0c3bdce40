"""What the reference server and the demo are told to do, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from mamba_checkpoint_cache.codec import DEFAULT_CODEC, check_codec
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.drift.guard import DriftGuard
from mamba_checkpoint_cache.small_models import DEFAULT_MODEL

DEFAULT_CHECKPOINT_SLOTS = 64
GUARDS = ("native", "stop", "off")


class OptionError(ValueError):
    """An option that can't be met; the message says which, what was given and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of one server. ``model`` is a small model that ships with the package, a folder, or a hub name.

    ``codec`` is a format, or one for each recurrent layer, as ``int8,0=none,3-5=none``: the layers of the state tensor, from 0.
    The checkpoint pool has ``checkpoint_slots`` slots, or as many as fit ``checkpoint_memory_bytes``; give one of them, or none.
    ``chunk`` is the number of tokens of one prefill step and a multiple of ``page_size``, so that the end of a chunk can be
    a checkpoint. ``port`` 0 takes any free port; ``threads`` None leaves the number of torch threads as it is.

    The share ``drift_rate`` of the hits, and at most ``drift_checks_per_minute`` of them, is compared with a recomputation. Where
    compressed states are over ``max_relative_error`` or ``max_kl`` (nats) for long, ``guard`` says what to do: keep ``native``
    ones in the same memory, ``stop`` storing, or nothing (``off``). A state with ``max_hops`` lossy round trips behind it, two or
    more, is computed anew; None sets no limit.

    The share ``otlp_ratio`` of the traces goes to ``otlp_endpoint``, the base URL of an OTLP receiver over HTTP; None has none.

    Raises:
        OptionError: if a number is out of range, the codec is unknown, or two options contradict each other.
    """

    model: str = DEFAULT_MODEL
    codec: str = DEFAULT_CODEC
    checkpoint_slots: int | None = None
    checkpoint_memory_bytes: int | None = None
    active_slots: int = 8
    page_size: int = 1
    chunk: int = 64
    host: str = "127.0.0.1"
    port: int = 30000
    threads: int | None = None
    drift_rate: float = 0.01
    drift_checks_per_minute: int = 6
    guard: str = "native"
    max_relative_error: float = DriftBudget().relative_error
    max_kl: float = DriftBudget().kl_nats
    max_hops: int | None = None
    otlp_endpoint: str | None = None
    otlp_ratio: float = 0.1

    def __post_init__(self) -> None:
        counts = ("checkpoint_slots", "checkpoint_memory_bytes", "active_slots", "page_size", "chunk", "threads")
        for name in (*counts, "drift_checks_per_minute", "max_hops"):
            value, least = getattr(self, name), 2 if name == "max_hops" else 1
            if value is not None and value < least:
                raise OptionError(f"{name} must be at least {least}, got {value}")
        try:
            check_codec(self.codec)
        except ValueError as error:
            raise OptionError(str(error)) from error
        if self.checkpoint_slots is not None and self.checkpoint_memory_bytes is not None:
            raise OptionError("give checkpoint slots or checkpoint memory, not both")
        if self.chunk % self.page_size:
            raise OptionError(f"chunk must be a multiple of page_size, got {self.chunk} and {self.page_size}")
        if not 0 <= self.port <= 65535:
            raise OptionError(f"port must lie in 0 … 65535, got {self.port}")
        for name, whole in (("drift_rate", "hits"), ("otlp_ratio", "traces")):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} must be a share of the {whole}, 0 … 1, got {getattr(self, name)}")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise OptionError(f"otlp_endpoint must be an http or https address, got {self.otlp_endpoint!r}")
        for name in ("max_relative_error", "max_kl"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} must be over 0, got {getattr(self, name)}")
        if self.guard not in GUARDS:
            raise OptionError(f"unknown guard {self.guard!r}, expected one of {', '.join(GUARDS)}")

    def build_guard(self) -> DriftGuard | None:
        """A new guard of the kind that is asked for."""
        if self.guard == "off":
            return None
        budget = DriftBudget(relative_error=self.max_relative_error, kl_nats=self.max_kl)
        return DriftGuard(budget, "native" if self.guard == "native" else "stop")

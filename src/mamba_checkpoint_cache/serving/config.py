"""The sizes of an engine, and what it is told to do."""

from __future__ import annotations

from dataclasses import dataclass

from mamba_checkpoint_cache.codec import DEFAULT_CODEC, Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The name and the sizes of an engine.

    ``chunk``: tokens of one prefill step. ``max_context``: tokens of the longest request, output included. ``kv_slots``: tokens
    whose KV is kept, for running requests and cached prefixes together. ``caching`` False never stores a state: the same steps,
    from the start. ``drift_rate``: the share of hits whose logits are compared with a recomputation, at most
    ``drift_checks_per_minute`` of them; 0 compares none and needs no memory for it. ``max_hops``: see :class:`CheckpointPolicy`.

    Raises:
        ValueError: if the KV of one request at its longest does not fit the KV slots.
    """

    name: str = "model"
    active_slots: int = 8
    checkpoint_slots: int = 64
    codec: str | Codec = DEFAULT_CODEC
    page_size: int = 1
    chunk: int = 64
    max_context: int = 4096
    kv_slots: int = 32768
    max_waiting: int = 1024
    caching: bool = True
    drift_rate: float = 0.0
    drift_checks_per_minute: int = 6
    max_hops: int | None = None

    def __post_init__(self) -> None:
        if self.kv_slots < self.max_context:
            raise ValueError(
                f"kv_slots must be at least max_context, the longest request: got {self.kv_slots} and {self.max_context}"
            )

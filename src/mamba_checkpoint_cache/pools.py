"""The active pool (native dtype) and the checkpoint pool (compressed): tensors indexed by slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mamba_checkpoint_cache.arena import Arena
from mamba_checkpoint_cache.codec import CODEC_NAMES, DEFAULT_CODEC, get_codec
from mamba_checkpoint_cache.codec.base import Codec
from mamba_checkpoint_cache.codec.layered import codecs_by_layer
from mamba_checkpoint_cache.codec.report import Report
from mamba_checkpoint_cache.errors import HandleError
from mamba_checkpoint_cache.slots import ActiveSlot, CheckpointSlot, SlotAllocator, SlotState
from mamba_checkpoint_cache.state import StateSpec
from mamba_checkpoint_cache.telemetry.catalogue import AllocationOutcome, FreeReason
from mamba_checkpoint_cache.telemetry.recorder import NULL, NullTelemetry, PoolSnapshot, Telemetry

MOST_TENSORS = 64
"""Tensors whose alignment a checkpoint pool has room for, whatever codec it is laid out for later. 8 KiB."""


class ActivePool:
    """The recurrent states of the running requests, in their native dtype.

    ``state`` is ``[num_layers, slots + 1, num_heads, d_v, d_k]`` and each of ``side`` is ``[num_layers, slots + 1, *shape]``,
    indexed by ``slot.index``; row 0 is padding. Pass an engine's own tensors (any strides) to have them adopted; else they are
    allocated, zeroed.

    A slot is *reserved* once allocated and *locked* once restored. The pool knows the depth of each slot's state from
    ``restore`` and :meth:`advance`.

    Raises:
        ValueError: if adopted tensors do not have the shape and dtype that ``spec`` asks for.
    """

    def __init__(
        self,
        spec: StateSpec,
        slots: int,
        *,
        device: torch.device | str = "cpu",
        state: Tensor | None = None,
        side: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.spec = spec
        self.slots = SlotAllocator("active", slots, ActiveSlot)
        self.telemetry: Telemetry | NullTelemetry = NULL
        rows = slots + 1
        if state is None:
            _require_memory("active", spec.native_bytes * rows, slots, spec.native_bytes, torch.device(device))
            state = torch.zeros(_state_shape(spec, rows), dtype=spec.dtype, device=device)
        self.state = _expect("state", state, _state_shape(spec, rows), spec.dtype)
        self.side = side_tensors(spec, rows, self.state.device) if side is None else _adopt_side(spec, rows, side)
        self._depths = [0] * rows
        self._rings = [0] * rows
        self._hops = [0] * rows
        self._epochs = [0] * rows

    def allocate(self) -> ActiveSlot | None:
        """A slot for one request, reserved until it is restored; None if all are in use."""
        with self.telemetry.operation("alloc") as operation:
            slot = self.slots.reserve()
            outcome: AllocationOutcome = "exhausted" if slot is None else "ok"
            operation.set(pool="active", outcome=outcome)
            self.telemetry.allocation("active", outcome)
        return slot

    def free(self, slot: ActiveSlot, reason: FreeReason = "released") -> None:
        """Give a slot back. Raises :class:`HandleError` if it was freed already or is not of this pool."""
        with self.telemetry.operation("free") as operation:
            self.slots.free(slot)
            operation.set(pool="active", reason=reason)
            self.telemetry.freed("active", reason)

    def advance(self, slot: ActiveSlot, *, depth: int, ring: int = 0) -> None:
        """Record that the engine has run ``depth`` tokens through the slot, the last ``ring`` of which are not in the state yet.

        A ReplaySSM engine keeps those in a ring beside the state. Only accepted tokens count: a speculated token that may
        still be rejected does not.

        Raises:
            HandleError: if the slot is stale or was never restored.
            ValueError: if ``ring`` does not lie in ``0 … depth``.
        """
        self._require_written(slot)
        if not 0 <= ring <= depth:
            raise ValueError(f"expected 0 <= ring <= depth, got ring={ring}, depth={depth}")
        self._depths[slot.index] = depth
        self._rings[slot.index] = ring

    def depth(self, slot: ActiveSlot) -> int:
        """Tokens that the engine has run through the slot, those in its ring included."""
        self._require_written(slot)
        return self._depths[slot.index]

    def ring(self, slot: ActiveSlot) -> int:
        """Tokens of :meth:`depth` that are in the ring beside the state; 0 right after a restore."""
        self._require_written(slot)
        return self._rings[slot.index]

    def hops(self, slot: ActiveSlot) -> int:
        """Lossy round trips behind the slot's content."""
        self._require_written(slot)
        return self._hops[slot.index]

    def epoch(self, slot: ActiveSlot) -> int:
        """The epoch of the match that the slot was restored from."""
        self._require_written(slot)
        return self._epochs[slot.index]

    def begin_write(self, slot: ActiveSlot) -> None:
        """Declare the slot's content undefined, before it is overwritten."""
        self.slots.move(slot, SlotState.RESERVED)

    def end_write(self, slot: ActiveSlot, *, depth: int, hops: int, epoch: int = 0) -> None:
        """Declare the slot's content defined: the state after ``depth`` tokens, with an empty ring."""
        self.slots.move(slot, SlotState.LOCKED)
        self._depths[slot.index], self._rings[slot.index] = depth, 0
        self._hops[slot.index], self._epochs[slot.index] = hops, epoch

    def zero(self, slot: ActiveSlot) -> None:
        """Write the state of an empty sequence into the slot."""
        self.state[:, slot.index].zero_()
        for tensor in self.side.values():
            tensor[:, slot.index].zero_()

    def snapshot(self) -> PoolSnapshot:
        """The pool as it stands, for a scrape."""
        counts = self.slots.counts
        occupied = counts.locked * self.spec.native_bytes
        reserved = _bytes_of(self.state, *self.side.values())
        return PoolSnapshot("active", self.slots.capacity, tuple(counts), reserved, occupied, occupied)

    def _require_written(self, slot: ActiveSlot) -> None:
        if self.slots.state(slot) is not SlotState.LOCKED:
            raise HandleError(f"{slot!r} was allocated but never restored: restore it first, also for an empty sequence")


class CheckpointPool:
    """Compressed states: what ``codec`` makes of a state, and its side state as it is.

    Takes ``(slots + 1) * bytes_per_slot`` bytes on ``device``, all at construction; row 0 is padding. ``stored`` and ``side`` are
    views of that memory, which :meth:`relayout` replaces. ``fingerprint`` names spec and codec: bytes of pools with different
    fingerprints must not be mixed. ``layers`` counts the recurrent layers by the format that they are kept in; every format is
    there. A codec is given as a name, see :func:`get_codec`, or as an object.

    Raises:
        ValueError: if ``codec`` is unknown or does not fit ``spec``, or the device cannot hold the pool.
    """

    def __init__(
        self, spec: StateSpec, slots: int, *, codec: str | Codec = DEFAULT_CODEC, device: torch.device | str = "cpu"
    ) -> None:
        device = torch.device(device)
        self.spec = spec
        self.device = device
        self.slots = SlotAllocator("checkpoint", slots, CheckpointSlot)
        codec = _resolve(codec, spec, device)
        bytes_per_slot = self.bytes_per_slot_for(spec, codec)
        _require_memory("checkpoint", bytes_per_slot * (slots + 1), slots, bytes_per_slot, device)
        self._arena = Arena(bytes_per_slot * (slots + 1), MOST_TENSORS, device)
        self._lay_out(codec)

    def slots_in_place(self, codec: str | Codec) -> int:
        """The slots that :meth:`relayout` would give; 0 or less if the memory does not hold even one beside the padding row."""
        return self.slots_for(self.spec, codec, self._arena.num_bytes)

    def relayout(self, codec: str | Codec) -> None:
        """Hold what ``codec`` makes of states from here on, in the same memory: more slots, or fewer. Old handles stay refused.

        The memory is zeroed, in stream order.

        Raises:
            HandleError: if a slot is in use.
            ValueError: if ``codec`` is unknown or does not fit the spec, or the memory does not hold even one slot of it beside
                the padding row.
        """
        codec = _resolve(codec, self.spec, self.device)
        self.slots.resize(self.slots_in_place(codec))
        self._arena.wipe()
        self._lay_out(codec)

    def _lay_out(self, codec: Codec) -> None:
        self.codec = codec
        self.fingerprint = f"{self.spec.fingerprint}-{codec.name}"
        self.bytes_per_slot = self.bytes_per_slot_for(self.spec, codec)
        formats = Counter(plain.name for plain in codecs_by_layer(codec, self.spec.num_layers))
        self.layers: Mapping[str, int] = dict.fromkeys(CODEC_NAMES, 0) | formats
        stored, side = codec.allocate(self.spec, 0, self.device), side_tensors(self.spec, 0, self.device)
        tensors = self._arena.carve([*stored.values(), *side.values()], self.slots.capacity + 1)
        self.stored = dict(zip(stored, tensors, strict=False))
        self.side = dict(zip(side, tensors[len(stored) :], strict=True))

    @staticmethod
    def bytes_per_slot_for(spec: StateSpec, codec: str | Codec) -> int:
        """Bytes of one checkpoint: the codec's and the side state's."""
        codec = _resolve(codec, spec, torch.device("cpu"))
        return codec.bytes_per_slot(spec) + spec.side_bytes

    @classmethod
    def slots_for(cls, spec: StateSpec, codec: str | Codec, memory_bytes: int) -> int:
        """The most slots whose pool, padding row included, fits ``memory_bytes``; 0 or less if not even one does."""
        return memory_bytes // cls.bytes_per_slot_for(spec, codec) - 1

    def compress(self, source: ActivePool, source_slot: ActiveSlot, slot: CheckpointSlot) -> Report:
        """Write the state in ``source_slot`` to a reserved slot, in stream order."""
        energies = self.codec.compress(source.state, (source_slot.index,), self.stored, (slot.index,))
        for name, tensor in self.side.items():
            tensor[:, slot.index].copy_(source.side[name][:, source_slot.index])
        return Report(energies)

    def restore(self, slot: CheckpointSlot, target: ActivePool, target_slot: ActiveSlot) -> None:
        """Write the state stored in ``slot`` to ``target_slot``, in stream order."""
        self.codec.restore(self.stored, (slot.index,), target.state, (target_slot.index,))
        for name, tensor in self.side.items():
            target.side[name][:, target_slot.index].copy_(tensor[:, slot.index])

    def snapshot(self) -> PoolSnapshot:
        """The pool as it stands, for a scrape."""
        counts = self.slots.counts
        occupied = counts.evictable + counts.locked
        reserved = _bytes_of(*self.stored.values(), *self.side.values())
        native = occupied * self.spec.native_bytes
        return PoolSnapshot("checkpoint", sum(counts), tuple(counts), reserved, occupied * self.bytes_per_slot, native)


def _resolve(codec: str | Codec, spec: StateSpec, device: torch.device) -> Codec:
    return get_codec(codec, device, spec.num_layers) if isinstance(codec, str) else codec


def side_tensors(spec: StateSpec, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Zeroed side tensors ``[num_layers, rows, *shape]`` by name."""
    return {s.name: torch.zeros((spec.num_layers, rows, *s.shape), dtype=s.dtype, device=device) for s in spec.side}


def _state_shape(spec: StateSpec, rows: int) -> tuple[int, ...]:
    return (spec.num_layers, rows, spec.num_heads, spec.d_v, spec.d_k)


def _adopt_side(spec: StateSpec, rows: int, side: Mapping[str, Tensor]) -> dict[str, Tensor]:
    expected = [s.name for s in spec.side]
    if sorted(side) != sorted(expected):
        raise ValueError(f"expected the side tensors {expected} that the spec registers, got {sorted(side)}")
    return {s.name: _expect(s.name, side[s.name], (spec.num_layers, rows, *s.shape), s.dtype) for s in spec.side}


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    return tensor


def _bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _require_memory(pool: str, needed: int, slots: int, bytes_per_slot: int, device: torch.device) -> None:
    available = _available_bytes(device)
    if available is not None and needed > available:
        raise ValueError(
            f"a {pool} pool of {slots} slots at {bytes_per_slot:,} bytes each needs {needed:,} bytes with its padding row, "
            f"but {device} has {available:,} available: {max(0, available // bytes_per_slot - 1)} slots would fit"
        )


def _available_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else ()
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else kib * 1024

"""Every format in plain torch: the definition that the fused codecs are tested against, and the fallback where none runs."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec.call import Call, Field, check_state
from mamba_checkpoint_cache.state import StateSpec

MIN_AMAX = 1e-8
"""A channel whose largest magnitude is below this is scaled as if it were this: no scale is ever zero."""


class TableCodec(ABC):
    """What all formats share: compressed tensors laid out by ``fields``, and calls that are checked before anything is read.

    A fused codec overrides ``_compress`` and ``_restore``; what it must compute is given by ``_encode`` and ``_decode``.
    """

    name: str
    lossy: bool

    @abstractmethod
    def fields(self, num_heads: int, d_v: int, d_k: int, dtype: torch.dtype) -> dict[str, Field]:
        """The compressed tensors by name: the shape of one row of one layer, and the dtype."""

    def bytes_per_slot(self, spec: StateSpec) -> int:
        """Bytes that the compressed recurrent state of one slot takes, side state not counted."""
        return sum(tensor.nbytes for tensor in self.allocate(spec, 1, torch.device("meta")).values())

    def allocate(self, spec: StateSpec, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        """The compressed tensors ``[num_layers, num_rows, …]`` by name, zeroed."""
        fields = self.fields(spec.num_heads, spec.d_v, spec.d_k, spec.dtype)
        return {
            name: torch.zeros(spec.num_layers, num_rows, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in fields.items()
        }

    def compress(
        self, source: Tensor, source_rows: Sequence[int], stored: dict[str, Tensor], stored_rows: Sequence[int]
    ) -> Tensor:
        """Compress ``source[:, source_rows[i]]`` into ``stored[…][:, stored_rows[i]]``; returns the report.

        Raises:
            ValueError: if a shape, dtype, device or row does not fit, or a stored row is named twice.
        """
        return self._compress(self._checked(Call(source, source_rows, stored, stored_rows), written_rows=stored_rows))

    def restore(self, stored: dict[str, Tensor], stored_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]) -> None:
        """Decompress ``stored[…][:, stored_rows[i]]`` into ``target[:, target_rows[i]]``.

        Raises:
            ValueError: if a shape, dtype, device or row does not fit, or a target row is named twice.
        """
        self._restore(self._checked(Call(target, target_rows, stored, stored_rows), written_rows=target_rows))

    def _checked(self, call: Call, written_rows: Sequence[int]) -> Call:
        check_state(call.state)
        _, _, num_heads, d_v, d_k = call.state.shape
        call.check(self.fields(num_heads, d_v, d_k, call.state.dtype), written_rows)
        return call

    def _compress(self, call: Call) -> Tensor:
        report = empty_report(call)
        for i, (state_row, stored_row) in enumerate(zip(call.state_rows, call.stored_rows, strict=True)):
            for layer, state in enumerate(call.state[:, state_row]):
                report[i, layer] = self._encode(state, {name: tensor[layer, stored_row] for name, tensor in call.stored.items()})
        return report

    def _restore(self, call: Call) -> None:
        for state_row, stored_row in zip(call.state_rows, call.stored_rows, strict=True):
            for layer, state in enumerate(call.state[:, state_row]):
                state.copy_(self._decode({name: tensor[layer, stored_row] for name, tensor in call.stored.items()}, state))

    @abstractmethod
    def _encode(self, state: Tensor, row: dict[str, Tensor]) -> Tensor:
        """Store one layer's ``[num_heads, d_v, d_k]`` in ``row``; returns its report ``[num_heads, 3]``."""

    @abstractmethod
    def _decode(self, row: dict[str, Tensor], like: Tensor) -> Tensor:
        """What a restore gives back for one layer, ``[num_heads, d_v, d_k]``; shape and dtype are those of ``like``."""


class NoneCodec(TableCodec):
    """The native dtype, bit for bit, non-finite elements included: the control arm of every comparison."""

    name = "none"
    lossy = False

    def fields(self, num_heads: int, d_v: int, d_k: int, dtype: torch.dtype) -> dict[str, Field]:
        """``state``: the state as it is."""
        return {"state": ((num_heads, d_v, d_k), dtype)}

    def _restore(self, call: Call) -> None:
        copy_slots(call.stored["state"], call.stored_rows, call.state, call.state_rows)

    def _encode(self, state: Tensor, row: dict[str, Tensor]) -> Tensor:
        row["state"].copy_(state)
        return measure(state, state)

    def _decode(self, row: dict[str, Tensor], like: Tensor) -> Tensor:
        return row["state"]


class SymmetricCodec(TableCodec):
    """Symmetric integers with one scale per (layer, head, k-channel), taken over ``d_v``.

    ``scale`` is the channel's largest finite magnitude / ``levels``. An element ``x`` is stored as ``q = round(x / scale)``, half
    to even, within ±``levels``, and restored as ``q * scale`` in float32, cast to the state's dtype. NaN and infinities are
    stored as 0.
    """

    lossy = True
    levels: int
    q_dtype: torch.dtype

    @abstractmethod
    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the scales of a ``dtype`` state."""

    def largest_scale(self, dtype: torch.dtype) -> float:
        """The largest scale of a ``dtype`` state for which ``levels`` times the scale is still finite in ``dtype``."""
        return _largest_scale(dtype, self.scale_dtype(dtype), self.levels)

    def fields(self, num_heads: int, d_v: int, d_k: int, dtype: torch.dtype) -> dict[str, Field]:
        """``q``: ``[num_heads, d_v, d_k]``. ``scale``: ``[num_heads, 1, d_k]``."""
        return {"q": ((num_heads, d_v, d_k), self.q_dtype), "scale": ((num_heads, 1, d_k), self.scale_dtype(dtype))}

    def _encode(self, state: Tensor, row: dict[str, Tensor]) -> Tensor:
        values = torch.where(state.isfinite(), state, 0).float()
        amax = values.abs().amax(-2, keepdim=True).clamp(min=MIN_AMAX)
        # By a tensor: torch divides by a plain number through its reciprocal on some devices, which is one bit off.
        scale = (amax / torch.full_like(amax, self.levels)).to(self.scale_dtype(state.dtype))
        row["scale"].copy_(scale.clamp(max=self.largest_scale(state.dtype)))
        row["q"].copy_((values / row["scale"].float()).round().clamp(-self.levels, self.levels))
        return measure(state, self._decode(row, state))

    def _decode(self, row: dict[str, Tensor], like: Tensor) -> Tensor:
        return (row["q"].float() * row["scale"].float()).to(like.dtype)


class Int8Codec(SymmetricCodec):
    """The format of SGLang's int8 checkpoint pool, for float32 and bfloat16 states bit for bit."""

    name = "int8"
    levels = 127
    q_dtype = torch.int8

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """That of the state; but a float16 scale would underflow, and a channel of zeros give 0/0."""
        return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class Int16Codec(SymmetricCodec):
    """Near-lossless: the noise is 1/256 of int8's. For float32 states, as others take no more bytes uncompressed."""

    name = "int16"
    levels = 32767
    q_dtype = torch.int16

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float32: a coarser scale would cost more than 16 bits gain."""
        return torch.float32


@functools.cache
def _largest_scale(dtype: torch.dtype, scale_dtype: torch.dtype, levels: int) -> float:
    scale = torch.tensor(torch.finfo(dtype).max / levels, dtype=scale_dtype)
    overflows = bool((scale.float() * levels).to(dtype).isinf())
    return float(scale.nextafter(torch.zeros_like(scale)) if overflows else scale)


def copy_slots(source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]) -> None:
    """Copy ``source[:, source_rows[i]]`` to ``target[:, target_rows[i]]``."""
    for source_row, target_row in zip(source_rows, target_rows, strict=True):
        target[:, target_row].copy_(source[:, source_row])


def empty_report(call: Call, *parts: int) -> Tensor:
    """Room for the report of a call: ``[num_slots, num_layers, num_heads, *parts, 3]``, float64, on the state's device."""
    num_layers, _, num_heads, _, _ = call.state.shape
    return call.state.new_empty((call.num_slots, num_layers, num_heads, *parts, 3), dtype=torch.float64)


def measure(state: Tensor, restored: Tensor) -> Tensor:
    """The report ``[num_heads, 3]`` of heads ``[num_heads, d_v, d_k]`` that come back as ``restored``."""
    finite = state.isfinite()
    signal = torch.where(finite, state, 0).double()
    error = torch.where(restored.isfinite(), signal - restored.double(), 0)
    columns = (signal.square(), error.square(), (~finite).double())
    return torch.stack([column.sum((-2, -1)) for column in columns], -1)

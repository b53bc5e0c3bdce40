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

SCALE_DTYPES = {torch.float32: torch.float32, torch.float16: torch.float32, torch.bfloat16: torch.bfloat16}
"""The dtype of the scales by the dtype of the state. A float16 scale would underflow, and a channel of zeros give 0/0."""


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
                state.copy_(self._decode({name: tensor[layer, stored_row] for name, tensor in call.stored.items()}, state.dtype))

    @abstractmethod
    def _encode(self, state: Tensor, row: dict[str, Tensor]) -> Tensor:
        """Store one layer's ``[num_heads, d_v, d_k]`` in ``row``; returns its report ``[num_heads, 3]``."""

    @abstractmethod
    def _decode(self, row: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The state ``[num_heads, d_v, d_k]`` that a restore gives back for one layer."""


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

    def _decode(self, row: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return row["state"].to(dtype)


class Int8Codec(TableCodec):
    """Symmetric int8 with one scale per (layer, head, k-channel), taken over ``d_v``.

    ``scale`` is the channel's largest finite magnitude / 127. An element ``x`` is stored as ``q = round(x / scale)``, half to
    even, within ±127, and restored as ``q * scale`` in float32, cast to the state's dtype. NaN and infinities are stored as 0.
    """

    name = "int8"
    lossy = True

    def fields(self, num_heads: int, d_v: int, d_k: int, dtype: torch.dtype) -> dict[str, Field]:
        """``q``: int8 ``[num_heads, d_v, d_k]``. ``scale``: ``[num_heads, 1, d_k]``, bfloat16 or float32."""
        return {"q": ((num_heads, d_v, d_k), torch.int8), "scale": ((num_heads, 1, d_k), SCALE_DTYPES[dtype])}

    def _encode(self, state: Tensor, row: dict[str, Tensor]) -> Tensor:
        values = torch.where(state.isfinite(), state, 0).float()
        row["scale"].copy_(channel_scale(values.abs().amax(-2, keepdim=True), state.dtype))
        row["q"].copy_((values / row["scale"].float()).round().clamp(-127, 127))
        return measure(state, self._decode(row, state.dtype))

    def _decode(self, row: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (row["q"].float() * row["scale"].float()).to(dtype)


def channel_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales of channels of a ``dtype`` state whose largest magnitudes are ``amax`` (float32)."""
    # By a tensor: torch divides by a plain number through its reciprocal on some devices, which is one bit off.
    scale = amax.clamp(min=MIN_AMAX) / torch.full_like(amax, 127.0)
    return scale.to(SCALE_DTYPES[dtype]).clamp(max=largest_scale(dtype))


@functools.cache
def largest_scale(dtype: torch.dtype) -> float:
    """The largest scale of a ``dtype`` state for which 127 times the scale is still finite in ``dtype``."""
    scale = torch.tensor(torch.finfo(dtype).max / 127, dtype=SCALE_DTYPES[dtype])
    overflows = bool((scale.float() * 127).to(dtype).isinf())
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
    error = torch.where(finite, state.double() - restored.double(), 0)
    columns = (signal.square(), error.square(), (~finite).double())
    return torch.stack([column.sum((-2, -1)) for column in columns], -1)

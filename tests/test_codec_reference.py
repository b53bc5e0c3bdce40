"""The formats themselves: against a second statement of them in numpy, against literal bytes, and against the peer's formula."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from codec_contract import DTYPES, CodecContract, energies, fresh_numbers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mamba_checkpoint_cache.codec.reference import Int8Codec, NoneCodec
from mamba_checkpoint_cache.state import StateSpec

SCALES = {torch.float32: torch.float32, torch.float16: torch.float32, torch.bfloat16: torch.bfloat16}


class Int8Oracle:
    """``int8`` once more: one channel at a time, in numpy."""

    def allocate(self, spec: StateSpec, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        num_layers, num_heads, d_v, d_k = spec.shape
        return {
            "q": torch.zeros(num_layers, num_rows, num_heads, d_v, d_k, dtype=torch.int8),
            "scale": torch.zeros(num_layers, num_rows, num_heads, 1, d_k, dtype=SCALES[spec.dtype]),
        }

    def compress(
        self, source: Tensor, source_rows: Sequence[int], stored: dict[str, Tensor], stored_rows: Sequence[int]
    ) -> Tensor:
        num_layers, _, num_heads, _, d_k = source.shape
        reports = []
        for i, j in zip(source_rows, stored_rows, strict=True):
            for at in np.ndindex(num_layers, num_heads, d_k):
                layer, head, k = at
                q, scale = self.channel(source[layer, i, head, :, k])
                stored["q"][layer, j, head, :, k] = q
                stored["scale"][layer, j, head, 0, k] = scale
            restored = source.clone()
            self.restore(stored, [j], restored, [i])
            reports.append(energies(source[:, i], restored[:, i]))
        return torch.stack(reports) if reports else torch.zeros(0, num_layers, num_heads, 3, dtype=torch.float64)

    def restore(self, stored: dict[str, Tensor], stored_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]) -> None:
        for j, i in zip(stored_rows, target_rows, strict=True):
            product = stored["q"][:, j].float().numpy() * stored["scale"][:, j].float().numpy()
            target[:, i] = torch.from_numpy(product).to(target.dtype)

    @staticmethod
    def channel(x: Tensor) -> tuple[Tensor, Tensor]:
        values = np.nan_to_num(x.float().numpy(), nan=0.0, posinf=0.0, neginf=0.0)
        amax = max(np.abs(values).max(), np.float32(1e-8))
        scale = torch.from_numpy(np.asarray(amax / np.float32(127))).to(SCALES[x.dtype])
        while (scale.float() * 127).to(x.dtype).isinf():
            scale = torch.nextafter(scale, torch.zeros_like(scale))
        q = np.clip(np.rint(values / scale.float().numpy()), -127, 127)
        return torch.from_numpy(q).to(torch.int8), scale


class NoneOracle:
    """``none`` once more."""

    def allocate(self, spec: StateSpec, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        return {"state": torch.zeros(spec.num_layers, num_rows, *spec.shape[1:], dtype=spec.dtype)}

    def compress(
        self, source: Tensor, source_rows: Sequence[int], stored: dict[str, Tensor], stored_rows: Sequence[int]
    ) -> Tensor:
        stored["state"][:, list(stored_rows)] = source[:, list(source_rows)]
        return torch.stack([energies(source[:, i], source[:, i]) for i in source_rows])

    def restore(self, stored: dict[str, Tensor], stored_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]) -> None:
        target[:, list(target_rows)] = stored["state"][:, list(stored_rows)]


class TestInt8(CodecContract):
    codec, reference = Int8Codec(), Int8Oracle()
    sizes = ((7, 5), (1, 9), (130, 1))


class TestNone(CodecContract):
    codec, reference = NoneCodec(), NoneOracle()
    sizes = ((7, 5), (1, 9), (130, 1))


def peer_store(state: Tensor) -> tuple[Tensor, Tensor]:
    """The peer's formula, written as it is described: q and scale of states ``[..., d_v, d_k]``."""
    largest = torch.amax(torch.abs(state.to(torch.float32)), dim=-2, keepdim=True)
    scale = torch.div(torch.clamp_min(largest, 1e-8), torch.tensor([127.0])).to(state.dtype)
    return torch.clamp(torch.round(state.to(torch.float32) / scale.to(torch.float32)), -127, 127).to(torch.int8), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peers_bytes(dtype: torch.dtype) -> None:
    """For float32 and bfloat16 states the bytes are the peer's, zero channels included."""
    spec = StateSpec(2, 3, 50, 40, dtype)
    states = torch.randn(2, 1, 3, 50, 40, generator=fresh_numbers()).to(dtype)
    states[..., 3] = 0
    states[..., 4] *= 1e-9
    stored = Int8Codec().allocate(spec, 1, torch.device("cpu"))

    Int8Codec().compress(states, [0], stored, [0])

    q, scale = peer_store(states)
    assert torch.equal(stored["q"], q)
    assert torch.equal(stored["scale"], scale)


@pytest.mark.parametrize(
    ("dtype", "one", "two"),
    [(torch.float32, "0000803f", "00000040"), (torch.float16, "0000803f", "00000040"), (torch.bfloat16, "803f", "0040")],
)
def test_literal_bytes(dtype: torch.dtype, one: str, two: str) -> None:
    """A state small enough to compress by hand: halves go to the even neighbour."""
    state = torch.tensor([[127, 254], [-63.5, 3], [0.5, -5]], dtype=dtype).view(1, 1, 1, 3, 2)
    stored = Int8Codec().allocate(StateSpec(1, 1, 3, 2, dtype), 1, torch.device("cpu"))

    report = Int8Codec().compress(state, [0], stored, [0])
    Int8Codec().restore(stored, [0], state, [0])

    assert stored["q"].numpy().tobytes().hex() == "7f7f" + "c002" + "00fe"
    assert stored["scale"].view(torch.uint8).numpy().tobytes().hex() == one + two
    assert state.flatten().tolist() == [127, 254, -64, 4, 0, -4]
    assert report.tolist() == [[[[127**2 + 254**2 + 63.5**2 + 3**2 + 0.5**2 + 5**2, 0.25 + 1 + 0.25 + 1, 0]]]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_value_survives(dtype: torch.dtype) -> None:
    """A channel that reaches the dtype's largest value restores to finite values, where the plain formula overflows."""
    limit = torch.finfo(dtype).max
    state = torch.tensor([limit, -limit, limit / 2], dtype=dtype).view(1, 1, 1, 3, 1)
    stored = Int8Codec().allocate(StateSpec(1, 1, 3, 1, dtype), 1, torch.device("cpu"))

    report = Int8Codec().compress(state.clone(), [0], stored, [0])
    Int8Codec().restore(stored, [0], state, [0])

    assert state[0, 0, 0, :2, 0].double().tolist() == pytest.approx([limit, -limit], rel=4e-3)
    assert bool(report.isfinite().all())
    assert float(stored["scale"]) <= Int8Codec().largest_scale(dtype)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    values=st.lists(FINITE | st.sampled_from([0.0, 1e-40, 3e38, -3e38, 1e-8]), min_size=12, max_size=12),
    dtype=st.sampled_from(DTYPES),
)
def test_the_reported_error_is_the_error(values: list[float], dtype: torch.dtype) -> None:
    """The relative error out of a report equals the one computed from the restored state in exact arithmetic."""
    limit = torch.finfo(dtype).max
    state = torch.tensor(values, dtype=torch.float64).clamp(-limit, limit).to(dtype).view(1, 1, 1, 4, 3)
    stored = Int8Codec().allocate(StateSpec(1, 1, 4, 3, dtype), 1, torch.device("cpu"))
    before = state.flatten().tolist()

    signal, error, non_finite = Int8Codec().compress(state, [0], stored, [0]).flatten().tolist()
    Int8Codec().restore(stored, [0], state, [0])

    after = state.flatten().tolist()
    assert signal == pytest.approx(math.fsum(x * x for x in before), rel=1e-12)
    assert error == pytest.approx(math.fsum((x - y) ** 2 for x, y in zip(before, after, strict=True)), rel=1e-12)
    assert non_finite == 0
    assert error <= signal * (0.5 / 127) ** 2 * 12 * 1.1 or signal < 12 * 1e-16

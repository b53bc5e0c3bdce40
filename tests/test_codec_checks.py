"""Which codec a name gets, and what every codec refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mamba_checkpoint_cache.codec import CODEC_NAMES, get_codec
from mamba_checkpoint_cache.codec.cpu import CpuInt8Codec, CpuNoneCodec
from mamba_checkpoint_cache.codec.reference import Int8Codec, NoneCodec
from mamba_checkpoint_cache.state import SideSpec, StateSpec

CPU = torch.device("cpu")
SPEC = StateSpec(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("name", "device", "kind"),
    [("none", "cpu", CpuNoneCodec), ("int8", "cpu", CpuInt8Codec), ("none", "mps", NoneCodec), ("int8", "xpu", Int8Codec)],
)
def test_a_name_and_a_device_choose(name: str, device: str, kind: type) -> None:
    """The fused codec where there is one, plain torch elsewhere, always under the format's own name."""
    codec = get_codec(name, torch.device(device))

    assert type(codec) is kind
    assert codec.name == name
    assert codec.lossy == (name != "none")


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_gpu_gets_triton(name: str) -> None:
    """On a GPU every name is fused in Triton."""
    pytest.importorskip("triton")

    assert type(get_codec(name, torch.device("cuda"))).__module__ == "mamba_checkpoint_cache.codec.gpu"


def test_an_unknown_name() -> None:
    """An unknown name is refused with those that exist."""
    with pytest.raises(ValueError, match=r"unknown codec 'int3', expected one of none, int16, int8, int8-pivot"):
        get_codec("int3", CPU)


@pytest.mark.parametrize(
    ("shape", "dtype", "kibibytes"),
    [
        ((36, 32, 128, 128), torch.float32, 36 * 32 * (16 + 0.5)),
        ((36, 32, 128, 128), torch.bfloat16, 36 * 32 * (16 + 0.25)),
        ((40, 128, 64, 128), torch.float16, 40 * 128 * (8 + 0.5)),
        ((28, 64, 128, 16), torch.float32, 28 * 64 * (2 + 0.0625)),
    ],
)
def test_bytes_per_slot(shape: tuple[int, int, int, int], dtype: torch.dtype, kibibytes: float) -> None:
    """An int8 slot takes a byte per element and a scale per channel; side state is not the codec's."""
    spec = StateSpec(*shape, dtype, side=(SideSpec("conv", (64, 3)),))

    assert get_codec("int8", CPU).bytes_per_slot(spec) == kibibytes * 1024
    assert get_codec("none", CPU).bytes_per_slot(spec) == spec.state_bytes


def arguments(**changes: Any) -> tuple[Tensor, list[int], dict[str, Tensor], list[int]]:
    """Arguments that fit, but for ``changes``."""
    given: dict[str, Any] = {
        "state": torch.zeros(2, 6, 3, 4, 5),
        "state_rows": [1],
        "q": torch.zeros(2, 7, 3, 4, 5, dtype=torch.int8),
        "scale": torch.zeros(2, 7, 3, 1, 5),
        "stored_rows": [2],
    }
    given |= changes
    stored = {name: given[name] for name in ("q", "scale", "extra") if given.get(name) is not None}
    return given["state"], given["state_rows"], stored, given["stored_rows"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": torch.zeros(2, 3, 4, 5)}, r"expected a state \[num_layers, rows, num_heads, d_v, d_k\].*, got \[2, 3, 4, 5\]"),
        ({"state": torch.zeros(2, 6, 3, 0, 5)}, r"no empty axis, got \[2, 6, 3, 0, 5\]"),
        ({"state": torch.zeros(2, 6, 3, 4, 5, dtype=torch.float64)}, r"expected a state dtype out of .*, got torch.float64"),
        ({"state": torch.zeros(2, 6, 3, 4, 5).bfloat16()}, r"'scale': expected contiguous torch.bfloat16 .* got torch.float32"),
        (
            {"state": torch.zeros(2, 6, 3, 4, 6)},
            r"'q': expected .* \[2, rows, 3, 4, 6\] on cpu, got torch.int8 \[2, 7, 3, 4, 5\]",
        ),
        ({"q": torch.zeros(1, 7, 3, 4, 5, dtype=torch.int8)}, r"'q': expected .*\[2, rows, 3, 4, 5\].*, got .*\[1, 7, 3, 4, 5\]"),
        ({"q": torch.zeros(2, 7, 3, 5, 4, dtype=torch.int8).mT}, r"'q': expected contiguous .* strides \(420, 60, 20, 1, 4\)"),
        ({"q": torch.zeros(2, 7, 3, 4, 5, dtype=torch.uint8)}, r"'q': expected contiguous torch.int8 .*, got torch.uint8"),
        (
            {"scale": torch.zeros(2, 7, 3, 5)},
            r"'scale': expected .*\[2, rows, 3, 1, 5\] on cpu, got torch.float32 \[2, 7, 3, 5\]",
        ),
        ({"q": torch.zeros(2, 7, 3, 4, 5, dtype=torch.int8, device="meta")}, r"'q': expected .* on cpu, got .* on meta"),
        ({"scale": None}, r"expected compressed tensors named \['q', 'scale'\], got \['q'\]"),
        ({"extra": torch.zeros(1)}, r"expected compressed tensors named .*, got \['extra', 'q', 'scale'\]"),
        ({"state_rows": [1, 2]}, r"expected as many state as stored rows, got 2 and 1"),
        ({"state_rows": [6]}, r"expected state rows in 0..5, got \[6\]"),
        ({"state_rows": [-1]}, r"expected state rows in 0..5, got \[-1\]"),
        ({"stored_rows": [7]}, r"expected stored rows in 0..6, got \[7\]"),
        ({"scale": torch.zeros(2, 2, 3, 1, 5)}, r"expected stored rows in 0..1, got \[2\]"),
    ],
)
@pytest.mark.parametrize("codec", [CpuInt8Codec(), Int8Codec()], ids=["cpu", "reference"])
def test_misuse_is_refused(codec: Int8Codec, changes: dict[str, Any], message: str) -> None:
    """What does not fit raises ValueError in both directions, with what was expected and what was given."""
    state, state_rows, stored, stored_rows = arguments(**changes)

    with pytest.raises(ValueError, match=message):
        codec.compress(state, state_rows, stored, stored_rows)
    with pytest.raises(ValueError, match=message):
        codec.restore(stored, stored_rows, state, state_rows)


@pytest.mark.parametrize("codec", [CpuInt8Codec(), Int8Codec()], ids=["cpu", "reference"])
def test_a_row_written_twice_is_refused(codec: Int8Codec) -> None:
    """Two slots must not be written to one row; to read one row twice is fine."""
    state, _, stored, _ = arguments()

    with pytest.raises(ValueError, match=r"expected distinct rows to write to, got \[2, 2\]"):
        codec.compress(state, [0, 1], stored, [2, 2])
    with pytest.raises(ValueError, match=r"expected distinct rows to write to, got \[3, 3\]"):
        codec.restore(stored, [0, 1], state, [3, 3])
    codec.compress(state, [1, 1], stored, [2, 3])
    codec.restore(stored, [1, 1], state, [2, 3])

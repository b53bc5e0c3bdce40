"""The pivot formats, against their formula once more in float64 with matrices written out, and at the edges."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from codec_contract import DTYPES, fresh_numbers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mamba_checkpoint_cache.codec.pivot import (
    COARSE,
    FINE,
    SCALE,
    Int5PivotCodec,
    Int8PivotCodec,
    Minifloat,
    pack,
    precision_of,
    unpack,
)
from mamba_checkpoint_cache.state import StateSpec

CODECS = (Int8PivotCodec(), Int5PivotCodec())
SIZES = ((64, 64), (80, 63), (1, 1), (63, 16), (128, 2), (6, 5))
CPU = torch.device("cpu")


def round_trip(codec: Any, head: Tensor) -> tuple[dict[str, np.ndarray], Tensor, list[float]]:
    """What is stored of one head ``[d_v, d_k]``, what is restored, and the report."""
    state = head.clone()[None, None, None]
    stored = codec.allocate(StateSpec(1, 1, *head.shape, head.dtype), 1, CPU)
    report = codec.compress(state, (0,), stored, (0,)).flatten().tolist()
    codec.restore(stored, (0,), state, (0,))
    return {name: tensor[0, 0, 0].numpy() for name, tensor in stored.items()}, state[0, 0, 0], report


def some_head(d_v: int, d_k: int, dtype: torch.dtype) -> Tensor:
    """One large outer product, noise, and channels of different sizes."""
    numbers = fresh_numbers()
    u, g = torch.randn(d_v, 1, generator=numbers), torch.randn(1, d_k, generator=numbers)
    noise = torch.randn(d_v, d_k, generator=numbers) * 10 ** -(2 * torch.rand(1, d_k, generator=numbers))
    return (u * g + 0.3 * noise).to(dtype)


def rotation(d_v: int) -> np.ndarray:
    """``H D``: the Hadamard matrix after Sylvester on each block of at most 16 rows, and a sign for each row."""
    block = math.gcd(d_v, 16)
    hadamard = np.ones((1, 1))
    while len(hadamard) < block:
        hadamard = np.kron(np.array([[1, 1], [1, -1]]), hadamard)
    sign = []
    for row in range(1, d_v + 1):
        mixed = row * 0x9E3779B1 % 2**32
        mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B % 2**32
        sign.append(-1 if mixed >= 2**31 else 1)
    return np.kron(np.eye(d_v // block), hadamard) * np.array(sign)


def numbers_in(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """Unsigned numbers of ``width`` bits, the first in the lowest bits of the first byte."""
    bits = np.unpackbits(packed, bitorder="little")[: count * width].reshape(count, width)
    return bits @ (1 << np.arange(width))


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, top: int) -> float:
    """The number behind a code that is not 0."""
    exponent, mantissa = divmod(code, 2**mantissa_bits)
    return (1 + mantissa / 2**mantissa_bits) * 2.0 ** (top - (2**exponent_bits - 1) + exponent)


class Decoded:
    """The parts of a stored head, each read by its description."""

    def __init__(self, stored: dict[str, np.ndarray], d_v: int, d_k: int, dtype: torch.dtype) -> None:
        coarse = dtype == torch.bfloat16
        pivot_bits, exponent_bits, mantissa_bits = (2, 3, 0) if coarse else (4, 4, 3)
        self.power = 2.0 ** (int(stored["exponent"]) - 127)
        self.n = 2 ** (pivot_bits - 1)
        self.u = 2.0 * (numbers_in(stored["pivot"], pivot_bits, d_v) - self.n) + 1
        gain_bits = 1 + exponent_bits + mantissa_bits
        codes = numbers_in(stored["gain"], gain_bits, d_k)
        sizes = [minifloat(code, exponent_bits, mantissa_bits, 1) if code else 0.0 for code in codes % 2 ** (gain_bits - 1)]
        self.gain = np.array(sizes) * np.where(codes >> (gain_bits - 1), -1, 1) / (2 * self.n)
        self.scale = np.array([minifloat(code, 5, 3, 0) for code in stored["scale"].tolist()])
        if "q" in stored:
            self.q = stored["q"].astype(float)
        else:
            low, high = (
                np.stack([numbers_in(column, bits, d_v) for column in np.ascontiguousarray(stored[name].T)], 1)
                for name, bits in (("low", 4), ("high", 1))
            )
            self.q = low + 16.0 * high - 16

    def restored(self) -> np.ndarray:
        """``D H (q s + g u) 2^e``, not clamped."""
        return rotation(len(self.u)).T @ (self.q * self.scale + np.outer(self.u, self.gain)) * self.power


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_stored_as_the_formula_says(codec: Any, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Exponent, pivot, gains, scales and q of a head are those of the formula in float64, up to the rounding of float32."""
    head = some_head(*size, dtype)
    d_v, _ = size

    stored, restored, report = round_trip(codec, head)
    found = Decoded(stored, *size, dtype)

    rotated = rotation(d_v) @ head.double().numpy() / math.gcd(d_v, 16) / found.power
    largest = np.abs(rotated).max(0)
    assert 1 <= largest.max() < 2
    pivot = rotated[:, largest.argmax()]
    exact_u = found.n * pivot / np.abs(pivot).max()
    assert np.abs(found.u - 2 * exact_u).max() <= 1 + 1e-4
    exact_gain = rotated.T @ found.u / (found.u @ found.u)
    relative = 1 / 16 if dtype != torch.bfloat16 else 1 / 3
    smallest = minifloat(1, 4, 3, 1) if dtype != torch.bfloat16 else minifloat(1, 3, 0, 1)
    assert (np.abs(found.gain - exact_gain) <= relative * np.abs(exact_gain) + smallest / (2 * found.n)).all()
    rest = rotated - np.outer(found.u, found.gain)
    needed = np.abs(rest).max(0) / codec.levels
    assert (found.scale >= needed * (1 - 1e-5)).all()
    assert (found.scale <= needed * 1.1251 + minifloat(0, 5, 3, 0)).all()
    assert np.abs(found.q - rest / found.scale).max() <= 0.5 + 1e-3
    assert np.abs(found.q).max() <= codec.levels
    cast = torch.finfo(dtype).eps * np.abs(head.double().numpy()).max()
    assert np.abs(restored.double().numpy() - found.restored()).max() <= 2 * cast
    error = (head.double() - restored.double()).square().sum().item()
    assert report == pytest.approx([head.double().square().sum().item(), error, 0], rel=1e-9)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_one_outer_product_leaves_next_to_nothing(codec: Any) -> None:
    """What the format is made for: a head of one outer product comes back with a fraction of the error of a head of noise."""
    numbers = fresh_numbers()
    product = torch.randn(64, 1, generator=numbers) * torch.randn(1, 32, generator=numbers)
    noise = torch.randn(64, 32, generator=numbers)

    (_, _, one), (_, _, other) = round_trip(codec, product), round_trip(codec, noise)

    assert one[1] / one[0] < 0.1 * other[1] / other[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_zeros_stay_zeros(codec: Any, dtype: torch.dtype) -> None:
    """A head of zeros, and a channel of zeros among others, restore to exactly that."""
    head = some_head(48, 20, dtype)
    head[:, 7] = 0

    assert not round_trip(codec, torch.zeros(48, 20, dtype=dtype))[1].any()
    assert round_trip(codec, torch.zeros(48, 20, dtype=dtype))[2] == [0, 0, 0]
    stored, restored, _ = round_trip(codec, head)
    assert not restored[:, 7].any()
    assert numbers_in(stored["gain"], precision_of(dtype).gain_bits, 20)[7] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_gain_of_zero_has_no_sign(codec: Any, dtype: torch.dtype) -> None:
    """A channel that the pivot predicts next to nothing of is stored alike whichever way it leans: that is rounding."""
    column = some_head(48, 1, dtype)

    stored, _, _ = round_trip(codec, torch.cat([column * 2**12, -column * 2**11, column / 2**10, -column / 2**10], 1))

    bits = precision_of(dtype).gain_bits
    gains = numbers_in(stored["gain"], bits, 4)
    assert [int(gain) >> bits - 1 for gain in gains] == [0, 1, 0, 0]
    assert not gains[2:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_the_largest_numbers_stay_finite(codec: Any, dtype: torch.dtype) -> None:
    """A head that is full of a dtype's largest number restores to finite numbers of about that size."""
    limit = torch.finfo(dtype).max
    head = torch.full((32, 17), limit, dtype=dtype) * torch.where(torch.rand(32, 17, generator=fresh_numbers()) < 0.5, -1, 1)

    _, restored, report = round_trip(codec, head)

    assert bool(restored.isfinite().all())
    assert report[1] < 0.1 * report[0] < math.inf


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_an_outlier_spoils_its_channel_alone(codec: Any) -> None:
    """Next to one huge element the other channels keep their accuracy."""
    head = some_head(64, 24, torch.float32)
    head[11, 5] = 300 * head.abs().max()

    _, restored, _ = round_trip(codec, head)

    others = torch.arange(24) != 5
    error, signal = ((x[:, others].double().square().sum().item()) for x in (head - restored, head))
    assert error < (1.5 / codec.levels) ** 2 * signal
    assert restored[11, 5] == pytest.approx(float(head[11, 5]), rel=0.01)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_denormals_are_harmless(codec: Any) -> None:
    """Elements too small for a scale come back as zeros or better, and spoil nothing else."""
    head = torch.full((32, 8), 3e-42)
    _, restored, report = round_trip(codec, head)

    assert bool(restored.isfinite().all())
    assert report[1] <= report[0]
    head[:, 1:] = some_head(32, 7, torch.float32)
    _, restored, report = round_trip(codec, head)
    assert report[1] < 0.01 * report[0]
    assert restored[:, 0].abs().max() < 1e-6


def unrotated(rotated: np.ndarray) -> Tensor:
    """The float32 head that rotates to ``rotated``, of so odd a size that there are only signs to undo."""
    return torch.from_numpy((rotation(len(rotated)).T @ rotated).astype(np.float32))


LITERAL = {  # u = (15, 1, -7) and g = (1.625, 1.125) / 16 leave rests of (-24, -104, -40) and (-24, 120, -72) / 2^10
    "int8-pivot": {  # s = (1.75, 2) / 2^11, q = (-27, -119, -46), (-24, 120, -72)
        "exponent": "7f",
        "pivot": "8f04",
        "gain": "7571",
        "scale": "a6a8",
        "q": "e5e8" + "8978" + "d2b8",
    },
    "int5-pivot": {  # s = (1.75, 2) / 2^8, q + 16 = (13, 1, 10), (13, 31, 7)
        "exponent": "7f",
        "pivot": "8f04",
        "gain": "7571",
        "scale": "bec0",
        "low": "1dfd" + "0a07",
        "high": "0002",
    },
}


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_literal_bytes(codec: Any) -> None:
    """A head small enough to compress by hand."""
    stored, _, _ = round_trip(codec, unrotated(np.array([[1.5, 1.03125], [0, 0.1875], [-0.75, -0.5625]])))

    assert {name: field.tobytes().hex() for name, field in stored.items()} == LITERAL[codec.name]


def fixed_numbers(*shape: int) -> np.ndarray:
    """Numbers in [-1, 1), the same on every machine and in every version of every library (SplitMix64)."""
    mixed = (np.arange(math.prod(shape), dtype=np.uint64) + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return (mixed >> 40).astype(np.float64).reshape(shape) / 2**23 - 1


GOLDEN = {
    ("int8-pivot", torch.float32): "75938f411f3923ce",
    ("int8-pivot", torch.bfloat16): "dcdea22c5092ab9c",
    ("int8-pivot", torch.float16): "812506d88ae42673",
    ("int5-pivot", torch.float32): "6297b7ca4021acd4",
    ("int5-pivot", torch.bfloat16): "617e929da67120e6",
    ("int5-pivot", torch.float16): "eeb348b23453b8d9",
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_no_byte_has_changed(codec: Any, dtype: torch.dtype) -> None:
    """Ordinary, large, small and well predicted heads are stored as ever: what changes a byte is another format."""
    u, g, noise = fixed_numbers(4, 512, 1), fixed_numbers(4, 1, 252), fixed_numbers(4, 512, 252)
    size = np.array([1, torch.finfo(dtype).max / 2, torch.finfo(dtype).smallest_normal * 4, 1])[:, None, None]
    heads = (u * g + noise / 4) * size * 2.0 ** -(np.arange(252) % 18)
    odd, fraction = 2 * np.floor(8 * u[3]) + 1, (8 + np.arange(252) % 8) / 16
    heads[3] = rotation(512).T @ (odd * fraction + noise[3] * 2.0**-20)
    state = torch.from_numpy(heads).to(dtype)[None, None]
    stored = codec.allocate(StateSpec(1, *state.shape[2:], dtype), 1, CPU)

    codec.compress(state, (0,), stored, (0,))
    codec.restore(stored, (0,), state, (0,))

    digest = hashlib.sha256()
    for tensor in (*(stored[name] for name in sorted(stored)), state):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[codec.name, dtype]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_the_first_of_equal_channels_is_the_pivot(codec: Any) -> None:
    """Of two channels that reach equally far the first is the pivot, the other its negative."""
    column = some_head(48, 1, torch.float32)

    stored, _, _ = round_trip(codec, torch.cat([column / 2, column, -column], 1))

    assert (np.sign(Decoded(stored, 48, 3, torch.float32).gain) == [1, 1, -1]).all()


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(0, 1), (3e-42, 1), (2.0**-126, 1), (2.0**-125, 2), (1, 127), (2 - 2.0**-23, 127), (2, 128), (2.0**127, 253), (3.4e38, 253)],
)
def test_the_exponent(largest: float, exponent: int) -> None:
    """It is that of the largest magnitude, as far as the power of two and its inverse are normal numbers."""
    stored, _, _ = round_trip(Int8PivotCodec(), unrotated(np.full((3, 2), largest)))

    assert int(stored["exponent"]) == exponent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_what_is_not_finite_counts_as_zero(codec: Any, dtype: torch.dtype) -> None:
    """NaN and infinities are stored and restored as zeros would be, and counted."""
    spoiled = some_head(48, 20, dtype)
    spoiled[3, 4], spoiled[5, 4], spoiled[7, 9] = math.nan, math.inf, -math.inf
    clean = torch.where(spoiled.isfinite(), spoiled, 0)

    (stored, restored, report), (expected, same, (signal, error, _)) = round_trip(codec, spoiled), round_trip(codec, clean)

    assert all((stored[name] == expected[name]).all() for name in expected)
    assert torch.equal(restored, same)
    assert report[0] == signal
    assert report[1] == error
    assert report[2] == 3


def test_gains_are_summed_row_by_row() -> None:
    """Where the order in which products are summed decides between two gains, it is that of the rows, in float32."""
    rows, channels = 31, 400
    rotated = fixed_numbers(rows, channels) / 4
    rotated[:, 0] = 1.5 * fixed_numbers(rows) / np.abs(fixed_numbers(rows)).max()
    u = Decoded(round_trip(Int8PivotCodec(), unrotated(rotated[:, :1]))[0], rows, 1, torch.float32).u
    gain = rotated.T @ u / (u @ u) * 16
    halfway = np.exp2(np.floor(np.log2(np.abs(gain)))) * (1 + (2 * (np.arange(channels) % 8) + 1) / 16)
    rotated[:, 1:] *= (halfway / np.abs(gain))[1:]
    rotated = rotated.astype(np.float32)

    stored, _, _ = round_trip(Int8PivotCodec(), unrotated(rotated))

    total = np.zeros(channels, np.float32)
    for row in range(rows):
        total = total + rotated[row] * np.float32(u[row])
    gain = np.abs(total / np.float32(u @ u)) * np.float32(16)
    up = gain >= halfway.astype(np.float32)
    exponent = np.floor(np.log2(np.abs(halfway)))
    lower = 8 * (exponent + 14) + np.arange(channels) % 8
    assert 100 < up[1:].sum() < 300
    assert (stored["gain"] % 128 == lower + up)[1:].all()


@pytest.mark.parametrize(("codec", "levels"), [(Int8PivotCodec(), 127), (Int5PivotCodec(), 15)], ids=["int8", "int5"])
def test_halves_of_a_step(codec: Any, levels: int) -> None:
    """A rest of exactly ``levels`` steps has that step as its scale, and what lies halfway is rounded as the formula says."""
    step = np.arange(8, 16) / 2**11
    halves = (np.arange(levels) + 0.5)[:, None] * step
    rest = np.concatenate([levels * step[None], -levels * step[None], halves, -halves, 0 * step[None]])
    rotated = np.concatenate([np.full((len(rest), 1), 1.5), rest], 1)

    stored, _, _ = round_trip(codec, unrotated(rotated))

    found = Decoded(stored, *rotated.shape, torch.float32)
    assert (found.gain[1:] == 0).all()
    assert (found.scale[1:] == step).all()
    inverse = np.float32(1) / step.astype(np.float32)
    assert (found.q[:, 1:] == np.rint(rest.astype(np.float32) * inverse)).all()


def test_names() -> None:
    """What the formats are called, and that they lose something."""
    assert [(codec.name, codec.lossy) for codec in CODECS] == [("int8-pivot", True), ("int5-pivot", True)]


def test_bytes_at_the_usual_size() -> None:
    """The default takes no more than the peer's format: 8.25 bits an element for float32 states, 8.125 for bfloat16."""
    for dtype, limit in ((torch.float32, 8.25), (torch.float16, 8.25), (torch.bfloat16, 8.125)):
        assert 8 * Int8PivotCodec().bytes_per_slot(StateSpec(1, 1, 128, 128, dtype)) / 128**2 <= limit


@given(st.floats(2.0**-28, 1.75, width=32), st.sampled_from([SCALE, *(precision_of(dtype).gain for dtype in DTYPES)]))
def test_minifloats(value: float, kind: Minifloat) -> None:
    """Rounded up, a code is the least that is not below the value; to the nearest, none but 0 is nearer."""
    exact = torch.tensor([value], dtype=torch.float32)
    codes = torch.arange(kind.largest + 1, dtype=torch.int32)
    numbers = kind.decode(codes)

    up, nearest = (int(kind.encode(exact, up=up)) for up in (True, False))

    assert bool((numbers[1:] > numbers[:-1]).all())
    assert up == 0 or float(numbers[up - 1]) < value <= float(numbers[up])
    assert kind.zero or value <= float(numbers[up])
    distance = (numbers - value).abs()
    assert nearest == 0 or float(distance[nearest]) <= float(distance[1:].min())


@pytest.mark.parametrize(
    ("kind", "least", "second", "most"),
    [(SCALE, 2.0**-31, 1.125 * 2.0**-31, 1.875), (FINE.gain, 0, 1.125 * 2.0**-14, 3.75), (COARSE.gain, 0, 2.0**-5, 2)],
)
def test_where_minifloats_end(kind: Minifloat, least: float, second: float, most: float) -> None:
    """The least and the largest numbers; what is beyond goes to them, what is halfway goes up, and each number to itself."""
    codes = torch.arange(kind.largest + 1, dtype=torch.int32)
    numbers = kind.decode(codes)

    assert [float(numbers[i]) for i in (0, 1, -1)] == [least, second, most]
    for up in (True, False):
        assert torch.equal(kind.encode(numbers, up=up), codes)
        assert kind.encode(torch.tensor([0.0, 9.0]), up=up).tolist() == [0, kind.largest]
    above = numbers[1:-1].nextafter(torch.tensor(9.0))
    assert torch.equal(kind.encode(above, up=True), codes[2:])
    assert torch.equal(kind.encode(above, up=False), codes[1:-1])
    assert torch.equal(kind.encode((numbers[1:-1] + numbers[2:]) / 2, up=False), codes[2:])


@given(st.lists(st.integers(0, 255), max_size=20), st.sampled_from([1, 2, 4, 8]))
def test_packing(values: list[int], bits: int) -> None:
    """Codes come back, and lie where a reader of bits looks for them."""
    codes = torch.tensor(values, dtype=torch.int32) % (1 << bits)

    packed = pack(codes, bits)

    assert torch.equal(unpack(packed, bits, len(values)), codes)
    packed_bytes = packed.numpy().astype(np.uint8)
    assert numbers_in(packed_bytes, bits, len(values)).tolist() == codes.tolist()
    assert not np.unpackbits(packed_bytes, bitorder="little")[len(values) * bits :].any()

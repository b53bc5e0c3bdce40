"""What every codec must do on every device: one class of tests, inherited by each implementation, and the inputs they share."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mamba_checkpoint_cache.state import StateSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("rows", "columns", "strided")
SIZES = ((128, 128), (63, 100), (1, 1), (80, 63), (256, 16), (128, 16), (128, 2), (1, 80), (100, 1), (17, 256), (600, 24))
SPECIALS = ("ordinary", "zero", "outlier", "denormal", "tiny", "largest", "ties", "constant")
ROWS = 5
CANARY = 0x5A
CPU = torch.device("cpu")


def fresh_numbers() -> torch.Generator:
    """Other numbers in every run; pytest shows the seed of a test that fails."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")  # noqa: T201
    return torch.Generator().manual_seed(seed)


def hard_states(spec: StateSpec, generator: torch.Generator) -> Tensor:
    """``[num_layers, ROWS, num_heads, d_v, d_k]``: channels of very different sizes, among them every special kind there is."""
    shape = (spec.num_layers, ROWS, spec.num_heads, spec.d_v, spec.d_k)
    states = torch.randn(shape, generator=generator, dtype=torch.float64)
    states *= 10 ** (torch.rand(*shape[:3], 1, spec.d_k, generator=generator, dtype=torch.float64) * 6 - 3)
    kinds = torch.randint(len(SPECIALS), (*shape[:3], spec.d_k), generator=generator)
    limits = torch.finfo(spec.dtype)
    for kind, channel in {
        "zero": torch.zeros(spec.d_v),
        "outlier": torch.randn(spec.d_v, generator=generator).index_fill(0, torch.tensor([spec.d_v // 2]), limits.max / 7),
        "denormal": torch.randint(-9, 9, (spec.d_v,), generator=generator) * limits.smallest_normal / 16,
        "tiny": torch.randn(spec.d_v, generator=generator) * 3e-9,
        "largest": (torch.rand(spec.d_v, generator=generator) * 2 - 1).index_fill(0, torch.tensor([0]), 1.0) * limits.max,
        "ties": torch.randint(-254, 255, (spec.d_v,), generator=generator).index_fill(0, torch.tensor([0]), 254) / 2,
        "constant": torch.full((spec.d_v,), -0.7),
    }.items():
        states = torch.where((kinds == SPECIALS.index(kind))[..., None, :], channel.double()[:, None], states)
    return states.clamp(limits.min, limits.max).to(spec.dtype)


def lay_out(states: Tensor, layout: str, device: torch.device) -> Tensor:
    """The same states as they may lie in an engine: in rows, with d_v and d_k exchanged in memory, or with gaps everywhere."""
    states = states.to(device)
    if layout == "rows":
        return states.contiguous()
    if layout == "columns":
        return states.mT.contiguous().mT
    num_layers, rows, num_heads, d_v, d_k = states.shape
    wide = torch.full((num_layers, num_heads, rows, d_v + 1, d_k, 2), 77.0, dtype=states.dtype, device=device)
    view = wide[..., :d_v, :, 1].transpose(1, 2)
    return view.copy_(states)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: for comparisons that tell zeros and NaNs apart."""
    return tensor.cpu().contiguous().view(torch.uint8)


def canaries(codec: Any, spec: StateSpec, device: torch.device = CPU) -> dict[str, Tensor]:
    """Compressed tensors of ROWS rows, every byte of which is the canary."""
    stored: dict[str, Tensor] = codec.allocate(spec, ROWS, device)
    for tensor in stored.values():
        tensor.view(torch.uint8).fill_(CANARY)
    return stored


def energies(state: Tensor, restored: Tensor) -> Tensor:
    """Signal energy, error energy and non-finite count per (layer, head) of finite-or-not states ``[L, H, d_v, d_k]``, slowly."""
    state, restored = state.cpu().double(), restored.cpu().double()
    finite = state.isfinite()
    clean = state.masked_fill(~finite, 0)
    signal = clean.pow(2).flatten(-2).sum(-1)
    error = (clean - restored).masked_fill(~restored.isfinite(), 0).pow(2).flatten(-2).sum(-1)
    return torch.stack([signal, error, (~finite).flatten(-2).sum(-1).double()], -1)


def assert_reports_agree(actual: Tensor, expected: Tensor) -> None:
    """Equal counts; energies to float32 sums. An error of less than 1e-18 of its head may count as none."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype == torch.float64
    assert actual.shape == expected.shape
    assert torch.equal(actual[..., 2], expected[..., 2])
    slack = expected[..., :2] * 2e-5 + expected[..., :1] * 1e-36
    excess = (actual - expected)[..., :2].abs() - slack
    assert excess.max() <= 0, f"off by {excess.max()} beyond what is allowed"


class CodecContract:
    """Inherit, and set ``codec`` and what defines it; ``device`` and ``sizes`` where they differ."""

    codec: Any
    reference: Any
    device = torch.device("cpu")
    sizes = SIZES

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        axes = {"size": self.sizes, "dtype": DTYPES, "layout": LAYOUTS}
        for axis, values in axes.items():
            if axis in metafunc.fixturenames:
                metafunc.parametrize(axis, values, ids=lambda value: str(value).removeprefix("torch."))

    @pytest.fixture
    def spec(self, size: tuple[int, int], dtype: torch.dtype) -> StateSpec:
        return StateSpec(2, 3, *size, dtype)

    def test_every_byte_is_the_references(self, spec: StateSpec, layout: str) -> None:
        """What is stored, what is restored and what is reported are the reference's, whatever the values."""
        states = hard_states(spec, fresh_numbers())
        source = lay_out(states, layout, self.device)
        stored, expected = canaries(self.codec, spec, self.device), canaries(self.reference, spec)

        report = self.codec.compress(source, (4,), stored, (1,))
        expected_report = self.reference.compress(states, (4,), expected, (1,))
        target, restored = lay_out(states, layout, self.device), states.clone()
        self.codec.restore(stored, (1,), target, (2,))
        self.reference.restore(expected, (1,), restored, (2,))

        for name in expected:
            assert torch.equal(bits(stored[name]), bits(expected[name])), name
        assert torch.equal(bits(target), bits(restored))
        assert_reports_agree(report, expected_report)
        assert_reports_agree(report, energies(states[:, 4], restored[:, 2])[None])

    def test_rows_in_any_order(self, dtype: torch.dtype, layout: str) -> None:
        """Several slots at once are each what they are alone; rows beside them, and gaps between elements, stay untouched."""
        spec = StateSpec(2, 2, 19, 37, dtype)
        states = hard_states(spec, fresh_numbers())
        source = lay_out(states, layout, self.device)
        stored, alone = canaries(self.codec, spec, self.device), canaries(self.codec, spec, self.device)

        reports = self.codec.compress(source, [3, 0, 4], stored, [1, 4, 2])
        for i, (source_row, stored_row) in enumerate([(3, 1), (0, 4), (4, 2)]):
            report = self.codec.compress(source, [source_row], alone, [stored_row])
            assert torch.equal(report[0], reports[i])
        for name in stored:
            assert torch.equal(bits(stored[name]), bits(alone[name])), name
            assert bool((bits(stored[name][:, [0, 3]]) == CANARY).all()), name

        target = lay_out(torch.full_like(states, 55.0), layout, self.device)
        before = bits(target.as_strided((target.untyped_storage().nbytes() // dtype.itemsize,), (1,), 0)).clone()
        self.codec.restore(stored, [4, 1], target, [0, 2])
        assert bool((target[:, [1, 3, 4]] == 55.0).all())
        assert bool((target[:, [0, 2]] != 55.0).any())
        target[:, [0, 2]] = 55.0
        assert torch.equal(bits(target.as_strided((len(before) // dtype.itemsize,), (1,), 0)), before)

    def test_non_finite_elements(self, dtype: torch.dtype, layout: str) -> None:
        """NaN and infinities are counted per head and spoil neither the count of other heads nor any other element."""
        spec = StateSpec(2, 3, 33, 20, dtype)
        states = hard_states(spec, fresh_numbers())
        spoiled = states.clone()
        spoiled[0, 1, 2, 5, 7], spoiled[0, 1, 2, 32, 7], spoiled[1, 1, 0, 0, 0] = math.nan, -math.inf, math.inf
        stored, expected = canaries(self.codec, spec, self.device), canaries(self.reference, spec)

        report = self.codec.compress(lay_out(spoiled, layout, self.device), (1,), stored, (0,))
        expected_report = self.reference.compress(spoiled, (1,), expected, (0,))

        assert report[0, :, :, 2].tolist() == [[0, 0, 2], [1, 0, 0]]
        assert_reports_agree(report, expected_report)
        for name in expected:
            assert torch.equal(bits(stored[name]), bits(expected[name])), name
        target = lay_out(states, layout, self.device)
        self.codec.restore(stored, (0,), target, (1,))
        assert bool(target.isfinite().all()) == self.codec.lossy

    def test_all_non_finite(self, dtype: torch.dtype) -> None:
        """A state of nothing but NaN is reported as such."""
        spec = StateSpec(1, 2, 3, 5, dtype)
        stored = self.codec.allocate(spec, 1, self.device)

        report = self.codec.compress(torch.full((1, 1, 2, 3, 5), math.nan, dtype=dtype, device=self.device), (0,), stored, (0,))

        assert report.tolist() == [[[[0, 0, 15], [0, 0, 15]]]]

    def test_no_slots(self, dtype: torch.dtype) -> None:
        """Nothing to do is done, and reported on, as nothing."""
        spec = StateSpec(2, 3, 4, 5, dtype)
        stored = canaries(self.codec, spec, self.device)
        state = torch.ones(2, ROWS, 3, 4, 5, dtype=dtype, device=self.device)

        report = self.codec.compress(state, [], stored, [])
        self.codec.restore(stored, [], state, [])

        assert report.shape == (0, 2, 3, 3)
        assert bool((state == 1).all())
        assert all(bool((bits(tensor) == CANARY).all()) for tensor in stored.values())

    def test_bytes_are_what_is_allocated(self, dtype: torch.dtype) -> None:
        """``bytes_per_slot`` is the exact size of a row."""
        spec = StateSpec(3, 2, 10, 7, dtype)

        stored = self.codec.allocate(spec, 4, self.device)

        assert sum(tensor.nbytes for tensor in stored.values()) == 4 * self.codec.bytes_per_slot(spec)
        assert all(not tensor.any() for tensor in stored.values())

"""The fused CPU codecs: the contract, compiled and not, on one thread and on several."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator

import pytest
import torch
from codec_contract import SIZES, CodecContract, assert_reports_agree, bits, fresh_numbers

from mamba_checkpoint_cache.codec import cpu, cpu_build
from mamba_checkpoint_cache.codec.cpu import (
    CPU_CODECS,
    CpuInt5PivotCodec,
    CpuInt8Codec,
    CpuInt8PivotCodec,
    CpuInt16Codec,
    CpuNoneCodec,
)
from mamba_checkpoint_cache.codec.cpu_build import load_kernels
from mamba_checkpoint_cache.codec.pivot import Int5PivotCodec, Int8PivotCodec, PivotCodec
from mamba_checkpoint_cache.codec.reference import Int8Codec, Int16Codec, NoneCodec, TableCodec
from mamba_checkpoint_cache.state import StateSpec


class TestInt8(CodecContract):
    codec, reference = CpuInt8Codec(), Int8Codec()


class TestNone(CodecContract):
    codec, reference = CpuNoneCodec(), NoneCodec()


class TestInt16(CodecContract):
    codec, reference = CpuInt16Codec(), Int16Codec()


class TestInt8Pivot(CodecContract):
    codec, reference = CpuInt8PivotCodec(), Int8PivotCodec()
    sizes = (*SIZES, (48, 40))


class TestInt5Pivot(CodecContract):
    codec, reference = CpuInt5PivotCodec(), Int5PivotCodec()
    sizes = (*SIZES, (48, 40))


class TestInt8OnThreads(CodecContract):
    codec, reference = CpuInt8Codec(), Int8Codec()
    sizes = ((40, 24),)

    @pytest.fixture(autouse=True)
    def threads(self) -> Iterator[None]:
        torch.set_num_threads(3)
        yield
        torch.set_num_threads(1)


class TestPivotOnThreads(TestInt8OnThreads):
    codec, reference = CpuInt8PivotCodec(), Int8PivotCodec()


class TestWithoutKernels(CodecContract):
    """Where nothing can be compiled, the reference does the work."""

    codec, reference = CpuInt8Codec(), Int8Codec()
    sizes = ((9, 7),)

    @pytest.fixture(autouse=True)
    def no_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu, "load_kernels", lambda: None)


class TestNoneWithoutKernels(TestWithoutKernels):
    codec, reference = CpuNoneCodec(), NoneCodec()


class TestPivotWithoutKernels(TestWithoutKernels):
    codec, reference = CpuInt8PivotCodec(), Int8PivotCodec()


@pytest.fixture(scope="class", params=["-march=x86-64-v3 -fopenmp", "-fopenmp"], ids=["avx2", "sse2"])
def fewer_instructions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels compiled for less than this processor can do: their vectors have other lengths."""
    if platform.machine() != "x86_64":
        pytest.skip("the options are those of another processor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "fewer-instructions"))
        patch.setattr(cpu_build, "EXTRA_FLAGS", (request.param,))
        load_kernels.cache_clear()
        assert load_kernels() is not None
        yield
    load_kernels.cache_clear()


on_other_processors = [pytest.mark.slow, pytest.mark.usefixtures("fewer_instructions")]


class TestInt8OnOtherProcessors(TestInt8):
    pytestmark = on_other_processors


class TestInt16OnOtherProcessors(TestInt16):
    pytestmark = on_other_processors


class TestInt8PivotOnOtherProcessors(TestInt8Pivot):
    pytestmark = on_other_processors


class TestInt5PivotOnOtherProcessors(TestInt5Pivot):
    pytestmark = on_other_processors


def test_the_kernels_are_compiled_here() -> None:
    """The contract above tests compiled code, not the fallback."""
    assert load_kernels() is not None


@pytest.mark.parametrize("name", CPU_CODECS)
def test_the_compiled_code_is_what_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused codec never goes through the reference when the kernels are there."""
    monkeypatch.setattr(TableCodec, "_compress", None)
    monkeypatch.setattr(TableCodec, "_restore", None)
    codec = CPU_CODECS[name]()
    stored = codec.allocate(StateSpec(1, 1, 8, 8), 1, torch.device("cpu"))

    codec.compress(torch.ones(1, 1, 1, 8, 8), [0], stored, [0])
    codec.restore(stored, [0], torch.ones(1, 1, 1, 8, 8), [0])


def test_other_python_threads_run_meanwhile() -> None:
    """The kernels are called without the interpreter's lock, which ``ctypes.PyDLL`` would keep."""
    assert not isinstance(load_kernels(), ctypes.PyDLL)


@pytest.mark.parametrize(
    ("codec", "reference"), [(CpuInt8PivotCodec(), Int8PivotCodec()), (CpuInt5PivotCodec(), Int5PivotCodec())]
)
@pytest.mark.parametrize("size", [(128, 128), (63, 100), (300, 24)])
@pytest.mark.parametrize("noise", [1.0, 0.01, 0.0])
def test_the_error_of_ordinary_float32_states_is_reported_right(
    codec: PivotCodec, reference: PivotCodec, size: tuple[int, int], noise: float
) -> None:
    """The error, measured in the rotated basis then, is that of what is restored, were it large, tiny or none at all."""
    spec, numbers = StateSpec(1, 2, *size, torch.float32), fresh_numbers()
    state = torch.randn(1, 1, 2, *size, generator=numbers)
    stored, expected = (reference.allocate(spec, 1, torch.device("cpu")) for _ in range(2))
    reference.compress(state, (0,), stored, (0,))
    for name, nothing in {"q": 0, "low": 0, "high": 255}.items():
        if name in stored:
            stored[name].fill_(nothing)  # nothing but the prediction is left
    reference.restore(stored, (0,), state, (0,))
    state += noise * torch.randn(state.shape, generator=numbers)

    report = codec.compress(state, (0,), stored, (0,))

    assert_reports_agree(report, reference.compress(state, (0,), expected, (0,)))


@pytest.mark.parametrize("codec", [CpuInt16Codec(), CpuInt8Codec(), CpuInt8PivotCodec()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d_k", [8, 16, 24, 32, 40, 48, 64])
def test_rows_that_begin_lines_and_end_within_one(d_k: int, dtype: torch.dtype, codec: TableCodec) -> None:
    """What is written past the cache, line by line, is whole where rows are, and no more than that where they are not."""
    spec, numbers = StateSpec(1, 1, 32, d_k, dtype), fresh_numbers()
    state = torch.randn(1, 1, 1, 32, d_k, generator=numbers).to(dtype)
    stored = codec.allocate(spec, 1, torch.device("cpu"))
    codec.compress(state, (0,), stored, (0,))
    apart, wide = torch.zeros(1, 1, 1, d_k, 32, dtype=dtype).mT, torch.full((1, 1, 1, 32, 64), 7.0, dtype=dtype)

    codec.restore(stored, (0,), apart, (0,))
    codec.restore(stored, (0,), wide[..., :d_k], (0,))

    assert wide.data_ptr() % 64 == 0
    assert torch.equal(wide[..., :d_k], apart)
    assert (wide[..., d_k:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(63, 40), (48, 128)])
@pytest.mark.parametrize("exponent", [-120, -41, -40, -39, 0, 39, 40, 41, 120])
def test_heads_far_from_one(exponent: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Whether a head is worked on in units of its own or as it is changes no byte, be there zeros and subnormal numbers in it."""
    spec, numbers = StateSpec(1, 12, *size, dtype), fresh_numbers()
    state = torch.randn(1, 1, 12, *size, generator=numbers)
    state *= 2 ** (3 * torch.randn(1, 1, 12, 1, 1, generator=numbers)) * 2.0**exponent / state.abs().amax((-2, -1), keepdim=True)
    tiny = torch.randn(state.shape, generator=numbers) * 10 ** -torch.randint(36, 46, state.shape, generator=numbers).float()
    few = torch.rand(state.shape, generator=numbers) < torch.rand(1, 1, 12, 1, size[1], generator=numbers) ** 2
    state = torch.where(few, tiny, state).to(dtype)
    for codec, reference in [(CpuInt8PivotCodec(), Int8PivotCodec()), (CpuInt5PivotCodec(), Int5PivotCodec())]:
        stored, expected = (reference.allocate(spec, 1, torch.device("cpu")) for _ in range(2))

        report, expected_report = codec.compress(state, (0,), stored, (0,)), reference.compress(state, (0,), expected, (0,))
        target, restored = torch.zeros_like(state), torch.zeros_like(state)
        codec.restore(stored, (0,), target, (0,))
        reference.restore(expected, (0,), restored, (0,))

        for name in expected:
            assert torch.equal(stored[name], expected[name]), name
        assert torch.equal(bits(target), bits(restored))
        assert_reports_agree(report, expected_report)

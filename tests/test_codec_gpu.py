"""The Triton codecs: the contract in a process of its own, and every kernel compiled ahead of time for every kind of GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_contract import DTYPES

from mamba_checkpoint_cache.codec.reference import MIN_AMAX, Int8Codec

triton = pytest.importorskip("triton")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mamba_checkpoint_cache.codec.gpu import (  # noqa: E402
    COMPRESS_BLOCKS,
    COMPRESS_OPTIONS,
    PIVOT_COMPRESS_BLOCKS,
    PIVOT_COMPRESS_OPTIONS,
    PIVOT_RESTORE_BLOCKS,
    PIVOT_RESTORE_OPTIONS,
    RESTORE_BLOCKS,
    RESTORE_OPTIONS,
)
from mamba_checkpoint_cache.codec.gpu_kernels import compress_kernel, restore_kernel  # noqa: E402
from mamba_checkpoint_cache.codec.gpu_pivot_head import Code, Head  # noqa: E402
from mamba_checkpoint_cache.codec.gpu_pivot_kernels import pivot_compress_kernel, pivot_restore_kernel  # noqa: E402
from mamba_checkpoint_cache.codec.pivot import precision_of  # noqa: E402

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
BLOCKS = {compress_kernel: COMPRESS_BLOCKS, restore_kernel: RESTORE_BLOCKS}
OPTIONS = {compress_kernel: COMPRESS_OPTIONS, restore_kernel: RESTORE_OPTIONS}
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("where", ["interpreter", pytest.param("gpu", marks=NEEDS_GPU)])
def test_the_contract(where: str) -> None:
    """The kernels do what the reference does, bit for bit."""
    file = Path(__file__).with_name("codec_gpu_contract.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if where == "interpreter" else "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]

    run = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)

    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert re.search(r"\d{2,} passed", run.stdout)


def source(
    kernel: Any,
    dtype: torch.dtype,
    size: tuple[int, int] = (128, 128),
    *,
    contiguous: str = "stride_k",
    known: dict[str, Any] | None = None,
) -> ASTSource:
    """A kernel with the arguments that a launch would give it; ``known`` says which pointers it does without."""
    most_v, most_k = BLOCKS[kernel]
    known = {"NUM_LAYERS": 36, "NUM_HEADS": 32, "D_V": size[0], "D_K": size[1], contiguous: 1} | (known or {})
    known |= {"BLOCK_V": min(triton.next_power_of_2(size[0]), most_v), "BLOCK_K": min(triton.next_power_of_2(size[1]), most_k)}
    if kernel is compress_kernel:
        known |= {"MIN_AMAX": MIN_AMAX, "LARGEST_SCALE": Int8Codec().largest_scale(dtype), "LEVELS": 127}
    pointers = {"p_state": TYPES[dtype], "p_q": "*i8", "p_scale": TYPES[Int8Codec().scale_dtype(dtype)], "p_report": "*fp64"}
    rows = {"p_state_rows": "*i64", "p_stored_rows": "*i64"}
    signature = {name: "constexpr" if name in known else (pointers | rows).get(name, "i64") for name in kernel.arg_names}
    aligned = [name in pointers or name.startswith("stride") for name in kernel.arg_names]
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if aligned[i] and name not in known}
    return ASTSource(kernel, signature, known, attributes)


def spills(target: GPUTarget, compiled: Any, log: str) -> list[int]:
    """How much the compiler says it moved out of registers."""
    if target.backend == "cuda":
        return [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    return [int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"])]


def compile_for(target: str, made: ASTSource, options: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> Any:
    """Compile, and check what every compiled kernel must be: without spills, and rounding as often as the reference."""
    capfd.readouterr()
    compiled = triton.compile(made, target=TARGETS[target], options=options)

    found = spills(TARGETS[target], compiled, capfd.readouterr().out)
    assert len(found) >= 2
    assert not any(found)
    if "ptx" in compiled.asm:
        assert "fma.rn.f32" not in compiled.asm["ptx"]
        assert "div.full.f32" not in compiled.asm["ptx"]
    return compiled


@pytest.fixture(autouse=True)
def compile_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out of a cache says nothing about spills."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(knobs.nvidia, "dump_ptxas_log", True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", BLOCKS, ids=["compress", "restore"])
def test_compiles_for_every_gpu(kernel: Any, dtype: torch.dtype, target: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every kernel compiles for every kind of GPU in every dtype, as it is launched for one slot."""
    made = source(kernel, dtype, known={"p_state_rows": None, "p_stored_rows": None})

    compile_for(target, made, OPTIONS[kernel], capfd)


@pytest.mark.parametrize("target", TARGETS)
def test_measuring_alone_compiles(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    """So does the kernel that only reports, for several slots."""
    compile_for(target, source(compress_kernel, torch.bfloat16, known={"p_q": None, "p_scale": None}), COMPRESS_OPTIONS, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("contiguous", ["stride_k", "stride_v"])
@pytest.mark.parametrize("size", [(300, 80), (128, 16), (1000, 130), (64, 128)], ids=str)
@pytest.mark.parametrize("kernel", BLOCKS, ids=["compress", "restore"])
def test_other_shapes_compile(
    kernel: Any, size: tuple[int, int], contiguous: str, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """So do odd sizes, several tiles per channel, several slots, and states with d_v and d_k exchanged in memory."""
    compile_for(target, source(kernel, torch.float32, size, contiguous=contiguous), OPTIONS[kernel], capfd)


def pivot_source(kernel: Any, dtype: torch.dtype, *, levels: int = 127, stride_k: int = 1) -> ASTSource:
    """A pivot kernel as it is launched for one slot of 128 x 128 heads."""
    fine, limit = precision_of(dtype), torch.finfo(dtype).max
    blocks = PIVOT_COMPRESS_BLOCKS if kernel is pivot_compress_kernel else PIVOT_RESTORE_BLOCKS
    stride_v = 128 if stride_k == 1 else 1
    head = Head(128, 128, stride_v, stride_k, *blocks, levels, limit, fine.pivot_bits, Code.of(fine.gain))
    known = {"NUM_LAYERS": 36, "NUM_HEADS": 32, "H": head, "p_state_rows": None, "p_stored_rows": None}
    known |= {"p_high": None} if levels == 127 else {}
    pointers = {"p_state": TYPES[dtype], "p_q": "*i8" if levels == 127 else "*u8", "p_report": "*fp64"}
    pointers |= {f"p_{name}": "*u8" for name in ("high", "exponent", "pivot", "gain", "scale")}
    signature = {name: "constexpr" if name in known else pointers.get(name, "i64") for name in kernel.arg_names}
    aligned = [name not in known and (name in pointers or name.startswith("stride")) for name in kernel.arg_names]
    return ASTSource(kernel, signature, known, {(i,): [["tt.divisibility", 16]] for i, is_so in enumerate(aligned) if is_so})


PIVOT_OPTIONS = {pivot_compress_kernel: PIVOT_COMPRESS_OPTIONS, pivot_restore_kernel: PIVOT_RESTORE_OPTIONS}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", PIVOT_OPTIONS, ids=["compress", "restore"])
def test_pivot_kernels_compile(kernel: Any, dtype: torch.dtype, target: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The kernels of the default format compile for every kind of GPU."""
    compile_for(target, pivot_source(kernel, dtype), PIVOT_OPTIONS[kernel], capfd)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("levels", "stride_k"), [(15, 1), (127, 128)])
@pytest.mark.parametrize("kernel", PIVOT_OPTIONS, ids=["compress", "restore"])
def test_other_pivot_kernels_compile(
    kernel: Any, levels: int, stride_k: int, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """So do those of five bits, and of states with d_v and d_k exchanged in memory."""
    made = pivot_source(kernel, torch.float32, levels=levels, stride_k=stride_k)

    assert triton.compile(made, target=TARGETS[target], options=PIVOT_OPTIONS[kernel]) is not None

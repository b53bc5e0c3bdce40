"""Compiling the CPU kernels: what happens without a compiler, with a poor one, and in several processes at once."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mamba_checkpoint_cache.codec import cpu_build
from mamba_checkpoint_cache.codec.cpu_build import load_kernels

SYMBOLS = [
    f"{operation}_{codec}_{dtype}"
    for operation in ("compress", "restore")
    for codec in ("int16", "int8", "int8_pivot", "int5_pivot")
    for dtype in ("float32", "bfloat16", "float16")
]


@pytest.fixture(autouse=True)
def nothing_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real compiler in a hurry: it does not optimise, notes each run, and refuses the options that are in ``refused``."""
    script, real = tmp_path / "compiler", shutil.which("c++")
    script.write_text(
        f"""#!/bin/sh
echo run "$@" >> {tmp_path}/runs
for option in $(cat {tmp_path}/refused 2>/dev/null); do
    case " $* " in *" $option "*) echo "cannot do $option" >&2; exit 1;; esac
done
exec {real} "$@" -O0
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


def compilations(tmp_path: Path) -> int:
    return (tmp_path / "runs").read_text().count("-shared")


def test_built_once_and_kept(compiler: Path, tmp_path: Path) -> None:
    """The first process compiles into a private directory and leaves nothing else there; the next one loads the result."""
    kernels = load_kernels()
    load_kernels.cache_clear()
    again = load_kernels()

    assert all(getattr(library, symbol) for library in (kernels, again) for symbol in SYMBOLS)
    assert compilations(tmp_path) == 1
    directory = tmp_path / "cache" / "mamba-checkpoint-cache"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [path.suffix for path in directory.iterdir()] == [".so"]


@pytest.mark.parametrize("refused", ["-mprefer-vector-width=512", "-fopenmp", "-march=native"])
def test_a_compiler_that_lacks_an_option(compiler: Path, tmp_path: Path, refused: str) -> None:
    """Options that a compiler does not know are left out."""
    (tmp_path / "refused").write_text(refused)

    with capture_logs() as logs:
        kernels = load_kernels()

    assert isinstance(kernels, ctypes.CDLL)
    assert logs == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler there are no kernels, and the log says so once."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")

    with capture_logs() as logs:
        kernels = [load_kernels() for _ in range(3)]

    assert kernels == [None, None, None]
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("codec_kernels_unavailable", "warning")]
    assert "no C++ compiler" in logs[0]["reason"]


def test_a_broken_compiler(compiler: Path, tmp_path: Path) -> None:
    """If nothing compiles, the warning carries what the compiler said."""
    (tmp_path / "refused").write_text("-shared")

    with capture_logs() as logs:
        kernels = load_kernels()

    assert kernels is None
    assert [entry["reason"] for entry in logs] == [f"{compiler} failed: {compiler} exited with 1: cannot do -shared"]


def test_a_directory_open_to_others(compiler: Path, tmp_path: Path) -> None:
    """Code is never loaded from a directory that other users can write to."""
    directory = tmp_path / "cache" / "mamba-checkpoint-cache"
    directory.mkdir(parents=True)
    directory.chmod(0o777)

    with capture_logs() as logs:
        kernels = load_kernels()

    assert kernels is None
    assert "other users can write" in logs[0]["reason"]


def test_what_the_library_depends_on(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another source, other flags or another processor make another library."""
    first = cpu_build._fingerprint({"a.cpp": b"source", "a.h": b""}, str(compiler))

    assert cpu_build._fingerprint({"a.cpp": b"source", "a.h": b""}, str(compiler)) == first
    assert cpu_build._fingerprint({"a.cpp": b"source", "a.h": b"other"}, str(compiler)) != first
    monkeypatch.setattr(cpu_build, "_processor", lambda: "another")
    assert cpu_build._fingerprint({"a.cpp": b"source", "a.h": b""}, str(compiler)) != first


def test_several_builders_at_once(compiler: Path, tmp_path: Path) -> None:
    """Whoever starts with an empty cache at the same time ends up with working kernels, and there is one library."""
    directory = cpu_build._cache_directory()

    with ThreadPoolExecutor(3) as pool:
        libraries = list(pool.map(lambda _: cpu_build._load(str(compiler), directory), range(3)))

    assert all(library.compress_int8_float32 for library in libraries)
    assert compilations(tmp_path) == 3
    assert [path.suffix for path in directory.iterdir()] == [".so"]

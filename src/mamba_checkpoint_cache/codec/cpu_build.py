"""Builds the compiled CPU kernels with the machine's C++ compiler on first use, and keeps them for every later process."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import structlog

SOURCES = (
    "cpu_common.h",
    "cpu_vectors.h",
    "cpu_tiles.h",
    "cpu_pivot_fields.h",
    "cpu_int8.cpp",
    "cpu_int16.cpp",
    "cpu_pivot.cpp",
)
COMPILERS = ("c++", "g++", "clang++")
FLAGS = "-std=c++17 -O3 -shared -fPIC -fopenmp-simd -ffp-contract=off -fno-math-errno -fno-trapping-math"
EXTRA_FLAGS = ("-march=native -mprefer-vector-width=512 -fopenmp", "-march=native -fopenmp", "-march=native", "")
"""Tried in this order: not every compiler knows OpenMP, nor every processor wide vectors."""


class BuildError(Exception):
    """The kernels can't be compiled here, or what was compiled can't be trusted."""


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None where they can't be had, with one warning in the log that says why."""
    try:
        return _load(_find_compiler(), _cache_directory())
    except (BuildError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        structlog.get_logger(__name__).warning("codec_kernels_unavailable", reason=str(error), instead="plain torch, much slower")
        return None


def _load(compiler: str, cache: Path) -> ctypes.CDLL:
    sources = {name: files(__package__).joinpath(name).read_bytes() for name in SOURCES}
    library = cache / f"cpu_kernels_{_fingerprint(sources, compiler)}.so"
    if not library.exists():
        _build(sources, compiler, library)
    return ctypes.CDLL(str(library))


def _find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler: neither CXX nor any of {', '.join(COMPILERS)} is one")


def _cache_directory() -> Path:
    """A directory that only this user can write to, because what lies in it will be executed."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "mamba-checkpoint-cache"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BuildError(f"other users can write to {directory}: make it private with chmod 700, or set XDG_CACHE_HOME")
    return directory


def _fingerprint(sources: Mapping[str, bytes], compiler: str) -> str:
    parts = (
        repr(sources).encode(),
        repr((FLAGS, EXTRA_FLAGS)).encode(),
        _output_of(compiler, "--version").encode(),
        _processor().encode(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """All that ``-march=native`` depends on: unlike machines may share a home directory."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(facts)])


def _build(sources: Mapping[str, bytes], compiler: str, library: Path) -> None:
    """Compile aside, then move the result into place in one step: other processes may be doing the same."""
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        result = Path(directory, library.name)
        for name, source in sources.items():
            Path(directory, name).write_bytes(source)
        code = [str(Path(directory, name)) for name in sources if name.endswith(".cpp")]
        failures = []
        for extra in EXTRA_FLAGS:
            try:
                _output_of(compiler, *f"{FLAGS} {extra}".split(), *code, "-o", str(result))
                ctypes.CDLL(str(result))
            except (BuildError, OSError) as error:
                failures.append(str(error))
            else:
                result.replace(library)
                return
        raise BuildError(f"{compiler} failed: {failures[-1]}")


def _output_of(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise BuildError(f"{command[0]} exited with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout

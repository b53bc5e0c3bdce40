"""The text task: source code of the Python standard library, which every machine with Python has."""

from __future__ import annotations

import functools
import sysconfig
import zlib
from pathlib import Path
from random import Random

END_OF_TEXT = 256
"""The token that ends a text; every other token is a byte."""
HELD_OUT_SHARE = 16
"""One module in so many is kept from training, chosen by its name: the same ones in every version of Python."""
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}
"""Folders that are not the library, or hold tables rather than code."""


def training_text() -> bytes:
    """The modules that the models are trained on, one after the other."""
    return b"".join(path.read_bytes() for path in _modules() if not _held_out(path))


def held_out_text(num_bytes: int, *, seed: int = 0) -> bytes:
    """A piece of the modules that were kept from training: the same for the same arguments and Python version.

    Raises:
        ValueError: if there are no ``num_bytes`` bytes of it.
    """
    text = _held_out_modules()
    if not 1 <= num_bytes <= len(text):
        raise ValueError(f"expected 1 to {len(text):,} bytes, as many as are held out, got {num_bytes:,}")
    begin = Random(seed).randrange(len(text) - num_bytes + 1)  # noqa: S311 - prompts, not secrets
    return text[begin : begin + num_bytes]


@functools.cache
def _held_out_modules() -> bytes:
    return b"".join(path.read_bytes() for path in _modules() if _held_out(path))


def _modules() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(root).parts))


def _held_out(path: Path) -> bool:
    return zlib.crc32(path.stem.encode()) % HELD_OUT_SHARE == 0

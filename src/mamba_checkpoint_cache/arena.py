"""One block of memory, carved into the tensors of a pool; carved anew when the pool holds something else."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

ALIGNMENT = 128
"""Bytes: a GPU's cache line, and more than any vector load asks for."""


class Arena:
    """``num_bytes`` zeroed bytes on ``device``, and what aligning ``num_tensors`` tensors in them may take."""

    def __init__(self, num_bytes: int, num_tensors: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.zeros(num_bytes + ALIGNMENT * num_tensors, dtype=torch.uint8, device=device)

    def carve(self, templates: Iterable[Tensor], rows: int) -> list[Tensor]:
        """Tensors like ``templates`` (``[num_layers, any, …]``) but with ``rows`` rows, and with whatever the memory holds.

        Those of an earlier call lie in the same memory and must no longer be used.

        Raises:
            ValueError: if the arena can't hold them.
        """
        tensors, begin = [], 0
        for template in templates:
            shape = (template.shape[0], rows, *template.shape[2:])
            end = begin + math.prod(shape) * template.element_size()
            if end > self._memory.numel():
                raise ValueError(f"{rows} rows need {end:,} bytes and more, but the arena has {self._memory.numel():,}")
            tensors.append(self._memory[begin:end].view(template.dtype).view(shape))
            begin = math.ceil(end / ALIGNMENT) * ALIGNMENT
        return tensors

    def wipe(self) -> None:
        """Fill the memory with zeros, in stream order."""
        self._memory.zero_()

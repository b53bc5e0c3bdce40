"""What drift there is without a lossy codec worth the name: checkpoints rounded to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_checkpoint_cache.codec.call import Field
from mamba_checkpoint_cache.codec.reference import TableCodec, measure


class Bf16Codec(TableCodec):
    """The state rounded to bfloat16: exact for a state that is bfloat16, half the bytes of a float32 one."""

    name = "bf16"
    lossy = True

    def fields(self, num_heads: int, d_v: int, d_k: int, dtype: torch.dtype) -> dict[str, Field]:
        """``state``: the state in bfloat16."""
        return {"state": ((num_heads, d_v, d_k), torch.bfloat16)}

    def _encode(self, state: Tensor, row: dict[str, Tensor]) -> Tensor:
        row["state"].copy_(state)
        return measure(state, self._decode(row, state))

    def _decode(self, row: dict[str, Tensor], like: Tensor) -> Tensor:
        return row["state"].to(like.dtype)

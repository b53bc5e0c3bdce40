"""A radix-tree prefix cache of compressed recurrent-state checkpoints, for hybrid (Mamba, gated-delta-net) language models."""

from mamba_checkpoint_cache.cache import PrefixCache
from mamba_checkpoint_cache.codec import CODEC_NAMES, get_codec
from mamba_checkpoint_cache.codec.base import Codec
from mamba_checkpoint_cache.errors import HandleError, InvariantError
from mamba_checkpoint_cache.policy import CheckpointPolicy
from mamba_checkpoint_cache.pools import ActivePool, CheckpointPool
from mamba_checkpoint_cache.results import Duplicate, FlushResult, Match, Skipped, Stored
from mamba_checkpoint_cache.slots import ActiveSlot, CheckpointSlot
from mamba_checkpoint_cache.state import SideSpec, StateSpec
from mamba_checkpoint_cache.telemetry.recorder import Telemetry
from mamba_checkpoint_cache.tree.components import KvAllocator

__all__ = [
    "CODEC_NAMES",
    "ActivePool",
    "ActiveSlot",
    "CheckpointPolicy",
    "CheckpointPool",
    "CheckpointSlot",
    "Codec",
    "Duplicate",
    "FlushResult",
    "HandleError",
    "InvariantError",
    "KvAllocator",
    "Match",
    "PrefixCache",
    "SideSpec",
    "Skipped",
    "StateSpec",
    "Stored",
    "Telemetry",
    "get_codec",
]

"""A radix-tree prefix cache of compressed recurrent-state checkpoints, for hybrid (Mamba, gated-delta-net) language models."""

from mamba_checkpoint_cache.cache import PrefixCache
from mamba_checkpoint_cache.codec import CODEC_NAMES, get_codec
from mamba_checkpoint_cache.codec.base import Codec
from mamba_checkpoint_cache.drift.budget import DriftBudget
from mamba_checkpoint_cache.drift.guard import DriftGuard
from mamba_checkpoint_cache.drift.logits import LogitComparison, compare_logits
from mamba_checkpoint_cache.drift.monitor import DriftMonitor
from mamba_checkpoint_cache.errors import HandleError, InvariantError
from mamba_checkpoint_cache.policy import CheckpointPolicy
from mamba_checkpoint_cache.pools import ActivePool, CheckpointPool
from mamba_checkpoint_cache.results import Duplicate, FlushResult, Match, Skipped, Stored
from mamba_checkpoint_cache.slots import ActiveSlot, CheckpointSlot
from mamba_checkpoint_cache.state import SideSpec, StateSpec
from mamba_checkpoint_cache.telemetry.logs import add_trace_ids
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
    "DriftBudget",
    "DriftGuard",
    "DriftMonitor",
    "Duplicate",
    "FlushResult",
    "HandleError",
    "InvariantError",
    "KvAllocator",
    "LogitComparison",
    "Match",
    "PrefixCache",
    "SideSpec",
    "Skipped",
    "StateSpec",
    "Stored",
    "Telemetry",
    "add_trace_ids",
    "compare_logits",
    "get_codec",
]

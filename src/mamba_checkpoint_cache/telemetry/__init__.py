"""What happened, as metrics, spans and log lines: the cache and its pools call in here, and nothing calls out but a snapshot."""

from mamba_checkpoint_cache.telemetry.recorder import NULL, PoolSnapshot, PoolsSnapshot, Telemetry

__all__ = ["NULL", "PoolSnapshot", "PoolsSnapshot", "Telemetry"]

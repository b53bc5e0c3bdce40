"""From options to an engine that is ready to serve, and what there is to say about it."""

from __future__ import annotations

from typing import Any

import structlog
import torch
from opentelemetry.trace import TracerProvider
from prometheus_client import CollectorRegistry

from mamba_checkpoint_cache.integrations.continuation import Mode
from mamba_checkpoint_cache.integrations.layout import UnsupportedModelError
from mamba_checkpoint_cache.integrations.probe import prepare_model
from mamba_checkpoint_cache.integrations.transformers import HybridModel
from mamba_checkpoint_cache.pools import CheckpointPool
from mamba_checkpoint_cache.serving.config import EngineConfig
from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.models import LoadedModel, load_model
from mamba_checkpoint_cache.serving.options import DEFAULT_CHECKPOINT_SLOTS, OptionError, ServeOptions
from mamba_checkpoint_cache.telemetry.recorder import Telemetry

KV_PER_CHECKPOINT = 2
"""KV slots for cached prefixes, in chunks per checkpoint: a state is no use without the KV of its prefix."""

logger = structlog.get_logger()


def build_engine(options: ServeOptions, registry: CollectorRegistry, tracer_provider: TracerProvider | None = None) -> Engine:
    """Load the model, probe how it may be continued, and lay out the pools. Logs what was found.

    Raises:
        OptionError: if there is no such model, it can't be continued from a cached state, or the memory does not suffice.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load_model(options.model)
    try:
        model = prepare_model(loaded.model)
        config = _config(options, model, loaded)
        telemetry = Telemetry("default", registry=registry, tracer_provider=tracer_provider)
        engine = Engine(model, loaded.tokens, config, telemetry, guard=options.build_guard())
    except UnsupportedModelError as error:
        raise OptionError(f"{loaded.name} can't be served: {error}") from error
    except (ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise OptionError(f"the pools don't fit: {error}") from error
    _announce(engine, loaded)
    _announce_drift(engine, options)
    return engine


def _config(options: ServeOptions, model: HybridModel, loaded: LoadedModel) -> EngineConfig:
    checkpoint_slots = options.checkpoint_slots or DEFAULT_CHECKPOINT_SLOTS
    if options.checkpoint_memory_bytes is not None:
        checkpoint_slots = CheckpointPool.slots_for(model.spec, options.codec, options.checkpoint_memory_bytes)
        if checkpoint_slots < 1:
            needed = 2 * CheckpointPool.bytes_per_slot_for(model.spec, options.codec)
            raise OptionError(
                f"{options.checkpoint_memory_bytes:,} bytes hold no checkpoint: one and a padding row take {needed:,}"
            )
    return EngineConfig(
        name=loaded.name,
        active_slots=options.active_slots,
        checkpoint_slots=checkpoint_slots,
        codec=options.codec,
        page_size=options.page_size,
        chunk=options.chunk,
        max_context=loaded.max_context,
        kv_slots=options.active_slots * loaded.max_context + KV_PER_CHECKPOINT * checkpoint_slots * options.chunk,
        drift_rate=options.drift_rate,
        drift_checks_per_minute=options.drift_checks_per_minute,
        max_hops=options.max_hops,
    )


def _announce(engine: Engine, loaded: LoadedModel) -> None:
    logger.info("model", name=loaded.name, type=type(loaded.model).__name__, max_context=loaded.max_context)
    continuation = engine.model.continuation
    log = logger.info if continuation.mode is Mode.CHUNKS else logger.warning
    log("continuation probe", mode=str(continuation.mode), found=continuation.message)
    logger.info("pools", **sizes(engine))


def _announce_drift(engine: Engine, options: ServeOptions) -> None:
    limits = {"max_relative_error": options.max_relative_error, "max_kl": options.max_kl, "max_hops": options.max_hops}
    logger.info("drift guard", action=options.guard, **limits)
    if not options.drift_rate:
        logger.info("drift checks", rate=0)
        return
    logger.info("drift checks", rate=options.drift_rate, per_minute=options.drift_checks_per_minute, bytes=check_bytes(engine))


def check_bytes(engine: Engine) -> int:
    """The most memory that a drift check takes: a state and its padding row, and the KV of one longest request."""
    kv = 0 if engine.kv_store is None else engine.kv_store.bytes_per_slot
    return 2 * engine.model.spec.native_bytes + engine.config.max_context * kv


def sizes(engine: Engine) -> dict[str, Any]:
    """Slots and bytes of the pools, and what they come to in prefixes."""
    pool, spec, slots = engine.cache.checkpoints, engine.model.spec, engine.config.checkpoint_slots
    return {
        "codec": pool.codec.name,
        "active_slots": engine.config.active_slots,
        "checkpoint_slots": slots,
        "checkpoint_bytes": pool.bytes_per_slot,
        "native_bytes": spec.native_bytes,
        "pool_bytes": pool.bytes_per_slot * (slots + 1),
        "kv_slots": 0 if engine.kv is None else engine.kv.capacity,
        "prefixes": f"up to {slots} can be resumed, at one checkpoint each",
    }

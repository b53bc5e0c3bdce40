"""From options to an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hash_model import assert_clean, greedy
from prometheus_client import CollectorRegistry
from serving_side import real_model
from structlog.testing import capture_logs

from mamba_checkpoint_cache.integrations.continuation import Continuation, Mode
from mamba_checkpoint_cache.integrations.layout import UnsupportedModelError
from mamba_checkpoint_cache.serving import build
from mamba_checkpoint_cache.serving.models import LoadedModel
from mamba_checkpoint_cache.serving.options import OptionError, ServeOptions
from mamba_checkpoint_cache.serving.tokens import ByteTokens


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModel("tiny", real_model().model, ByteTokens(), 512)
    monkeypatch.setattr(build, "load_model", lambda path: loaded)
    monkeypatch.setattr(build, "prepare_model", lambda model: real_model())


def test_options_become_sizes() -> None:
    """Slots, chunk, page and codec are what was asked for, and every running request has KV for its longest."""
    options = ServeOptions(checkpoint_slots=7, active_slots=2, chunk=32, page_size=4, codec="none")

    engine = build.build_engine(options, CollectorRegistry())

    config = engine.config
    assert (config.name, config.checkpoint_slots, config.active_slots, config.chunk, config.page_size) == ("tiny", 7, 2, 32, 4)
    assert (engine.cache.checkpoints.codec.name, config.max_context) == ("none", 512)
    assert config.kv_slots >= 2 * 512
    engine.generate([[1, 2, 3]], greedy(2))
    assert_clean(engine)


def test_a_codec_by_layer_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is named as written shortest; a layer that the model has not is refused in one line."""
    model = real_model(3)
    monkeypatch.setattr(build, "prepare_model", lambda _: model)
    registry = CollectorRegistry()

    engine = build.build_engine(ServeOptions(codec="none,0=int8,2=int8", checkpoint_memory_bytes=2**20), registry)

    pool = engine.cache.checkpoints
    assert build.sizes(engine)["codec"] == pool.codec.name == "int8,1=none"
    assert pool.slots.capacity == 2**20 // pool.bytes_per_slot - 1
    (info,) = (s.labels for family in registry.collect() for s in family.samples if s.name == "mamba_checkpoint_info")
    assert (info["codec"], info["fingerprint"]) == ("int8,1=none", f"{model.spec.fingerprint}-int8,1=none")
    assert registry.get_sample_value("mamba_checkpoint_layers", {"cache": "default", "codec": "int8"}) == 2
    first, again = (engine.generate([[*range(150), 1]], greedy(4))[0] for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, 128)
    assert_clean(engine)
    with pytest.raises(OptionError, match=r"a codec names layer 3, but the recurrent layers are 0 … 2"):
        build.build_engine(ServeOptions(codec="int8,3=none"), CollectorRegistry())


def test_memory_becomes_slots() -> None:
    """``checkpoint_memory_bytes`` gives the most slots whose pool fits, padding row included."""
    per_slot = build.build_engine(ServeOptions(), CollectorRegistry()).cache.checkpoints.bytes_per_slot

    fits = build.build_engine(ServeOptions(checkpoint_memory_bytes=per_slot * 11 - 1), CollectorRegistry())

    assert fits.config.checkpoint_slots == 9
    with pytest.raises(OptionError, match=f"a padding row take {2 * per_slot:,}"):
        build.build_engine(ServeOptions(checkpoint_memory_bytes=2 * per_slot - 1), CollectorRegistry())


def test_pools_that_do_not_fit_are_the_callers_mistake() -> None:
    """More slots than any memory has are refused in one line, before the server serves."""
    for options in (ServeOptions(active_slots=10**9), ServeOptions(checkpoint_slots=10**9)):
        with pytest.raises(OptionError, match="don't fit"):
            build.build_engine(options, CollectorRegistry())


def test_a_model_that_cannot_be_continued_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the probe refuses stops the start, with the probe's own words."""

    def refuse(model):
        raise UnsupportedModelError("it can't be continued")

    monkeypatch.setattr(build, "prepare_model", refuse)

    with pytest.raises(OptionError, match="tiny can't be served: it can't be continued"):
        build.build_engine(ServeOptions(), CollectorRegistry())


@pytest.mark.parametrize(("mode", "level"), [(Mode.CHUNKS, "info"), (Mode.TOKENS, "warning")])
def test_it_says_what_it_found(mode: Mode, level: str) -> None:
    """The log has the model, the probe's finding (a warning if it is slow) and the sizes of the pools."""
    engine = build.build_engine(ServeOptions(checkpoint_slots=5), CollectorRegistry())
    model = SimpleNamespace(continuation=Continuation(mode, message="as found"), spec=engine.model.spec)
    stand_in = SimpleNamespace(model=model, cache=engine.cache, config=engine.config, kv=engine.kv)

    with capture_logs() as logs:
        build._announce(stand_in, build.load_model("tiny"))

    found = {log["event"]: log for log in logs}
    assert found["model"]["name"] == "tiny"
    assert (found["continuation probe"]["found"], found["continuation probe"]["log_level"]) == ("as found", level)
    pools = found["pools"]
    assert (pools["codec"], pools["checkpoint_slots"]) == ("int8-pivot", 5)
    assert pools["pool_bytes"] == 6 * pools["checkpoint_bytes"] < 6 * pools["native_bytes"]


def test_drift_options_reach_the_engine() -> None:
    """Rate, bound, hops and guard are what was asked for, and the log says so, and what memory the checks take."""
    options = ServeOptions(drift_rate=0.5, drift_checks_per_minute=60, guard="stop", max_kl=0.2, max_hops=3)
    registry = CollectorRegistry()

    with capture_logs() as logs:
        engine = build.build_engine(options, registry)

    found = {log["event"]: {key: value for key, value in log.items() if key not in {"event", "log_level"}} for log in logs}
    assert found["drift guard"] == {"action": "stop", "max_relative_error": 0.05, "max_kl": 0.2, "max_hops": 3}
    assert found["drift checks"] == {"rate": 0.5, "per_minute": 60, "bytes": build.check_bytes(engine)}
    assert (engine.config.drift_rate, engine.config.drift_checks_per_minute, engine.cache.policy.max_hops) == (0.5, 60, 3)
    assert registry.get_sample_value("mamba_checkpoint_guard_mode", {"cache": "default", "mode": "normal"}) == 1
    ceilings = {
        kind: registry.get_sample_value("mamba_checkpoint_drift_budget", {"cache": "default", "kind": kind})
        for kind in ("relative_error", "kl_nats")
    }
    assert ceilings == {"relative_error": 0.05, "kl_nats": 0.2}
    pool = engine._checks._recomputation._pool
    held = sum(tensor.nbytes for tensor in (pool.state, *pool.side.values()))
    assert build.check_bytes(engine) == held + 512 * engine.kv_store.bytes_per_slot


def test_no_guard_and_no_checks_on_demand() -> None:
    """``guard`` off and a rate of 0 leave the cache without either, and the log says so."""
    registry = CollectorRegistry()
    with capture_logs() as logs:
        engine = build.build_engine(ServeOptions(drift_rate=0.0, guard="off"), registry)

    found = {log["event"]: log for log in logs}
    assert (found["drift guard"]["action"], found["drift checks"]["rate"]) == ("off", 0)
    assert registry.get_sample_value("mamba_checkpoint_guard_mode", {"cache": "default", "mode": "normal"}) is None
    assert registry.get_sample_value("mamba_checkpoint_drift_budget", {"cache": "default", "kind": "kl_nats"}) is None
    assert engine._checks._recomputation is None

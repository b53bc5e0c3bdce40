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
    loaded = LoadedModel("tiny", real_model().model, ByteTokens(), 512, trained=False)
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
        build._announce(stand_in, build.load_model(None))

    found = {log["event"]: log for log in logs}
    assert "random" in found["model"]["weights"]
    assert (found["continuation probe"]["found"], found["continuation probe"]["log_level"]) == ("as found", level)
    pools = found["pools"]
    assert (pools["codec"], pools["checkpoint_slots"]) == ("int8", 5)
    assert pools["pool_bytes"] == 6 * pools["checkpoint_bytes"] < 6 * pools["native_bytes"]

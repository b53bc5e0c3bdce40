"""What is scraped is the truth: after any sequence of calls on a real cache, and when nothing is left."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import generate_latest
from test_stateful import Exact, GuardedMachine, Machine, try_many

from mamba_checkpoint_cache import ActivePool, CheckpointPool, PrefixCache, StateSpec, Telemetry
from mamba_checkpoint_cache.codec import CODEC_NAMES
from mamba_checkpoint_cache.serving.scrape import Scrape
from mamba_checkpoint_cache.slots import SlotState

STATES = ("free", "reserved", "evictable", "locked")


def tensors_of(pool: ActivePool | CheckpointPool) -> list[torch.Tensor]:
    """All tensors of a pool, each ``[num_layers, rows, …]``."""
    return [*([pool.state] if isinstance(pool, ActivePool) else pool.stored.values()), *pool.side.values()]


def row_bytes(tensors: list[torch.Tensor], row: int) -> int:
    """What torch says that one slot takes."""
    return sum(tensor[:, row].nbytes for tensor in tensors)


def check_gauges(cache: PrefixCache, scrape: Scrape) -> None:
    """Slots and bytes as they are in the text, against the handles, row by row."""
    native = tensors_of(cache.active)
    for pool in (cache.active, cache.checkpoints):
        name, capacity, own = pool.slots.pool, pool.slots.capacity, tensors_of(pool)
        states = [pool.slots._states[row] for row in range(1, capacity + 1)]
        counts = scrape.by("slots", "state", pool=name)
        assert counts == {label: states.count(state) for label, state in zip(STATES, SlotState, strict=True)}
        assert sum(counts.values()) == scrape.value("slot_capacity", pool=name) == capacity == own[0].shape[1] - 1

        used = [SlotState.LOCKED] if pool is cache.active else [SlotState.EVICTABLE, SlotState.LOCKED]
        rows = [row for row, state in enumerate(states, 1) if state in used]
        assert scrape.by("bytes", "kind", pool=name) == {
            "reserved": sum(tensor.nbytes for tensor in own),
            "occupied": sum(row_bytes(own, row) for row in rows),
            "native_equivalent": len(rows) * row_bytes(native, 1),
        }


class Truth(Exact):
    """The judge who also reads what Prometheus would, and asks torch for the bytes."""

    def check_telemetry(self) -> None:
        super().check_telemetry()
        check_gauges(self.cache, Scrape(generate_latest(self.telemetry.registry).decode()))


class TruthMachine(Machine):
    judge_type = Truth

    def teardown(self) -> None:
        """Everything is freed, no further call is made, and only then is there a scrape."""
        if not hasattr(self, "judge"):
            return
        close, self.cache.close = self.cache.close, lambda: None
        super().teardown()
        scrape = Scrape(generate_latest(self.judge.telemetry.registry).decode())
        for pool in (self.cache.active, self.cache.checkpoints):
            counts = scrape.by("slots", "state", pool=pool.slots.pool)
            assert counts == {"free": pool.slots.capacity, "reserved": 0, "evictable": 0, "locked": 0}
            assert scrape.value("bytes", pool=pool.slots.pool, kind="occupied") == 0
            assert scrape.value("bytes", pool=pool.slots.pool, kind="native_equivalent") == 0
        assert scrape.value("telemetry_errors_total") == 0
        close()


class GuardedTruthMachine(TruthMachine, GuardedMachine):
    pass


MACHINES = pytest.mark.parametrize("machine", [TruthMachine, GuardedTruthMachine])


@MACHINES
def test_after_any_calls_what_is_scraped_is_what_is_there(machine: type[Machine]) -> None:
    """Slot states add up to the pool, counters equal a brute-force count, bytes are what torch says; freed is freed at once."""
    try_many(machine, 25, 30)


@pytest.mark.slow
@MACHINES
def test_after_many_calls_what_is_scraped_is_what_is_there(machine: type[Machine]) -> None:
    """The same, longer and more of it."""
    try_many(machine, 250, 60)


def test_layers_are_counted_by_format_from_the_first_scrape() -> None:
    """Every format there is, at 0 if no layer has it; and as the pool is laid out now."""
    telemetry, spec = Telemetry(), StateSpec(5, 1, 2, 2)
    pool = CheckpointPool(spec, 3, codec="int8,1=none")
    cache = PrefixCache(active=ActivePool(spec, 1), checkpoints=pool, telemetry=telemetry)

    first = Scrape(generate_latest(telemetry.registry).decode()).by("layers", "codec")
    pool.relayout("int8,0-2=none")
    second = Scrape(generate_latest(telemetry.registry).decode()).by("layers", "codec")

    assert first == dict.fromkeys(CODEC_NAMES, 0) | {"int8": 4, "none": 1}
    assert second == dict.fromkeys(CODEC_NAMES, 0) | {"int8": 2, "none": 3}
    cache.close()

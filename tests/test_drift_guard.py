from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Guard

from mamba_checkpoint_cache import DriftBudget, DriftGuard
from mamba_checkpoint_cache.drift.guard import GuardChange

BUDGET = DriftBudget(window=4, checks=2, recover_after=20)
LAYERS = frozenset(range(3))


def watching(budget: DriftBudget = BUDGET, action: str = "native") -> DriftGuard:
    """A guard of a cache whose states have three layers."""
    guard = DriftGuard(budget, action)
    guard.layers = LAYERS
    return guard


def degraded(guard: DriftGuard) -> DriftGuard:
    for _ in range(guard.budget.window):
        guard.compression(LAYERS)
    assert guard.mode != "normal"
    return guard


def commits_to_recover(guard: DriftGuard, *, good: bool = True) -> int:
    """Commits until the guard is back to normal, when each trial is read at the next one."""
    unread = False
    for commits in range(1, 100_000):
        if guard.commit():
            return commits
        if guard.trial_due:
            if unread:
                guard.trial(within=good)
            unread = True
    raise AssertionError("never recovered")


@pytest.mark.parametrize(
    ("over", "at"),
    [
        ([1, 1, 1, 1], 4),
        ([0, 0, 1, 1], 4),
        ([1, 1, 0, 0], 4),
        ([0, 0, 0, 1, 0, 0, 0, 1], None),
        ([1, 0, 0, 0, 1, 0, 0, 0], None),
        ([0, 0, 0, 0, 1, 0, 1], 7),
        ([1, 1, 1], None),
    ],
)
def test_half_of_a_full_window_is_too_long(over, at):
    """It degrades at the very compression that makes it as many over budget as within, and never before the window is full."""
    guard = watching()

    changes = [guard.compression(LAYERS if bad else ()) for bad in over]

    assert [i for i, change in enumerate(changes, 1) if change] == ([at] if at else [])
    assert guard.mode == ("native" if at else "normal")


def test_a_window_of_an_odd_length_asks_for_more_than_half():
    """Half of five is three: two are not enough."""
    guard = watching(DriftBudget(window=5))

    for bad in (1, 0, 1, 0, 0):
        assert guard.compression(LAYERS if bad else ()) is None
    guard = watching(DriftBudget(window=5))
    assert [guard.compression(LAYERS if bad else ()) is None for bad in (1, 0, 1, 0, 1)] == [True] * 4 + [False]


def test_logit_checks_have_a_window_of_their_own():
    """Checks and compressions don't mix: each is over budget for itself."""
    guard = watching()

    for _ in range(3):
        assert guard.compression(LAYERS) is None
    assert guard.check(within=False) is None
    assert guard.check(within=True) == GuardChange("native", "checks", 0)


@pytest.mark.parametrize(("action", "mode"), [("native", "native"), ("stop", "stopped")])
def test_the_action_says_what_follows(action, mode):
    """A change says where to, why, and after how many commits."""
    guard = watching(action=action)
    for _ in range(7):
        guard.commit()

    changes = [guard.compression(LAYERS) for _ in range(4)]

    assert changes == [None, None, None, GuardChange(mode, "compressions", 7)]
    assert guard.mode == mode


def test_an_unknown_action_is_refused():
    """At construction, with those that there are."""
    with pytest.raises(ValueError, match=r"expected a guard's action out of \('native', 'stop'\), got 'panic'"):
        DriftGuard(action="panic")


def test_while_degraded_only_trials_count():
    """What is stored then is not the codec's: neither its compressions nor its checks say anything of it."""
    guard = degraded(watching())

    assert not any(guard.compression(LAYERS) or guard.check(within=False) for _ in range(100))
    assert commits_to_recover(guard) == 20
    for _ in range(3):
        assert guard.compression(LAYERS) is None, "a new window starts empty"


@pytest.mark.parametrize(("window", "recover_after"), [(4, 20), (32, 256), (1, 3), (8, 10), (32, 100)])
def test_back_to_normal_as_soon_as_the_shortest_wait_allows(window, recover_after):
    """Trials come often enough that a full window of them has been read when the wait is over."""
    guard = degraded(watching(DriftBudget(window=window, recover_after=recover_after)))

    assert commits_to_recover(guard) == recover_after
    assert guard.mode == "normal"


def test_a_window_longer_than_the_wait_is_waited_for():
    """The wait alone is not enough: a full window of trials must have been read."""
    guard = degraded(watching(DriftBudget(window=32, recover_after=5)))

    assert commits_to_recover(guard) == 34


def test_no_recovery_while_trials_are_over_budget():
    """However long; and one that is over holds it up until it has left the window."""
    guard = degraded(watching())
    for _ in range(1000):
        assert guard.commit() is None
        if guard.trial_due:
            guard.trial(within=False)

    for _ in range(3):
        guard.trial(within=True)
    assert guard.commit() is None
    guard.trial(within=True)
    assert guard.commit() == GuardChange("normal", "trials", 1002)


def test_trials_come_in_degraded_modes_only_and_evenly():
    """One commit in so many, counted from the change."""
    guard = watching()
    assert not any(guard.trial_due for _ in range(50) if guard.commit() is None)
    degraded(guard)

    due = []
    for commit in range(1, 20):
        guard.commit()
        due += [commit] if guard.trial_due else []

    assert due == [3, 6, 9, 12, 15, 18]


def test_a_relapse_doubles_the_wait_up_to_a_cap():
    """Like a circuit breaker: twice as long each time it fails again at once, but never more than sixty-four times."""
    guard = watching()

    waits = [commits_to_recover(degraded(guard)) for _ in range(9)]

    assert waits == [20, 40, 80, 160, 320, 640, 1280, 1280, 1280]


def test_a_codec_that_proved_itself_starts_anew():
    """A full window within budget, and as many commits as the shortest wait: the next degradation is a first one again."""
    guard = watching()
    assert commits_to_recover(degraded(guard)) == 20
    for _ in range(20):
        guard.compression(())
        guard.commit()
    guard.compression(())

    assert commits_to_recover(degraded(guard)) == 20


def test_a_good_window_alone_proves_nothing():
    """It must also last: failing again after fewer commits than the shortest wait doubles it."""
    guard = watching()
    assert commits_to_recover(degraded(guard)) == 20
    for _ in range(19):
        guard.compression(())
        guard.commit()
    guard.compression(())

    assert commits_to_recover(degraded(guard)) == 40


@pytest.mark.parametrize("commits", [19, 10_000])
def test_the_codec_is_proved_by_what_it_failed_on(commits):
    """After a failure by logits, no number of compressions and commits proves it: only checks do, however rare they are."""
    guard = watching()
    guard.check(within=False)
    guard.check(within=False)
    assert commits_to_recover(guard) == 20
    for _ in range(commits):
        guard.compression(())
        guard.commit()
    guard.check(within=False)
    assert guard.check(within=False) == GuardChange("native", "checks", commits)

    assert commits_to_recover(guard) == 40


@pytest.mark.parametrize(
    ("window", "native"),
    [
        ([{2}, {2}, {2}, {2}], {2}),
        ([{2}, {2}, set(), set()], {2}),
        ([{2}, {2}, {2}, {0, 2}], {2}),
        ([{0, 2}, {2}, {0}, {2}], {0, 2}),
        ([{0}, {1}, {0}, {1}], {0, 1}),
        ([{0}, {1}, {2}, set()], {0, 1}),
        ([{1}, {0}, {2}, {1}], {0, 1}),
        ([{0, 1, 2}, set(), {0, 1, 2}, set()], {0, 1, 2}),
    ],
)
def test_only_the_layers_that_drift_are_kept_native(window, native):
    """Those most often over budget, the first of equals, and no more than it takes to be within it for most of the window."""
    guard = watching()

    changes = [guard.compression(over) for over in window]

    assert [change and change.to for change in changes] == [None, None, None, "native"]
    assert (guard.native, guard.compressed) == (native, LAYERS - native)


def test_further_layers_may_follow():
    """In a window of their own; the wait starts anew and is as long as before, and all come back together."""
    guard = watching()
    for _ in range(4):
        guard.compression({2})
    for _ in range(7):
        guard.commit()

    changes = [guard.compression({0, 2}) for _ in range(4)]

    assert changes == [None, None, None, GuardChange("native", "compressions", 7)]
    assert guard.native == {0, 2}
    assert commits_to_recover(guard) == 20
    assert (guard.mode, guard.native) == ("normal", frozenset())


def test_a_layer_that_follows_is_no_relapse():
    """Only a codec that fails again after it was back waits longer, however many layers it loses one after the other."""
    guard = watching()
    assert commits_to_recover(degraded(guard)) == 20

    for layer in range(3):
        for _ in range(4):
            guard.compression({layer})

    assert guard.native == LAYERS
    assert commits_to_recover(guard) == 40


def test_a_layer_that_is_native_already_is_over_nothing():
    """A compression that only tells of what is native counts as within budget."""
    guard = watching()
    for _ in range(4):
        guard.compression({2})

    assert not any(guard.compression({2}) for _ in range(50))
    assert guard.native == {2}


def test_logits_blame_all_layers_that_are_left():
    """A check says that answers drift and not why, whether or not some layers are native already."""
    for before in (0, 4):
        guard = watching()
        for _ in range(before):
            guard.compression({1})
        guard.check(within=False)

        assert guard.check(within=False) == GuardChange("native", "checks", 0)
        assert (guard.native, guard.compressed) == (LAYERS, frozenset())


def test_to_stop_is_to_stop_all():
    """Where nothing may be kept native, one layer that drifts takes the others along."""
    guard = watching(action="stop")
    for _ in range(4):
        guard.compression({2})

    assert (guard.mode, guard.native, guard.compressed) == ("stopped", frozenset(), frozenset())


events = st.lists(
    st.tuples(
        st.sampled_from(["compression", "check", "trial", "commit"]),
        st.booleans(),
        st.frozensets(st.sampled_from(sorted(LAYERS))),
        st.integers(1, 6),
    ),
    max_size=60,
)


@given(events=events, window=st.integers(1, 5), checks=st.integers(1, 3), recover_after=st.integers(1, 8), native=st.booleans())
def test_any_sequence_of_calls_does_what_the_rules_say(events, window, checks, recover_after, native):
    """Against the rules spelled out over everything that has happened since the last change; and a twin changes alike."""
    budget, action = DriftBudget(window=window, checks=checks, recover_after=recover_after), "native" if native else "stop"
    guard, twin = watching(budget, action), watching(budget, action)
    rules = Guard(window, checks, recover_after, "native" if native else "stopped", LAYERS)
    for kind, good, over, times in events:
        for _ in range(times):
            arguments = {"compression": (over,), "commit": ()}.get(kind, (good,))
            commits = rules.commits + (kind == "commit")
            change = getattr(guard, kind)(*arguments)

            assert getattr(twin, kind)(*arguments) == change
            mode = rules.hear(kind, good, over)
            assert (change and (change.to, change.commits)) == ((mode, commits) if mode else None)
            assert (guard.mode, guard.native, guard.trial_due) == (rules.mode, rules.native, rules.trial_due)

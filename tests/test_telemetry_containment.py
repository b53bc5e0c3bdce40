"""Where telemetry's own failures end."""

from __future__ import annotations

import pytest

from mamba_checkpoint_cache.telemetry.containment import Containment


def test_an_exception_is_reported_and_goes_no_further() -> None:
    """The block ends at the failure, the code after it runs, and the exception itself is handed over."""
    seen: list[Exception] = []
    contained = Containment(seen.append)
    steps = []
    error = KeyError("x")

    with contained:
        steps.append("before")
        raise error
    steps.append("after")  # type: ignore[unreachable]

    assert steps == ["before", "after"]
    assert seen == [error]


def test_it_nests() -> None:
    """One object serves blocks inside each other, each ending alone."""
    seen: list[Exception] = []
    contained = Containment(seen.append)

    with contained:
        with contained:
            raise KeyError
        raise ValueError  # type: ignore[unreachable]

    assert [type(error) for error in seen] == [KeyError, ValueError]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_passes_through(interrupt: type[BaseException]) -> None:
    """Ctrl-C is not a failure of telemetry."""
    with pytest.raises(interrupt), Containment(pytest.fail):
        raise interrupt

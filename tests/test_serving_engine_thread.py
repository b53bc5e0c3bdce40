"""The engine's thread."""

from __future__ import annotations

import threading
import time
from http import HTTPStatus

import pytest
from hash_model import HashModel, assert_clean, expected, greedy, hash_engine

from mamba_checkpoint_cache.serving.engine import Engine
from mamba_checkpoint_cache.serving.engine_thread import EngineThread
from mamba_checkpoint_cache.serving.request import Request


@pytest.fixture
def thread():
    thread = EngineThread(hash_engine)
    thread.start()
    yield thread
    assert thread.stop(5)


def submit(thread: EngineThread, prompt: list[int], count: int) -> tuple[Request, threading.Event]:
    ended = threading.Event()
    request = Request(prompt, greedy(count), notify=lambda: ended.set() if request.finish else None)
    thread.submit(request)
    return request, ended


def test_requests_from_many_threads_all_end(thread: EngineThread) -> None:
    """Whatever threads hand requests over, each gets its own output."""
    results: list[tuple[int, Request, threading.Event]] = []
    callers = [threading.Thread(target=lambda n=n: results.append((n, *submit(thread, [n, n], 6)))) for n in range(20)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    assert all(ended.wait(10) for _, _, ended in results)
    assert all(request.output == expected([n, n], 6) for n, request, _ in results)
    thread.call(assert_clean).result(5)


def test_everything_happens_on_one_thread(thread: EngineThread) -> None:
    """The engine is built, stepped and called on the same thread, which is none of ours."""
    names = {thread.call(lambda engine: threading.current_thread().name).result(5)}
    ended = threading.Event()
    request = Request([1], greedy(2), notify=lambda: (names.add(threading.current_thread().name), ended.set()))
    thread.submit(request)

    assert ended.wait(5)
    assert names == {"engine"}


def test_what_can_never_run_is_told_so(thread: EngineThread) -> None:
    """A prompt that the engine refuses ends with 400, and the engine goes on."""
    request, ended = submit(thread, [], 1)

    assert ended.wait(5)
    assert (request.finish.status, "empty" in request.finish.message) == (HTTPStatus.BAD_REQUEST, True)
    thread.call(assert_clean).result(5)


def test_an_abort_takes_effect(thread: EngineThread) -> None:
    """A request that is aborted ends as such, while it waits or runs."""
    request, ended = submit(thread, [1], 120)
    thread.abort(request)

    assert ended.wait(5)
    assert request.finish.reason in {"abort", "length"}
    thread.call(assert_clean).result(5)


def test_what_a_call_raises_is_the_callers(thread: EngineThread) -> None:
    """An exception in a call comes out of its future, and the engine goes on."""
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 / 0).result(5)

    assert isinstance(thread.call(lambda engine: engine).result(5), Engine)


def test_what_the_build_raises_comes_out_of_ready() -> None:
    """A build that fails is reported, and the thread ends."""
    thread = EngineThread(lambda: hash_engine(HashModel(), kv_slots=1))
    thread.start()

    with pytest.raises(ValueError, match="kv_slots"):
        thread.ready.result(5)
    assert thread.stop(5)


def test_a_step_that_fails_as_a_whole_is_survived(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault outside any request is logged and the next step is tried."""
    engine = thread.ready.result(5)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "turn", lambda: 1 / 0)
        request, ended = submit(thread, [5], 3)
        time.sleep(0.2)
        assert not ended.is_set()

    assert ended.wait(5)
    assert request.output == expected([5], 3)

# SPDX-License-Identifier: Apache-2.0
"""Supervised threads: failed work is logged, counted and restarted; threads that are stuck or keep
failing are reported.
"""

import threading

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.system import threads
from kbpf.kernel.system.threads import SupervisedThread
from kbpf.model.status import ThreadView
from tests.support.lab.lab import PATIENCE, until


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(threads, "MIN_RESTART_BACKOFF_S", 0.001)
    monkeypatch.setattr(threads, "MAX_RESTART_BACKOFF_S", 0.002)


def state_of(name: str) -> ThreadView:
    return next(one for one in threads.list_threads() if one.name == name)


def test_failed_work_is_restarted_and_logged(caplog):
    tries, stop = [], threading.Event()

    def work() -> None:
        tries.append(1)
        if len(tries) < 4:
            raise ValueError("on purpose")
        stop.wait(PATIENCE)

    thread = threads.start("t-fails", work)
    until("it works", lambda: len(tries) == 4)
    state = state_of("t-fails")
    assert (state.alive, state.restarts, state.problem) == (True, 3, "")
    failures = [one for one in caplog.records if "name=t-fails" in one.message]
    assert len(failures) == 3
    assert all(one.exc_info and "on purpose" in str(one.exc_info[1]) for one in failures)
    stop.set()
    assert thread.stop(PATIENCE)
    assert "t-fails" not in {one.name for one in threads.list_threads()}


def test_work_that_keeps_failing_is_reported_until_it_recovers(monkeypatch):
    now = [0.0]
    go_on, stop = threading.Event(), threading.Event()

    def work() -> None:
        now[0] += 20
        if not go_on.is_set():
            raise ValueError("on purpose")
        while not stop.wait(0.001):
            threads.heartbeat()

    thread = SupervisedThread("t-again", work, clock=lambda: now[0])
    thread.start()
    until("it is reported", lambda: "thread t-again" in " ".join(threads.list_problems()))
    assert state_of("t-again").problem == "it keeps failing: ValueError: on purpose"
    go_on.set()
    until("it works", lambda: thread.get_state().restarts and not stop.is_set() and go_on.is_set())
    now[0] += threads.FAILURE_RESET_S
    until("it is no longer reported", lambda: not thread.get_state().problem)
    stop.set()
    assert thread.stop(PATIENCE)


def test_a_thread_without_progress_is_reported():
    now, turns, stop = [0.0], threading.Semaphore(0), threading.Event()
    has_begun = threading.Event()

    def work() -> None:
        has_begun.set()
        while not stop.is_set():
            turns.acquire()
            threads.heartbeat()

    thread = SupervisedThread("t-stuck", work, limit=30, clock=lambda: now[0])
    thread.start()
    assert has_begun.wait(PATIENCE)
    now[0] = 31
    assert threads.list_problems() == ("thread t-stuck: no progress for 31 s",)
    turns.release()
    until("it makes progress", lambda: not threads.list_problems())
    stop.set()
    turns.release()
    assert thread.stop(PATIENCE)


def test_a_thread_that_cannot_start_is_an_error(monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(KernelError, match="cannot start the thread t-none"):
        threads.start("t-none", lambda: None)
    assert not [one for one in threads.list_threads() if one.name == "t-none"]

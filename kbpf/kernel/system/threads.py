# SPDX-License-Identifier: Apache-2.0
"""Supervised threads of the agent, and the table of all of them.

If the work of a thread raises, this is logged with a traceback and the work starts again after an
exponential backoff; the thread itself continues. Work that returns is done. Each iteration of a
loop calls heartbeat(): a thread with a limit that makes no progress for that long counts as stuck
and fails /livez.
"""

import logging
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.system.polling import Backoff
from kbpf.model.status import ThreadView

log = logging.getLogger("kbpf.threads")

MIN_RESTART_BACKOFF_S: Final = 0.1
MAX_RESTART_BACKOFF_S: Final = 30.0
FAILURE_RESET_S: Final = 60.0
"""A failure is forgotten after this long without another one. Longer than the longest backoff."""

FAILING_LIMIT_S: Final = 60.0
"""A thread whose work has kept failing for this long counts as down."""


class SupervisedThread:
    """A thread that is started once and then stopped. `target` must return soon after its owner
    tells it to stop. `limit`: how many seconds it may take between two heartbeats, 0: unlimited.
    """

    def __init__(
        self, name: str, target: Callable[[], None], limit: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._target, self._limit, self._clock = name, target, limit, clock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = threading.Event()
        self._last_beat = clock()
        self._restarts = 0
        self._failing_since: float | None = None
        self._last_failure = 0.0
        self._error = ""

    def start(self) -> None:
        """Starts the thread. Raises KernelError if the limit of threads is reached."""
        self.record_progress()
        with _lock:
            _table.append(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._unregister()
            raise KernelError(
                f"cannot start the thread {self.name}",
                hint="raise the limit of tasks (pids.max of the cgroup, ulimit -u)",
            ) from error

    def stop(self, timeout: float = 1.0) -> bool:
        """Waits for the thread's end; returns whether it has ended. The work is not started again.
        The caller must have made it stop: this method only waits.
        """
        self._stopping.set()
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout)
        self._unregister()
        return not self._thread.is_alive()

    def get_state(self) -> ThreadView:
        idle, alive = self._clock() - self._last_beat, self._thread.is_alive()
        return ThreadView(self.name, alive, round(idle, 1), self._restarts, self._describe_problem(idle))

    def _describe_problem(self, idle: float) -> str:
        failing = self._failing_since
        if not self._thread.is_alive():
            return "it is not running"
        if failing is not None and self._clock() - failing >= FAILING_LIMIT_S:
            return f"it keeps failing: {self._error}"
        if self._limit and idle >= self._limit:
            return f"no progress for {idle:.0f} s"
        return ""

    def _run(self) -> None:
        _current.thread = self
        backoff = Backoff(MIN_RESTART_BACKOFF_S, MAX_RESTART_BACKOFF_S)
        while not self._stopping.is_set():
            self.record_progress()
            try:
                self._target()
                break
            except Exception as error:
                self._error, self._last_failure = f"{type(error).__name__}: {error}", self._clock()
                if self._failing_since is None:  # the first failure after a good time
                    self._failing_since, backoff.tries = self._last_failure, 0
                delay = backoff.next_delay()
                log.exception("thread failed, restarting it name=%s in=%.1fs", self.name, delay)
            self._stopping.wait(delay)
            self._restarts += 1
        self._unregister()

    def _unregister(self) -> None:
        with _lock:
            if self in _table:
                _table.remove(self)

    def record_progress(self) -> None:
        """Resets the idle time. Called in each iteration of the work."""
        # Without a lock: only this thread writes, and others read one float or None at a time.
        self._last_beat = self._clock()
        if self._failing_since is not None and self._last_beat - self._last_failure >= FAILURE_RESET_S:
            self._failing_since = None


_lock = threading.Lock()
_table: list[SupervisedThread] = []
_current = threading.local()


def start(name: str, target: Callable[[], None], limit: float = 0.0) -> SupervisedThread:
    """Creates and starts a supervised thread."""
    thread = SupervisedThread(name, target, limit)
    thread.start()
    return thread


def heartbeat() -> None:
    """Records progress of the calling thread, if it is supervised."""
    thread: SupervisedThread | None = getattr(_current, "thread", None)
    if thread is not None:
        thread.record_progress()


def list_threads() -> tuple[ThreadView, ...]:
    """The states of all supervised threads, by name."""
    with _lock:
        threads = list(_table)
    return tuple(sorted((thread.get_state() for thread in threads), key=attrgetter("name")))


def list_problems() -> tuple[str, ...]:
    """A line for each thread that is down or stuck."""
    return tuple(f"thread {thread.name}: {thread.problem}" for thread in list_threads() if thread.problem)

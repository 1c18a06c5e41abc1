"""The threads of the agent: each is supervised, and all are in one table.

What a thread does may fail; the thread does not end by it. The failure is logged with its
traceback, and the work begins again after a pause that doubles. Work that returns is done. Each
turn of a loop calls beat(): a thread that has a limit and does not beat for that long is stuck, and
/livez says so.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from kbpf.errors import KernelError

log = logging.getLogger("kbpf.threads")

MIN_RESTART_BACKOFF_S: Final = 0.1
MAX_RESTART_BACKOFF_S: Final = 30.0
FAILURE_RESET_S: Final = 60.0
"""A failure is forgotten after this long without another one. More than the longest pause."""

FAILING_LIMIT_S: Final = 60.0
"""A thread whose work has failed again and again for this long counts as down."""


class ThreadState(NamedTuple):
    """A thread in the table. `idle`: seconds since its last beat. `limit`: seconds that it may go
    without one, 0: any. `restarts`: how often its work began again. `problem`: why it counts as
    down, or "".
    """

    name: str
    alive: bool
    idle: float
    limit: float
    restarts: int
    problem: str


class SupervisedThread:
    """One thread. start() once, then stop(). `work` returns soon after its owner asks it to."""

    def __init__(
        self,
        name: str,
        target: Callable[[], None],
        limit: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._target, self._limit, self._clock = name, target, limit, clock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = threading.Event()
        self._last_beat = clock()
        self._restarts = 0
        self._failing_since: float | None = None
        self._last_failure = 0.0  # when it failed last
        self._error = ""

    def start(self) -> None:
        """Begins. KernelError if the system gives no more threads."""
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
        """Does not begin the work again, and waits for its end; whether it has ended. The owner has
        told the work to end.
        """
        self._stopping.set()
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout)
        self._unregister()
        return not self._thread.is_alive()

    def get_state(self) -> ThreadState:
        """How it is doing."""
        idle = self._clock() - self._last_beat
        return ThreadState(
            self.name, self._thread.is_alive(), idle, self._limit, self._restarts,
            self._describe_problem(idle),
        )  # fmt: skip

    def _describe_problem(self, idle: float) -> str:
        failing = self._failing_since
        if not self._thread.is_alive():
            return "it has ended"
        if failing is not None and self._clock() - failing >= FAILING_LIMIT_S:
            return f"it fails again and again: {self._error}"
        if self._limit and idle >= self._limit:
            return f"no progress for {idle:.0f} s"
        return ""

    def _run(self) -> None:
        _current.thread = self
        backoff = MIN_RESTART_BACKOFF_S
        while not self._stopping.is_set():
            self.record_progress()
            try:
                self._target()
                break
            except Exception as error:
                self._error, self._last_failure = f"{type(error).__name__}: {error}", self._clock()
                if self._failing_since is None:
                    self._failing_since, backoff = self._last_failure, MIN_RESTART_BACKOFF_S
                log.exception("thread failed, starting again name=%s in=%.1fs", self.name, backoff)
            self._stopping.wait(backoff)
            self._restarts += 1
            backoff = min(2 * backoff, MAX_RESTART_BACKOFF_S)
        self._unregister()

    def _unregister(self) -> None:
        with _lock:
            if self in _table:
                _table.remove(self)

    def record_progress(self) -> None:
        """The work has done a turn."""
        self._last_beat = self._clock()
        if (
            self._failing_since is not None
            and self._last_beat - self._last_failure >= FAILURE_RESET_S
        ):
            self._failing_since = None


_lock = threading.Lock()
_table: list[SupervisedThread] = []
_current = threading.local()


def start(name: str, target: Callable[[], None], limit: float = 0.0) -> SupervisedThread:
    """A new thread, started."""
    thread = SupervisedThread(name, target, limit)
    thread.start()
    return thread


def heartbeat() -> None:
    """Says that the calling thread makes progress, if it is one of ours."""
    thread: SupervisedThread | None = getattr(_current, "thread", None)
    if thread is not None:
        thread.record_progress()


def list_threads() -> tuple[ThreadState, ...]:
    """All threads that run, or should, by name."""
    with _lock:
        threads = list(_table)
    return tuple(sorted(thread.get_state() for thread in threads))


def list_problems() -> tuple[str, ...]:
    """The threads that are down or stuck, a line each."""
    return tuple(
        f"thread {thread.name}: {thread.problem}" for thread in list_threads() if thread.problem
    )

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

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 60.0
"""A failure is forgotten after this long without another one. More than the longest pause."""

FAILING_SECONDS: Final = 60.0
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


class Supervised:
    """One thread. start() once, then stop(). `work` returns soon after its owner asks it to."""

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        limit: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._work, self._limit, self._clock = name, work, limit, clock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = threading.Event()
        self._beat = clock()
        self._restarts = 0
        self._failing_since: float | None = None
        self._failed = 0.0  # when it failed last
        self._error = ""

    def start(self) -> None:
        """Begins. KernelError if the system gives no more threads."""
        with _lock:
            _table.append(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._leave()
            raise KernelError(
                f"cannot start the thread {self.name}",
                hint="raise the limit of tasks (pids.max of the cgroup, ulimit -u)",
            ) from error

    def stop(self, seconds: float = 1.0) -> bool:
        """Does not begin the work again, and waits for its end; whether it has ended. The owner has
        told the work to end.
        """
        self._stopping.set()
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(seconds)
        self._leave()
        return not self._thread.is_alive()

    def state(self) -> ThreadState:
        """How it is doing."""
        idle = self._clock() - self._beat
        return ThreadState(
            self.name, self._thread.is_alive(), idle, self._limit, self._restarts,
            self._problem(idle),
        )  # fmt: skip

    def _problem(self, idle: float) -> str:
        failing = self._failing_since
        if not self._thread.is_alive():
            return "it has ended"
        if failing is not None and self._clock() - failing >= FAILING_SECONDS:
            return f"it fails again and again: {self._error}"
        if self._limit and idle >= self._limit:
            return f"no progress for {idle:.0f} s"
        return ""

    def _run(self) -> None:
        _current.thread = self
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            self.progress()
            try:
                self._work()
                break
            except Exception as error:
                self._error, self._failed = f"{type(error).__name__}: {error}", self._clock()
                if self._failing_since is None:
                    self._failing_since, pause = self._failed, FIRST_PAUSE_SECONDS
                log.exception("thread failed, starting again name=%s in=%.1fs", self.name, pause)
            self._stopping.wait(pause)
            self._restarts += 1
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._leave()

    def _leave(self) -> None:
        with _lock:
            if self in _table:
                _table.remove(self)

    def progress(self) -> None:
        """The work has done a turn."""
        self._beat = self._clock()
        if self._failing_since is not None and self._beat - self._failed >= STEADY_SECONDS:
            self._failing_since = None


_lock = threading.Lock()
_table: list[Supervised] = []
_current = threading.local()


def start(name: str, work: Callable[[], None], limit: float = 0.0) -> Supervised:
    """A new thread, started."""
    made = Supervised(name, work, limit)
    made.start()
    return made


def beat() -> None:
    """Says that the calling thread makes progress, if it is one of ours."""
    thread: Supervised | None = getattr(_current, "thread", None)
    if thread is not None:
        thread.progress()


def table() -> tuple[ThreadState, ...]:
    """All threads that run, or should, by name."""
    with _lock:
        threads = list(_table)
    return tuple(sorted(thread.state() for thread in threads))


def problems() -> tuple[str, ...]:
    """The threads that are down or stuck, a line each."""
    return tuple(f"thread {one.name}: {one.problem}" for one in table() if one.problem)

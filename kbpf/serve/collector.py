"""Counting behind the page: what takes long to count is not counted while somebody waits for it.

The thread `counting` counts connections and what they came to, and leaves the lines of it for
whoever makes a page: a scrape costs what there is to copy, however many connections there are. It
counts again and again while pages are asked for, but never costs more than SHARE of a processor;
when nobody asks it counts each IDLE_SECONDS, since some of what it does is tidying up.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kbpf.errors import KbpfError
from kbpf.kernel.system import threads
from kbpf.model.metrics import Pause, Traffic

log = logging.getLogger("kbpf.serve")

SHARE: Final = 0.005
"""Of a processor's time: nothing is counted again before it has cost no more."""

INTERVAL_SECONDS: Final = 5.0
FOLLOW_SECONDS: Final = 120.0
"""So long after a page it goes on counting: the next one will show what was just now."""

IDLE_SECONDS: Final = 300.0
REST: Final = 3.0
"""After each piece of the work it rests for so many times as long, and longer things go first."""

MOST_REST_SECONDS: Final = 0.1


class Counting:
    """See the module. start() and stop() once each; the rest from any thread."""

    def __init__(
        self, count: Callable[[Pause], Traffic], show: Callable[[Traffic], list[str]]
    ) -> None:
        self._count, self._show = count, show
        self._lines = b""
        self._asked, self._stop = threading.Event(), threading.Event()
        self._last = float("-inf")
        self._complaint = ""
        self._thread: threads.Supervised | None = None

    def start(self) -> None:
        """Begins."""
        self._thread = threads.start("counting", self._run)

    def stop(self) -> None:
        """Counts nothing more; back when the thread has ended, or after a second."""
        self._stop.set()
        self._asked.set()
        if self._thread is not None:
            self._thread.stop()

    def lines(self) -> bytes:
        """What was counted last, as lines; empty before anything was. It goes on being counted."""
        self._last = time.monotonic()
        self._asked.set()
        return self._lines

    def count(self, pause: Pause = lambda: None) -> None:
        """Counts now."""
        try:
            found = self._count(pause)
        except KbpfError as error:
            if str(error) != self._complaint:
                log.warning("connections are not counted, trying again: %s", error)
            self._complaint = str(error)
            self._lines = b""
            return
        self._complaint = ""
        pause()
        self._lines = "".join(f"{line}\n" for line in self._show(found)).encode()

    # ---- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            if time.monotonic() - self._last > FOLLOW_SECONDS:
                self._asked.wait(IDLE_SECONDS)
                self._asked.clear()
                if self._stop.is_set():
                    return
            threads.beat()
            start = time.thread_time()
            self.count(_Rests(self._stop).rest)
            cost = time.thread_time() - start
            self._stop.wait(max(INTERVAL_SECONDS, cost / SHARE))


class _Rests:
    """Between pieces of work, so long as they ask for."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._since = time.thread_time()

    def rest(self) -> None:
        """After a piece of work."""
        spent = time.thread_time() - self._since
        self._stop.wait(min(spent * REST, MOST_REST_SECONDS))
        self._since = time.thread_time()

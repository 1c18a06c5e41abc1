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
from kbpf.model.metrics import Pause, TrafficStats

log = logging.getLogger("kbpf.serve")

MAX_CPU_SHARE: Final = 0.005
"""Of a processor's time: nothing is counted again before it has cost no more."""

MIN_COLLECT_INTERVAL_S: Final = 5.0
ACTIVE_AFTER_SCRAPE_S: Final = 120.0
"""So long after a page it goes on counting: the next one will show what was just now."""

IDLE_COLLECT_INTERVAL_S: Final = 300.0
PAUSE_RATIO: Final = 3.0
"""After each piece of the work it rests for so many times as long, and longer things go first."""

MAX_PAUSE_S: Final = 0.1


class BackgroundCollector:
    """See the module. start() and stop() once each; the rest from any thread."""

    def __init__(
        self,
        count_traffic: Callable[[Pause], TrafficStats],
        format_traffic: Callable[[TrafficStats], list[str]],
    ) -> None:
        self._count_traffic, self._format_traffic = count_traffic, format_traffic
        self._lines = b""
        self._wake, self._stop = threading.Event(), threading.Event()
        self._last_scrape = float("-inf")
        self._last_error = ""
        self._thread: threads.SupervisedThread | None = None

    def start(self) -> None:
        """Begins."""
        self._thread = threads.start("counting", self._run)

    def stop(self) -> None:
        """Counts nothing more; back when the thread has ended, or after a second."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.stop()

    def scrape(self) -> bytes:
        """What was counted last, as lines; empty before anything was. It goes on being counted."""
        self._last_scrape = time.monotonic()
        self._wake.set()
        return self._lines

    def collect(self, pause: Pause = lambda: None) -> None:
        """Counts now."""
        try:
            traffic = self._count_traffic(pause)
        except KbpfError as error:
            if str(error) != self._last_error:
                log.warning("connections are not counted, trying again: %s", error)
            self._last_error = str(error)
            self._lines = b""
            return
        self._last_error = ""
        pause()
        self._lines = "".join(f"{line}\n" for line in self._format_traffic(traffic)).encode()

    # ---- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            if time.monotonic() - self._last_scrape > ACTIVE_AFTER_SCRAPE_S:
                self._wake.wait(IDLE_COLLECT_INTERVAL_S)
                self._wake.clear()
                if self._stop.is_set():
                    return
            threads.heartbeat()
            start = time.thread_time()
            self.collect(_Throttle(self._stop).pause)
            cost = time.thread_time() - start
            self._stop.wait(max(MIN_COLLECT_INTERVAL_S, cost / MAX_CPU_SHARE))


class _Throttle:
    """Between pieces of work, so long as they ask for."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._work_start = time.thread_time()

    def pause(self) -> None:
        """After a piece of work."""
        cpu_time = time.thread_time() - self._work_start
        self._stop.wait(min(cpu_time * PAUSE_RATIO, MAX_PAUSE_S))
        self._work_start = time.thread_time()

# SPDX-License-Identifier: Apache-2.0
"""Collects expensive metrics in the background, so that a scrape never waits for them.

The thread `counting` walks the connections, formats the result and stores the lines; a scrape only
copies them, however many connections there are.

While /metrics is being scraped it repeats the walk, using at most MAX_CPU_SHARE of one CPU. When
nothing scrapes, it still runs every IDLE_COLLECT_INTERVAL_S, because walking the maps also cleans
them up.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kbpf.errors import KbpfError, LastError
from kbpf.kernel.system import threads
from kbpf.model.metrics import Pause, TrafficStats

log = logging.getLogger("kbpf.serve")

MAX_CPU_SHARE: Final = 0.005
"""Of the time of one CPU. The next collection is delayed until the average is below it."""

MIN_COLLECT_INTERVAL_S: Final = 5.0
ACTIVE_AFTER_SCRAPE_S: Final = 120.0
"""Collection continues for this long after a scrape, so that the next scrape is recent."""

IDLE_COLLECT_INTERVAL_S: Final = 300.0
PAUSE_RATIO: Final = 3.0
"""After each chunk of work the thread sleeps for this multiple of the CPU time that it took."""

MAX_PAUSE_S: Final = 0.1


class BackgroundCollector:
    """Collects in a separate thread; see the module. Call start() and stop() once each; the other
    methods are thread-safe. `refresh` is called before each collection, and limits its own CPU
    time.
    """

    def __init__(
        self,
        count_traffic: Callable[[Pause], TrafficStats],
        format_traffic: Callable[[TrafficStats], list[str]],
        refresh: Callable[[], None],
    ) -> None:
        self._count_traffic, self._format_traffic = count_traffic, format_traffic
        self._refresh = refresh
        self._lines = b""
        self._wake, self._stop = threading.Event(), threading.Event()
        self._last_scrape = float("-inf")
        self._work_start = 0.0  # of the present chunk, by time.thread_time()
        self._error = LastError()
        self._thread: threads.SupervisedThread | None = None

    def start(self) -> None:
        self._thread = threads.start("counting", self._run)

    def stop(self) -> None:
        """Stops collecting. Returns when the thread has ended, or after one second."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.stop()

    def scrape(self) -> bytes:
        """Returns the lines of the last collection (empty before the first) and keeps collection
        active.
        """
        self._last_scrape = time.monotonic()
        self._wake.set()
        return self._lines

    def collect(self, pause: Pause = lambda: None) -> None:
        """Collects now, in the calling thread."""
        try:
            traffic = self._count_traffic(pause)
        except KbpfError as error:
            if self._error.replace(error):
                log.warning("cannot count connections; retrying: %s", error)
            self._lines = b""
            return
        self._error.replace(None)
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
            self._refresh()
            start = time.thread_time()
            self._work_start = start
            self.collect(self._pause)
            cost = time.thread_time() - start
            self._stop.wait(max(MIN_COLLECT_INTERVAL_S, cost / MAX_CPU_SHARE))

    def _pause(self) -> None:
        """Sleeps after a chunk of work, in proportion to the CPU time that it took."""
        cpu_time = time.thread_time() - self._work_start
        self._stop.wait(min(cpu_time * PAUSE_RATIO, MAX_PAUSE_S))
        self._work_start = time.thread_time()

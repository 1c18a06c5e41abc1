# SPDX-License-Identifier: Apache-2.0
"""Grows maps in slices between other changes, while they are read and written (AgentMaps.grow()).

No change waits for it, except those that do not fit into the old maps.
"""

import logging
import time
from collections.abc import Generator, Mapping
from typing import Final

from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.errors import CapacityError, KbpfError, LastError

log = logging.getLogger("kbpf.dataplane")

COPY_BATCH_ENTRIES: Final = 1_024
"""Entries copied in one piece: about one millisecond."""

GROWTH_POLL_INTERVAL_S: Final = 0.02
"""Interval between two checks whether the maps have grown."""

RETRY_DELAY_S: Final = 1.0
"""Delay before a failed growth is retried."""


class MapGrowth:
    """Grows several maps at a time."""

    def __init__(self, agent_maps: AgentMaps) -> None:
        self._agent_maps = agent_maps
        self._names = ""
        self._steps: Generator[None] | None = None
        self._for_display = False
        self._retry_due = 0.0
        self._error = LastError()  # of the last attempt

    @property
    def is_busy(self) -> bool:
        """Whether maps are growing."""
        return self._steps is not None

    def begin(self, sizes: Mapping[str, int], now: float, for_display: bool = False) -> None:
        """Starts a growth, unless one is running or the last one failed less than RETRY_DELAY_S
        ago. `for_display`: no program reads these maps, so any other growth replaces this one.
        """
        if sizes and not for_display:
            self._make_way()
        if not self.is_busy and sizes and now >= self._retry_due:
            self._start(sizes, for_display)

    def _make_way(self) -> None:
        """Abandons a growth that is for display only."""
        if self._for_display:
            self.close()

    def _start(self, sizes: Mapping[str, int], for_display: bool = False) -> None:
        self._for_display = for_display
        self._names = ", ".join(sorted(sizes))
        self._steps = self._agent_maps.grow(sizes, COPY_BATCH_ENTRIES)

    def make_room(self, added: Mapping[str, int], at_once: bool) -> None:
        """Grows the maps that `added` entries would overfill: in the background if the entries
        still fit and not `at_once`, otherwise before it returns.
        """
        if self.is_busy and not self._agent_maps.fits(added):
            self._make_way()
            self.advance(float("inf"))  # if it fails, it is repeated below
        if new_sizes := self._agent_maps.compute_new_sizes(added):
            if at_once or not self._agent_maps.fits(added):
                self.finish(new_sizes)
            else:
                self.begin(new_sizes, time.monotonic())

    def must_wait(self, reserved: Mapping[str, int]) -> bool:
        """Whether the reserved entries have to wait for maps to grow. CapacityError if they cannot
        grow.
        """
        added = {name: count for name, count in reserved.items() if MAPS[name].grows}
        if new_sizes := self._agent_maps.compute_new_sizes(added):
            self.begin(new_sizes, time.monotonic())
        if self._agent_maps.fits(added):
            return False
        if self._error.text:
            raise CapacityError(f"maps cannot grow, retrying: {self._error.text}")
        return True

    def due(self, now: float) -> float | None:
        """When to call advance() (time.monotonic); None if no map is growing."""
        return now if self.is_busy else None

    def advance(self, seconds: float) -> None:
        """Works for this many seconds. An error is logged, and reported by must_wait()."""
        if seconds <= 0:
            return
        end = time.perf_counter() + seconds
        try:
            while self._step() and time.perf_counter() < end:
                pass
        except KbpfError:
            return

    def finish(self, sizes_at_once: Mapping[str, int] | None = None) -> None:
        """Completes the running growth, or with `sizes_at_once` replaces it by one to these sizes.
        Raises KbpfError.
        """
        if sizes_at_once is not None:
            self.close()
            self._start(sizes_at_once)
        while self._step():
            pass

    def close(self) -> None:
        """Abandons a running growth."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _step(self) -> bool:
        """Does one piece of work. Returns whether there is more."""
        if self._steps is None:
            return False
        try:
            if next(self._steps, self) is not self:
                return True
        except KbpfError as error:
            if self._error.replace(error):
                log.error("maps cannot grow, retrying maps=%s: %s", self._names, error)
            self._retry_due = time.monotonic() + RETRY_DELAY_S
            self._steps = None
            raise
        self._steps = None
        self._error.replace(None)
        return False

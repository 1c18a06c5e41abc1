# SPDX-License-Identifier: Apache-2.0
"""Grows maps in the background, while they are read and written. No change waits for it.

1. A thread creates the larger maps and loads the programs over them. This takes some tenths of a
   second and does not need the thread that writes.
2. From then on every write goes to both maps. Existing entries are copied in slices, between other
   changes.
3. The larger maps replace the old ones, and hooks and devices switch to them (attachments.py).

Nothing is visible to readers before step 3, so an earlier failure costs memory only.
"""

import logging
import time
from collections.abc import Generator, Mapping
from typing import Final

from kbpf.dataplane.bpf.attachments import Attachments
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.dataplane.bpf.programs.loader import LoadedPrograms, Programs
from kbpf.errors import KbpfError, KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import threads

log = logging.getLogger("kbpf.dataplane")

COPY_BATCH_ENTRIES: Final = 1_024
"""Entries copied in one piece: about one millisecond."""

GROWTH_TIMEOUT_S: Final = 120.0
"""Creating maps and loading programs takes longer only if the thread is stuck."""

GROWTH_POLL_INTERVAL_S: Final = 0.02
"""Interval between two checks whether the thread is done."""

RETRY_DELAY_S: Final = 1.0
"""Delay before a failed growth is retried."""


class MapGrowth:
    """Grows several maps at a time. Called by one thread."""

    def __init__(self, agent_maps: AgentMaps, attachments: Attachments) -> None:
        self._agent_maps, self._attachments = agent_maps, attachments
        self._sizes: Mapping[str, int] = {}
        self._thread: threads.SupervisedThread | None = None
        self._maps: dict[str, Map] = {}
        self._programs: Mapping[Programs, LoadedPrograms] = {}
        self._outcome: KbpfError | bool = False  # set by the thread: done, or the error
        self._copy_steps: Generator[None] | None = None
        self._retry_due = 0.0
        self.error = ""
        """Why the last attempt failed; "" if it succeeded."""

    @property
    def is_busy(self) -> bool:
        """Whether maps are growing."""
        return bool(self._sizes)

    def begin(self, sizes: Mapping[str, int], now: float) -> None:
        """Starts a growth, unless one is running or the last one failed less than RETRY_DELAY_S
        ago.
        """
        if self._sizes or not sizes or now < self._retry_due:
            return
        self._sizes = sizes
        try:
            self._thread = threads.start("maps", self._make_maps, GROWTH_TIMEOUT_S)
        except KernelError as error:
            self._fail(error)

    def due(self, now: float) -> float | None:
        """When to call advance() (time.monotonic); None if no map is growing."""
        if not self._sizes:
            return None
        return now if self._outcome else now + GROWTH_POLL_INTERVAL_S

    def advance(self, seconds: float) -> None:
        """Works for this many seconds. An error is stored in `error`."""
        if not self._outcome or seconds <= 0:
            return
        end = time.perf_counter() + seconds
        try:
            while not self._step():
                if time.perf_counter() >= end:
                    return
        except KbpfError as error:
            self._fail(error)

    def finish(self, sizes_at_once: Mapping[str, int] | None = None) -> None:
        """Completes the running growth, or with `sizes_at_once` replaces it by one to these sizes.
        Raises KbpfError.
        """
        if sizes_at_once is not None:
            self._abandon()
            self._sizes = sizes_at_once
            self._make_maps()
        try:
            self._wait_for_thread()
            while not self._step():
                pass
        except KbpfError as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """Abandons a running growth."""
        self._abandon()

    def _wait_for_thread(self) -> None:
        end = time.monotonic() + GROWTH_TIMEOUT_S
        while not self._outcome:
            if time.monotonic() >= end:
                names = ", ".join(sorted(self._sizes))
                raise KernelError(f"maps did not grow within {GROWTH_TIMEOUT_S:.0f} s", names)
            time.sleep(0.001)

    def _step(self) -> bool:
        """Does one piece of work. Returns whether the growth is complete."""
        if isinstance(self._outcome, KbpfError):
            raise self._outcome
        if self._copy_steps is None:
            self._stop_thread()
            self._copy_steps = self._agent_maps.copy(self._maps, COPY_BATCH_ENTRIES)
        if next(self._copy_steps, self) is not self:
            return False
        # The copy is complete, and stays so: writes go to both maps until switch().
        maps, self._maps = self._maps, {}
        programs, self._programs = self._programs, {}
        self._sizes, self._copy_steps, self._outcome, self.error = {}, None, False, ""
        self._attachments.invalidate_programs()
        self._agent_maps.switch(maps)
        self._attachments.switch(programs)
        return True

    def _make_maps(self) -> None:
        """Runs in the thread: creates the maps and loads the programs. Sets `_outcome` last; after
        that the other thread may take `_maps` and `_programs`.
        """
        try:
            for name, entries in self._sizes.items():
                self._maps[name] = pinning.make_map(MAPS[name], entries)
                threads.heartbeat()
            self._programs = self._attachments.prepare({**self._agent_maps.maps, **self._maps})
        except KbpfError as error:
            self._outcome = error
        else:
            self._outcome = True

    def _stop_thread(self) -> None:
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.stop(GROWTH_TIMEOUT_S)

    def _fail(self, error: KbpfError) -> None:
        names = ", ".join(sorted(self._sizes))
        if str(error) != self.error:
            log.error("maps cannot grow, retrying maps=%s: %s", names, error)
        self._abandon()
        self.error = str(error)
        self._retry_due = time.monotonic() + RETRY_DELAY_S

    def _abandon(self) -> None:
        """Closes everything that is not in use yet."""
        self._stop_thread()
        self._agent_maps.stop_copying()
        pinning.close_all(self._maps.values())
        pinning.close_all(self._programs.values())
        self._maps, self._programs, self._sizes = {}, {}, {}
        self._copy_steps, self._outcome = None, False

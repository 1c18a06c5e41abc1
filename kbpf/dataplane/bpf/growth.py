"""Maps grow while they are written and read, and no change waits for it.

1. A thread makes the larger maps and loads the programs over them: creating a large map and the
   verifier take some tenths of a second, and neither needs the writer.
2. From here on every write goes to both. The entries that were there before are copied in slices,
   between other changes.
3. The larger maps take the place of the others, and hooks and devices change over (attached.py).

Until the last step nothing has changed for anybody else, so a failure before it only costs room.
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
"""Entries that are copied at a time: about one millisecond."""

GROWTH_TIMEOUT_S: Final = 120.0
"""Making maps and loading programs takes longer only if it is stuck."""

GROWTH_POLL_INTERVAL_S: Final = 0.02
"""The thread is asked this often whether it is done."""

RETRY_DELAY_S: Final = 1.0
"""From a failure to the next attempt."""


class MapGrowth:
    """One growth at a time, of several maps. One thread calls; close() ends it."""

    def __init__(self, agent_maps: AgentMaps, attachments: Attachments) -> None:
        self._agent_maps, self._attachments = agent_maps, attachments
        self._sizes: Mapping[str, int] = {}
        self._thread: threads.SupervisedThread | None = None
        self._maps: dict[str, Map] = {}
        self._programs: Mapping[Programs, LoadedPrograms] = {}
        self._outcome: KbpfError | bool = False  # by the thread: whether it is done, or why not
        self._copy_steps: Generator[None] | None = None
        self._retry_due = 0.0
        self.error = ""
        """Why the last attempt failed; "" after one that succeeded."""

    @property
    def is_busy(self) -> bool:
        """Whether maps are growing."""
        return bool(self._sizes)

    def begin(self, sizes: Mapping[str, int], now: float) -> None:
        """Begins, unless maps are growing already or have failed to a moment ago."""
        if self._sizes or not sizes or now < self._retry_due:
            return
        self._sizes = sizes
        try:
            self._thread = threads.start("maps", self._make_maps, GROWTH_TIMEOUT_S)
        except KernelError as error:
            self._fail(error)

    def due(self, now: float) -> float | None:
        """When to call advance() (time.monotonic); None: there is nothing to do."""
        if not self._sizes:
            return None
        return now if self._outcome else now + GROWTH_POLL_INTERVAL_S

    def advance(self, seconds: float) -> None:
        """Works for this long. A failure is kept in `error`."""
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
        """Completes what has begun, or makes maps of these sizes at once. May raise KbpfError."""
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
        """Gives up what has begun."""
        self._abandon()

    def _wait_for_thread(self) -> None:
        """Waits for the thread."""
        end = time.monotonic() + GROWTH_TIMEOUT_S
        while not self._outcome:
            if time.monotonic() >= end:
                names = ", ".join(sorted(self._sizes))
                raise KernelError(f"no larger maps after {GROWTH_TIMEOUT_S:.0f} s", names)
            time.sleep(0.001)

    def _step(self) -> bool:
        """One piece; whether all is done."""
        if isinstance(self._outcome, KbpfError):
            raise self._outcome
        if self._copy_steps is None:
            self._stop_thread()
            self._copy_steps = self._agent_maps.copy(self._maps, COPY_BATCH_ENTRIES)
        if next(self._copy_steps, self) is not self:
            return False
        maps, self._maps = self._maps, {}
        programs, self._programs = self._programs, {}
        self._sizes, self._copy_steps, self._outcome, self.error = {}, None, False, ""
        self._attachments.invalidate_programs()
        self._agent_maps.switch(maps)
        self._attachments.switch(programs)
        return True

    def _make_maps(self) -> None:
        """What takes long and needs nothing of the writer. In the thread."""
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
            log.error("maps cannot be made larger, trying again maps=%s: %s", names, error)
        self._abandon()
        self.error = str(error)
        self._retry_due = time.monotonic() + RETRY_DELAY_S

    def _abandon(self) -> None:
        """Lets go of what is not in use yet."""
        self._stop_thread()
        self._agent_maps.stop_copying()
        pinning.close_all(self._maps.values())
        pinning.close_all(self._programs.values())
        self._maps, self._programs, self._sizes = {}, {}, {}
        self._copy_steps, self._outcome = None, False

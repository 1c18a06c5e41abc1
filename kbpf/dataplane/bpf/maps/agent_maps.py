# SPDX-License-Identifier: Apache-2.0
"""Writes to the maps of one agent, keeps their fill levels, and resizes them.

A map of which the agent is the only writer grows by copy and switch: during the copy every write
goes to both maps, so the copy is complete. One write then makes all programs read the larger map
(layout.OUTER_MAPS). Both have the same contents at that moment, so the order among maps that refer
to each other does not matter, nor does a reader that still has the old map.
Maps written by programs have the configured size from the start, since being full is normal for
them (layout.SELF_EVICTING_MAPS) or only costs metrics (`counts`). migrate.py handles a change of
their size.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Final

from kbpf.dataplane.bpf.maps import flow_entries, pinning
from kbpf.dataplane.bpf.maps.layout import DOUBTS, MAPS
from kbpf.dataplane.bpf.maps.migrate import MapMigration
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import CapacityError, KbpfError, KernelError, LastError
from kbpf.kernel.bpf.objects import Map
from kbpf.model.config import MapSizes

log = logging.getLogger("kbpf.dataplane")

OVERLAP_FACTOR: Final = 2
"""A map may be this many times as large as its limit while old and new sets coexist."""

BATCH_KEY_BYTES: Final = 1 << 21
"""Batches are written once their keys have this many bytes."""

FLOW_MAPS: Final = frozenset(("flows", "flow_queue"))
"""Tracked connections, and the queue with a key of each."""

SECRET_MARK: Final = b"\xff" * 4
"""The end of the first element of `doubtful_ports` if it has the secret: a time that never comes."""

MAX_FILL: Final = 0.8
"""A map that would be fuller than this is at least doubled."""


class AgentMaps:
    """All maps of one agent. `fill`: the number of entries of those that the agent writes."""

    def __init__(self, pins: Pins, sizes: MapSizes, packet_path: bool = False) -> None:
        self._pins = pins
        self._sizes = sizes
        self._packet_path = packet_path
        self.maps: dict[str, Map] = {}
        self.fill: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()
        self.migration = MapMigration(self.maps)
        self._unpinned: set[str] = set()  # resized maps that programs do not use yet
        self._copies: dict[str, Map] = {}  # larger maps by name; every write goes to them too
        self._copy_error: KernelError | None = None  # since when copies may differ from their maps

    def open(self) -> bool:
        """Opens the pinned maps or creates new ones. Returns whether they were adopted."""
        opened_maps = pinning.open_maps(self._pins, self._sizes, self._packet_path)
        self._unpinned = set()
        self.maps = dict(opened_maps.maps)
        self.migration = MapMigration(self.maps)
        if "flows" in opened_maps.new_maps:
            flow_entries.enable(self.maps)
        self.migration.start(opened_maps.former_maps, queue_is_new="flow_queue" in opened_maps.new_maps)
        sizes = {
            name: spec.initial_entries(self._sizes, self._packet_path)
            for name, spec in MAPS.items()
            if spec.is_fixed_size
        }
        resized_maps = {map_name for map_name, size in sizes.items() if size != self.maps[map_name].max_entries}
        if not resized_maps.isdisjoint(FLOW_MAPS):  # both contain the same keys
            resized_maps |= FLOW_MAPS
        # In the order of MAPS: the new `flow_queue` is filled with the keys of the new `flows`.
        for name, size in sizes.items():
            if name in resized_maps:
                self._resize(name, size)
        self._write_secret()
        return opened_maps.adopted

    def _write_secret(self) -> None:
        """Writes the key of hash_of_backend() (bpf/tc/entries.h), unless the map has one: with another
        key the ports that are in doubt would not be found.
        """
        doubts = self.maps["doubtful_ports"]
        if (doubts.lookup(bytes(4)) or b"")[-len(SECRET_MARK) :] != SECRET_MARK:
            doubts.update(bytes(4), os.urandom(DOUBTS.size - len(SECRET_MARK)) + SECRET_MARK)

    @property
    def pinned(self) -> dict[str, Map]:
        """The maps that have to be pinned now."""
        return {name: map_ for name, map_ in self.maps.items() if name not in self._unpinned}

    def close(self) -> None:
        pinning.close_all(self.maps.values())
        self.migration.close()
        self.maps = {}

    def put(self, name: str, entries: Iterable[tuple[bytes, bytes]], new: int | None = None) -> None:
        """Writes entries; each item may be several entries back to back. `new`: how many of them
        did not exist before (None: all). Writes a batch whenever BATCH_KEY_BYTES of keys are
        collected.
        """
        keys, values = bytearray(), bytearray()
        count = 0
        for key, value in entries:
            keys += key
            values += value
            if len(keys) >= BATCH_KEY_BYTES:
                count += self._put(name, bytes(keys), bytes(values))
                keys, values = bytearray(), bytearray()
        count += self._put(name, bytes(keys), bytes(values))
        self.fill[name] += count if new is None else new

    def _put(self, name: str, keys: bytes, values: bytes) -> int:
        """Writes entries (back to back); returns their number."""
        count = len(keys) // self.maps[name].key_size
        if count == 1:
            self._write(name, lambda map_: map_.update(keys, values))
        elif count:
            self._write(name, lambda map_: map_.update_batch(keys, values))
        if count:
            self.writes[name] += count
        return count

    def delete(self, name: str, keys: Iterable[bytes]) -> None:
        joined = b"".join(keys)
        if joined:
            count = len(joined) // self.maps[name].key_size
            self._write(name, lambda map_: map_.delete_batch(joined))
            self.writes[name] += count
            self.fill[name] -= count

    def _write(self, name: str, write: Callable[[Map], None]) -> None:
        """Writes to a map, and to its copy while it grows. If either write fails they may differ,
        so the growth fails; the change fails only if the map itself was not written.
        """
        try:
            write(self.maps[name])
        except KernelError as error:
            self._copy_error = error
            raise
        if name in self._copies:
            try:
                write(self._copies[name])
            except KernelError as error:
                self._copy_error = error

    def take_counts(self) -> Mapping[str, int]:
        """The number of writes by map since the last call."""
        writes, self.writes = self.writes, Counter()
        return writes

    def max_entries(self, name: str) -> int:
        """The maximum size of this map."""
        return MAPS[name].max_entries(self._sizes)

    def compute_new_sizes(self, added: Mapping[str, int]) -> dict[str, int]:
        """Maps that `added` entries would overfill, and the sizes they need."""
        return {
            name: new_size
            for name, count in added.items()
            if count and (new_size := self._size_for(name, self.fill[name] + count)) > self.maps[name].max_entries
        }

    def _size_for(self, name: str, entries: int) -> int:
        """The size that a map needs for this many entries: its current size, doubled until the
        entries fill at most MAX_FILL of it. The limit is higher while old and new sets coexist.
        """
        size, max_entries = self.maps[name].max_entries, self.max_entries(name)
        if entries > max_entries:
            max_entries *= OVERLAP_FACTOR
        while entries > size * MAX_FILL and size < max_entries:
            size = min(size * 2, max_entries)
        return size

    def fits(self, added: Mapping[str, int]) -> bool:
        """Whether the maps have room for `added` entries."""
        return all(not count or self.fill[name] + count <= self.maps[name].max_entries for name, count in added.items())

    def grow(self, sizes: Mapping[str, int], at_once: int) -> Generator[None]:
        """Replaces maps by larger ones of these sizes, in steps that copy `at_once` entries.
        Meanwhile every write goes to both maps, so copied entries stay current. The same thread
        writes and copies, so no write comes between reading a batch and writing it. Readers see
        nothing before the last step, so an earlier end costs memory only.
        """
        self._copy_error = None
        try:
            for _ in self._fill_copies(sizes, at_once):
                yield
                if self._copy_error is not None:
                    raise self._copy_error
            for name in sizes:
                self._switch(name)
        finally:
            pinning.close_all(self._copies.values())
            self._copies = {}

    def _fill_copies(self, sizes: Mapping[str, int], at_once: int) -> Generator[None]:
        for name, entries in sizes.items():
            self._copies[name] = pinning.make_map(MAPS[name], entries)
            yield
        for name in sizes:
            yield from self._copy(name, at_once)

    def _copy(self, name: str, at_once: int) -> Generator[None]:
        cursor: bytes | None = None
        while True:
            keys, values, cursor = self.maps[name].lookup_batch(cursor, at_once)
            if keys:
                self._copies[name].update_batch(keys, values)
            yield
            if cursor is None:
                return

    def _switch(self, name: str) -> None:
        old, new = self.maps[name], self._copies[name]
        pinning.replace_inner(self._pins, name, old, new, self.maps.get(f"{name}_outer"))
        self.maps[name] = self._copies.pop(name)
        old.close()
        log.info("map grown map=%s max_entries=%d", name, new.max_entries)

    def _resize(self, name: str, entries: int) -> None:
        """Gives a map written by programs its configured size, which may be smaller. Programs still
        write to the old one, which stays pinned until pin(); these writes are copied later
        (migrate.py).
        """
        old, new = self.maps[name], pinning.make_map(MAPS[name], entries)
        self.migration.copy(name, old, new)
        self._unpinned.add(name)
        self.maps[name] = new
        log.info("map resized to its configured size map=%s max_entries=%d", name, entries)

    def pin(self, packet_path_only: bool) -> None:
        """Pins the resized maps: those that only the packet path uses, or the others. To be called
        right before programs switch to them. If the process exits in between, the next agent finds
        what programs wrote to the old maps (pinning.py).
        """
        for name in sorted(
            map_name for map_name in self._unpinned if MAPS[map_name].packet_path_only is packet_path_only
        ):
            pinning.replace_pin(self._pins, self.maps[name], name)
            self._unpinned.discard(name)


# ---- growth in the background --------------------------------------------------------------------

COPY_BATCH_ENTRIES: Final = 1_024
"""Entries copied in one piece: about one millisecond."""

GROWTH_POLL_INTERVAL_S: Final = 0.02
"""Interval between two checks whether the maps have grown."""

RETRY_DELAY_S: Final = 1.0
"""Delay before a failed growth is retried."""


class MapGrowth:
    """Grows several maps at a time, in slices between other changes, while they are read and
    written (AgentMaps.grow()). No change waits for it, except those that do not fit into the old
    maps.
    """

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

    def finish(self, sizes: Mapping[str, int]) -> None:
        """Completes a growth to these sizes instead of the running one. Raises KbpfError."""
        self.close()
        self._start(sizes)
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

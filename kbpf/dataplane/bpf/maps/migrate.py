# SPDX-License-Identifier: Apache-2.0
"""Moves the contents of maps that programs write to maps of another size or layout, while the
programs keep writing.

Each map is copied, then the programs switch to the copy device by device and hook by hook, then
what they wrote to the old map meanwhile is copied too. The packets of a flow pass two devices. A
flow that began while one of them uses the old map and the other the new one would be in only one of
the maps, and break. So no flow may begin while the devices switch (pause_new_flows()); existing
ones are in both maps by then.
"""

import errno
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps.flow_entries import (
    ENDPOINTS,
    is_original,
    last_used,
    most_recent,
    original_key,
    queue_order,
)
from kbpf.dataplane.bpf.maps.layout import MAPS, U32, U64
from kbpf.errors import KernelError
from kbpf.kernel.bpf import uapi
from kbpf.kernel.bpf.objects import Map

log = logging.getLogger("kbpf.dataplane")

TIMESTAMPED_MAPS: Final = frozenset(("flows", "affinity"))
"""Maps whose values begin with the time of their last use (ns, 8 bytes, host order)."""

CLOCK_TICK_NS: Final = 20_000_000
"""The programs' coarse clock lags by at most one kernel tick, which is 10 ms or less."""

MAX_PAUSE_S: Final = 4.0
"""The maximum pause, even if this process dies: a SYN is retransmitted after one second, and again
after two (RFC 6298). A pause normally takes milliseconds.
"""

PAUSE_SETTLE_S: Final = 0.02
"""Time until all programs that have not seen the pause have ended, in seconds. They need
microseconds, but the machine may be a guest whose CPU is preempted.
"""

ZERO: Final = U32.pack(0)
Entries = Iterable[tuple[bytes, bytes]]


def keep_value(value: bytes) -> bytes:
    """For a map with the same layout."""
    return value


@dataclass(frozen=True, slots=True)
class ReplacedMap:
    """A map that programs may still write to, and the conversion of its values."""

    name: str
    map: Map
    convert: Callable[[bytes], bytes] = keep_value

    def items(self, since: int) -> Iterator[tuple[bytes, bytes]]:
        """Its entries with converted values. From a timestamped map, only those used after `since`
        (ns).
        """
        for key, value in self.map.items():
            if self.name not in TIMESTAMPED_MAPS or last_used(value) > since:
                yield key, self.convert(value)


class MapMigration:
    """Replaced maps, until no program writes to them any more. `maps`: the current maps by name."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._maps = maps
        self._replaced: list[ReplacedMap] = []
        self._copied_at: dict[str, int] = {}  # by map name, in ns (CLOCK_MONOTONIC)

    def start(self, former: Iterable[ReplacedMap], queue_is_new: bool) -> None:
        """Copies the `former` maps. `queue_is_new`: the flow queue is empty. An earlier agent may
        have been interrupted here, so entries of the current maps that are newer are kept.
        """
        self._replaced += former
        now = _program_clock_ns()
        if queue_is_new:
            self._fill_queue(self._maps["flow_queue"])  # with the flows of adopted maps
        for replaced in self._replaced:
            self._copy_changes(replaced)
        self._copied_at |= {replaced.name: now for replaced in self._replaced}
        if queue_is_new:
            self._write_flow_count(sum(is_original(raw) for _, raw in self._maps["flows"].items()))

    def copy(self, name: str, old: Map, new: Map) -> None:
        """Fills a map of another size, which is about to replace the old one."""
        self._copied_at[name] = _program_clock_ns()
        if new.type == uapi.BPF_MAP_TYPE_QUEUE:
            self._write_flow_count(self._fill_queue(new))
        elif pairs := _select_fitting(name, old, new.max_entries):
            new.update_batch(b"".join(key for key, _ in pairs), b"".join(value for _, value in pairs))
        self._replaced.append(ReplacedMap(name, old))

    def _fill_queue(self, flow_queue: Map) -> int:
        """Adds all flows to an empty queue; returns their number."""
        return sum(map(flow_queue.push, queue_order(self._maps["flows"].items())))

    def _write_flow_count(self, flows: int) -> None:
        self._maps["flow_count"].update(ZERO, U64.pack(flows))

    def copy_new_flows(self) -> None:
        """Copies connections that began since the last copy. To be called before any program has
        switched; during a pause this copies all of them.
        """
        now = _program_clock_ns()
        for replaced in self._replaced:
            if replaced.name == "flows":
                self._copy_changes(replaced)
        self._copied_at["flows"] = now

    def catch_up(self, still_read: Collection[str] = ()) -> None:
        """Copies what programs wrote to the old maps since these were copied. To be called when no
        program reads the old maps any more, except those in `still_read`, which the next call
        copies again.
        """
        for replaced in self._replaced:
            now = _program_clock_ns()
            copied = self._copy_changes(replaced)
            self._copied_at[replaced.name] = now
            if copied:
                log.info(
                    "copied entries written during the resize map=%s count=%d",
                    replaced.name,
                    copied,
                )
        self.close(still_read)

    def close(self, still_read: Collection[str] = ()) -> None:
        """Closes the old maps, except those in `still_read`."""
        for replaced in self._replaced:
            if replaced.name not in still_read:
                replaced.map.close()
        self._replaced = [replaced for replaced in self._replaced if replaced.name in still_read]

    def _copy_changes(self, replaced: ReplacedMap) -> int:
        """Copies changed entries; returns their number."""
        if replaced.map.type == uapi.BPF_MAP_TYPE_QUEUE:  # derived from `flows`
            return 0
        new, copied = self._maps[replaced.name], 0
        changes: Entries = self._read_changes(replaced)
        if replaced.name == "flows":
            changes = list(changes)
            flow_entries.mark_ends(self._maps, (raw for _, raw in changes))
            changes = self._enqueue_flows(changes)
        for key, value in changes:
            try:
                new.update(key, value)
            except KernelError as error:
                if error.errno != errno.E2BIG:  # the new map is smaller
                    raise
                break
            copied += 1
        return copied

    def _read_changes(self, replaced: ReplacedMap) -> Iterator[tuple[bytes, bytes]]:
        """What was written since the last copy."""
        new, timestamped = self._maps[replaced.name], replaced.name in TIMESTAMPED_MAPS
        for key, value in replaced.items(self._copied_at.get(replaced.name, 0)):
            current = new.lookup(key)
            if current is None or (timestamped and last_used(value) > last_used(current)):
                yield key, value

    def _enqueue_flows(self, changes: Sequence[tuple[bytes, bytes]]) -> Entries:
        """Yields the entries of flows that are in the queue or find room there, least recently used
        first. The key is queued before the entries are written, and the original-direction entry is
        written last, so an interruption leaves no flow without a place in the queue.
        """
        replies: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)
        for key, raw in changes:
            if not is_original(raw):
                replies[raw[ENDPOINTS]].append((key, raw))
        originals = [entry for entry in changes if is_original(entry[1])]
        for key, raw in sorted(originals, key=lambda entry: last_used(entry[1])):
            reply_entries = replies.pop(raw[ENDPOINTS], [])
            if self._has_original(raw) or self._maps["flow_queue"].push(key):
                yield from reply_entries
                yield key, raw
        for reply_entries in replies.values():
            if self._has_original(reply_entries[0][1]):
                yield from reply_entries

    def _has_original(self, raw: bytes) -> bool:
        """Whether the original-direction entry of this flow exists."""
        original = self._maps["flows"].lookup(original_key(raw))
        return original is not None and is_original(original)


def _program_clock_ns() -> int:
    """A lower bound of the programs' clock."""
    return time.monotonic_ns() - CLOCK_TICK_NS


@contextmanager
def pause_new_flows(pause_map: Map) -> Iterator[None]:
    """Lets no new flow begin during the block; existing flows continue. `pause_map` is the map
    `new_flows_paused_until`, which programs of every version since it has this name read.
    """
    until = time.monotonic_ns() + int(MAX_PAUSE_S * 1e9)
    pause_map.update(ZERO, U64.pack(until))
    time.sleep(PAUSE_SETTLE_S)
    try:
        yield
    finally:
        pause_map.update(ZERO, bytes(U64.size))


def _select_fitting(name: str, old: Map, entries: int) -> list[tuple[bytes, bytes]]:
    """The entries that fit into a map of this size."""
    all_entries = list(old.items())
    if name == "flows" and entries < old.max_entries:
        return most_recent(all_entries, int(entries / MAPS[name].entries_per_object))
    return all_entries[-entries:]

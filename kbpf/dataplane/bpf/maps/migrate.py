"""What programs write, when it goes over to other maps while they do: to bigger or smaller ones, or
to those of another version of kbpf, laid out otherwise.

Each map is copied, the programs change over to the copy device by device and hook by hook, and what
they wrote to the old map until then comes after. A connection of the packet path is known on two
devices, and would break if one of them knew it by the old map and the other by the new one. So none
begins while the devices change over (pause()): those that are there are in both maps by then.
"""

import errno
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kbpf.dataplane.bpf.maps.flow_entries import (
    CLIENT,
    ENDPOINTS,
    FRONTEND,
    flow_key,
    is_original,
    last_used,
    most_recent,
    queue_order,
)
from kbpf.dataplane.bpf.maps.layout import MAPS, U32, U64
from kbpf.errors import KernelError
from kbpf.kernel.bpf import uapi
from kbpf.kernel.bpf.objects import Map

log = logging.getLogger("kbpf.dataplane")

TIMESTAMPED_MAPS: Final = frozenset(("flows", "affinity"))
"""Those of them whose values begin with the time of their last use, in ns, 8 bytes, host order."""

CLOCK_TICK_NS: Final = 20_000_000
"""ns: the programs' clock is behind by a tick of the kernel at most."""

MAX_PAUSE_S: Final = 4.0
"""No flow begins for so long at most, whatever becomes of this process: a SYN comes again after one
second, and after two more (RFC 6298). It takes milliseconds, and longer where the machine has no
time for us."""

PAUSE_SETTLE_S: Final = 0.02
"""A program that has not seen the pause has come to its end: it needs microseconds, but the machine
may be a guest whose processor was taken away meanwhile."""

ZERO: Final = U32.pack(0)
Entries = Iterable[tuple[bytes, bytes]]


def keep_value(value: bytes) -> bytes:
    """The layout is the same."""
    return value


@dataclass(frozen=True, slots=True)
class ReplacedMap:
    """A map that programs may still write to, and what makes a value of today of one of its own."""

    name: str
    map: Map
    convert: Callable[[bytes], bytes] = keep_value

    def items(self, since: int) -> Iterator[tuple[bytes, bytes]]:
        """Its entries, as of today; of a TIMED one those that were used since then (ns)."""
        for key, value in self.map.items():
            if self.name not in TIMESTAMPED_MAPS or last_used(value) > since:
                yield key, self.convert(value)

    def close(self) -> None:
        """Closes the descriptor."""
        self.map.close()


class MapMigration:
    """The maps that were replaced, until no program writes to them any more. `maps` are those of
    now, by name.
    """

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._maps = maps
        self._replaced: list[ReplacedMap] = []
        self._copied_at: dict[str, int] = {}  # by name: when, in ns, CLOCK_MONOTONIC

    def start(self, former: Iterable[ReplacedMap], queue_is_new: bool) -> None:
        """Copies what another version has laid out otherwise. `fresh`: the queue of flows is new.
        An agent may have ended in the middle of this: what is there already and younger stays.
        """
        self._replaced += former
        now = _program_clock_ns()
        if queue_is_new:
            self._fill_queue(self._maps["flow_queue"])  # with those that came as they are
        for replaced in self._replaced:
            if MAPS[replaced.name].map_type != uapi.BPF_MAP_TYPE_QUEUE:  # that follows `flows`
                self._copy_changes(replaced)
        self._copied_at |= {replaced.name: now for replaced in self._replaced}
        if queue_is_new:
            self._write_flow_count(sum(is_original(raw) for _, raw in self._maps["flows"].items()))

    def copy(self, name: str, old: Map, new: Map) -> None:
        """Fills a map of another size, which is about to be the one of this name."""
        self._copied_at[name] = _program_clock_ns()
        if new.type == uapi.BPF_MAP_TYPE_QUEUE:
            self._write_flow_count(self._fill_queue(new))
        elif pairs := _select_fitting(name, old, new.max_entries):
            new.update_batch(
                b"".join(key for key, _ in pairs), b"".join(value for _, value in pairs)
            )
        self._replaced.append(ReplacedMap(name, old))

    def _fill_queue(self, flow_queue: Map) -> int:
        """Gives each flow a place in an empty queue; how many there are."""
        return sum(map(flow_queue.push, queue_order(self._maps["flows"].items())))

    def _write_flow_count(self, flows: int) -> None:
        """`flow_count` is not 0 where programs have served: nobody would look for a flow that they
        have begun meanwhile.
        """
        flow_count = self._maps["flow_count"]
        if flows or flow_count.lookup(ZERO) != bytes(U64.size):
            flow_count.update(ZERO, U64.pack(max(flows, 1)))

    def copy_new_flows(self) -> None:
        """Brings over the connections that began since this was done, or they were copied. To be
        called before any program has changed over; in a pause they are all then.
        """
        now = _program_clock_ns()
        for replaced in self._replaced:
            if replaced.name == "flows":
                self._copy_changes(replaced)
        self._copied_at["flows"] = now

    def catch_up(self, still_read: Collection[str] = ()) -> None:
        """Brings over what programs wrote to old maps after these were copied: what became of
        connections, and sockets. To be called when no program reads the old ones any more, but for
        those of these names: they are brought again by the next call.
        """
        for replaced in self._replaced:
            if MAPS[replaced.name].map_type == uapi.BPF_MAP_TYPE_QUEUE:  # that follows `flows`
                continue
            now = _program_clock_ns()
            copied = self._copy_changes(replaced)
            self._copied_at[replaced.name] = now
            if copied:
                log.info("map caught up map=%s entries=%d", replaced.name, copied)
        self._close_maps(replaced for replaced in self._replaced if replaced.name not in still_read)

    def close(self) -> None:
        """Lets go of the old maps."""
        self._close_maps(self._replaced)

    def _close_maps(self, maps: Iterable[ReplacedMap]) -> None:
        closing = list(maps)
        self._replaced = [replaced for replaced in self._replaced if replaced not in closing]
        for replaced in closing:
            replaced.close()

    def _copy_changes(self, replaced: ReplacedMap) -> int:
        """How many entries came over."""
        new, copied = self._maps[replaced.name], 0
        changes: Entries = self._read_changes(replaced)
        if replaced.name == "flows":
            changes = self._enqueue_flows(list(changes))
        for key, value in changes:
            try:
                new.update(key, value)
            except KernelError as error:
                if error.errno != errno.E2BIG:  # it was made smaller
                    raise
                break
            copied += 1
        return copied

    def _read_changes(self, replaced: ReplacedMap) -> Iterator[tuple[bytes, bytes]]:
        """What has been written since it was copied."""
        new, timestamped = self._maps[replaced.name], replaced.name in TIMESTAMPED_MAPS
        for key, value in replaced.items(self._copied_at.get(replaced.name, 0)):
            current = new.lookup(key)
            if current is None or (timestamped and last_used(value) > last_used(current)):
                yield key, value

    def _enqueue_flows(self, changes: Sequence[tuple[bytes, bytes]]) -> Entries:
        """Entries of flows, those only that are in the queue or find a place there: that comes
        before the flow, and the client's own entry last. So no flow is without a place, wherever
        this ends. Who was quiet longest comes first.
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
        """Whether the client's own entry of this flow is."""
        original = self._maps["flows"].lookup(flow_key(raw[CLIENT], raw[FRONTEND]))
        return original is not None and is_original(original)


def _program_clock_ns() -> int:
    """As the programs' clock may have it, which is behind by a tick at most."""
    return time.monotonic_ns() - CLOCK_TICK_NS


@contextmanager
def pause_new_flows(pause_map: Map) -> Iterator[None]:
    """No flow begins meanwhile; known flows continue. `pause_map`: `new_flows_paused_until`,
    which all versions share.
    """
    until = time.monotonic_ns() + int(MAX_PAUSE_S * 1e9)
    pause_map.update(ZERO, U64.pack(until))
    time.sleep(PAUSE_SETTLE_S)
    try:
        yield
    finally:
        pause_map.update(ZERO, bytes(U64.size))


def _select_fitting(name: str, old: Map, entries: int) -> list[tuple[bytes, bytes]]:
    """What goes into a map of so many entries."""
    all_entries = list(old.items())
    if name == "flows" and entries < old.max_entries:
        return most_recent(all_entries, int(entries / MAPS[name].entries_per_object))
    return all_entries[-entries:]

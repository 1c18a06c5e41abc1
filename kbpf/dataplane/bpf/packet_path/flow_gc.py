# SPDX-License-Identifier: Apache-2.0
"""Garbage-collects entries of the map `flows` that no program would delete.

Orphans are reply entries whose original-direction entry no longer points at them. Two CPUs that
start the same flow at once (for two datagrams, or a SYN and its retransmission) may choose
different backends or SNAT ports. The original-direction entry written last determines the flow,
which orphans the reply entries of the other choice. A program that deletes a flow leaves an orphan
if another CPU holds the lock of its SNAT reply entry (release_replies() in entries.h). Flows are
evicted by their original-direction entries (evict_one() in evict.h), so orphans would stay for
ever. Nothing uses an orphan that has been idle for a while, even if its state is established.

Original-direction entries normally stay until their key is popped from the queue. But a key may be
popped before its entry is written, by another CPU that makes room at that moment. So entries of
flows that have expired long ago are deleted, and their reply entries are orphans then.

A new flow may overwrite an entry after it was read. So an entry is looked up and deleted in one
system call, and put back if it is not the one that was read.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Final

from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps.flow_entries import (
    BACKEND,
    CLIENT,
    CLIENT_ADDRESS,
    CLIENT_PORT,
    IDENTITY,
    IDLE_TIMEOUT_NS,
    NS_PER_SECOND,
    PROTOCOL,
    SNAT,
    SNAT_PORT,
    FlowEntry,
    expires_at,
    flow_key,
    is_original,
    original_key,
    unpack_columns,
)
from kbpf.dataplane.bpf.maps.layout import FlowDirection
from kbpf.kernel.bpf.objects import Map

log = logging.getLogger("kbpf.dataplane")

GC_INTERVAL_S: Final = 10.0
"""Interval at which the next part of the map (BATCH_SIZE entries) is read, in seconds. This takes
some milliseconds of the writing thread.
"""

ORPHAN_NS: Final = 120 * NS_PER_SECOND
"""The idle time after which an orphan is deleted, if its own timeout is not shorter. While it
exists, its port of the node is in use.
"""
EXPIRED_FLOW_NS: Final = 2 * 3600 * NS_PER_SECOND
"""The time after which the original-direction entry of an expired flow is deleted. Normally its
place in the queue is reused, with the entry.
"""


class FlowGarbageCollector:
    """Walks through the map in an endless loop, one part at a time. After each pass, marks of ends
    without entries no longer count (flow_entries.py).
    """

    def __init__(self) -> None:
        self._due = 0.0
        self._cursor: bytes | None = None
        self._flows: Map | None = None
        self._marks_all = False  # whether this pass marks the ends of all entries

    def collect(self, maps: Mapping[str, Map], now: float, only_writers: bool) -> None:
        """Examines the next part, if it is due at `now` (time.monotonic). `only_writers`: no
        program of an earlier agent is attached, so that these are the only maps with flows, and all
        their writers mark the ends.
        """
        if now < self._due:
            return
        self._due = now + GC_INTERVAL_S
        flows = maps["flows"]
        if flows is not self._flows:
            self._flows, self._cursor, self._marks_all = flows, None, False
        # False if this part fails: then its ends may lack marks.
        marks_all, self._marks_all = self._marks_all and only_writers, False
        keys, values, self._cursor = flows.lookup_batch(self._cursor)
        if removed := remove_unused(flows, keys, values, time.monotonic_ns()):
            log.info("removed unused entries of connections count=%d", removed)
        if marks_all:
            size = flows.value_size
            starts = range(0, len(values), size)
            flow_entries.mark_ends(maps, (values[start : start + size] for start in starts))
        if self._cursor is None:
            if marks_all:
                flow_entries.expire_marks(maps)
            if only_writers:  # the next pass begins GC_INTERVAL_S later, which is the pause
                flow_entries.begin_generation(maps)
            marks_all = only_writers
        self._marks_all = marks_all


def remove_unused(flows: Map, keys: bytes, values: bytes, now: int) -> int:
    """Deletes orphans, and originals of flows that are long over, from these entries (back to
    back); returns their number. `now`: ns, CLOCK_MONOTONIC.
    """
    return sum(
        not (_is_in_use(flows, raw, now) if is_original(raw) else _has_original(flows, raw))
        and _remove_if_unchanged(flows, key, raw)
        for key, raw in _idle_entries(flows, keys, values, now)
    )


def _idle_entries(flows: Map, keys: bytes, values: bytes, now: int) -> Iterator[FlowEntry]:
    """Entries that have been idle for so long. Usually another entry of the flow was used more
    recently.
    """
    key_size, value_size = flows.key_size, flows.value_size
    for index, (_, _, last_use, protocol, state, direction) in enumerate(unpack_columns(values)):
        timeout = IDLE_TIMEOUT_NS[protocol, state]
        if direction == FlowDirection.ORIGINAL:
            timeout += EXPIRED_FLOW_NS
        elif timeout > ORPHAN_NS:
            timeout = ORPHAN_NS
        if last_use + timeout < now:
            yield (
                keys[index * key_size : (index + 1) * key_size],
                values[index * value_size : (index + 1) * value_size],
            )


def _is_in_use(flows: Map, original: bytes, now: int) -> bool:
    """Whether a reply entry of this flow was used more recently than its idle original."""
    protocol = original[PROTOCOL : CLIENT.stop]
    for address, port in ((CLIENT_ADDRESS, CLIENT_PORT), (SNAT, SNAT_PORT)):
        source = original[address] + original[port] + protocol
        reply = flows.lookup(flow_key(source, original[BACKEND]))
        if reply is not None and reply[IDENTITY] == original[IDENTITY] and expires_at(reply) + EXPIRED_FLOW_NS >= now:
            return True
    return False


def _has_original(flows: Map, raw: bytes) -> bool:
    """Whether the original-direction entry exists and belongs to the same flow."""
    original = flows.lookup(original_key(raw))
    return original is not None and original[IDENTITY] == raw[IDENTITY]


def _remove_if_unchanged(flows: Map, key: bytes, raw: bytes) -> bool:
    """Deletes the entry if it has not changed since it was read; returns whether it did. Otherwise
    puts it back, unless a program has inserted another one meanwhile.
    """
    removed = flows.lookup_and_delete(key)
    if removed is None:
        return False
    if removed != raw:  # add() does not overwrite an entry
        flows.add(key, removed)
    return removed == raw

"""Answers of flows that are none: found, and taken out of the map `flows`.

Two CPUs that begin the same UDP flow at once may each choose a backend, or a port of the node. The
question that is written last says which of them are the flow's; the entries for the other one's
answers are left without a question that leads to them. Flows make room by their questions
(evict_over_limit() in tc.c), so such entries would stay for ever.

An entry may be made anew while it is looked at: the port or the backend is a new flow's then. So it
is taken out and looked at in one step, and what is not just what was found comes back.
"""

import logging
import time
from collections.abc import Iterator
from typing import Final

from kbpf.dataplane.bpf.maps.flow_entries import (
    CLIENT,
    FRONTEND,
    IDENTITY,
    IDLE_TIMEOUT_NS,
    FlowEntry,
    flow_key,
    unpack_columns,
)
from kbpf.dataplane.bpf.maps.layout import FlowDirection
from kbpf.kernel.bpf.objects import Map

log = logging.getLogger("kbpf.dataplane")

GC_INTERVAL_S: Final = 10.0
"""So often a part of the map is read (libbpf.BATCH entries), which takes some milliseconds: the
writer has other things to do."""


class FlowGarbageCollector:
    """Goes through the map for ever, a part at a time."""

    def __init__(self) -> None:
        self._due = 0.0
        self._cursor: bytes | None = None

    def collect(self, flows: Map, now: float) -> None:
        """Reads the next part, if it is time to."""
        if now < self._due:
            return
        self._due = now + GC_INTERVAL_S
        keys, values, self._cursor = flows.lookup_batch(self._cursor)
        if removed := remove_orphans(flows, keys, values, time.monotonic_ns()):
            log.info("answers of flows that are none were removed entries=%d", removed)


def remove_orphans(flows: Map, keys: bytes, values: bytes, now: int) -> int:
    """Takes out those of these entries, back to back, that are answers which no question leads to,
    and whose own time is over; how many there were. `at`: ns, CLOCK_MONOTONIC.
    """
    return sum(
        not _has_original(flows, raw) and _remove_if_unchanged(flows, key, raw)
        for key, raw in _expired_replies(flows, keys, values, now)
    )


def _expired_replies(flows: Map, keys: bytes, values: bytes, now: int) -> Iterator[FlowEntry]:
    """Answers whose time is over. As a rule another entry of the flow is younger."""
    key_size, value_size = flows.key_size, flows.value_size
    for index, (_, _, last_use, protocol, state, direction) in enumerate(unpack_columns(values)):
        if (
            direction != FlowDirection.ORIGINAL
            and last_use + IDLE_TIMEOUT_NS[protocol, state] < now
        ):
            yield (
                keys[index * key_size : (index + 1) * key_size],
                values[index * value_size : (index + 1) * value_size],
            )


def _has_original(flows: Map, raw: bytes) -> bool:
    """Whether the question is there, and of the same flow."""
    original = flows.lookup(flow_key(raw[CLIENT], raw[FRONTEND]))
    return original is not None and original[IDENTITY] == raw[IDENTITY]


def _remove_if_unchanged(flows: Map, key: bytes, raw: bytes) -> bool:
    """Removes the entry if it is still this one."""
    removed = flows.lookup_and_delete(key)
    if removed is None:
        return False
    if removed != raw:
        flows.add(key, removed)
    return removed == raw

"""Answers of flows that are none: found, and taken out of the map `flows`.

Two CPUs that begin the same UDP flow at once may each choose a backend, or a port of the node. The
question that is written last says which of them are the flow's; the entries for the other one's
answers are left without a question that leads to them. Flows make room by their questions
(make_room() in tc.c), so such entries would stay for ever.

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
    HOLDS,
    IDENTITY,
    Pair,
    columns,
    ends,
)
from kbpf.dataplane.bpf.maps.layout import FlowPart
from kbpf.kernel.bpf.objects import Map

log = logging.getLogger("kbpf.dataplane")

LOOK_SECONDS: Final = 10.0
"""So often a part of the map is read (libbpf.BATCH entries), which takes some milliseconds: the
writer has other things to do."""


class Orphans:
    """Goes through the map for ever, a part at a time."""

    def __init__(self) -> None:
        self._due = 0.0
        self._cursor: bytes | None = None

    def look(self, flows: Map, now: float) -> None:
        """Reads the next part, if it is time to."""
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        keys, values, self._cursor = flows.batch(self._cursor)
        if removed := remove(flows, keys, values, time.monotonic_ns()):
            log.info("answers of flows that are none were removed entries=%d", removed)


def remove(flows: Map, keys: bytes, values: bytes, at: int) -> int:
    """Takes out those of these entries, back to back, that are answers which no question leads to,
    and whose own time is over; how many there were. `at`: ns, CLOCK_MONOTONIC.
    """
    return sum(
        not _is_led_to(flows, raw) and _take(flows, key, raw)
        for key, raw in _over(flows, keys, values, at)
    )


def _over(flows: Map, keys: bytes, values: bytes, at: int) -> Iterator[Pair]:
    """Answers whose time is over. As a rule another entry of the flow is younger."""
    size, room = flows.key_size, flows.value_size
    for number, (_, _, last, protocol, state, part) in enumerate(columns(values)):
        if part != FlowPart.QUESTION and last + HOLDS[protocol, state] < at:
            yield (
                keys[number * size : (number + 1) * size],
                values[number * room : (number + 1) * room],
            )


def _is_led_to(flows: Map, raw: bytes) -> bool:
    """Whether the question is there, and of the same flow."""
    question = flows.lookup(ends(raw[CLIENT], raw[FRONTEND]))
    return question is not None and question[IDENTITY] == raw[IDENTITY]


def _take(flows: Map, key: bytes, raw: bytes) -> bool:
    """Removes the entry if it is still this one."""
    taken = flows.take(key)
    if taken is None:
        return False
    if taken != raw:
        flows.add(key, taken)
    return taken == raw

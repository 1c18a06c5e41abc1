"""The packet path's tracked connections, out of the map `flows` (bpf/track.h).

A connection has two or three entries: client and frontend; client' and backend; and snat and
backend when the source is translated. Each has the whole of a `struct nat`, equal but for the time
of its last packet, so the entries of one connection are known by its addresses (`IDENTITY`). There
may be a hundred thousand: they stay bytes until one is shown.
"""

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps.flow_entries import (
    BOTH_ENDS,
    IDENTITY,
    NANO,
    is_held,
    is_question,
    last_used,
    over,
)
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import format_endpoint

FLOW, REPLY, SNAT = 1, 2, 4
PARTS: Final = {FLOW: "flow", REPLY: "reply", SNAT: "source"}
"""What a part is for: the client's packets, the backend's, and the backend's to the node."""

MILLI: Final = 1_000_000
"""ns in a ms, in which times are shown: cheaper than rounding a float."""
NOWHERE: Final = bytes(16)


class Tracked(msgspec.Struct, gc=False):
    """One connection. `raw` is the struct nat of the entry that a packet met last; `over` is when
    its time is over, in ns of CLOCK_MONOTONIC: when that of its last entry is. `parts` are those
    that are there.
    """

    raw: bytes
    over: int
    parts: int

    @property
    def last_used(self) -> int:
        """ns, CLOCK_MONOTONIC."""
        return last_used(self.raw)

    @property
    def key(self) -> bytes:
        """Client and frontend. Sorts by address, then port."""
        return self.raw[BOTH_ENDS]

    @property
    def state(self) -> int:
        """enum tcp_state."""
        return self.raw[flow_entries.STATE]

    @property
    def client(self) -> bytes:
        """Its address."""
        return self.raw[flow_entries.CLIENT][:16]

    @property
    def backend(self) -> bytes:
        """struct target."""
        return self.raw[flow_entries.BACKEND]

    @property
    def snat(self) -> bytes:
        """The node's address that stands for the client's; 16 times 0 if none does."""
        return self.raw[flow_entries.SNAT]

    @property
    def service(self) -> int:
        """Its id."""
        return int.from_bytes(self.raw[flow_entries.SERVICE], "little")


class Fill(NamedTuple):
    """How many connections `flows` has, how many are open, how many of these would have to be
    driven out, and room for how many.
    """

    entries: int
    open: int
    needed: int
    room: int


def read(held: Map) -> dict[bytes, Tracked]:
    """All connections in this map `flows`, by IDENTITY."""
    found: dict[bytes, Tracked] = {}
    for key, raw in held.items():
        _add(found, raw, part_of(key, raw))
    return found


def part_of(key: bytes, raw: bytes) -> int:
    """Which of a connection's entries has this key; more than one where a backend is its own
    frontend.
    """
    part = FLOW if is_question(raw) else 0
    backend, one, other = raw[flow_entries.BACKEND], key[:20], key[20:]
    if backend not in (one, other):
        return part
    end = other if one == backend else one
    to, port = end[:16], end[16:18]
    if to == raw[flow_entries.CLIENT][:16] and port == raw[flow_entries.CLIENT_PORT]:
        part |= REPLY
    if to == raw[flow_entries.SNAT] and port == raw[flow_entries.SNAT_PORT]:
        part |= SNAT
    return part


def _add(found: dict[bytes, Tracked], raw: bytes, part: int) -> None:
    if is_held(raw):  # a port of somebody else's
        return
    identity = raw[IDENTITY]
    known = found.get(identity)
    if known is None:
        found[identity] = Tracked(raw, over(raw), part)
        return
    known.parts |= part
    known.over = max(known.over, over(raw))
    if last_used(raw) > known.last_used:
        known.raw = raw


def fill(held: Map, now: float) -> Fill:
    """How full this map `flows` is. `now`: CLOCK_MONOTONIC, seconds."""
    entries = open_ = needed = 0
    at = int(now * NANO)
    for _, raw in held.items():
        if is_question(raw):
            entries += 1
            counts = at <= over(raw) and flow_entries.is_open(raw[flow_entries.STATE])
            open_ += counts
            needed += counts and flow_entries.is_needed(raw[flow_entries.STATE], last_used(raw), at)
    return Fill(entries, open_, needed, int(held.max_entries / MAPS["flows"].per))


def endpoint(target: bytes) -> str:
    """A struct target as ``address:port``."""
    return format_endpoint(target[:16], target[16] << 8 | target[17])


shared_endpoint: Final = lru_cache(1 << 16)(endpoint)
"""The same for those that many connections have: frontends and backends."""

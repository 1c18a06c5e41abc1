"""The packet path's tracked connections, out of the map `flows` (bpf/track.h).

A connection has two or three entries: client and frontend; client' and backend; and snat and
backend when the source is translated. Each has the whole of a `struct flow`, equal but for the time
of its last packet, so the entries of one connection are known by its addresses (`IDENTITY`). There
may be a hundred thousand: they stay bytes until one is shown.
"""

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps.flow_entries import (
    ENDPOINTS,
    IDENTITY,
    NS_PER_SECOND,
    expires_at,
    is_original,
    is_port_reservation,
    last_used,
)
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import format_endpoint

ORIGINAL, REPLY, SNAT_REPLY = 1, 2, 4
DIRECTION_NAMES: Final = {ORIGINAL: "flow", REPLY: "reply", SNAT_REPLY: "source"}
"""What a part is for: the client's packets, the backend's, and the backend's to the node."""

NS_PER_MS: Final = 1_000_000
"""ns in a ms, in which times are shown: cheaper than rounding a float."""
NO_ADDRESS: Final = bytes(16)


class TrackedConnection(msgspec.Struct, gc=False):
    """One connection. `raw` is the struct flow of the entry that a packet met last; `over` is when
    its time is over, in ns of CLOCK_MONOTONIC: when that of its last entry is. `parts` are those
    that are there.
    """

    raw: bytes
    expires_at: int
    directions: int

    @property
    def last_used(self) -> int:
        """ns, CLOCK_MONOTONIC."""
        return last_used(self.raw)

    @property
    def key(self) -> bytes:
        """Client and frontend. Sorts by address, then port."""
        return self.raw[ENDPOINTS]

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


def read(map_: Map) -> dict[bytes, TrackedConnection]:
    """All connections in this map `flows`, by IDENTITY."""
    connections: dict[bytes, TrackedConnection] = {}
    for key, raw in map_.items():
        _merge_entry(connections, raw, directions_of(key, raw))
    return connections


def directions_of(key: bytes, raw: bytes) -> int:
    """Which of a connection's entries has this key; more than one where a backend is its own
    frontend.
    """
    directions = ORIGINAL if is_original(raw) else 0
    backend, first_end, second_end = raw[flow_entries.BACKEND], key[:20], key[20:]
    if backend not in (first_end, second_end):
        return directions
    peer = second_end if first_end == backend else first_end
    address, port = peer[:16], peer[16:18]
    if address == raw[flow_entries.CLIENT][:16] and port == raw[flow_entries.CLIENT_PORT]:
        directions |= REPLY
    if address == raw[flow_entries.SNAT] and port == raw[flow_entries.SNAT_PORT]:
        directions |= SNAT_REPLY
    return directions


def _merge_entry(connections: dict[bytes, TrackedConnection], raw: bytes, directions: int) -> None:
    if is_port_reservation(raw):  # a port of somebody else's
        return
    identity = raw[IDENTITY]
    existing = connections.get(identity)
    if existing is None:
        connections[identity] = TrackedConnection(raw, expires_at(raw), directions)
        return
    existing.directions |= directions
    existing.expires_at = max(existing.expires_at, expires_at(raw))
    if last_used(raw) > existing.last_used:
        existing.raw = raw


def measure_fill(map_: Map, now: float) -> Fill:
    """How full this map `flows` is. `now`: CLOCK_MONOTONIC, seconds."""
    entries = open_ = needed = 0
    now_ns = int(now * NS_PER_SECOND)
    for _, raw in map_.items():
        if is_original(raw):
            entries += 1
            is_counted = now_ns <= expires_at(raw) and flow_entries.is_open(raw[flow_entries.STATE])
            open_ += is_counted
            needed += is_counted and flow_entries.is_needed(
                raw[flow_entries.STATE], last_used(raw), now_ns
            )
    return Fill(entries, open_, needed, int(map_.max_entries / MAPS["flows"].entries_per_object))


def format_target(target: bytes) -> str:
    """A struct target as ``address:port``."""
    return format_endpoint(target[:16], target[16] << 8 | target[17])


format_target_cached: Final = lru_cache(1 << 16)(format_target)
"""The same for those that many connections have: frontends and backends."""

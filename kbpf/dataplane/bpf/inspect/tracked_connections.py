# SPDX-License-Identifier: Apache-2.0
"""Reads the packet path's tracked connections from the map `flows` (bpf/track.h).

A connection has two or three entries: one with the key (client, frontend), and one or both of
(client', backend) and, with SNAT, (snat, backend). Each holds a whole `struct flow`. The addresses
and ports in it (`IDENTITY`) are the same in all entries of a connection. There may be a hundred
thousand connections, so they stay bytes until they are shown.
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
"""Which packets an entry matches: the client's, the backend's replies to client', and its replies
to the node (snat).
"""

NS_PER_MS: Final = 1_000_000
"""Times are shown in ms. Integer division is cheaper than rounding a float."""
NO_ADDRESS: Final = bytes(16)


class TrackedConnection(msgspec.Struct, gc=False):
    """One connection.

    - `raw`: the struct flow of the entry that was used last.
    - `expires_at`: when its last entry expires, in ns (CLOCK_MONOTONIC).
    - `directions`: which of its entries exist: ORIGINAL, REPLY and SNAT_REPLY, or-ed.
    """

    raw: bytes
    expires_at: int
    directions: int

    @property
    def last_used(self) -> int:
        """Last use in ns (CLOCK_MONOTONIC)."""
        return last_used(self.raw)

    @property
    def key(self) -> bytes:
        """Client and frontend, each a struct target. Sorts by address, then by port."""
        return self.raw[ENDPOINTS]

    @property
    def state(self) -> int:
        """enum tcp_state."""
        return self.raw[flow_entries.STATE]

    @property
    def client(self) -> bytes:
        """The client's address, 16 bytes."""
        return self.raw[flow_entries.CLIENT][:16]

    @property
    def backend(self) -> bytes:
        """The backend as struct target."""
        return self.raw[flow_entries.BACKEND]

    @property
    def snat(self) -> bytes:
        """The node's address that replaces the client's, 16 bytes; all 0 without SNAT."""
        return self.raw[flow_entries.SNAT]

    @property
    def service(self) -> int:
        """The Service port's id."""
        return int.from_bytes(self.raw[flow_entries.SERVICE], "little")


class Fill(NamedTuple):
    """How full `flows` is, in connections: all (`entries`), the open ones, those of the open ones
    that must not be evicted (is_needed() in tc.c), and the limit (`max_connections`).
    """

    entries: int
    open: int
    needed: int
    max_connections: int


def read(map_: Map) -> dict[bytes, TrackedConnection]:
    """All connections in this `flows` map, by IDENTITY."""
    connections: dict[bytes, TrackedConnection] = {}
    for key, raw in map_.items():
        _merge_entry(connections, raw, directions_of(key, raw))
    return connections


def directions_of(key: bytes, raw: bytes) -> int:
    """Which entry of its connection has this key. One entry serves several directions if a backend
    is its own frontend.
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
    if is_port_reservation(raw):  # a connection of conntrack, not ours (snat_ports.py)
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
    """How full this `flows` map is. `now`: CLOCK_MONOTONIC, in seconds."""
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
    """Formats a struct target as ``address:port``."""
    return format_endpoint(target[:16], target[16] << 8 | target[17])  # network byte order


format_target_cached: Final = lru_cache(1 << 16)(format_target)
"""The same for frontends and backends, which many connections share."""

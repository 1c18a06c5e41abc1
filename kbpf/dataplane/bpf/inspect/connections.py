# SPDX-License-Identifier: Apache-2.0
"""Reads the packet path's tracked connections from the map `flows` (bpf/tc/flow.h).

A connection has two or three entries: one with the key (client, frontend), and one or both of
(client', backend) and, with SNAT, (snat, backend). Each holds a whole `struct flow`. The addresses
and ports in it (`IDENTITY`) are the same in all entries of a connection. There may be a hundred
thousand connections, so they stay bytes until they are shown, and only their first part is kept.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Final

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
from kbpf.dataplane.bpf.maps.layout import FLOW_HEAD, MAPS, FlowPath, TcpState
from kbpf.dataplane.bpf.state.contents import unpack_backend
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import Addr, format_addr, format_endpoint
from kbpf.model.inspection import (
    Connection,
    ConnectionPage,
    ConnectionQuery,
    EndpointEntry,
    Fill,
    ServicePort,
    SnatUsage,
    TranslatedSource,
    find_ports,
)
from kbpf.model.objects import protocol_name

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

    - `raw`: the head of the struct flow (FLOW_HEAD) of the entry that was used last.
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


def read(map_: Map) -> dict[bytes, TrackedConnection]:
    """All connections in this `flows` map, by IDENTITY."""
    connections: dict[bytes, TrackedConnection] = {}
    for key, raw in map_.items():
        _merge_entry(connections, raw[: FLOW_HEAD.size], directions_of(key, raw))
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
            needed += is_counted and flow_entries.is_needed(raw[flow_entries.STATE], last_used(raw), now_ns)
    return Fill(entries, open_, needed, int(map_.max_entries / MAPS["flows"].entries_per_object))


def format_target(target: bytes) -> str:
    """Formats a struct target as ``address:port``."""
    return format_endpoint(target[:16], target[16] << 8 | target[17])  # network byte order


format_target_cached: Final = lru_cache(1 << 16)(format_target)
"""The same for frontends and backends, which many connections share."""


# ---- as values of model/inspection.py ------------------------------------------------------------

_STATES: Final = {int(state): state.name.lower() for state in TcpState}
_PATHS: Final = {int(FlowPath.STACK): "stack", int(FlowPath.DIRECT): "direct"}


class FlowTable:
    """Connections and TranslatedConnections of model/inspection.py. Times are seconds of
    CLOCK_MONOTONIC: `began` when reading of the map began, `now` when all reading ended.
    """

    def __init__(
        self,
        connections: Mapping[bytes, TrackedConnection],
        ports: Mapping[int | None, ServicePort],
        location: str,
        began: float,
        now: float,
        pods: Mapping[Addr, str],
    ) -> None:
        """`pods`: see index_pods()."""
        self._connections, self._ports, self._location = connections, ports, location
        self._pods = pods
        self._began_ns, self._now_ns = int(began * NS_PER_SECOND), int(now * NS_PER_SECOND)
        self._service_text = cache(self._format_service)

    def _format_service(self, service_id: int) -> str:
        return (self._ports.get(service_id) or ServicePort(service_id, None)).text

    def _find_endpoint(self, service_id: int, backend: bytes) -> EndpointEntry | None:
        port = self._ports.get(service_id)
        return port.endpoints.get(unpack_backend(backend)) if port is not None else None

    def find(self, query: ConnectionQuery) -> ConnectionPage:
        """See model.inspection.Connections."""
        tests = tuple(self._filters(query))
        now, selected, expired_count = self._now_ns, [], 0
        for connection in self._connections.values():
            if tests and not all(test(connection) for test in tests):
                continue
            if connection.expires_at < now and not query.expired:
                expired_count += 1
            else:
                selected.append(connection)
        # two sorts, since a tuple for each of a hundred thousand connections takes 10 MB
        selected.sort(key=lambda c: c.raw[IDENTITY])
        selected.sort(key=lambda c: self._service_text(c.service))
        return ConnectionPage(self._build_rows(selected), len(selected), expired_count)

    def _filters(self, query: ConnectionQuery) -> Iterator[Callable[[TrackedConnection], bool]]:
        if query.service:
            ports = find_ports(self._ports.values(), query.service, self._location)
            ids = {port.id for port in ports}
            yield lambda connection: connection.service in ids
        if query.client is not None:
            client = bytes(query.client)
            yield lambda connection: connection.client == client
        if query.backend is not None:
            backend = bytes(query.backend)
            yield lambda connection: connection.backend[:16] == backend
        if query.state:
            state = TcpState[query.state.upper()]
            yield lambda connection: connection.state == state

    def _build_rows(self, connections: Iterable[TrackedConnection]) -> Iterator[Connection]:
        """Yields rows one at a time, because there may be a hundred thousand."""
        current: frozenset[bytes] | None = None
        cached_device_name = cache(device_name)
        find_endpoint = cache(self._find_endpoint)
        now = self._now_ns
        for connection in connections:
            raw = connection.raw
            last_use, client, frontend, backend, snat, snat_port, port, service, *rest = FLOW_HEAD.unpack(raw)
            _, state, _, path, _, index = rest  # index: struct flow's host_device
            masqueraded = snat != NO_ADDRESS
            replaced = False
            if not connection.directions & ORIGINAL:
                if current is None:
                    current = self._original_keys()
                replaced = connection.key in current
            client_text, endpoint = format_target(client), find_endpoint(service, backend)
            yield Connection(
                service=self._service_text(service),
                protocol=protocol_name(client[18]),  # address (16 bytes), port (2), protocol
                client=client_text,
                frontend=format_target_cached(frontend),
                backend=format_target_cached(backend),
                seen_as=format_target(snat + snat_port)
                if masqueraded
                else (client_text if port == client[16:18] else format_target(client[:16] + port)),
                masqueraded=masqueraded,
                state=_STATES.get(state, str(state)),
                idle_seconds=max(0, now - last_use) // NS_PER_MS / 1000,
                expires_seconds=(connection.expires_at - now) // NS_PER_MS / 1000,
                expired=connection.expires_at < now,
                # A connection with a packet since reading began may have been created while its
                # entries were read: some of them were then not seen, but are not lost.
                lost=()
                if replaced or last_use >= self._began_ns
                else _missing_directions(connection.directions, masqueraded),
                replaced=replaced,
                path=_PATHS.get(path, str(path)),
                device=cached_device_name(index) if index else "",
                client_pod=self._pods.get(Addr(client[:16]), ""),
                backend_pod=endpoint.pod if endpoint else "",
                backend_node=endpoint.node if endpoint else "",
            )

    def _original_keys(self) -> frozenset[bytes]:
        """Client and frontend of all connections whose original-direction entry exists."""
        return frozenset(
            connection.key for connection in self._connections.values() if connection.directions & ORIGINAL
        )

    # ---- SNAT ----

    def _translated(self) -> Iterator[TrackedConnection]:
        now = self._now_ns
        return (
            connection
            for connection in self._connections.values()
            if connection.directions & SNAT_REPLY and connection.expires_at >= now
        )

    def __len__(self) -> int:
        return sum(1 for _ in self._translated())

    def sources(self) -> Iterator[TranslatedSource]:
        """See model.inspection.TranslatedConnections. Yields rows one at a time."""
        connections = sorted(
            self._translated(), key=lambda c: (c.backend, c.snat, c.raw[flow_entries.SNAT_PORT], c.key)
        )
        for connection in connections:
            last_use, client, _, backend, snat, port, _, service, _, state, *_ = FLOW_HEAD.unpack(connection.raw)
            yield TranslatedSource(
                source=format_target(snat + port),
                backend=format_target_cached(backend),
                protocol=protocol_name(client[18]),
                client=format_target(client),
                service=self._service_text(service),
                state=_STATES.get(state, str(state)),
                idle_seconds=max(0, self._now_ns - last_use) // NS_PER_MS / 1000,
                client_pod=self._pods.get(Addr(client[:16]), ""),
            )

    def usage(self) -> Iterator[SnatUsage]:
        """See model.inspection.TranslatedConnections."""
        usage: dict[tuple[bytes, bytes], list[int]] = {}
        for connection in self._translated():
            counts = usage.setdefault((connection.backend, connection.snat), [0, 0])
            counts[0] += 1
            counts[1] += connection.state == TcpState.CLOSED
        for (backend, snat), (used, closed) in usage.items():
            yield SnatUsage(format_target_cached(backend), protocol_name(backend[18]), format_addr(snat), used, closed)


def _missing_directions(directions: int, masqueraded: bool) -> tuple[str, ...]:
    """The names of the entries that should exist and do not."""
    missing = (ORIGINAL | REPLY | (SNAT_REPLY if masqueraded else 0)) & ~directions
    return tuple(name for direction, name in DIRECTION_NAMES.items() if missing & direction)


def device_name(ifindex: int) -> str:
    """The device's name; ``#ifindex`` if it does not exist in this network namespace."""
    try:
        return socket.if_indextoname(ifindex)
    except OSError:
        return f"#{ifindex}"

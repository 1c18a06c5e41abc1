# SPDX-License-Identifier: Apache-2.0
"""The connections that the packet path tracks. Each has two or three entries in `flows`, and one
row here.

Connections that the socket hooks translated are not among them. Their packets carry the backend's
address from the start, so only the kernel tracks them; `ss` shows them.
"""

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import msgspec

from kbpf.dataplane.bpf.inspect import tracked_connections
from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.inspect.tracked_connections import (
    DIRECTION_NAMES,
    ORIGINAL,
    REPLY,
    SNAT_REPLY,
    TrackedConnection,
    format_target,
    format_target_cached,
)
from kbpf.dataplane.bpf.maps.flow_entries import IDENTITY, NS_PER_SECOND
from kbpf.dataplane.bpf.maps.layout import FLOW, FlowPath, TcpState
from kbpf.errors import NotFoundError
from kbpf.model.address import Addr
from kbpf.model.desired import ServicePortKey
from kbpf.model.objects import Protocol
from kbpf.views.backends import format_service
from kbpf.views.columns import Column, format_duration

NEEDS: Final = Part.NAMES | Part.CONNECTIONS | Part.PACKETS | Part.STATUS

STATES: Final = tuple(state.name.lower() for state in TcpState)


class ConnectionRow(msgspec.Struct, frozen=True, gc=False):
    """One connection. Addresses are ``address:port``.

    `seen_as`: the source that the backend sees: the node's (`masqueraded`) or the client's. The
    client's port may be changed if two connections would look the same to the backend.

    `state`, one of STATES: new (no reply yet), answered (the backend replied with a SYN-ACK, an
    INIT-ACK or a datagram), unproven (TCP: the client completed the handshake, the backend has not
    confirmed it), established, closing (FIN from one side), closed (FINs from both, or RST).

    `expires_seconds` is negative once the connection has expired (`expired`): its packets are no
    longer translated, and its entries stay until their space is needed. `lost`: entries that are
    missing because other connections use their keys: ``flow``, ``reply`` or ``source``.
    `replaced`: these are the remaining entries of a connection whose client began a new one from
    the same port.

    `path`: ``stack``: through the node's network stack; ``direct``: from device to device;
    ``ipvs``: by IPVS, which knows neither the idle time (`idle_seconds` is None) nor the source
    that the backend sees (`seen_as` is ""). `device`: the client is this node itself and sends
    through that device; otherwise "".
    """

    service: str
    protocol: str
    client: str
    frontend: str
    backend: str
    seen_as: str
    masqueraded: bool
    state: str
    idle_seconds: float | None
    expires_seconds: float
    expired: bool
    lost: tuple[str, ...]
    replaced: bool
    path: str
    device: str


@dataclass(frozen=True, slots=True)
class ConnectionQuery:
    """The connections to show, by Service (NAME or NAMESPACE/NAME), client address, backend address
    and state (one of STATES). None and "" match all. `expired`: include expired ones.
    """

    service: str = ""
    client: Addr | None = None
    backend: Addr | None = None
    state: str = ""
    expired: bool = False


class ConnectionSelection(NamedTuple):
    """The matching connections, sorted by Service, then by client. `expired_count`: how many
    expired ones match but were left out.
    """

    connections: tuple[TrackedConnection, ...]
    expired_count: int


def select(snapshot: Snapshot, query: ConnectionQuery = ConnectionQuery()) -> ConnectionSelection:
    """Selects and sorts matching connections. Raises NotFoundError if the Service is not
    programmed.
    """
    tests = tuple(_filters(snapshot, query))
    now = int(snapshot.monotonic * NS_PER_SECOND)
    selected, expired_count = [], 0
    for connection in snapshot.connections.values():
        if tests and not all(test(connection) for test in tests):
            continue
        if connection.expires_at < now and not query.expired:
            expired_count += 1
        else:
            selected.append(connection)
    service_name = cache(lambda i: format_service(snapshot.names.get(i), i))
    selected.sort(
        key=lambda connection: (service_name(connection.service), connection.raw[IDENTITY])
    )
    return ConnectionSelection(tuple(selected), expired_count)


def _filters(
    snapshot: Snapshot, query: ConnectionQuery
) -> Iterator[Callable[[TrackedConnection], bool]]:
    if query.service:
        ids = service_ids(snapshot, query.service)
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


def service_ids(snapshot: Snapshot, service: str) -> frozenset[int]:
    """The ids of the ports of a Service (NAME or NAMESPACE/NAME). Raises NotFoundError if it has
    none.
    """
    namespace, _, name = service.rpartition("/")

    def matches(key: ServicePortKey) -> bool:
        return key.name == name and namespace in ("", key.namespace)

    ids = frozenset(i for i, key in snapshot.names.items() if matches(key))
    if not ids:
        raise NotFoundError(
            f"no Service {service} is programmed", str(snapshot.pin_dir),
            "`kbpf inspect services` lists all",
        )  # fmt: skip
    return ids


def build_rows(
    snapshot: Snapshot, connections: Iterable[TrackedConnection]
) -> Iterator[ConnectionRow]:
    """Yields rows one at a time, because there may be a hundred thousand."""
    current: frozenset[bytes] | None = None
    service_name = cache(lambda i: format_service(snapshot.names.get(i), i))
    cached_device_name = cache(device_name)
    now = int(snapshot.monotonic * NS_PER_SECOND)
    read_start = int(snapshot.began * NS_PER_SECOND)
    for connection in connections:
        raw = connection.raw
        last_used, client, frontend, backend, snat, snat_port, port, service, *rest = FLOW.unpack(
            raw
        )
        _, state, _, path, _, index, *_ = rest  # index: struct flow's host_device
        masqueraded = snat != tracked_connections.NO_ADDRESS
        replaced = False
        if not connection.directions & ORIGINAL:
            if current is None:
                current = _original_keys(snapshot)
            replaced = connection.key in current
        client_text = format_target(client)
        yield ConnectionRow(
            service=service_name(service),
            protocol=protocol_name(client[18]),  # address (16 bytes), port (2), protocol
            client=client_text,
            frontend=format_target_cached(frontend),
            backend=format_target_cached(backend),
            seen_as=format_target(snat + snat_port)
            if masqueraded
            else (client_text if port == client[16:18] else format_target(client[:16] + port)),
            masqueraded=masqueraded,
            state=state_name(state),
            idle_seconds=max(0, now - last_used) // tracked_connections.NS_PER_MS / 1000,
            expires_seconds=(connection.expires_at - now) // tracked_connections.NS_PER_MS / 1000,
            expired=connection.expires_at < now,
            # A connection with a packet since reading began may have been created while its
            # entries were read: some of them were then not seen, but are not lost.
            lost=()
            if replaced or last_used >= read_start
            else _missing_directions(connection.directions, masqueraded, path),
            replaced=replaced,
            path=_PATH_NAMES.get(path, str(path)),
            device=cached_device_name(index) if index else "",
        )


def _original_keys(snapshot: Snapshot) -> frozenset[bytes]:
    """Client and frontend of all connections whose original-direction entry exists."""
    return frozenset(
        connection.key
        for connection in snapshot.connections.values()
        if connection.directions & ORIGINAL
    )


def _missing_directions(directions: int, masqueraded: bool, path: int) -> tuple[str, ...]:
    """The names of the entries that should exist and do not. A connection with the path DIRECT_SNAT
    has no entry for replies to the client's own address.
    """
    expected = (
        ORIGINAL
        | (SNAT_REPLY if masqueraded else 0)
        | (REPLY if path != FlowPath.DIRECT_SNAT else 0)
    )
    missing = expected & ~directions
    return (
        tuple(name for direction, name in DIRECTION_NAMES.items() if missing & direction)
        if missing
        else ()
    )


def protocol_name(number: int) -> str:
    """``TCP``, ``UDP`` or ``SCTP``; the number of any other protocol."""
    return _PROTOCOLS.get(number, str(number))


def state_name(number: int) -> str:
    """One of STATES; the number if this version does not know it."""
    return STATES[number] if number < len(STATES) else str(number)


def device_name(ifindex: int) -> str:
    """The device's name; ``#ifindex`` if it does not exist in this network namespace."""
    try:
        return socket.if_indextoname(ifindex)
    except OSError:
        return f"#{ifindex}"


_PROTOCOLS: Final = {int(protocol): protocol.name for protocol in Protocol}
_PATH_NAMES: Final = {
    int(FlowPath.STACK): "stack",
    int(FlowPath.DIRECT): "direct",
    int(FlowPath.DIRECT_SNAT): "direct",
}


# ---- columns -----------------------------------------------------------------------------------


def _format_expires(row: ConnectionRow) -> str:
    return "expired" if row.expired else format_duration(row.expires_seconds)


def _format_seen_as(row: ConnectionRow) -> str:
    if not row.seen_as:
        return "-"
    if row.masqueraded:
        return f"{row.seen_as} (node)"
    return "the client" if row.seen_as == row.client else row.seen_as


def _format_note(row: ConnectionRow) -> str:
    if not (row.lost or row.replaced or row.device):
        return ""
    notes = [f"missing entries: {', '.join(row.lost)}"] if row.lost else []
    notes += ["replaced by a newer connection"] if row.replaced else []
    notes += [f"from this node, through {row.device}"] if row.device else []
    return "; ".join(notes)


COLUMNS: Final = (
    Column("SERVICE", lambda r: r.service),
    Column("PROTOCOL", lambda r: r.protocol),
    Column("CLIENT", lambda r: r.client),
    Column("FRONTEND", lambda r: r.frontend),
    Column("BACKEND", lambda r: r.backend),
    Column("BACKEND-SEES", _format_seen_as),
    Column("STATE", lambda r: r.state),
    Column(
        "IDLE",
        lambda r: "-" if r.idle_seconds is None else format_duration(r.idle_seconds),
        right=True,
    ),
    Column("EXPIRES-IN", _format_expires, right=True),
    Column("PATH", lambda r: r.path, wide=True),
    Column("NOTE", _format_note),
)

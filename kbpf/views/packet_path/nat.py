# SPDX-License-Identifier: Apache-2.0
"""SNAT: the translated sources of connections, and how many ports of the node they use."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect import tracked_connections
from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.inspect.tracked_connections import (
    SNAT_REPLY,
    TrackedConnection,
    format_target,
    format_target_cached,
)
from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps.flow_entries import NS_PER_SECOND
from kbpf.dataplane.bpf.maps.layout import FLOW, TcpState
from kbpf.model.address import format_addr
from kbpf.model.reasons import Reason
from kbpf.views.backends import format_service
from kbpf.views.columns import Column, format_duration, format_number
from kbpf.views.packet_path.connections import protocol_name, state_name

NEEDS: Final = Part.NAMES | Part.CONNECTIONS | Part.PACKETS | Part.STATUS

ALARM_PERCENT: Final = 80.0


class UsageRow(msgspec.Struct, frozen=True):
    """How many ports of one node address are in use towards one backend and protocol. Connections
    to different backends may use the same port.

    `closed` of the `used` ports belong to closed connections and are reused if no other is free.
    `ports` is the size of the range, `percent` the used part of it. `alarm`: 80 % or more are used.
    """

    backend: str
    protocol: str
    node_address: str
    used: int
    closed: int
    ports: int
    percent: float
    alarm: bool


class SourceRow(msgspec.Struct, frozen=True, gc=False):
    """One translated source: the backend sees `source` (``address:port``) instead of `client`."""

    source: str
    backend: str
    protocol: str
    client: str
    service: str
    state: str
    idle_seconds: float


class NatView(msgspec.Struct, frozen=True):
    """The summary, without the single sources. `addresses` and `first_port` to `last_port` are
    the node's, for SNAT. `failures`: packets that were dropped because no port was free.
    """

    addresses: tuple[str, ...]
    first_port: int
    last_port: int
    ports: int
    failures: int
    usage: tuple[UsageRow, ...]


def select_translated(snapshot: Snapshot) -> tuple[TrackedConnection, ...]:
    """The unexpired connections with SNAT, sorted by backend, then by translated source."""
    now = int(snapshot.monotonic * NS_PER_SECOND)
    connections = [
        connection
        for connection in snapshot.connections.values()
        if connection.directions & SNAT_REPLY and connection.expires_at >= now
    ]  # fmt: skip
    return tuple(
        sorted(
            connections,
            key=lambda connection: (
                connection.backend,
                connection.raw[flow_entries.SNAT],
                connection.raw[flow_entries.SNAT_PORT],
                connection.key,
            ),
        )
    )


def build_view(snapshot: Snapshot, connections: Iterable[TrackedConnection]) -> NatView:
    """Summarises the port usage of these connections."""
    node = snapshot.node
    return NatView(
        addresses=tuple(format_addr(address) for address in node.addresses),
        first_port=node.first_port,
        last_port=node.last_port,
        ports=node.ports,
        failures=snapshot.reasons.get(Reason.NO_SNAT_PORT, 0),
        usage=_build_usage(connections, node.ports),
    )


def _build_usage(connections: Iterable[TrackedConnection], ports: int) -> tuple[UsageRow, ...]:
    """Port usage by backend and node address, the most used first."""
    usage: dict[tuple[bytes, bytes], list[int]] = {}
    for connection in connections:
        counts = usage.setdefault((connection.backend, connection.snat), [0, 0])
        counts[0] += 1
        counts[1] += connection.state == TcpState.CLOSED
    rows = []
    for (backend, snat), (count, closed) in usage.items():
        percent = round(100 * count / ports, 1) if ports else 0.0
        rows.append(
            UsageRow(
                format_target_cached(backend),
                protocol_name(backend[18]),
                format_addr(snat),
                count,
                closed,
                ports,
                percent,
                bool(ports) and count / ports >= ALARM_PERCENT / 100,
            )
        )
    return tuple(
        sorted(rows, key=lambda row: (-row.used, row.backend, row.protocol, row.node_address))
    )


def build_rows(snapshot: Snapshot, connections: Iterable[TrackedConnection]) -> Iterator[SourceRow]:
    """Yields rows one at a time, because there may be a hundred thousand."""
    service_name = cache(lambda i: format_service(snapshot.names.get(i), i))
    now = int(snapshot.monotonic * NS_PER_SECOND)
    for connection in connections:
        last_used, client, _, backend, snat, port, _, service, _, state, *_ = FLOW.unpack(
            connection.raw
        )
        yield SourceRow(
            source=format_target(snat + port),
            backend=format_target_cached(backend),
            protocol=protocol_name(client[18]),
            client=format_target(client),
            service=service_name(service),
            state=state_name(state),
            idle_seconds=max(0, now - last_used) // tracked_connections.NS_PER_MS / 1000,
        )


USAGE_COLUMNS: Final = (
    Column("BACKEND", lambda r: r.backend),
    Column("PROTOCOL", lambda r: r.protocol),
    Column("NODE-ADDRESS", lambda r: r.node_address),
    Column("USED", lambda r: format_number(r.used), right=True),
    Column("CLOSED", lambda r: format_number(r.closed), right=True),
    Column("PORTS", lambda r: format_number(r.ports), right=True),
    Column("FILL", lambda r: f"{r.percent:.1f}%" + (" !" if r.alarm else "  "), right=True),
)

COLUMNS: Final = (
    Column("SOURCE", lambda r: r.source),
    Column("BACKEND", lambda r: r.backend),
    Column("PROTOCOL", lambda r: r.protocol),
    Column("CLIENT", lambda r: r.client),
    Column("SERVICE", lambda r: r.service),
    Column("STATE", lambda r: r.state),
    Column("IDLE", lambda r: format_duration(r.idle_seconds), right=True),
)

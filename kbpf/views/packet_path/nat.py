"""Translated sources: for whom the node stands before which backend, and how many of its ports
that takes.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect import tracked_connections
from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.inspect.tracked_connections import SNAT, Tracked, endpoint, shared_endpoint
from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps.flow_entries import NANO
from kbpf.dataplane.bpf.maps.layout import NAT, Reason, TcpState
from kbpf.model.address import format_addr
from kbpf.views.backends import service_text
from kbpf.views.columns import Column, number, span
from kbpf.views.packet_path.connections import protocol_name, state_name

NEEDS: Final = Part.NAMES | Part.CONNECTIONS | Part.PACKETS | Part.STATUS

ALARM_PERCENT: Final = 80.0


class UsageRow(msgspec.Struct, frozen=True):
    """How many ports of one of the node's addresses are in use before one backend and protocol:
    only there must they differ.

    `closed` of the `used` ones belong to connections that have ended, and are taken again when
    nothing else is found. `percent` is of the range. `alarm`: 80 % or more are used.
    """

    backend: str
    protocol: str
    node: str
    used: int
    closed: int
    ports: int
    percent: float
    alarm: bool


class SourceRow(msgspec.Struct, frozen=True, gc=False):
    """One translated source, ``address:port``: what the backend sees instead of the client."""

    source: str
    backend: str
    protocol: str
    client: str
    service: str
    state: str
    idle_seconds: float


class NatView(msgspec.Struct, frozen=True):
    """Without the sources themselves. `failures`: connections that found no port."""

    addresses: tuple[str, ...]
    first_port: int
    last_port: int
    ports: int
    failures: int
    usage: tuple[UsageRow, ...]


def translated(snapshot: Snapshot) -> tuple[Tracked, ...]:
    """Connections with a translated source whose time is not over, by that source and backend."""
    now = int(snapshot.monotonic * NANO)
    found = [
        one
        for one in snapshot.connections.values()
        if one.parts & SNAT and one.over >= now
    ]  # fmt: skip
    return tuple(
        sorted(
            found,
            key=lambda one: (
                one.backend,
                one.raw[flow_entries.SNAT],
                one.raw[flow_entries.SNAT_PORT],
                one.key,
            ),
        )
    )


def view(snapshot: Snapshot, found: Iterable[Tracked]) -> NatView:
    """What is true of all of them."""
    node = snapshot.node
    return NatView(
        addresses=tuple(format_addr(one) for one in node.own),
        first_port=node.low,
        last_port=node.high,
        ports=node.ports,
        failures=snapshot.reasons.get(Reason.NO_SNAT_PORT, 0),
        usage=_usage(found, node.ports),
    )


def _usage(found: Iterable[Tracked], ports: int) -> tuple[UsageRow, ...]:
    """The fullest first."""
    used: dict[tuple[bytes, bytes], list[int]] = {}
    for one in found:
        counts = used.setdefault((one.backend, one.snat), [0, 0])
        counts[0] += 1
        counts[1] += one.state == TcpState.CLOSED
    rows = []
    for (backend, snat), (count, closed) in used.items():
        percent = round(100 * count / ports, 1) if ports else 0.0
        rows.append(
            UsageRow(
                shared_endpoint(backend),
                protocol_name(backend[18]),
                format_addr(snat),
                count,
                closed,
                ports,
                percent,
                bool(ports) and count / ports >= ALARM_PERCENT / 100,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.used, row.backend, row.protocol, row.node)))


def rows(snapshot: Snapshot, found: Iterable[Tracked]) -> Iterator[SourceRow]:
    """One at a time: there may be a hundred thousand."""
    name = cache(lambda i: service_text(snapshot.names.get(i), i))
    now = int(snapshot.monotonic * NANO)
    for one in found:
        last, client, _, backend, snat, port, _, service, _, state, *_ = NAT.unpack(one.raw)
        yield SourceRow(
            source=endpoint(snat + port),
            backend=shared_endpoint(backend),
            protocol=protocol_name(client[18]),
            client=endpoint(client),
            service=name(service),
            state=state_name(state),
            idle_seconds=max(0, now - last) // tracked_connections.MILLI / 1000,
        )


USAGE_COLUMNS: Final = (
    Column("BACKEND", lambda r: r.backend),
    Column("PROTOCOL", lambda r: r.protocol),
    Column("NODE", lambda r: r.node),
    Column("USED", lambda r: number(r.used), right=True),
    Column("CLOSED", lambda r: number(r.closed), right=True),
    Column("PORTS", lambda r: number(r.ports), right=True),
    Column("FILL", lambda r: f"{r.percent:.1f}%" + (" !" if r.alarm else "  "), right=True),
)

COLUMNS: Final = (
    Column("SOURCE", lambda r: r.source),
    Column("BACKEND", lambda r: r.backend),
    Column("PROTOCOL", lambda r: r.protocol),
    Column("FOR", lambda r: r.client),
    Column("SERVICE", lambda r: r.service),
    Column("STATE", lambda r: r.state),
    Column("IDLE", lambda r: span(r.idle_seconds), right=True),
)

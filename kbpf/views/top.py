# SPDX-License-Identifier: Apache-2.0
"""Rates: what has changed between two reads of the counters, by Service, backend or client."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.inspection import (
    BackendTraffic,
    ConnectionEvent,
    EndpointEntry,
    Inspection,
    Part,
    ServicePort,
    select_ports,
)
from kbpf.model.metrics import CHOICE_COUNTERS, FAILURE_COUNTERS, IPVS_COUNTERS, ConnectionStats, ServiceLatencies
from kbpf.model.reasons import EventVerdict
from kbpf.views.failures import describe_client
from kbpf.views.latency import LatencyRow, build_latency_row, format_milliseconds
from kbpf.views.monitor import VERDICTS
from kbpf.views.page import Column, Kind, Page, format_size


class By(StrEnum):
    """What each row of the table is about."""

    SERVICES = "services"
    BACKENDS = "backends"
    CLIENTS = "clients"
    ZONES = "zones"
    NODES = "nodes"


OF_BACKENDS: Final = (By.BACKENDS, By.ZONES, By.NODES)
"""Whose rows are of backends: what has got none is not in them."""


def needs(by: By) -> Part:
    """The parts of an inspection that rows are built from; not those of clients."""
    parts = Part.TRAFFIC | Part.PACKETS
    return parts | Part.ENDPOINTS if by in OF_BACKENDS else parts


class TopRow(msgspec.Struct, frozen=True):
    """What a Service port, its backends, or a client have done, per second. None: not counted.

    `service` is ``namespace/name:port``, "" in a row of a client; `name` is the Service port, the
    backend, the zone or node of its backends ("" if it is not known), or the client. `pod`: that of
    a backend, ``namespace/name``; "" for other rows, and if it is not known. `new`: connections and
    datagram flows that got a backend. `no_backend`: those that were refused or dropped instead;
    None in rows of backends. `failed`: those whose backend refused, did not answer, or reset them.
    `open`: connections that are open now. `bytes_in` is from clients, `bytes_out` to them; bytes of
    a connection that a socket hook translated are added when it ends. `latency`: of the connections
    between the two reads; of rows of Services only.
    """

    service: str
    name: str
    pod: str
    new: float | None
    no_backend: float | None
    failed: float | None
    open: int | None
    bytes_in: float | None
    bytes_out: float | None
    latency: LatencyRow | None = None

    @property
    def is_active(self) -> bool:
        return any((self.new, self.no_backend, self.failed, self.open, self.bytes_in, self.bytes_out))


class TopSummary(msgspec.Struct, frozen=True):
    """`by`: what each row is about. `seconds`: the time between the two reads. `left_out`: how many
    connections of clients were not seen, since they were too many; None for other rows, which are
    not sampled.
    """

    by: By
    seconds: float
    left_out: int | None


KIND: Final = Kind("TopList", TopRow, TopSummary)


class _Totals(NamedTuple):
    """Sums of one row, and the Pod if it is of a backend. `has_bytes`: its bytes are measured.
    `latencies`: only of Services.
    """

    stats: ConnectionStats = ConnectionStats()
    open: int = 0
    pod: str = ""
    has_bytes: bool = False
    latencies: ServiceLatencies = ServiceLatencies()


# ---- from the counters ---------------------------------------------------------------------------


def build_rows(
    before: Inspection, after: Inspection, by: By, service: str = "", namespace: str = ""
) -> tuple[TopRow, ...]:
    """The rows that are active, the busiest first; not those of clients. `service` and
    `namespace`: see select_ports(). Raises NotFoundError if the Service is not programmed.
    """
    seconds = after.monotonic - before.monotonic
    ports = select_ports(after.services, service, namespace, after.location)
    old, new = _sum_up(before.services, by), _sum_up(ports, by)
    rows = (_build_row(key, by, old.get(key), totals, seconds, after) for key, totals in new.items())
    return _sort(row for row in rows if row.is_active)


def _sort(rows: Iterable[TopRow]) -> tuple[TopRow, ...]:
    def busy(row: TopRow) -> float:
        return (row.new or 0) + (row.no_backend or 0)

    return tuple(sorted(rows, key=lambda r: (-busy(r), -(r.failed or 0), -(r.open or 0), r.name)))


def _sum_up(ports: Iterable[ServicePort], by: By) -> Mapping[tuple[str, str], _Totals]:
    """Totals by Service and name. Both families of a Service port are one row."""
    sums: dict[tuple[str, str], _Totals] = {}
    for port in ports:
        for traffic in port.traffic:
            # The totals of removed backends are moved to `gone` some time later.
            if by in OF_BACKENDS and traffic.scope in ("gone", "none"):
                continue
            endpoint = port.endpoints.get(traffic.backend) if traffic.backend else None
            key = (port.text, _name(port, traffic, endpoint, by))
            totals = sums.get(key, _Totals())
            has_bytes = traffic.totals.has_bytes(port.key.protocol.name if port.key else "")
            sums[key] = totals._replace(
                stats=totals.stats.plus(traffic.totals),
                open=totals.open + traffic.open,
                pod=endpoint.pod if endpoint is not None and by is By.BACKENDS else "",
                has_bytes=totals.has_bytes or has_bytes,
            )
        key = port.text, port.text
        if by is By.SERVICES and port.latencies is not None and key in sums:
            latencies = sums[key].latencies.plus(port.latencies)
            sums[key] = sums[key]._replace(latencies=latencies)
    return sums


def _name(port: ServicePort, traffic: BackendTraffic, endpoint: EndpointEntry | None, by: By) -> str:
    if by is By.SERVICES:
        return port.text
    if by is not By.BACKENDS:
        place = endpoint and (endpoint.zone if by is By.ZONES else endpoint.node)
        return place or ""
    return str(traffic.backend or traffic.scope or f"id {traffic.id}, gone")


def _build_row(
    key: tuple[str, str], by: By, before: _Totals | None, after: _Totals, seconds: float, inspection: Inspection
) -> TopRow:
    counted = inspection.counted
    before = before or _Totals()
    latencies = after.latencies.since(before.latencies)

    def rate(*names: str) -> float | None:
        """A counter that has decreased was merged with others, or began again: not known."""
        changes: list[int] = [
            getattr(after.stats, name) - getattr(before.stats, name) for name in names if name in counted
        ]
        if not changes or min(changes) < 0 or seconds <= 0:
            return None
        return round(sum(changes) / seconds, 3)

    service, name = key
    bytes_in, bytes_out = (rate(name) if after.has_bytes else None for name in ("bytes_in", "bytes_out"))
    return TopRow(
        service,
        name,
        after.pod,
        rate("opened"),
        None if by in OF_BACKENDS else rate("no_endpoint", "not_allowed"),
        rate("refused", "unanswered", "reset"),
        after.open if inspection.lists_sockets else None,
        bytes_in,
        bytes_out,
        build_latency_row(latencies) if latencies != ServiceLatencies() else None,
    )


# ---- from events ---------------------------------------------------------------------------------


MAX_CLIENTS: Final = 10_000
"""Clients of each kind that are counted at a time; a flood may have a new address for each event,
and hides no Pod.
"""


class ClientCounts:
    """Counts the events of clients: Pods, other cgroups of the node, or addresses. `left_out`: the
    events of clients above MAX_CLIENTS.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[str, dict[str, Counter[EventVerdict]]] = defaultdict(dict)
        self.left_out = 0

    def add(self, events: Iterable[ConnectionEvent]) -> None:
        for event in events:
            address = format_addr(event.client.address) if event.client is not None else ""
            kind, name = describe_client(event, address)
            counts = self._counts[kind]
            if name in counts or len(counts) < MAX_CLIENTS:
                counts.setdefault(name, Counter())[VERDICTS[event.reason]] += 1
            else:
                self.left_out += 1

    def build_rows(self, seconds: float) -> tuple[TopRow, ...]:
        """The rows after this time, the busiest first."""

        def rate(counts: Counter[EventVerdict], *verdicts: EventVerdict) -> float:
            return round(sum(counts[verdict] for verdict in verdicts) / seconds, 3)

        return _sort(
            TopRow(
                "",
                name,
                "",
                rate(counts, EventVerdict.NEW),
                rate(counts, EventVerdict.REFUSED, EventVerdict.DROPPED),
                rate(counts, EventVerdict.FAILED),
                None,
                None,
                None,
            )
            for clients in self._counts.values()
            for name, counts in clients.items()
        )


# ---- the page ------------------------------------------------------------------------------------


def _format_rate(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 100 else f"{value:.0f}"


def _format_bytes(value: float) -> str:
    return format_size(round(value))


_RATES: Final = (
    Column("NEW/S", "new", _format_rate, right=True),
    Column("NO-BACKEND/S", "no_backend", _format_rate, right=True),
    Column("FAILED/S", "failed", _format_rate, right=True),
)
_TRAFFIC: Final = (
    *_RATES,
    Column("OPEN", "open", right=True),
    Column("IN/S", "bytes_in", _format_bytes, right=True),
    Column("OUT/S", "bytes_out", _format_bytes, right=True),
)
_LATENCY: Final = (
    Column("CONNECT-P50", "latency.connect_p50_ms", format_milliseconds, right=True, wide=True),
    Column("CONNECT-P99", "latency.connect_p99_ms", format_milliseconds, right=True),
    Column("RTT-P50", "latency.round_trip_p50_ms", format_milliseconds, right=True, wide=True),
    Column("RTT-P99", "latency.round_trip_p99_ms", format_milliseconds, right=True, wide=True),
)
_TRAFFIC_OF_BACKENDS: Final = tuple(c for c in _TRAFFIC if c.title != "NO-BACKEND/S")
COLUMNS: Final[Mapping[By, Sequence[Column]]] = {
    By.SERVICES: (Column("SERVICE", "name"), *_TRAFFIC, *_LATENCY),
    By.BACKENDS: (Column("SERVICE", "service"), Column("BACKEND", "name"), Column("POD", "pod"), *_TRAFFIC_OF_BACKENDS),
    By.ZONES: (Column("SERVICE", "service"), Column("ZONE", "name"), *_TRAFFIC_OF_BACKENDS),
    By.NODES: (Column("SERVICE", "service"), Column("NODE", "name"), *_TRAFFIC_OF_BACKENDS),
    By.CLIENTS: (Column("CLIENT", "name"), *_RATES),
}


def build_page(
    rows: Sequence[TopRow],
    summary: TopSummary,
    counted: frozenset[str],
    in_conntrack: bool = False,
    limit: int = 0,
) -> Page:
    """`counted`: see Inspection. `in_conntrack`: whether new connections are."""
    more = f"and {len(rows) - limit} more {summary.by}" if 0 < limit < len(rows) else ""
    notes = (more, *_notes(rows, summary, counted, in_conntrack))
    return Page(
        KIND,
        rows[:limit] if limit else rows,
        COLUMNS[summary.by],
        summary=summary,
        notes=notes,
        empty="" if rows else "Nothing has happened.",
    )


def _notes(rows: Iterable[TopRow], summary: TopSummary, counted: frozenset[str], in_conntrack: bool) -> Iterator[str]:
    if summary.by is By.CLIENTS:
        if summary.left_out:
            yield f"sampled: {summary.left_out:,} more events were not seen"
        return
    if counted == IPVS_COUNTERS:
        yield "mode ipvs counts connections and bytes only"
        return
    if not counted & CHOICE_COUNTERS:
        yield "connections are not counted: --accounting off"
    elif not counted & FAILURE_COUNTERS:
        yield "failures of backends are not noticed on this node: `kbpf check` says why"
    if "bytes_in" not in counted:
        what = "bytes and latencies" if summary.by is By.SERVICES else "bytes"
        yield f"{what} are not measured: --accounting full"
    if any(row.open is None for row in rows):
        yield "OPEN is not known: this kernel does not list sockets"
    if in_conntrack:
        yield ("--forwarding netfilter: OPEN, IN/S and OUT/S are without new connections from outside")

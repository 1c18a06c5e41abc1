# SPDX-License-Identifier: Apache-2.0
"""One Service in detail, all its ports and both families together: its frontends, and its endpoints
with Pod, node, zone, state, share and traffic.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.inspection import BackendEntry, BackendSet, BackendTraffic, Inspection, Part, ServicePort, find_ports
from kbpf.model.metrics import ConnectionStats
from kbpf.views.latency import LatencyRow, build_latency_row, format_latency, format_milliseconds
from kbpf.views.page import Column, Kind, Page, format_host_port, format_table, format_value, indent
from kbpf.views.page import format_size as size_text
from kbpf.views.services import NEEDS as SERVICES
from kbpf.views.services import FrontendRow, ServiceRow, build_row, row_key

NEEDS: Final = SERVICES | Part.TRAFFIC | Part.ENDPOINTS

TCP_ONLY: Final = frozenset(("unanswered", "reset", "retransmits", "rtts"))
"""Fields of ConnectionStats that exist for TCP only: for other protocols the kernel reports neither
how a connection ended nor its round-trip time."""
BYTES: Final = frozenset(("bytes_in", "bytes_out"))
NO_BACKEND_ONLY: Final = frozenset(("no_endpoint", "not_allowed"))
"""Fields that are counted before a backend is chosen, and that no backend has."""

NO_BACKEND: Final = BackendEntry(0, None)
"""A slot that should exist and does not."""


class SetMemberRow(msgspec.Struct, frozen=True):
    """A backend of a set. `index` is its first slot, `slots` how many it has, `share` their part of
    the set (0 to 1). `address` is "" if the slots have a backend id that does not exist.
    """

    index: int
    id: int | None
    address: str
    port: int
    slots: int
    share: float


class SetRow(msgspec.Struct, frozen=True):
    """A backend set. `size`: number of slots. `missing`: slots without an existing backend. Neither
    it nor its backends have an id in mode ipvs.
    """

    id: int | None
    size: int
    missing: int
    backends: tuple[SetMemberRow, ...]


class EndpointRow(msgspec.Struct, frozen=True):
    """An endpoint of the Service port, whether it is in a backend set or not.

    `pod` (``namespace/name``), `node`, `zone` and `state` are what its EndpointSlice says; "" if
    that is not known. `ready`, `serving` and `terminating` are then None. `id` is None if it has
    none: it is no backend, or the mode is ipvs. `cluster_share` and `local_share` are its part of
    the newest set of that name (0 to 1).
    """

    id: int | None
    address: str
    port: int
    pod: str
    node: str
    zone: str
    state: str
    ready: bool | None
    serving: bool | None
    terminating: bool | None
    cluster_share: float
    local_share: float

    @property
    def text(self) -> str:
        """``10.244.0.7:8080``."""
        return format_host_port(self.address, self.port)

    @property
    def is_used(self) -> bool:
        """Whether new connections may get it."""
        return bool(self.cluster_share or self.local_share)


class TrafficRow(msgspec.Struct, frozen=True):
    """Totals of the connections to one backend since counting began. None: not counted.

    `backend` is ``address:port``; ``none``: connections that got no backend; ``gone``: the sum of
    backends that no longer exist; ``all``: the sum of all backends, if the Service has one entry
    for them. `open`: connections that are open now. The other fields are those of ConnectionStats;
    `no_endpoint` and `not_allowed` exist only with `none` and `all`, and what failed at a backend
    only with backends. `unanswered`, `reset`, `retransmits` and `round_trip_ms` exist for TCP only;
    `round_trip_ms` is the mean over `round_trips` connections. Bytes of a connection that a socket
    hook translated are added when it ends.
    """

    id: int | None
    backend: str
    open: int | None
    opened: int | None
    no_endpoint: int | None
    not_allowed: int | None
    refused: int | None
    unanswered: int | None
    reset: int | None
    bytes_in: int | None
    bytes_out: int | None
    retransmits: int | None
    round_trip_ms: float | None
    round_trips: int | None


class ServiceDetail(msgspec.Struct, frozen=True):
    """One Service port with its backends. There are several `cluster` or `local` sets only while
    the Service is being changed: its frontends flip one after the other. `not_counted`: fields of
    `traffic` that the present --accounting does not count, and `open` if the kernel does not list
    sockets. `endpoints`: all that are known, sorted by address. `latency`: None if not measured.
    """

    service: ServiceRow
    cluster: tuple[SetRow, ...]
    local: tuple[SetRow, ...]
    traffic: tuple[TrafficRow, ...] = ()
    not_counted: tuple[str, ...] = ()
    endpoints: tuple[EndpointRow, ...] = ()
    latency: LatencyRow | None = None


def build_details(inspection: Inspection, name: str, namespace: str = "") -> tuple[ServiceDetail, ...]:
    """All ports of the Services that find_ports() finds, in all namespaces unless one is given."""
    ports = find_ports(inspection.services, name, inspection.location, namespace)
    details = (_build_detail(port, inspection) for port in ports)
    return tuple(sorted(details, key=lambda detail: row_key(detail.service)))


def _build_detail(port: ServicePort, inspection: Inspection) -> ServiceDetail:
    row = build_row(port, inspection)
    cluster = tuple(_set_rows(frontend.cluster for frontend in port.frontends))
    local = tuple(_set_rows(frontend.local for frontend in port.frontends))
    counted = inspection.counted | ({"open"} if inspection.lists_sockets else set())
    return ServiceDetail(
        row,
        cluster,
        local,
        tuple(_traffic_row(row, traffic, counted) for traffic in port.traffic),
        tuple(name for name in ("open", *TRAFFIC_COUNTERS) if name not in counted),
        tuple(_endpoint_rows(port, cluster, local)),
        build_latency_row(port.latencies) if port.latencies is not None else None,
    )


def _endpoint_rows(port: ServicePort, cluster: Sequence[SetRow], local: Sequence[SetRow]) -> Iterator[EndpointRow]:
    ids = {
        entry.backend: entry.id
        for frontend in port.frontends
        for backend_set in (frontend.cluster, frontend.local)
        for entry in backend_set.slots.values()
        if entry.backend is not None
    }
    cluster_shares, local_shares = _shares(cluster), _shares(local)
    for backend in sorted(port.endpoints.keys() | ids.keys()):
        entry, place = port.endpoints.get(backend), (format_addr(backend.address), backend.port)
        yield EndpointRow(
            ids.get(backend),
            *place,
            pod=entry.pod if entry else "",
            node=entry.node if entry else "",
            zone=entry.zone if entry else "",
            state=entry.state if entry else "",
            ready=entry.ready if entry else None,
            serving=entry.serving if entry else None,
            terminating=entry.terminating if entry else None,
            cluster_share=cluster_shares.get(place, 0.0),
            local_share=local_shares.get(place, 0.0),
        )


def _shares(sets: Sequence[SetRow]) -> dict[tuple[str, int], float]:
    """The shares in the newest of these sets, by address and port."""
    if not sets:
        return {}
    return {(member.address, member.port): member.share for member in sets[-1].backends}


def _traffic_row(row: ServiceRow, traffic: BackendTraffic, counted: frozenset[str]) -> TrafficRow:
    totals, open_count = traffic.totals, traffic.open if "open" in counted else None
    if row.protocol != "TCP":
        counted -= TCP_ONLY
    if not totals.has_bytes(row.protocol):
        counted -= BYTES
    if traffic.scope == "none":
        counted &= NO_BACKEND_ONLY
    elif traffic.scope != "all":
        counted -= NO_BACKEND_ONLY

    def count(name: str) -> int | None:
        return getattr(totals, name) if name in counted else None

    return TrafficRow(
        id=traffic.id,
        backend=str(traffic.backend or traffic.scope or f"id {traffic.id}, gone"),
        open=open_count,
        **{name: count(name) for name in TRAFFIC_COUNTERS if name != "rtts"},
        round_trip_ms=round(totals.rtt_us / totals.rtts / 1000, 3) if count("rtts") else None,
        round_trips=count("rtts"),
    )


def _set_rows(sets: Iterable[BackendSet]) -> Iterator[SetRow]:
    """The different sets, without the empty one."""
    for backend_set in sorted(dict.fromkeys(sets), key=lambda s: s.id or 0):
        if not backend_set.size:
            continue
        first_slots: dict[BackendEntry, int] = {}
        counts: Counter[BackendEntry] = Counter()
        for index in range(backend_set.size):
            entry = backend_set.slots.get(index, NO_BACKEND)
            counts[entry] += 1
            first_slots.setdefault(entry, index)
        rows = tuple(
            SetMemberRow(
                index,
                entry.id,
                format_addr(entry.backend.address) if entry.backend else "",
                entry.backend.port if entry.backend else 0,
                counts[entry],
                round(counts[entry] / backend_set.size, 4),
            )
            for entry, index in first_slots.items()
        )
        missing = sum(row.slots for row in rows if not row.address)
        yield SetRow(backend_set.id, backend_set.size, missing, rows)


MISSING: Final = "MISSING"
"""Slots of a set whose backend does not exist."""


def _format_address(member: SetMemberRow) -> str:
    return format_host_port(member.address, member.port) if member.address else MISSING


def _frontend_notes(row: FrontendRow) -> Iterator[str]:
    if row.nowhere:
        yield "not served: no address of this node matches nodePortAddresses"
    if row.restricted:
        yield "source ranges apply: left to the packet path"


TRAFFIC_COUNTERS: Final = {
    "opened": Column("OPENED", "traffic.opened", right=True),
    "no_endpoint": Column("NO-ENDPOINT", "traffic.no_endpoint", right=True),
    "not_allowed": Column("NOT-ALLOWED", "traffic.not_allowed", right=True),
    "refused": Column("REFUSED", "traffic.refused", right=True),
    "unanswered": Column("UNANSWERED", "traffic.unanswered", right=True),
    "reset": Column("RESET", "traffic.reset", right=True),
    "bytes_in": Column("IN", "traffic.bytes_in", size_text, right=True),
    "bytes_out": Column("OUT", "traffic.bytes_out", size_text, right=True),
    "retransmits": Column("RETRANSMITS", "traffic.retransmits", right=True),
    "rtts": Column("ROUND-TRIP", "traffic.round_trip_ms", format_milliseconds, right=True),
}
"""Fields of ConnectionStats → their columns. `--accounting` decides which are counted."""

ALWAYS_SHOWN: Final = frozenset(("opened", "refused", "unanswered", "reset"))
"""Counters of endpoints whose columns stay if --accounting does not count them."""

_NAME_COLUMNS: Final = (
    Column("PORT", "port"),
    Column("ENDPOINT", "text"),
    Column("POD", "endpoint.pod"),
    Column("NODE", "endpoint.node"),
    Column("ZONE", "endpoint.zone"),
    Column("STATE", "state"),
    Column("SHARE", "cluster", right=True),
)
_LOCAL_COLUMN: Final = Column("LOCAL", "local", right=True)
_ID_COLUMNS: Final = (Column("ID", "id", right=True, wide=True), Column("SLOTS", "slots", right=True, wide=True))


def _endpoint_columns(details: Sequence[ServiceDetail], wide: bool) -> list[Column]:
    """Without a column that says nothing here."""
    has_local = any(detail.service.backends_local is not None for detail in details)
    has_ports = len({detail.service.port for detail in details}) > 1
    not_counted = details[0].not_counted
    counters = [
        column
        for name, column in TRAFFIC_COUNTERS.items()
        if name not in NO_BACKEND_ONLY and (wide or name in ALWAYS_SHOWN or name not in not_counted)
    ]
    return [
        *_NAME_COLUMNS[0 if has_ports else 1 :],
        *([_LOCAL_COLUMN] if has_local else []),
        Column("OPEN", "traffic.open", right=True),
        *counters,
        *_ID_COLUMNS,
    ]


# ---- the page ------------------------------------------------------------------------------------


KIND: Final = Kind("ServiceDetailList", ServiceDetail)


def build_page(inspection: Inspection, name: str, namespace: str) -> Page:
    details = build_details(inspection, name, namespace)
    return Page(KIND, details, text=lambda wide: format_page(details, wide))


def format_page(details: Iterable[ServiceDetail], wide: bool = False) -> str:
    """Each Service: its policies, a table of frontends and one of endpoints."""
    services = groupby(details, key=lambda detail: _service_name(detail.service))
    return "\n\n".join("\n".join(_service_lines(name, [*ports], wide)) for name, ports in services)


def _service_name(row: ServiceRow) -> str:
    return row.full_name if row.name else f"id {row.id}, not named"


def _service_lines(name: str, details: Sequence[ServiceDetail], wide: bool) -> Iterator[str]:
    yield f"{name}   {_format_settings([detail.service for detail in details])}"
    yield indent(format_table(_frontend_lines(details), FRONTEND_COLUMNS, wide))
    yield ""
    lines = [line for detail in details for line in _endpoint_lines(detail)]
    if lines:
        yield indent(format_table(lines, _endpoint_columns(details, wide), wide))
    else:
        yield "  no endpoints"
    yield from map(indent, _remarks(details, lines))


def _format_settings(rows: Sequence[ServiceRow]) -> str:
    """What nearly all Services have in common among their ports; otherwise all values."""

    def join(texts: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(texts))

    affinity = (f"ClientIP {r.affinity_seconds}s" if r.affinity_seconds else "none" for r in rows)
    return "   ".join(
        (
            f"internal policy {join(row.internal_policy for row in rows)}",
            f"external policy {join(row.external_policy for row in rows)}",
            f"affinity {join(affinity)}",
            join(row.algorithm for row in rows),
        )
    )


@dataclass(frozen=True, slots=True)
class FrontendLine:
    """A line of the table of frontends. What belongs to the Service port and not to the frontend is
    in its first line only, where `detail` is set.
    """

    frontend: FrontendRow | None
    detail: ServiceDetail | None = None

    @property
    def text(self) -> str:
        return f"{self.frontend.text}/{self.frontend.protocol}" if self.frontend else "-"

    @property
    def ready(self) -> str:
        """How many endpoints are ready, of all; ``-`` if the map has no names for them."""
        endpoints = self.detail.endpoints if self.detail else ()
        if not endpoints:
            return "0/0"
        if all(row.ready is None for row in endpoints):
            return "-"
        return f"{sum(bool(row.ready) for row in endpoints)}/{len(endpoints)}"

    def count(self, name: str) -> int | None:
        """The sum of this field of the traffic; None if it is not counted."""
        assert self.detail is not None
        if name in self.detail.not_counted:
            return None
        return sum(getattr(row, name) or 0 for row in self.detail.traffic)


def _frontend_lines(details: Iterable[ServiceDetail]) -> Iterator[FrontendLine]:
    for detail in details:
        first, *others = detail.service.frontends or (None,)
        yield FrontendLine(first, detail)
        yield from (FrontendLine(frontend) for frontend in others)


def _in_first_line(text: Callable[[FrontendLine, ServiceDetail], str]) -> Callable[[Any], str]:
    return lambda line: text(line, line.detail) if line.detail else ""


FRONTEND_COLUMNS: Final = (
    Column("PORT", _in_first_line(lambda _, d: d.service.port or "-")),
    Column("FRONTEND", "text"),
    Column("KIND", "frontend.kind"),
    Column("READY", _in_first_line(lambda line, _: line.ready), right=True),
    Column("OPEN", _in_first_line(lambda line, _: format_value(line.count("open"))), right=True),
    Column("NO-ENDPOINT", _in_first_line(lambda line, _: format_value(line.count("no_endpoint"))), right=True),
    Column("NOT-ALLOWED", _in_first_line(lambda line, _: format_value(line.count("not_allowed"))), right=True),
    Column("ID", _in_first_line(lambda _, d: format_value(d.service.id)), right=True, wide=True),
    Column(
        "CLUSTER-SET",
        lambda line: format_value((line.frontend and line.frontend.cluster_set) or None),
        right=True,
        wide=True,
    ),
    Column(
        "LOCAL-SET",
        lambda line: format_value((line.frontend and line.frontend.local_set) or None),
        right=True,
        wide=True,
    ),
    Column("NOTE", lambda line: ", ".join(_frontend_notes(line.frontend)) if line.frontend else ""),
)


@dataclass(frozen=True, slots=True)
class EndpointLine:
    """A line of the table of endpoints: an endpoint, slots of a set without a backend (MISSING), or
    connections of backends that are gone.
    """

    port: str
    text: str
    id: int | None = None
    endpoint: EndpointRow | None = None
    traffic: TrafficRow | None = None
    slots: str = "-"
    cluster: str = "-"
    local: str = "-"

    @property
    def state(self) -> str:
        if self.endpoint is None or not self.endpoint.state:
            return "-"
        is_unused = self.endpoint.ready and not self.endpoint.is_used
        return self.endpoint.state + (", not used" if is_unused else "")


def _endpoint_lines(detail: ServiceDetail) -> Iterator[EndpointLine]:
    port = detail.service.port or "-"
    traffic = {row.backend: row for row in detail.traffic if row.backend != "none"}
    cluster, local = _index_members(detail.cluster), _index_members(detail.local)
    for endpoint in detail.endpoints:
        key = endpoint.text
        yield EndpointLine(
            port,
            key,
            endpoint.id,
            endpoint,
            traffic.pop(key, None) or _no_connections(detail, endpoint),
            slots=_join(str(member.slots) for member in cluster.get(key, ())),
            cluster=_format_shares(cluster.get(key, ())),
            local=_format_shares(local.get(key, ())),
        )
    for set_name, members in (("cluster", cluster), ("local", local)):
        for member in members.get(MISSING, ()):
            share: dict[str, Any] = {set_name: _format_shares([member])}
            yield EndpointLine(port, MISSING, member.id, slots=str(member.slots), **share)
    for row in traffic.values():
        yield EndpointLine(port, row.backend, row.id, traffic=row)


def _no_connections(detail: ServiceDetail, endpoint: EndpointRow) -> TrafficRow | None:
    """The zeros of a backend without connections; None if these are not counted one by one."""
    if endpoint.id is None or any(row.backend == "all" for row in detail.traffic):
        return None
    counted = frozenset(("open", *TRAFFIC_COUNTERS)) - set(detail.not_counted)
    return _traffic_row(detail.service, BackendTraffic(endpoint.id, None, "", 0, ConnectionStats()), counted)


def _index_members(sets: Iterable[SetRow]) -> dict[str, list[SetMemberRow]]:
    """The members of all these sets, by their text."""
    members: dict[str, list[SetMemberRow]] = {}
    for set_row in sets:
        for member in set_row.backends:
            members.setdefault(_format_address(member), []).append(member)
    return members


def _format_shares(members: Sequence[SetMemberRow]) -> str:
    return _join(f"{member.share:.1%}" for member in members) if members else "0%"


def _join(texts: Iterable[str]) -> str:
    """Several while the frontends of a Service flip one after the other."""
    return ", ".join(dict.fromkeys(texts)) or "-"


def _remarks(details: Sequence[ServiceDetail], lines: Sequence[EndpointLine]) -> Iterator[str]:
    for detail in details:
        service = detail.service
        which = f" of port {service.port}" if service.port else ""
        if not detail.cluster and (detail.local or service.backends_local is None):
            yield f"cluster set{which}: empty"
        if not detail.local and service.backends_local is not None:
            yield f"local set{which}: empty"
        for name, sets in (("cluster", detail.cluster), ("local", detail.local)):
            for set_ in sets:
                if set_.missing:
                    set_id = "" if set_.id is None else f" {set_.id}"
                    yield f"{name} set{set_id}: {set_.missing} of {set_.size} slots MISSING"
    if any(line.state.endswith("not used") for line in lines):
        yield "not used: by weight, topology hints or policy; kbpf inspect endpoints says which"
    yield from (text for detail in details if (text := _format_latency(detail)))
    not_counted = details[0].not_counted
    if "open" in not_counted:
        yield "OPEN is not known: this kernel does not list sockets"
    titles = [column.title for name, column in TRAFFIC_COUNTERS.items() if name in not_counted]
    if titles and any(detail.traffic for detail in details):
        if details[0].service.id is None:
            yield f"not counted in mode ipvs: {', '.join(titles)}"
        else:
            yield f"not counted: {', '.join(titles)}; --accounting full"


def _format_latency(detail: ServiceDetail) -> str:
    if detail.latency is None:
        return ""
    service = detail.service
    port = f" of port {service.port}" if service.port else ""
    return f"latency{port}, IPv{service.family}: {format_latency(detail.latency)}"

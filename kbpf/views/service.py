# SPDX-License-Identifier: Apache-2.0
"""One Service in detail: its frontends, backend sets, and the share and traffic of each backend."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.inspection import (
    BackendEntry,
    BackendSet,
    BackendTraffic,
    Inspection,
    Part,
    ServicePort,
    find_ports,
)
from kbpf.views.columns import Column, format_host_port, format_number
from kbpf.views.columns import format_size as size_text
from kbpf.views.page import Page
from kbpf.views.services import NEEDS as SERVICES
from kbpf.views.services import FrontendRow, ServiceRow, build_row, row_key
from kbpf.views.text import format_facts, format_table, indent

NEEDS: Final = SERVICES | Part.TRAFFIC

TCP_ONLY: Final = frozenset(("unanswered", "reset", "retransmits", "rtts"))
"""Fields of ConnectionStats that exist for TCP only: for other protocols the kernel reports neither
how a connection ended nor its round-trip time."""
NO_BACKEND_ONLY: Final = frozenset(("no_endpoint", "not_allowed"))
"""Fields that are counted before a backend is chosen, and that no backend has."""

NO_BACKEND: Final = BackendEntry(0, None)
"""A slot that should exist and does not."""

__all__ = ["NEEDS", "ServiceDetail", "build_details"]


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

    id: int
    backend: str
    open: int
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
    `traffic` that the present --accounting does not count.
    """

    service: ServiceRow
    cluster: tuple[SetRow, ...]
    local: tuple[SetRow, ...]
    traffic: tuple[TrafficRow, ...] = ()
    not_counted: tuple[str, ...] = ()


def build_details(
    inspection: Inspection, name: str, namespace: str = ""
) -> tuple[ServiceDetail, ...]:
    """All ports of the Services that find_ports() finds, in all namespaces unless one is given."""
    ports = find_ports(inspection.services, name, inspection.location, namespace)
    details = (_build_detail(port, inspection) for port in ports)
    return tuple(sorted(details, key=lambda detail: row_key(detail.service)))


def _build_detail(port: ServicePort, inspection: Inspection) -> ServiceDetail:
    row = build_row(port, inspection)
    return ServiceDetail(
        row,
        tuple(_set_rows(frontend.cluster for frontend in port.frontends)),
        tuple(_set_rows(frontend.local for frontend in port.frontends)),
        tuple(_traffic_row(row, traffic, inspection.counted) for traffic in port.traffic),
        tuple(name for name in TRAFFIC_COUNTERS if name not in inspection.counted),
    )


def _traffic_row(row: ServiceRow, traffic: BackendTraffic, counted: frozenset[str]) -> TrafficRow:
    totals = traffic.totals
    if row.protocol != "TCP":
        counted -= TCP_ONLY
    if traffic.scope == "none":
        counted &= NO_BACKEND_ONLY
    elif traffic.scope != "all":
        counted -= NO_BACKEND_ONLY

    def count(name: str) -> int | None:
        return getattr(totals, name) if name in counted else None

    return TrafficRow(
        id=traffic.id,
        backend=str(traffic.backend or traffic.scope or f"id {traffic.id}, gone"),
        open=traffic.open,
        opened=count("opened"),
        no_endpoint=count("no_endpoint"),
        not_allowed=count("not_allowed"),
        refused=count("refused"),
        unanswered=count("unanswered"),
        reset=count("reset"),
        bytes_in=count("bytes_in"),
        bytes_out=count("bytes_out"),
        retransmits=count("retransmits"),
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
            _member_row(index, entry, counts[entry], backend_set.size)
            for entry, index in first_slots.items()
        )
        missing = sum(row.slots for row in rows if not row.address)
        yield SetRow(backend_set.id, backend_set.size, missing, rows)


def _member_row(index: int, entry: BackendEntry, slots: int, size: int) -> SetMemberRow:
    share = round(slots / size, 4)
    if entry.backend is None:
        return SetMemberRow(index, entry.id, "", 0, slots, share)
    address = format_addr(entry.backend.address)
    return SetMemberRow(index, entry.id, address, entry.backend.port, slots, share)


def _frontend_notes(row: FrontendRow) -> Iterator[str]:
    if row.nowhere:
        yield "not served: no address of this node matches nodePortAddresses"
    if row.restricted:
        yield "source ranges apply: left to the packet path"


FRONTEND_COLUMNS: Final = (
    Column("FRONTEND", lambda f: f"{f.text}/{f.protocol}"),
    Column("KIND", lambda f: f.kind),
    Column("CLUSTER-SET", lambda f: format_number(f.cluster_set or None), right=True),
    Column("LOCAL-SET", lambda f: format_number(f.local_set or None), right=True),
    Column("NOTE", lambda f: ", ".join(_frontend_notes(f))),
)


def _format_address(member: SetMemberRow) -> str:
    return format_host_port(member.address, member.port) if member.address else "MISSING"


BACKEND_COLUMNS: Final = (
    Column("ID", lambda b: format_number(b.id), right=True),
    Column("BACKEND", _format_address),
    Column("SLOTS", lambda b: format_number(b.slots), right=True),
    Column("SHARE", lambda b: f"{b.share:.1%}", right=True),
)

TRAFFIC_COUNTERS: Final = {
    "opened": Column("OPENED", lambda t: format_number(t.opened), right=True),
    "no_endpoint": Column("NO-ENDPOINT", lambda t: format_number(t.no_endpoint), right=True),
    "not_allowed": Column("NOT-ALLOWED", lambda t: format_number(t.not_allowed), right=True),
    "refused": Column("REFUSED", lambda t: format_number(t.refused), right=True),
    "unanswered": Column("UNANSWERED", lambda t: format_number(t.unanswered), right=True),
    "reset": Column("RESET", lambda t: format_number(t.reset), right=True),
    "bytes_in": Column("IN", lambda t: size_text(t.bytes_in), right=True),
    "bytes_out": Column("OUT", lambda t: size_text(t.bytes_out), right=True),
    "retransmits": Column("RETRANSMITS", lambda t: format_number(t.retransmits), right=True),
    "rtts": Column("ROUND-TRIP", lambda t: _format_milliseconds(t.round_trip_ms), right=True),
}
"""Fields of ConnectionStats → their columns. `--accounting` decides which are counted."""

TRAFFIC_COLUMNS: Final = (
    Column("BACKEND", lambda t: t.backend),
    Column("OPEN", lambda t: format_number(t.open), right=True),
    *TRAFFIC_COUNTERS.values(),
)


def _format_milliseconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.3g}ms"


# ---- the page ------------------------------------------------------------------------------------


def build_page(inspection: Inspection, name: str, namespace: str) -> Page:
    details = build_details(inspection, name, namespace)
    return Page(text=lambda wide: format_page(details), summary=details)


def format_page(details: Iterable[ServiceDetail]) -> str:
    """Each Service port: policies, frontends, backend sets with their members, traffic."""
    return "\n\n".join("\n".join(_service_lines(detail)) for detail in details)


def _service_lines(detail: ServiceDetail) -> Iterator[str]:
    row = detail.service
    port = f", port {row.port}" if row.port else ""
    yield f"{row.full_name}{port}, {row.protocol}, IPv{row.family}"
    affinity = f"ClientIP, {row.affinity_seconds} s" if row.affinity_seconds else "none"
    yield indent(
        format_facts(
            (
                *([("service id", str(row.id))] if row.id is not None else []),
                ("internal policy", row.internal_policy),
                ("external policy", row.external_policy),
                ("algorithm", row.algorithm),
                ("affinity", affinity),
            )
        )
    )
    yield indent(format_table(row.frontends, FRONTEND_COLUMNS))
    yield from _set_lines("cluster", detail.cluster)
    if row.backends_local is not None:
        yield from _set_lines("local", detail.local)
    if detail.traffic:
        yield "  connections since counting began"
        yield indent(format_table(detail.traffic, TRAFFIC_COLUMNS), "    ")
        if detail.not_counted:
            titles = ", ".join(TRAFFIC_COUNTERS[name].title for name in detail.not_counted)
            yield f"    not counted: {titles}; --accounting full"


def _set_lines(name: str, sets: Sequence[SetRow]) -> Iterator[str]:
    if not sets:
        yield f"  {name} set: empty"
    for set_row in sets:
        missing = f", {set_row.missing} MISSING" if set_row.missing else ""
        slots = f" in {set_row.size} slots" if set_row.size > len(set_row.backends) else ""
        set_id = "" if set_row.id is None else f" {set_row.id}"
        yield f"  {name} set{set_id}: {len(set_row.backends)} backends{slots}{missing}"
        yield indent(format_table(set_row.backends, BACKEND_COLUMNS), "    ")

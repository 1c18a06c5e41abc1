# SPDX-License-Identifier: Apache-2.0
"""One Service in detail: its frontends, backend sets, and the share and traffic of each backend."""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.metrics import ALL_BACKENDS, NO_BACKEND, REMOVED_BACKENDS
from kbpf.errors import NotFoundError
from kbpf.model.address import format_addr
from kbpf.model.metrics import ConnectionStats
from kbpf.views.columns import Column, format_host_port, format_number
from kbpf.views.columns import format_size as size_text
from kbpf.views.services import NEEDS as SERVICES
from kbpf.views.services import FrontendRow, ServiceRow, build_rows

NEEDS: Final = SERVICES | Part.TRAFFIC

TCP_ONLY: Final = frozenset(("unanswered", "broken", "retransmits", "rtts"))
"""Fields of ConnectionStats that exist for TCP only: for other protocols the kernel reports neither
how a connection ended nor its round-trip time."""

__all__ = ["NEEDS", "ServiceDetail", "build_details"]


class SetMemberRow(msgspec.Struct, frozen=True):
    """A backend of a set. `index` is its first slot, `slots` how many it has, `share` their part of
    the set (0 to 1). `address` is "" if the slots have a backend id that does not exist.
    """

    index: int
    id: int
    address: str
    port: int
    slots: int
    share: float


class SetRow(msgspec.Struct, frozen=True):
    """A backend set. `size`: number of slots. `missing`: slots without an existing backend."""

    id: int
    size: int
    missing: int
    backends: tuple[SetMemberRow, ...]


class TrafficRow(msgspec.Struct, frozen=True):
    """Totals of the connections to one backend since counting began. None: not counted.

    `backend` is ``address:port``; ``none``: connections that got no backend; ``gone``: the sum of
    backends that no longer exist; ``all``: the sum of all backends, if the Service has one entry
    for them. `open`: connections that are open now. `refused`: no backend was available.
    `unanswered`, `broken`, `retransmits` and `round_trip_ms` exist for TCP only; `round_trip_ms` is
    the mean over `round_trips` connections. Bytes of a connection that a socket hook translated are
    added when it ends.
    """

    id: int
    backend: str
    open: int
    opened: int | None
    refused: int | None
    unanswered: int | None
    broken: int | None
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


def build_details(snapshot: Snapshot, name: str, namespace: str = "") -> tuple[ServiceDetail, ...]:
    """All ports of the Services with this name (``name`` or ``namespace/name``), in all namespaces
    unless one is given. Raises NotFoundError, which suggests similar names, if there is none.
    """
    if "/" in name:
        namespace, _, name = name.partition("/")
    all_rows = build_rows(snapshot)
    matching = [r for r in all_rows if r.name == name and namespace in ("", r.namespace)]
    if not matching:
        full_name = f"{namespace}/{name}" if namespace else name
        raise NotFoundError(
            f"no Service {full_name} is programmed", str(snapshot.pin_dir), _suggest(name, all_rows)
        )
    pair_ids = snapshot.totals.keys() | snapshot.open.keys()
    return tuple(
        _build_detail(
            row, snapshot, [backend for service, backend in pair_ids if service == row.id]
        )
        for row in matching
    )


def _suggest(name: str, all_rows: Iterable[ServiceRow]) -> str:
    by_name: dict[str, set[str]] = {}
    for row in all_rows:
        if row.name:
            by_name.setdefault(row.name, set()).add(row.full_name)
    close_names = difflib.get_close_matches(name, by_name, n=3, cutoff=0.5)
    close_names += sorted(
        candidate for candidate in by_name if name in candidate and candidate not in close_names
    )[:3]
    suggestions = [
        full_name for candidate in close_names for full_name in sorted(by_name[candidate])
    ]
    if suggestions:
        return f"did you mean {' or '.join(suggestions[:5])}?"
    return "`kbpf inspect services` lists all" if by_name else "no Service is programmed at all"


def _build_detail(row: ServiceRow, snapshot: Snapshot, backend_ids: Iterable[int]) -> ServiceDetail:
    """`backend_ids`: the backends that the Service port has, or had, connections to."""
    cluster = {f.cluster_set: f.cluster_size for f in row.frontends if f.cluster_set}
    local = {f.local_set: f.local_size for f in row.frontends if f.local_set}
    return ServiceDetail(
        row,
        tuple(_set_rows(cluster, snapshot)),
        tuple(_set_rows(local, snapshot)),
        tuple(_traffic_row(row, backend, snapshot) for backend in sorted(backend_ids)),
        tuple(name for name in TRAFFIC_COUNTERS if name not in snapshot.counted),
    )


def _traffic_row(row: ServiceRow, backend: int, snapshot: Snapshot) -> TrafficRow:
    totals = snapshot.totals.get((row.id, backend), ConnectionStats())
    counted = snapshot.counted - (frozenset() if row.protocol == "TCP" else TCP_ONLY)
    backend_value = snapshot.backends.get(backend)
    if backend_value is not None:
        backend_text = format_host_port(format_addr(backend_value.address), backend_value.port)
    else:
        special = {NO_BACKEND: "none", REMOVED_BACKENDS: "gone", ALL_BACKENDS: "all"}
        backend_text = special.get(backend, f"id {backend}, gone")

    def count(name: str) -> int | None:
        return getattr(totals, name) if name in counted else None

    return TrafficRow(
        id=backend,
        backend=backend_text,
        open=snapshot.open.get((row.id, backend), 0),
        opened=count("opened"),
        refused=count("refused"),
        unanswered=count("unanswered"),
        broken=count("broken"),
        bytes_in=count("bytes_in"),
        bytes_out=count("bytes_out"),
        retransmits=count("retransmits"),
        round_trip_ms=round(totals.rtt_us / totals.rtts / 1000, 3) if count("rtts") else None,
        round_trips=count("rtts"),
    )


def _set_rows(sizes: Mapping[int, int], snapshot: Snapshot) -> Iterator[SetRow]:
    for set_id, size in sorted(sizes.items()):
        slots = snapshot.sets.get(set_id, {})
        first_slots: dict[int, int] = {}
        counts: Counter[int] = Counter()
        for index in range(size):
            backend_id = slots.get(index, 0)
            counts[backend_id] += 1
            first_slots.setdefault(backend_id, index)
        rows = tuple(
            _member_row(index, backend_id, counts[backend_id], size, snapshot)
            for backend_id, index in first_slots.items()
        )
        yield SetRow(set_id, size, sum(row.slots for row in rows if not row.address), rows)


def _member_row(
    index: int, backend_id: int, slots: int, size: int, snapshot: Snapshot
) -> SetMemberRow:
    share = round(slots / size, 4)
    backend = snapshot.backends.get(backend_id)
    if backend is None:
        return SetMemberRow(index, backend_id, "", 0, slots, share)
    address = format_addr(backend.address)
    return SetMemberRow(index, backend_id, address, backend.port, slots, share)


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
    "refused": Column("REFUSED", lambda t: format_number(t.refused), right=True),
    "unanswered": Column("UNANSWERED", lambda t: format_number(t.unanswered), right=True),
    "broken": Column("BROKEN", lambda t: format_number(t.broken), right=True),
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

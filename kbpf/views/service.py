"""One Service in full: every frontend, every backend set, and how much each backend gets."""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.metrics import ALL_BACKENDS, GONE, NO_BACKEND
from kbpf.errors import NotFoundError
from kbpf.model.address import format_addr
from kbpf.model.metrics import Totals
from kbpf.views.columns import Column, endpoint, number
from kbpf.views.columns import size as size_text
from kbpf.views.services import NEEDS as SERVICES
from kbpf.views.services import FrontendRow, ServiceRow, rows

NEEDS: Final = SERVICES | Part.TRAFFIC

TCP_ONLY: Final = frozenset(("unanswered", "broken", "retransmits", "rtts"))
"""Numbers of Totals that other protocols do not have: nobody says how their connections end."""

__all__ = ["NEEDS", "ServiceDetail", "details"]


class BackendRow(msgspec.Struct, frozen=True):
    """A backend of a set: its first slot, how many it has, and what part of all that is (0 to 1).
    An address of "" means that the backend is missing.
    """

    index: int
    id: int
    address: str
    port: int
    slots: int
    share: float


class SetRow(msgspec.Struct, frozen=True):
    """A backend set. `size`: its slots; `missing`: those that lead to no backend and should."""

    id: int
    size: int
    missing: int
    backends: tuple[BackendRow, ...]


class TrafficRow(msgspec.Struct, frozen=True):
    """A backend, and what connections to it came to since counting began; bytes of a connection
    through a socket count when it ends. `backend` is an address, ``none`` for connections that got
    none, ``gone`` for backends that are no more. `open`: open connections. `refused`: since no
    backend would do. `unanswered` and `broken` are known of TCP, as are `retransmits` and
    `round_trip_ms`, the mean of `round_trips` connections. None: it is not counted.
    """

    id: int
    backend: str
    open: int
    begun: int | None
    refused: int | None
    unanswered: int | None
    broken: int | None
    bytes_in: int | None
    bytes_out: int | None
    retransmits: int | None
    round_trip_ms: float | None
    round_trips: int | None


class ServiceDetail(msgspec.Struct, frozen=True):
    """One Service port with the backends behind it. Several sets of one kind: it is being changed
    just now. `not_counted`: numbers of `traffic` that the present --accounting leaves out.
    """

    service: ServiceRow
    cluster: tuple[SetRow, ...]
    local: tuple[SetRow, ...]
    traffic: tuple[TrafficRow, ...] = ()
    not_counted: tuple[str, ...] = ()


def details(snapshot: Snapshot, name: str, namespace: str = "") -> tuple[ServiceDetail, ...]:
    """All ports of the Services with this name (``name`` or ``namespace/name``), in any namespace
    unless one is said. NotFoundError names the nearest ones.
    """
    if "/" in name:
        namespace, _, name = name.partition("/")
    everything = rows(snapshot)
    found = [r for r in everything if r.name == name and namespace in ("", r.namespace)]
    if not found:
        wanted = f"{namespace}/{name}" if namespace else name
        raise NotFoundError(
            f"no Service {wanted} is programmed", str(snapshot.pin_dir), _near(name, everything)
        )
    ids = snapshot.totals.keys() | snapshot.open.keys()
    return tuple(
        _detail(row, snapshot, [backend for service, backend in ids if service == row.id])
        for row in found
    )


def _near(name: str, everything: Iterable[ServiceRow]) -> str:
    by_name: dict[str, set[str]] = {}
    for row in everything:
        if row.name:
            by_name.setdefault(row.name, set()).add(row.full_name)
    near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.5)
    near += sorted(other for other in by_name if name in other and other not in near)[:3]
    found = [full for other in near for full in sorted(by_name[other])]
    if found:
        return f"did you mean {' or '.join(found[:5])}?"
    return "`kbpf inspect services` lists all" if by_name else "no Service is"


def _detail(row: ServiceRow, snapshot: Snapshot, used: Iterable[int]) -> ServiceDetail:
    """`used`: the ids of backends that it has, or had, connections to."""
    cluster = {f.cluster_set: f.cluster_size for f in row.frontends if f.cluster_set}
    local = {f.local_set: f.local_size for f in row.frontends if f.local_set}
    return ServiceDetail(
        row,
        tuple(_sets(cluster, snapshot)),
        tuple(_sets(local, snapshot)),
        tuple(_traffic(row, backend, snapshot) for backend in sorted(used)),
        tuple(name for name in COUNTED if name not in snapshot.counted),
    )


def _traffic(row: ServiceRow, backend: int, snapshot: Snapshot) -> TrafficRow:
    had = snapshot.totals.get((row.id, backend), Totals())
    counted = snapshot.counted - (frozenset() if row.protocol == "TCP" else TCP_ONLY)
    known = snapshot.backends.get(backend)
    if known is not None:
        where = endpoint(format_addr(known.address), known.port)
    else:
        special = {NO_BACKEND: "none", GONE: "gone", ALL_BACKENDS: "all"}
        where = special.get(backend, f"id {backend}, gone")

    def count(name: str) -> int | None:
        return getattr(had, name) if name in counted else None

    return TrafficRow(
        id=backend,
        backend=where,
        open=snapshot.open.get((row.id, backend), 0),
        begun=count("begun"),
        refused=count("refused"),
        unanswered=count("unanswered"),
        broken=count("broken"),
        bytes_in=count("bytes_in"),
        bytes_out=count("bytes_out"),
        retransmits=count("retransmits"),
        round_trip_ms=round(had.rtt_us / had.rtts / 1000, 3) if count("rtts") else None,
        round_trips=count("rtts"),
    )


def _sets(sizes: Mapping[int, int], snapshot: Snapshot) -> Iterator[SetRow]:
    for set_id, size in sorted(sizes.items()):
        slots = snapshot.sets.get(set_id, {})
        first: dict[int, int] = {}
        counts: Counter[int] = Counter()
        for index in range(size):
            backend_id = slots.get(index, 0)
            counts[backend_id] += 1
            first.setdefault(backend_id, index)
        rows = tuple(
            _backend(index, backend_id, counts[backend_id], size, snapshot)
            for backend_id, index in first.items()
        )
        yield SetRow(set_id, size, sum(row.slots for row in rows if not row.address), rows)


def _backend(index: int, backend_id: int, slots: int, size: int, snapshot: Snapshot) -> BackendRow:
    share = round(slots / size, 4)
    backend = snapshot.backends.get(backend_id)
    if backend is None:
        return BackendRow(index, backend_id, "", 0, slots, share)
    address = format_addr(backend.address)
    return BackendRow(index, backend_id, address, backend.port, slots, share)


def _notes(row: FrontendRow) -> Iterator[str]:
    if row.nowhere:
        yield "answers nowhere: no address of this node is in nodePortAddresses"
    if row.restricted:
        yield "source ranges: not for sockets"


FRONTEND_COLUMNS: Final = (
    Column("FRONTEND", lambda f: f"{f.text}/{f.protocol}"),
    Column("KIND", lambda f: f.kind),
    Column("CLUSTER-SET", lambda f: number(f.cluster_set or None), right=True),
    Column("LOCAL-SET", lambda f: number(f.local_set or None), right=True),
    Column("NOTE", lambda f: ", ".join(_notes(f))),
)


def _address(place: BackendRow) -> str:
    return endpoint(place.address, place.port) if place.address else "MISSING"


BACKEND_COLUMNS: Final = (
    Column("ID", lambda b: number(b.id), right=True),
    Column("BACKEND", _address),
    Column("SLOTS", lambda b: number(b.slots), right=True),
    Column("SHARE", lambda b: f"{b.share:.1%}", right=True),
)

COUNTED: Final = {
    "begun": Column("BEGUN", lambda t: number(t.begun), right=True),
    "refused": Column("REFUSED", lambda t: number(t.refused), right=True),
    "unanswered": Column("UNANSWERED", lambda t: number(t.unanswered), right=True),
    "broken": Column("BROKEN", lambda t: number(t.broken), right=True),
    "bytes_in": Column("IN", lambda t: size_text(t.bytes_in), right=True),
    "bytes_out": Column("OUT", lambda t: size_text(t.bytes_out), right=True),
    "retransmits": Column("RETRANSMITS", lambda t: number(t.retransmits), right=True),
    "rtts": Column("ROUND-TRIP", lambda t: _milliseconds(t.round_trip_ms), right=True),
}
"""Numbers of Totals, and the columns that show them: `--accounting` says which are counted."""

TRAFFIC_COLUMNS: Final = (
    Column("BACKEND", lambda t: t.backend),
    Column("OPEN", lambda t: number(t.open), right=True),
    *COUNTED.values(),
)


def _milliseconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.3g}ms"

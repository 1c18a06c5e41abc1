"""One Service in full: every frontend, every backend set, and how much each backend gets."""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from kbpf.errors import NotFoundError
from kbpf.model.address import format_addr
from kbpf.views.columns import Column, endpoint, number
from kbpf.views.services import NEEDS, ServiceRow, rows
from kbpf.views.snapshot import Snapshot

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


class ServiceDetail(msgspec.Struct, frozen=True):
    """One Service port with the backends behind it. Several sets of one kind: it is being changed
    just now.
    """

    service: ServiceRow
    cluster: tuple[SetRow, ...]
    local: tuple[SetRow, ...]


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
    return tuple(_detail(row, snapshot) for row in found)


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


def _detail(row: ServiceRow, snapshot: Snapshot) -> ServiceDetail:
    cluster = {f.cluster_set: f.cluster_size for f in row.frontends if f.cluster_set}
    local = {f.local_set: f.local_size for f in row.frontends if f.local_set}
    return ServiceDetail(row, tuple(_sets(cluster, snapshot)), tuple(_sets(local, snapshot)))


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


FRONTEND_COLUMNS: Final = (
    Column("FRONTEND", lambda f: f"{f.text}/{f.protocol}"),
    Column("KIND", lambda f: f.kind),
    Column("CLUSTER-SET", lambda f: number(f.cluster_set or None), right=True),
    Column("LOCAL-SET", lambda f: number(f.local_set or None), right=True),
    Column("NOTE", lambda f: "source ranges: not for sockets" if f.restricted else ""),
)


def _address(place: BackendRow) -> str:
    return endpoint(place.address, place.port) if place.address else "MISSING"


BACKEND_COLUMNS: Final = (
    Column("ID", lambda b: number(b.id), right=True),
    Column("BACKEND", _address),
    Column("SLOTS", lambda b: number(b.slots), right=True),
    Column("SHARE", lambda b: f"{b.share:.1%}", right=True),
)

# SPDX-License-Identifier: Apache-2.0
"""The Services in the maps: one row per Service port and IP family."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kbpf.dataplane.bpf.changes.adopt import frontend_of
from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.maps.layout import ServiceFlag, ServiceValue
from kbpf.model.address import ANY4, ANY6, family_of, format_addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.objects import Algorithm
from kbpf.views.columns import Column, format_host_port, format_number

NEEDS: Final = Part.SERVICES
POLICY_NAMES: Final = {False: "Cluster", True: "Local"}


class FrontendRow(msgspec.Struct, frozen=True):
    """A frontend. `kind` is ``ClusterIP``, ``ExternalIP``, ``LoadBalancer``, ``NodePort`` or
    ``unknown``; the address of a NodePort is the family's wildcard.

    `restricted`: source ranges apply, so the socket hooks leave it alone. `nowhere`: a NodePort
    that no address of this node serves. `cluster_set` and `local_set` are ids; 0: an empty set.
    """

    address: str
    port: int
    protocol: str
    kind: str
    restricted: bool
    nowhere: bool
    cluster_set: int
    cluster_size: int
    local_set: int
    local_size: int

    @property
    def text(self) -> str:
        """``10.96.0.1:80``, ``[fd00::1]:80`` or ``*:30080``."""
        if self.kind == "NodePort":
            return f"*:{self.port}"
        return format_host_port(self.address, self.port)


class ServiceRow(msgspec.Struct, frozen=True):
    """A Service port in one IP family.

    `backends_local` is None if neither traffic policy is Local. `affinity_seconds` is 0 without
    session affinity. `name` is "" if `service_names` has no entry for the id; `family` is then 0.
    """

    namespace: str
    name: str
    port: str
    protocol: str
    family: int
    id: int
    frontends: tuple[FrontendRow, ...]
    internal_policy: str
    external_policy: str
    algorithm: str
    affinity_seconds: int
    backends_cluster: int
    backends_local: int | None

    @property
    def full_name(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


EntriesByService = Mapping[int, list[tuple[FrontendAddress, ServiceValue]]]


def build_rows(snapshot: Snapshot) -> tuple[ServiceRow, ...]:
    """All Service ports, sorted by name; those without a name come last."""
    entries = _by_service(snapshot)
    service_rows = [
        _build_row(service_id, snapshot, entries.get(service_id, []))
        for service_id in snapshot.names.keys() | entries.keys()
    ]
    return tuple(
        sorted(
            service_rows,
            key=lambda r: (not r.name, r.namespace, r.name, r.port, r.protocol, r.family),
        )
    )


def _by_service(snapshot: Snapshot) -> EntriesByService:
    entries: dict[int, list[tuple[FrontendAddress, ServiceValue]]] = {}
    for address, value in snapshot.frontends.items():
        entries.setdefault(value.id, []).append((address, value))
    return entries


def _build_row(
    service_id: int, snapshot: Snapshot, entries: Sequence[tuple[FrontendAddress, ServiceValue]]
) -> ServiceRow:
    key, sets = snapshot.names.get(service_id), snapshot.sets
    frontends = tuple(
        sorted((_build_frontend(*entry, snapshot.node_ports) for entry in entries), key=_sort_key)
    )
    values = [value for _, value in entries]
    flags = ServiceFlag(values[0].flags if values else 0)
    wants_local = bool(flags & (ServiceFlag.INTERNAL_LOCAL | ServiceFlag.EXTERNAL_LOCAL))
    return ServiceRow(
        namespace=key.namespace if key else "",
        name=key.name if key else "",
        port=key.port if key else "",
        protocol=key.protocol.name if key else (frontends[0].protocol if frontends else ""),
        family=key.family if key else 0,
        id=service_id,
        frontends=frontends,
        internal_policy=POLICY_NAMES[ServiceFlag.INTERNAL_LOCAL in flags],
        external_policy=POLICY_NAMES[ServiceFlag.EXTERNAL_LOCAL in flags],
        algorithm=str(Algorithm.MAGLEV if ServiceFlag.MAGLEV in flags else Algorithm.RANDOM),
        affinity_seconds=max((v.affinity_timeout for v in values), default=0),
        backends_cluster=_largest_set_size({(v.cluster_set, v.cluster_size) for v in values}, sets),
        backends_local=_largest_set_size({(v.local_set, v.local_size) for v in values}, sets)
        if wants_local
        else None,
    )


def _largest_set_size(
    id_sizes: Iterable[tuple[int, int]], sets: Mapping[int, Mapping[int, int]]
) -> int:
    """The number of backends in the largest of these sets, given as (id, slots). A backend may have
    several slots and counts once; a missing slot counts as a backend.
    """
    slots = ((sets.get(set_id, {}), size) for set_id, size in id_sizes)
    return max((len(set(s.values())) + max(0, size - len(s)) for s, size in slots), default=0)


def _build_frontend(
    address: FrontendAddress, value: ServiceValue, node_ports: frozenset[int] | None
) -> FrontendRow:
    frontend = frontend_of(address, value)
    wildcard = {ANY4: "0.0.0.0", ANY6: "::"}
    kind = str(frontend.kind) if frontend else "unknown"
    return FrontendRow(
        address=wildcard.get(address.address) or format_addr(address.address),
        port=address.port,
        protocol=address.protocol.name,
        kind=kind,
        restricted=bool(frontend and frontend.restricted),
        nowhere=kind == "NodePort"
        and node_ports is not None
        and family_of(address.address) not in node_ports,
        cluster_set=value.cluster_set,
        cluster_size=value.cluster_size,
        local_set=value.local_set,
        local_size=value.local_size,
    )


_KIND_ORDER: Final = ("ClusterIP", "ExternalIP", "LoadBalancer", "NodePort", "unknown")


def _sort_key(row: FrontendRow) -> tuple[int, str, int]:
    return _KIND_ORDER.index(row.kind), row.address, row.port


# ---- columns -------------------------------------------------------------------------------


def _format_frontends(row: ServiceRow) -> str:
    return ", ".join(map(_format_frontend, row.frontends)) or "-"


def _format_frontend(row: FrontendRow) -> str:
    if row.kind == "ClusterIP":
        return row.text
    return f"{row.text} ({row.kind}{', not served' if row.nowhere else ''})"


def _format_backends(row: ServiceRow) -> str:
    if row.backends_local is None:
        return str(row.backends_cluster)
    return f"{row.backends_cluster} ({row.backends_local} local)"


def _format_policy(row: ServiceRow) -> str:
    if row.internal_policy == row.external_policy:
        return row.internal_policy
    return f"{row.internal_policy}/{row.external_policy}"


def _format_set_ids(row: ServiceRow, field: str) -> str:
    ids = sorted({getattr(f, field) for f in row.frontends} - {0})
    return ",".join(map(str, ids)) or "-"


COLUMNS: Final = (
    Column("NAMESPACE", lambda r: r.namespace or "-"),
    Column("NAME", lambda r: r.name or "-"),
    Column("PORT", lambda r: r.port or "-"),
    Column("PROTOCOL", lambda r: r.protocol),
    Column("FRONTENDS", _format_frontends),
    Column("BACKENDS", _format_backends),
    Column("POLICY", _format_policy),
    Column("ALGORITHM", lambda r: r.algorithm, wide=True),
    Column("AFFINITY", lambda r: f"{r.affinity_seconds}s" if r.affinity_seconds else "-"),
    Column("FAMILY", lambda r: f"IPv{r.family}" if r.family else "-", wide=True),
    Column("ID", lambda r: format_number(r.id), wide=True, right=True),
    Column("CLUSTER-SET", lambda r: _format_set_ids(r, "cluster_set"), wide=True, right=True),
    Column("LOCAL-SET", lambda r: _format_set_ids(r, "local_set"), wide=True, right=True),
)

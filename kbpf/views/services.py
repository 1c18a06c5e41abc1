# SPDX-License-Identifier: Apache-2.0
"""The Services in the maps: one row per Service port and IP family."""

from collections.abc import Iterable
from typing import Final

import msgspec

from kbpf.model.address import ANY4, ANY6, family_of, format_addr
from kbpf.model.inspection import BackendSet, FrontendEntry, Inspection, Part, ServicePort
from kbpf.views.page import Column, Kind, Page, format_host_port, list_page

NEEDS: Final = Part.SERVICES
POLICY_NAMES: Final = {False: "Cluster", True: "Local"}


class FrontendRow(msgspec.Struct, frozen=True):
    """A frontend. `kind` is ``ClusterIP``, ``ExternalIP``, ``LoadBalancer``, ``NodePort`` or
    ``unknown``; the address of a NodePort is the family's wildcard.

    `restricted`: source ranges apply, so the socket hooks leave it alone. `nowhere`: a NodePort
    that no address of this node serves. `cluster_set` and `local_set` are ids; 0: an empty set,
    None: a set of mode ipvs.
    """

    address: str
    port: int
    protocol: str
    kind: str
    restricted: bool
    nowhere: bool
    cluster_set: int | None
    cluster_size: int
    local_set: int | None
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
    `id` is None in mode ipvs.
    """

    namespace: str
    name: str
    port: str
    protocol: str
    family: int
    id: int | None
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


def build_rows(inspection: Inspection) -> tuple[ServiceRow, ...]:
    """All Service ports, sorted by name; those without a name come last."""
    return tuple(sorted((build_row(p, inspection) for p in inspection.services), key=row_key))


def row_key(row: ServiceRow) -> tuple[bool, str, str, str, str, int]:
    return not row.name, row.namespace, row.name, row.port, row.protocol, row.family


def build_row(port: ServicePort, inspection: Inspection) -> ServiceRow:
    """The row of one Service port."""
    key = port.key
    rows = (_build_frontend(f, inspection.node_ports) for f in port.frontends)
    frontends = tuple(sorted(rows, key=lambda row: (row.kind, row.address, row.port)))
    return ServiceRow(
        namespace=key.namespace if key else "",
        name=key.name if key else "",
        port=key.port if key else "",
        protocol=key.protocol.name if key else (frontends[0].protocol if frontends else ""),
        family=key.family if key else 0,
        id=port.id,
        frontends=frontends,
        internal_policy=POLICY_NAMES[port.internal_local],
        external_policy=POLICY_NAMES[port.external_local],
        algorithm=str(port.algorithm),
        affinity_seconds=port.affinity_timeout,
        backends_cluster=_largest_set_size({f.cluster for f in port.frontends}),
        backends_local=_largest_set_size({f.local for f in port.frontends})
        if port.internal_local or port.external_local
        else None,
    )


def _largest_set_size(sets: Iterable[BackendSet]) -> int:
    """The number of backends in the largest of these sets. A backend may have several slots and
    counts once; a missing slot counts as a backend.
    """
    return max((len(set(s.slots.values())) + max(0, s.size - len(s.slots)) for s in sets), default=0)


def _build_frontend(frontend: FrontendEntry, node_ports: frozenset[int] | None) -> FrontendRow:
    at = frontend.at
    wildcard = {ANY4: "0.0.0.0", ANY6: "::"}
    kind = str(frontend.kind) if frontend.kind else "unknown"
    return FrontendRow(
        address=wildcard.get(at.address) or format_addr(at.address),
        port=at.port,
        protocol=at.protocol.name,
        kind=kind,
        restricted=frontend.restricted and frontend.kind is not None,
        nowhere=kind == "NodePort" and node_ports is not None and family_of(at.address) not in node_ports,
        cluster_set=frontend.cluster.id,
        cluster_size=frontend.cluster.size,
        local_set=frontend.local.id,
        local_size=frontend.local.size,
    )


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
    ids = sorted({id_ for f in row.frontends if (id_ := getattr(f, field))})
    return ",".join(map(str, ids)) or "-"


COLUMNS: Final = (
    Column("NAMESPACE", "namespace"),
    Column("NAME", "name"),
    Column("PORT", "port"),
    Column("PROTOCOL", "protocol"),
    Column("FRONTENDS", _format_frontends),
    Column("BACKENDS", _format_backends),
    Column("POLICY", _format_policy),
    Column("ALGORITHM", "algorithm", wide=True),
    Column("AFFINITY", lambda r: f"{r.affinity_seconds}s" if r.affinity_seconds else "-"),
    Column("FAMILY", lambda r: f"IPv{r.family}" if r.family else "-", wide=True),
    Column("ID", "id", wide=True, right=True),
    Column("CLUSTER-SET", lambda r: _format_set_ids(r, "cluster_set"), wide=True, right=True),
    Column("LOCAL-SET", lambda r: _format_set_ids(r, "local_set"), wide=True, right=True),
)


KIND: Final = Kind(
    "ServiceList",
    ServiceRow,
    item_name=lambda row: row.full_name if row.name else "",
    namespaces=lambda row: (row.namespace,),
)


def build_page(inspection: Inspection) -> Page:
    return list_page(KIND, build_rows(inspection), COLUMNS)

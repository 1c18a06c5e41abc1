# SPDX-License-Identifier: Apache-2.0
"""Failed connections: which client failed at which Service and backend, why, and how often."""

from collections.abc import Container, Iterable, Mapping
from typing import Final

import msgspec

from kbpf.model.address import Addr, format_addr
from kbpf.model.desired import FrontendKind
from kbpf.model.inspection import (
    ConnectionEvent,
    FailureEntry,
    Inspection,
    Part,
    ServicePort,
    find_ports,
)
from kbpf.views.packet_path.availability import uses_conntrack
from kbpf.views.page import Column, Kind, Page, format_duration, list_page, namespace_of

NEEDS: Final = Part.SERVICES | Part.ENDPOINTS | Part.FAILURES | Part.PACKETS

CONNTRACK_NOTE: Final = "--forwarding netfilter: how a backend ends connections from outside is not seen"


class FailureRow(msgspec.Struct, frozen=True):
    """Connections of one client that failed in the same way.

    `client` is the Pod (``namespace/name``), or else its cgroup, or the client's address; `kind`
    says which: ``pod``, ``cgroup`` or ``address``. `address` is the client's own, "" if its socket
    had none yet. `backend` is "" if none was chosen; `backend_pod` and `backend_node` are "" if
    they are not known. `reason` is that of the counters in `kbpf inspect status`, `words` explains
    it, and `client_saw` is the error that the client got. `service` is the Service port, or only
    the Service if that has no such port.
    """

    last_seconds: float
    first_seconds: float
    count: int
    client: str
    kind: str
    address: str
    service: str
    frontend: str
    backend: str
    backend_pod: str
    backend_node: str
    reason: str
    words: str
    client_saw: str


def build_rows(
    inspection: Inspection, service: str = "", pod: str = "", since: float | None = None
) -> tuple[FailureRow, ...]:
    """The newest first. `service`: see find_ports(). `pod`: NAME or NAMESPACE/NAME of the client.
    `since`: an age in seconds; older ones are left out. 0 or None: all. Raises NotFoundError if the Service
    is not programmed.
    """
    owners = _list_cluster_ips(inspection.services)
    selected = inspection.services
    if service:
        selected = find_ports(inspection.services, service, inspection.location)
    ids, addresses = {port.id for port in selected}, _list_cluster_ips(selected)
    rows = (
        _build_row(entry, inspection, owners)
        for entry in inspection.failures
        if (not service or entry.service.id in ids or _is_unknown_port(entry, addresses))
        and (not since or inspection.monotonic - entry.last <= since)
    )
    return tuple(row for row in rows if not pod or _is_pod(row, pod))


def _list_cluster_ips(ports: Iterable[ServicePort]) -> Mapping[Addr, str]:
    """ClusterIP → the Service that has it."""
    return {
        frontend.at.address: str(port.key.service)
        for port in ports
        for frontend in port.frontends
        if frontend.kind is FrontendKind.CLUSTER_IP and port.key is not None
    }


def _is_unknown_port(entry: FailureEntry, cluster_ips: Container[Addr]) -> bool:
    """Whether the client dialled one of these, at a port that no Service has."""
    return not entry.service.id and entry.frontend.address in cluster_ips


def _is_pod(row: FailureRow, pod: str) -> bool:
    return row.kind == "pod" and pod in (row.client, row.client.partition("/")[2])


def _build_row(entry: FailureEntry, inspection: Inspection, owners: Mapping[Addr, str]) -> FailureRow:
    address = format_addr(entry.client) if entry.client is not None else ""
    kind, client = describe_client(entry, address)
    if kind == "address" and entry.client and (pod := inspection.pods.get(entry.client)):
        kind, client = "pod", pod
    endpoint = entry.service.endpoints.get(entry.backend) if entry.backend else None
    return FailureRow(
        last_seconds=round(max(0.0, inspection.monotonic - entry.last), 3),
        first_seconds=round(max(0.0, inspection.monotonic - entry.first), 3),
        count=entry.count,
        client=client,
        kind=kind,
        address=address,
        service=entry.service.text if entry.service.id else owners.get(entry.frontend.address, ""),
        frontend=str(entry.frontend),
        backend=str(entry.backend or ""),
        backend_pod=endpoint.pod if endpoint else "",
        backend_node=endpoint.node if endpoint else "",
        reason=entry.reason.name.lower(),
        words=entry.reason.words,
        client_saw=entry.reason.seen.client_saw,
    )


def describe_client(entry: FailureEntry | ConnectionEvent, address: str) -> tuple[str, str]:
    """The kind of client (see FailureRow) and its name."""
    if entry.pod:
        return "pod", entry.pod
    if entry.cgroup:
        return "cgroup", entry.cgroup_path or f"{entry.cgroup}, gone"
    return "address", address


COLUMNS: Final = (
    Column("LAST", lambda r: f"{format_duration(r.last_seconds)} ago", right=True, by="last_seconds"),
    Column("COUNT", "count", right=True),
    Column("CLIENT", "client"),
    Column("SERVICE", "service"),
    Column("FRONTEND", "frontend"),
    Column("BACKEND", "backend"),
    Column("BACKEND-POD", "backend_pod"),
    Column("NODE", "backend_node"),
    Column("REASON", lambda r: r.reason.replace("_", " ")),
    Column("CLIENT-SAW", lambda r: r.client_saw.partition(",")[0]),
    Column("FIRST", lambda r: f"{format_duration(r.first_seconds)} ago", right=True, wide=True, by="first_seconds"),
    Column("ADDRESS", "address", wide=True),
    Column("WHY", "words", wide=True),
)


KIND: Final = Kind("FailureList", FailureRow, namespaces=lambda row: namespace_of(row.service))


def _find_node(inspection: Inspection, pod: str) -> str:
    """The node of a Pod behind a Service; "" if it is not known."""
    namespace, _, name = pod.rpartition("/")
    return next(
        (
            entry.node
            for port in inspection.services
            for entry in port.endpoints.values()
            if entry.node and entry.is_pod(name, namespace)
        ),
        "",
    )


def build_page(inspection: Inspection, service: str, pod: str, since: float | None) -> Page:
    rows = build_rows(inspection, service, pod, since)
    node = _find_node(inspection, pod) if pod and not rows else ""
    notes = [f"Pod {pod} is on node {node}: its failures are listed there"] if node else []
    if "refused" not in inspection.counted and inspection.counted:
        notes.append("failures of backends are not noticed on this node: `kbpf check` says why")
    if uses_conntrack(inspection):
        notes.append(CONNTRACK_NOTE)
    return list_page(KIND, rows, COLUMNS, notes)

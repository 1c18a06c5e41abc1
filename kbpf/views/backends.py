# SPDX-License-Identifier: Apache-2.0
"""The backends in the maps, and the Services that use each of them."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.desired import Backend
from kbpf.model.inspection import BackendEntry, EndpointEntry, Inspection, Part, find_ports, parse_place
from kbpf.views.page import Column, Kind, Page, format_host_port, list_page, namespace_of

NEEDS: Final = Part.SERVICES | Part.ENDPOINTS


class BackendRow(msgspec.Struct, frozen=True):
    """A backend. `services` are the Service ports that have it in a backend set.

    `id` is None in mode ipvs. `services` is empty if no set contains the backend any more: it is
    kept for established flows (UDP that it still serves), or is about to be deleted. `pod`, `node`,
    `zone` and `state` are what the EndpointSlices of a Service say, "" if that is not known; if
    Services disagree, the first one in `services` counts.
    """

    id: int | None
    address: str
    port: int
    protocol: str
    services: tuple[str, ...]
    pod: str
    node: str
    zone: str
    state: str

    @property
    def text(self) -> str:
        """``10.244.0.7:8080``."""
        return format_host_port(self.address, self.port)


def build_rows(inspection: Inspection, name: str = "") -> tuple[BackendRow, ...]:
    """All backends, sorted by address, port, protocol and id. With a `name` only those of the
    Services that find_ports() finds; if it is an address or a Pod of theirs, only that one.
    """
    users: dict[BackendEntry, set[str]] = {}
    names: dict[Backend, EndpointEntry] = {}
    for port in sorted(inspection.services, key=lambda port: port.text):
        for backend_set in {s for f in port.frontends for s in (f.cluster, f.local)}:
            for entry in backend_set.slots.values():
                users.setdefault(entry, set()).add(port.text)
        for endpoint in port.endpoints.values():
            names.setdefault(endpoint.backend, endpoint)
    entries = _select(inspection, name, users, names) if name else inspection.backends
    ordered = sorted((entry.backend, entry.id or 0, entry) for entry in entries if entry.backend)
    return tuple(
        _build_row(entry, backend, users.get(entry, set()), names.get(backend)) for backend, _, entry in ordered
    )


def _select(
    inspection: Inspection,
    name: str,
    users: Mapping[BackendEntry, set[str]],
    names: Mapping[Backend, EndpointEntry],
) -> Iterable[BackendEntry]:
    """Raises NotFoundError if nothing has this name."""
    ports = find_ports(inspection.services, name, inspection.location)
    services = {port.text for port in ports}
    own = [entry for entry in inspection.backends if services & users.get(entry, set())]
    place = parse_place(name)
    namespace, _, pod = name.rpartition("/")
    if place is None and any(port.belongs_to(pod, namespace) for port in ports):
        return own

    def has_name(backend: Backend) -> bool:
        if place is not None:
            return backend.address == place[0] and place[1] in (0, backend.port)
        endpoint = names.get(backend)
        return endpoint is not None and endpoint.is_pod(pod, namespace)

    return [entry for entry in own if entry.backend and has_name(entry.backend)] or own


def _build_row(
    entry: BackendEntry, backend: Backend, users: Iterable[str], endpoint: EndpointEntry | None
) -> BackendRow:
    return BackendRow(
        entry.id,
        format_addr(backend.address),
        backend.port,
        backend.protocol.name,
        tuple(sorted(users)),
        pod=endpoint.pod if endpoint else "",
        node=endpoint.node if endpoint else "",
        zone=endpoint.zone if endpoint else "",
        state=endpoint.state if endpoint else "",
    )


COLUMNS: Final = (
    Column("ID", "id", right=True, wide=True),
    Column("BACKEND", "text"),
    Column("PROTOCOL", "protocol"),
    Column("POD", "pod"),
    Column("NODE", "node"),
    Column("ZONE", "zone"),
    Column("STATE", "state"),
    Column("SERVICES", "services"),
)


KIND: Final = Kind(
    "BackendList",
    BackendRow,
    item_name=lambda row: row.text,
    namespaces=lambda row: [name for text in row.services for name in namespace_of(text)],
)


def build_page(inspection: Inspection, name: str) -> Page:
    return list_page(KIND, build_rows(inspection, name), COLUMNS)

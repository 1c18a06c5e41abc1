# SPDX-License-Identifier: Apache-2.0
"""The backends in the maps, and the Services that use each of them."""

from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.model.address import format_addr
from kbpf.model.desired import ServicePortKey
from kbpf.views.columns import Column, format_host_port, format_number

NEEDS: Final = Part.SERVICES


class BackendRow(msgspec.Struct, frozen=True):
    """A backend. `services` are the Service ports that have it in a backend set.

    `services` is empty if no set contains the backend any more: it is kept for established flows
    (UDP that it still serves), or is about to be deleted.
    """

    id: int
    address: str
    port: int
    protocol: str
    services: tuple[str, ...]

    @property
    def text(self) -> str:
        """``10.244.0.7:8080``."""
        return format_host_port(self.address, self.port)


def format_service(key: ServicePortKey | None, service_id: int) -> str:
    """``namespace/name:port``, or the bare id if `service_names` has no name for it."""
    if key is None:
        return f"id {service_id}, not named"
    return f"{key.service}:{key.port}" if key.port else str(key.service)


def build_rows(snapshot: Snapshot) -> tuple[BackendRow, ...]:
    """All backends, sorted by address, port, protocol and id."""
    users: dict[int, set[str]] = {}
    for value in snapshot.frontends.values():
        name = format_service(snapshot.names.get(value.id), value.id)
        for set_id in (value.cluster_set, value.local_set):
            for backend_id in snapshot.sets.get(set_id, {}).values():
                users.setdefault(backend_id, set()).add(name)
    ordered = sorted((backend, backend_id) for backend_id, backend in snapshot.backends.items())
    return tuple(
        BackendRow(
            backend_id,
            format_addr(backend.address),
            backend.port,
            backend.protocol.name,
            tuple(sorted(users.get(backend_id, ()))),
        )
        for backend, backend_id in ordered
    )


COLUMNS: Final = (
    Column("ID", lambda b: format_number(b.id), right=True),
    Column("BACKEND", lambda b: b.text),
    Column("PROTOCOL", lambda b: b.protocol),
    Column("SERVICES", lambda b: ", ".join(b.services) or "-"),
)

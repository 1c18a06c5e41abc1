# SPDX-License-Identifier: Apache-2.0
"""The backends in the maps, and the Services that use each of them."""

from typing import Final

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.inspection import BackendEntry, Inspection, Part
from kbpf.views.columns import Column, format_host_port, format_number
from kbpf.views.page import Page, list_page

NEEDS: Final = Part.SERVICES


class BackendRow(msgspec.Struct, frozen=True):
    """A backend. `services` are the Service ports that have it in a backend set.

    `id` is None in mode ipvs. `services` is empty if no set contains the backend any more: it is
    kept for established flows (UDP that it still serves), or is about to be deleted.
    """

    id: int | None
    address: str
    port: int
    protocol: str
    services: tuple[str, ...]

    @property
    def text(self) -> str:
        """``10.244.0.7:8080``."""
        return format_host_port(self.address, self.port)


def build_rows(inspection: Inspection) -> tuple[BackendRow, ...]:
    """All backends, sorted by address, port, protocol and id."""
    users: dict[BackendEntry, set[str]] = {}
    for port in inspection.services:
        name = port.text
        for backend_set in {s for f in port.frontends for s in (f.cluster, f.local)}:
            for entry in backend_set.slots.values():
                users.setdefault(entry, set()).add(name)
    ordered = sorted(
        (entry.backend, entry.id or 0, entry)
        for entry in inspection.backends
        if entry.backend is not None
    )
    return tuple(
        BackendRow(
            entry.id,
            format_addr(backend.address),
            backend.port,
            backend.protocol.name,
            tuple(sorted(users.get(entry, ()))),
        )
        for backend, _, entry in ordered
    )


COLUMNS: Final = (
    Column("ID", lambda b: format_number(b.id), right=True),
    Column("BACKEND", lambda b: b.text),
    Column("PROTOCOL", lambda b: b.protocol),
    Column("SERVICES", lambda b: ", ".join(b.services) or "-"),
)


def build_page(inspection: Inspection) -> Page:
    return list_page(build_rows(inspection), COLUMNS)

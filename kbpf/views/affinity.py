# SPDX-License-Identifier: Apache-2.0
"""Session affinity: each client's backend, how old the entry is, and when it expires."""

from typing import Final

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.inspection import AffinityEntry, Inspection, Part
from kbpf.views.page import Column, Kind, Page, format_duration, list_page, namespace_of

NEEDS: Final = Part.SERVICES | Part.ENDPOINTS | Part.AFFINITY


class AffinityRow(msgspec.Struct, frozen=True):
    """The affinity of one client to a backend of one Service port.

    `kind` is ``address`` or ``netns``. `client` is accordingly an IP address, or the cookie of the
    client's network namespace ("host" for the node's own). `pod` is ``namespace/name`` of the
    client, "" if it is not known.

    `expires_seconds` is negative once the entry has expired (`expired`). The next connection then
    chooses a backend again. The entry itself stays until then, or until the agent deletes it
    (affinity_shares.py) or the map evicts it. `expires_seconds` is None if the Service no longer
    exists.
    """

    client: str
    kind: str
    pod: str
    service: str
    backend: str
    age_seconds: float
    expires_seconds: float | None
    expired: bool


def build_rows(inspection: Inspection) -> tuple[AffinityRow, ...]:
    """All affinity entries, sorted by Service, then by client."""
    affinity_rows = [_build_row(entry, inspection) for entry in inspection.affinity]
    return tuple(sorted(affinity_rows, key=lambda r: (r.service, r.kind, r.client)))


def _build_row(entry: AffinityEntry, inspection: Inspection) -> AffinityRow:
    age = max(0.0, inspection.monotonic - entry.last_used)
    remaining = entry.service.affinity_timeout - age if entry.service.frontends else None
    if entry.client is not None:
        kind, client = "address", format_addr(entry.client)
    else:
        is_host = entry.netns == inspection.host_netns
        kind, client = "netns", "host" if is_host else str(entry.netns)
    return AffinityRow(
        client=client,
        kind=kind,
        pod=entry.pod,
        service=entry.service.text,
        backend=str(entry.backend.backend or f"id {entry.backend.id}, gone"),
        age_seconds=round(age, 3),
        expires_seconds=None if remaining is None else round(remaining, 3),
        expired=remaining is None or remaining < 0,
    )


def _expires(row: AffinityRow) -> str:
    if row.expires_seconds is None:
        return "Service gone"
    return "expired" if row.expired else format_duration(row.expires_seconds)


def _format_client(row: AffinityRow) -> str:
    return row.client if row.kind == "address" else f"netns {row.client}"


COLUMNS: Final = (
    Column("CLIENT", lambda r: r.pod or _format_client(r)),
    Column("SERVICE", "service"),
    Column("BACKEND", "backend"),
    Column("AGE", "age_seconds", format_duration, right=True),
    Column("EXPIRES-IN", _expires, right=True, by="expires_seconds"),
    Column("ADDRESS", _format_client, wide=True),
)


KIND: Final = Kind("AffinityList", AffinityRow, namespaces=lambda row: namespace_of(row.service))


def build_page(inspection: Inspection) -> Page:
    return list_page(KIND, build_rows(inspection), COLUMNS)

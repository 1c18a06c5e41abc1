# SPDX-License-Identifier: Apache-2.0
"""Session affinity: each client's backend, how old the entry is, and when it expires."""

from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.snapshot import AffinityEntry, Part, Snapshot
from kbpf.dataplane.bpf.maps.layout import ClientKind
from kbpf.model.address import format_addr
from kbpf.views.backends import format_service
from kbpf.views.columns import Column, format_duration

NEEDS: Final = Part.SERVICES | Part.AFFINITY


class AffinityRow(msgspec.Struct, frozen=True):
    """The affinity of one client to a backend of one Service port.

    `kind` is ``address`` or ``netns``. `client` is accordingly an IP address, or the cookie of the
    client's network namespace ("host" for the node's own).

    `expires_seconds` is negative once the entry has expired (`expired`). The next connection then
    chooses a backend again. The entry itself stays until then, or until the agent deletes it
    (affinity_shares.py) or the map evicts it. `expires_seconds` is None if the Service no longer
    exists.
    """

    client: str
    kind: str
    service: str
    backend: str
    age_seconds: float
    expires_seconds: float | None
    expired: bool


def build_rows(snapshot: Snapshot) -> tuple[AffinityRow, ...]:
    """All affinity entries, sorted by Service, then by client."""
    timeouts = {value.id: value.affinity_timeout for value in snapshot.frontends.values()}
    affinity_rows = [
        _build_row(entry, timeouts.get(entry.service), snapshot) for entry in snapshot.affinity
    ]
    return tuple(sorted(affinity_rows, key=lambda r: (r.service, r.kind, r.client)))


def _build_row(entry: AffinityEntry, timeout: int | None, snapshot: Snapshot) -> AffinityRow:
    age = max(0.0, snapshot.monotonic - entry.last_used)
    remaining = None if timeout is None else timeout - age
    backend = snapshot.backends.get(entry.backend)
    kind, client = _client(entry, snapshot)
    return AffinityRow(
        client=client,
        kind=kind,
        service=format_service(snapshot.names.get(entry.service), entry.service),
        backend=str(backend) if backend else f"id {entry.backend}, gone",
        age_seconds=round(age, 3),
        expires_seconds=None if remaining is None else round(remaining, 3),
        expired=remaining is None or remaining < 0,
    )


def _client(entry: AffinityEntry, snapshot: Snapshot) -> tuple[str, str]:
    if entry.kind == ClientKind.ADDRESS:
        return "address", format_addr(entry.client)
    if entry.cookie == snapshot.host_netns:
        return "netns", "host"
    return "netns", str(entry.cookie)


def _expires(row: AffinityRow) -> str:
    if row.expires_seconds is None:
        return "Service gone"
    return "expired" if row.expired else format_duration(row.expires_seconds)


COLUMNS: Final = (
    Column("CLIENT", lambda r: r.client if r.kind == "address" else f"netns {r.client}"),
    Column("SERVICE", lambda r: r.service),
    Column("BACKEND", lambda r: r.backend),
    Column("AGE", lambda r: format_duration(r.age_seconds), right=True),
    Column("EXPIRES-IN", _expires, right=True),
)

# SPDX-License-Identifier: Apache-2.0
"""The columns of `kbpf inspect connections`.

Connections that the socket hooks translated are not among them. Their packets carry the backend's
address from the start, so only the kernel tracks them; `ss` shows them.
"""

from typing import Final

from kbpf.model.address import Addr
from kbpf.model.inspection import Connection, ConnectionQuery, ConnectionState, Inspection, Part
from kbpf.views.packet_path.availability import unavailable_notice, uses_conntrack
from kbpf.views.page import NO_RESOURCES, Column, Kind, Page, format_duration, namespace_of

NEEDS: Final = Part.NAMES | Part.ENDPOINTS | Part.CONNECTIONS | Part.PACKETS | Part.STATUS


def _format_expires(row: Connection) -> str:
    return "expired" if row.expired else format_duration(row.expires_seconds)


def _format_seen_as(row: Connection) -> str:
    if not row.seen_as:
        return "-"
    if row.masqueraded:
        return f"{row.seen_as} (node)"
    return "the client" if row.seen_as == row.client else row.seen_as


def _format_note(row: Connection) -> str:
    if not (row.lost or row.replaced or row.device):
        return ""
    notes = [f"missing entries: {', '.join(row.lost)}"] if row.lost else []
    notes += ["replaced by a newer connection"] if row.replaced else []
    notes += [f"from this node, through {row.device}"] if row.device else []
    return "; ".join(notes)


COLUMNS: Final = (
    Column("SERVICE", "service"),
    Column("PROTOCOL", "protocol"),
    Column("CLIENT", "client"),
    Column("CLIENT-POD", "client_pod", wide=True),
    Column("FRONTEND", "frontend"),
    Column("BACKEND", "backend"),
    Column("BACKEND-POD", "backend_pod", wide=True),
    Column("BACKEND-NODE", "backend_node", wide=True),
    Column("BACKEND-SEES", _format_seen_as),
    Column("STATE", "state"),
    Column("IDLE", "idle_seconds", format_duration, right=True),
    Column("EXPIRES-IN", _format_expires, right=True, by="expires_seconds"),
    Column("PATH", "path", wide=True),
    Column("NOTE", _format_note),
)


CONNTRACK_NOTE: Final = "--forwarding netfilter: new connections are in conntrack (conntrack -L)"


KIND: Final = Kind("ConnectionList", Connection, namespaces=lambda row: namespace_of(row.service))


def build_page(
    inspection: Inspection,
    service: str,
    client: Addr | None,
    backend: Addr | None,
    state: ConnectionState | None,
    expired: bool,
) -> Page:
    """The connections that match all of these; see ConnectionQuery."""
    connections = inspection.connections
    assert connections is not None
    page = connections.find(ConnectionQuery(service, client, backend, state or "", expired))
    notice = unavailable_notice(inspection)
    left_out = f"and {page.expired_count} expired connections: --expired shows them"
    return Page(
        KIND,
        iter(page.rows),
        COLUMNS,
        total=page.total,
        notes=(
            notice,
            left_out if page.expired_count else "",
            CONNTRACK_NOTE if uses_conntrack(inspection) else "",
        ),
        empty="" if page.total or notice else NO_RESOURCES,
    )

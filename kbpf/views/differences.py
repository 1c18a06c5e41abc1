# SPDX-License-Identifier: Apache-2.0
"""What differs between two states of a cluster: for each Service port its frontends, sets and
backends, and the nodes on which that is so.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kbpf.model.desired import ServicePortKey
from kbpf.views.columns import Column
from kbpf.views.page import Kind, Page

MAX_NODES_SHOWN: Final = 3


class DifferenceRow(msgspec.Struct, frozen=True):
    """A difference on `nodes`. `service` is "" if it is about the node itself.

    `what`: frontend, set, backend, setting or node. `name`: the address, or the name of the
    setting. `set`: cluster or local, for sets and backends. `before` and `after`: "" if there is
    none; of backends null. `share_before` and `share_after`: of backends, the part of the set's
    connections (0 to 1); null: not in the set.
    """

    service: str
    port: str
    protocol: str
    family: int | None
    what: str
    name: str
    set: str
    before: str | None
    after: str | None
    share_before: float | None
    share_after: float | None
    pod: str
    node: str
    zone: str
    reason: str
    nodes: tuple[str, ...]
    all_nodes: bool


KIND: Final = Kind("DifferenceList", DifferenceRow)


def _format_service(row: DifferenceRow) -> str:
    if not row.service:
        return "-"
    return f"{row.service}{f':{row.port}' if row.port else ''} {row.protocol} IPv{row.family}"


def _format_value(text: str | None, share: float | None) -> str:
    if text is None:
        return "-" if share is None else f"{share:.1%}"
    return text or "-"


def _format_nodes(row: DifferenceRow) -> str:
    if row.all_nodes:
        return "all"
    more = len(row.nodes) - MAX_NODES_SHOWN
    shown = ",".join(row.nodes[:MAX_NODES_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


COLUMNS: Final = (
    Column("SERVICE", _format_service),
    Column("NODES", _format_nodes),
    Column("WHAT", lambda d: f"{d.set} {d.what}".lstrip()),
    Column("NAME", lambda d: d.name or "-"),
    Column("POD", lambda d: d.pod or "-"),
    Column("NODE", lambda d: d.node or "-", wide=True),
    Column("ZONE", lambda d: d.zone or "-"),
    Column("BEFORE", lambda d: _format_value(d.before, d.share_before), right=True),
    Column("AFTER", lambda d: _format_value(d.after, d.share_after), right=True),
    Column("WHY", lambda d: d.reason or "-"),
)


def make_row(
    port: ServicePortKey | None,
    what: tuple[str, str, str],
    values: tuple[str | None, str | None],
    shares: tuple[float | None, float | None],
    place: tuple[str, str, str],
    reason: str,
    nodes: tuple[tuple[str, ...], bool],
) -> DifferenceRow:
    """`what`: what, name and set; `place`: Pod, node and zone; `nodes`: which, and whether all."""
    rounded = [None if share is None else round(share, 4) for share in shares]
    names: Mapping[str, str] = (
        {"service": str(port.service), "port": port.port, "protocol": port.protocol.name}
        if port
        else {"service": "", "port": "", "protocol": ""}
    )
    return DifferenceRow(
        names["service"], names["port"], names["protocol"], port.family if port else None,
        *what, *values, rounded[0], rounded[1], *place, reason, *nodes,
    )  # fmt: skip


def build_page(rows: Sequence[DifferenceRow], notes: Sequence[str], empty: str) -> Page:
    """Without rows the table has no titles either: a diff that finds nothing is silent."""
    columns = COLUMNS if rows else ()
    return Page(KIND, rows, columns, empty="" if rows else empty).with_notes(tuple(notes))

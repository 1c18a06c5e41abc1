# SPDX-License-Identifier: Apache-2.0
"""What differs between two states of a cluster: for each Service port its frontends, sets and
backends, and the nodes on which that is so.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kbpf.model.desired import ServicePortKey
from kbpf.views.page import Column, Kind, Page

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
    before: str | None = None
    after: str | None = None
    share_before: float | None = None
    share_after: float | None = None
    pod: str = ""
    node: str = ""
    zone: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    all_nodes: bool = False


KIND: Final = Kind("DifferenceList", DifferenceRow)


def _format_service(row: DifferenceRow) -> str:
    if not row.service:
        return "-"
    return f"{row.service}{f':{row.port}' if row.port else ''} {row.protocol} IPv{row.family}"


def _format_value(text: str | None, share: float | None) -> str:
    if text is None:
        return "-" if share is None else f"{share:.1%}"
    return text or "-"


def join_nodes(names: Sequence[str], separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = len(names) - MAX_NODES_SHOWN
    shown = separator.join(names[:MAX_NODES_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


_NAMES: Final = (
    Column("SERVICE", _format_service),
    Column("NODES", lambda d: "all" if d.all_nodes else join_nodes(d.nodes, ",")),
    Column("WHAT", lambda d: f"{d.set} {d.what}".lstrip()),
    Column("NAME", "name"),
    Column("POD", "pod"),
    Column("NODE", "node", wide=True),
    Column("ZONE", "zone"),
)
_WHY: Final = Column("WHY", "reason")
COLUMNS: Final = (
    *_NAMES,
    Column("BEFORE", lambda d: _format_value(d.before, d.share_before), right=True),
    Column("AFTER", lambda d: _format_value(d.after, d.share_after), right=True),
    _WHY,
)
SHARE_COLUMNS: Final = (
    *_NAMES,
    Column("SHARE", lambda d: _format_value(d.after, d.share_after), right=True),
    _WHY,
)
"""Of one state, which is compared with nothing."""


def make_row(port: ServicePortKey | None, what: str, name: str, set_name: str = "", **fields: Any) -> DifferenceRow:
    """`fields`: further ones of the row. None for `port`: it is about the node itself."""
    if port is None:
        return DifferenceRow("", "", "", None, what, name, set_name, **fields)
    names = str(port.service), port.port, port.protocol.name, port.family
    return DifferenceRow(*names, what, name, set_name, **fields)


def build_page(rows: Sequence[DifferenceRow], notes: Sequence[str], columns: Sequence[Column] = COLUMNS) -> Page:
    """Without rows the table has no titles either: a diff that finds nothing is silent."""
    return Page(KIND, rows, columns if rows else (), notes=tuple(notes))

# SPDX-License-Identifier: Apache-2.0
"""Events as they happen: one line each, or one JSON object."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from kbpf.errors import escape_unprintable
from kbpf.model.address import format_endpoint
from kbpf.model.inspection import ConnectionEvent
from kbpf.model.reasons import EventVerdict, Reason
from kbpf.views.failures import describe_client
from kbpf.views.page import API_VERSION, GAP, Column, Kind

VERDICTS: Final = {reason: verdict for reason in Reason if (verdict := reason.seen.event)}
"""The reasons that are events."""


class EventRow(msgspec.Struct, frozen=True):
    """An event. `time` is RFC 3339, in UTC. `client` is the Pod (``namespace/name``), or else its
    cgroup, or the client's address and port; `client_kind` says which: ``pod``, ``cgroup`` or
    ``address``. `address` is the client's own, "" if its socket had none yet. `service` is "" if no
    Service has that port. `backend` is "" if none was chosen, `backend_pod` if its Pod is not known
    (``namespace/name``). `words` explains the `reason`.
    `seen_by`: ``socket`` or ``packet``.
    """

    time: str
    verdict: EventVerdict
    client: str
    client_kind: str
    address: str
    service: str
    frontend: str
    backend: str
    backend_pod: str
    reason: str
    words: str
    seen_by: str


class LeftOutRow(msgspec.Struct, frozen=True):
    """How many events were not shown since the last such row, since they were above the rate."""

    time: str
    left_out: int


KIND: Final = Kind("ConnectionEvent", summary=EventRow)
LEFT_OUT_KIND: Final = Kind("EventsLeftOut", summary=LeftOutRow)
"""Of one line each."""


def build_document(row: EventRow | LeftOutRow) -> dict[str, Any]:
    """What a line of JSON shows."""
    kind = KIND if isinstance(row, EventRow) else LEFT_OUT_KIND
    fields = msgspec.to_builtins(row)
    return {"apiVersion": API_VERSION, "kind": kind.name, **fields}


def build_row(event: ConnectionEvent) -> EventRow:
    client_end = event.client
    address = format_endpoint(client_end.address, client_end.port) if client_end else ""
    kind, client = describe_client(event, address)
    return EventRow(
        time=format_time(event.time),
        verdict=VERDICTS[event.reason],
        client=client,
        client_kind=kind,
        address=address,
        service=event.service.text if event.service.id else "",
        frontend=str(event.frontend),
        backend=str(event.backend or ""),
        backend_pod=event.backend_pod,
        reason=event.reason.name.lower(),
        words=event.reason.words,
        seen_by="socket" if event.cgroup else "packet",
    )


def format_time(seconds: float) -> str:
    """RFC 3339 in UTC, to the microsecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def _format_local(time: str) -> str:
    return f"{datetime.fromisoformat(time).astimezone():%H:%M:%S.%f}"[:-3]


COLUMNS: Final = (
    Column("TIME", "time", _format_local),
    Column("VERDICT", "verdict"),
    Column("CLIENT", "client"),
    Column("SERVICE", "service"),
    Column("FRONTEND", "frontend"),
    Column("BACKEND", "backend"),
    Column("REASON", lambda r: r.reason.replace("_", " ")),
    Column("BACKEND-POD", "backend_pod", wide=True),
    Column("ADDRESS", "address", wide=True),
    Column("SEEN-BY", "seen_by", wide=True),
    Column("WHY", "words", wide=True),
)


WIDTHS: Final = {
    "TIME": 12,
    "CLIENT": 24,
    "SERVICE": 24,
    "FRONTEND": 21,
    "BACKEND": 21,
    "REASON": 20,
    "BACKEND-POD": 24,
    "ADDRESS": 21,
}
"""The widths of these columns at first: the rows are not known in advance."""
MAX_WIDTH: Final = 60


class LineFormatter:
    """Formats a table line by line. A column grows to its longest cell so far, up to MAX_WIDTH."""

    def __init__(self, wide: bool) -> None:
        self._columns = [column for column in COLUMNS if wide or not column.wide]
        self._widths = [WIDTHS.get(column.title, len(column.title)) for column in self._columns]

    def titles(self) -> str:
        return self._join([column.title for column in self._columns])

    def line(self, row: EventRow) -> str:
        cells = [escape_unprintable(column.text(row)) for column in self._columns]
        self._widths = [max(width, min(len(cell), MAX_WIDTH)) for width, cell in zip(self._widths, cells, strict=True)]
        return self._join(cells)

    def _join(self, cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True))
        return GAP.join(padded).rstrip()


def format_left_out(count: int, rate: int) -> str:
    """``1,234 more not shown: above 100 a second``."""
    return f"{count:,} more not shown: above {rate:,} a second"

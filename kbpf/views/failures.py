# SPDX-License-Identifier: Apache-2.0
"""Failed connections: which client failed at which Service and backend, why, and how often."""

from collections.abc import Mapping
from typing import Final

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.inspection import FailureEntry, Inspection, Part, find_ports
from kbpf.model.reasons import Reason, Verdict
from kbpf.views.columns import Column, format_duration
from kbpf.views.page import Page, format_more, list_page

NEEDS: Final = Part.SERVICES | Part.FAILURES

SEEN_BY_CLIENT: Final[Mapping[Reason, str]] = {
    Reason.BACKEND_REFUSED: "ECONNREFUSED",
    Reason.BACKEND_UNANSWERED: "ETIMEDOUT, unless a later SYN was answered",
    Reason.BACKEND_RESET: "ECONNRESET or ETIMEDOUT",
}
"""What the client's system call returned, for failures of backends."""


class FailureRow(msgspec.Struct, frozen=True):
    """Connections of one client that failed in the same way.

    `client` is the Pod (``namespace/name``), or else its cgroup, or the client's address; `kind`
    says which: ``pod``, ``cgroup`` or ``address``. `address` is the client's own, "" if its socket
    had none yet. `backend` is "" if none was chosen. `reason` is that of the counters in `kbpf
    inspect status`, `words` explains it, and `client_saw` is the error that the client got.
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
    reason: str
    words: str
    client_saw: str


def build_rows(
    inspection: Inspection, service: str = "", pod: str = "", since: float = 0.0
) -> tuple[FailureRow, ...]:
    """The newest first. `service`: see find_ports(). `pod`: NAME or NAMESPACE/NAME of the client.
    `since`: an age in seconds; older ones are left out. 0: all. Raises NotFoundError if the Service
    is not programmed.
    """
    ids = {port.id for port in find_ports(inspection.services, service, inspection.location)} \
        if service else None  # fmt: skip
    rows = (
        _build_row(entry, inspection)
        for entry in inspection.failures
        if (ids is None or entry.service.id in ids)
        and (not since or inspection.monotonic - entry.last <= since)
    )
    return tuple(row for row in rows if not pod or _is_pod(row, pod))


def _is_pod(row: FailureRow, pod: str) -> bool:
    return row.kind == "pod" and pod in (row.client, row.client.partition("/")[2])


def _build_row(entry: FailureEntry, inspection: Inspection) -> FailureRow:
    address = format_addr(entry.client) if entry.client is not None else ""
    if entry.pod:
        kind, client = "pod", entry.pod
    elif entry.cgroup:
        kind, client = "cgroup", entry.cgroup_path or f"{entry.cgroup}, gone"
    else:
        kind, client = "address", address
    return FailureRow(
        last_seconds=round(max(0.0, inspection.monotonic - entry.last), 3),
        first_seconds=round(max(0.0, inspection.monotonic - entry.first), 3),
        count=entry.count,
        client=client,
        kind=kind,
        address=address,
        service=entry.service.text if entry.service.id else "",
        frontend=str(entry.frontend),
        backend=str(entry.backend or ""),
        reason=entry.reason.name.lower(),
        words=entry.reason.words,
        client_saw=_client_saw(entry.reason),
    )


def _client_saw(reason: Reason) -> str:
    refused = reason.verdict is Verdict.REFUSE
    return SEEN_BY_CLIENT.get(reason, "ECONNREFUSED" if refused else "ETIMEDOUT")


COLUMNS: Final = (
    Column("LAST", lambda r: f"{format_duration(r.last_seconds)} ago", right=True),
    Column("COUNT", lambda r: str(r.count), right=True),
    Column("CLIENT", lambda r: r.client),
    Column("SERVICE", lambda r: r.service or "-"),
    Column("FRONTEND", lambda r: r.frontend),
    Column("BACKEND", lambda r: r.backend or "-"),
    Column("REASON", lambda r: r.reason.replace("_", " ")),
    Column("CLIENT-SAW", lambda r: r.client_saw.partition(",")[0]),
    Column("FIRST", lambda r: f"{format_duration(r.first_seconds)} ago", right=True, wide=True),
    Column("ADDRESS", lambda r: r.address or "-", wide=True),
    Column("WHY", lambda r: r.words, wide=True),
)


def build_page(inspection: Inspection, service: str, pod: str, since: float, limit: int) -> Page:
    rows = build_rows(inspection, service, pod, since)
    page = list_page(rows[:limit] if limit else rows, COLUMNS)
    if "refused" in inspection.counted or not inspection.counted:
        notes = (format_more(len(rows), limit, "failures"),)
    else:
        notes = ("failures of backends are not noticed on this node: `kbpf check` says why",)
    return page.with_notes(notes)

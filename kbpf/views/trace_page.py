# SPDX-License-Identifier: Apache-2.0
"""The values of `kbpf trace`, a client and a connection with its decisions, and their page."""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.model.address import Addr, family_of, format_addr
from kbpf.model.inspection import Route
from kbpf.model.reasons import Reason, Verdict
from kbpf.views import endpoints
from kbpf.views.endpoints import EndpointRow
from kbpf.views.failures import FailureRow
from kbpf.views.page import Column, Kind, Page, format_duration, format_table, indent


class Origin(StrEnum):
    """Where a connection begins."""

    HOST = "host"
    POD = "pod"
    OUTSIDE = "outside"


class Client(NamedTuple):
    """A client. `name`: ``namespace/name`` of a Pod, otherwise "". `cgroups`: the ids of its cgroup
    and of its ancestors; empty if they are not known, and for a client outside. `addresses`: empty
    if they are not known. `netns`: the cookie of a Pod's network namespace; None if it could not be
    read. `is_of_cluster`: whether a device of it leads to this node.
    """

    origin: Origin
    name: str = ""
    cgroups: frozenset[int] = frozenset()
    addresses: tuple[Addr, ...] = ()
    netns: int | None = None
    is_of_cluster: bool = True

    def __str__(self) -> str:
        address = ", ".join(map(format_addr, self.addresses))
        if self.name:
            return f"pod {self.name} ({address})" if address else f"pod {self.name}"
        return address or WORDS[self.origin]

    def address(self, family: int) -> Addr | None:
        """Its address of this family; None if it is not known."""
        return next((a for a in self.addresses if family_of(a) == family), None)

    def is_on_host(self, host_netns: int) -> bool:
        """Whether its sockets are in the node's own network namespace."""
        return self.origin is Origin.HOST or (self.netns is not None and self.netns == host_netns)


WORDS: Final = {
    Origin.HOST: "this node",
    Origin.POD: "a pod of this node",
    Origin.OUTSIDE: "a client outside of this node",
}


class Step(msgspec.Struct, frozen=True):
    """One decision. `step`: its name, `result`: its outcome, `why`: the setting that decides it."""

    step: str
    result: str
    why: str = ""


class Candidate(msgspec.Struct, frozen=True):
    """A backend that may be chosen, and its share (0 to 1) of new connections.

    `source`: the address that it sees: the ``client``'s own, or one of this ``node``; "" if that
    was not looked at. `next_hop`: the outgoing device and the gateway, or ``this node``; "" if it
    has none or was not looked up. `unreachable`: why it has none; "" otherwise.
    """

    backend: str
    share: float
    source: str = "client"
    next_hop: str = ""
    unreachable: str = ""
    pod: str = ""
    node: str = ""
    zone: str = ""


class Confirmation(msgspec.Struct, frozen=True):
    """The result of trying it. `how`: what was tried. `matches`: whether the outcome was the
    predicted one; None if it could not be tried. `outcome`: what happened, or why it was not tried.
    """

    how: str
    matches: bool | None
    outcome: str


class Trace(msgspec.Struct, frozen=True):
    """A connection.

    - `seen_by`: ``socket`` (a hook), ``packet``, ``ipvs`` or ``nothing``. `verdict` and `reason`
      are those of the programs, and `client_sees` is the errno that the client gets; "" for a
      connection, or if the node decides.
    - `endpoints`: those of the Service port, as the API server has them or, if it was not asked,
      as they are pinned (`reason` is "" then).
    - `confirmations`: what was tried; empty if nothing was.
    - `failures`: what this client has met at this Service so far.
    """

    client: str
    to: str
    service: str
    seen_by: str
    verdict: str
    reason: str
    client_sees: str
    steps: tuple[Step, ...]
    candidates: tuple[Candidate, ...]
    endpoints: tuple[EndpointRow, ...] = ()
    confirmations: tuple[Confirmation, ...] = ()
    failures: tuple[FailureRow, ...] = ()


FindRoute = Callable[[Addr, Addr | None, int], Route]
"""kernel/net/routes.find_route()."""


class NodeFacts(NamedTuple):
    """What is known of this node apart from kbpf's maps. `find_route`: None if routes are not
    looked up. `find_client_route`: the same in the client's network namespace; None if that is not
    visible from here. `masqueraded`, `forwarded`: what rules of others do to packets with an
    address of this node as their source, and to others, when they are forwarded; `before_dnat`:
    which rules kbpf's programs precede. All are empty if they were not read.
    """

    find_route: FindRoute | None = None
    find_client_route: FindRoute | None = None
    masqueraded: Sequence[Step] = ()
    forwarded: Sequence[Step] = ()
    before_dnat: Sequence[Step] = ()


# ---- how they are shown --------------------------------------------------------------------------

STEP_COLUMNS: Final = (Column("STEP", "step"), Column("RESULT", "result"), Column("WHY", "why"))
BACKEND_COLUMN: Final = Column("BACKEND", "backend")
SHARE_COLUMN: Final = Column("SHARE", lambda c: f"{c.share:.1%}", right=True)
SOURCE_COLUMN: Final = Column("SEES", lambda c: f"the {c.source}")
NAME_COLUMNS: Final = (Column("POD", "pod"), Column("NODE", "node"), Column("ZONE", "zone"))
NEXT_HOP_COLUMN: Final = Column("NEXT-HOP", lambda c: c.next_hop or c.unreachable or "-")
FAILURE_COLUMNS: Final = (
    Column("LAST", lambda r: f"{format_duration(r.last_seconds)} ago", right=True),
    Column("COUNT", "count", right=True),
    Column("CLIENT", "client"),
    Column("BACKEND", "backend"),
    Column("REASON", lambda r: r.reason.replace("_", " ")),
)
ENDPOINT_COLUMNS: Final = tuple(column for column in endpoints.COLUMNS if column.title not in ("PORT", "SLICE"))
"""A trace is of one port."""

KIND: Final = Kind("TraceList", Trace)


def build_page(traces: Sequence[Trace], notes: Sequence[str] = ()) -> Page:
    """The command fails if a connection did not do what is predicted, or could not be tried."""
    text = "\n\n".join(map(format_trace, traces))
    tried = [confirmation for trace in traces for confirmation in trace.confirmations]
    return Page(
        KIND, traces, text=lambda _: text, notes=tuple(notes), ok=all(confirmation.matches for confirmation in tried)
    )


def format_trace(trace: Trace) -> str:
    lines = [f"{trace.client} to {trace.to}", indent(format_table(trace.steps, STEP_COLUMNS))]
    lines.append(f"  => {_conclusion(trace)}")
    lines += _tables(trace)
    for confirmation in trace.confirmations:
        word = {True: "confirmed", False: "DIFFERS", None: "not confirmed"}[confirmation.matches]
        lines.append(indent(f"{word}: {confirmation.how}: {confirmation.outcome}"))
    return "\n".join(lines)


def _tables(trace: Trace) -> Iterator[str]:
    if trace.candidates:
        yield indent(format_table(trace.candidates, list(_candidate_columns(trace.candidates))), "     ")
    if trace.endpoints:
        yield "  endpoints:"
        yield indent(format_table(trace.endpoints, ENDPOINT_COLUMNS), "     ")
    if trace.failures:
        yield "  failed before:"
        yield indent(format_table(trace.failures, FAILURE_COLUMNS), "     ")


def _candidate_columns(candidates: Sequence[Candidate]) -> Iterator[Column]:
    yield from (BACKEND_COLUMN, SHARE_COLUMN)
    if any(candidate.pod or candidate.node for candidate in candidates):
        yield from NAME_COLUMNS
    if any(candidate.source == "node" for candidate in candidates):
        yield SOURCE_COLUMN
    if any(candidate.next_hop or candidate.unreachable for candidate in candidates):
        yield NEXT_HOP_COLUMN


def _conclusion(trace: Trace) -> str:
    reason = Reason[trace.reason.upper()]
    if trace.verdict == Verdict.TRANSLATE:
        return (
            "a connection to one of these backends:" if len(trace.candidates) > 1 else "a connection to this backend:"
        )
    if trace.verdict == Verdict.PASS:
        return "kbpf leaves it alone: the node routes it as it is"
    return f"{reason.words} (the client sees {trace.client_sees})"

# SPDX-License-Identifier: Apache-2.0
"""How `kbpf trace` shows connections."""

from collections.abc import Iterator, Sequence
from typing import Final

from kbpf.model.reasons import Reason, Verdict
from kbpf.views import endpoints
from kbpf.views.page import Column, Kind, Page, format_duration, format_table, indent
from kbpf.views.trace_row import Candidate, Trace

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

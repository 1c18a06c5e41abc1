# SPDX-License-Identifier: Apache-2.0
"""`kbpf verify`: the differences between what the kernel should have and what it has."""

from collections.abc import Sequence
from typing import Final

from kbpf.model.inspection import Difference, Verification
from kbpf.views.page import Column, Kind, Page, format_table, indent

KIND: Final = Kind("VerificationList", Difference, Verification)

COLUMNS: Final = (
    Column("DIFFERENCE", "kind"),
    Column("WHERE", "where"),
    Column("OF", "subject"),
    Column("DESIRED", "desired"),
    Column("FOUND", "actual"),
)


def build_page(differences: Sequence[Difference], summary: Verification, limit: int) -> Page:
    """At most `limit` differences; 0: all."""
    shown = differences[:limit] if limit else differences
    changing = (
        f"not compared, since it changed in each of {summary.readings} readings: {', '.join(summary.changing)}"
        if summary.changing
        else ""
    )
    left_out = len(differences) - len(shown)
    more = f"and {left_out} more differences" if left_out else ""
    notes = (more, *summary.notes, changing)
    return Page(KIND, shown, text=lambda _: format_page(summary, shown), summary=summary, notes=notes, ok=summary.equal)


def format_page(summary: Verification, differences: Sequence[Difference]) -> str:
    """The differences, what to do about them, and what was compared."""
    compared = (
        f"compared Service ports: {summary.service_ports}, entries of maps: {summary.entries}; "
        f"connections and probe packets that got through: {summary.proven}"
    )
    if summary.equal:
        return f"no differences: {compared}"
    places: dict[tuple[str, str], dict[str, None]] = {}
    for difference in differences:
        if difference.advice:
            key = difference.kind, difference.advice
            places.setdefault(key, {})[difference.where] = None
    parts = [format_table(differences, COLUMNS)]
    if places:
        lines = (f"{kind}, {', '.join(where)}: {text}" for (kind, text), where in places.items())
        parts.append("what to do\n" + indent("\n".join(lines)))
    parts.append(f"{summary.total} difference{'' if summary.total == 1 else 's'}: {compared}")
    return "\n\n".join(parts)

# SPDX-License-Identifier: Apache-2.0
"""The verdict of `kbpf check`, computed from its rows, and how both are shown."""

from collections.abc import Sequence
from typing import Final

import msgspec

from kbpf.checks.row import CheckRow
from kbpf.cli import render
from kbpf.views.columns import Column


def _format_needed(row: CheckRow) -> str:
    if row.needed:
        return "yes"
    if row.ipvs:
        return "for ipvs"
    return "for packet path" if row.packets else "no"


COLUMNS: Final = (
    Column("CHECK", lambda r: r.name),
    Column("RESULT", lambda r: r.result),
    Column("NEEDED", _format_needed),
    Column("DETAIL", lambda r: r.detail),
)


class CheckVerdict(msgspec.Struct, frozen=True):
    """All rows, and what follows from them.

    `mode`: what `--mode auto` would select: "bpf", "ipvs" or "none". `missing` and `ipvs_missing`:
    the rows that rule out mode bpf and mode ipvs. `packet_path`: whether the packet path can be
    switched on; `packets_missing`: the rows that rule it out. `attached`: whether the hooks passed
    their test; None without --attached.
    """

    usable: bool
    mode: str
    attached: bool | None
    missing: tuple[str, ...]
    ipvs_missing: tuple[str, ...]
    packet_path: bool
    packets_missing: tuple[str, ...]
    rows: tuple[CheckRow, ...]


def compute_verdict(
    check_rows: Sequence[CheckRow], proof: Sequence[CheckRow] | None = None
) -> CheckVerdict:
    """Computes the verdict. "unknown" counts as missing for mode bpf, but not for mode ipvs: its
    kernel modules may be available even if that cannot be tested from here.
    """
    missing = tuple(row.name for row in check_rows if row.needed and row.result != "yes")
    attached = None if proof is None else all(row.result == "yes" for row in proof)
    packets_missing = tuple(row.name for row in check_rows if row.packets and row.result != "yes")
    ipvs = [row for row in check_rows if row.ipvs]
    ipvs_missing = tuple(row.name for row in ipvs if row.result == "no")
    fallback_mode = "ipvs" if ipvs and not ipvs_missing else "none"
    mode = fallback_mode if missing else "bpf"
    return CheckVerdict(
        usable=mode != "none",
        mode=mode,
        attached=attached,
        missing=missing,
        ipvs_missing=ipvs_missing,
        packet_path=not missing and not packets_missing,
        packets_missing=packets_missing,
        rows=(*check_rows, *(proof or ())),
    )


def format_page(verdict: CheckVerdict) -> str:
    """The rows, advice about missing ones, and the verdict."""
    parts = [render.format_table(verdict.rows, COLUMNS)]
    advice = [f"{row.name}: {row.advice}" for row in verdict.rows if row.advice]
    if advice:
        parts.append("what to do\n" + render.indent("\n".join(advice)))
    result = _describe_mode("bpf", verdict.missing)
    if not verdict.missing:
        not_usable = f"cannot be used: {', '.join(verdict.packets_missing)}"
        result += f"\nthe packet path {'can be used' if verdict.packet_path else not_usable}"
    if any(row.ipvs for row in verdict.rows):
        result += "\n" + _describe_mode("ipvs", verdict.ipvs_missing)
        unknown = [row.name for row in verdict.rows if row.ipvs and row.result == "unknown"]
        if unknown and not verdict.ipvs_missing:
            result += f", unless this is missing (not known): {', '.join(unknown)}"
    if verdict.attached is not None:
        result += "\nthe hooks " + ("work" if verdict.attached else "are not proven to work")
    parts.append(result)
    return "\n\n".join(parts)


def _describe_mode(name: str, missing: Sequence[str]) -> str:
    if missing:
        return f"mode {name} cannot be used: {', '.join(missing)}"
    return f"mode {name} can be used on this machine"

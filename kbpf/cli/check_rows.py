"""What the rows of `kbpf check` mean, and how they are shown."""

from collections.abc import Sequence
from typing import Final

import msgspec

from kbpf.checks.row import CheckRow
from kbpf.cli import render
from kbpf.views.columns import Column


def _needed(row: CheckRow) -> str:
    if row.needed:
        return "yes"
    if row.ipvs:
        return "for ipvs"
    return "for packets" if row.packets else "no"


COLUMNS: Final = (
    Column("CHECK", lambda r: r.name),
    Column("RESULT", lambda r: r.result),
    Column("NEEDED", _needed),
    Column("DETAIL", lambda r: r.detail),
)


class Verdict(msgspec.Struct, frozen=True):
    """All rows, and what follows from them. `mode` is what `--mode auto` would take: "bpf", "ipvs"
    or "none"; `missing` and `ipvs_missing` are why one of them is not to be had. `attached` is None
    unless it was asked. `packet_path`: whether it can be switched on; `packets_missing` is why not.
    """

    usable: bool
    mode: str
    attached: bool | None
    missing: tuple[str, ...]
    ipvs_missing: tuple[str, ...]
    packet_path: bool
    packets_missing: tuple[str, ...]
    rows: tuple[CheckRow, ...]


def verdict(found: Sequence[CheckRow], proof: Sequence[CheckRow] | None = None) -> Verdict:
    """What the rows mean. A needed thing that could not be found out counts as missing; but not for
    mode ipvs, which may have modules loaded that nobody can ask for from here.
    """
    missing = tuple(row.name for row in found if row.needed and row.result != "yes")
    attached = None if proof is None else all(row.result == "yes" for row in proof)
    lacking = tuple(row.name for row in found if row.packets and row.result != "yes")
    ipvs = [row for row in found if row.ipvs]
    ipvs_missing = tuple(row.name for row in ipvs if row.result == "no")
    instead = "ipvs" if ipvs and not ipvs_missing else "none"
    mode = instead if missing else "bpf"
    return Verdict(
        usable=mode != "none",
        mode=mode,
        attached=attached,
        missing=missing,
        ipvs_missing=ipvs_missing,
        packet_path=not missing and not lacking,
        packets_missing=lacking,
        rows=(*found, *(proof or ())),
    )


def page(made: Verdict) -> str:
    """The rows, what to do about those that are missing, and the result."""
    parts = [render.table(made.rows, COLUMNS)]
    advice = [f"{row.name}: {row.advice}" for row in made.rows if row.advice]
    if advice:
        parts.append("what to do\n" + render.indent("\n".join(advice)))
    result = _mode("bpf", made.missing)
    if not made.missing:
        cannot = f"cannot be used: {', '.join(made.packets_missing)}"
        result += f"\nthe packet path {'can be used' if made.packet_path else cannot}"
    if any(row.ipvs for row in made.rows):
        result += "\n" + _mode("ipvs", made.ipvs_missing)
        unknown = [row.name for row in made.rows if row.ipvs and row.result == "unknown"]
        if unknown and not made.ipvs_missing:
            result += f", unless this is missing: {', '.join(unknown)}"
    if made.attached is not None:
        result += "\nthe hooks " + (
            "do what they should" if made.attached else "are not proven to work"
        )
    parts.append(result)
    return "\n\n".join(parts)


def _mode(name: str, missing: Sequence[str]) -> str:
    if missing:
        return f"mode {name} cannot be used: {', '.join(missing)}"
    return f"mode {name} can be used on this machine"

# SPDX-License-Identifier: Apache-2.0
"""`kbpf check`: whether this machine can run kbpf, and with --attached whether the hooks work."""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import typer

from kbpf.checks.row import Check, CheckRow
from kbpf.cli import render
from kbpf.cli.options import DEFAULT, CacheDir, CGroup, ConfigFile, Output, OutputOption, PinDir
from kbpf.views.page import Column, Kind, Page, format_table, indent

# ---- the verdict ---------------------------------------------------------------------------------

REFUSALS: Final = frozenset((Check.BALANCERS, Check.OTHER_KBPF))
"""If one of these rules out mode bpf, `--mode auto` does not start: IPVS would not help."""


class CheckVerdict(msgspec.Struct, frozen=True):
    """What follows from all rows.

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


def compute_verdict(check_rows: Sequence[CheckRow], proof: Sequence[CheckRow] | None = None) -> CheckVerdict:
    """Computes the verdict. "unknown" counts as missing for mode bpf, but not for mode ipvs: its
    kernel modules may be available even if that cannot be tested from here.
    """
    missing = tuple(row.name for row in check_rows if row.needed and row.result != "yes")
    attached = None if proof is None else all(row.result == "yes" for row in proof)
    packets_missing = tuple(row.name for row in check_rows if row.packets and row.result != "yes")
    ipvs = [row for row in check_rows if row.ipvs]
    ipvs_missing = tuple(row.name for row in ipvs if row.result == "no")
    fallback_mode = "ipvs" if ipvs and not ipvs_missing else "none"
    is_refused = any(row.name in REFUSALS and row.needed and row.result == "no" for row in check_rows)
    mode = "none" if is_refused else fallback_mode if missing else "bpf"
    return CheckVerdict(
        usable=mode != "none",
        mode=mode,
        attached=attached,
        missing=missing,
        ipvs_missing=ipvs_missing,
        packet_path=not missing and not packets_missing,
        packets_missing=packets_missing,
    )


# ---- the command ---------------------------------------------------------------------------------


def check(
    attached: Annotated[
        bool,
        typer.Option("--attached", help="Also test the attached hooks with real connections and packets."),
    ] = False,
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    cgroup: CGroup = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    cache_dir: CacheDir = DEFAULT.cache_dir,
) -> None:
    """Check what this kernel and machine support. Exits with 0 if kbpf can run here (with
    --attached: and its hooks work), otherwise with 1.
    """
    from kbpf.checks import bpf as bpf_checks
    from kbpf.checks import ipvs as ipvs_checks
    from kbpf.checks import neighbours, packet_path
    from kbpf.config.locations import read_locations

    uses_packet_path = config is None or read_locations(config).packet_path
    rows = (
        *bpf_checks.rows(cgroup, pin_dir, cache_dir),
        *packet_path.check_packet_path(pin_dir),
        *ipvs_checks.rows(),
        *neighbours.refusal_rows(pin_dir, cgroup, uses_packet_path),
        neighbours.kube_proxy_row(),
        *neighbours.mark_chain_rows(),
    )
    proof = None
    if attached:
        from kbpf.checks import connect as attached_checks
        from kbpf.dataplane.bpf.inspect import snapshot

        node_snapshot = snapshot.read(pin_dir, attached_checks.NEEDS)
        proof = (
            *attached_checks.check_attached(node_snapshot),
            *neighbours.packet_rows(node_snapshot),
        )
        rows = (
            *rows,
            *neighbours.foreign_rows(node_snapshot),
        )
    verdict = compute_verdict(rows, proof)
    render.show(build_page(verdict, (*rows, *(proof or ()))), output)


def _format_needed(row: CheckRow) -> str:
    if row.needed:
        return "yes"
    if row.ipvs:
        return "for ipvs"
    return "for packet path" if row.packets else "no"


COLUMNS: Final = (
    Column("CHECK", "name"),
    Column("RESULT", "result"),
    Column("NEEDED", _format_needed),
    Column("DETAIL", "detail"),
)


KIND: Final = Kind("CheckList", CheckRow, CheckVerdict, item_name=lambda item: item.name)


def build_page(verdict: CheckVerdict, rows: Sequence[CheckRow]) -> Page:
    return Page(
        KIND,
        rows,
        text=lambda wide: format_page(verdict, rows),
        summary=verdict,
        ok=verdict.usable and verdict.attached is not False,
    )


def format_page(verdict: CheckVerdict, rows: Sequence[CheckRow]) -> str:
    """The rows, advice about missing ones, and the verdict."""
    parts = [format_table(rows, COLUMNS)]
    advice = [f"{row.name}: {row.advice}" for row in rows if row.advice]
    if advice:
        parts.append("what to do\n" + indent("\n".join(advice)))
    result = _describe_mode("bpf", verdict.missing)
    if not verdict.missing:
        not_usable = f"cannot be used: {', '.join(verdict.packets_missing)}"
        result += f"\nthe packet path {'can be used' if verdict.packet_path else not_usable}"
    if any(row.ipvs for row in rows):
        result += "\n" + _describe_mode("ipvs", verdict.ipvs_missing)
        unknown = [row.name for row in rows if row.ipvs and row.result == "unknown"]
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

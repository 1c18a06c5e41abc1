# SPDX-License-Identifier: Apache-2.0
"""`kbpf check`: whether this machine can run kbpf, and with --attached whether the hooks work."""

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from kbpf.checks.row import CheckRow
from kbpf.checks.verdict import CheckItem, CheckVerdict, build_item, compute_verdict
from kbpf.cli import render
from kbpf.cli.options import DEFAULT, CacheDir, CGroup, ConfigFile, Output, OutputOption, PinDir
from kbpf.views.page import Column, Kind, Page, format_table, indent


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


KIND: Final = Kind("CheckList", CheckItem, CheckVerdict, item_name=lambda item: item.name)


def build_page(verdict: CheckVerdict, rows: Sequence[CheckRow]) -> Page:
    return Page(
        KIND,
        map(build_item, rows),
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

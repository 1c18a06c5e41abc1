# SPDX-License-Identifier: Apache-2.0
"""`kbpf check`: whether this machine can run kbpf, and with --attached whether the hooks work."""

from typing import Annotated

import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, CacheDir, CGroup, ConfigFile, Output, OutputOption, PinDir


def check(
    attached: Annotated[
        bool, typer.Option("--attached", help="Also test the attached hooks with real connections.")
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
    from kbpf.checks import packet_path
    from kbpf.cli import check_rows

    rows = (
        *bpf_checks.rows(cgroup, pin_dir, cache_dir),
        *packet_path.check_packet_path(pin_dir),
        *ipvs_checks.rows(),
    )
    proof = None
    if attached:
        from kbpf.checks import connect as attached_checks
        from kbpf.dataplane.bpf.inspect import snapshot

        node_snapshot = snapshot.read(pin_dir, attached_checks.NEEDS)
        proof = tuple(attached_checks.check_attached(node_snapshot))
        rows = (*rows, *attached_checks.foreign_rows(node_snapshot))
    verdict = check_rows.compute_verdict(rows, proof)
    if output in (Output.JSON, Output.YAML):
        print(render.format_document(verdict, output))
    else:
        print(check_rows.format_page(verdict))
    raise typer.Exit(0 if verdict.usable and verdict.attached is not False else 1)

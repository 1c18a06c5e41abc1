"""`kbpf check`: whether this machine can run kbpf, and whether what runs works."""

from typing import Annotated

import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, CacheDir, CGroup, ConfigFile, Output, OutputOption, PinDir


def check(
    attached: Annotated[
        bool, typer.Option("--attached", help="Also prove by real connections that the hooks work.")
    ] = False,
    output: OutputOption = Output.TABLE,
    config: ConfigFile = None,
    cgroup: CGroup = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    cache_dir: CacheDir = DEFAULT.cache_dir,
) -> None:
    """What this kernel and machine can do, row by row. Ends with 0 if kbpf can run here (and, with
    --attached, does), else 1.
    """
    from kbpf.cli import checks, packet_checks
    from kbpf.dataplane.bpf import checks as bpf_checks
    from kbpf.dataplane.ipvs import checks as ipvs_checks

    found = (
        *bpf_checks.rows(cgroup, pin_dir, cache_dir),
        *packet_checks.rows(pin_dir),
        *ipvs_checks.rows(),
    )
    proof = None
    if attached:
        from kbpf.cli import attached as proving
        from kbpf.views import snapshot

        held = snapshot.read(pin_dir, proving.NEEDS)
        proof = tuple(proving.rows(held))
        found = (*found, *proving.others(held))
    made = checks.verdict(found, proof)
    if output in (Output.JSON, Output.YAML):
        print(render.document(made, output))
    else:
        print(checks.page(made))
    raise typer.Exit(0 if made.usable and made.attached is not False else 1)

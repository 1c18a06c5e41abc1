# SPDX-License-Identifier: Apache-2.0
"""`kbpf cleanup`: removes everything that kbpf keeps on this node. Services stop working."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, NAMES_KEY, CacheDir, ConfigNames, Output, OutputOption, PinDir, StateDir, warn
from kbpf.errors import ConfigError
from kbpf.model.config import Config
from kbpf.views.page import Column, Kind, Page


class RemovedItem(msgspec.Struct, frozen=True):
    """One thing that was removed. `path` is a path, or a description if it has none."""

    kind: str
    path: str


class Removal(msgspec.Struct, frozen=True):
    """`dry_run`: nothing was removed; the items are what would be."""

    dry_run: bool


KIND: Final = Kind("RemovedItemList", RemovedItem, Removal, item_name=lambda item: item.path)


def build_page(items: Sequence[RemovedItem], dry_run: bool, location: str) -> Page:
    title = "WOULD-REMOVE" if dry_run else "REMOVED"
    columns = (Column(title, lambda r: r.kind), Column("PATH", lambda r: r.path))
    return Page(
        KIND,
        items,
        columns if items else (),
        summary=Removal(dry_run),
        text=None if items else lambda wide: f"nothing to remove {location}",
    )


Cache = Annotated[bool, typer.Option("--cache", help="Also remove the compiled programs in --cache-dir.")]
Force = Annotated[bool, typer.Option("--force", help="Even while the agent runs, unless it is in mode ipvs.")]
KubeProxy = Annotated[
    bool, typer.Option("--kube-proxy", help="Remove what a stopped kube-proxy left, instead of kbpf's state.")
]
KeepConnections = Annotated[
    bool, typer.Option("--keep-connections", help="Only stop serving new connections; established ones continue.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed, also of a running agent.")]


def cleanup(
    context: typer.Context,
    dry_run: DryRun = False,
    cache: Cache = False,
    force: Force = False,
    kube_proxy: KubeProxy = False,
    keep_connections: KeepConnections = False,
    file: ConfigNames = None,
    output: OutputOption = Output.TABLE,
    pin_dir: PinDir = DEFAULT.pin_dir,
    cache_dir: CacheDir = DEFAULT.cache_dir,
    state_dir: StateDir = DEFAULT.state_dir,
) -> None:
    """Detach and remove everything that kbpf keeps in the kernel. Services stop working on this
    node. The bpffs on /sys/fs/bpf stays, and so do the compiled programs without --cache.

    Stop the agent first. Connected sockets stay connected. Connections that the packet path
    translates break: call `cleanup --keep-connections` first, and this when they have ended.
    """
    from kbpf.cli import removal

    if sum((kube_proxy, keep_connections, cache)) > 1:
        raise ConfigError(
            "--kube-proxy, --keep-connections and --cache cannot be combined", "", "run `kbpf cleanup` once for each"
        )
    config = Config(pin_dir=pin_dir, cache_dir=cache_dir, state_dir=state_dir)
    location = f"in {pin_dir}"
    if kube_proxy:
        items, location = [*removal.remove_kube_proxy(force, dry_run)], "of kube-proxy"
    elif keep_connections:
        _require_names(context, file, {"pin_dir"})
        items = [*removal.remove_frontends(pin_dir, force, dry_run)]
    else:
        names = {"pin_dir", "state_dir"}
        _require_names(context, file, names | ({"cache_dir"} if cache else set()))
        removal.require_no_ipvs_agent(config, dry_run)
        items = [*removal.remove_pins(pin_dir, force, dry_run), *removal.remove_ipvs(config, dry_run)]
        if cache:
            items += removal.remove_artifacts(cache_dir, dry_run)
            location += f" and {cache_dir}"
    render.show(build_page(items, dry_run, location), output)


def _require_names(context: typer.Context, file: Path | None, option_names: set[str]) -> None:
    """Raises ConfigError if the file may set one of these options to a value that cannot be read,
    and no flag or variable overrides it: cleanup would then look under the wrong name, remove
    nothing and report success. Other errors in the file are warnings.
    """
    names = context.meta[NAMES_KEY]
    if names is None:
        return
    for name in sorted(option_names & names.unreadable.keys()):
        source = context.get_parameter_source(name)
        if source is None or source.name not in ("COMMANDLINE", "ENVIRONMENT"):
            raise names.unreadable[name]
    warn(file, names.errors)

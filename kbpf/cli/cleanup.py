# SPDX-License-Identifier: Apache-2.0
"""`kbpf cleanup`: removes everything that kbpf keeps on this node. Services stop working."""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from kbpf.cli import render
from kbpf.cli.options import DEFAULT, NAMES_KEY, CacheDir, ConfigNames, Output, OutputOption, PinDir, StateDir, warn
from kbpf.errors import ConfigError, KernelError
from kbpf.model.config import Config
from kbpf.views.page import Column, Kind, Page

if TYPE_CHECKING:
    from kbpf.dataplane.bpf.maps.pinning import Pins
    from kbpf.kernel.bpf.tc import Attachment

BPFFS_FILES: Final = frozenset(("maps.debug", "progs.debug"))
"""Files that the kernel creates in the root of each bpffs; unmounting it removes them."""
ARTIFACT_NAME: Final = re.compile(r"[a-z0-9_]+-[0-9a-f]{16}-[0-9a-f]{8}\.kbpf|\.kbpf-.*")


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
    if sum((kube_proxy, keep_connections, cache)) > 1:
        raise ConfigError(
            "--kube-proxy, --keep-connections and --cache cannot be combined", "", "run `kbpf cleanup` once for each"
        )
    config = Config(pin_dir=pin_dir, cache_dir=cache_dir, state_dir=state_dir)
    location = f"in {pin_dir}"
    if kube_proxy:
        items, location = [*remove_kube_proxy(force, dry_run)], "of kube-proxy"
    elif keep_connections:
        _require_names(context, file, {"pin_dir"})
        items = [*remove_frontends(pin_dir, force, dry_run)]
    else:
        names = {"pin_dir", "state_dir"}
        _require_names(context, file, names | ({"cache_dir"} if cache else set()))
        with _refusals(dry_run):
            require_no_ipvs_agent(config)
        items = [*remove_pins(pin_dir, force, dry_run), *remove_ipvs(config, dry_run)]
        if cache:
            items += remove_artifacts(cache_dir, dry_run)
            location += f" and {cache_dir}"
    render.show(build_page(items, dry_run, location), output)


@contextlib.contextmanager
def _refusals(dry_run: bool) -> Iterator[None]:
    """With `dry_run` the reason for which cleanup would refuse to run is only a note."""
    try:
        yield
    except KernelError as error:
        if not dry_run:
            raise
        print(f"kbpf: without --dry-run: {error}", file=sys.stderr)


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


def remove_kube_proxy(force: bool = False, dry_run: bool = False) -> Iterator[RemovedItem]:
    """Removes what a kube-proxy left, except what kbpf has taken over.

    Raises KernelError, unless `force`, if a kube-proxy runs or this cannot be determined: it may
    not notice that its rules are gone, and Services would stop working.
    """
    from kbpf.dataplane.ipvs import ipvs_cleanup
    from kbpf.kernel.netfilter import forward_rules
    from kbpf.takeover import conntrack_keepalive, detect
    from kbpf.takeover import kube_proxy_cleanup as takeover_cleanup

    if not force:
        with _refusals(dry_run):
            detect.require_no_kube_proxy()
    nft_works = forward_rules.probe_nf_tables().works
    own_services = (ipvs_cleanup.read_owned_services() if nft_works else None) or ()
    notes: list[str] = []
    descriptions = takeover_cleanup.remove(own_services, dry_run, notes.append)
    yield from (RemovedItem("kube-proxy", description) for description in descriptions)
    if notes:
        notes.append(
            "if a CNI adds these rules, remove externalSetMarkChain from its configuration first; run this again "
            "when they are gone (docs/migration.md)"
        )
        print(*(f"kbpf: {line}" for line in notes), sep="\n", file=sys.stderr)
    if not nft_works or dry_run:
        return
    for family in conntrack_keepalive.list_families():
        service_count = len(conntrack_keepalive.list_kept_services((family,)))
        contents = [f"{service_count} virtual services of IPVS"] if service_count else []
        contents += [f"a rule in {chain}" for chain in conntrack_keepalive.chains_with_rule((family,))]
        more = f", and with it {' and '.join(contents)}" if contents else ""
        print(
            f"kbpf: table {family} {conntrack_keepalive.TABLE} stays{more}, for connections that "
            "kube-proxy translated; the agent removes it when they have ended",
            file=sys.stderr,
        )


def remove_frontends(pin_dir: Path, force: bool = False, dry_run: bool = False) -> Iterator[RemovedItem]:
    """Removes the frontends, so that new connections pass untranslated and established ones
    continue. Raises KernelError if an agent runs, unless `force`, because it would restore them.
    """
    from kbpf.dataplane.bpf.maps import pinning
    from kbpf.dataplane.bpf.maps.pinning import Pins
    from kbpf.dataplane.bpf.packet_path import snat_ports

    if _list_pins(pin_dir) is None:
        return
    with _exclusive(Pins(pin_dir), force, dry_run):
        if dry_run:
            count = pinning.count_frontends(Pins(pin_dir))
        else:
            count = snat_ports.hand_over_new_connections(Pins(pin_dir))
    if count:
        yield RemovedItem("frontends", f"{count} in {pin_dir}")


def remove_pins(pin_dir: Path, force: bool = False, dry_run: bool = False) -> Iterator[RemovedItem]:
    """Removes attachments, programs and maps, and the bpffs if kbpf mounted it for them.
    Raises ConfigError if the folder contains anything else, and KernelError if an agent uses it,
    unless `force`.
    """
    from kbpf.dataplane.bpf import host
    from kbpf.dataplane.bpf.maps import pinning
    from kbpf.dataplane.bpf.maps.pinning import Pins
    from kbpf.dataplane.bpf.packet_path import packet_path, snat_ports
    from kbpf.kernel.net.devices import list_devices
    from kbpf.kernel.system import mounts

    entries = _list_pins(pin_dir)
    names = {device.ifindex: device.name for device in list_devices()}
    pins = Pins(pin_dir)
    remove_programs = packet_path.list_programs if dry_run else packet_path.remove_programs
    if entries is None:  # our netfilter rules and filters can be recognised without the folder
        on_node = host.remove(pins, dry_run=dry_run)
        yield from _attachment_items(remove_programs(pins), names)
        yield from (RemovedItem("node", description) for description in on_node)
        return
    with _exclusive(pins, force, dry_run):
        links = sorted((pin_dir / "links").iterdir()) if (pin_dir / "links").is_dir() else []
        folders = [path for path in entries if path.name not in ("links", "devices", pinning.HOST_FOLDER)]
        # These read the pins, so the pins are removed last.
        if not dry_run:
            snat_ports.withdraw_our_ports(pins)
        on_node = host.remove(pins, dry_run=dry_run)
        on_devices = remove_programs(pins)
        if not dry_run:
            _remove_all_pins(pins)
    yield from (RemovedItem("attachment", str(path)) for path in links)
    yield from _attachment_items(on_devices, names)
    yield from (RemovedItem("node", description) for description in on_node)
    yield from (RemovedItem(_pin_kind(path), str(path)) for path in folders)
    is_own_bpffs = mounts.is_own_bpffs(pin_dir)
    if is_own_bpffs:
        yield RemovedItem("bpffs", str(pin_dir))
    if is_own_bpffs and not dry_run:
        mounts.unmount(pin_dir)
        with contextlib.suppress(OSError):  # the mount point is not empty: it is not ours
            pin_dir.rmdir()
    stays = pin_dir.is_mount() and not is_own_bpffs if dry_run else pin_dir.exists()
    if not stays:
        yield RemovedItem("folder", str(pin_dir))


def _remove_all_pins(pins: "Pins") -> None:
    from kbpf.dataplane.bpf.maps import pinning

    try:
        pinning.remove(pins)
    except OSError as error:
        # If the folder is a bpffs mount, the kernel's debug files and the mount point itself cannot
        # be removed, which is not an error.
        if not pins.root.is_mount() or not BPFFS_FILES.issuperset(_file_names(pins.root)):
            raise KernelError("cannot remove all pins", str(pins.root), "run as root", error.errno or 0) from error


def _attachment_items(attachments: Iterable["Attachment"], names: Mapping[int, str]) -> Iterator[RemovedItem]:
    for attachment in attachments:
        name = names.get(attachment.ifindex, f"device {attachment.ifindex}")
        yield RemovedItem("attachment", f"{attachment.direction} of {name}")


def require_no_ipvs_agent(config: Config) -> None:
    """Raises KernelError if an agent in mode ipvs runs: it would restore whatever is removed."""
    folder = config.ipvs_folder
    if folder.is_dir():
        os.close(_lock(folder))


def _lock(folder: Path) -> int:
    from kbpf.dataplane.ipvs import ipvs_cleanup

    try:
        return ipvs_cleanup.lock_state_folder(folder, timeout=0.0)
    except KernelError as error:
        if error.errno != errno.EAGAIN:
            raise
        raise KernelError(
            "nothing was removed: an agent in mode ipvs is running",
            str(folder),
            "stop the agent first; --force does not help, because the agent would restore its IPVS state",
            error.errno,
        ) from error


def remove_ipvs(config: Config, dry_run: bool = False) -> Iterator[RemovedItem]:
    """Removes what mode ipvs keeps, if its state folder, device or nftables table exists. Raises
    KernelError if an agent uses it.
    """
    from kbpf.dataplane.ipvs import ipvs_cleanup
    from kbpf.kernel.net import dummy
    from kbpf.takeover import conntrack_keepalive, detect

    folder = config.ipvs_folder
    if not ipvs_cleanup.has_state(config):
        return
    had_folder = folder.is_dir()
    fd = -1 if dry_run else _lock(folder)
    try:
        kube_proxy = bool(dummy.get_ifindex_or_zero(conntrack_keepalive.KUBE_PROXY_DEVICE))
        kube_proxy_runs = kube_proxy and bool(detect.where_it_runs(detect.detect()))
        descriptions = ipvs_cleanup.remove(config, kube_proxy_runs=kube_proxy_runs, dry_run=dry_run)
    finally:
        if fd >= 0:
            os.close(fd)
    yield from (RemovedItem("node", description) for description in descriptions)
    if had_folder:
        yield RemovedItem("folder", str(folder))


@contextlib.contextmanager
def _exclusive(pins: "Pins", force: bool, dry_run: bool = False) -> Iterator[None]:
    """Holds the agent's lock inside the block. If an agent has it, raises KernelError, or with
    `force` prints a warning, or with `dry_run` a note.
    """
    from kbpf.dataplane.bpf.maps import pinning

    fd = -1
    try:
        fd = pinning.lock_pins(pins, timeout_s=0.0)
    except KernelError as error:
        if error.errno != errno.EAGAIN:
            raise
        if dry_run or not force:
            with _refusals(dry_run):
                raise KernelError(
                    "nothing was removed: an agent is running",
                    str(pins.root),
                    "stop the agent first, or use --force",
                    error.errno or 0,
                ) from error
        else:
            _warn_about_agent(pins.root)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _pin_kind(path: Path) -> str:
    for kind in ("maps", "layout", "programs"):
        if path.name.startswith(f"{kind}-"):
            return kind
    return "temporary"


def _list_pins(pin_dir: Path) -> list[Path] | None:
    """The entries of the folder; None if it does not exist. Raises ConfigError if one is not
    ours.
    """
    from kbpf.dataplane.bpf.maps import pinning
    from kbpf.kernel.system import mounts

    try:
        entries = pinning.list_pin_folder(pin_dir)
    except FileNotFoundError:
        return None
    if mounts.is_own_bpffs(pin_dir):  # in any other bpffs these files are not ours to remove
        entries = [path for path in entries if path.name not in BPFFS_FILES]
    foreign = [path.name for path in entries if not pinning.is_pin_name(path.name)]
    if foreign or not mounts.is_bpffs(pin_dir):
        reason = f"the folder has entries that are not kbpf's ({', '.join(foreign[:3])})"
        raise ConfigError(
            f"nothing was removed: {reason if foreign else 'the folder is in no bpffs'}",
            str(pin_dir),
            pinning.SAME_PIN_DIR_HINT,
        )
    return entries


def _file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _warn_about_agent(pin_dir: Path) -> None:
    from kbpf.dataplane.bpf.inspect import snapshot
    from kbpf.errors import KbpfError
    from kbpf.model.inspection import Part

    try:
        status = snapshot.read(pin_dir, Part.STATUS).status
        pid_text = f" (pid {status.pid if status else 0})"
    except KbpfError:
        pid_text = ""  # an incomplete pin folder must not keep --force from removing it
    print(
        f"kbpf: the agent{pid_text} is still running, and its maps and programs are being removed; restart or stop it",
        file=sys.stderr,
    )


def remove_artifacts(cache_dir: Path, dry_run: bool = False) -> Iterator[RemovedItem]:
    """Removes the compiled programs, and the folder if it is then empty."""
    if not cache_dir.is_dir():
        return
    paths = sorted(cache_dir.iterdir())
    artifacts = [path for path in paths if ARTIFACT_NAME.fullmatch(path.name)]
    for path in artifacts:
        if not dry_run:
            path.unlink()
        yield RemovedItem("artifact", str(path))
    if artifacts == paths:
        if not dry_run:
            cache_dir.rmdir()
        yield RemovedItem("folder", str(cache_dir))

# SPDX-License-Identifier: Apache-2.0
"""Removes what kbpf, or a kube-proxy, keeps on this node, and yields what that was. With `dry_run`
nothing is removed.
"""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from kbpf.cli.cleanup import RemovedItem
from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import packet_path, snat_ports
from kbpf.dataplane.ipvs import ipvs_cleanup
from kbpf.errors import ConfigError, KbpfError, KernelError
from kbpf.kernel.bpf.tc import Attachment
from kbpf.kernel.net import dummy
from kbpf.kernel.net.devices import list_devices
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.system import mounts
from kbpf.model.config import Config
from kbpf.model.inspection import Part
from kbpf.takeover import conntrack_keepalive, detect, kube_proxy_cleanup

BPFFS_FILES: Final = frozenset(("maps.debug", "progs.debug"))
"""Files that the kernel creates in the root of each bpffs; unmounting it removes them."""
ARTIFACT_NAME: Final = re.compile(r"[a-z0-9_]+-[0-9a-f]{16}-[0-9a-f]{8}\.kbpf|\.kbpf-.*")


@contextlib.contextmanager
def _refusals(dry_run: bool) -> Iterator[None]:
    """With `dry_run` the reason for which cleanup would refuse to run is only a note."""
    try:
        yield
    except KernelError as error:
        if not dry_run:
            raise
        print(f"kbpf: without --dry-run: {error}", file=sys.stderr)


def remove_kube_proxy(force: bool, dry_run: bool) -> Iterator[RemovedItem]:
    """Removes what a kube-proxy left, except what kbpf has taken over.

    Raises KernelError, unless `force`, if a kube-proxy runs or this cannot be determined: it may
    not notice that its rules are gone, and Services would stop working.
    """
    if not force:
        with _refusals(dry_run):
            detect.require_no_kube_proxy()
    nft_works = forward_rules.probe_nf_tables().works
    own_services = (ipvs_cleanup.read_owned_services() if nft_works else None) or ()
    notes: list[str] = []
    descriptions = kube_proxy_cleanup.remove(own_services, dry_run, notes.append)
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


def remove_frontends(pin_dir: Path, force: bool, dry_run: bool) -> Iterator[RemovedItem]:
    """Removes the frontends, so that new connections pass untranslated and established ones
    continue. Raises KernelError if an agent runs, unless `force`, because it would restore them.
    """
    if _list_pins(pin_dir) is None:
        return
    with _exclusive(Pins(pin_dir), force, dry_run):
        if dry_run:
            count = pinning.count_frontends(Pins(pin_dir))
        else:
            count = snat_ports.hand_over_new_connections(Pins(pin_dir))
    if count:
        yield RemovedItem("frontends", f"{count} in {pin_dir}")


def remove_pins(pin_dir: Path, force: bool, dry_run: bool) -> Iterator[RemovedItem]:
    """Removes attachments, programs and maps, and the bpffs if kbpf mounted it for them.
    Raises ConfigError if the folder contains anything else, and KernelError if an agent uses it,
    unless `force`.
    """
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


def _remove_all_pins(pins: Pins) -> None:

    try:
        pinning.remove(pins)
    except OSError as error:
        # If the folder is a bpffs mount, the kernel's debug files and the mount point itself cannot
        # be removed, which is not an error.
        if not pins.root.is_mount() or not BPFFS_FILES.issuperset(path.name for path in pins.root.iterdir()):
            raise KernelError("cannot remove all pins", str(pins.root), "run as root", error.errno or 0) from error


def _attachment_items(attachments: Iterable[Attachment], names: Mapping[int, str]) -> Iterator[RemovedItem]:
    for attachment in attachments:
        name = names.get(attachment.ifindex, f"device {attachment.ifindex}")
        yield RemovedItem("attachment", f"{attachment.direction} of {name}")


def require_no_ipvs_agent(config: Config, dry_run: bool) -> None:
    """Raises KernelError if an agent in mode ipvs runs: it would restore whatever is removed."""
    if config.ipvs_folder.is_dir():
        with _refusals(dry_run):
            os.close(_lock(config.ipvs_folder))


def _lock(folder: Path) -> int:

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


def remove_ipvs(config: Config, dry_run: bool) -> Iterator[RemovedItem]:
    """Removes what mode ipvs keeps, if its state folder, device or nftables table exists. Raises
    KernelError if an agent uses it.
    """
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
def _exclusive(pins: Pins, force: bool, dry_run: bool) -> Iterator[None]:
    """Holds the agent's lock inside the block. If an agent has it, raises KernelError, or with
    `force` prints a warning, or with `dry_run` a note.
    """
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


def _warn_about_agent(pin_dir: Path) -> None:

    try:
        status = snapshot.read(pin_dir, Part.STATUS).status
        pid_text = f" (pid {status.pid if status else 0})"
    except KbpfError:
        pid_text = ""  # an incomplete pin folder must not keep --force from removing it
    print(
        f"kbpf: the agent{pid_text} is still running, and its maps and programs are being removed; restart or stop it",
        file=sys.stderr,
    )


def remove_artifacts(cache_dir: Path, dry_run: bool) -> Iterator[RemovedItem]:
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

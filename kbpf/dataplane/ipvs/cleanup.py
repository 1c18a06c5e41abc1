"""What an agent of mode ipvs leaves on its node: how it is named, whose it is, how it goes."""

import contextlib
import errno
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from kbpf.dataplane.ipvs import ruleset, statefile
from kbpf.dataplane.ipvs.plan import Element, SetName, Virtual, noted
from kbpf.errors import KernelError
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.net.ipvs import Command, Ipvs, Service
from kbpf.kernel.netfilter import forward_rules, nft
from kbpf.kernel.system.private_folders import LOCK_SECONDS, PRIVATE, lock_folder
from kbpf.model.config import Config, LocalMode
from kbpf.model.objects import Protocol
from kbpf.takeover import conntrack_keepalive

ROOT: Final = "run as root"


def style_of(config: Config) -> ruleset.Style:
    """What the chains depend on."""
    local = ""
    if config.detect_local_mode is LocalMode.BRIDGE:
        local = config.pod_bridge_interface
    elif config.detect_local_mode is LocalMode.PREFIX:
        local = f"{config.pod_interface_name_prefix}*"
    return ruleset.Style(
        config.nft_table, config.masquerade_bit, local, beside(config.masquerade_ports)
    )


def beside(ports: tuple[int, int]) -> tuple[int, int]:
    """The larger range of unprivileged ports that has none of these."""
    low, high = ports
    above, below = (high + 1, 65535), (1024, low - 1)
    return above if above[1] - above[0] >= below[1] - below[0] else below


def lock(folder: Path, patience: float = LOCK_SECONDS) -> int:
    """A descriptor that makes this process the only one at work with this device and table."""
    try:
        folder.mkdir(PRIVATE, parents=True, exist_ok=True)
        return lock_folder(folder, patience, "stop it first")
    except OSError as error:
        raise KernelError("cannot make the state folder", str(folder), "run as root",
                          error.errno or 0) from error  # fmt: skip


def has_table(table: str) -> bool:
    """Whether there is a table of ours by this name: our notes are in it."""
    return nft.has_set("inet", table, f"{SetName.OWN}4")


def refuse_others(table: str) -> None:
    """KernelError if somebody else has a table of this name. An empty one is nobody's."""
    found = nft.look("inet", table)
    if found is not None and found.parts and not has_table(table):
        raise KernelError(
            "a table of this name is there, and kbpf has not made it", f"nftables inet {table}",
            "remove it, or give kbpf another name with --nft-table", errno.EEXIST,
        )  # fmt: skip


def there(config: Config) -> bool:
    """Whether an agent with these settings has been here: its folder may have been a container's,
    table and device are the node's.
    """
    if (config.state_dir / config.ipvs_device).is_dir() or dummy.is_ours(config.ipvs_device):
        return True
    try:
        return has_table(config.nft_table)
    except KernelError:  # no nf_tables
        return False


def elements(table: str) -> frozenset[Element] | None:
    """Those of the sets of a table of ours; None without one."""
    if not has_table(table):
        return None
    return ruleset.read(forward_rules.transaction(ruleset.listing(ruleset.Style(table))))


def own_services(table: str) -> set[Service] | None:
    """The virtual services that a table of ours notes; None without one."""
    if (found := elements(table)) is None:
        return None
    return {Service(*v) for element in found if (v := noted(element)) is not None}


def virtual_of(service: Service) -> Virtual | None:
    """None for protocols that no Service has."""
    try:
        return Virtual(Protocol(service.protocol), service.address, service.port, service.mark)
    except ValueError:
        return None


def end_services(gone: Collection[Service]) -> None:
    """They are gone, whoever has removed them. KernelError if the kernel refuses."""
    if gone:
        with contextlib.closing(Ipvs()) as face:
            face.change([ipvs.Change(Command.DEL_SERVICE, one) for one in sorted(gone)],
                        (errno.ESRCH,))  # fmt: skip


def _at_device(name: str) -> set[Service]:
    """The virtual services at the addresses of our device: all that is known of them without the
    table.
    """
    addresses = dummy.addresses_of(name) if dummy.is_ours(name) else frozenset()
    if not addresses:
        return set()
    try:
        face = Ipvs()
    except KernelError:  # no IPVS, no virtual services
        return set()
    with contextlib.closing(face):
        found = (service for service, _ in face.services())
        return {one for one in found if not one.mark and one.address in addresses}


def _kube_proxys(device: str, runs: bool) -> Callable[[Service], bool]:
    """What tells a virtual service that a kube-proxy has taken over, where there is one of mode
    ipvs: at an address that it keeps too, or of a NodePort in one of its sets. If it `runs`, these
    may not be filled yet: any whose address is not on our `device`.
    """
    if not dummy.index_or_zero(conntrack_keepalive.KUBE_PROXYS):
        return lambda _: False
    theirs = dummy.addresses_of(conntrack_keepalive.KUBE_PROXYS)
    ours = dummy.addresses_of(device)
    ports = conntrack_keepalive.node_ports()

    def is_its(service: Service) -> bool:
        if service.mark or service.address in theirs:
            return not service.mark
        port = service.protocol, service.port
        return service.address not in ours and (runs or port in ports)

    return is_its


def remove(config: Config, forward: bool = True, kube_proxy_runs: bool = False) -> tuple[str, ...]:
    """Every trace of an agent with these settings, in an order that leaves nobody half served;
    what there was. What others have made by these names stays, and what a kube-proxy serves by now;
    so do rules in FORWARD if another mode needs them (not `forward`). KernelError if the kernel
    refuses.
    """
    style, gone = style_of(config), []
    noted_there = own_services(style.table)
    ours = _at_device(config.ipvs_device) if noted_there is None else noted_there
    theirs = _kube_proxys(config.ipvs_device, kube_proxy_runs)
    ours = {service for service in ours if not theirs(service)}
    end_services(ours)
    if ours:
        gone.append(f"{len(ours)} virtual services")
    if dummy.is_ours(config.ipvs_device) and dummy.remove(config.ipvs_device):
        gone.append(f"device {config.ipvs_device}")
    if noted_there is not None:
        for chain in forward_rules.forward_chains() if forward else ():
            forward_rules.remove_ours(chain)
        forward_rules.transaction(*ruleset.no_table(style), hint=ROOT)
        gone.append(f"nftables inet {style.table}")
    folder = config.state_dir / config.ipvs_device
    statefile.remove(folder)
    for one in (folder, config.state_dir):
        with contextlib.suppress(OSError):
            one.rmdir()
    return tuple(gone)

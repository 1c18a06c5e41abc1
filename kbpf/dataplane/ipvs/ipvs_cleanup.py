# SPDX-License-Identifier: Apache-2.0
"""The state of mode ipvs on a node: names, ownership, drain and removal."""

import contextlib
import errno
import socket
from collections.abc import Callable, Collection, Container
from pathlib import Path
from typing import Final

from kbpf.dataplane.ipvs import ruleset, statefile
from kbpf.dataplane.ipvs.plan import Element, SetName, owned_services
from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.net.ipvs import IpvsClient, IpvsCommand
from kbpf.kernel.netfilter import forward_rules, nft
from kbpf.kernel.system.private_folders import LOCK_TIMEOUT_S, PRIVATE_MODE, lock_folder
from kbpf.model.config import IPVS_DEVICE, Config, LocalMode
from kbpf.model.desired import VirtualService
from kbpf.takeover import conntrack_keepalive
from kbpf.takeover.previous import PreviousDataPlane

ROOT_HINT: Final = "run as root"


def ruleset_options(config: Config) -> ruleset.RulesetOptions:
    """The settings that the table's chains depend on."""
    local_interfaces = ""
    if config.detect_local_mode is LocalMode.BRIDGE_INTERFACE:
        local_interfaces = config.pod_bridge_interface
    elif config.detect_local_mode is LocalMode.INTERFACE_NAME_PREFIX:
        local_interfaces = f"{config.pod_interface_name_prefix}*"
    return ruleset.RulesetOptions(
        masquerade_bit=config.masquerade_bit,
        local_interfaces=local_interfaces,
        masquerade_ports=largest_range_outside(config.masquerade_ports),
    )


def largest_range_outside(ports: tuple[int, int]) -> tuple[int, int]:
    """The larger of the two ranges of unprivileged ports below and above `ports` (both ends
    included).
    """
    low, high = ports
    above, below = (high + 1, 65535), (1024, low - 1)
    return above if above[1] - above[0] >= below[1] - below[0] else below


def lock_state_folder(folder: Path, timeout: float = LOCK_TIMEOUT_S) -> int:
    """Creates the state folder and locks it, so that no other agent uses the device and table.
    Returns the descriptor that holds the lock.
    """
    with kernel_errors("cannot create the state folder", str(folder), ROOT_HINT):
        folder.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
        return lock_folder(folder, timeout, "stop it first")


def has_table() -> bool:
    """Whether the table exists and is ours. It is if it has the set that records ownership."""
    return nft.has_set("inet", ruleset.TABLE, f"{SetName.OWN}4")


def refuse_foreign_table() -> None:
    """Raises KernelError if another program owns a table of our name. An empty one is accepted:
    kbpf may have been killed before it wrote its sets.
    """
    summary = nft.read_table("inet", ruleset.TABLE)
    if summary is not None and summary.use_count and not has_table():
        raise KernelError(
            "a table of this name exists that kbpf did not create",
            f"nftables inet {ruleset.TABLE}",
            "remove it",
            errno.EEXIST,
        )


def has_state(config: Config) -> bool:
    """Whether an agent with these settings left state here. The folder alone does not decide: it
    may have been in a container, while table and device belong to the node.
    """
    if config.ipvs_folder.is_dir() or dummy.is_ours(IPVS_DEVICE):
        return True
    try:
        return has_table()
    except KernelError:  # the kernel has no nf_tables
        return False


def read_elements() -> frozenset[Element] | None:
    """The elements of the sets of our table; None if it does not exist."""
    if not has_table():
        return None
    return ruleset.parse_elements(forward_rules.run_transaction(ruleset.LIST_TABLE))


def read_owned_services() -> frozenset[VirtualService] | None:
    """The virtual services that our table records as ours; None if it does not exist."""
    elements = read_elements()
    return None if elements is None else owned_services(elements)


def _delete_services(client: IpvsClient, services: Collection[VirtualService]) -> None:
    """Deletes virtual services; missing ones are ignored. Raises KernelError if the kernel
    refuses.
    """
    client.apply(
        [ipvs.IpvsRequest(IpvsCommand.IPVS_CMD_DEL_SERVICE, service) for service in sorted(services)], (errno.ESRCH,)
    )


def _services_at_device() -> set[VirtualService]:
    """The virtual services on the addresses of our device. Without the table this is all that
    shows which ones are ours.
    """
    addresses = dummy.addresses_of(IPVS_DEVICE) if dummy.is_ours(IPVS_DEVICE) else frozenset()
    if not addresses:
        return set()
    try:
        client = IpvsClient()
    except KernelError:  # without IPVS there are no virtual services
        return set()
    with contextlib.closing(client):
        services = (service for service, _ in client.list_services())
        return {key for key in services if not key.fwmark and key.address in addresses}


def _kube_proxy_test(is_running: bool) -> Callable[[VirtualService], bool]:
    """Returns a function that decides whether a virtual service was taken over by a kube-proxy of
    mode ipvs: its address is on kube-proxy's device, or it is a NodePort in one of kube-proxy's IP
    sets. A running kube-proxy may not have filled its sets yet, so with `is_running` every virtual
    service whose address is not on our device counts as its own.
    """
    if not dummy.get_ifindex_or_zero(conntrack_keepalive.KUBE_PROXY_DEVICE):
        return lambda _: False
    kube_proxy_addresses = dummy.addresses_of(conntrack_keepalive.KUBE_PROXY_DEVICE)
    own_addresses = dummy.addresses_of(IPVS_DEVICE)
    ports = conntrack_keepalive.list_node_ports()

    def is_kube_proxy_service(service: VirtualService) -> bool:
        if service.fwmark or service.address in kube_proxy_addresses:
            return not service.fwmark  # kube-proxy has no virtual services by fwmark
        port = service.protocol, service.port
        return service.address not in own_addresses and (is_running or port in ports)

    return is_kube_proxy_service


def remove(
    config: Config, with_forward_rules: bool = True, kube_proxy_runs: bool = False, dry_run: bool = False
) -> tuple[str, ...]:
    """Removes all state of an agent with these settings; returns what was removed, for display.
    With `dry_run` it only returns what would be.

    The order (virtual services, addresses, table) never leaves a frontend half served. Objects of
    other programs with these names are kept, and so are virtual services that a kube-proxy serves
    by now. `with_forward_rules` is False if another mode still needs the rules in FORWARD. Raises
    KernelError if the kernel refuses.
    """
    removed = []
    owned = read_owned_services()
    # The table is removed last: if this is interrupted, the next call finds everything again.
    services = _services_at_device() if owned is None else owned
    is_kube_proxy_service = _kube_proxy_test(kube_proxy_runs)
    services = {service for service in services if not is_kube_proxy_service(service)}
    if services and not dry_run:
        with contextlib.closing(IpvsClient()) as client:
            _delete_services(client, services)
    if services:
        removed.append(f"{len(services)} virtual services")
    if dummy.is_ours(IPVS_DEVICE) and (dry_run or dummy.remove(IPVS_DEVICE)):
        removed.append(f"device {IPVS_DEVICE}")
    if dry_run:
        return (*removed, *([f"nftables inet {ruleset.TABLE}"] if owned is not None else []))
    if owned is not None:
        for chain in forward_rules.list_forward_chains() if with_forward_rules else ():
            forward_rules.remove_masquerade_rules(chain)
        forward_rules.run_transaction(ruleset.DELETE_TABLE, hint=ROOT_HINT)
        removed.append(f"nftables inet {ruleset.TABLE}")
    statefile.remove_files(config.ipvs_folder)
    for path in (config.ipvs_folder, config.state_dir):
        with contextlib.suppress(OSError):
            path.rmdir()
    return tuple(removed)


# ---- draining ------------------------------------------------------------------------------------


class PreviousIpvsPlane(PreviousDataPlane):
    """What an agent with this device, table and state folder left, once another data plane serves.

    New connections no longer reach IPVS; established ones continue. A virtual address and all its
    virtual services are removed as soon as none of them has connections, and the rest of the table
    with the last of them.
    """

    name = "mode ipvs"
    connections = "connections still use mode ipvs"

    def claim(self) -> bool:
        if not has_state(self._config):
            return False
        self._lock = lock_state_folder(self._config.ipvs_folder)
        return True

    def _remove_idle(self) -> int:
        elements = read_elements() or frozenset()
        if not (owned := owned_services(elements)):
            return 0
        with contextlib.closing(IpvsClient()) as client:
            connection_counts = {virtual: client.count_connections(virtual) for virtual in owned}
            busy_addresses = {virtual.address for virtual, n in connection_counts.items() if n}
            idle_services = [v for v in connection_counts if v.address not in busy_addresses and not v.fwmark]
            _delete_services(client, idle_services)
        idle_addresses = {virtual.address for virtual in idle_services}
        with contextlib.suppress(OSError):  # the device was removed
            dummy.delete_addresses(socket.if_nametoindex(IPVS_DEVICE), idle_addresses)
        if idle_elements := [element for element in elements if _is_at_address(element, idle_addresses)]:
            forward_rules.run_transaction(*ruleset.delete_elements(idle_elements))
        return sum(connection_counts.values())

    def _remove(self) -> None:
        remove(self._config, with_forward_rules=False)


def _is_at_address(element: Element, addresses: Container[object]) -> bool:
    """Whether this element concerns a frontend on one of these addresses."""
    name, parts = element
    if name in (SetName.HAIRPINS, SetName.LOCAL_NETWORKS, SetName.NODE_IPS, SetName.OWN_FWMARKS):
        return False
    return (parts[1] if name is SetName.SOURCES else parts[0]) in addresses

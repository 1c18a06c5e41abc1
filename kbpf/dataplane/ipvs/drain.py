# SPDX-License-Identifier: Apache-2.0
"""Drains the state that an agent of mode ipvs left, once another data plane serves.

New connections no longer reach IPVS; established ones continue. A virtual address and all its
virtual services are removed as soon as none of them has connections, and the rest of the table with
the last of them.
"""

import contextlib
import errno
from collections.abc import Container, Iterable

from kbpf.dataplane.ipvs import cleanup, ruleset
from kbpf.dataplane.ipvs.plan import Element, SetName, VirtualService, owned_service
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.net.ipvs import IpvsClient, IpvsCommand, VirtualServiceKey
from kbpf.kernel.netfilter import forward_rules
from kbpf.model.address import Addr
from kbpf.model.config import IPVS_DEVICE, Config
from kbpf.takeover.previous import PreviousDataPlane


class PreviousIpvsPlane(PreviousDataPlane):
    """What an agent with this state folder left."""

    name = "mode ipvs"
    connections = "connections still use mode ipvs"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config
        self._folder = config.ipvs_folder
        self._options = cleanup.ruleset_options(config)

    def claim(self) -> bool:
        if not cleanup.has_state(self._config):
            return False
        self._lock = cleanup.lock_state_folder(self._folder)
        return True

    def _remove_idle(self) -> int:
        elements = cleanup.read_elements() or frozenset()
        owned = [virtual for element in elements if (virtual := owned_service(element)) is not None]
        if not owned:
            return 0
        with contextlib.closing(IpvsClient()) as client:
            return self._remove_idle_services(client, owned, elements)

    def _remove(self) -> None:
        cleanup.remove(self._config, with_forward_rules=False)

    def _remove_idle_services(
        self, client: IpvsClient, owned: Iterable[VirtualService], elements: frozenset[Element]
    ) -> int:
        """Removes the virtual addresses that have no connections. Returns the number of
        connections that are still open.
        """
        connection_counts = {
            virtual: client.count_connections(VirtualServiceKey(*virtual)) for virtual in owned
        }
        busy_addresses = {virtual.address for virtual, count in connection_counts.items() if count}
        idle_services = [
            v for v in connection_counts if v.address not in busy_addresses and not v.fwmark
        ]
        client.apply(
            [
                ipvs.IpvsRequest(IpvsCommand.IPVS_CMD_DEL_SERVICE, VirtualServiceKey(*v))
                for v in sorted(idle_services)
            ],
            (errno.ESRCH,),
        )
        idle_addresses = {virtual.address for virtual in idle_services}
        self._delete_addresses(idle_addresses)
        if idle_elements := [
            element for element in elements if _is_at_address(element, idle_addresses)
        ]:
            forward_rules.run_transaction(*ruleset.delete_elements(self._options, idle_elements))
        return sum(connection_counts.values())

    def _delete_addresses(self, addresses: Iterable[Addr]) -> None:
        with contextlib.suppress(OSError):  # the device was removed
            dummy.delete_addresses(dummy.get_ifindex(IPVS_DEVICE), addresses)


def _is_at_address(element: Element, addresses: Container[object]) -> bool:
    """Whether this element concerns a frontend on one of these addresses."""
    name, parts = element
    if name in (SetName.HAIRPINS, SetName.LOCAL_NETWORKS, SetName.NODE_IPS, SetName.OWN_FWMARKS):
        return False
    return (parts[1] if name is SetName.SOURCES else parts[0]) in addresses

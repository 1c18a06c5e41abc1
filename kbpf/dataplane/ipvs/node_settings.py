# SPDX-License-Identifier: Apache-2.0
"""The node's settings that IPVS needs, and warnings about those that it does not change."""

import logging
from collections.abc import Collection
from dataclasses import astuple
from typing import Final

from kbpf.dataplane import node
from kbpf.dataplane.ipvs.ruleset import TABLE
from kbpf.dataplane.ipvs.virtual_services import VirtualServices
from kbpf.dataplane.node import forwarding_warnings
from kbpf.errors import KernelError
from kbpf.kernel.net.ipvs import ConnectionTimeouts
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.system import sysctl
from kbpf.model.config import Config

log = logging.getLogger("kbpf.dataplane")

SYSCTLS: Final = {
    "net.ipv4.vs.conntrack": "1",  # IPVS masquerades only with it
    "net.ipv4.vs.expire_nodest_conn": "1",  # a connection ends when its real server is removed
    # session affinity ends when its real server is drained
    "net.ipv4.vs.expire_quiescent_template": "1",
}
STRICT_ARP_SYSCTLS: Final = {
    "net.ipv4.conf.all.arp_ignore": "1",
    "net.ipv4.conf.all.arp_announce": "2",
}


class NodeSettings:
    """Each warning is logged once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lasting: dict[str, None] = {}
        self._firewalls: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings that hold."""
        return *self._lasting, *self._firewalls

    def warn_once(self, line: str) -> None:
        """Adds a warning that holds until the agent ends."""
        if line not in self._lasting:
            self._lasting[line] = None
            log.warning("%s", line)

    def write(self, services: VirtualServices) -> None:
        """Sets sysctls and timeouts; a failure is a warning."""
        settings = SYSCTLS | (STRICT_ARP_SYSCTLS if self._config.strict_arp else {})
        for name, value in settings.items():
            try:
                if sysctl.read(name) != value:
                    sysctl.write(name, value)
            except KernelError as error:
                self.warn_once(str(error))
        for line in forwarding_warnings():
            self.warn_once(line)
        try:
            services.set_timeouts(ConnectionTimeouts(*astuple(self._config.ipvs_times)))
        except KernelError as error:
            self.warn_once(f"cannot set the IPVS timeouts: {error}")

    def check_firewalls(self, listing: Collection[forward_rules.Json]) -> None:
        """Updates the warnings about firewall rules of other programs."""
        warnings = (
            *node.forward_warnings(1 << self._config.masquerade_bit, listing),
            *node.input_warnings(TABLE, listing),
        )
        for line in warnings:
            if line not in self._firewalls:
                log.warning("%s", line)
        self._firewalls = warnings

# SPDX-License-Identifier: Apache-2.0
"""What both data planes read and maintain on the node: its addresses, a rule in each FORWARD chain
that accepts masqueraded packets, and the rules that keep the last connections of a kube-proxy
alive.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.net import addresses, dummy
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.system import sysctl
from kbpf.model.address import NodeAddresses
from kbpf.model.config import Config
from kbpf.takeover import conntrack_keepalive

log = logging.getLogger("kbpf.dataplane")

KEEPALIVE_POLL_INTERVAL_S: Final = 30.0
FORWARDING_SYSCTLS: Final = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")


def forwarding_warnings() -> Iterator[str]:
    for name in FORWARDING_SYSCTLS:
        with contextlib.suppress(KernelError):
            if sysctl.read(name) == "0":
                yield f"{name} is 0, so this node forwards nothing to pods; set it to 1"


def read_node_addresses(config: Config) -> NodeAddresses:
    """The node's own addresses. Dummy devices of IPVS data planes are excluded: they hold Service
    addresses, and the name of ours may have been changed since.
    """
    return addresses.local_addresses(
        config.ipvs_device, *conntrack_keepalive.SERVICE_DEVICES, *dummy.list_ours()
    )


def reconcile_forward_rules(mark: int, listing: Iterable[forward_rules.Json] | None = None) -> None:
    """Accepts packets with this mark, and the last connections of a kube-proxy, in the FORWARD
    chains that need it. `listing`: see forward_rules.list_chains().
    """
    chains = forward_rules.list_forward_chains(listing)
    for chain in chains:
        if action := forward_rules.reconcile_masquerade_rule(chain, mark):
            log.info("%s chain=%r mark=%#x", action, str(chain), mark)
    for action in conntrack_keepalive.reconcile_forward_rules(chains):
        log.info("%s", action)


class KeepalivePoll:
    """Removes the rules of a kube-proxy's last connections once these have ended."""

    def __init__(self) -> None:
        self._due = float("-inf")

    def poll(self, now: float) -> None:
        if now < self._due:
            return
        self._due = now + KEEPALIVE_POLL_INTERVAL_S
        for family in conntrack_keepalive.remove_unneeded():
            log.info("the last connection of kube-proxy has ended family=%s", family)

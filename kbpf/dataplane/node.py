# SPDX-License-Identifier: Apache-2.0
"""What both data planes do with the node itself: they read its addresses, maintain a rule in each
FORWARD chain that accepts masqueraded packets and the rules that keep the last connections of a
kube-proxy, and warn about firewall rules of other programs that may drop packets of Services. kbpf
does not change the rules of others.
"""

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.net import addresses
from kbpf.kernel.netfilter import forward_rules, pre_dnat_rules
from kbpf.kernel.system import sysctl
from kbpf.model.address import NodeAddresses
from kbpf.model.config import IPVS_DEVICE
from kbpf.takeover import conntrack_keepalive

log = logging.getLogger("kbpf.dataplane")

KEEPALIVE_POLL_INTERVAL_S: Final = 30.0
FORWARDING_SYSCTLS: Final = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")


def forwarding_warnings() -> Iterator[str]:
    for name in FORWARDING_SYSCTLS:
        with contextlib.suppress(KernelError):
            if sysctl.read(name) == "0":
                yield f"{name} is 0, so this node forwards nothing to pods; set it to 1"


def read_node_addresses() -> NodeAddresses:
    """The node's own addresses. Dummy devices of IPVS data planes are excluded: they hold Service
    addresses.
    """
    return addresses.local_addresses(IPVS_DEVICE, *conntrack_keepalive.SERVICE_DEVICES)


def reconcile_forward_rules(mark: int, listing: Iterable[forward_rules.Json] | None = None) -> None:
    """Accepts packets with this mark, and the last connections of a kube-proxy, in the FORWARD
    chains that need it. `listing`: see nft.list_chains().
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


# ---- rules of other programs ---------------------------------------------------------------------


def forward_warnings(mark: int, listing: Iterable[forward_rules.Json] | None = None) -> tuple[str, ...]:
    """Warnings about rules that drop masqueraded packets in FORWARD. Rules that cannot be read are
    skipped. `listing`: see nft.list_chains().
    """
    advice = f"let packets with mark {mark:#x} pass there"
    lines = _legacy_table_warnings("FORWARD", advice)
    with contextlib.suppress(KernelError):
        lines += [
            f"FORWARD is closed by {chain}, which is not touched; {advice}"
            for chain in forward_rules.list_other_drop_chains(listing)
        ]
    return tuple(lines)


ALTERNATIVE_HINT: Final = (
    "use --forwarding netfilter, which keeps them in force (Linux 6.1), --nodeport-source-ranges, "
    "loadBalancerSourceRanges or --nodeport-addresses (docs/migration.md, Firewalls in front of "
    "NodePorts)"
)


MAX_NAMES: Final = 8


def join_names(names: Collection[str]) -> str:
    """The first MAX_NAMES names, and how many more there are."""
    shown = ", ".join(islice(names, MAX_NAMES))
    return f"{shown} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else shown


def find_early_chains() -> pre_dnat_rules.EarlyChains:
    """The chains of all firewalls of the node that may drop packets before DNAT, as far as they can
    be read.
    """
    chains, unreadable = pre_dnat_rules.find_legacy_chains()
    with contextlib.suppress(KernelError):
        early = pre_dnat_rules.find_chains()
        chains, unreadable = (*early.chains, *chains), (*early.unreadable, *unreadable)
    return pre_dnat_rules.EarlyChains(chains, unreadable)


def early_drop_warnings(early: pre_dnat_rules.EarlyChains) -> tuple[str, ...]:
    """Warnings about these chains, since the packet path translates packets before they see them.
    One line names such chains, another the tables that could not be read.
    """
    chains, unreadable = early
    lines = []
    if chains:
        lines.append(
            f"packets for NodePorts and VIPs are served before {join_names(chains)} sees them, "
            f"so its rules do not guard these any more; {ALTERNATIVE_HINT}"
        )
    if unreadable:
        lines.append(
            f"{join_names(unreadable)} cannot be read from here; rules of its PREROUTING do not "
            f"guard NodePorts and VIPs any more; run `kbpf check` on the node, and "
            f"{ALTERNATIVE_HINT}"
        )
    return tuple(lines)


def input_warnings(table: str, listing: Iterable[forward_rules.Json]) -> tuple[str, ...]:
    """Warnings about rules in INPUT that drop packets on their way to IPVS, except our own."""
    advice = "let in what is sent to addresses and NodePorts of Services, which IPVS gets by INPUT"
    lines = _legacy_table_warnings("INPUT", advice)
    with contextlib.suppress(KernelError):
        lines += [
            f"INPUT is closed by {chain}; {advice}"
            for chain in forward_rules.list_closed_input_chains(listing, own_table=table)
        ]
    return tuple(lines)


def _legacy_table_warnings(chain: str, advice: str) -> list[str]:
    return [
        f"iptables-legacy has a filter table for {family}, which is not looked at; if its {chain} drops, {advice}"
        for family in forward_rules.list_legacy_families()
    ]

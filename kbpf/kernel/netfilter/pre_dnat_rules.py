# SPDX-License-Identifier: Apache-2.0
"""Finds base chains that may refuse packets before DNAT. Hosts protect NodePorts and VIPs with
them, but the packet path translates packets before they apply.

Checked are base chains at prerouting with a priority before dstnat and at netdev ingress. A chain
counts if its policy is drop, or if it or a chain that it jumps to has a rule that refuses packets
or looks up a verdict; which packets, it does not ask. Reverse path filters do not count: firewalls
and CNIs have them for packets with forged sources. Of iptables-legacy, the tables raw and mangle
are checked.
"""

from typing import Any, Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.netfilter import forward_rules, iptables_legacy, nft

NF_IP_PRI_NAT_DST: Final = -100
MAX_RULES: Final = 50_000
"""Of a table. Larger ones are not read."""
OF_EXTENSIONS: Final = frozenset(("ct extension", "match connbytes", "match connlabel"))
"""Parts of rules that read bytes, packets or labels of a connection. The kernel keeps these in
extensions of the connection's entry; an entry that a program creates has none (bpf_skb_ct_alloc()).
"""
REVERSE_PATH_FILTERS: Final = frozenset(("fib saddr", "match rpfilter"))


class EarlyChains(NamedTuple):
    """`chains`: base chains that may refuse packets to NodePorts or VIPs, as "family table chain".
    `unreadable`: chains or tables whose rules were not read, for which this is unknown.
    """

    chains: tuple[str, ...]
    unreadable: tuple[str, ...]


def find_chains() -> EarlyChains:
    """Finds the base chains of nf_tables. Raises KernelError if nf_tables cannot be read."""
    names, unreadable = [], []
    for chain in filter(_is_early, nft.list_chains()):
        family, table = chain["family"], chain["table"]
        name = " ".join((family, table, chain["name"]))
        if chain["policy"] == "drop":
            names.append(name)
        elif nft.count_rules(family, table, MAX_RULES + 1) > MAX_RULES:
            unreadable.append(f"{name} (more than {MAX_RULES:,} rules)")
        elif _may_refuse(family, table, chain["name"]):
            names.append(name)
    return EarlyChains(tuple(sorted(names)), tuple(sorted(unreadable)))


def find_chains_without_effect() -> tuple[str, ...]:
    """The chains with rules that never match a connection that conntrack translates for the packet
    path. Raises KernelError like find_chains().
    """
    tables = sorted({(chain["family"], chain["table"]) for chain in nft.list_chains()})
    found = {
        f"{family} {table} {rule.chain}"
        for family, table in tables
        if family in nft.NFPROTO
        for rule in nft.list_rules(family, table)
        if any(part.name in OF_EXTENSIONS for part in rule.expressions)
    }
    return tuple(sorted(found))


def _is_early(chain: dict[str, Any]) -> bool:
    if chain["table"] in forward_rules.SERVICE_PROXY_TABLES or chain["family"] not in nft.NFPROTO:
        return False
    hook, priority = chain.get("hook"), chain.get("prio", 0)
    is_before_dnat = hook == "ingress" or (hook == "prerouting" and priority < NF_IP_PRI_NAT_DST)
    return is_before_dnat and chain.get("type") == "filter"


def _may_refuse(family: str, table: str, base_chain: str) -> bool:
    """Whether the base chain, or one that it leads to, has a rule that counts."""
    refusing: set[str] = set()
    targets: dict[str, set[str]] = {}
    for rule in nft.list_rules(family, table):
        names = {expression.name for expression in rule.expressions}
        if names & REVERSE_PATH_FILTERS:
            continue
        if "lookup verdict" in names or any(part.refuses for part in rule.expressions):
            refusing.add(rule.chain)
        jumps = {part.jumps_to for part in rule.expressions if part.jumps_to}
        targets.setdefault(rule.chain, set()).update(jumps)
    reached, queue = {base_chain}, [base_chain]
    while queue:
        new = targets.get(queue.pop(), set()) - reached
        reached |= new
        queue += new
    return not reached.isdisjoint(refusing)


def find_legacy_chains() -> EarlyChains:
    """find_chains() for iptables-legacy, whose tables can be read only by its own programs. Our
    image does not have these.
    """
    names, unreadable = [], []
    for family in iptables_legacy.FAMILIES:
        for table in ("mangle", "raw"):
            if table not in iptables_legacy.list_tables(family):
                continue
            name = f"{family} {table} (iptables-legacy)"
            try:
                lines = iptables_legacy.save(family, table).split("\n")
            except KernelError:
                unreadable.append(name)
                continue
            if any(map(_may_refuse_in_prerouting, lines)):
                names.append(f"{name} PREROUTING")
    return EarlyChains(tuple(names), tuple(unreadable))


OTHER_CHAINS: Final = ("-A INPUT ", "-A FORWARD ", "-A OUTPUT ", "-A POSTROUTING ")


def _may_refuse_in_prerouting(line: str) -> bool:
    """`line`: of iptables-save. Every chain that is not one of the kernel's counts, whatever leads
    to it.
    """
    line = iptables_legacy.COMMENT.sub("", line)
    if line.startswith(":PREROUTING DROP"):
        return True
    if not line.startswith("-A ") or line.startswith(OTHER_CHAINS) or "-m rpfilter" in line:
        return False
    return " -j DROP " in f"{line} " or " -j REJECT " in f"{line} "

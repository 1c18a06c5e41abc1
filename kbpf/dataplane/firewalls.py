"""Rules of others by which packets of Services may be lost, and which kbpf does not touch: in lines
for the operator.
"""

import contextlib
from collections.abc import Iterable
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.netfilter import forward_rules, pre_dnat_rules


def forward(mark: int, listed: Iterable[forward_rules.Json] | None = None) -> tuple[str, ...]:
    """About masqueraded packets on their way through FORWARD. Nothing of what cannot be read.
    `listed`: see netfilter.list_chains().
    """
    let_pass = f"let packets with mark {mark:#x} pass there"
    lines = _unseen("FORWARD", let_pass)
    with contextlib.suppress(KernelError):
        lines += [
            f"FORWARD is closed by {chain}, which is not touched; {let_pass}"
            for chain in forward_rules.other_drops(listed)
        ]
    return tuple(lines)


INSTEAD: Final = (
    "use --nodeport-source-ranges, loadBalancerSourceRanges or --nodeport-addresses instead "
    "(docs/migration.md, Firewalls in front of NodePorts)"
)


def early(listed: Iterable[forward_rules.Json] | None = None) -> tuple[str, ...]:
    """About chains that refuse packets before DNAT, which the packet path serves earlier: one line
    for all, and one about tables that only iptables-legacy can read.
    """
    found: tuple[str, ...] = ()
    with contextlib.suppress(KernelError):
        found = pre_dnat_rules.chains(listed)
    old = pre_dnat_rules.legacy_chains()
    lines = []
    if found := (*found, *old.chains):
        lines.append(
            f"packets for NodePorts and VIPs are served before {', '.join(found)} sees them, "
            f"so its rules do not guard these any more; {INSTEAD}"
        )
    if old.unread:
        lines.append(
            f"{', '.join(old.unread)} cannot be read from here; rules of its PREROUTING do not "
            f"guard NodePorts and VIPs any more; {INSTEAD}"
        )
    return tuple(lines)


def inputs(table: str, listed: Iterable[forward_rules.Json] | None = None) -> tuple[str, ...]:
    """About packets on their way to IPVS, but for rules of our own table. As above."""
    let_in = "let in what is sent to addresses and NodePorts of Services, which IPVS gets by INPUT"
    lines = _unseen("INPUT", let_in)
    with contextlib.suppress(KernelError):
        lines += [
            f"INPUT is closed by {chain}; {let_in}"
            for chain in forward_rules.closed_inputs(listed, but=table)
        ]
    return tuple(lines)


def _unseen(chain: str, advice: str) -> list[str]:
    return [
        f"iptables-legacy has a filter table for {family}, which is not looked at; "
        f"if its {chain} drops, {advice}"
        for family in forward_rules.legacy_tables()
    ]

# SPDX-License-Identifier: Apache-2.0
"""felix's rules in both of its data planes, as input of `nft -f` and of iptables-restore. `felix/`
has those that do not depend on the pods.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

TEMPLATES = Path(__file__).with_name("felix")
DISCOVERY = (130, 131, 132, 133, 135, 136)
"""Types of ICMPv6 that pods may always send to the node."""
ACCEPTED = "meta mark & 0x00010000 == 0x00010000"


@dataclass(frozen=True, slots=True)
class Network:
    """What the rules of one family say about the node's network. `overlay` is the device, and
    `tunnel` the protocol that it sends: "udp" (VXLAN), "ipip", or "" for none.
    """

    v6: bool
    pools: str
    own: Sequence[str]
    peers: Sequence[str]
    overlay: str
    tunnel: str

    @property
    def family(self) -> str:
        return "ip6" if self.v6 else "ip"

    @property
    def set_prefix(self) -> str:
        return "cali60" if self.v6 else "cali40"


@dataclass(frozen=True, slots=True)
class Workload:
    """A pod's device, and the peers that its NetworkPolicies admit; None: no policy applies."""

    device: str
    ingress: Sequence[str] | None = None
    egress: Sequence[str] | None = None


def _of_family(peers: Iterable[str], v6: bool) -> list[str]:
    return [peer for peer in peers if (":" in peer) == v6]


def nftables(network: Network) -> str:
    """The table without pods."""
    family = network.family
    packets = "udp dport 4789" if network.tunnel == "udp" else "meta l4proto 4"
    local = "fib {0}addr type local"
    overlay_in = (
        f"{packets} {family} saddr @all-hosts {local.format('d')} accept\n"
        f"{packets}{' ' + local.format('d') if network.tunnel == 'udp' else ''} drop"
    )
    masquerade = f'oifname "{network.overlay}" fib saddr . oif type != local fib saddr type local'
    udp_ports = f"meta l4proto udp {masquerade} masquerade to :4790-65535 fully-random\n"
    has_udp = network.tunnel == "udp"
    discovery = "".join(f"icmpv6 type {kind} accept\n" for kind in DISCOVERY)
    return Template((TEMPLATES / "nftables.txt").read_text()).substitute(
        family=family,
        type="ipv6_addr" if network.v6 else "ipv4_addr",
        pools=network.pools,
        own=", ".join(network.own),
        peers=", ".join(network.peers),
        untracked="udp dport 4789 notrack" if has_udp else "",
        to_overlay=(f"{udp_ports if has_udp else ''}{masquerade} masquerade fully-random" if network.tunnel else ""),
        overlay_in=overlay_in if network.tunnel else "",
        overlay_out=(f"{packets} {local.format('s')} {family} daddr @all-hosts accept" if network.tunnel else ""),
        neighbour_discovery=discovery if network.v6 else "",
    )


def nftables_of(workload: Workload, v6: bool) -> str:
    """Adds a pod, or replaces its chains."""
    table, device = "ip6 calico" if v6 else "ip calico", workload.device
    lines = []
    for direction, letter, side, peers in (
        ("to", "i", "saddr", workload.ingress),
        ("from", "o", "daddr", workload.egress),
    ):
        chain, policy = f"filter-cali-{direction[0]}w-{device}", f"filter-cali-p{letter}-{device}"
        lines += [f"add chain {table} {name}" for name in (chain, policy)]
        lines += [f"flush chain {table} {name}" for name in (chain, policy)]
        rules = ["ct state established,related accept", "ct state invalid drop", "meta mark set meta mark & 0xfffcffff"]
        if direction == "from":
            rules += ["udp dport 4789 drop", "meta l4proto ipencap drop"]
        if peers is not None:
            rules += [
                "meta mark set meta mark & 0xfffdffff",
                f"meta mark & 0x00020000 == 0x00000000 jump {policy}",
                f"{ACCEPTED} return",
                "meta mark & 0x00020000 == 0x00000000 drop",
            ]
            for peer in _of_family(peers, v6):
                match = f"{table.partition(' ')[0]} {side} {peer}"
                lines += [
                    f"add rule {table} {policy} {match} meta mark set meta mark | 0x00010000",
                    f"add rule {table} {policy} {ACCEPTED} return",
                ]
        rules += [f"jump filter-cali-pr{letter}-kns.default", f"{ACCEPTED} return", "drop"]
        lines += [f"add rule {table} {chain} {rule}" for rule in rules]
        dispatch = f"filter-cali-{direction}-wl-dispatch"
        lines.append(f'add element {table} {dispatch} {{ "{device}" : goto {chain} }}')
    return "\n".join(lines) + "\n"


def ipsets(network: Network) -> str:
    """The sets of the rules, for `ipset restore`."""
    sets = {
        "network-ip-pools": ("hash:net", [network.pools]),
        "masq-ipam-pools": ("hash:net", [network.pools]),
        "all-hosts": ("hash:net", network.peers),
        "dscp-src-net": ("hash:net", []),
        "this-host": ("hash:ip", network.own),
    }
    lines = []
    for name, (kind, entries) in sets.items():
        full = f"{network.set_prefix}{name}"
        lines.append(f"create {full} {kind} family {'inet6' if network.v6 else 'inet'}")
        lines += [f"add {full} {entry}" for entry in entries]
    return "\n".join(lines) + "\n"


def iptables(network: Network) -> str:
    """The rules without pods, for `iptables-restore --noflush`."""
    has_udp = network.tunnel == "udp"
    packets = "-p udp -m udp --dport 4789" if has_udp else "-p 4"
    local = "-m addrtype --{0}-type LOCAL"
    hosts = f"-m set --match-set {network.set_prefix}all-hosts"
    dropped = f"{packets} {local.format('dst')}" if has_udp else packets
    masquerade = (
        f"-o {network.overlay} -m addrtype ! --src-type LOCAL --limit-iface-out {local.format('src')} -j MASQUERADE"
    )
    udp_ports = f"-A cali-POSTROUTING -p udp {masquerade} --to-ports 4790-65535 --random-fully\n"
    discovery = "\n".join(
        f"-A cali-wl-to-host -p ipv6-icmp -m icmp6 --icmpv6-type {kind} -j ACCEPT" for kind in DISCOVERY
    )
    values = {
        "untracked_in": "-A cali-PREROUTING -p udp -m udp --dport 4789 -j NOTRACK",
        "untracked_out": "-A cali-OUTPUT -p udp -m udp --dport 4789 -j NOTRACK",
        "to_overlay": f"{udp_ports if has_udp else ''}-A cali-POSTROUTING {masquerade} --random-fully",
        "overlay_in": f"-A cali-INPUT {packets} {hosts} src {local.format('dst')} -j ACCEPT\n"
        f"-A cali-INPUT {dropped} -j DROP",
        "overlay_out": f"-A cali-OUTPUT {packets} {hosts} dst {local.format('src')} -j ACCEPT",
    }
    if not has_udp:
        values |= {"untracked_in": "", "untracked_out": ""}
    if not network.tunnel:
        values = dict.fromkeys(values, "")
    return Template((TEMPLATES / "iptables.txt").read_text()).substitute(
        values, n="6" if network.v6 else "4", neighbour_discovery=discovery if network.v6 else ""
    )


def iptables_of(workload: Workload, v6: bool, *, is_new: bool) -> str:
    """Adds a pod, or replaces its chains. (iptables-restore empties a chain that it declares.)"""
    device = workload.device
    declared, lines = [], []
    for direction, letter, side, peers in (("to", "i", "-s", workload.ingress), ("from", "o", "-d", workload.egress)):
        chain, policy = f"cali-{direction[0]}w-{device}", f"cali-p{letter}-{device}"
        declared += [f":{name} - [0:0]" for name in (chain, policy)]
        rules = [
            "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
            "-m conntrack --ctstate INVALID -j DROP",
            "-j MARK --set-xmark 0x0/0x30000",
        ]
        if direction == "from":
            rules += ["-p udp -m udp --dport 4789 -j DROP", "-p 4 -j DROP"]
        if peers is not None:
            rules += [
                "-j MARK --set-xmark 0x0/0x20000",
                f"-m mark --mark 0x0/0x20000 -j {policy}",
                "-m mark --mark 0x10000/0x10000 -j RETURN",
                "-m mark --mark 0x0/0x20000 -j DROP",
            ]
            for peer in _of_family(peers, v6):
                lines += [
                    f"-A {policy} {side} {peer} -j MARK --set-xmark 0x10000/0x10000",
                    f"-A {policy} -m mark --mark 0x10000/0x10000 -j RETURN",
                ]
        rules += [f"-j cali-pr{letter}-kns.default", "-m mark --mark 0x10000/0x10000 -j RETURN", "-j DROP"]
        lines += [f"-A {chain} {rule}" for rule in rules]
        if is_new:
            option = "-o" if direction == "to" else "-i"
            lines.append(f"-I cali-{direction}-wl-dispatch {option} {device} -g {chain}")
    return "\n".join(["*filter", *declared, *lines, "COMMIT", ""])

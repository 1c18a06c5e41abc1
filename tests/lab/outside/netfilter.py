# SPDX-License-Identifier: Apache-2.0
"""Rules of CNIs and of kube-proxy, and helpers that read and write rules on a node."""

import contextlib
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket

from kbpf.dataplane.bpf.maps.layout import DEVICE, DeviceFlag
from tests.support.cluster.cluster import Object
from tests.support.lab.dial import Dial
from tests.support.lab.field import NODES4, NODES6, OUT4, OUT6, Field, at
from tests.support.lab.lab import Node, Place, ip, on, set_rp_filter, until

POLICY = ("iptables", "ip6tables")
OURS = "kbpf: masqueraded, mark 0x4000"


def objects(field: Field) -> list[Object]:
    """A local backend (11), remote (12), local with policy Local (14), another local pod (15); UDP
    at number + 10.
    """
    return field.all_of("""
        11 21:UDP -> a1
        12 22:UDP -> b1
        14 24:UDP -> a1 b1 external=Local
        15 25:UDP -> a3
    """)


def nft(node: Node | Place, commands: str) -> None:
    on(node, "nft", "-f", "-", stdin=commands)


@contextlib.contextmanager
def nft_table(node: Node | Place, name: str, chains: str) -> Iterator[None]:
    """The node or pod has a table with these chains, such as "inet guard"."""
    nft(node, f"table {name} {{\n{chains}\n}}\n")
    try:
        yield
    finally:
        on(node, "nft", "delete", "table", *name.split())


def flush_conntrack() -> None:
    with NFCTSocket() as conntrack:
        conntrack.flush()


def tables(node: Node, tool: str, lines: str) -> None:
    """Runs iptables commands, each line without the tool's name."""
    for line in lines.strip().splitlines():
        on(node, f"{tool}-nft", "-w", *re.findall(r'[^\s"]+|"[^"]*"', line))


def forward(node: Node, tool: str) -> list[str]:
    """The rules in FORWARD, as `iptables -S` prints them."""
    listed = on(node, f"{tool}-nft", "-S", "FORWARD").splitlines()
    return [line for line in listed if line.startswith("-A")]


def ours(node: Node, tool: str) -> list[int]:
    """The positions of our rules in FORWARD."""
    return [i for i, rule in enumerate(forward(node, tool)) if OURS in rule]


def guarded(node: Node) -> None:
    """Waits until our rule is in both tables once, after all other rules."""
    for tool in POLICY:
        until(
            f"our rule is the last one of {tool}", lambda tool=tool: ours(node, tool) == [len(forward(node, tool)) - 1]
        )


# ---- rows ----------------------------------------------------------------------------------------


def masqueraded(protocol: str, v6: bool) -> Iterator[Dial]:
    """Every path on which the backend sees node-1."""
    own, base = (NODES6 if v6 else NODES4)[0], 10 if protocol == "tcp" else 20
    for kind, (number, who) in product(("NodePort", "ExternalIP", "VIP"), ((1, "a1"), (2, "b1"))):
        yield Dial(f"{kind} to {who}", "outside", at(kind, base + number, v6), who, protocol, own)
    yield Dial("a pod to itself", "a1!", at("ClusterIP", base + 1, v6), "a1", protocol, own)


def plain(protocol: str, v6: bool) -> Iterator[Dial]:
    """Every path on which the backend sees the client."""
    client, pod = (OUT6, "fd00:10:244:1::3") if v6 else (OUT4, "10.244.1.3")
    base = 10 if protocol == "tcp" else 20
    yield Dial("policy Local", "outside", at("NodePort", base + 4, v6), "a1", protocol, client)
    for number, who in ((1, "a1"), (2, "b1")):
        yield Dial(f"unhooked pod to {who}", "a2!", at("ClusterIP", base + number, v6), who, protocol, pod)


# ---- rules of CNIs and of kube-proxy -------------------------------------------------------------


def strict(field: Field, node: Node) -> None:
    """rp_filter=1: a device accepts only packets whose replies would leave by it. The agent reads
    these settings at any change of a device, and now and then.
    """
    set_rp_filter(node.netns, 1)
    agent = field.agents[field.lab.nodes.index(node)]
    ip("link set lo alias strict", netns=node.netns)

    def is_known() -> bool:
        found = [DEVICE.unpack(raw) for raw in agent.entries("devices").values()]
        return all(DeviceFlag.STRICT in DeviceFlag(values[2]) for values in found)

    until(f"the agent knows rp_filter of {node.name}", is_known)


def invalid(field: Field, node: Node) -> None:
    """Drops packets that conntrack calls invalid, in every chain. ICMPv6 redirects, which a node
    sends when a packet leaves by the device it came in by, are not dropped: they occur without kbpf
    too.
    """
    nft(
        node,
        """
        table inet strict {
            chain judge {
                icmpv6 type nd-redirect return
                ct state invalid counter drop comment "invalid"
            }
            chain forward { type filter hook forward priority -10; counter; jump judge; }
            chain input { type filter hook input priority -10; jump judge; }
            chain output { type filter hook output priority -10; jump judge; }
        }""",
    )


def masquerade(field: Field, node: Node) -> None:
    """As the bridge plugin's ipMasq: pods are masqueraded, even to other nodes' pods."""
    invalid(field, node)
    nft(
        node,
        f"""
        table inet cni {{ chain postrouting {{ type nat hook postrouting priority srcnat;
            ip saddr 10.244.{node.number}.0/24 oifname != "p*" counter masquerade
            ip6 saddr fd00:10:244:{node.number}::/64 oifname != "p*" counter masquerade
        }}; }}""",
    )


def flannel(field: Field, node: Node) -> None:
    """FLANNEL-POSTRTG, FLANNEL-FWD, and Docker's FORWARD policy of DROP."""
    invalid(field, node)
    for tool, cluster, own, multicast in (
        ("iptables", "10.244.0.0/16", f"10.244.{node.number}.0/24", "224.0.0.0/4"),
        ("ip6tables", "fd00:10:244::/48", f"fd00:10:244:{node.number}::/64", "ff00::/8"),
    ):
        out = "MASQUERADE --random-fully"
        tables(
            node,
            tool,
            f"""
            -t nat -N FLANNEL-POSTRTG
            -t nat -A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN
            -t nat -A FLANNEL-POSTRTG -s {own} -d {cluster} -j RETURN
            -t nat -A FLANNEL-POSTRTG -s {cluster} -d {own} -j RETURN
            -t nat -A FLANNEL-POSTRTG ! -s {cluster} -d {own} -j RETURN
            -t nat -A FLANNEL-POSTRTG -s {cluster} ! -d {multicast} -j {out}
            -t nat -A FLANNEL-POSTRTG ! -s {cluster} -d {cluster} -j {out}
            -t nat -A POSTROUTING -j FLANNEL-POSTRTG
            -N FLANNEL-FWD
            -A FLANNEL-FWD -s {cluster} -j ACCEPT
            -A FLANNEL-FWD -d {cluster} -j ACCEPT
            -A FORWARD -j FLANNEL-FWD
            -P FORWARD DROP
            """,
        )


def calico(field: Field, node: Node) -> None:
    """Workload chains that drop what no policy allows and what conntrack does not know, a reverse
    path filter in raw, and outgoing NAT. Each pod's policy admits the client, the nodes and the
    pods by their addresses before masquerading.
    """
    strict(field, node)
    invalid(field, node)
    for tool, pool, nodes in (
        ("iptables", "10.244.0.0/16", "198.18.0.0/24"),
        ("ip6tables", "fd00:10:244::/48", "fd00:198:18::/64"),
    ):
        known = "-m conntrack --ctstate"
        tables(
            node,
            tool,
            f"""
            -t raw -N cali-PREROUTING
            -t raw -I PREROUTING -j cali-PREROUTING
            -t raw -A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
            -t raw -A cali-PREROUTING -i p+ -j MARK --set-xmark 0x40000/0x40000
            -t raw -A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP
            -N cali-tw
            -A cali-tw {known} RELATED,ESTABLISHED -j ACCEPT
            -A cali-tw {known} INVALID -j DROP
            -A cali-tw -s {nodes} -j MARK --set-xmark 0x10000/0x10000
            -A cali-tw -s {pool} -j MARK --set-xmark 0x10000/0x10000
            -A cali-tw -m mark --mark 0x10000/0x10000 -j RETURN
            -A cali-tw -j DROP
            -N cali-FORWARD
            -I FORWARD -j cali-FORWARD
            -A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
            -A cali-FORWARD -o p+ -j cali-tw
            -A cali-FORWARD -i p+ {known} INVALID -j DROP
            -A cali-FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT
            -A cali-FORWARD -i p+ {known} RELATED,ESTABLISHED -j ACCEPT
            -A cali-FORWARD -i p+ -j ACCEPT
            -t nat -N cali-POSTROUTING
            -t nat -I POSTROUTING -j cali-POSTROUTING
            -t nat -A cali-POSTROUTING -s {pool} ! -d {pool} -j MASQUERADE --random-fully
            -P FORWARD DROP
            """,
        )


def kube_proxy(field: Field, node: Node) -> None:
    """Rules left by its iptables mode: POSTROUTING masquerades marked packets a second time."""
    invalid(field, node)
    for tool in POLICY:
        tables(
            node,
            tool,
            """
            -N KUBE-FORWARD
            -I FORWARD -j KUBE-FORWARD
            -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
            -A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
            -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
            -t nat -N KUBE-POSTROUTING
            -t nat -I POSTROUTING -j KUBE-POSTROUTING
            -t nat -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
            -t nat -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
            -t nat -A KUBE-POSTROUTING -j MASQUERADE --random-fully
            """,
        )


FIREWALLD = (Path(__file__).parents[2] / "golden/firewalls/firewalld-1.3.3.nft").read_text()
"""What firewalld 1.3.3 has written for node-1: its FORWARD chain accepts what conntrack has translated, and rejects
what no policy allows.
"""


def firewalld(field: Field, node: Node) -> None:
    if node.number == 1:
        nft(node, FIREWALLD)


RULES = {
    "strict rp_filter": strict,
    "no invalid ones": invalid,
    "a CNI's masquerade": masquerade,
    "flannel": flannel,
    "Calico": calico,
    "kube-proxy's leftovers": kube_proxy,
    "firewalld": firewalld,
}


def dropped(node: Node) -> int:
    """How many packets were dropped as invalid."""
    listed = on(node, "nft", "list", "ruleset")
    return sum(map(int, re.findall(r'invalid counter packets (\d+).*"invalid"', listed)))

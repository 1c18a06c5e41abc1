# SPDX-License-Identifier: Apache-2.0
"""Rules about the addresses of pods, as the AWS VPC CNI has them on a node with two interfaces.

An imitation of amazon-vpc-cni-k8s v1.23.2: the rules, routes and connmarks of
pkg/networkutils/network.go (SetupHostNetwork, buildIptablesSNATRules, setupENINetwork),
cmd/routed-eni-cni-plugin/driver/driver.go (setupIPBasedContainerRouteRules) and
cmd/aws-vpc-cni-init/main.go (rp_filter), with AWS_VPC_K8S_CNI_VETHPREFIX=p. a2 is a pod of the
second interface, eth1, and a1 of the first. The router behind eth1 drops what has not a2's address,
as EC2's source check does. FORWARD drops INVALID packets, as kube-proxy and Calico do.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.kernel.system import netns, sysctl
from tests.lab.outside.netfilter import POLICY, tables
from tests.lab.outside.pod_network import host_of
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.field import (
    BULK,
    FORWARDINGS,
    NODES4,
    OUT4,
    OUT6,
    Field,
    at,
    both_families,
    check,
    crossed,
    forward,
    split,
    transfer,
)
from tests.support.lab.lab import Node, ip, let_forward, run
from tests.support.packets.wire import Wire

VPC = "10.244.0.0/16"
RULES = """
-t mangle -A PREROUTING -m comment --comment "AWS, primary ENI" -i eth0 -m addrtype --dst-type LOCAL \
--limit-iface-in -j CONNMARK --set-mark 0x80/0x80
-t mangle -A PREROUTING -m comment --comment "AWS, primary ENI" -i p+ -j CONNMARK --restore-mark --mask 0x80
-t mangle -A PREROUTING -m comment --comment "AWS, primary ENI" -i vlan+ -j CONNMARK --restore-mark --mask 0x80
-A FORWARD -m conntrack --ctstate INVALID -j DROP
"""
SNAT = f"""
-t nat -N AWS-SNAT-CHAIN-0
-t nat -A POSTROUTING -m comment --comment "AWS SNAT CHAIN" -j AWS-SNAT-CHAIN-0
-t nat -A AWS-SNAT-CHAIN-0 -d {VPC} -j RETURN
-t nat -A AWS-SNAT-CHAIN-0 ! -o vlan+ -m addrtype ! --dst-type LOCAL -j SNAT --to-source {NODES4[0]} --random-fully
-t nat -N AWS-CONNMARK-CHAIN-0
-t nat -A PREROUTING -i p+ -j AWS-CONNMARK-CHAIN-0
-t nat -A AWS-CONNMARK-CHAIN-0 -d {VPC} -j RETURN
-t nat -A AWS-CONNMARK-CHAIN-0 -j CONNMARK --set-xmark 0x80/0x80
-t nat -A PREROUTING -j CONNMARK --restore-mark --mask 0x80
"""
"""For connections that pods begin; only for IPv4."""
PODS = {"a1": ("10.244.1.2", "fd00:10:244:1::2"), "a2": ("10.244.1.3", "fd00:10:244:1::3")}


class TwoInterfaces(Field):
    """node-1 has a second interface, eth1, behind which is a router of its own."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments, name="aw", pods=(2, 1), agents=1)

    def prepare(self) -> None:
        node, router = self.lab.nodes[0], f"{self.lab.prefix}gw"
        self.lab.add_netns(router)
        let_forward(router)
        ip(
            f"""
            link add eth1 type veth peer name eni netns {router}
            addr add 10.9.2.9/24 dev eth1
            addr add fd00:9:2::9/64 dev eth1 nodad
            link set eth1 up
            """,
            netns=node.netns,
        )
        ip(f"link add gw type veth peer name gw netns {self.lab.fabric}", netns=router)
        ip("link set gw master br0", "link set gw up", netns=self.lab.fabric)
        ip(
            """
            link set lo up
            addr add 10.9.2.1/24 dev eni
            addr add fd00:9:2::1/64 dev eni nodad
            addr add 198.18.0.253/24 dev gw
            addr add fd00:198:18::fd/64 dev gw nodad
            link set eni up
            link set gw up
            """,
            netns=router,
        )
        for family, pod in zip("46", PODS["a2"], strict=True):
            for rule in (f"from {pod} lookup main pref 10", "blackhole pref 20"):
                run("ip", "-n", router, f"-{family}", "rule", "add", "iif", "eni", *rule.split())
        self._route(node)
        for tool in POLICY:
            tables(node, tool, RULES)
        tables(node, "iptables", SNAT)
        where = Path("/run/netns") / node.netns
        netns.run_in(where, lambda: sysctl.write("net.ipv4.conf.eth0.rp_filter", "2"))

    @staticmethod
    def _route(node: Node) -> None:
        for family, v6, own, gateway in (("4", 0, "10.9.2.9", "10.9.2.1"), ("6", 1, "fd00:9:2::9", "fd00:9:2::1")):
            (first, second) = (PODS[name][v6] for name in ("a1", "a2"))
            for rule in (
                f"to {first} lookup main pref 512",
                f"to {second} lookup main pref 512",
                "fwmark 0x80/0x80 lookup main pref 1024",
                f"from {second} lookup 2 pref 1536",
                f"from {own} lookup 2 pref 32765",
            ):
                run("ip", "-n", node.netns, f"-{family}", "rule", "add", *rule.split())
            for route in (f"{gateway} dev eth1", f"default via {gateway} dev eth1"):
                words = (*route.split(), "table", "2")
                run("ip", "-n", node.netns, f"-{family}", "route", "add", *words)


@pytest.fixture(scope="module", params=FORWARDINGS)
def field(request) -> Iterator[TwoInterfaces]:
    with TwoInterfaces(*forward(request.param)) as made:
        for number, who, policy in SERVICES:
            made.create(*made.all_of(f"{number} {number + 20}:UDP -> {who} external={policy}"))
        made["a2"].ask("serve_bulk", ports=[BULK])
        made.create(*made.all_of(f"61 -> a2 target={BULK}\n62:UDP -> a2 target=9"))
        made.settle()
        yield made


SERVICES = ((11, "a1", "Cluster"), (12, "a2", "Cluster"), (13, "a1", "Local"), (14, "a2", "Local"))


@crossed
@pytest.mark.parametrize(("number", "who", "policy"), SERVICES)
def test_a_pod_of_either_interface_is_served(
    field: TwoInterfaces, number: int, who: str, policy: str, protocol: str, v6: bool
):
    to = at("NodePort", number + (20 if protocol == "udp" else 0), v6)
    client, own = (OUT6, field.lab.nodes[0].ip6) if v6 else (OUT4, NODES4[0])
    sees = own if policy == "Cluster" else client
    with Wire(field.lab.nodes[0].netns, "eth1", tap=True) as second:
        check(field, Dial("two interfaces", "outside", to, who, protocol, sees))
        second.none(0, lambda p: host_of(p.source) == split(to)[0])


@crossed
def test_a_pod_of_the_node_is_served_if_the_rules_are_not_only_for_other_machines(
    field: TwoInterfaces, protocol: str, v6: bool
):
    """A CNI without the rules `to POD lookup main`: replies to a pod, too, are routed to eth1."""
    rule = ("ip", "-n", field.lab.nodes[0].netns, "-6" if v6 else "-4", "rule")
    words = ("to", PODS["a1"][v6], "lookup", "main", "pref", "512")
    to = at("VIP", 14 + (20 if protocol == "udp" else 0), v6)
    run(*rule, "del", *words)
    try:
        check(field, Dial("two interfaces", "a1!", to, "a2", protocol, PODS["a1"][v6]))
    finally:
        run(*rule, "add", *words)


@crossed
def test_rules_that_change_while_a_connection_lasts(field: TwoInterfaces, protocol: str, v6: bool):
    """The CNI moves the pod's address to the other interface, and back."""
    rule = ("ip", "-n", field.lab.nodes[0].netns, "-6" if v6 else "-4", "rule")
    words = ("from", PODS["a2"][v6], "lookup", "2", "pref", "1536")
    to = split(at("NodePort", 12 + (20 if protocol == "udp" else 0), v6))
    client = field["outside"]
    with Wire(field.lab.nodes[0].netns, "eth1", tap=True) as second:
        dial = client.tcp if protocol == "tcp" else client.udp
        arguments = {} if protocol == "tcp" else {"connected": True}
        assert dial(*to, keep="kept", **arguments).get("name") == "a2"
        for verb in ("del", "add", "del", "add"):
            run(*rule, verb, *words)
            for _ in range(3):
                assert client.ask("talk", keep="kept").get("name") == "a2", verb
        second.none(0, lambda p: host_of(p.source) == to[0])
    client.ask("drop", keep="kept")


@both_families
def test_transfers_and_errors_of_a_pod_of_the_second_interface_arrive(field: TwoInterfaces, v6: bool):
    """No process listens on the pod's UDP port: its ICMP error names the Service's address."""
    transfer(field["outside"], at("NodePort", 61, v6))
    check(field, Dial("closed port", "outside", at("NodePort", 62, v6), REFUSED, "udp"))


def test_connections_of_the_pod_still_leave_by_the_second_interface(field: TwoInterfaces):
    with Wire(field.lab.nodes[0].netns, "eth1", tap=True) as second:
        field["a2"].tcp("10.244.9.9", 80, timeout=0.2)
        second.expect(lambda p: p.destination == "10.244.9.9:80")

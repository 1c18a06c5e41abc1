# SPDX-License-Identifier: Apache-2.0
"""The CNIs: for each, its configuration of the plugins and its daemon on every node.

    bridge       the standard plugin, with portmap, bandwidth and firewall; static routes between
                 the nodes
    ptp          the standard plugin, with portmap; static routes between the nodes
    kindnet      kind's: the plugins ptp and portmap. kindnetd cannot be had as a Go module, so its
                 routes and its masquerade chain are imitated (kind v0.33.0, images/kindnetd:
                 cni.go, routes.go, masq.go)
    flannel      flanneld with the Kubernetes subnet manager, and its plugin; back ends `vxlan`,
                 `host-gw`, and `ipip`, which carries IPv4 only: IPv6 has static routes there
    kube-router  as router (BGP between the nodes) and as firewall, not as service proxy

In all of them a node's pods are in 10.244.n.0/24 and fd00:10:244:n::/64, from .2 upward.
"""

import json
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from tests.support.cni.plugins import Conf, Sandbox, read
from tests.support.lab.lab import Node as LabNode
from tests.support.lab.lab import inside, ip, run
from tests.support.lab.podnet import Lines, Pod, Routed, gate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PODS4, PODS6 = "10.244.0.0/16", "fd00:10:244::/48"


class Node(Protocol):
    """A node of the lab or of tests/conformance. `netns` is below /run/netns."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def netns(self) -> str: ...
    @property
    def ip(self) -> str: ...
    @property
    def ip6(self) -> str: ...
    @property
    def folder(self) -> "Path":
        """For files, whose names have the node's, since nodes may share it."""


def pod_cidrs(node: Node) -> tuple[str, str]:
    return f"10.244.{node.number}.0/24", f"fd00:10:244:{node.number}::/64"


class Cni(Routed):
    """Base: pods get their devices, addresses and routes from plugins, the nodes theirs from a
    daemon.
    """

    name = ""
    programs: tuple[str, ...] = ()
    """The plugins."""
    daemon = ""
    """The program that runs on each node; "" if there is none."""
    is_bridged = True
    """Whether a node's pods are on one bridge; else each has a link of its own."""
    masquerades = True
    """Whether it masquerades what pods send to the world outside."""
    modules: tuple[str, ...] = ()
    """The kernel's modules of its tunnels."""

    def conf(self, node: Node) -> Conf:
        """The plugins' configuration on this node, once the daemon has prepared it."""
        raise NotImplementedError

    def prepare(self, node: Node, others: "Sequence[Node]") -> None:
        """What is done on the node before the daemon starts."""

    def command(self, node: Node, kubeconfig: "Path") -> tuple[str, ...]:
        """The daemon's arguments."""
        return ()

    def environment(self, node: Node) -> dict[str, str]:
        """The daemon's environment."""
        return {"NODE_NAME": node.name}

    def is_ready(self, node: Node, others: "Sequence[Node]") -> bool:
        """Whether pods can be added, and reach those of the other nodes."""
        return True

    def add(self, node: Node, pod: Pod, runtime: "Mapping[str, object]") -> None:
        """Connects a pod. `runtime`: what its Pod object asks of the plugins, by capability."""
        result = Sandbox(node.netns, pod.netns, runtime).call("ADD", self.conf(node), self.programs)
        ip("link set lo up", netns=pod.netns)
        assert {row["address"].partition("/")[0] for row in result["ips"]} == {pod.v4, pod.v6}

    # The lab's own devices and routes are not wanted.

    def node(self, number: int) -> Lines:
        return ()

    def own6(self, number: int) -> Lines:
        return ()

    def join(self, node: LabNode, others: "Sequence[LabNode]") -> tuple[Lines, Lines]:
        return (), ()

    def cable(self, number: int, pod: Pod) -> Lines:
        raise NotImplementedError

    inside = cable


def _ipam(node: Node) -> str:
    v4, v6 = pod_cidrs(node)
    return f"""{{type: host-local, dataDir: {node.folder}/ipam-{node.name},
        ranges: [[{{subnet: {v4}}}], [{{subnet: "{v6}"}}]], routes: [{{dst: 0.0.0.0/0}}, {{dst: "::/0"}}]}}"""


def route_to(node: Node, others: "Sequence[Node]", families: tuple[int, ...] = (4, 6)) -> None:
    for other in others:
        rows = zip((4, 6), pod_cidrs(other), (other.ip, other.ip6), strict=True)
        lines = [f"route add {cidr} via {via}" for family, cidr, via in rows if family in families]
        ip(*lines, netns=node.netns)


PORTMAP = "{type: portmap, capabilities: {portMappings: true}}"


class Bridge(Cni):
    name = "bridge"
    programs = ("bridge", "host-local", "portmap", "bandwidth", "firewall")
    masquerades = False

    def conf(self, node: Node) -> Conf:
        return yaml.safe_load(f"""
            cniVersion: 1.0.0
            name: net
            plugins:
            - {{type: bridge, bridge: cni0, isGateway: true, ipMasq: false, hairpinMode: true, ipam: {_ipam(node)}}}
            - {PORTMAP}
            - {{type: bandwidth, capabilities: {{bandwidth: true}}}}
            - {{type: firewall, backend: iptables}}
        """)

    def prepare(self, node: Node, others: "Sequence[Node]") -> None:
        route_to(node, others)


class Ptp(Cni):
    name = "ptp"
    programs = ("ptp", "host-local", "portmap")
    is_bridged = False
    masquerades = False

    def conf(self, node: Node) -> Conf:
        return yaml.safe_load(f"""
            cniVersion: 0.3.1
            name: {self.name}
            plugins: [{{type: ptp, ipMasq: false, ipam: {_ipam(node)}, mtu: 1500}}, {PORTMAP}]
        """)

    def prepare(self, node: Node, others: "Sequence[Node]") -> None:
        route_to(node, others)


class Kindnet(Ptp):
    name = "kindnet"
    masquerades = True

    def prepare(self, node: Node, others: "Sequence[Node]") -> None:
        super().prepare(node, others)
        for program, cidr in (("iptables", PODS4), ("ip6tables", PODS6)):
            rules = (
                "-N KIND-MASQ-AGENT",
                f"-A KIND-MASQ-AGENT -d {cidr} -j RETURN",
                "-A KIND-MASQ-AGENT -j MASQUERADE",
                "-A POSTROUTING -m addrtype ! --dst-type LOCAL -j KIND-MASQ-AGENT",
            )
            for rule in rules:
                run(*inside(node.netns, None, program, "-w", "-t", "nat", *rule.split()))


class Flannel(Cni):
    programs = ("flannel", "bridge", "host-local", "portmap")
    daemon = "flanneld"

    def __init__(self, backend: str) -> None:
        self.name = f"flannel-{backend}"
        self._backend = backend
        self._is_dual = backend != "ipip"
        self.modules = ("ipip",) if backend == "ipip" else ()

    def prepare(self, node: Node, others: "Sequence[Node]") -> None:
        if not self._is_dual:
            route_to(node, others, families=(6,))

    def add(self, node: Node, pod: Pod, runtime: "Mapping[str, object]") -> None:
        if self._is_dual:
            super().add(node, pod, runtime)
            return
        result = Sandbox(node.netns, pod.netns, runtime).call("ADD", self.conf(node), self.programs)
        assert [row["address"] for row in result["ips"]] == [f"{pod.v4}/24"]
        gateway = gate(node.number, v6=True)
        ip(f"addr replace {gateway}/64 dev cni0 nodad", netns=node.netns)
        ip(
            f"""
            link set lo up
            addr add {pod.v6}/64 dev eth0 nodad
            route add default via {gateway}
            """,
            netns=pod.netns,
        )

    def conf(self, node: Node) -> Conf:
        """As in kube-flannel.yml, with folders of this node's own."""
        return yaml.safe_load(f"""
            name: cbr0
            cniVersion: 0.3.1
            plugins:
            - type: flannel
              subnetFile: {self._subnet_file(node)}
              dataDir: {node.folder}/flannel-{node.name}
              ipam: {{dataDir: {node.folder}/ipam-{node.name}}}
              delegate: {{hairpinMode: true, isDefaultGateway: true}}
            - {PORTMAP}
        """)

    def command(self, node: Node, kubeconfig: "Path") -> tuple[str, ...]:
        net_conf = node.folder / f"net-conf-{node.name}.json"
        row = {"Network": PODS4, "IPv6Network": PODS6, "EnableIPv6": self._is_dual, "Backend": {"Type": self._backend}}
        net_conf.write_text(json.dumps(row))
        words = f"""
            --kube-subnet-mgr --ip-masq --iface=eth0 --healthz-port=0
            --kubeconfig-file={kubeconfig} --net-config-path={net_conf} --subnet-file={self._subnet_file(node)}
        """
        return tuple(words.split())

    def is_ready(self, node: Node, others: "Sequence[Node]") -> bool:
        return self._subnet_file(node).exists() and has_routes(node, others)

    def _subnet_file(self, node: Node) -> "Path":
        return node.folder / f"subnet-{node.name}.env"


class KubeRouter(Cni):
    name = "kube-router"
    programs = ("bridge", "host-local", "portmap")
    daemon = "kube-router"

    def prepare(self, node: Node, others: "Sequence[Node]") -> None:
        """The file that kubeadm-kuberouter.yaml installs; kube-router writes the pod networks into
        it.
        """
        self.file(node).write_text(f"""{{
            "cniVersion": "0.3.0",
            "name": "mynet",
            "plugins": [
                {{
                    "type": "bridge",
                    "bridge": "kube-bridge",
                    "isDefaultGateway": true,
                    "hairpinMode": true,
                    "ipam": {{"type": "host-local", "dataDir": "{node.folder}/ipam-{node.name}"}}
                }},
                {{"type": "portmap", "capabilities": {{"portMappings": true}}}}
            ]
        }}""")

    def file(self, node: Node) -> "Path":
        return node.folder / f"kube-router-{node.name}.conflist"

    def conf(self, node: Node) -> Conf:
        return read(self.file(node))

    def command(self, node: Node, kubeconfig: "Path") -> tuple[str, ...]:
        words = f"""
            --kubeconfig={kubeconfig} --hostname-override={node.name}
            --run-router=true --run-firewall=true --run-service-proxy=false
            --enable-ipv6=true --enable-overlay=false --bgp-graceful-restart=true
            --service-cluster-ip-range=10.96.0.0/16 --service-cluster-ip-range=fd00:10:96::/112
            --service-external-ip-range=203.0.113.0/24 --service-external-ip-range=2001:db8:1::/64
        """
        return tuple(words.split())

    def environment(self, node: Node) -> dict[str, str]:
        file = {"KUBE_ROUTER_CNI_CONF_FILE": str(self.file(node))}
        return super().environment(node) | file

    def is_ready(self, node: Node, others: "Sequence[Node]") -> bool:
        ipam = self.conf(node)["plugins"][0]["ipam"]
        return "subnet" in ipam or "ranges" in ipam


def has_routes(node: Node, others: "Sequence[Node]") -> bool:
    """Whether it has routes to the pods of the other nodes, in both families."""
    rows = [*routes(node, "-4"), *routes(node, "-6")]
    have = {row["dst"] for row in rows}
    return all(set(pod_cidrs(other)) <= have for other in others)


def routes(node: Node, family: str) -> list[dict[str, Any]]:
    return json.loads(run("ip", "-n", node.netns, family, "-j", "route"))


CNIS = {cni.name: cni for cni in (Bridge(), Ptp(), Kindnet(), Flannel("vxlan"), Flannel("host-gw"), KubeRouter())}
FLANNEL_IPIP = Flannel("ipip")
"""For kernels with the module ipip."""

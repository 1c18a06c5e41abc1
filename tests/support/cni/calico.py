# SPDX-License-Identifier: Apache-2.0
"""Calico, imitated: Go proxies do not serve the module in its folder api/, which felix needs.

The sources are those of its CNI plugin and of felix at commit 87c15906 (v3.34.0-dev): devices,
routes and sysctls in cni-plugin/pkg/dataplane/linux/dataplane_linux.go and
felix/dataplane/linux/{endpoint_mgr,vxlan_mgr,ipip_mgr}.go, rules in felix/rules. The rules are
those that felix, built from that commit, wrote in this lab (calico_rules.py); where names have a
hash they are shortened. Not imitated: policies of host endpoints; `preDNAT` ones are in
tests/programs/node/test_pre_dnat_rules.py.
"""

import hashlib
import subprocess
from typing import TYPE_CHECKING, Literal

import yaml

from tests.support.cni import calico_rules
from tests.support.cni.calico_rules import Network, Workload
from tests.support.cni.networks import PODS4, PODS6, PORTMAP, Cni, Node, pod_cidrs, route_to
from tests.support.cni.plugins import Conf, Sandbox
from tests.support.lab.lab import bridge, inside, ip, run
from tests.support.lab.podnet import Pod

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OVERLAY_DEVICES = {"vxlan": ("vxlan.calico", "vxlan-v6.calico"), "ipip": ("tunl0", "")}
Overlay = Literal["vxlan", "ipip"]
DataPlane = Literal["iptables", "nftables"]
HOST_MAC, HOST_LINK_LOCAL = "ee:ee:ee:ee:ee:ee", "fe80::ecee:eeff:feee:eeee"


def device_of(netns: str) -> str:
    """VethNameForWorkload() in libcalico-go/lib/backend/k8s/conversion."""
    return "cali" + hashlib.sha1(f"default.{netns}".encode()).hexdigest()[:11]


class Calico(Cni):
    programs = ("portmap",)
    is_bridged = False

    def __init__(self, overlay: Overlay, data_plane: DataPlane) -> None:
        self.name = f"calico-{overlay}-{data_plane}"
        self._overlay, self._data_plane = overlay, data_plane
        self.modules = ("ipip",) if overlay == "ipip" else ()

    def conf(self, node: Node) -> Conf:
        """The part of calico's list that is not imitated."""
        return yaml.safe_load(f"{{cniVersion: 1.0.0, name: k8s-pod-network, plugins: [{PORTMAP}]}}")

    def prepare(self, node: Node, others: "Sequence[Node]") -> None:
        keys = "net.ipv4.conf.all.rp_filter=1", "net.ipv4.conf.default.rp_filter=1"
        run(*inside(node.netns, None, "sysctl", "-qw", *keys))
        if self._overlay == "ipip":
            self._join_ipip(node, others)
        else:
            self._join_vxlan(node, others)
        for v6 in (False, True):
            network = self._network(node, others, v6)
            if self._data_plane == "nftables":
                _feed(node, calico_rules.nftables(network), "nft", "-f", "-")
            else:
                _feed(node, calico_rules.ipsets(network), "ipset", "restore")
                _feed(node, calico_rules.iptables(network), *_restore(v6))

    def _network(self, node: Node, others: "Sequence[Node]", v6: bool) -> Network:
        own = (node.ip6, "::1") if v6 else (node.ip, "127.0.0.1")
        device = OVERLAY_DEVICES[self._overlay][v6]
        return Network(
            v6,
            PODS6 if v6 else PODS4,
            (*own, _tunnel(node)[v6]) if device else own,
            [other.ip6 if v6 else other.ip for other in others],
            device,
            "" if not device else "udp" if self._overlay == "vxlan" else "ipip",
        )

    def _join_ipip(self, node: Node, others: "Sequence[Node]") -> None:
        """IPv6 pools have no IPIP: BIRD or felix route them over the nodes' network."""
        ip("link set tunl0 mtu 1480 up", f"addr add {_tunnel(node)[0]}/32 dev tunl0", netns=node.netns)
        for other in others:
            ip(f"route add {pod_cidrs(other)[0]} via {other.ip} dev tunl0 onlink", netns=node.netns)
        route_to(node, others, families=(6,))

    def _join_vxlan(self, node: Node, others: "Sequence[Node]") -> None:
        for v6, device, mtu in ((False, "vxlan.calico", 1450), (True, "vxlan-v6.calico", 1430)):
            own, length = node.ip6 if v6 else node.ip, 128 if v6 else 32
            ip(
                f"link add {device} address {_mac(node, v6)} mtu {mtu} type vxlan id 4096"
                f" dstport 4789 local {own} dev eth0 nolearning",
                f"addr add {_tunnel(node)[v6]}/{length} dev {device}" + (" nodad" if v6 else ""),
                f"link set {device} up",
                netns=node.netns,
            )
            for other in others:
                via, mac = _tunnel(other)[v6], _mac(other, v6)
                ip(
                    f"neigh add {via} lladdr {mac} dev {device} nud permanent",
                    f"route add {pod_cidrs(other)[v6]} via {via} dev {device} onlink",
                    netns=node.netns,
                )
                remote = other.ip6 if v6 else other.ip
                bridge(f"fdb add {mac} dev {device} dst {remote}", netns=node.netns)

    def add(self, node: Node, pod: Pod, runtime: "Mapping[str, object]") -> None:
        device = device_of(pod.netns)
        ip(f"link add {device} address {HOST_MAC} type veth peer name eth0 netns {pod.netns}", netns=node.netns)
        v4, v6 = f"net.ipv4.conf.{device}", f"net.ipv6.conf.{device}"
        settings = (
            f"{v4}.route_localnet=1",
            f"net.ipv4.neigh.{device}.proxy_delay=0",
            f"{v4}.proxy_arp=1",
            f"{v4}.forwarding=1",
            f"{v4}.rp_filter=1",
            f"{v6}.accept_dad=0",
            f"{v6}.disable_ipv6=0",
            f"{v6}.proxy_ndp=1",
            f"{v6}.forwarding=1",
            f"{v6}.accept_ra=0",
        )
        run(*inside(node.netns, None, "sysctl", "-qw", *settings))
        ip(f"link set {device} up", netns=node.netns)
        ip(
            f"""
            link set lo up
            link set eth0 up
            route add 169.254.1.1 dev eth0 scope link
            route add default via 169.254.1.1 dev eth0
            route add default via {HOST_LINK_LOCAL} dev eth0
            addr add {pod.v4}/32 dev eth0
            addr add {pod.v6}/128 dev eth0 nodad
            """,
            netns=pod.netns,
        )
        ip(f"route add {pod.v4}/32 dev {device} scope link", f"route add {pod.v6}/128 dev {device}", netns=node.netns)
        self.police(node, Workload(device), is_new=True)
        result = {
            "cniVersion": "1.0.0",
            "interfaces": [{"name": device}, {"name": "eth0", "sandbox": f"/run/netns/{pod.netns}"}],
            "ips": [{"address": f"{pod.v4}/32"}, {"address": f"{pod.v6}/128"}],
        }
        Sandbox(node.netns, pod.netns, runtime).call("ADD", self.conf(node), self.programs, result)

    def police(self, node: Node, workload: Workload, *, is_new: bool = False) -> None:
        """Writes the rules of a pod of this node."""
        for v6 in (False, True):
            if self._data_plane == "nftables":
                _feed(node, calico_rules.nftables_of(workload, v6), "nft", "-f", "-")
            else:
                text = calico_rules.iptables_of(workload, v6, is_new=is_new)
                _feed(node, text, *_restore(v6))


def _tunnel(node: Node) -> tuple[str, str]:
    """The addresses of its overlay's devices, from its block of addresses."""
    return f"10.244.{node.number}.0", f"fd00:10:244:{node.number}::"


def _mac(node: Node, v6: bool) -> str:
    return f"66:00:00:00:0{int(v6)}:0{node.number}"


def _restore(v6: bool) -> tuple[str, ...]:
    return ("ip6tables-restore" if v6 else "iptables-restore", "-w", "--noflush")


def _feed(node: Node, text: str, *command: str) -> None:
    done = subprocess.run(inside(node.netns, None, *command), input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}\n{text}"


CALICO = {cni.name: cni for cni in (Calico("vxlan", "iptables"), Calico("vxlan", "nftables"))}
CALICO_IPIP = Calico("ipip", "iptables")
"""For kernels with the module ipip."""

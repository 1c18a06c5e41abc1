# SPDX-License-Identifier: Apache-2.0
"""`--detect-local-mode`: which clients count as pods, for masquerading and for the short circuit.

One node with a pod behind a veth pair (a2), one behind the bridge `cni0` (bridged), and one whose
device does not have the pod prefix (odd). No client is in a hooked cgroup.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.cluster.kube_objects import node
from tests.support.lab.dial import Dial
from tests.support.lab.field import DROPPED, NODES4, NODES6, Field, at, check, crossed
from tests.support.lab.lab import Place, ip, settled
from tests.support.table import table

POD_NETS = ("10.244.1.0/24", "fd00:10:244:1::/64")
BRIDGED = ("10.244.1.130", "fd00:10:244:1::82")
ODD = ("10.99.0.2", "fd00:99::2")


class Mode(NamedTuple):
    """The agent's arguments, and which clients count as pods, for ClusterIPs and for the short circuit."""

    name: str
    arguments: str
    pods: str
    circuit: str


MODES = table(
    Mode,
    """
none                |                                                  | outside a2! bridged odd | a2! bridged odd
ClusterCIDR         | --cluster-cidr 10.244.1.0/24,fd00:10:244:1::/64  | a2! bridged             | a2! bridged odd
NodeCIDR            |                                                  | a2! bridged             | a2! bridged odd
BridgeInterface     | --pod-bridge-interface cni0                      | bridged                 | bridged
InterfaceNamePrefix | --pod-interface-name-prefix p                    | a2!                     | a2!
""",
)
"""Without a mode no client of a ClusterIP is masqueraded."""


class Pods(Field):
    """The node and pods of the module docstring. The agent is restarted for each mode."""

    def __init__(self) -> None:
        super().__init__(name="lm", pods=(2, 1), agents=1)

    def prepare(self) -> None:
        home = self.lab.nodes[0]
        ip(
            """
            link add cni0 type bridge
            link set cni0 up
            addr add 10.244.1.129/25 dev cni0
            addr add fd00:10:244:1::81/121 dev cni0 nodad
            """,
            netns=home.netns,
        )
        settled(home.netns, "fd00:10:244:1::81")
        self.bridged = self._pod("bridged", "v0", BRIDGED, (25, 121))
        ip("link set v0 master cni0", netns=home.netns)
        self.odd = self._pod("odd", "x0", ODD, (24, 64))
        ip(
            f"""
            addr add 10.99.0.1/32 dev x0
            route add {ODD[0]}/32 dev x0
            addr add fe80::1/64 dev x0 nodad
            route add {ODD[1]}/128 dev x0
            """,
            netns=home.netns,
        )
        ip("route add default via 10.244.1.129", "route add default via fd00:10:244:1::81", netns=self.bridged)
        ip(
            """
            route add 10.99.0.1 dev eth0
            route add default via 10.99.0.1
            route add default via fe80::1 dev eth0
            """,
            netns=self.odd,
        )

    def _pod(self, name: str, device: str, own: tuple[str, str], bits: tuple[int, int]) -> str:
        home = self.lab.nodes[0].netns
        netns = f"{self.lab.prefix}{name}"
        self.lab.add_netns(netns)
        ip(f"link add {device} type veth peer name eth0 netns {netns}", f"link set {device} up", netns=home)
        ip(
            f"""
            link set lo up
            addr add {own[0]}/{bits[0]} dev eth0
            addr add {own[1]}/{bits[1]} dev eth0 nodad
            link set eth0 up
            """,
            netns=netns,
        )
        settled(netns, own[1])
        return netns


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    """A local backend (11); policy Local with a remote backend only (14); UDP at number + 10."""
    with Pods() as made:
        made.unhook("bridged", made.bridged, *BRIDGED, made.lab.nodes[0])
        made.unhook("odd", made.odd, *ODD, made.lab.nodes[0])
        first = made.lab.nodes[0]
        made.create(node(first.name, first.ip, first.ip6, pod_cidrs=POD_NETS))
        made.create(*made.all_of("11 21:UDP -> a1\n14 24:UDP -> b1 external=Local"))
        made.settle()
        yield made


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: mode.name)
def mode(request, pods: Pods) -> Mode:
    mode: Mode = request.param
    detects = () if mode.name == "none" else ("--detect-local-mode", mode.name, *mode.arguments.split())
    pods.agent.stop()
    pods.agent.start(extra=detects)
    return mode


def own(place: Place, v6: bool) -> str:
    return place.ip6 if v6 else place.ip


@crossed
@pytest.mark.parametrize("name", ["outside", "a2!", "bridged", "odd"])
def test_client_address_seen_through_a_cluster_ip(pods: Pods, mode: Mode, name: str, protocol: str, v6: bool):
    """A client that is not a pod is masqueraded to the node's address."""
    sees = own(pods[name], v6) if name in mode.pods.split() else (NODES6 if v6 else NODES4)[0]
    to = at("ClusterIP", 11 if protocol == "tcp" else 21, v6)
    check(pods, Dial(f"from {name}", name, to, "a1", protocol, sees))


@crossed
@pytest.mark.parametrize("name", ["outside", "a2!", "bridged"])
def test_which_clients_use_the_short_circuit(pods: Pods, mode: Mode, name: str, protocol: str, v6: bool):
    """Policy Local without a local endpoint: the device a packet arrives on decides."""
    outcome, sees = ("b1", own(pods[name], v6)) if name in mode.circuit.split() else (DROPPED, "")
    for kind in ("NodePort", "VIP"):
        check(pods, Dial(name, name, at(kind, 14 if protocol == "tcp" else 24, v6), outcome, protocol, sees))

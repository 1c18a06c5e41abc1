# SPDX-License-Identifier: Apache-2.0
"""Services in the pod networks of real CNIs: their plugins, and their daemons
(tests/support/cni/networks.py). Calico's are imitated (tests/support/cni/calico.py). Guests
(tests/kernels) have the networks with tunnels of IPIP, which not every machine's kernel has.
"""

import contextlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.inspect import attached
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.kernel.system import netns
from tests.lab.cni.conftest import LONG
from tests.support.cni.calico import CALICO, CALICO_IPIP
from tests.support.cni.cluster import HOST_PORT, CniCluster
from tests.support.cni.dials import Row, check, create_services
from tests.support.cni.networks import CNIS, FLANNEL_IPIP
from tests.support.features import IN_GUEST, needs
from tests.support.lab.field import DROPPED, NODES4, NODES6, at, split
from tests.support.lab.lab import PATIENCE, on, until
from tests.support.lab.load import under_load
from tests.support.table import table

pytestmark = [
    needs("br_netfilter"),
    pytest.mark.usefixtures("br_netfilter"),
    pytest.mark.timeout(10 * PATIENCE),  # a network's first test waits for all of its daemons
]

IPIP = {cni.name: cni for cni in (FLANNEL_IPIP, CALICO_IPIP)}
KINDS = (
    ("bridge",),
    ("kindnet",),
    ("flannel-vxlan",),
    ("flannel-vxlan", "--forwarding", "direct"),
    ("flannel-host-gw",),
    ("calico-vxlan-nftables",),
    *([("calico-vxlan-iptables",), ("kube-router",)] if LONG else []),
)
IPIP_KINDS = [pytest.param((name,), marks=needs("tunnels")) for name in IPIP]
FAMILIES = (False,) if IN_GUEST else (False, True)
"""IPIP carries IPv4 only."""

families = pytest.mark.parametrize("v6", FAMILIES, ids=lambda v6: "v6" if v6 else "v4")
crossed = pytest.mark.parametrize(("protocol", "v6"), [("tcp", False), ("udp", FAMILIES[-1])])


@pytest.fixture(scope="module", params=IPIP_KINDS if IN_GUEST else KINDS, ids=" ".join)
def cluster(request, cni_programs: None) -> Iterator[CniCluster]:
    name, *arguments = request.param
    with CniCluster((CNIS | CALICO | IPIP)[name], *arguments) as made:
        create_services(made)
        yield made


ROWS = table(
    Row,
    """
a2       | ClusterIP  | 3 | a1 b1
a2!      | ClusterIP  | 3 | a1 b1   | bridged
a1       | ClusterIP  | 1 | a1
a1!      | ClusterIP  | 1 | a1      | node
host-1   | ClusterIP  | 3 | a1 b1   | node
a2!      | NodePort   | 3 | a1 b1   | node
host-1   | NodePort   | 3 | a1 b1   | node
outside  | NodePort   | 1 | a1      | node
outside  | NodePort   | 2 | b1      | node
outside  | NodePort   | 3 | a1 b1   | node    | 2
outside  | NodePort   | 4 | a1
outside  | NodePort   | 4 | b1      | client  | 2
outside  | NodePort   | 5 | timeout
a2!      | NodePort   | 5 | b1
outside  | VIP        | 3 | a1 b1   | node
outside  | VIP        | 4 | a1
outside  | ExternalIP | 2 | b1      | node
""",
)


@crossed
@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.client} {r.kind} {r.number}")
def test_dial(cluster: CniCluster, row: Row, protocol: str, v6: bool):
    check(cluster, row, protocol, v6)


@families
def test_a_host_port_of_the_portmap_plugin(cluster: CniCluster, v6: bool):
    answer = cluster["outside"].many(3, (NODES6 if v6 else NODES4)[0], HOST_PORT)
    assert answer["names"] == {"a1": 3}, answer


def test_pods_and_daemons_change_under_load(cluster: CniCluster):
    """A pod is added meanwhile. Where the CNI has a daemon (flannel, kube-router), every node's
    ends and starts again before that.
    """
    v6 = FAMILIES[-1]
    # By the other node: flanneld gives host-1's connections to b1 random ports of its node, which
    # must not be those of outside's connections to b1 (docs/limits.md).
    remote, both = at("NodePort", 11, v6, 2), at("ClusterIP", 13, v6)
    home = cluster.lab.nodes[0]
    with (
        under_load(cluster, *split(remote)[:1], "outside", port=split(remote)[1]) as outside,
        under_load(cluster, *split(both)[:1], "a2!", "host-1") as from_inside,
    ):
        assert "name" in cluster["outside"].tcp(*split(remote), keep="kept")
        for daemon in cluster.daemons:
            daemon.stop()
        from_inside.goes_on()
        for daemon in cluster.daemons:
            daemon.start()
        others = [node for node in cluster.lab.nodes if node is not home]
        until("the CNI is ready again", lambda: cluster.cni.is_ready(home, others))
        pod = home.pod(f"a{len(home.pods) + 1}").serve(8080)
        cluster.places[pod.name], cluster.home[pod.name] = pod, home
        from_inside.goes_on()
        outside.goes_on()
        assert "name" in cluster["outside"].ask("talk", keep="kept")
        answer = pod.many(24, *split(both))
        assert set(answer["names"]) == {"a1", "b1"}, answer


INVALID = "FORWARD -m conntrack --ctstate INVALID -j DROP"


def on_nodes(cluster: CniCluster, *commands: str) -> None:
    for node, command in product(cluster.lab.nodes, commands):
        on(node, *command.split())


@contextlib.contextmanager
def firewall(cluster: CniCluster) -> Iterator[None]:
    """Drops packets that conntrack finds invalid, as firewalld does."""
    programs = ("iptables", "ip6tables")
    on_nodes(cluster, *(f"{program} -w -I {INVALID}" for program in programs))
    try:
        yield
    finally:
        on_nodes(cluster, *(f"{program} -w -D {INVALID}" for program in programs))


def port_programs(cluster: CniCluster, index: int) -> list[str]:
    """The programs of each port of a bridge on a node: at ingress only."""
    node, pins = cluster.lab.nodes[index], Pins(cluster.agents[index].pin_dir)
    listing = netns.run_in(Path("/run/netns") / node.netns, lambda: attached.read_devices(pins, 0, None))
    assert not any(device.egress for device in listing if device.role == "port")
    return [device.ingress for device in listing if device.role == "port"]


@contextlib.contextmanager
def br_netfilter(cluster: CniCluster, value: int) -> Iterator[None]:
    """Whether packets pass netfilter as they enter a port of a bridge. By default they do."""
    keys = [f"net.bridge.bridge-nf-call-{program}" for program in ("iptables", "ip6tables")]
    try:
        set_and_wait(cluster, keys, value)
        yield
    finally:
        set_and_wait(cluster, keys, 1)


def set_and_wait(cluster: CniCluster, keys: list[str], value: int) -> None:
    """The agents read these settings at any change of a device, and every 30 s."""
    change = f"ip link set lo alias br_netfilter-{value}"
    on_nodes(cluster, *(f"sysctl -qw {key}={value}" for key in keys), change)
    for index, node in enumerate(cluster.lab.nodes):
        expected = len(node.pods) if cluster.cni.is_bridged and value else 0
        until(
            f"{expected} ports have a program on {node.name}",
            lambda index=index, expected=expected: (
                [bool(program) for program in port_programs(cluster, index)] == [True] * expected
            ),
        )


@crossed
@pytest.mark.parametrize("value", [1, 0], ids=["br_netfilter", "no br_netfilter"])
def test_a_firewall_that_drops_invalid_packets(cluster: CniCluster, value: int, protocol: str, v6: bool):
    with br_netfilter(cluster, value), firewall(cluster):
        for row in ROWS:
            if row.outcome != DROPPED:
                check(cluster, row, protocol, v6)

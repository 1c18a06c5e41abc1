# SPDX-License-Identifier: Apache-2.0
"""Sockets in a network namespace that is not a pod's: a cluster inside a pod, containers that a pod
or a user starts, `unshare -n`. Their 10.96.0.1 is another server than this cluster's.

In each network such a server listens, and so does the backend of this cluster's Service. A row says
which devices the network has, and which of the two answers.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kbpf.kernel.bpf import kernel_members
from kbpf.kernel.net import links
from kbpf.kernel.net.devices import has_way_to
from kbpf.kernel.system import netns
from kbpf.model.reasons import Reason
from tests.support.features import needs
from tests.support.lab.lab import Node, Place, ip
from tests.support.plane import LOCAL, LOCAL6, Site, desired, make_local, network, services
from tests.support.table import table

WORLD = desired(
    *services(
        """
web      10.96.0.1:80    -> four
web6     [fd00:96::1]:80 -> six
dns:UDP  10.96.0.1:80    -> four
dns6:UDP [fd00:96::1]:80 -> six
""",
        {"four": f"{LOCAL[0]}:8080", "six": f"[{LOCAL6[0]}]:8080"},
    )
)


class Network(NamedTuple):
    """`is_ours`: whether its sockets get this cluster's Services. `devices`: commands for `ip`, each
    preceded by the namespace that runs it.
    """

    name: str
    is_ours: bool
    devices: str


NETWORKS = table(
    Network,
    """
a pair with the node           | yes | node: {pair}
a macvlan of a node's device   | yes | node: link add link eth0 name eth0 netns {inner} type macvlan
a bridge, a pair with the node | yes | inner: link add b0 type bridge; node: {pair}
only loopback (unshare -n)     | no  |
a pair with a pod (kind)       | no  | pod: {pair}
a macvlan of a pod's device    | no  | pod: link add link eth0 name m0 netns {inner} type macvlan
a tap (rootless containers)    | no  | inner: tuntap add tap0 mode tap
a bridge                       | no  | inner: link add b0 type bridge
""",
)
PAIR = "link add v0 type veth peer name eth0 netns"
UNCLEAR = Network(
    "more devices than the hooks look at", True, "; ".join(f"inner: link add b{n} type bridge" for n in range(16))
)


class Bench(NamedTuple):
    node: Node
    pod: Place
    site: Site


@pytest.fixture(scope="module")
def bench(node: Node, shared_site: Site) -> Bench:
    shared_site.start(WORLD)
    return Bench(node, node.pod("pod"), shared_site)


@pytest.fixture
def inner(bench: Bench, request) -> Iterator[Place]:
    """A client in the network of `request.param`, where "theirs" serves the Services' addresses, and
    "ours" the backend's.
    """
    row: Network = request.param
    with network("kbi") as name:
        make_local(name)
        ip("addr add 10.96.0.1/32 dev lo", "addr add fd00:96::1/128 dev lo nodad", netns=name)
        namespaces = {"node": bench.node.netns, "pod": bench.pod.netns, "inner": name}
        for command in filter(None, row.devices.format(inner=name, pair=f"{PAIR} {name}").split("; ")):
            where, _, words = command.partition(": ")
            ip(words, netns=namespaces[where])
        places = [Place(who, name, bench.pod.cgroup / who) for who in ("theirs", "ours", "client")]
        places[0].serve(80, 81, udp=(80,))
        places[1].serve(8080, udp=(8080,))
        yield places[2]
        for place in places:
            place.close()


@needs("networks")
@needs("set_retval")
@pytest.mark.parametrize(
    ("inner", "is_ours"),
    [pytest.param(row, row.is_ours, id=row.name) for row in (*NETWORKS, UNCLEAR)],
    indirect=["inner"],
)
@pytest.mark.parametrize("host", ["10.96.0.1", "fd00:96::1"])
def test_services_of_sockets_in(bench: Bench, inner: Place, is_ours: bool, host: str):
    before = bench.site.reasons()
    answers = (inner.tcp(host, 80), inner.udp(host, 80), inner.udp(host, 80, connected=True))
    assert [answer.get("name") for answer in answers] == ["ours" if is_ours else "theirs"] * 3, answers
    assert all(answer["peer"] == [host, 80] for answer in answers), "who answers seems to be who was dialled"
    unknown = inner.tcp(host, 81)
    assert unknown.get("name", unknown.get("error")) == ("ECONNREFUSED" if is_ours else "theirs")
    counted = bench.site.reasons() - before
    dials, datagrams_back = 4, 2  # the client's own address is 10.96.0.1, too
    assert counted[Reason.OTHER_NETWORK] == (0 if is_ours else dials + datagrams_back)
    assert counted[Reason.UNKNOWN_PORT] == is_ours


@pytest.mark.parametrize(
    ("inner", "is_ours"), [pytest.param(row, row.is_ours, id=row.name) for row in NETWORKS], indirect=["inner"]
)
def test_trace_sees_the_same_from_inside(bench: Bench, inner: Place, is_ours: bool):
    node, here = links.namespace_path(bench.node.netns), links.namespace_path(str(inner.netns))
    assert netns.run_in(here, lambda: has_way_to(node)) == is_ours


@needs("networks")
def test_kernel_tells_the_network_of_a_socket():
    """Otherwise all namespaces count as the cluster's, and the rows above could not fail."""
    assert kernel_members.probe_networks().works

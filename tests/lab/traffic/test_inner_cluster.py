# SPDX-License-Identifier: Apache-2.0
"""A cluster inside a pod, as kind and k3d run it in CI jobs, with the Service network of ours.

An imitation: kind's images need a registry. The pod a2 is the inner cluster's node. It has a
device for its own pod, and rules like kube-proxy's for its own Services. Our Services lie behind
its masquerading.
"""

from collections.abc import Iterator

import pytest

from tests.lab.outside.netfilter import nft
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.lab.dial import REFUSED
from tests.support.lab.field import Field
from tests.support.lab.lab import Place, ip, let_forward

RULES = """
table ip inner {
  chain before { type nat hook prerouting priority dstnat
    ip daddr 10.96.0.10 meta l4proto { tcp, udp } th dport 53 dnat to 10.250.3.2:8080
  }
  chain after { type nat hook postrouting priority srcnat
    oifname eth0 masquerade
  }
}
"""


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with Field(name="in", pods=(2,)) as made:
        for name, address, protocol in (("kube-dns", "10.96.0.10", "UDP"), ("outer", "10.96.0.99", "TCP")):
            made.create(
                service(name, port(53, "p", protocol, target=8080), cluster_ip=address),
                endpoint_slice(name, endpoint(made["a1"].ip, node="node-1"), ports=[slice_port(8080, "p", protocol)]),
            )
        made.settle()
        yield made


@pytest.fixture(scope="module")
def inner(field: Field) -> Iterator[Place]:
    """A pod of the inner cluster; its DNS answers as "inner-dns"."""
    node = field["a2"]
    let_forward(node.netns)
    places = []
    for index, name in ((2, "inner-pod"), (3, "inner-dns")):
        netns = f"{field.lab.prefix}i{index}"
        field.lab.add_netns(netns)
        ip(
            f"""
            link add i{index} type veth peer name eth0 netns {netns}
            addr add 10.250.{index}.1/24 dev i{index}
            link set i{index} up
            """,
            netns=node.netns,
        )
        ip(
            f"""
            addr add 10.250.{index}.2/24 dev eth0
            link set eth0 up
            route add default via 10.250.{index}.1
            """,
            netns=netns,
        )
        places.append(Place(name, netns, node.cgroup / name))
    nft(node, RULES)
    places[1].serve(8080, udp=(8080,))
    yield places[0]
    for place in places:
        place.close()


ROWS = [
    ("the inner cluster's DNS", "udp", "10.96.0.10:53", "inner-dns"),
    ("the same, over TCP", "tcp", "10.96.0.10:53", "inner-dns"),
    ("a Service of the outer cluster", "tcp", "10.96.0.99:53", "a1"),
    ("a port that no Service has", "tcp", "10.96.0.99:54", REFUSED),
]


@pytest.mark.parametrize(("protocol", "to", "answers"), [pytest.param(*row[1:], id=row[0]) for row in ROWS])
def test_pod_of_the_inner_cluster_dials(field: Field, inner: Place, protocol: str, to: str, answers: str):
    host, _, number = to.partition(":")
    answer = inner.ask(protocol, host=host, port=int(number), family="4", timeout=10)
    assert answer.get("name", answer.get("error")) == answers, answer
    assert answer.get("peer", [host, int(number)]) == [host, int(number)]


def test_the_pod_itself_is_one_of_the_outer_cluster(field: Field, inner: Place):
    assert field["a2"].udp("10.96.0.10", 53)["name"] == "a1"

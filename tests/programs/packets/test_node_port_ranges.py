# SPDX-License-Identifier: Apache-2.0
"""--nodeport-source-ranges: clients that may use NodePorts, by packets from outside and
by sockets.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kbpf.dataplane.bpf.maps.layout import Reason, Role, unpack_source_range
from kbpf.model.desired import DesiredState, FrontendKind, ServiceState
from kbpf.model.objects import Protocol
from kbpf.source.decode.fields import parse_cidr
from tests.programs.packets.path.single_packets import (
    CLIENT,
    NEAR,
    Path_,
    end,
    masquerading,
    serving_node,
)
from tests.support.lab.namespace import made
from tests.support.packets.packets import tcp, udp
from tests.support.packets.test_run import TC_ACT_SHOT
from tests.support.plane import LOCAL, Site, desired, make_local, picks, service, services, sites

RANGES = (parse_cidr("198.51.100.0/24", ""), parse_cidr("2001:db8:9::/64", ""))
CLUSTER_IP = {4: "10.96.0.1:80", 6: "[fd00:96::1]:80"}
NODE = {4: "192.0.2.3", 6: "2001:db8::3"}
WORLD = """
web-tcp:TCP 10.96.0.1:80 NodePort=0.0.0.0:30080 -> 10.244.1.2:8080
web-udp:UDP 10.96.0.1:80 NodePort=0.0.0.0:30080 -> 10.244.1.2:8080
web-tcp:TCP [fd00:96::1]:80 NodePort=[::]:30080 -> [fd00:10:244:1::2]:8080
web-udp:UDP [fd00:96::1]:80 NodePort=[::]:30080 -> [fd00:10:244:1::2]:8080
"""


def restricted(state: ServiceState) -> ServiceState:
    """Marks NodePorts as restricted, as policy does when there are ranges."""
    return replace(
        state,
        frontends=tuple(replace(each, restricted=each.kind is FrontendKind.NODE_PORT) for each in state.frontends),
    )


def world() -> DesiredState:
    return desired(*map(restricted, services(WORLD, {})), nodes=" ".join(NODE.values()))


def ranges(site: Site) -> set[object]:
    return {unpack_source_range(key) for key in site.entries("source_ranges")}


def test_map_of_ranges_follows_the_setting(site: Site):
    for given in (RANGES, RANGES, RANGES[:1], ()):
        site.open(node_port_source_ranges=given).apply(world(), None)
        assert ranges(site) == {(0, cidr) for cidr in given}


def test_sockets_of_the_node_are_allowed_and_those_of_pods_left_to_the_packet_path(artifact_cache: Path):
    state = restricted(service("web", "10.96.0.1:80 NodePort=0.0.0.0:30080", f"{LOCAL[0]}:80", Protocol.UDP))
    with made() as home, made() as other, sites(artifact_cache) as make:
        for each in (home, other):
            make_local(each.name)
        home.ip(f"link add pod type veth peer name eth0 netns {other.name}")
        site = make(node=home.name)
        plane = site.open(node_port_source_ranges=RANGES)
        site.do(lambda: plane.apply(desired(state, nodes=NODE[4]), None))
        assert picks(site.place("host", home.name), f"{NODE[4]}:30080") == [LOCAL[0]]
        pod_place, before = site.place("pod", other.name), site.reasons()[Reason.NEEDS_SOURCE]
        assert picks(pod_place, f"{NODE[4]}:30080") == ["ENETUNREACH"]
        assert site.reasons()[Reason.NEEDS_SOURCE] == before + 1
        assert picks(pod_place, "10.96.0.1:80") == [LOCAL[0]]


@pytest.fixture(scope="module")
def path(artifact_cache: Path) -> Iterator[Path_]:
    with serving_node(artifact_cache, "n", masquerading(world()), node_port_source_ranges=RANGES) as path:
        path.set_loopback_role(Role.HOST)
        yield path


CLIENTS = {
    "in a range": (CLIENT, True),
    "next to a range": ({4: "198.51.101.7", 6: "2001:db8:9:1::7"}, False),
    "a pod": (NEAR, False),
}


@pytest.mark.parametrize("who", CLIENTS)
@pytest.mark.parametrize("v", [4, 6], ids=["v4", "v6"])
@pytest.mark.parametrize("build", [lambda a, b: tcp(a, b, flags="S"), udp], ids=["tcp", "udp"])
def test_packet_from_outside_is_checked_by_its_source(path: Path_, who: str, v: int, build: object):
    addresses, lets_in = CLIENTS[who]
    with path.counted(Reason.NOT_ALLOWED, not lets_in), path.counted(Reason.NEW_FLOW, lets_in):
        verdict, _ = path.ingress(build(end(addresses[v], 4711), end(NODE[v], 30080)))
    assert lets_in or verdict == TC_ACT_SHOT
    with path.counted(Reason.NOT_ALLOWED, 0), path.counted(Reason.NEW_FLOW):  # they do not apply to ClusterIPs
        path.ingress(build(end(addresses[v], 4712), CLUSTER_IP[v]))

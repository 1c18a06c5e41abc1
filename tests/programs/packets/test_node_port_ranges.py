# SPDX-License-Identifier: Apache-2.0
"""--nodeport-source-ranges: clients that may use NodePorts, by packets from outside and
by sockets.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kbpf.dataplane.bpf.maps.layout import Reason, Role, unpack_source_range
from kbpf.kernel.system import netns
from kbpf.model.address import parse_addr
from kbpf.model.desired import DesiredState, FrontendKind, ServiceState
from kbpf.model.objects import Protocol
from kbpf.source.decode.fields import parse_cidr
from tests.programs.packets.path.single_packets import TC_ACT_SHOT, Path_
from tests.support.lab.lab import Place, ip, run
from tests.support.packets.packets import tcp, udp
from tests.support.packets.test_run import Program
from tests.support.plane import LOCAL, Site, desired, make_local, picks, service, sites

RANGES = (parse_cidr("198.51.100.0/24", ""), parse_cidr("2001:db8:9::/64", ""))
SNAT = {4: "198.18.0.1", 6: "fd00:198:18::1"}
NODE = {4: "192.0.2.3", 6: "2001:db8::3"}
BACKEND = {4: "10.244.1.2", 6: "fd00:10:244:1::2"}


def restricted(state: ServiceState) -> ServiceState:
    """Marks NodePorts as restricted, as policy does when there are ranges."""
    return replace(
        state,
        frontends=tuple(replace(each, restricted=each.kind is FrontendKind.NODE_PORT) for each in state.frontends),
    )


def world() -> DesiredState:
    made = []
    for protocol in (Protocol.TCP, Protocol.UDP):
        for v, any_ in ((4, "0.0.0.0"), (6, "[::]")):
            own = "10.96.0.1" if v == 4 else "[fd00:96::1]"
            to = f"{BACKEND[v]}:8080" if v == 4 else f"[{BACKEND[v]}]:8080"
            frontends = f"{own}:80 NodePort={any_}:30080"
            made.append(restricted(service(f"web-{protocol.name.lower()}", frontends, to, protocol)))
    return desired(*made, nodes=" ".join(NODE.values()))


def ranges(site: Site) -> set[object]:
    return {unpack_source_range(key) for key in site.entries("source_ranges")}


def test_map_of_ranges_follows_the_setting(site: Site) -> None:
    for given in (RANGES, RANGES, RANGES[:1], ()):
        site.open(node_port_source_ranges=given).apply(world(), None)
        assert ranges(site) == {(0, cidr) for cidr in given}


def test_socket_of_a_pod_is_left_to_the_packet_path(site: Site) -> None:
    name = f"{site.name}x"
    run("ip", "netns", "add", name)
    try:
        make_local(name)
        pod: Place = site.place("pod", name)
        state = restricted(service("web", "10.96.0.1:80 NodePort=0.0.0.0:30080", f"{LOCAL[0]}:80", Protocol.UDP))
        site.open(node_port_source_ranges=RANGES).apply(desired(state, nodes=NODE[4]), None)
        before = site.reasons()[Reason.NEEDS_SOURCE]
        assert picks(pod, f"{NODE[4]}:30080") == ["ENETUNREACH"]
        assert site.reasons()[Reason.NEEDS_SOURCE] == before + 1
        assert picks(pod, "10.96.0.1:80") == [LOCAL[0]]
    finally:
        run("ip", "netns", "del", name)


def test_socket_of_the_node_is_always_allowed(artifact_cache: Path) -> None:
    name = f"kbpo{os.getpid()}"
    run("ip", "netns", "add", name)
    try:
        make_local(name)
        with sites(artifact_cache) as make:
            site = make(node=name)
            state = restricted(service("web", "10.96.0.1:80 NodePort=0.0.0.0:30080", f"{LOCAL[0]}:80", Protocol.UDP))
            plane = site.open(node_port_source_ranges=RANGES)
            netns.run_in(
                Path("/run/netns") / name,
                lambda: plane.apply(desired(state, nodes=NODE[4]), None),
            )
            assert picks(site.place("host", name), f"{NODE[4]}:30080") == [LOCAL[0]]
    finally:
        run("ip", "netns", "del", name)


@pytest.fixture(scope="module")
def path(artifact_cache: Path) -> Iterator[Path_]:
    where = f"kbpn{os.getpid()}"
    run("ip", "netns", "add", where)
    try:
        ip("link set lo up", netns=where)
        with sites(artifact_cache) as make:
            site = make(node=where)
            plane = site.open(packet_path=True, node_port_source_ranges=RANGES)
            own = tuple(parse_addr(address) for address in SNAT.values())
            state = replace(world(), masquerade_addresses=own)
            netns.run_in(Path("/run/netns") / where, lambda: plane.apply(state, None))
            folder = next(site.pins.glob("programs-tc-*"))
            program = Program.open(folder / "tc_ingress")
            made = Path_(site, {"tc_ingress": program}, where)
            made.set_loopback_role(Role.HOST)
            yield made
            program.close()
    finally:
        run("ip", "netns", "del", where)


CLIENTS = {
    "in a range": ({4: "198.51.100.7", 6: "2001:db8:9::7"}, True),
    "next to a range": ({4: "198.51.101.7", 6: "2001:db8:9:1::7"}, False),
    "a pod": ({4: "10.244.7.7", 6: "fd00:10:244:7::7"}, False),
}


@pytest.mark.parametrize("who", CLIENTS)
@pytest.mark.parametrize("v", [4, 6], ids=["v4", "v6"])
@pytest.mark.parametrize("build", [lambda a, b: tcp(a, b, flags="S"), udp], ids=["tcp", "udp"])
def test_packet_from_outside_is_checked_by_its_source(path: Path_, who: str, v: int, build: object) -> None:
    addresses, lets_in = CLIENTS[who]
    own, front = (f"[{a}]" if v == 6 else a for a in (addresses[v], NODE[v]))
    before = path.site.reasons()
    verdict, _ = path.run("tc_ingress", build(f"{own}:4711", f"{front}:30080"))
    counted = path.site.reasons() - before
    assert (counted[Reason.NOT_ALLOWED], counted[Reason.NEW_FLOW]) == (not lets_in, lets_in)
    assert lets_in or verdict == TC_ACT_SHOT
    cluster_ip = "10.96.0.1:80" if v == 4 else "[fd00:96::1]:80"
    before = path.site.reasons()
    path.run("tc_ingress", build(f"{own}:4712", cluster_ip))
    counted = path.site.reasons() - before
    assert counted[Reason.NOT_ALLOWED] == 0, "the ranges do not apply to ClusterIPs"
    assert counted[Reason.NEW_FLOW] == 1

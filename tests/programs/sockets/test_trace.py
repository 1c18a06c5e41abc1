# SPDX-License-Identifier: Apache-2.0
"""`kbpf trace` of sockets: the affinity of a Pod, and which sockets no hook sees.

test_slots.py compares shares, and the lab the rows that it dials.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.kernel.net.routes import find_route
from kbpf.kernel.system import netns, pods
from kbpf.model.address import format_addr, parse_addr
from kbpf.model.config import SocketLb
from kbpf.model.desired import FrontendAddress
from kbpf.model.inspection import Inspection, Route
from kbpf.model.objects import Protocol
from kbpf.views import trace
from kbpf.views.trace_page import Client, NodeFacts, Origin, Trace
from tests.support.lab.lab import Node, Place, cgroup2
from tests.support.lab.namespace import Namespace
from tests.support.plane import LOCAL, Site, desired, make_local, picks, service, split

WEB = "10.96.0.1:53"
UDP = Protocol.UDP


@dataclass
class Bench:
    """A node with two pods as clients."""

    node: Node
    site: Site
    plane: BpfPlane
    one: Place
    two: Place

    def client(self, place: Place) -> Client:
        where = Path("/run/netns") / str(place.netns)
        origin = Origin.HOST if place is self.node.host else Origin.POD
        return Client(
            origin, cgroups=pods.list_cgroup_ids(place.cgroup, cgroup2()), netns=netns.run_in(where, netns.read_cookie)
        )

    def inspect(self) -> Inspection:
        return snapshot.read(self.site.pins, trace.NEEDS)

    def trace(self, client: Client, inspection: Inspection | None = None) -> Trace:
        to = FrontendAddress(*split(WEB), UDP)
        return trace.build_trace(inspection or self.inspect(), client, to)


@pytest.fixture(scope="module")
def bench(local_node: Node, shared_site: Site) -> Bench:
    one, two = local_node.pod("one"), local_node.pod("two")
    for pod in (one, two):
        make_local(pod.netns)
    return Bench(local_node, shared_site, shared_site.open(), one, two)


def backends(count: int) -> str:
    return " ".join(f"{address}:1" for address in LOCAL[:count])


def test_affinity_is_that_of_the_clients_own_network(bench: Bench):
    state = service("web", WEB, backends(20), UDP, affinity_timeout=600)
    bench.plane.apply(desired(state), None)
    for place in (bench.node.host, bench.one, bench.two):
        before = bench.trace(bench.client(place))
        assert (len(before.candidates), before.reason) == (20, "translated")
        (chosen,) = set(picks(place, WEB, 3))
        seen = bench.trace(bench.client(place))
        assert [(c.backend, c.share) for c in seen.candidates] == [(f"{chosen}:1", 1.0)]
        assert seen.reason == "translated_by_affinity"
    unknown = bench.trace(bench.client(bench.two)._replace(netns=None))
    (step,) = [step for step in unknown.steps if step.step == "affinity"]
    assert len(unknown.candidates) == 20
    assert "depends on the client" in step.result
    bench.plane.apply(desired(), None)


def test_which_sockets_no_hook_sees(bench: Bench):
    bench.plane.apply(desired(service("web", WEB, backends(1), UDP)), None)
    client, inspection = bench.client(bench.one), bench.inspect()
    outside = client._replace(cgroups=frozenset((1,)))
    exempt = replace(inspection, exempt_ids=frozenset(list(client.cgroups)[:1]))
    host_only = replace(inspection, socket_lb=SocketLb.HOST_NAMESPACE_ONLY)
    in_host = client._replace(netns=inspection.host_netns)
    assert bench.trace(client, inspection).seen_by == "socket"
    assert bench.trace(in_host, host_only).seen_by == "socket"
    for seen, why in (
        (bench.trace(outside, inspection), "not below"),
        (bench.trace(client, exempt), "exempt"),
        (bench.trace(client, host_only), "hostNamespaceOnly"),
        (bench.trace(client._replace(is_of_cluster=False), inspection), "not a namespace of this cluster"),
    ):
        assert (seen.seen_by, seen.verdict) == ("nothing", "pass")
        assert why in seen.steps[0].why
    # The hook really does not run for a process elsewhere.
    outsider = Place("outsider", bench.one.netns, None)
    assert picks(outsider, WEB)[0] not in LOCAL
    outsider.close()


# ---- what the command reads of the node ----------------------------------------------------------


def test_a_process_of_a_pod_is_found_by_its_cgroup(bench: Bench):
    uid = f"{os.getpid():08x}-1111-2222-3333-444444444444"
    folder = bench.node.cgroup / f"kubepods/burstable/pod{uid}/container"
    assert pods.find_process(uid) is None
    place = Place("pod", bench.one.netns, folder)
    try:
        process = pods.find_process(uid)
        assert process is not None
        assert process.cgroup == folder
        assert process.netns.samefile(Path("/run/netns") / str(bench.one.netns))
        ids = pods.find_cgroup_ids(uid)
        assert {folder.stat().st_ino, bench.node.cgroup.stat().st_ino} <= ids
    finally:
        place.close()
        for empty in folder.parents:
            if empty == bench.node.cgroup:
                break
            empty.rmdir()
    assert pods.find_process(uid) is None


def test_routes_are_those_of_the_kernel(bench: Bench):
    """Strict rp_filter and switched off forwarding are what a packet would meet."""
    node = Namespace(bench.node.netns)

    def ask(to: str, source: str = "", device: int = 0) -> Route:
        origin = parse_addr(source) if source else None
        return node.do(lambda: find_route(parse_addr(to), origin, device))

    own, pod, other = bench.node.ip, bench.one.ip, "203.0.113.7"
    node.ip(f"route add {other}/32 via 198.18.0.254", "route add unreachable 192.0.2.9/32")
    assert ask(own).is_local
    to_pod = ask(pod)
    assert (to_pod.device, to_pod.gateway, to_pod.error) == (f"p{1}", None, ""), to_pod
    remote = ask(other)
    assert remote.gateway == parse_addr("198.18.0.254")
    assert remote.source is not None
    assert format_addr(remote.source) == own
    assert ask(pod, other, remote.ifindex) == to_pod._replace(source=None)
    is_strict = node.run("sysctl -n net.ipv4.conf.all.rp_filter").strip() == "1"
    assert "rp_filter" in ask(pod, bench.two.ip, remote.ifindex).error or not is_strict
    assert ask(bench.one.ip6, bench.two.ip6, to_pod.ifindex).error == ""
    assert "no route" in ask("192.0.2.9").error
    for on in (0, 1):
        node.run(f"sysctl -qw net.ipv4.conf.all.forwarding={on} net.ipv6.conf.all.forwarding={on}")
        assert ("IP forwarding is off" in ask(pod, other, remote.ifindex).error) is not bool(on)


def test_a_client_without_a_route_sends_no_packet(bench: Bench):
    inspection = replace(bench.inspect(), socket_lb=SocketLb.OFF, packet_programs=True)
    to = FrontendAddress(*split(WEB), UDP)
    facts = NodeFacts(find_route, lambda *_: Route(error="no route"))
    seen = trace.build_trace(inspection, bench.client(bench.one), to, facts)
    assert (seen.seen_by, seen.verdict) == ("nothing", "pass")
    assert seen.steps[-1].why == "the client sends no packet: no route"

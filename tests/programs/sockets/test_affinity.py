# SPDX-License-Identifier: Apache-2.0
"""Which backend a connection gets: a random one (evenly: test_slots.py), or with affinity the client's last one.

The backends are addresses on each namespace's own loopback (see support/plane.py, pick()).
"""

import socket
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.model.desired import ServiceState
from kbpf.model.objects import Protocol
from tests.support.lab.lab import Node, Place
from tests.support.plane import (
    LOCAL,
    LOCAL6,
    Site,
    desired,
    flush,
    make_local,
    pick,
    picks,
    service,
    start_within,
    within,
)

WEB, WEB6, NODE_PORT, EXTERNAL = "10.96.0.1:53", "[fd00:96::1]:53", "{node}:30053", "192.0.2.1:53"
HOUR = 3600


@dataclass
class Bench:
    """A host and two pods as clients."""

    node: Node
    site: Site
    plane: BpfPlane
    host: Place
    host_pod: Place
    one: Place
    two: Place

    def serve(self, *services: ServiceState) -> None:
        """Programs exactly these; nothing is retired yet."""
        self.plane.apply(desired(*services, nodes=self.node.ip), None)

    def entries(self) -> list[tuple[bytes, int, int]]:
        """(client, kind of client, backend id) of each entry of the affinity map."""
        found = self.site.entries("affinity")
        return [(k[:16], k[20], struct.unpack_from("=QI", v)[1]) for k, v in found.items()]

    def age(self, seconds: float) -> None:
        """Makes all entries `seconds` older."""
        with self.site.pinned("affinity") as found:
            for key, value in list(found.items()):
                used, rest = struct.unpack_from("=Q", value)[0], value[8:]
                found.update(key, struct.pack("=Q", used - int(seconds * 1e9)) + rest)

    def count_reason(self, place: Place, to: str = WEB) -> Reason:
        """The reason that the programs count for one connection from there."""
        before = self.site.reasons()
        picks(place, to)
        (reason,) = self.site.reasons() - before
        return reason


@pytest.fixture(scope="module")
def whole(local_node: Node, shared_site: Site) -> Bench:
    node, one, two = local_node, local_node.pod("one"), local_node.pod("two")
    for pod in (one, two):
        make_local(pod.netns)
    return Bench(node, shared_site, shared_site.open(), node.host, node.host_network_pod("host pod"), one, two)


@pytest.fixture
def bench(whole: Bench) -> Bench:
    whole.serve()
    flush(whole.plane)
    assert whole.site.entries("affinity") == {}, "affinity is deleted with its Service"
    return whole


def web(*numbers: int, timeout: int = HOUR, **more: Any) -> ServiceState:
    """A UDP Service, so that connect() costs nothing; backends are LOCAL[number]."""
    to = " ".join(f"{LOCAL[n]}:1" for n in numbers)
    frontends = f"{WEB} NodePort=0.0.0.0:30053 ExternalIP={EXTERNAL}"
    return service("web", frontends, to, Protocol.UDP, affinity_timeout=timeout, **more)


def names(found: list[str]) -> set[int]:
    """The backends' numbers."""
    return {LOCAL.index(one) for one in found}


# ---- at random ---------------------------------------------------------------------------------


def test_new_ipv6_connections_spread(bench: Bench):
    to = " ".join(f"[{one}]:1" for one in LOCAL6[:3])
    bench.serve(service("web", WEB6, to, Protocol.UDP))
    assert min(Counter(picks(bench.host, WEB6, 300)).values()) > 30
    assert set(picks(bench.host, WEB6, 100)) == set(LOCAL6[:3])


# ---- the same as last time ---------------------------------------------------------------------


def test_ipv6_and_v4_mapped_clients_keep_their_backend(bench: Bench):
    to = " ".join(f"[{one}]:1" for one in LOCAL6[:9])
    bench.serve(web(*range(9)), service("web", WEB6, to, Protocol.UDP, affinity_timeout=HOUR))
    assert len(set(picks(bench.one, WEB6, 20))) == 1
    four, mapped = picks(bench.one, WEB, 20), picks(bench.one, "[::ffff:10.96.0.1]:53", 20)
    assert {f"::ffff:{one}" for one in four} == set(mapped), "one client, one Service, one family"
    assert len(set(mapped)) == 1


def test_each_client_has_its_own_affinity(bench: Bench):
    """Each pod is a client, and the host is one, with the pods in its network. The last backend of
    one does not affect another.
    """
    bench.serve(web(1))
    picks(bench.one, WEB)
    bench.serve(web(2))
    picks(bench.two, WEB)
    bench.serve(web(3))
    picks(bench.host, WEB)
    bench.serve(web(*range(20)))
    for place, backend in ((bench.one, 1), (bench.two, 2), (bench.host, 3), (bench.host_pod, 3)):
        assert names(picks(place, WEB, 10)) == {backend}
    entries = bench.entries()
    assert len({client for client, *_ in entries}) == len(entries) == 3
    assert {kind for _, kind, _ in entries} == {1}, "by network namespace"


def test_frontends_of_a_service_share_affinity(bench: Bench):
    bench.serve(web(1))
    picks(bench.one, WEB)
    bench.serve(web(*range(20)))
    for to in (EXTERNAL, NODE_PORT.format(node=bench.node.ip), WEB):
        assert names(picks(bench.one, to, 10)) == {1}


def test_services_do_not_share_affinity(bench: Bench):
    """Even if the backends are the same."""
    bench.serve(web(1))
    picks(bench.one, WEB)
    to = " ".join(f"{LOCAL[n]}:1" for n in range(20))
    other = service("other", "10.96.0.2:53", to, Protocol.UDP, affinity_timeout=HOUR)
    bench.serve(web(*range(20)), other)
    assert bench.count_reason(bench.one, "10.96.0.2:53") is Reason.TRANSLATED
    assert bench.count_reason(bench.one) is Reason.TRANSLATED_BY_AFFINITY


def test_affinity_ends_after_its_timeout(bench: Bench):
    bench.serve(web(1, 2, 3, timeout=60))
    picks(bench.one, WEB)
    bench.age(40)
    assert bench.count_reason(bench.one) is Reason.TRANSLATED_BY_AFFINITY
    bench.age(40)
    assert bench.count_reason(bench.one) is Reason.TRANSLATED_BY_AFFINITY, "the last connection renewed it"
    bench.age(60)
    assert bench.count_reason(bench.one) is Reason.TRANSLATED


def test_changed_timeout_applies_at_once(bench: Bench):
    bench.serve(web(1, 2, 3, timeout=HOUR))
    picks(bench.one, WEB)
    bench.age(60)
    bench.serve(web(1, 2, 3, timeout=10))
    assert bench.count_reason(bench.one) is Reason.TRANSLATED


def test_client_moves_when_its_backend_leaves_the_set(bench: Bench):
    bench.serve(web(1))
    picks(bench.one, WEB)
    bench.serve(web(1, 2, 3))
    assert names(picks(bench.one, WEB, 10)) == {1}, "added backends do not matter"
    bench.serve(web(2, 3, serving=f"{LOCAL[1]}:1 {LOCAL[2]}:1 {LOCAL[3]}:1"))
    moved = names(picks(bench.one, WEB, 10))
    assert len(moved) == 1
    assert moved < {2, 3}, "though the first still serves, it is not in the list"
    bench.serve(web(1, *moved))
    assert names(picks(bench.one, WEB, 10)) == moved, "and it does not move back"


def test_affinity_applies_within_the_set_in_use(bench: Bench):
    """With internal Local the ClusterIP uses the local set, an ExternalIP the cluster set."""
    near = web(1, 2, 3, local=f"{LOCAL[3]}:1", internal_local=True)
    bench.serve(web(1))
    picks(bench.one, EXTERNAL)
    bench.serve(near)
    assert names(picks(bench.one, EXTERNAL, 5)) == {1}
    assert names(picks(bench.one, WEB, 5)) == {3}
    assert names(picks(bench.one, EXTERNAL, 5)) == {3}, "it is in the cluster set as well"


def test_affinity_switched_off_spreads_and_is_deleted(bench: Bench):
    other = service("other", "10.96.0.2:53", f"{LOCAL[1]}:1", Protocol.UDP, affinity_timeout=HOUR)
    bench.serve(web(1, 2, 3), other)
    picks(bench.one, WEB, 3)
    picks(bench.one, "10.96.0.2:53", 3)
    assert len(bench.entries()) == 2
    bench.serve(web(1, 2, 3, timeout=0), other)
    assert names(picks(bench.one, WEB, 100)) == {1, 2, 3}
    flush(bench.plane)
    assert len(bench.entries()) == 1, "the other Service's stays"
    assert len(bench.site.entries("set_members")) == 1


def test_datagrams_of_new_sockets_keep_the_backend(bench: Bench):
    bench.serve(web(1, 2, 3))
    picks(bench.one, WEB)
    before = bench.site.reasons()

    def send() -> None:
        for _ in range(20):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.sendto(b"x", ("10.96.0.1", 53))

    within(bench.one, send)
    assert bench.site.reasons() - before == {Reason.TRANSLATED_BY_AFFINITY: 20}


def test_affinity_holds_across_two_cpus(bench: Bench):
    """One CPU may read a time that the other wrote and that is a moment later than its
    own `now`.
    """
    bench.serve(service("web", WEB, " ".join(f"{a}:1" for a in LOCAL[:8]), Protocol.UDP, affinity_timeout=HOUR))
    host, _, port = WEB.rpartition(":")
    first = set(picks(bench.one, WEB, 1))
    waiting = [start_within(bench.one, lambda: {pick(host, int(port)) for _ in range(20_000)}, cpu) for cpu in range(2)]
    assert [result() for result in waiting] == [first, first]

# SPDX-License-Identifier: Apache-2.0
"""Weights and Maglev in the programs: which backend a connection gets, and that all nodes agree.

Sockets choose a slot at random, so their shares are counted. Packets of a Maglev Service choose by
hash, so each packet's backend can be predicted, by a table and a hash that are computed here.
"""

import itertools
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.layout import Role, ServiceValue
from kbpf.model.desired import Backend, FrontendAddress, ServiceState
from kbpf.model.objects import Algorithm, Protocol
from kbpf.views import trace
from kbpf.views.trace_page import Client, Origin
from tests.programs.packets.path.single_packets import Path_, end, masquerading, parsed, serving_node
from tests.support import oracle
from tests.support.lab.lab import Node
from tests.support.packets.murmur import murmur3
from tests.support.packets.packets import sctp, tcp, udp
from tests.support.plane import (
    LOCAL,
    Site,
    desired,
    flush,
    is_spread,
    picks,
    service,
    split,
)
from tests.support.table import each_line

MAGLEV = Algorithm.MAGLEV
UDP, TCP, SCTP = Protocol.UDP, Protocol.TCP, Protocol.SCTP

# ---- sockets -----------------------------------------------------------------------------------

WEB = "10.96.0.1:53"


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("weights", [(), (1, 2, 3)])
def test_sockets_spread_by_weight(local_node: Node, shared_site: Site, algorithm: Algorithm, weights: tuple[int, ...]):
    """And `kbpf trace` shows these shares."""
    site = shared_site
    to = " ".join(f"{one}:1" for one in LOCAL[:3])
    state = service("web", WEB, to, UDP, algorithm=algorithm, cluster_weights=weights)
    site.open().apply(desired(state), None)
    seen = Counter(picks(local_node.host, WEB, 4000))
    each = weights or (1, 1, 1)
    expected = {one: 4000 * w / sum(each) for one, w in zip(LOCAL, each, strict=False)}
    # A Maglev table is off by one slot at most: well below the noise of 4000 picks.
    assert is_spread(seen, expected), seen
    target = FrontendAddress(*split(WEB), UDP)
    shown = trace.build_trace(snapshot.read(site.pins, trace.NEEDS), Client(Origin.HOST), target)
    shares = {candidate.backend: candidate.share for candidate in shown.candidates}
    assert shares == pytest.approx({f"{one}:1": count / 4000 for one, count in expected.items()}, abs=0.005)


# ---- packets -----------------------------------------------------------------------------------

SEED = 0x6B627066
VIP = {4: "192.0.2.1", 6: "2001:db8::1"}
PODS = {4: "10.244.1.{}", 6: "fd00:10:244:1::{:x}"}
BUILD = {TCP: lambda a, b: tcp(a, b, flags="S", mss=1460), UDP: lambda a, b: udp(a, b, b"question"), SCTP: sctp}


def web(v: int, numbers: Sequence[int], protocol: Protocol = TCP, port: int = 8080, **more: Any) -> ServiceState:
    """A VIP on port 80 with Maglev."""
    to = " ".join(end(PODS[v].format(n), port) for n in numbers)
    at = f"LoadBalancer={end(VIP[v], 80)}"
    name = f"web{v}-{protocol.name.lower()}"
    return service(name, at, to, protocol, **{"algorithm": MAGLEV, **more})


def serve(path: Path_, *services: ServiceState) -> None:
    """Programs exactly these and deletes all flows and affinities."""
    path.inside(lambda: path.plane.apply(masquerading(desired(*services)), None))
    flush(path.plane)
    forget(path)
    path.set_loopback_role(Role.POD)


def forget(path: Path_) -> None:
    """Deletes all flows and affinities."""
    path.site.clear("flows", "affinity")


def chosen(path: Path_, client: str, to: str, protocol: Protocol = TCP) -> str:
    """The backend of a new connection's first packet."""
    _, packet = path.ingress(BUILD[protocol](client, to))
    found = parsed(packet).destination
    assert found != to, "not translated"
    return found


@pytest.fixture(scope="module")
def one(artifact_cache: Path) -> Iterator[Path_]:
    with serving_node(artifact_cache, "a", desired()) as made:
        yield made


@pytest.fixture(scope="module")
def other(artifact_cache: Path) -> Iterator[Path_]:
    """A node that has served other Services before, so that its ids differ from the first one's."""
    with serving_node(artifact_cache, "b", desired()) as made:
        for count in (3, 5):
            serve(made, web(4, range(90, 90 + count)), web(6, range(90, 90 + count)))
        yield made


def packed(text: str) -> bytes:
    """The address in 16 bytes, IPv4 as v4-mapped."""
    found = ip_address(text)
    return bytes(10) + b"\xff\xff" + found.packed if found.version == 4 else found.packed


def expected(state: ServiceState, client: str, port: int, size: int) -> str:
    """The backend by a table and a hash that do not come from the code under test."""
    (frontend,) = state.frontends
    named = [(one.address, one.port, int(one.protocol)) for one in state.cluster]
    slots = oracle.maglev(named, state.cluster_weights, size)
    said = packed(client)
    if not state.affinity_timeout:
        flow = struct.pack("!HBxHBx", port, int(frontend.at.protocol), frontend.at.port, int(frontend.at.protocol))
        said += flow[:4] + bytes(frontend.at.address) + flow[4:]
    backend: Backend = state.cluster[slots[murmur3(said, SEED) % size]]
    return str(backend)


CLIENTS = {
    4: ["198.51.100.7", "198.51.100.8", "203.0.113.255", "100.64.0.1"],
    6: ["2001:db8:9::7", "2001:db8:9::8", "fd00::1", "2001:db8:ffff:1:2:3:4:5"],
}
FLOWS = [(n, port) for n in range(4) for port in (1, 1024, 33000, 40001, 40002, 65535)]


@each_line(
    "v, protocol, count, size, weights, affinity",
    """
4 | TCP  | 2  | 251
6 | TCP  | 11 | 1021
4 | SCTP | 7  | 251
6 | UDP  | 7  | 251
4 | TCP  | 4  | 1021 | 1 5 2 2
6 | TCP  | 4  | 1021 | 1 5 2 2
4 | TCP  | 7  | 251  |         | 60
6 | TCP  | 7  | 251  |         | 60
""",
    v=int,
    protocol=Protocol,
    count=int,
    size=int,
    affinity=lambda cell: int(cell or 0),
)
def test_maglev_backend_of_a_packet_follows_from_its_flow(
    one: Path_, other: Path_, v, protocol, count, size, weights, affinity
):
    """A set of backends with Maglev: how many, their weights, the seconds of affinity, and the size of its table. On
    both nodes, whose ids differ. With affinity it follows from the client's address alone.
    """
    port = 80 if protocol is SCTP else 8080
    weights = tuple(map(int, weights.split()))
    state = web(
        v,
        range(1, count + 1),
        protocol,
        port=port,
        cluster_weights=weights,
        affinity_timeout=affinity,
    )
    ids, seen = [], set()
    for node in (one, other):
        serve(node, state)
        (value,) = [ServiceValue.unpack(raw) for raw in node.site.entries("services").values()]
        ids.append((value.cluster_set, *sorted(node.site.entries("backends"))))
        for n, number in FLOWS:
            if affinity and node is other:
                forget(node)
            client = CLIENTS[v][n]
            found = chosen(node, end(client, number), end(VIP[v], 80), protocol)
            assert found == expected(state, client, number, size)
            seen.add(found)
    assert len(seen) > 1
    assert ids[0] != ids[1]


def test_maglev_keeps_flows_of_remaining_backends(one: Path_):
    flows = [(client, port) for client in CLIENTS[6] for port in range(20_000, 20_100)]

    def all_chosen(numbers: Sequence[int]) -> list[str]:
        serve(one, web(6, numbers))
        return [chosen(one, end(client, port), end(VIP[6], 80)) for client, port in flows]

    before = all_chosen(range(1, 9))
    after = all_chosen([1, 2, 3, 5, 6, 7, 8])
    gone = end(PODS[6].format(4), 8080)
    assert gone not in after
    moved = sum(a not in (b, gone) for a, b in zip(before, after, strict=True))
    assert moved <= 0.15 * len(flows), "with random choices six of seven would move"
    assert 0.05 * len(flows) < before.count(gone) < 0.25 * len(flows)


def test_random_service_spreads_one_flow_over_backends(one: Path_):
    """The same flow, deleted and chosen again each time, does not always get the same backend."""
    serve(one, web(4, range(1, 9), algorithm=Algorithm.RANDOM))
    seen = set()
    for _ in itertools.repeat(None, 100):
        forget(one)
        seen.add(chosen(one, "198.51.100.7:4000", end(VIP[4], 80)))
    assert len(seen) > 3

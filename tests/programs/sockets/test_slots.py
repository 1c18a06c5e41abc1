# SPDX-License-Identifier: Apache-2.0
"""Weights and Maglev in the programs: which backend a connection gets, and that all nodes agree.

Sockets choose a slot at random, so their shares are counted. Packets of a Maglev Service choose by
hash, so each packet's backend can be predicted, by a table and a hash that are computed here.
"""

import contextlib
import itertools
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.layout import DEVICE, U32, DeviceFlag, Role, ServiceValue
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.system import netns
from kbpf.model.address import parse_addr
from kbpf.model.desired import Backend, FrontendAddress, ServiceState
from kbpf.model.objects import Algorithm, Protocol
from kbpf.views import trace
from kbpf.views.trace_page import Client, Origin
from tests.support import oracle
from tests.support.lab.lab import Node
from tests.support.packets.murmur import murmur3
from tests.support.packets.packets import frame, sctp, tcp, udp
from tests.support.packets.parse import parse
from tests.support.packets.test_run import TC_ACT_SHOT, run
from tests.support.plane import (
    LOCAL,
    Site,
    desired,
    flush,
    is_spread,
    make_local,
    network,
    picks,
    service,
    sites,
    split,
)

MAGLEV = Algorithm.MAGLEV
UDP, TCP, SCTP = Protocol.UDP, Protocol.TCP, Protocol.SCTP

# ---- sockets -----------------------------------------------------------------------------------

WEB = "10.96.0.1:53"


@pytest.fixture(scope="module")
def bench(node: Node, artifact_cache: Path) -> Iterator[tuple[Node, Site]]:
    """A host where the LOCAL addresses can be reached."""
    make_local(node.netns)
    with sites(artifact_cache) as make:
        yield node, make(cgroup=node.cgroup, node=node.netns)


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("weights", [(), (1, 2, 3)])
def test_sockets_spread_by_weight(bench: tuple[Node, Site], algorithm: Algorithm, weights: tuple[int, ...]):
    """And `kbpf trace` shows these shares."""
    node, site = bench
    to = " ".join(f"{one}:1" for one in LOCAL[:3])
    state = service("web", WEB, to, UDP, algorithm=algorithm, cluster_weights=weights)
    site.open().apply(desired(state), None)
    seen = Counter(picks(node.host, WEB, 4000))
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
both = pytest.mark.parametrize("v", [4, 6], ids=["v4", "v6"])
SIZES = {2: 251, 7: 251, 11: 1021}


def end(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def web(v: int, numbers: Sequence[int], protocol: Protocol = TCP, port: int = 8080, **more: Any) -> ServiceState:
    """A VIP on port 80 with Maglev."""
    to = " ".join(end(PODS[v].format(n), port) for n in numbers)
    at = f"LoadBalancer={end(VIP[v], 80)}"
    name = f"web{v}-{protocol.name.lower()}"
    return service(name, at, to, protocol, **{"algorithm": MAGLEV, **more})


@dataclass
class Path_:
    """The programs of one node."""

    site: Site
    plane: BpfPlane
    where: str
    ingress: Program

    def serve(self, *services: ServiceState) -> None:
        """Programs exactly these and deletes all flows and affinities."""
        own = tuple(parse_addr(one) for one in ("198.18.0.1", "fd00:198:18::1"))
        state = msgspec.structs.replace(desired(*services), masquerade_addresses=own)
        netns.run_in(Path("/run/netns") / self.where, lambda: self.plane.apply(state, None))
        flush(self.plane)
        self.forget()
        with self.site.pinned("devices") as devices:
            devices.update(U32.pack(1), DEVICE.pack(Role.POD, 14, DeviceFlag.LOCAL, bytes(6), bytes(16), bytes(16), 0))

    def forget(self) -> None:
        """Deletes all flows and affinities."""
        for name in ("flows", "affinity"):
            with self.site.pinned(name) as found:
                for key in [key for key, _ in found.items()]:
                    found.delete(key)

    def chosen(self, client: str, to: str, protocol: Protocol = TCP) -> str:
        """The backend of a new connection's first packet."""
        done = run(self.ingress, frame(BUILD[protocol](client, to)))
        assert done.retval != TC_ACT_SHOT
        found = parse(done.packet_out[14:], l2=False).destination
        assert found != to, "not translated"
        return found


@contextlib.contextmanager
def path(cache: Path, name: str) -> Iterator[Path_]:
    """A node in its own network namespace."""
    with network(f"kbp{name}") as where, sites(cache) as make:
        site = make(node=where)
        plane = site.open(packet_path=True)
        netns.run_in(Path("/run/netns") / where, lambda: plane.apply(desired(), None))
        with Program.open(next(site.pins.glob("programs-tc-*")) / "tc_ingress") as program:
            yield Path_(site, plane, where, program)


@pytest.fixture(scope="module")
def one(artifact_cache: Path) -> Iterator[Path_]:
    with path(artifact_cache, "a") as made:
        yield made


@pytest.fixture(scope="module")
def other(artifact_cache: Path) -> Iterator[Path_]:
    """A node that has served other Services before, so that its ids differ from the first one's."""
    with path(artifact_cache, "b") as made:
        for count in (3, 5):
            made.serve(web(4, range(90, 90 + count)), web(6, range(90, 90 + count)))
        yield made


def packed(text: str) -> bytes:
    """The address in 16 bytes, IPv4 as v4-mapped."""
    found = ip_address(text)
    return bytes(10) + b"\xff\xff" + found.packed if found.version == 4 else found.packed


def expected(state: ServiceState, client: str, port: int, size: int) -> str:
    """The backend by a table and a hash that do not come from the code under test."""
    (frontend,) = state.frontends
    named = [(one.address, one.port, int(one.protocol)) for one in state.cluster]
    table = oracle.maglev(named, state.cluster_weights, size)
    said = packed(client)
    if not state.affinity_timeout:
        flow = struct.pack("!HBxHBx", port, int(frontend.at.protocol), frontend.at.port, int(frontend.at.protocol))
        said += flow[:4] + bytes(frontend.at.address) + flow[4:]
    chosen: Backend = state.cluster[table[murmur3(said, SEED) % size]]
    return str(chosen)


CLIENTS = {
    4: ["198.51.100.7", "198.51.100.8", "203.0.113.255", "100.64.0.1"],
    6: ["2001:db8:9::7", "2001:db8:9::8", "fd00::1", "2001:db8:ffff:1:2:3:4:5"],
}
FLOWS = [(n, port) for n in range(4) for port in (1, 1024, 33000, 40001, 40002, 65535)]


@pytest.mark.parametrize(("v", "protocol", "count"), [(4, TCP, 2), (6, TCP, 11), (4, SCTP, 7), (6, UDP, 7)])
def test_maglev_backend_of_a_packet_follows_from_its_flow(one: Path_, v: int, protocol: Protocol, count: int):
    state = web(v, range(1, count + 1), protocol, port=80 if protocol is SCTP else 8080)
    one.serve(state)
    seen = set()
    for n, port in FLOWS:
        client = CLIENTS[v][n]
        found = one.chosen(end(client, port), end(VIP[v], 80), protocol)
        assert found == expected(state, client, port, SIZES[count])
        seen.add(found)
    assert len(seen) > 1


@both
def test_weighted_maglev_uses_the_larger_table(one: Path_, v: int):
    state = web(v, range(1, 5), cluster_weights=(1, 5, 2, 2))
    one.serve(state)
    for n, port in FLOWS:
        found = one.chosen(end(CLIENTS[v][n], port), end(VIP[v], 80))
        assert found == expected(state, CLIENTS[v][n], port, 1021)


@both
def test_maglev_with_affinity_hashes_the_client_address_only(one: Path_, other: Path_, v: int):
    """All nodes choose the same backend for a client, whatever its port and the frontend."""
    plain = web(v, range(1, 8), affinity_timeout=60)
    for node in (one, other):
        node.serve(plain)
    chosen = {}
    for n, port in FLOWS:
        client = CLIENTS[v][n]
        first = one.chosen(end(client, port), end(VIP[v], 80))
        assert first == expected(plain, client, port, 251)
        assert chosen.setdefault(client, first) == first
        other.forget()
        assert other.chosen(end(client, port), end(VIP[v], 80)) == first
    assert len(set(chosen.values())) > 1


@both
def test_two_nodes_choose_the_same_maglev_backend(one: Path_, other: Path_, v: int):
    state = web(v, range(1, 8))
    ids = []
    for node in (one, other):
        node.serve(state)
        (value,) = [ServiceValue.unpack(raw) for raw in node.site.entries("services").values()]
        ids.append((value.cluster_set, *sorted(node.site.entries("backends"))))
    assert ids[0] != ids[1]
    found = [[node.chosen(end(CLIENTS[v][n], port), end(VIP[v], 80)) for n, port in FLOWS] for node in (one, other)]
    assert found[0] == found[1]


@both
def test_maglev_keeps_flows_of_remaining_backends(one: Path_, v: int):
    flows = [(client, port) for client in CLIENTS[v] for port in range(20_000, 20_100)]

    def all_chosen(numbers: Sequence[int]) -> list[str]:
        one.serve(web(v, numbers))
        return [one.chosen(end(client, port), end(VIP[v], 80)) for client, port in flows]

    before = all_chosen(range(1, 9))
    after = all_chosen([1, 2, 3, 5, 6, 7, 8])
    gone = end(PODS[v].format(4), 8080)
    assert gone not in after
    moved = sum(a not in (b, gone) for a, b in zip(before, after, strict=True))
    assert moved <= 0.15 * len(flows), "with random choices six of seven would move"
    assert 0.05 * len(flows) < before.count(gone) < 0.25 * len(flows)


def test_random_service_spreads_one_flow_over_backends(one: Path_):
    """The same flow, deleted and chosen again each time, does not always get the same backend."""
    one.serve(web(4, range(1, 9), algorithm=Algorithm.RANDOM))
    seen = set()
    for _ in itertools.repeat(None, 100):
        one.forget()
        seen.add(one.chosen("198.51.100.7:4000", end(VIP[4], 80)))
    assert len(seen) > 3

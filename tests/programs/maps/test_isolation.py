# SPDX-License-Identifier: Apache-2.0
"""One pod or client fills a map that it shares with others: the others keep their entries.

A row names a map and how it is filled: by one pod's sockets, or by packets of one client. Ten
victims have a TCP connection, a connected UDP socket, an unconnected one and session affinity
before the map is filled, and must still have them afterwards. docs/limits.md lists the same maps.
"""

import contextlib
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.affinity_shares import AffinityShares, unpack_sharers
from kbpf.dataplane.bpf.maps.layout import (
    EVENT,
    FAILURE,
    FAILURES_PER_CLIENT,
    FLOW,
    FLOWS_PER_SOCKET,
    MAPS,
    REFUSAL_LIMIT,
    U32,
    DeviceFlag,
    NodeFlag,
    Reason,
    RefusalLimit,
    Role,
)
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.programs.hook_config import MIN_AFFINITY_SHARERS
from kbpf.model.address import parse_addr
from kbpf.model.config import MapSizes
from kbpf.model.desired import ServiceState
from kbpf.model.objects import Protocol
from tests.programs.packets.path.single_packets import Path_, host_of, masquerading, serving_node
from tests.support.features import lacking, needs
from tests.support.lab.lab import Node, Place, until
from tests.support.packets.packets import MAC_B, fragments, frame, tcp, udp
from tests.support.packets.parse import parse
from tests.support.packets.test_run import run
from tests.support.plane import Site, desired, service, start_within
from tests.support.table import each_row, table

VICTIMS = 10
AFFINITY = 1024
STICKIES = 2 * AFFINITY
SHARE = AFFINITY // MIN_AFFINITY_SHARERS
CONNECTED, UNCONNECTED = 12_000, 1_500
"""More sockets than the shared maps had room for that socket storage replaced (4,096 in tests), and
9,000 flows of unconnected ones in total.
"""
WEB, DNS, STICKY, EVIL = "10.96.0.1", "10.96.0.2", "10.96.0.3", "10.96.9.1"


@dataclass
class Bench:
    """`victims` and `attacker` are clients, `one` and `two` are servers."""

    site: Site
    plane: BpfPlane
    node: Node
    attacker: Place
    victims: list[Place]
    one: Place
    two: Place

    def serve(self, dns: str) -> None:
        """Programs all Services. `dns`: the address of that Service's backend."""
        both = f"{self.one.ip}:8080 {self.two.ip}:8080"
        more = [service(f"evil{i}", f"10.96.9.{i + 1}:53", both, Protocol.UDP) for i in range(FLOWS_PER_SOCKET)]
        services: list[ServiceState] = [
            service("web", f"{WEB}:80", f"{self.one.ip}:8080"),
            service("dns", f"{DNS}:53", f"{dns}:5353", Protocol.UDP),
            service("sticky", f"{STICKY}:80", both, affinity_timeout=10_800),
            *more,
            *(
                service(f"sticky{i}", f"{sticky_address(i)}:53", both, Protocol.UDP, affinity_timeout=10_800)
                for i in range(STICKIES)
            ),
        ]
        self.plane.apply(desired(*services, nodes=self.node.ip), None)
        until("sockets of deleted backends are destroyed", self._is_done)

    def _is_done(self) -> bool:
        now = time.monotonic()
        due = self.plane.tick(now).due
        return due is None or due > now


@pytest.fixture(scope="module")
def whole(node: Node, shared_site: Site) -> Bench:
    names = ("attacker", "one", "two", *(f"v{i}" for i in range(VICTIMS)))
    pods = {name: node.pod(name) for name in names}
    for name in ("one", "two"):
        # The attacker's datagrams fill the receive buffer of 8080, and the kernel drops what
        # arrives while it is full. Those of the victims have a socket of their own.
        pods[name].serve(8080, udp=(8080, 5353))
    plane = shared_site.open(MapSizes(affinity=AFFINITY, connections=4096))
    victims = [pods[f"v{i}"] for i in range(VICTIMS)]
    return Bench(shared_site, plane, node, pods["attacker"], victims, pods["one"], pods["two"])


@pytest.fixture
def bench(whole: Bench) -> Bench:
    """No client has affinity, and `one` serves."""
    whole.serve(whole.one.ip)
    whole.site.clear("affinity", "affinity_shares")
    return whole


def open_files() -> None:
    """Raises the limit of open files to the hard limit, as containers have by default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connected() -> contextlib.ExitStack:
    """Sockets connected to a Service."""
    held = contextlib.ExitStack()
    for _ in range(CONNECTED):
        held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)).connect((EVIL, 53))
    return held


def unconnected() -> contextlib.ExitStack:
    """Unconnected sockets that have sent to many Services."""
    held = contextlib.ExitStack()
    for _ in range(UNCONNECTED):
        asks = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        for number in range(FLOWS_PER_SOCKET):
            asks.sendto(b"", (f"10.96.9.{number + 1}", 53))
    return held


def sticky() -> contextlib.ExitStack:
    """Connects to more Services with affinity than the map has room for."""
    for number in range(STICKIES):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
            asks.connect((sticky_address(number), 53))
    return contextlib.ExitStack()


def sticky_address(number: int) -> str:
    """The address of a Service with affinity."""
    return f"10.98.{number // 250}.{number % 250 + 1}"


FILLS = [
    pytest.param(connected, marks=needs("socket_iterator"), id="sock_peers"),
    pytest.param(unconnected, marks=needs("socket_iterator"), id="udp_flows"),
    pytest.param(sticky, id="affinity"),
]
"""How each of these maps is filled."""


@contextlib.contextmanager
def filled(bench: Bench, fill: Callable[[], contextlib.ExitStack]) -> Iterator[None]:
    """The map is filled within the context."""
    here, there = socket.socketpair()

    def fill_and_wait() -> None:
        open_files()
        here.close()
        with fill():
            there.send(b"-")
            there.recv(1)

    with here, there:
        done = start_within(bench.attacker, fill_and_wait)
        there.close()
        assert here.recv(1), "the map could not be filled"
        yield
    done()


def asked(place: Place, to: str, **how: Any) -> str:
    """The server that replies; the client must see the Service's address as the source."""
    answer = place.udp(to, 53, **how)
    assert answer["peer"] == [to, 53], "the reply comes from the Service"
    return str(answer["name"])


@pytest.mark.parametrize("fill", FILLS)
def test_other_pods_keep_their_entries(bench: Bench, fill: Callable[[], contextlib.ExitStack]):
    stuck = {}
    for place in bench.victims:
        assert place.tcp(WEB, 80, keep="tcp")["name"] == "one"
        assert asked(place, DNS, keep="connected", connected=True) == "one"
        assert asked(place, DNS, keep="loose") == "one"
        stuck[place.name] = place.tcp(STICKY, 80)["name"]
    with filled(bench, fill):
        for place in bench.victims:
            answer = place.ask("talk", keep="tcp")
            assert answer["name"] == "one"
            assert asked(place, DNS, keep="loose") == "one"
            assert {place.tcp(STICKY, 80)["name"] for _ in range(5)} == {stuck[place.name]}
        bench.serve(bench.two.ip)
        for place in bench.victims:
            if not lacking("socket_iterator"):
                assert "error" in place.ask("talk", keep="connected"), "destroyed with its backend"
            assert asked(place, DNS, keep="loose") == "two"
            for keep in ("tcp", "connected", "loose"):
                place.ask("drop", keep=keep)


def test_pod_is_limited_to_its_share_of_affinity(bench: Bench):
    before = bench.site.reasons()
    with filled(bench, sticky):
        pass
    assert len(bench.site.entries("affinity")) == SHARE
    assert (bench.site.reasons() - before)[Reason.NOT_RECORDED] == STICKIES - SHARE


VIP = {4: "198.51.100.9:53", 6: "[2001:db8::1]:53"}
"""Port 530 has no endpoints, and clients of port 531 are masqueraded."""
SNAT_PORTS = (40_000, 41_023)
POD = {4: "10.244.1.2:8080", 6: "[fd00:10:244:1::2]:8080"}


def send(path: Path_, packets: Iterable[bytes], name: str = "tc_ingress") -> list[bytes]:
    """Runs this program on each packet; returns the packets afterwards."""
    frames = [frame(packet, to=MAC_B) for packet in packets]

    def run_all() -> list[bytes]:
        usual = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(usual)})  # recent entries of another CPU are protected
        try:
            return [run(path.programs[name], each).packet_out[14:] for each in frames]
        finally:
            os.sched_setaffinity(0, usual)

    return path.inside(run_all)


def dial(path: Path_, clients: Iterable[str]) -> None:
    """Sends a SYN from each of these addresses."""
    send(path, (tcp(f"[{client}]:4000", VIP[6], flags="S") for client in clients))


@pytest.fixture(scope="module")
def served(artifact_cache: Path) -> Iterator[Path_]:
    """The packet path of a device in the node's network namespace, which is an uplink."""
    services = [
        made
        for v in (4, 6)
        for protocol in (Protocol.TCP, Protocol.UDP)
        for made in (
            service(
                f"{protocol}{v}",
                f"LoadBalancer={VIP[v]}",
                POD[v],
                protocol,
                local=POD[v],
                external_local=True,
                affinity_timeout=10_800 * (protocol == Protocol.TCP),
            ),
            service(f"none-{protocol}{v}", f"LoadBalancer={VIP[v]}0", "", protocol),
            service(f"masked-{protocol}{v}", f"LoadBalancer={VIP[v]}1", POD[v], protocol),
        )
    ]
    sizes = MapSizes(affinity=AFFINITY, connections=16_384)  # room for all flows of a flood
    state = masquerading(desired(*services))
    with serving_node(artifact_cache, "i", state, sizes=sizes, masquerade_ports=SNAT_PORTS) as made:
        yield made


FILLED = ("affinity", "affinity_shares", "failures", "flows", "foreign_flows", "fragments", "refused_peers")


@pytest.fixture
def ingress(served: Path_) -> Iterator[Path_]:
    """No client has sent anything yet."""
    served.site.clear(*FILLED)
    served.site.drain_queue()
    served.site.put("flow_count", bytes(4), bytes(8))
    served.node(NodeFlag(0), *SNAT_PORTS)
    served.set_loopback_role(Role.HOST)
    with served.site.restored("refusal_limits"):
        yield served


def test_client_network_is_limited_to_its_share_of_affinity(ingress: Path_):
    """An IPv6 host has 2^64 addresses."""
    victims = [f"2001:db8:{number:x}::1" for number in range(1, VICTIMS + 1)]
    dial(ingress, victims)
    known = ingress.site.entries("affinity").keys()
    assert len(known) == VICTIMS
    dial(ingress, (f"2001:db8:bad::{number:x}" for number in range(1, 2 * AFFINITY)))
    assert known <= ingress.site.entries("affinity").keys()
    assert len(ingress.site.entries("affinity")) == VICTIMS + SHARE
    dial(ingress, ["2001:db8:99::1"])
    assert len(ingress.site.entries("affinity")) == VICTIMS + SHARE + 1, "others still have room"


def test_repeated_client_counts_once_in_its_share(ingress: Path_):
    before = ingress.site.reasons()
    send(ingress, (tcp(f"[2001:db8:7::1]:{4000 + n}", VIP[6], flags="S") for n in range(SHARE + 3)))
    (held,) = ingress.site.entries("affinity_shares").values()
    assert U32.unpack(held) == (1,)
    assert (ingress.site.reasons() - before)[Reason.NOT_RECORDED] == 0


def test_evicted_shares_are_counted_again(ingress: Path_):
    """The count of an evicted share starts at 1 again, until the agent counts the entries."""
    dial(ingress, (f"2001:db8:5::{number:x}" for number in range(1, 11)))
    (sharer,) = ingress.site.entries("affinity_shares")
    syns = [tcp(f"203.0.{n >> 8}.{n & 255}:4000", VIP[4], flags="S") for n in range(4 * AFFINITY)]
    translated = send(ingress, syns)
    assert {parse(packet, l2=False).ip.destination for packet in translated} == {host_of(POD[4])}
    site, maps = ingress.site, ("affinity", "affinity_shares")
    dial(ingress, (f"2001:db8:5:0:1::{number:x}" for number in range(1, 11)))
    with site.pinned(maps[0]) as affinity, site.pinned(maps[1]) as shares:
        shares.delete(sharer)  # the kernel evicts it only in a far longer flood
        dial(ingress, ["2001:db8:5:0:2::1"])
        assert U32.unpack(shares.lookup(sharer) or b"")[0] == 1
        held: Any = dict(zip(maps, (affinity, shares), strict=True))
        counting = AffinityShares(lambda: held, dict)
        counting.advance(0, float("inf"))
        assert counting._cursor is None, "all entries are counted in one part"
    entries = site.entries("affinity")
    wanted = Counter(unpack_sharers(b"".join(entries), b"".join(entries.values())))
    counted = {key: U32.unpack(raw)[0] for key, raw in site.entries("affinity_shares").items()}
    assert counted[sharer] >= 11
    assert counted == {key: wanted[key] for key in counted}


class Flood(NamedTuple):
    """A client (`attacker`, by number) that fills a map of the packet path, and victims (by number)
    whose packets arrive on an uplink.
    """

    name: str
    v: int
    victim: str
    attacker: str
    role: Role = Role.HOST
    flags: DeviceFlag = DeviceFlag(0)

    def send_victims(self, path: Path_) -> None:
        """What arrives next is of the victims."""
        path.set_loopback_role(Role.POD if self.victim.startswith("[fd") else Role.HOST, DeviceFlag(0))


FLOODS = table(
    Flood,
    """
an IPv4 address                                      | 4 | 192.0.2.{}            | 203.0.113.1
an IPv6 network                                      | 6 | [2001:db8:{:x}::1]    | [2001:db8:bad::{:x}]
a pod behind a bridge, victims in its IPv6 network   | 6 | [fd00:10:244:2::{:x}] | [fd00:10:244:2::bad]   | POD
a pod with its own device that forges IPv4 addresses | 4 | 192.0.2.{}            | {}                     | POD | PEER
a pod with its own device that forges IPv6 addresses | 6 | [2001:db8:{:x}::1]    | [2001:db8:bad:{:x}::1] | POD | PEER
""",
)


FLOOD_SIZES = {name: MAPS[name].entries + 2_000 for name in ("fragments", "foreign_flows")}


def flooding(row: Flood, number: int) -> str:
    """An address of the attacker."""
    forged = f"203.{number >> 16}.{number >> 8 & 255}.{number & 255}" if row.v == 4 else number
    return row.attacker.format(forged)


@each_row(FLOODS)
def test_first_fragments_of_one_client_evict_no_others(ingress: Path_, row: Flood):
    """Later fragments of the victims' datagrams arrive after the flood and are translated."""

    def pieces(client: str, number: int) -> list[bytes]:
        more = {"ip_id": number % 65_536} if row.v == 4 else {}
        whole = udp(f"{client}:4000", VIP[row.v], bytes(1500), **more)
        return fragments(whole, 1280, id=number)

    row.send_victims(ingress)
    victims = [pieces(row.victim.format(n), n) for n in range(1, VICTIMS + 1)]
    send(ingress, (first for first, _ in victims))
    ingress.set_loopback_role(row.role, row.flags)
    send(ingress, (pieces(flooding(row, number), number)[0] for number in range(FLOOD_SIZES["fragments"])))
    row.send_victims(ingress)
    later = send(ingress, (second for _, second in victims))
    assert {parse(packet, l2=False).ip.destination for packet in later} == {host_of(POD[row.v])}


@each_row(FLOODS)
def test_foreign_flows_of_one_client_evict_no_others(ingress: Path_, row: Flood):
    """Another data plane served the victims' SYNs. Repeated when it has ended, they still belong to
    it, whatever other clients sent meanwhile.
    """
    syns = [tcp(f"{row.victim.format(n)}:4000", VIP[row.v], flags="S", seq=n) for n in range(1, VICTIMS + 1)]
    ingress.node(NodeFlag.PASSIVE, *SNAT_PORTS)
    row.send_victims(ingress)
    assert send(ingress, syns) == syns
    ingress.set_loopback_role(row.role, row.flags)
    numbers = range(FLOOD_SIZES["foreign_flows"])
    send(ingress, (tcp(f"{flooding(row, n)}:{n + 1024}", VIP[row.v], flags="S", seq=n) for n in numbers))
    row.send_victims(ingress)
    ingress.node(NodeFlag.COEXISTING, *SNAT_PORTS)
    assert send(ingress, syns) == syns, "not translated: no flow of ours began"
    again = [tcp(f"{row.victim.format(n)}:4001", VIP[row.v], flags="S", seq=n) for n in range(1, VICTIMS + 1)]
    assert not set(send(ingress, again)) & set(again), "a new connection is ours"


class Use(NamedTuple):
    """A map that clients share. `port` is added to the VIP's port. `most`: how many parts of what
    they share one client gets. `part`: the client of an entry, and the part that it has. `then`:
    what follows the SYNs: resets by the backend, or the same again.
    """

    map: str
    port: str
    most: int
    part: Callable[[bytes, bytes], tuple[bytes, bytes]]
    then: str = ""


def failure_of(key: bytes, raw: bytes) -> tuple[bytes, bytes]:
    """The client of a failure, and its key."""
    return EVENT.unpack(FAILURE.unpack(raw)[2])[2][:16], key


USES = [
    Use("affinity", "", SHARE, lambda key, _: (key[:16], key)),
    Use("failures", "0", FAILURES_PER_CLIENT, failure_of),
    Use("failures", "", FAILURES_PER_CLIENT, failure_of, "reset"),
    Use("failures", "", FAILURES_PER_CLIENT, failure_of, "repeat"),
    Use(
        "flows",
        "1",
        (SNAT_PORTS[1] - SNAT_PORTS[0] + 1) // 4,
        lambda key, raw: (FLOW.unpack(raw)[1][:16], FLOW.unpack(raw)[5]),
    ),
]
FORGERS = pytest.mark.parametrize("row", [row for row in FLOODS if row.flags], ids=lambda row: f"IPv{row.v}")


@FORGERS
@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.map} {use.then}".strip())
def test_forged_addresses_of_a_pod_have_the_share_of_one_client(ingress: Path_, row: Flood, use: Use):
    """What clients outside have in `affinity` and `failures` stays."""

    def dial(hosts: list[str]) -> None:
        syns = [tcp(f"{host}:4000", VIP[row.v] + use.port, flags="S") for host in hosts]
        send(ingress, syns)
        if use.then == "repeat":
            time.sleep(0.6)  # what is repeated earlier does not count
            send(ingress, syns)
        elif use.then == "reset":
            resets = (tcp(POD[row.v], f"{host}:4000", flags="RA", ack=1001) for host in hosts)
            send(ingress, resets, "tc_egress")

    victims = [row.victim.format(number) for number in range(1, VICTIMS + 1)]
    honest = {bytes(parse_addr(host.strip("[]"))) for host in victims}
    dial(victims)
    ingress.set_loopback_role(row.role, row.flags)
    dial([flooding(row, number) for number in range(1, 2_000)])
    parts = {use.part(*entry) for entry in ingress.site.entries(use.map).items()}
    assert use.map == "flows" or honest <= {client for client, _ in parts}
    assert 0 < len({part for client, part in parts if client not in honest}) <= use.most


@FORGERS
def test_forged_addresses_of_a_pod_have_one_limit_of_icmp_errors(ingress: Path_, row: Flood):
    burst, hour = 6, 3600 * 10**9
    with ingress.site.pinned("refusal_limits") as limits:
        for which in RefusalLimit:
            most = 50 if which in (RefusalLimit.ICMP, RefusalLimit.RESET) else burst
            limits.update(U32.pack(which), REFUSAL_LIMIT.pack(0, hour, most))

    def errors(hosts: Iterable[str], v: int = row.v) -> int:
        got = send(ingress, (udp(f"{host}:4000", VIP[v] + "0", b"?") for host in hosts))
        return sum(parse(packet, l2=False).protocol.startswith("icmp") for packet in got)

    assert errors([row.victim.format(1)] * 10) == burst
    ingress.set_loopback_role(row.role, row.flags)
    assert errors(flooding(row, number) for number in range(1, 100)) == burst
    assert errors(["203.0.113.1" if row.v == 6 else "[2001:db8:bad::1]"] * 10, 10 - row.v) == burst
    ingress.set_loopback_role(Role.HOST, DeviceFlag(0))
    assert errors([row.victim.format(2)] * 10) == burst

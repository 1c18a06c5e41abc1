"""What pods, clients and the node share, and one of them fills: the others keep what they have.

A row names a map and says how it is filled: by one pod's sockets, or by the packets of one client.
Ten victims hold a TCP connection, a connected UDP socket, an unconnected one and session affinity
before it is filled, and must still hold them then. docs/limits.md has the same rows for people.
"""

import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kbpf.dataplane.bpf.layout import CACHED_DEVICE, DEVICE, FLOWS_PER_SOCKET, U32, Reason, Role
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.settings import SHARERS
from kbpf.kernel import netns
from kbpf.kernel.libbpf import Program
from kbpf.kernel.testrun import run
from kbpf.model.config import MapSizes
from kbpf.model.desired import ServiceState
from kbpf.model.objects import Protocol
from tests.support.datagrams import MAC_B
from tests.support.lab import Node, Place, ip, until
from tests.support.lab import run as command
from tests.support.packets import frame, tcp
from tests.support.plane import Site, desired, service, sites, start_within

VICTIMS = 10
AFFINITY = 1024
STICKIES = 2 * AFFINITY
SHARE = AFFINITY // SHARERS
CONNECTED, UNCONNECTED = 12_000, 1_500
"""More sockets than the maps of before had room for (`flows`: 4,096 in tests), and in all 18,000
flows of unconnected ones.
"""
WEB, DNS, STICKY, EVIL = "10.96.0.1", "10.96.0.2", "10.96.0.3", "10.96.9.1"


@dataclass
class Ground:
    """`victims` and `attacker` dial, `one` and `two` serve."""

    site: Site
    plane: BpfPlane
    node: Node
    attacker: Place
    victims: list[Place]
    one: Place
    two: Place

    def serve(self, dns: str) -> None:
        """`dns`: who serves there."""
        both = f"{self.one.ip}:8080 {self.two.ip}:8080"
        more = [service(f"evil{i}", f"10.96.9.{i + 1}:53", both, Protocol.UDP)
                for i in range(FLOWS_PER_SOCKET)]  # fmt: skip
        services: list[ServiceState] = [
            service("web", f"{WEB}:80", f"{self.one.ip}:8080"),
            service("dns", f"{DNS}:53", f"{dns}:8080", Protocol.UDP),
            service("sticky", f"{STICKY}:80", both, affinity_timeout=10_800),
            *more,
            *(service(f"sticky{i}", f"{sticky_address(i)}:53", both, Protocol.UDP,
                      affinity_timeout=10_800) for i in range(STICKIES)),
        ]  # fmt: skip
        self.plane.apply(desired(*services, nodes=self.node.ip), None)
        until("what has left is ended", self._is_done)

    def _is_done(self) -> bool:
        now = time.monotonic()
        due = self.plane.tick(now)
        return due is None or due > now


@pytest.fixture
def ground(node: Node, artifact_cache: Path) -> Iterator[Ground]:
    names = ("attacker", "one", "two", *(f"v{i}" for i in range(VICTIMS)))
    pods = {name: node.pod(name) for name in names}
    for name in ("one", "two"):
        pods[name].serve(8080, udp=(8080,))
    with sites(artifact_cache) as make:
        site = make(cgroup=node.cgroup, node=node.netns)
        plane = site.open(MapSizes(affinity=AFFINITY, connections=4096))
        victims = [pods[f"v{i}"] for i in range(VICTIMS)]
        yield Ground(site, plane, node, pods["attacker"], victims, pods["one"], pods["two"])


def open_files() -> None:
    """As many as containers have by default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connected() -> contextlib.ExitStack:
    """Sockets that are connected to a Service."""
    held = contextlib.ExitStack()
    for _ in range(CONNECTED):
        held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)).connect((EVIL, 53))
    return held


def unconnected() -> contextlib.ExitStack:
    """Sockets that have asked many."""
    held = contextlib.ExitStack()
    for _ in range(UNCONNECTED):
        asks = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        for number in range(FLOWS_PER_SOCKET):
            asks.sendto(b"", (f"10.96.9.{number + 1}", 53))
    return held


class Fill(NamedTuple):
    """A map, and how it is filled."""

    map: str
    fill: Callable[[], contextlib.ExitStack]


def sticky() -> contextlib.ExitStack:
    """More Services with affinity are asked than the map has room for."""
    for number in range(STICKIES):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
            asks.connect((sticky_address(number), 53))
    return contextlib.ExitStack()


def sticky_address(number: int) -> str:
    """Of a Service with affinity."""
    return f"10.98.{number // 250}.{number % 250 + 1}"


FILLS = [
    Fill("sock_peers", connected), Fill("udp_flows", unconnected), Fill("affinity", sticky)
]  # fmt: skip


@contextlib.contextmanager
def filled(ground: Ground, row: Fill) -> Iterator[None]:
    """While it is."""
    here, there = socket.socketpair()

    def fill() -> None:
        open_files()
        here.close()
        with row.fill():
            there.send(b"-")
            there.recv(1)

    with here, there:
        done = start_within(ground.attacker, fill)
        there.close()
        assert here.recv(1), "it could not be filled"
        yield
    done()


def asked(place: Place, to: str, **how: Any) -> str:
    """Who answers, seen as whom was asked."""
    answer = place.udp(to, 53, **how)
    assert answer["peer"] == [to, 53], "the answer comes from the Service"
    return str(answer["name"])


@pytest.mark.parametrize("row", FILLS, ids=lambda row: row.map)
def test_others_keep_what_they_have(ground: Ground, row: Fill):
    ground.serve(ground.one.ip)
    stuck = {}
    for place in ground.victims:
        assert place.tcp(WEB, 80, keep="tcp")["name"] == "one"
        assert asked(place, DNS, keep="connected", connected=True) == "one"
        assert asked(place, DNS, keep="loose") == "one"
        stuck[place.name] = place.tcp(STICKY, 80)["name"]
    with filled(ground, row):
        for place in ground.victims:
            answer = place.ask("talk", keep="tcp")
            assert answer["name"] == "one"
            assert asked(place, DNS, keep="loose") == "one"
            assert {place.tcp(STICKY, 80)["name"] for _ in range(5)} == {stuck[place.name]}
        ground.serve(ground.two.ip)
        for place in ground.victims:
            assert "error" in place.ask("talk", keep="connected"), "ended with its backend"
            assert asked(place, DNS, keep="loose") == "two"
            for keep in ("tcp", "connected", "loose"):
                place.ask("drop", keep=keep)


def test_a_pod_has_its_share_of_affinity_and_no_more(ground: Ground):
    ground.serve(ground.one.ip)
    before = ground.site.reasons()
    with filled(ground, FILLS[-1]):
        pass
    assert len(ground.site.entries("affinity")) == SHARE
    assert (ground.site.reasons() - before)[Reason.NOT_RECORDED] == STICKIES - SHARE


VIP6, POD6 = "[2001:db8::1]:80", "[fd00:10:244:1::2]:8080"


@pytest.fixture
def ingress(artifact_cache: Path) -> Iterator[tuple[Site, Callable[[list[str]], None]]]:
    """What a client outside that sends from these addresses makes of the packet path."""
    where = f"kbpi{os.getpid()}"
    command("ip", "netns", "add", where)
    inside = Path("/run/netns") / where
    try:
        ip("link set lo up", netns=where)
        with sites(artifact_cache) as make:
            site = make(node=where)
            plane = site.open(MapSizes(affinity=AFFINITY, connections=4096), packet_path=True)
            one = service(
                "web", f"LoadBalancer={VIP6}", POD6, local=POD6, external_local=True,
                affinity_timeout=10_800,
            )  # fmt: skip
            netns.inside(inside, lambda: plane.apply(desired(one), None))
            with site.pinned("devices") as devices, site.pinned("device_cache") as cache:
                value = DEVICE.pack(Role.HOST, 14, 0, bytes(6), bytes(16), bytes(16))
                devices.update(U32.pack(1), value)
                cache.update(U32.pack(1), CACHED_DEVICE.pack(1, value))
            pin = next(site.pins.glob("programs-tc-*")) / "tc_ingress"
            with Program.open(pin) as program:

                def dial(clients: list[str]) -> None:
                    for client in clients:
                        packet = tcp(f"[{client}]:4000", VIP6, flags="S")
                        run(program, frame(packet, to=MAC_B))

                yield site, lambda clients: netns.inside(inside, lambda: dial(clients))
    finally:
        command("ip", "netns", "del", where)


def test_a_network_of_clients_has_its_share_of_affinity_and_no_more(
    ingress: tuple[Site, Callable[[list[str]], None]],
):
    """An IPv6 host has 2^64 addresses."""
    site, dial = ingress
    victims = [f"2001:db8:{number:x}::1" for number in range(1, VICTIMS + 1)]
    dial(victims)
    known = site.entries("affinity").keys()
    assert len(known) == VICTIMS
    dial([f"2001:db8:bad::{number:x}" for number in range(1, 2 * AFFINITY)])
    assert known <= site.entries("affinity").keys()
    assert len(site.entries("affinity")) == VICTIMS + SHARE
    dial(["2001:db8:99::1"])
    assert len(site.entries("affinity")) == VICTIMS + SHARE + 1, "others still have room"

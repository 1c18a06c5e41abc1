# SPDX-License-Identifier: Apache-2.0
"""UDP through the hooks, by real sockets of pods. Every backend replies with its name, so a test
sees which backend got a datagram and which sender the client was shown.
"""

import contextlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kbpf.dataplane.bpf.maps.layout import UDP_FLOW
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.model.desired import ServiceState
from kbpf.model.metrics import UdpCuts
from kbpf.model.objects import Protocol
from tests.support.lab.lab import PATIENCE, Node, Place, until
from tests.support.plane import Site, desired, service, within

_numbers = itertools.count()
WEB, WEB6, DNS = "10.96.0.1:53", "[fd00:96::1]:53", "10.96.0.2:53"


@dataclass
class Bench:
    """A data plane with its pods: `pod` and `other` are clients; `one`, `two` and `three` serve."""

    node: Node
    site: Site
    plane: BpfPlane
    places: dict[str, Place]
    udp_cuts: list[UdpCuts] = field(default_factory=list)

    def __getitem__(self, name: str) -> Place:
        return self.places[name]

    def to(self, names: str, family: int = 4) -> str:
        """Endpoints of these pods."""
        places = [self.places[name] for name in names.split()]
        return " ".join(f"[{p.ip6}]:8080" if family == 6 else f"{p.ip}:8080" for p in places)

    def udp(self, frontends: str, to: str, **more: Any) -> ServiceState:
        """A UDP Service in front of these pods."""
        family = 6 if "[" in frontends else 4
        for part in ("local", "serving"):
            if part in more:
                more[part] = self.to(more[part], family)
        return service(f"s{frontends}", frontends, self.to(to, family), Protocol.UDP, **more)

    def serve(self, *services: ServiceState) -> None:
        """Programs exactly these; nothing is retired yet, however long it takes."""
        before = time.monotonic()
        self.plane.apply(desired(*services, nodes=f"{self.node.ip} {self.node.ip6}"), None)
        until(
            "the sockets of deleted backends are destroyed",
            lambda: self.tick(before),
            state=self.held,
        )

    def web(self, to: str, dns: str = "", **more: Any) -> None:
        """Programs a Service at WEB in front of these pods, and maybe one at DNS."""
        self.serve(self.udp(WEB, to, **more), *([self.udp(DNS, dns)] if dns else []))

    def tick(self, now: float) -> bool:
        """Whether nothing more is due at `now`. Sockets are destroyed in slices, and a busy machine
        needs more than one.
        """
        due, udp_cuts = self.plane.tick(now)
        self.udp_cuts += udp_cuts
        return due is None or due > now

    def take_udp_cuts(self) -> list[UdpCuts]:
        """Those of all calls of tick() since the last call."""
        cuts, self.udp_cuts = self.udp_cuts, []
        return cuts

    def take_cut_flows(self) -> Counter[int]:
        """The flows that all passes since the last call have ended, by family."""
        cuts = self.take_udp_cuts()
        return Counter(family for look in cuts for family in Counter(look.flows).elements())

    def held(self) -> dict[str, int]:
        """How many sockets have a peer, and how many flows all sockets have."""
        flows = sum(map(flows_in, self.site.entries("udp_flows").values()))
        found = {"sock_peers": len(self.site.entries("sock_peers")), "udp_flows": flows}
        return {name: count for name, count in found.items() if count}


def edit(bench: Bench, name: str, s: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Changes what this map holds of the socket."""
    with bench.site.pinned(name) as held:
        key = s.fileno().to_bytes(4, "little")
        value = held.lookup(key)
        assert value is not None
        held.update(key, change(value))


def flows_in(raw: bytes) -> int:
    """How many entries of a struct udp_flows are used."""
    return sum(bool(frontend[18]) for _, _, _, frontend, *_ in UDP_FLOW.iter_unpack(raw[8:]))


@contextlib.contextmanager
def kept(place: Place, host: str, connected: bool = False, port: int = 53) -> Iterator[Callable[..., str]]:
    """A socket of that place, for a block, to which `one` has answered. Yields a function that sends again, and returns
    who answers then: a server, "cut" if the socket was destroyed, or another error.
    """
    keep = f"socket {next(_numbers)}"

    def answer_of(answer: dict[str, Any]) -> str:
        if "error" in answer:
            return "cut" if answer["error"] in ("ECONNABORTED", "EDESTADDRREQ") else str(answer["error"])
        assert answer.get("peer", [host, port]) == [host, port], "the Service's address is shown"
        return str(answer["name"])

    def send(timeout: float = PATIENCE) -> str:
        if connected:
            return answer_of(place.ask("talk", keep=keep, timeout=timeout))
        return answer_of(place.udp(host, port, keep=keep, timeout=timeout))

    assert answer_of(place.udp(host, port, keep=keep, connected=connected)) == "one"
    try:
        yield send
    finally:
        place.ask("drop", keep=keep)


def socket_of(place: Place, kind: int = socket.SOCK_DGRAM) -> socket.socket:
    """A socket that a process of that place created, for this process to use."""
    here, there = socket.socketpair()

    def make() -> None:
        with socket.socket(socket.AF_INET, kind) as made:
            socket.send_fds(there, [b"-"], [made.fileno()])

    with here, there:
        within(place, make)
        _, (received, *_), _, _ = socket.recv_fds(here, 1, 1)
    return socket.socket(fileno=received)


def answer(s: socket.socket, to: tuple[str, int] = ("10.96.0.1", 53)) -> tuple[str, Any]:
    """Sends a datagram there from an unconnected socket; returns the replying server and its
    address.
    """
    s.sendto(b"hello\n", to)
    return receive(s)


def talk(s: socket.socket) -> tuple[str, Any]:
    """Sends a datagram from a connected socket; returns the replying server and its address."""
    s.send(b"hello\n")
    return receive(s)


def receive(s: socket.socket) -> tuple[str, Any]:
    """The replying server and its address."""
    s.settimeout(PATIENCE)
    data, sender = s.recvfrom(4096)
    return data.decode().split('"')[3], sender

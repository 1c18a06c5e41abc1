# SPDX-License-Identifier: Apache-2.0
"""Floods against established connections and honest clients.

A node as in node.py, but clients and pods are real: namespaces with sockets at the other ends of
its devices. Its Services:

    192.0.2.2:80      TCP and UDP echo; the same by IPv6
    192.0.2.2:81      UDP without replies
    NODE:30053        a NodePort, UDP, two backends
"""

import contextlib
import os
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps.layout import FlowDirection, Reason
from kbpf.model.address import format_addr
from kbpf.model.config import MapSizes
from kbpf.model.desired import DesiredState
from tests.fuzz.packets.node import (
    BACK_PORT,
    CLIENT,
    FRONT_PORT,
    NEIGHBOUR,
    OWN,
    POD,
    ROUTED_BY,
    VIP,
    KbpfNode,
    build,
    inside_of,
    kbpf_node,
    mac_of,
    namespaces,
)
from tests.support import plane
from tests.support.lab.lab import DIE_WITH_US, PATIENCE, inside, ip, run
from tests.support.table import table

FRONT = VIP["masked"]
SECOND_POD = "10.244.1.3"
NODE_PORT = 30_053
SOURCE = Path(__file__).with_name("flood.c")
HONEST = "198.51.100.8"
KEPT_PORTS = range(31_000, 32_000)
"""Client ports of the established connections of CLIENT."""
FORGED = (ip_network("100.64.0.0/10"), ip_network("2001:db8:66:1::/64"))
HONEST_A_SECOND = 40
THREADS = 20
ANSWER_SECONDS = 5.0
"""Time limit of one exchange of an honest client; a lost SYN is retransmitted within it."""
STALL_SECONDS = 60.0
"""For how long the server of honest UDP clients may be stalled."""
HELD_SECONDS = 60
"""Seconds after which no port may still be held for a forged client."""
SERVED = 0.99
HONEST_UDP = "honest udp"


class Kind(NamedTuple):
    """A flood: its name in flood.c, and the family and port of its destination."""

    name: str
    sends: str
    family: int = 4
    port: int = FRONT_PORT


ROWS = """
syn | syn
syn + bad ack | ack
syns with three numbers | syns
udp answered | udp
udp stream | stream
udp unanswered | udp | 4 | 81
rst | rst
icmp errors | icmp
first fragments | fragment
ipv6 /64 | syn6 | 6
"""
KINDS = {kind.name: kind for kind in table(Kind, ROWS)}
STREAMS = "udp stream"
"""Each of its flows has replies and is still in use after 2 s, and keeps its entry and its port for
120 s, as with Linux. Once all ports are taken, honest UDP clients find none; TCP ones do.
"""


@dataclass
class Figures:
    kind: str
    sent: int = 0
    seconds: float = 0.0
    established: int = 0
    lost: int = 0
    honest: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    """By protocol."""
    held: int = 0
    tracked: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    HEAD = (
        "| flood | sent/s | established lost | honest TCP served | honest UDP served |"
        " ports held | tracked |\n|---|---|---|---|---|---|---|"
    )

    def __str__(self) -> str:
        return (
            f"| {self.kind} | {self.sent / self.seconds:,.0f} |"
            f" {self.lost} of {self.established} | {self.served['tcp']} of {self.honest['tcp']} |"
            f" {self.served['udp']} of {self.honest['udp']} |"
            f" {self.held} | {self.tracked} |"
        )

    def faults(self) -> list[str]:
        """The promises that were not kept."""
        found = []
        if self.lost:
            found.append(f"{self.lost} of {self.established} established connections lost")
        for name, tried in self.honest.items():
            is_promised = (self.kind, name) != (STREAMS, "udp")
            if is_promised and self.served[name] < SERVED * tried:
                found.append(f"only {self.served[name]} of {tried} honest clients served by {name}")
        if self.reasons.get("NO_SNAT_PORT", 0) and self.kind == HONEST_UDP:
            found.append(f"{self.reasons['NO_SNAT_PORT']} datagrams found no port")
        if self.held and self.kind != STREAMS:
            found.append(f"{self.held} ports are held for forged clients after {HELD_SECONDS} s")
        return [f"{self.kind}: {text}" for text in found]


class Clients:
    """Honest clients: connections that stay open, and new ones at a steady rate."""

    def __init__(self, where: str, answer_seconds: float) -> None:
        self.where, self.answer_seconds = where, answer_seconds
        self.kept: list[socket.socket] = []
        self.tried, self.served = Counter[str](), Counter[str]()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def establish(self) -> None:
        """Opens the connections that stay; each exchanges a byte."""

        def connect() -> list[socket.socket]:
            made = []
            for port in KEPT_PORTS:
                each = socket.socket()
                each.settimeout(PATIENCE)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # Closed by a reset, so that the next flood can use the port again.
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.bind((CLIENT[4], port))
                each.connect((FRONT[4], FRONT_PORT))
                made.append(each)
            return made

        self.kept = inside_of(self.where, connect)
        assert self.count_lost() == 0

    def count_lost(self) -> int:
        """How many of the established connections no longer echo."""
        lost = 0
        for each in self.kept:
            with contextlib.suppress(OSError):
                each.send(b"x")
        deadline = time.monotonic() + PATIENCE
        for each in self.kept:
            each.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                lost += each.recv(1) != b"x"
            except OSError:
                lost += 1
        return lost

    def close(self) -> None:
        for each in self.kept:
            each.close()
        self.kept.clear()

    def begin(self) -> None:
        self._over.clear()
        self.tried.clear()
        self.served.clear()
        self._threads = [
            threading.Thread(target=lambda n=n: inside_of(self.where, lambda: self._dial(n))) for n in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _dial(self, number: int) -> None:
        """Repeats exchanges: threads with odd numbers by TCP, others by UDP with a retry every
        second.
        """
        pause = THREADS / HONEST_A_SECOND
        while not self._over.is_set():
            began = time.monotonic()
            name, ask = ("tcp", _ask_tcp) if number % 2 else ("udp", _ask_udp)
            served = ask(self.answer_seconds)
            with self._lock:
                self.tried[name] += 1
                self.served[name] += served
            self._over.wait(max(0.0, pause - (time.monotonic() - began)))


def _ask_tcp(seconds: float) -> bool:
    with socket.socket() as each, contextlib.suppress(OSError):
        each.settimeout(seconds)
        each.bind((HONEST, 0))
        each.connect((FRONT[4], FRONT_PORT))
        each.send(b"y")
        return each.recv(1) == b"y"
    return False


def _ask_udp(seconds: float) -> bool:
    with socket.socket(type=socket.SOCK_DGRAM) as each:
        each.bind((HONEST, 0))
        each.settimeout(1.0)
        for _ in range(int(seconds)):
            with contextlib.suppress(OSError):
                each.sendto(b"z", (FRONT[4], FRONT_PORT))
                if each.recv(16) == b"z":
                    return True
    return False


class Arena:
    """The node, its clients and its pods. Each flood gets the next seed. Honest clients wait for
    `answer_seconds`.
    """

    kbpf: KbpfNode

    def __init__(self, cache: Path, connections: int, seed: int, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.cache, self.connections, self.seed = cache, connections, seed
        self.answer_seconds = answer_seconds
        self.name = f"kby{os.getpid()}"
        self.outside, self.pods = f"{self.name}o", f"{self.name}p"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Arena":
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kbpf-flood-"))
            self.program = Path(folder) / "flood"
            run("cc", "-O2", "-o", str(self.program), str(SOURCE))
            stack.enter_context(namespaces(self.name, self.outside, self.pods))
            self._cable()
            sizes = MapSizes(connections=self.connections)
            self.kbpf = stack.enter_context(kbpf_node(self.cache, self.name, served(), sizes))
            self._serve(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _cable(self) -> None:
        build(self.name, self.pods, "f")
        ip("link set fc0 netns " + self.outside, netns=self.pods)
        ip(
            f"neigh replace {SECOND_POD} lladdr {NEIGHBOUR} dev b0 nud permanent",
            f"route replace {SECOND_POD} dev b0",
            netns=self.name,
        )
        for where, device, own, to, addresses in (
            (
                self.outside,
                "fc0",
                "c0",
                ROUTED_BY,
                (f"{CLIENT[4]}/32", f"{HONEST}/32", f"{CLIENT[6]}/128", "198.18.1.2/32", "fd00:18:1::2/128"),
            ),
            (self.pods, "fb0", "b0", OWN["b0"], (f"{POD['b0'][4]}/32", f"{SECOND_POD}/32", f"{POD['b0'][6]}/128")),
        ):
            mac = mac_of(self.name, own)
            quiet = (
                f"echo 0 > /proc/sys/net/ipv6/conf/{device}/disable_ipv6;"
                "echo 0 > /proc/sys/net/ipv6/conf/all/accept_dad;"
                "for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done"
            )
            run(*inside(where, None, "sh", "-c", quiet))
            ip("link set lo up", f"link set {device} address {NEIGHBOUR}", f"link set {device} up", netns=where)
            ip(
                *(f"addr add {each} dev {device}" + (" nodad" if ":" in each else "") for each in addresses),
                netns=where,
            )
            for hop in to.values():
                ip(
                    f"neigh replace {hop} lladdr {mac} dev {device} nud permanent",
                    f"route add {hop} dev {device}",
                    f"route add default via {hop} dev {device}",
                    netns=where,
                )

    def _serve(self, stack: contextlib.ExitStack) -> None:
        command = inside(self.pods, None, str(self.program), "serve", str(BACK_PORT), "8081")
        server = subprocess.Popen([*DIE_WITH_US, *command], stdout=subprocess.PIPE)
        stack.callback(server.wait)
        stack.callback(server.kill)
        stack.callback(server.stdout.close)
        assert server.stdout.readline() == b"ready\n"

    # ---- floods --------------------------------------------------------------------------------

    def send(
        self, kind: str, to: str, port: int, rate: int, seconds: float, wait: float = 3.0, most: int = 0
    ) -> tuple[int, int, float]:
        """Runs flood.c; returns frames sent, datagrams that came back, and seconds."""
        self.seed += 1
        kept = KEPT_PORTS.start, len(KEPT_PORTS)
        node = mac_of(self.name, "c0"), to, port
        command = (self.program, "send", kind, "fc0", *node, rate, seconds, *kept, self.seed, wait, most)
        sent, back, took = run(*inside(self.outside, None, *map(str, command))).split()
        return int(sent), int(back), float(took)

    def flood(self, name: str, rate: int, seconds: float) -> Figures:
        self.kbpf.forget()
        kind = KINDS[name]
        figures = Figures(name)
        clients = Clients(self.outside, self.answer_seconds)
        before = self.kbpf.site.reasons()
        try:
            clients.establish()
            clients.begin()
            try:
                figures.sent, _, figures.seconds = self.send(kind.sends, FRONT[kind.family], kind.port, rate, seconds)
            finally:
                clients.end()
            figures.tracked, figures.held = self.held()
            figures.established = len(KEPT_PORTS)
            figures.lost = clients.count_lost()
            figures.honest, figures.served = clients.tried, clients.served
        finally:
            clients.close()
        figures.reasons = self.reasons_since(before)
        return figures

    def reasons_since(self, before: Counter[Reason]) -> dict[str, int]:
        return {each.name: count for each, count in (self.kbpf.site.reasons() - before).items()}

    def many_clients(self, rate: int, seconds: float, most: int = 0) -> Figures:
        """Honest clients send one UDP datagram each to the NodePort; `served` counts the replies.
        At most `most` wait for one; 0: any number.
        """
        self.kbpf.forget()
        figures = Figures(HONEST_UDP)
        before = self.kbpf.site.reasons()
        sent = self.send("udp", ROUTED_BY[4], NODE_PORT, rate, seconds, STALL_SECONDS, most)
        figures.sent, figures.served["udp"], figures.seconds = sent
        figures.honest["udp"] = figures.sent
        figures.tracked, _ = self.held()
        figures.reasons = self.reasons_since(before)
        return figures

    def held(self) -> tuple[int, int]:
        """Tracked connections, and node ports that will still be held for forged clients after
        HELD_SECONDS.
        """
        now = time.monotonic_ns()
        later = now + HELD_SECONDS * flow_entries.NS_PER_SECOND
        entries = [raw for _, raw in self.kbpf.site.entries("flows").items()]
        held = sum(raw[99] == FlowDirection.SNAT_REPLY and keeps_port(raw, later) for raw in entries)
        return sum(map(flow_entries.is_original, entries)), held


def keeps_port(raw: bytes, later: int) -> bool:
    """Whether this entry holds a port for a forged client, and still does so then."""
    client = format_addr(raw[flow_entries.CLIENT][:16])
    return (
        _is_forged(client)
        and flow_entries.expires_at(raw) > later
        and flow_entries.is_needed(raw[flow_entries.STATE], flow_entries.last_used(raw), later)
    )


def _is_forged(text: str) -> bool:
    found = ip_address(text)
    return any(found.version == net.version and found in net for net in FORGED)


def room() -> int:
    """How many connections Linux would track on this machine."""
    return int(Path("/proc/sys/net/netfilter/nf_conntrack_max").read_text())


SERVICES = """
front4-tcp:TCP LoadBalancer=192.0.2.2:80 -> 10.244.1.2:8080
front4-udp:UDP LoadBalancer=192.0.2.2:80 -> 10.244.1.2:8080
front6-tcp:TCP LoadBalancer=[2001:db8:1::2]:80 -> [fd00:244:1::2]:8080
front6-udp:UDP LoadBalancer=[2001:db8:1::2]:80 -> [fd00:244:1::2]:8080
silent:UDP LoadBalancer=192.0.2.2:81 -> 10.244.1.2:8081
dns:UDP NodePort=0.0.0.0:30053 -> 10.244.1.2:8080 10.244.1.3:8080
"""


def served() -> DesiredState:
    """The Services as kbpf's desired state."""
    return plane.desired(*plane.services(SERVICES, {}), nodes=ROUTED_BY[4])

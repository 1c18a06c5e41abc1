# SPDX-License-Identifier: Apache-2.0
"""Random packets through every packet program by BPF_PROG_TEST_RUN, and invariants that must hold.

- A program returns "next", "drop" or "redirect", and nothing else.
- A checksum that was right before is right afterwards, and so are those of what answers a packet:
  a reset, or an ICMP error. Checksums of transport headers quoted in ICMP errors are left alone,
  because as a rule most of what they cover is missing. A wrong transport header is quoted as it is;
  a packet with a wrong IP header is not answered.
- A packet without an address of a Service, a backend or the node passes with no byte changed.
- A connection has at most three entries, one of them the original one, whose key is in the queue.
- The counter of the queue's keys is the number of keys in it.
"""

import contextlib
import math
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps.layout import U64, FlowDirection, TcpState
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Program
from kbpf.model.config import MapSizes
from tests.fuzz.packets.node import (
    DEVICES,
    KbpfNode,
    build,
    four_services,
    inside_of,
    kbpf_node,
    mac_of,
    namespaces,
)
from tests.fuzz.packets.random_packets import Packets, is_a_services
from tests.support.packets.packets import MAC_A, mac
from tests.support.packets.parse import checksums
from tests.support.packets.test_run import (
    TC_ACT_REDIRECT,
    TC_ACT_SHOT,
    TC_ACT_UNSPEC,
    SkbContext,
    run,
)

VERDICTS = {TC_ACT_UNSPEC: "next", TC_ACT_SHOT: "drop", TC_ACT_REDIRECT: "redirect"}
ENTRIES = 3
"""Entries of one connection, at most (flow.h)."""
CONNECTIONS = 512
"""So few that flows have to be evicted."""
PORTS = (2000, 9000)
BETWEEN_LOOKS = 5_000
"""Runs between two checks of the maps."""
ICMP = ("icmp", "icmp6")
QUOTED = frozenset(f"{icmp} embedded {what}" for icmp in ICMP for what in ("tcp", "udp", "sctp"))
HEADERS = "headers"


@dataclass
class Tally:
    verdicts: Counter[str] = field(default_factory=Counter)
    rewritten: int = 0
    refused: int = 0
    most_entries: int = 0

    def __str__(self) -> str:
        said = ", ".join(f"{name} {count}" for name, count in sorted(self.verdicts.items()))
        return (
            f"{self.verdicts.total()} runs: {said}; {self.rewritten} packets rewritten;"
            f" {self.refused} not taken by the kernel; at most {self.most_entries} entries at once"
        )


class ProgramRuns:
    """Random packets through the programs of one node."""

    def __init__(self, node: KbpfNode, name: str, rng: random.Random) -> None:
        self._node, self._name, self._rng = node, name, rng
        self._packets = Packets(rng)
        folder = next(node.site.pins.glob("programs-tc-*"))
        self._programs = {name: Program.open(folder / name) for name in ("tc_ingress", "tc_egress")}
        self._places = inside_of(name, lambda: [(socket.if_nametoindex(each), mac_of(name, each)) for each in DEVICES])
        self.tally = Tally()

    def close(self) -> None:
        for program in self._programs.values():
            program.close()

    def run(self, count: int, until: float = math.inf) -> Tally:
        """Makes `count` runs, or fewer if `until` has come; raises AssertionError if an invariant
        fails.
        """
        return inside_of(self._name, lambda: self._run(count, until))

    def _run(self, count: int, until: float) -> Tally:
        for done in range(count):
            self._one(self._rng.choice(("tc_ingress", "tc_ingress", "tc_egress")))
            if done % BETWEEN_LOOKS == BETWEEN_LOOKS - 1:
                self.look()
                if time.monotonic() > until:
                    break
        self.look()
        self._node.forget()
        return self.tally

    def _one(self, name: str) -> None:
        rng, packet = self._rng, self._packets.next()
        ifindex, own_mac = rng.choice(self._places)
        forwarded = name == "tc_ingress" or rng.random() < 0.7
        context = SkbContext(ifindex=ifindex, ingress_ifindex=ifindex if forwarded else 0)
        sent = framed(packet, own_mac if rng.random() < 0.97 else "02:00:00:00:00:99")
        try:
            done = run(self._programs[name], sent, context=context.pack())
        except KernelError:
            self.tally.refused += 1  # shorter than the kernel accepts
            return
        story = f"{name} on ifindex {ifindex}: {sent.hex()} -> {done.packet_out.hex()}"
        assert done.retval in VERDICTS, f"verdict {done.retval}: {story}"
        self.tally.verdicts[VERDICTS[done.retval]] += 1
        if done.packet_out == sent:
            return
        self.tally.rewritten += 1
        assert is_a_services(packet), f"no Service's, and changed: {story}"
        if done.retval == TC_ACT_SHOT:
            return
        before = wrong(sent)
        quoted = {f"{icmp} embedded {what}" for icmp in ICMP for what in before - {"ip"}}
        worse = set() if HEADERS in before else wrong(done.packet_out) - before - QUOTED - quoted
        assert not worse, f"worse: {worse}: {story}"
        self._packets.learn(done.packet_out[14:])

    # ---- the maps ------------------------------------------------------------------------------

    def look(self) -> None:
        """Checks the invariants of the maps."""
        entries = self._node.site.entries("flows")
        self.tally.most_entries = max(self.tally.most_entries, len(entries))
        own = {raw[flow_entries.IDENTITY]: key for key, raw in entries.items() if flow_entries.is_original(raw)}
        many = Counter(raw[flow_entries.IDENTITY] for raw in entries.values())
        for identity, count in many.items():
            assert count <= ENTRIES, f"{count} entries: {identity.hex()}"
        for raw in entries.values():  # one that only reserves a port has no original
            reserves = raw[flow_entries.DIRECTION] == FlowDirection.SNAT_REPLY or (
                raw[flow_entries.STATE] == TcpState.CLOSED
            )
            assert raw[flow_entries.IDENTITY] in own or reserves, raw.hex()
        keys = self._node.site.drain_queue()
        with self._node.site.pinned("flow_count") as tracked:
            (told,) = U64.unpack(tracked.lookup(bytes(4)) or bytes(8))
        assert told == len(keys), f"{len(keys)} keys in the queue, {told} counted"
        assert {*own.values()} <= {*keys}, "a connection that is not in the queue"
        with self._node.site.pinned("flow_queue") as order:
            for key in keys:
                assert order.push(key)


def wrong(raw: bytes) -> set[str]:
    """The wrong checksums of a frame; HEADERS if it cannot be parsed."""
    try:
        return {*checksums(raw)}
    except ValueError:
        return {HEADERS}


def framed(packet: bytes, to: str) -> bytes:
    """Adds an Ethernet header, IPv4's if the packet's version is unknown."""
    kind = 0x86DD if packet[0] >> 4 == 6 else 0x0800
    return mac(to) + mac(MAC_A) + kind.to_bytes(2, "big") + packet


@contextlib.contextmanager
def runs(cache: Path, rng: random.Random, name: str) -> Iterator[ProgramRuns]:
    wire = f"{name}w"
    sizes = MapSizes(connections=CONNECTIONS, affinity=1024)
    with namespaces(name, wire):
        build(name, wire, "f")
        with kbpf_node(cache, name, four_services(), sizes, masquerade_ports=PORTS) as node:
            made = ProgramRuns(node, name, rng)
            try:
                yield made
            finally:
                made.close()

# SPDX-License-Identifier: Apache-2.0
"""A table of flows with little room."""

import struct
import time
from collections.abc import Iterable, Iterator

import msgspec
import pytest

from kbpf.dataplane.bpf.maps import flow_entries as fields
from kbpf.dataplane.bpf.maps.flow_entries import is_original
from kbpf.dataplane.bpf.maps.layout import (
    DEVICE,
    DOUBTFUL_PORTS,
    DOUBTS,
    FLOW,
    U32,
    U64,
    DeviceFlag,
    FlowDirection,
    Reason,
    Role,
    Target,
)
from kbpf.kernel.bpf.objects import Program
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, MapSizes
from kbpf.model.objects import Protocol
from tests.support.packets.packets import Talk, frame, udp
from tests.support.packets.parse import parse
from tests.support.packets.shares import has_port
from tests.support.packets.test_run import TC_ACT_SHOT, TC_ACT_UNSPEC, run
from tests.support.plane import Site, desired, service

ROOM = 32

NODE, POD = "198.18.0.1", "10.244.1.2:8080"
VIPS = {"kept": "192.0.2.1:80", "translated": "192.0.2.2:80"}
"""One VIP keeps the client's address, the other one translates it; so a flow has 2 or 3 entries."""
PARTS = {"kept": 2, "translated": 3}
both_kinds = pytest.mark.parametrize("flows", PARTS, indirect=True)
MINUTE = 60 * 10**9


def client(port: int) -> str:
    """A client with this port, which a masqueraded flow keeps. With another host the flow might get
    any port, perhaps that of an ended flow, which would be deleted for it.
    """
    hosts = (f"198.51.100.{number}" for number in range(7, 250))
    kept = (host for host in hosts if has_port(host, port, *Config().masquerade_ports))
    return f"{next(kept)}:{port}"


class Flows:
    """The programs with small maps, and the flows that they track."""

    def __init__(self, site: Site) -> None:
        self.site, self.kind, self.before = site, "", 0
        self.programs: dict[str, Program] = {}
        self.talks: dict[int, Talk] = {}

    def start(self, room: int) -> None:
        """Starts an agent with room for this number of connections."""
        plane = self.plane = self.site.open(MapSizes(connections=room), packet_path=True)
        made = [
            service(
                f"{name}-{protocol.name}".lower(),
                f"LoadBalancer={vip}",
                POD,
                protocol,
                local=POD,
                external_local=name == "kept",
            )
            for name, vip in VIPS.items()
            for protocol in (Protocol.TCP, Protocol.UDP)
        ]
        state = msgspec.structs.replace(desired(*made), masquerade_addresses=(parse_addr(NODE),))
        self.site.do(lambda: plane.apply(state, None))
        self.open_programs()

    def open_programs(self) -> None:
        """Opens the programs that are pinned now; loopback becomes an uplink."""
        with self.site.pinned("devices") as devices:
            value = DEVICE.pack(Role.HOST, 14, DeviceFlag(0), bytes(6), bytes(16), bytes(16), 0)
            devices.update(U32.pack(1), value)
        self.close()
        folder = next(self.site.pins.glob("programs-tc-*"))
        self.programs = {n: Program.open(folder / n) for n in ("tc_ingress", "tc_egress")}

    def close(self) -> None:
        """Closes the programs."""
        for program in self.programs.values():
            program.close()

    def delete_flows(self) -> None:
        """Deletes all flows; the queue still has their keys."""
        self.site.clear("flows")

    def empty(self) -> None:
        """Restores the initial state: no flows, an empty queue, a count of 0, no port in doubt."""
        self.delete_flows()
        self.site.drain_queue()
        self.site.put("flow_count", U32.pack(0), U64.pack(0))
        self.settle()

    def settle(self) -> None:
        """Lets the time pass until no port is in doubt."""
        self.mark_ports(0)

    def mark_ports(self, until: int) -> None:
        """All ports of all backends are in doubt until then (seconds, CLOCK_MONOTONIC)."""
        keys = b"".join(map(U32.pack, range(DOUBTFUL_PORTS)))
        with self.site.pinned("doubtful_ports") as doubts:
            doubts.update_batch(keys, U32.pack(until) * (DOUBTFUL_PORTS * DOUBTS.size // U32.size))

    def doubts(self) -> list[int]:
        """For how many seconds each port that is in doubt stays so."""
        now = time.monotonic_ns() // 10**9
        raw = b"".join(self.site.entries("doubtful_ports").values())
        return [until - now for (until,) in struct.iter_unpack("=I", raw) if until]

    def talk(self, port: int, script: str) -> None:
        """Sends packets of the client's flow with this port. "?" and "<!" are datagrams, "<" marks
        packets of the backend, other words are TCP segments as in packets.Talk ("|": it
        does not reach the other end), "3s" lets three seconds pass, and "LIVES" is a handshake and data both ways.
        """
        own, vip = client(port), VIPS[self.kind]
        seen = own
        for word in script.replace("LIVES", LIVES).split():
            if word.endswith("s"):
                self.age(port, int(word[:-1]) * 10**9)
                continue
            back = word.startswith("<")
            ends = (POD, seen) if back else (own, vip)
            if word in ("?", "<!"):
                packet = udp(*ends)
            else:
                packet = self.talks.setdefault(port, Talk()).segment(word, *ends)
            done = run(self.programs["tc_ingress"], frame(packet))
            if done.retval == TC_ACT_UNSPEC:
                done = run(self.programs["tc_egress"], done.packet_out)
            sent = parse(done.packet_out[14:], l2=False)
            returned = back and sent.destination == POD  # as a reset of the client
            assert (returned or done.retval == TC_ACT_SHOT) == word.endswith("|"), (port, word)
            if not back:
                seen = sent.source

    def talk_all(self, ports: Iterable[int], script: str) -> None:
        """The same for the flows with all these ports."""
        for port in ports:
            self.talk(port, script)

    def states(self) -> dict[int, int]:
        """The TCP state of each flow, by its port."""
        entries = self.site.entries("flows").values()
        return {Target.unpack(raw[fields.CLIENT]).port: raw[fields.STATE] for raw in entries if is_original(raw)}

    def ports(self) -> dict[int, int]:
        """Client ports that have a flow, and how many entries each has. An entry without the
        original one may only reserve a port of the node.
        """
        found: dict[int, int] = {}
        entries = list(self.site.entries("flows").values())
        ports = [Target.unpack(FLOW.unpack(raw)[1]).port for raw in entries]
        questions = {port for port, raw in zip(ports, entries, strict=True) if is_original(raw)}
        for port, raw in zip(ports, entries, strict=True):
            if port in questions:
                found[port] = found.get(port, 0) + 1
            else:
                assert raw[fields.DIRECTION] == FlowDirection.SNAT_REPLY
        return found

    def complete(self, ports: Iterator[int] | range | list[int]) -> dict[int, int]:
        """What ports() returns for complete flows of these ports."""
        return dict.fromkeys(ports, PARTS[self.kind])

    def tracked(self) -> int:
        """The number of connections that the programs have counted."""
        (told,) = U64.unpack(self.site.entries("flow_count")[U32.pack(0)])
        return int(told)

    def evicted(self) -> int:
        """Live connections that were evicted in this test."""
        return self.site.reasons()[Reason.EVICTED] - self.before

    def age(self, port: int, nanoseconds: int) -> None:
        """Makes this flow idle for this time; if negative, recently used."""
        with self.site.pinned("flows") as flows:
            for key, raw in list(flows.items()):
                if Target.unpack(FLOW.unpack(raw)[1]).port == port:
                    aged = bytearray(raw)
                    udp_ = raw[fields.PROTOCOL] == Protocol.UDP
                    for at in (slice(8), fields.BEGAN_AT) if udp_ else (slice(8),):
                        then = int.from_bytes(raw[at], "little") - nanoseconds
                        aged[at] = max(0, then).to_bytes(8, "little")
                    flows.update(key, bytes(aged))


LIVES = "S <SA A+ <A"

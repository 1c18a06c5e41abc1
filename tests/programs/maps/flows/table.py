# SPDX-License-Identifier: Apache-2.0
"""A table of flows with little room."""

import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import pytest

from kbpf.dataplane.bpf.maps import flow_entries as fields
from kbpf.dataplane.bpf.maps.flow_entries import is_original
from kbpf.dataplane.bpf.maps.layout import (
    DOUBTFUL_PORTS,
    DOUBTS,
    FLOW,
    U32,
    U64,
    FlowDirection,
    Reason,
    Role,
    Target,
)
from kbpf.kernel.bpf.objects import Program
from kbpf.model.config import Config, MapSizes
from tests.programs.packets.path.single_packets import CLUSTER, LOCAL, Flow, Path_, all_services, masquerading, vip
from tests.support.packets.shares import has_port
from tests.support.plane import Site, desired

T = TypeVar("T")
ROOM = 32

KINDS = {"kept": LOCAL, "translated": CLUSTER}
VIPS = {kind: vip(4, which) for kind, which in KINDS.items()}
"""One VIP keeps the client's address, the other one translates it; so a flow has 2 or 3 entries."""
PARTS = {"kept": 2, "translated": 3}
both_kinds = pytest.mark.parametrize("flows", PARTS, indirect=True)


def client(port: int) -> str:
    """A client with this port, which a masqueraded flow keeps. With another host the flow might get
    any port, perhaps that of an ended flow, which would be deleted for it.
    """
    hosts = (f"198.51.100.{number}" for number in range(7, 250))
    kept = (host for host in hosts if has_port(host, port, *Config().masquerade_ports))
    return f"{next(kept)}:{port}"


class Here(Path_):
    """Path_ in a process that has entered the node's network."""

    def inside(self, action: Callable[[], T]) -> T:
        return action()


class Flows:
    """The programs with small maps, and the flows that they track."""

    def __init__(self, site: Site) -> None:
        self.site, self.kind, self.before = site, "", 0
        self.programs: dict[str, Program] = {}
        self.flows: dict[int, Flow] = {}

    def start(self, room: int) -> None:
        """Starts an agent with room for this number of connections."""
        self.plane = self.site.open(MapSizes(connections=room), packet_path=True)
        self.site.do(lambda: self.plane.apply(masquerading(desired(*all_services())), None))
        self.open_programs()

    def open_programs(self) -> None:
        """Opens the programs that are pinned now; loopback becomes an uplink."""
        self.close()
        self.path = Here(self.site, self.plane, str(self.site.node))
        self.path.set_loopback_role(Role.HOST)
        self.programs = self.path.programs

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
        self.flows.clear()
        self.site.drain_queue()
        self.site.put("flow_count", U32.pack(0), U64.pack(0))
        self.settle()

    def settle(self) -> None:
        """Lets the time pass until no port is in doubt."""
        keys = b"".join(map(U32.pack, range(DOUBTFUL_PORTS)))
        with self.site.pinned("doubtful_ports") as doubts:
            doubts.update_batch(keys, bytes(DOUBTFUL_PORTS * DOUBTS.size))

    def doubts(self) -> list[int]:
        """For how many seconds each port that is in doubt stays so."""
        now = time.monotonic_ns() // 10**9
        raw = b"".join(self.site.entries("doubtful_ports").values())
        return [until - now for (until,) in struct.iter_unpack("=I", raw) if until]

    def talk(self, port: int, script: str) -> None:
        """Sends packets of the client's flow with this port, in the notation of Flow; "3s" lets three seconds pass, and
        "LIVES" is a handshake and data both ways.
        """
        flow = self.flows.setdefault(port, Flow(self.path, 4, KINDS[self.kind], client(port)))
        flow.path = self.path
        for word in script.replace("LIVES", LIVES).split():
            if word.endswith("s"):
                flow.age(int(word[:-1]))
            else:
                flow.send(word)

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


LIVES = "S <SA A+ <A"

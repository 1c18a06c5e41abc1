# SPDX-License-Identifier: Apache-2.0
"""Which flows make room when the table is full, and which stay."""

import contextlib
import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kbpf.dataplane.bpf.inspect import connections as tracked_connections
from kbpf.dataplane.bpf.maps import flow_entries as fields
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.flow_entries import flow_key, is_original
from kbpf.dataplane.bpf.maps.layout import (
    DEVICE,
    FLOW,
    MAPS,
    U32,
    U64,
    DeviceFlag,
    FlowDirection,
    FormerLayout,
    Reason,
    Role,
    Target,
    TcpState,
    pack_target,
)
from kbpf.dataplane.bpf.maps.migrate import MapMigration
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.metrics import MapCollector
from kbpf.dataplane.bpf.packet_path import flow_gc
from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.programs.loader import SocketPrograms
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects, syscalls, uapi
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.system import netns
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, MapSizes
from kbpf.model.metrics import FlowCount
from kbpf.model.objects import Protocol
from tests.support.lab.lab import ip
from tests.support.lab.lab import run as command
from tests.support.packets.packets import Talk, frame, tcp, udp
from tests.support.packets.parse import parse
from tests.support.packets.shares import has_port
from tests.support.packets.test_run import TC_ACT_SHOT, run
from tests.support.plane import Site, desired, service, sites

ROOM = 32
MOST = 36
"""With the reserve of an eighth for connections that are needed."""
NODE, POD = "198.18.0.1", "10.244.1.2:8080"
VIPS = {"kept": "192.0.2.1:80", "translated": "192.0.2.2:80"}
"""One VIP keeps the client's address, the other one translates it; so a flow has 2 or 3 entries."""
PARTS = {"kept": 2, "translated": 3}
MINUTE = 60 * 10**9
HOUR = 60 * MINUTE


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
            service(f"{name}-{protocol.name}".lower(), f"LoadBalancer={vip}", POD, protocol,
                    local=POD, external_local=name == "kept")
            for name, vip in VIPS.items()
            for protocol in (Protocol.TCP, Protocol.UDP)
        ]  # fmt: skip
        state = msgspec.structs.replace(desired(*made), masquerade_addresses=(parse_addr(NODE),))
        netns.run_in(Path("/run/netns") / str(self.site.node), lambda: plane.apply(state, None))
        self.open_programs()

    def open_programs(self) -> None:
        """Opens the programs that are pinned now; loopback becomes an uplink."""
        with self.site.pinned("devices") as devices:
            value = DEVICE.pack(Role.HOST, 14, DeviceFlag(0), bytes(6), bytes(16), bytes(16))
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
        with self.site.pinned("flows") as flows:
            flows.delete_batch(b"".join(key for key, _ in flows.items()))

    def drain(self) -> list[bytes]:
        """Empties the queue; returns its keys, oldest first."""
        found = []
        with self.site.pinned("flow_queue") as order:
            taken = ctypes.create_string_buffer(order.value_size)
            while syscalls.lib().bpf_map_lookup_and_delete_elem(order.fd, None, taken) == 0:
                found.append(taken.raw)
        return found

    def empty(self) -> None:
        """Restores the initial state: no flows, an empty queue, a count of 0."""
        self.delete_flows()
        self.drain()
        with self.site.pinned("flow_count") as tracked:
            tracked.update(U32.pack(0), U64.pack(0))

    def talk(self, port: int, script: str) -> None:
        """Sends packets of the client's flow with this port. "?" and "<!" are datagrams, "<" marks
        packets of the backend, other words are TCP segments as in packets.Talk, and "3s" lets three
        seconds pass.
        """
        own, vip = client(port), VIPS[self.kind]
        seen = own
        for word in script.split():
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
            assert done.retval != TC_ACT_SHOT, (port, word)
            done = run(self.programs["tc_egress"], done.packet_out)
            if not back:
                seen = parse(done.packet_out[14:], l2=False).source

    def ports(self) -> dict[int, int]:
        """Client ports that have a flow, and how many entries each has. Every flow must have its
        original entry.
        """
        found: dict[int, int] = {}
        questions = set()
        for raw in self.site.entries("flows").values():
            port = Target.unpack(FLOW.unpack(raw)[1]).port
            found[port] = found.get(port, 0) + 1
            if is_original(raw):
                questions.add(port)
        assert questions == found.keys()
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


@pytest.fixture(scope="module")
def site(artifact_cache: Path) -> Iterator[Site]:
    where = f"kbpo{os.getpid()}"
    command("ip", "netns", "add", where)
    try:
        ip("link set lo up", netns=where)
        with sites(artifact_cache) as make:
            yield make(node=where)
    finally:
        command("ip", "netns", "del", where)


@pytest.fixture(scope="module")
def started(site: Site) -> Iterator[Flows]:
    made = Flows(site)
    made.start(ROOM)
    yield made
    made.close()


@pytest.fixture(params=PARTS)
def flows(started: Flows, request: pytest.FixtureRequest) -> Iterator[Flows]:
    started.kind = request.param
    started.empty()
    started.before = started.site.reasons()[Reason.EVICTED]
    with started.site.telling():
        yield started


LIVES = "S <SA A+ <A"
OLDEST = {
    "half open": ("S", True),
    "SYN-ACK without further segments": ("S <SA", True),
    "established": (LIVES, False),
    "the client has closed": (f"{LIVES} FA", False),
    "the backend has closed": (f"{LIVES} <FA", False),
    "both have closed": (f"{LIVES} FA <FA A", True),
    "reset by the client": (f"{LIVES} R", True),
    "reset by the backend": (f"{LIVES} <R", True),
    "datagrams one way": ("?", True),
    "request and reply": ("? <!", True),
    "UDP both ways, request two seconds later": ("? <! 3s ?", False),
    "UDP both ways, reply two seconds later": ("? <! 3s <!", False),
    "one reply, two seconds later": ("? 3s <!", True),
    "many datagrams at once": ("? <! ? <! ? <! ?", True),
    "established, and idle": (f"{LIVES} 3600s", False),
    "recent handshake": ("S <SA A", False),
    "handshake not proven by the backend": ("S <SA A 6s", True),
    "the client has closed, then silence": (f"{LIVES} FA 11s", True),
    "the backend has closed, then silence": (f"{LIVES} <FA <A 11s", True),
    "the client has closed, and gets data": (f"{LIVES} FA 11s <A+ A", False),
    "resets out of window": (f"{LIVES} R! <R! 11s", False),
    "forged without seeing the replies": ("S <SA A! A+! 6s", True),
}
"""The oldest flow, and whether it makes room."""


@pytest.mark.parametrize("kind", OLDEST)
def test_oldest_flow_that_is_not_needed_is_evicted(flows: Flows, kind: str) -> None:
    script, makes_room = OLDEST[kind]
    for port, each in enumerate([script] + [LIVES] * (ROOM - 1), 2000):
        flows.talk(port, each)
    assert flows.ports() == flows.complete(range(2000, 2000 + ROOM)), "there is room for all"
    flows.talk(5000, LIVES)
    assert flows.ports() == flows.complete([*range(2000 + makes_room, 2000 + ROOM), 5000])
    assert flows.evicted() == 0


STREAM = "? <! 3s ?"
FULL = {
    "a SYN meets established connections": (LIVES, "S", 0),
    "a datagram meets established connections": (LIVES, "?", 0),
    "a SYN meets UDP streams": (STREAM, "S", 1),
    "a datagram meets UDP streams": (STREAM, "?", 0),
}
"""The flows that fill the table, the packet that begins a new one, and how many it evicts."""


@pytest.mark.parametrize("kind", FULL)
def test_new_flow_does_not_evict_established_ones(flows: Flows, kind: str) -> None:
    """Except that TCP and SCTP evict UDP streams, which are established more easily."""
    script, word, evicted = FULL[kind]
    for port in range(2000, 2000 + MOST):
        flows.talk(port, script)
    assert flows.ports() == flows.complete(range(2000, 2000 + MOST))
    ends = client(5000), VIPS[flows.kind]
    packet = udp(*ends) if word == "?" else tcp(*ends, flags=word)
    full = flows.site.reasons()[Reason.TABLE_FULL]
    verdict = run(flows.programs["tc_ingress"], frame(packet)).retval
    assert (verdict == TC_ACT_SHOT) == (not evicted)
    assert flows.site.reasons()[Reason.TABLE_FULL] - full == (not evicted)
    there = flows.ports()
    assert len(there) == MOST
    assert (5000 in there) == bool(evicted)
    assert there == flows.complete(list(there)), "no flow lost an entry"
    assert flows.evicted() == evicted


REPEATS = 100_000


def test_no_flow_loses_its_place_when_two_cpus_look_for_room(flows: Flows) -> None:
    """While one CPU checks an oldest flow, which is not in the queue then, another may fill the
    queue. The flow is evicted then: without a key in the queue it would stay in the map for ever.
    """
    for port in range(2000, 2000 + MOST):
        flows.talk(port, LIVES)
    before = {key for key, raw in flows.site.entries("flows").items() if is_original(raw)}

    def flood(host: int) -> None:
        syn = frame(tcp(f"198.51.100.{host}:5000", VIPS[flows.kind], flags="S"))
        run(flows.programs["tc_ingress"], syn, repeat=REPEATS)

    threads = [threading.Thread(target=flood, args=(host,)) for host in (8, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before & flows.site.entries("flows").keys() <= set(flows.drain())


def test_expired_flow_makes_room(flows: Flows) -> None:
    """An idle flow makes room although its state counts as established."""
    for port in range(2000, 2000 + ROOM):
        flows.talk(port, "? <! 3s ?")
    flows.age(2003, HOUR // 2)
    flows.talk(5000, LIVES)
    assert flows.ports() == flows.complete([*(set(range(2000, 2000 + ROOM)) - {2003}), 5000])
    assert flows.evicted() == 0


def test_syn_flood_evicts_only_its_own_flows(flows: Flows) -> None:
    """Spoofed SYNs from everywhere evict each other, and each finds room at first."""
    for port in range(2000, 2000 + ROOM // 2):
        flows.talk(port, LIVES)
    for port in range(20_000, 20_000 + 20 * ROOM):
        flows.talk(port, "S")
    there = flows.ports()
    assert flows.complete(range(2000, 2000 + ROOM // 2)).items() <= there.items()
    assert ROOM // 2 < len(there) <= ROOM + 1
    assert max(there) == 20_000 + 20 * ROOM - 1
    assert flows.evicted() == 0


def test_closed_connections_always_make_room(flows: Flows) -> None:
    """Many times as many as there is room for, without one entry too many."""
    for port in range(20_000, 20_000 + 20 * ROOM):
        flows.talk(port, f"{LIVES} FA <FA A")
    there = flows.ports()
    assert len(there) in (ROOM - 1, ROOM, ROOM + 1)
    assert there == flows.complete(range(20_000 + 20 * ROOM - len(there), 20_000 + 20 * ROOM))
    assert flows.evicted() == 0


@pytest.mark.parametrize("kind", OLDEST)
def test_evictable_flow_does_not_count_as_live(flows: Flows, kind: str) -> None:
    """On a node with many short connections most entries belong to closed ones."""
    script, evictable = OLDEST[kind]
    flows.talk(2000, script)
    counted = MapCollector(Pins(flows.site.pins), Config()).count(lambda: None)
    assert counted.flow_count == FlowCount(live=not evictable, capacity=ROOM)
    with flows.site.pinned("flows") as held:
        filled = tracked_connections.measure_fill(held, time.monotonic())
    assert (filled.entries, filled.needed) == (1, not evictable)


def test_expired_flows_do_not_count_as_live(flows: Flows) -> None:
    """Metrics count live connections, because alarms are about these."""
    meter = MapCollector(Pins(flows.site.pins), Config())
    for port in range(20_000, 20_000 + 3 * ROOM):
        flows.talk(port, f"{LIVES} FA <FA A")
        flows.age(port, HOUR)
    flows.talk(2000, LIVES)
    entries = len(flows.site.entries("flows"))
    assert entries >= (ROOM - 1) * PARTS[flows.kind], "the map is full"
    assert meter.count(lambda: None).flow_count == FlowCount(live=1, capacity=ROOM)
    off = MapCollector(Pins(flows.site.pins), Config(packet_path=False))
    assert off.count(lambda: None).flow_count is None, "then the map has its minimum size"
    told = {table.name: table for table in meter.read({}).tables}
    assert told["flows"].entries == entries
    unbounded = {name for name, table in told.items() if table.limit is None}
    lru = {name for name, spec in MAPS.items() if spec.map_type == uapi.BPF_MAP_TYPE_LRU_HASH}
    assert unbounded == {"flows"} | lru, "an alarm for these would never end"


def test_reused_client_port_has_one_queue_entry(flows: Flows) -> None:
    """The new connection takes the queue entry of the old one, whose entries are deleted."""
    for _ in range(5 * ROOM):
        flows.talk(2000, f"{LIVES} FA <FA A")
    for port in range(2000, 2000 + ROOM):
        flows.talk(port, LIVES)
    assert flows.ports() == flows.complete(range(2000, 2000 + ROOM))
    assert flows.evicted() == 0


def test_handshake_on_a_reused_port_is_not_evicted(flows: Flows) -> None:
    """The client used its port again a moment ago; its queue entry is the oldest one."""
    for port in range(2000, 2000 + ROOM):
        flows.talk(port, f"{LIVES} FA <FA A")
    flows.talk(2000, "S")
    flows.age(2000, -HOUR)
    flows.talk(5000, LIVES)
    assert {2000, 5000} <= flows.ports().keys()
    assert 2001 not in flows.ports()


@pytest.mark.parametrize("before", ["", f"{LIVES} FA <FA A"], ids=["new", "reused port"])
@pytest.mark.parametrize("room", [0, 1, 2])
def test_flow_without_room_in_the_map_is_dropped(flows: Flows, before: str, room: int) -> None:
    """Not all entries can be written. No packet leaves half translated, and of the reply entries,
    which are written first, none stays.
    """
    flows.talk(2000, before)
    with flows.site.pinned("flows") as held:
        for key, raw in list(held.items()):
            if not is_original(raw):
                held.delete(key)
        other = bytearray(FLOW.size)
        other[99] = FlowDirection.REPLY
        number = 0
        with contextlib.suppress(KernelError):
            for number in range(held.max_entries + 1):
                held.update(number.to_bytes(40), bytes(other))
        assert number > 2 * ROOM, "the map is full"
        for number in range(min(room, PARTS[flows.kind] - 1 - bool(before))):
            held.delete(number.to_bytes(40))
    syn = tcp(client(2000), VIPS[flows.kind], flags="S")
    counted = flows.site.reasons()
    assert run(flows.programs["tc_ingress"], frame(syn)).retval == TC_ACT_SHOT
    assert flows.site.reasons() - counted == {Reason.NOT_TRACKED: 1}
    left = [raw for raw in flows.site.entries("flows").values() if raw != bytes(other)]
    assert [raw for raw in left if not is_original(raw)] == []


def test_queued_keys_of_deleted_flows_take_no_room(flows: Flows) -> None:
    """The agent has deleted flows until their keys fill the queue."""
    for port in range(2000, 2000 + ROOM):
        flows.talk(port, LIVES)
    flows.delete_flows()
    for port in range(3000, 3000 + ROOM):
        flows.talk(port, LIVES)
    assert flows.ports() == flows.complete(range(3000, 3000 + ROOM))
    assert flows.evicted() == 0


@pytest.mark.parametrize("room", [ROOM // 2, 2 * ROOM])
def test_changed_size_keeps_the_newest_flows_in_order(flows: Flows, room: int) -> None:
    """As after a restart with another --max-connections. The longest idle flow is evicted first."""
    ports = range(2000, 2000 + ROOM)
    for port in ports:
        flows.talk(port, LIVES)
    for port in (ports[-2], ports[-4]):
        flows.talk(port, "R")
    for number, port in enumerate(ports):
        flows.age(port, (ROOM - number) * MINUTE // 6)
    flows.start(room)
    with flows.site.pinned("flows") as held:
        assert held.max_entries == int(room * MAPS["flows"].entries_per_object)
    left = set(ports[-room:])
    assert flows.ports() == flows.complete([*left])
    for port in range(5000, 5000 + room - len(left)):
        flows.talk(port, LIVES)
    flows.talk(6000, LIVES)
    left -= {ports[-4], ports[-2]}
    there = flows.ports()
    assert left <= there.keys()
    assert ports[-4] not in there or room > ROOM
    assert 6000 in there
    flows.start(ROOM)


# ---- upgrades, and the moment of the change ------------------------------------------------------

MARKED = 4711


def marked(raw: bytes) -> bytes:
    """What an upgrade makes of a value; recognisable."""
    return raw[: fields.SERVICE.start] + U32.pack(MARKED) + raw[fields.SERVICE.stop :]


def another_layout(monkeypatch: pytest.MonkeyPatch, *former: FormerLayout) -> None:
    """From now on the code has another layout of `flows`."""
    monkeypatch.setitem(MAPS, "flows", replace(MAPS["flows"], version=99, former_layouts=former))


@pytest.mark.parametrize("knows", [True, False], ids=["known", "unknown"])
def test_flows_of_a_former_layout_are_converted(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    """Each is converted and keeps its place in the queue: the longest idle one is evicted first."""
    ports = range(2000, 2000 + ROOM)
    for port in ports:
        flows.talk(port, LIVES)
    flows.talk(ports[7], "R")
    flows.talk(ports[3], "R")
    for number, port in enumerate(ports):
        flows.age(port, (ROOM - number) * MINUTE // 6)
    another_layout(monkeypatch, *([FormerLayout(1, FLOW.size, marked)] if knows else []))
    flows.start(ROOM)
    assert flows.ports() == (flows.complete(ports) if knows else {})
    assert {raw[fields.SERVICE] for raw in flows.site.entries("flows").values()} <= {
        U32.pack(MARKED)
    }
    assert flows.tracked() == (ROOM if knows else 1), "0 would mean that there is no flow to evict"
    if knows:
        for port in (5000, 5001, 5002):
            flows.talk(port, LIVES)
        assert ports[3] not in flows.ports()
        assert ports[7] not in flows.ports()
        assert flows.ports().keys() >= {*ports[8:], 5000, 5001, 5002}
    monkeypatch.undo()
    flows.start(ROOM)


def test_unfinished_upgrade_is_repeated(flows: Flows, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new maps existed, and the agent ended before any program used them."""
    flows.talk(2000, LIVES)
    another_layout(monkeypatch, FormerLayout(1, FLOW.size, marked))
    flows.site.open(MapSizes(connections=ROOM), packet_path=True).close()
    flows.talk(2001, LIVES)
    flows.talk(2000, "FA <FA A")
    flows.start(ROOM)
    assert flows.ports() == flows.complete([2000, 2001])
    states = {Target.unpack(FLOW.unpack(raw)[1]).port: raw[fields.STATE]
              for raw in flows.site.entries("flows").values() if is_original(raw)}  # fmt: skip
    assert states == {2000: TcpState.CLOSED, 2001: TcpState.ESTABLISHED}
    monkeypatch.undo()
    flows.start(ROOM)


class Killed(Exception):
    """Raised where the agent is killed."""


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7, 8, 9, 20])
def test_kill_during_migration_leaves_every_flow_in_the_queue(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """After `steps` writes to the new maps. A flow that is not in the queue could never
    be evicted.
    """
    ports = range(2000, 2008)
    for port in ports:
        flows.talk(port, LIVES)
    for number, port in enumerate(ports):
        flows.age(port, number * MINUTE // 6)
    another_layout(monkeypatch, FormerLayout(1, FLOW.size, marked))
    left = itertools.count(-steps)

    def killing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def step(into: Map, *arguments: Any) -> Any:
            if into.name == name and next(left) >= 0:
                raise Killed
            return real(into, *arguments)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(Map, "push", killing(Map.push, "flow_queue"))
        patch.setattr(Map, "update", killing(Map.update, "flows"))
        with pytest.raises(Killed):
            flows.site.open(MapSizes(connections=ROOM), packet_path=True)
    flows.start(ROOM)
    assert flows.ports() == flows.complete(ports)
    held = flows.site.entries("flows")
    places = [Target.unpack(held[key][fields.CLIENT]).port for key in flows.drain()]
    assert list(dict.fromkeys(places)) == sorted(ports, reverse=True), "the longest idle one first"
    assert len(places) <= len(ports) + 1
    monkeypatch.undo()
    flows.start(ROOM)


class End(NamedTuple):
    """Where an agent is killed while its maps change their size: before this method, called with
    this last argument if one is given. `new`: the devices have the new programs by then.
    """

    owner: Any
    method: str
    last: str = ""
    new: bool = False


ENDS = {
    "before the apply": End(BpfPlane, "apply"),
    "before any map is pinned": End(pinning, "replace_pin", "flows"),
    "before the queue is pinned": End(pinning, "replace_pin", "flow_queue"),
    "before the packet programs are published": End(PacketPath, "publish"),
    "before the hooks change over": End(SocketPrograms, "publish", new=True),
    "before it has caught up": End(MapMigration, "catch_up", new=True),
}


@pytest.mark.parametrize("then", [2 * ROOM, ROOM], ids=["the new size", "the old size"])
@pytest.mark.parametrize("where", ENDS)
def test_kill_during_resize_loses_no_flow(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, where: str, then: int
) -> None:
    """Flows from before the kill, and later ones of the programs attached then; all are in the
    queue.
    """
    end = ENDS[where]
    real = getattr(end.owner, end.method)

    def killing(*arguments: Any) -> Any:
        if not end.last or arguments[-1] == end.last:
            raise Killed
        return real(*arguments)

    flows.talk(2000, LIVES)
    with monkeypatch.context() as patch:
        patch.setattr(end.owner, end.method, killing)
        with pytest.raises(Killed):
            flows.start(2 * ROOM)
    flows.site.close_planes()
    if end.new:
        flows.open_programs()
    flows.talk(3000, LIVES)
    flows.talk(2000, "FA <FA A")
    flows.start(then)
    assert flows.ports() == flows.complete([2000, 3000])
    states = {Target.unpack(FLOW.unpack(raw)[1]).port: raw[fields.STATE]
              for raw in flows.site.entries("flows").values() if is_original(raw)}  # fmt: skip
    assert states == {2000: TcpState.CLOSED, 3000: TcpState.ESTABLISHED}
    with flows.site.pinned("flows") as held:
        assert held.max_entries == int(then * MAPS["flows"].entries_per_object)
        known = dict(held.items())
    places = [known[key] for key in flows.drain() if key in known]
    assert {Target.unpack(raw[fields.CLIENT]).port for raw in places} == {2000, 3000}
    flows.start(ROOM)


def test_flows_begun_before_the_change_over_are_migrated(
    flows: Flows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New flows are paused from then on, because one of its two devices would not know them."""
    publish, elsewhere = PacketPath.publish, PacketPath.uses_other_flows
    seen: list[tuple[dict[int, int], bool]] = []

    def late(packets: PacketPath, held: Map) -> bool:
        flows.talk(3000, LIVES)  # through the old programs
        return elsewhere(packets, held)

    def looking(packets: PacketPath) -> int:
        if seen:  # the devices have changed over
            return publish(packets)
        syn = frame(tcp(client(3001), VIPS[flows.kind], flags="S"))
        dropped = run(flows.programs["tc_ingress"], syn).retval == TC_ACT_SHOT
        flows.talk(3000, "A <A")
        seen.append((flows.ports(), dropped))
        return publish(packets)

    monkeypatch.setattr(PacketPath, "uses_other_flows", late)
    monkeypatch.setattr(PacketPath, "publish", looking)
    flows.talk(2000, LIVES)
    before = flows.site.reasons()[Reason.PAUSED]
    flows.start(2 * ROOM)
    assert seen == [(flows.complete([2000, 3000]), True)]
    assert flows.site.reasons()[Reason.PAUSED] == before + 1
    monkeypatch.undo()
    flows.talk(3001, LIVES)
    assert flows.ports() == flows.complete([2000, 3000, 3001])
    flows.start(ROOM)


@pytest.mark.parametrize(("seconds", "begins"), [(3600, False), (-1, True)])
def test_pause_of_new_flows_ends_by_itself(flows: Flows, seconds: int, begins: bool) -> None:
    flows.talk(2000, LIVES)
    with flows.site.pinned("new_flows_paused_until") as paused:
        paused.update(U32.pack(0), U64.pack(time.monotonic_ns() + seconds * 10**9))
        try:
            syn = frame(tcp(client(2001), VIPS[flows.kind], flags="S"))
            assert (run(flows.programs["tc_ingress"], syn).retval != TC_ACT_SHOT) == begins
            flows.talk(2000, "A <A FA <FA A")
        finally:
            paused.update(U32.pack(0), bytes(8))
    assert flows.ports().keys() == {2000, 2001} if begins else {2000}


# ---- orphaned reply entries ----------------------------------------------------------------------

OTHER_POD = "10.244.1.3"
NOW = itertools.count(1e9, flow_gc.GC_INTERVAL_S)
"""Times of the agent's polls."""


class Orphan(NamedTuple):
    """Packets of a flow for which two CPUs chose differently, and whether the reply entries that do
    not belong to the original entry are deleted after `seconds`.
    """

    name: str
    script: str
    seconds: int
    is_deleted: bool


ORPHANS = [
    Orphan("a request, recent", "?", 29, False),
    Orphan("a request", "?", 31, True),
    Orphan("a reply, recent", "? <!", 29, False),
    Orphan("a reply", "? <!", 31, True),
    Orphan("a stream, recent", "? <! 3s ?", 115, False),
    Orphan("a stream", "? <! 3s ?", 121, True),
    Orphan("a SYN", "S", 121, True),
    Orphan("TCP, recent", LIVES, 23 * 3600, False),
    Orphan("TCP", LIVES, 25 * 3600, True),
]


def add_orphans(flows: Flows, port: int) -> dict[bytes, bytes]:
    """Adds the entries that another CPU made for this port's flow: with another backend and, if the
    source is translated, with another node port. Returns them.
    """
    made = {}
    for raw in flows.site.entries("flows").values():
        if is_original(raw) or Target.unpack(raw[fields.CLIENT]).port != port:
            continue
        client, pod = (
            raw[fields.CLIENT],
            pack_target(parse_addr(OTHER_POD), 8080, raw[fields.PROTOCOL]),
        )
        if raw[fields.DIRECTION] == FlowDirection.REPLY:
            made[flow_key(client, pod)] = (
                raw[: fields.BACKEND.start] + pod + raw[fields.BACKEND.stop :]
            )
        else:
            number = (port + 18_000).to_bytes(2, "big")
            node = raw[fields.SNAT] + number + client[18:]
            other = raw[: fields.SNAT_PORT.start] + number + raw[fields.SNAT_PORT.stop :]
            made[flow_key(node, raw[fields.BACKEND])] = other
    with flows.site.pinned("flows") as held:
        for key, raw in made.items():
            held.update(key, raw)
    return made


def remove(held: Map, seconds: float) -> int:
    """Removes orphans as if `seconds` had passed; returns how many."""
    at = time.monotonic_ns() + int(seconds * 1e9)
    return sum(flow_gc.remove_orphans(held, *batch, at) for batch in list(held.batches()))


@pytest.mark.parametrize("row", ORPHANS, ids=lambda row: row.name)
def test_orphaned_reply_entries_are_deleted_when_expired(flows: Flows, row: Orphan) -> None:
    """The flow's own reply entries stay although they are as old: a flow makes room with all its
    entries.
    """
    flows.talk(2000, row.script)
    flows.talk(2001, "?")
    complete = flows.site.entries("flows")
    made = add_orphans(flows, 2000)
    assert len(made) == PARTS[flows.kind] - 1
    with flows.site.pinned("flows") as held:
        assert remove(held, row.seconds) == (len(made) if row.is_deleted else 0)
    assert flows.site.entries("flows") == complete | ({} if row.is_deleted else made)


def test_reply_entries_without_original_entry_are_deleted(flows: Flows) -> None:
    flows.talk(2000, "?")
    flows.talk(2001, "?")
    with flows.site.pinned("flows") as held:
        for key, raw in list(held.items()):
            if is_original(raw) and Target.unpack(raw[fields.CLIENT]).port == 2000:
                held.delete(key)
        assert remove(held, 29) == 0
        assert remove(held, 31) == PARTS[flows.kind] - 1
    assert flows.ports() == flows.complete([2001])


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "before v5.14"])
def test_entry_replaced_during_the_deletion_stays(
    flows: Flows, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Another flow reused the port, or the backend, after the entry was read."""
    if not at_once:
        lib = LibbpfWithoutLookupAndDelete(syscalls.lib())
        monkeypatch.setattr(syscalls, "lib", lambda: lib)
    flows.talk(2000, "?")
    made = add_orphans(flows, 2000)
    anew = {key: raw[:-1] + b"\1" for key, raw in made.items()}
    take = Map.lookup_and_delete

    def late(self: Map, key: bytes) -> bytes | None:
        self.update(key, anew[key])
        return take(self, key)

    with flows.site.pinned("flows") as held:
        with monkeypatch.context() as patch:
            patch.setattr(Map, "lookup_and_delete", late)
            assert remove(held, 31) == 0
        assert anew.items() <= dict(held.items()).items()
        assert remove(held, 31) == len(made)
        assert held.lookup_and_delete(next(iter(made))) is None, "it is deleted"


class LibbpfWithoutLookupAndDelete:
    """libbpf on a kernel whose hash maps lack BPF_MAP_LOOKUP_AND_DELETE_ELEM."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib

    def __getattr__(self, name: str) -> Any:
        if name == "bpf_map_lookup_and_delete_elem":
            return lambda *_: -objects.ENOTSUPP
        return getattr(self._lib, name)


def test_agent_removes_orphans_in_parts(flows: Flows, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the map at each poll; then it starts over."""
    monkeypatch.setattr(objects, "BATCH_SIZE", 8)
    ports = range(2000, 2000 + ROOM // 2)
    node = Path("/run/netns") / str(flows.site.node)
    for port in ports:
        flows.talk(port, "?")
    for _ in range(2):
        made = {key for port in ports for key in add_orphans(flows, port)}
        for port in ports:
            flows.age(port, MINUTE)
        left = []
        for now in itertools.islice(NOW, 100):
            netns.run_in(node, lambda: flows.plane.tick(now))  # noqa: B023
            left.append(len(made & flows.site.entries("flows").keys()))
        assert left[0] > 0, "not all at once"
        assert left[-1] == 0
        assert flows.ports() == flows.complete(ports)

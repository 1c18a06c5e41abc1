# SPDX-License-Identifier: Apache-2.0
"""Which flows make room when the table is full, which stay, and orphaned reply entries."""

import contextlib
import itertools
import struct
import threading
import time
from typing import Any

import pytest

from kbpf.dataplane.bpf.inspect import connections as tracked_connections
from kbpf.dataplane.bpf.map_metrics import MapCollector
from kbpf.dataplane.bpf.maps import flow_entries as fields
from kbpf.dataplane.bpf.maps.flow_entries import flow_key, is_original
from kbpf.dataplane.bpf.maps.layout import FLOW, MAPS, U32, FlowDirection, Reason, Target, pack_target
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import flow_gc
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects, syscalls, uapi
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.metrics import FlowCount
from tests.programs.maps.flows.table import LIVES, PARTS, ROOM, VIPS, Flows, both_kinds, client
from tests.support.lab.events import read_reasons_and_ends, watched
from tests.support.packets.packets import frame, tcp, udp
from tests.support.packets.test_run import TC_ACT_SHOT, run
from tests.support.table import each_cells

MOST = 36
"""With the reserve of an eighth for connections that are needed."""


def fill(flows: Flows, script: str) -> None:
    """Fills the table; the oldest flow is of this kind, and all others are established."""
    for port, each in enumerate([script] + [LIVES] * (ROOM - 1), 2000):
        flows.talk(port, each)


def flow_count(flows: Flows, **settings: Any) -> FlowCount | None:
    """What the agent counts with these settings."""
    return MapCollector(Pins(flows.site.pins), Config(**settings)).count(lambda: None).flow_count


@both_kinds
@each_cells(
    "script, makes_room",
    """
half open                                | S                       | yes
SYN-ACK without further segments         | S <SA                   | yes
SYN that the backend denies              | S <A|                   | yes
established                              | LIVES                   | no
the client has closed                    | LIVES FA -60s           | no
the backend has closed                   | LIVES <FA -60s          | no
both have closed                         | LIVES FA <FA A          | yes
reset by the client                      | LIVES R                 | yes
reset by the backend                     | LIVES <R                | yes
datagrams one way                        | ?                       | yes
request and reply                        | ? <!                    | yes
UDP both ways, request two seconds later | ? <! 3s ?               | no
UDP both ways, reply two seconds later   | ? <! 3s <!              | no
UDP both ways, then idle                 | ? <! 3s ? 1800s         | yes
one reply, two seconds later             | ? 3s <!                 | yes
many datagrams at once                   | ? <! -60s ? <! ? <! ?   | yes
established, and idle                    | LIVES 3600s             | no
both have closed, and idle               | LIVES FA <FA A 3600s    | yes
recent handshake                         | S <SA A -60s            | no
handshake not proven by the backend      | S <SA A 6s              | yes
the client has closed, then silence      | LIVES FA 11s            | yes
the backend has closed, then silence     | LIVES <FA <A 11s        | yes
the client has closed, and gets data     | LIVES FA 11s <A+ A -60s | no
resets out of window                     | LIVES R! <R!| 11s       | no
forged without seeing the replies        | S <SA A! A+! 6s         | yes
""",
    makes_room=bool,
)
def test_oldest_flow_that_is_not_needed_is_evicted(flows: Flows, script, makes_room):
    """The oldest flow, and whether it makes room. With "-60s" it stays recent, however long a test takes."""
    fill(flows, script)
    assert flows.ports() == flows.complete(range(2000, 2000 + ROOM)), "there is room for all"
    live = ROOM - makes_room
    assert flow_count(flows) == FlowCount(live=live, capacity=ROOM), "metrics count live connections"
    with flows.site.pinned("flows") as held:
        filled = tracked_connections.measure_fill(held, time.monotonic())
    assert (filled.entries, filled.needed) == (ROOM, live)
    flows.talk(5000, LIVES)
    assert flows.ports() == flows.complete([*range(2000 + makes_room, 2000 + ROOM), 5000])
    assert flows.evicted() == 0


DOUBTFUL = {
    "LIVES FA 11s": 120,
    "S <SA A 6s": 120,
    "?": 30,
    "? 20s": 10,
    "? 20s <! 9s": 21,
    "? 20s <! 15s": 15,
    "S <A|": 0,
    "LIVES FA <FA": 120,
    "LIVES FA <FA A": 0,
}
"""The flow that is evicted, and for how many seconds its backend may still send to its port."""


@pytest.mark.parametrize(("script", "seconds"), DOUBTFUL.items())
def test_port_of_an_evicted_flow_is_in_doubt(flows: Flows, script: str, seconds: int):
    """Until then it gets no other flow, which could receive what the backend sends."""
    fill(flows, script)
    given = {
        snat_port(raw)
        for raw in flows.site.entries("flows").values()
        if Target.unpack(FLOW.unpack(raw)[1]).port == 2000
    }
    flows.talk(5000, LIVES)
    assert 2000 not in flows.ports()
    found = flows.doubts()
    assert len(found) == bool(seconds)
    assert all(seconds - 10 < each <= seconds + 1 for each in found)
    if seconds:
        (port,) = given
        with flows.site.restored("node"):
            value = flows.site.entries("node")[U32.pack(0)]
            flows.site.put("node", U32.pack(0), value[:36] + struct.pack("=HH", port, port) + value[40:])
            build = udp if script.startswith("?") else lambda a, b: tcp(a, b, flags="S")
            packet = frame(build("203.0.113.7:9", VIPS["translated"]))
            counted = flows.site.reasons()[Reason.NO_SNAT_PORT]
            assert run(flows.programs["tc_ingress"], packet).retval == TC_ACT_SHOT
            assert flows.site.reasons()[Reason.NO_SNAT_PORT] == counted + 1
            flows.settle()
            assert run(flows.programs["tc_ingress"], packet).retval != TC_ACT_SHOT


def snat_port(raw: bytes) -> int:
    return int.from_bytes(raw[fields.SNAT_PORT], "big")


FULL = [(LIVES, "S", 0), (LIVES, "?", 0), ("? <! 3s ?", "S", 1), ("? <! 3s ?", "?", 0)]
"""The flows that fill the table, the packet that begins a new one, and how many it evicts."""


@pytest.mark.parametrize(("script", "word", "evicted"), FULL)
def test_new_flow_does_not_evict_established_ones(flows: Flows, script: str, word: str, evicted: int):
    """Except that TCP and SCTP evict UDP streams, which are established more easily."""
    flows.talk_all(range(2000, 2000 + MOST), script)
    assert flows.ports() == flows.complete(range(2000, 2000 + MOST))
    ends = client(5000), VIPS[flows.kind]
    packet = udp(*ends) if word == "?" else tcp(*ends, flags=word)
    full = flows.site.reasons()[Reason.TABLE_FULL]
    with watched(flows.site) as monitor:
        verdict = run(flows.programs["tc_ingress"], frame(packet)).retval
        events = read_reasons_and_ends(monitor)
    if evicted:
        (gone,) = set(range(2000, 2000 + MOST)) - flows.ports().keys()
        evicts = ("evicted", "evicted", client(gone))
        assert events == [evicts, ("new", "new_flow", client(5000))]
    else:
        assert events == [("dropped", "table_full", client(5000))]
    assert (verdict == TC_ACT_SHOT) == (not evicted)
    assert flows.site.reasons()[Reason.TABLE_FULL] - full == (not evicted)
    there = flows.ports()
    assert len(there) == MOST
    assert (5000 in there) == bool(evicted)
    assert there == flows.complete(list(there)), "no flow lost an entry"
    assert flows.evicted() == evicted


REPEATS = 100_000


def test_no_flow_loses_its_place_when_two_cpus_look_for_room(flows: Flows):
    """While one CPU checks an oldest flow, which is not in the queue then, another may fill the
    queue. The flow is evicted then: without a key in the queue it would stay in the map for ever.
    """
    flows.talk_all(range(2000, 2000 + MOST), LIVES)
    before = {key for key, raw in flows.site.entries("flows").items() if is_original(raw)}

    def flood(host: int) -> None:
        syn = frame(tcp(f"198.51.100.{host}:5000", VIPS[flows.kind], flags="S"))
        run(flows.programs["tc_ingress"], syn, repeat=REPEATS)

    threads = [threading.Thread(target=flood, args=(host,)) for host in (8, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before & flows.site.entries("flows").keys() <= set(flows.site.drain_queue())


def test_syn_flood_evicts_only_its_own_flows(flows: Flows):
    """Spoofed SYNs from everywhere evict each other, and each finds room at first."""
    flows.talk_all(range(2000, 2000 + ROOM // 2), LIVES)
    flows.talk_all(range(20_000, 20_000 + 5 * ROOM), "S")
    there = flows.ports()
    assert flows.complete(range(2000, 2000 + ROOM // 2)).items() <= there.items()
    assert ROOM // 2 < len(there) <= ROOM + 1
    assert max(there) == 20_000 + 5 * ROOM - 1
    assert flows.evicted() == 0


def test_closed_connections_always_make_room(flows: Flows):
    """Many times as many as there is room for, without one entry too many."""
    flows.talk_all(range(20_000, 20_000 + 5 * ROOM), f"{LIVES} FA <FA A")
    there = flows.ports()
    assert len(there) in (ROOM - 1, ROOM, ROOM + 1)
    assert there == flows.complete(range(20_000 + 5 * ROOM - len(there), 20_000 + 5 * ROOM))
    assert flows.evicted() == 0


def test_limit_of_the_table_is_shown(flows: Flows):
    """If the packet path is off, the map has its minimum size. An alarm for a full LRU map would never end."""
    flows.talk_all(range(2000, 2000 + ROOM), f"{LIVES} FA <FA A")
    assert flow_count(flows, packet_path=False) is None
    meter = MapCollector(Pins(flows.site.pins), Config())
    meter.count(lambda: None)
    told = {table.name: table for table in meter.read({}).tables}
    assert told["flows"].entries == ROOM * PARTS[flows.kind]
    lru = {name for name, spec in MAPS.items() if spec.map_type == uapi.BPF_MAP_TYPE_LRU_HASH}
    assert {name for name, table in told.items() if table.limit is None} == {"flows"} | lru


def test_reused_client_port_has_one_queue_entry(flows: Flows):
    """The new connection takes the queue entry of the old one, whose entries are deleted."""
    for _ in range(5 * ROOM):
        flows.talk(2000, f"{LIVES} FA <FA A")
    flows.talk_all(range(2000, 2000 + ROOM), LIVES)
    assert flows.ports() == flows.complete(range(2000, 2000 + ROOM))
    assert flows.evicted() == 0


def test_handshake_on_a_reused_port_is_not_evicted(flows: Flows):
    """The client used its port again a moment ago; its queue entry is the oldest one."""
    flows.talk_all(range(2000, 2000 + ROOM), f"{LIVES} FA <FA A")
    flows.talk(2000, "S")
    flows.flows[2000].age(-3600)
    flows.talk(5000, LIVES)
    assert {2000, 5000} <= flows.ports().keys()
    assert 2001 not in flows.ports()


@both_kinds
@pytest.mark.parametrize("before", ["", f"{LIVES} FA <FA A"], ids=["new", "reused port"])
@pytest.mark.parametrize("room", [0, 1, 2])
def test_flow_without_room_in_the_map_is_dropped(flows: Flows, before: str, room: int):
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


def test_queued_keys_of_deleted_flows_take_no_room(flows: Flows):
    """The agent has deleted flows until their keys fill the queue."""
    flows.talk_all(range(2000, 2000 + ROOM), LIVES)
    flows.delete_flows()
    flows.talk_all(range(3000, 3000 + ROOM), LIVES)
    assert flows.ports() == flows.complete(range(3000, 3000 + ROOM))
    assert flows.evicted() == 0


@pytest.mark.parametrize("room", [ROOM // 2, 2 * ROOM])
def test_changed_size_keeps_the_newest_flows_in_order(flows: Flows, room: int):
    """As after a restart with another --max-connections. The longest idle flow is evicted first."""
    ports = range(2000, 2000 + ROOM)
    flows.talk_all(ports, LIVES)
    flows.talk_all((ports[-2], ports[-4]), "R")
    for number, port in enumerate(ports):
        flows.flows[port].age((ROOM - number) * 10)
    flows.start(room)
    with flows.site.pinned("flows") as held:
        assert held.max_entries == int(room * MAPS["flows"].entries_per_object)
    left = set(ports[-room:])
    assert flows.ports() == flows.complete([*left])
    flows.talk_all(range(5000, 5000 + room - len(left)), LIVES)
    flows.talk(6000, LIVES)
    left -= {ports[-4], ports[-2]}
    there = flows.ports()
    assert left <= there.keys()
    assert ports[-4] not in there or room > ROOM
    assert 6000 in there
    flows.start(ROOM)


# ---- orphaned reply entries ----------------------------------------------------------------------

OTHER_POD = "10.244.1.3"
NOW = itertools.count(1e9, flow_gc.GC_INTERVAL_S)
"""Times of the agent's polls."""


def add_orphans(flows: Flows, port: int) -> dict[bytes, bytes]:
    """Adds the entries that another CPU made for this port's flow: with another backend and, if the
    source is translated, with another node port. Returns them.
    """
    made = {}
    for raw in flows.site.entries("flows").values():
        if is_original(raw) or Target.unpack(raw[fields.CLIENT]).port != port:
            continue
        client, pod = (raw[fields.CLIENT], pack_target(parse_addr(OTHER_POD), 8080, raw[fields.PROTOCOL]))
        if raw[fields.DIRECTION] == FlowDirection.REPLY:
            made[flow_key(client, pod)] = raw[: fields.BACKEND.start] + pod + raw[fields.BACKEND.stop :]
        else:
            number = (port + 18_000).to_bytes(2, "big")
            node = raw[fields.SNAT] + number + client[18:]
            other = raw[: fields.SNAT_PORT.start] + number + raw[fields.SNAT_PORT.stop :]
            made[flow_key(node, raw[fields.BACKEND])] = other
    with flows.site.pinned("flows") as held:
        for key, raw in made.items():
            held.update(key, raw)
    return made


USED = 10**15
"""When all entries were last used: a test of a second more or less does not depend on its speed."""


def use_all(held: Map) -> None:
    """Makes all entries as old as each other."""
    for key, raw in list(held.items()):
        held.update(key, USED.to_bytes(8, "little") + raw[8:])


def remove(held: Map, seconds: float) -> int:
    """Removes orphans as if `seconds` had passed since USED; returns how many."""
    at = USED + int(seconds * 1e9)
    return sum(flow_gc.remove_unused(held, *batch, at) for batch in list(held.batches()))


@both_kinds
@each_cells(
    "script, seconds, is_deleted",
    """
a request, recent      | ?         | 29    | no
a request              | ?         | 31    | yes
a reply, recent        | ? <!      | 29    | no
a reply                | ? <!      | 31    | yes
a stream, recent       | ? <! 3s ? | 115   | no
a stream               | ? <! 3s ? | 121   | yes
a SYN                  | S         | 121   | yes
TCP, recent            | LIVES     | 115   | no
TCP                    | LIVES     | 121   | yes
TCP, after its timeout | LIVES     | 90000 | yes
""",
    seconds=int,
    is_deleted=bool,
)
def test_orphaned_reply_entries_are_deleted_when_expired(flows: Flows, script, seconds, is_deleted):
    """Packets of a flow for which two CPUs chose differently, and whether the reply entries that do not belong to the
    original entry are deleted after `seconds`. The flow's own reply entries stay although they are as old: a flow
    makes room with all its entries.
    """
    flows.talk(2000, script)
    flows.talk(2001, script)
    with flows.site.pinned("flows") as held:
        use_all(held)
    complete = flows.site.entries("flows")
    made = add_orphans(flows, 2000)
    assert len(made) == PARTS[flows.kind] - 1
    with flows.site.pinned("flows") as held:
        assert remove(held, seconds) == (len(made) if is_deleted else 0)
    assert flows.site.entries("flows") == complete | ({} if is_deleted else made)


def test_reply_entries_without_original_entry_are_deleted(flows: Flows):
    flows.talk(2000, "?")
    flows.talk(2001, "?")
    with flows.site.pinned("flows") as held:
        for key, raw in list(held.items()):
            if is_original(raw) and Target.unpack(raw[fields.CLIENT]).port == 2000:
                held.delete(key)
        use_all(held)
        assert remove(held, 29) == 0
        assert remove(held, 31) == PARTS[flows.kind] - 1
    assert flows.ports() == flows.complete([2001])


@each_cells(
    "script, seconds, is_deleted, used",
    """
a request, expired      | ?     | 7229   | no
a request, long expired | ?     | 7231   | yes
TCP, expired            | LIVES | 93599  | no
TCP, long expired       | LIVES | 93601  | yes
the client still sends  | LIVES | 108000 | no | ORIGINAL
the backend still sends | LIVES | 108000 | no | REPLY SNAT_REPLY
""",
    seconds=int,
    is_deleted=bool,
)
def test_flow_that_is_long_over_is_deleted(flows: Flows, script, seconds, is_deleted, used):
    """Packets of a flow, and whether it is deleted after `seconds`. `used`: the entries that were used a minute before.
    Even if its key is not in the queue: another CPU has popped it before the entry existed.
    """
    flows.talk(2000, script)
    flows.site.drain_queue()
    later = USED + int((seconds - 60) * 1e9)
    with flows.site.pinned("flows") as held:
        use_all(held)
        for key, raw in list(held.items()):
            if FlowDirection(raw[fields.DIRECTION]).name in used.split():
                held.update(key, later.to_bytes(8, "little") + raw[8:])
        removed = sum(remove(held, seconds) for _ in range(2))
    assert removed == (PARTS[flows.kind] if is_deleted else 0)
    assert flows.ports() == ({} if is_deleted else flows.complete([2000]))


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "before v5.14"])
def test_entry_replaced_during_the_deletion_stays(flows: Flows, monkeypatch, at_once: bool):
    """Another flow reused the port, or the backend, after the entry was read."""
    if not at_once:
        monkeypatch.setattr(syscalls.lib(), "bpf_map_lookup_and_delete_elem", lambda *_: -objects.ENOTSUPP)
    flows.talk(2000, "?")
    with flows.site.pinned("flows") as held:
        use_all(held)
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


def test_agent_removes_orphans_in_parts(flows: Flows, monkeypatch):
    """A part of the map at each poll; then it starts over."""
    monkeypatch.setattr(objects, "BATCH_SIZE", 8)
    ports = range(2000, 2000 + ROOM // 2)
    flows.talk_all(ports, "?")
    for _ in range(2):
        made = {key for port in ports for key in add_orphans(flows, port)}
        for port in ports:
            flows.flows[port].age(60)
        left = []
        for now in itertools.islice(NOW, 100):
            flows.site.do(lambda: flows.plane.tick(now))  # noqa: B023
            left.append(len(made & flows.site.entries("flows").keys()))
        assert left[0] > 0, "not all at once"
        assert left[-1] == 0
        assert flows.ports() == flows.complete(ports)

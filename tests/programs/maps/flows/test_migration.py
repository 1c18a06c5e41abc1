# SPDX-License-Identifier: Apache-2.0
"""Flows across a change of size or of layout, and the moment of the change."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from kbpf.dataplane.bpf.maps import flow_entries as fields
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import FLOW, MAPS, U32, U64, FormerLayout, Reason, Target, TcpState
from kbpf.dataplane.bpf.maps.migrate import MapMigration
from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.socket_hooks import SocketPrograms
from kbpf.kernel.bpf.objects import Map
from kbpf.model.config import MapSizes
from tests.programs.maps.flows.table import LIVES, ROOM, VIPS, Flows, client
from tests.support.lab.events import read_reasons_and_ends, watched
from tests.support.packets.packets import frame, tcp
from tests.support.packets.test_run import TC_ACT_SHOT, run

# ---- upgrades, and the moment of the change ------------------------------------------------------

MARKED = 4711


def marked(raw: bytes) -> bytes:
    """What an upgrade makes of a value; recognisable."""
    return raw[: fields.SERVICE.start] + U32.pack(MARKED) + raw[fields.SERVICE.stop :]


def another_layout(monkeypatch: pytest.MonkeyPatch, *former: FormerLayout) -> None:
    """From now on the code has another layout of `flows`."""
    monkeypatch.setitem(MAPS, "flows", replace(MAPS["flows"], version=99, former_layouts=former))


@pytest.mark.parametrize("knows", [True, False], ids=["known", "unknown"])
def test_flows_of_a_former_layout_are_converted(flows: Flows, monkeypatch, knows: bool):
    ports = range(2000, 2000 + ROOM)
    flows.talk_all(ports, LIVES)
    another_layout(monkeypatch, *([FormerLayout(1, FLOW.size, marked)] if knows else []))
    flows.start(ROOM)
    assert flows.ports() == (flows.complete(ports) if knows else {})
    assert {raw[fields.SERVICE] for raw in flows.site.entries("flows").values()} <= {U32.pack(MARKED)}
    assert flows.tracked() == (ROOM if knows else 0)
    monkeypatch.undo()
    flows.start(ROOM)


class Killed(Exception):
    """Raised where the agent is killed."""


@pytest.mark.parametrize("steps", [0, 1, 3, 9, 20])
def test_kill_during_migration_leaves_every_flow_in_the_queue(flows: Flows, monkeypatch, steps: int):
    """After `steps` writes to the new maps. A flow that is not in the queue could never
    be evicted.
    """
    ports = range(2000, 2008)
    flows.talk_all(ports, LIVES)
    for number, port in enumerate(ports):
        flows.flows[port].age(number * 10)
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
    places = [Target.unpack(held[key][fields.CLIENT]).port for key in flows.site.drain_queue()]
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
OLD_SIZE = "before the hooks change over"
"""After this end the next agent has the old size, too."""


@pytest.mark.parametrize(("where", "then"), [*((where, 2 * ROOM) for where in ENDS), (OLD_SIZE, ROOM)])
def test_kill_during_resize_loses_no_flow(flows: Flows, monkeypatch, where: str, then: int):
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
    assert flows.states() == {2000: TcpState.CLOSED, 3000: TcpState.ESTABLISHED}
    with flows.site.pinned("flows") as held:
        assert held.max_entries == int(then * MAPS["flows"].entries_per_object)
        known = dict(held.items())
    places = [known[key] for key in flows.site.drain_queue() if key in known]
    assert {Target.unpack(raw[fields.CLIENT]).port for raw in places} == {2000, 3000}
    flows.start(ROOM)


def test_flows_begun_before_the_change_over_are_migrated(flows: Flows, monkeypatch):
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
        with watched(flows.site) as monitor:
            dropped = run(flows.programs["tc_ingress"], syn).retval == TC_ACT_SHOT
            events = read_reasons_and_ends(monitor)
        assert events == [("dropped", "paused", client(3001))]
        flows.talk(3000, "A <A")
        seen.append((flows.ports(), dropped))
        return publish(packets)

    monkeypatch.setattr(PacketPath, "uses_other_flows", late)
    monkeypatch.setattr(PacketPath, "publish", looking)
    monkeypatch.setattr("kbpf.dataplane.bpf.maps.migrate.MAX_PAUSE_S", 600.0)
    flows.talk(2000, LIVES)
    before = flows.site.reasons()[Reason.PAUSED]
    flows.start(2 * ROOM)
    assert seen == [(flows.complete([2000, 3000]), True)]
    assert flows.site.reasons()[Reason.PAUSED] == before + 1
    monkeypatch.undo()
    flows.talk(3001, LIVES)
    assert flows.ports() == flows.complete([2000, 3000, 3001])
    flows.start(ROOM)


def test_pause_of_new_flows_ends_by_itself(flows: Flows):
    syn = frame(tcp(client(2001), VIPS[flows.kind], flags="S"))
    with flows.site.pinned("new_flows_paused_until") as paused:
        for seconds, begins in ((3600, False), (-1, True)):
            paused.update(U32.pack(0), U64.pack(time.monotonic_ns() + seconds * 10**9))
            assert (run(flows.programs["tc_ingress"], syn).retval != TC_ACT_SHOT) == begins
        paused.update(U32.pack(0), bytes(8))
    assert flows.ports().keys() == {2001}

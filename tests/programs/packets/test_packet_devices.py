# SPDX-License-Identifier: Apache-2.0
"""The data plane and its device thread: the order of their steps when programs are replaced."""

import errno
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kbpf.dataplane.bpf.maps import flow_entries as fields
from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.packet_path import device_thread
from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.bpf.tc import Attachment, TcAttacher
from kbpf.model.address import parse_addr
from kbpf.model.objects import Protocol
from tests.programs.packets.tc.net import programs_on_devices
from tests.support.lab.lab import PATIENCE, until
from tests.support.lab.namespace import Namespace
from tests.support.plane import SIZES, Site, desired, map_ids_read_by, service, sites, size_maps
from tests.support.stub_programs import refuse_to_compile

START = {"services": 8, "service_names": 8, "backend_slots": 16, "backends": 8, "set_members": 8}


class Node:
    """A node with two devices and a plane. Attaching to the device `slow` waits; to `broken` it
    fails.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.slow = self.broken = ""
        self.reached, self.resume = threading.Event(), threading.Event()
        self.plane = self.open()

    def open(self) -> BpfPlane:
        self.plane = self.site.open(packet_path=True)
        return self.plane

    def apply(self, count: int, to: str) -> None:
        """Applies so many Services with these endpoints."""
        state = desired(*(service(f"s{i:04}", f"10.96.0.{i + 1}:80", to) for i in range(count)))
        self.site.do(lambda: self.plane.apply(state, None))

    def serve(self) -> dict[str, set[int]]:
        """Serves until all devices have their programs, which are returned."""
        self.apply(3, "10.0.0.1:80")
        self.until_ready()
        return self.attached()

    def until_ready(self) -> None:
        until("all devices were processed", lambda: self.plane.status().ready)

    def begin(self, count: int, to: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: self.apply(count, to))
        thread.start()
        return thread

    def attached(self) -> dict[str, set[int]]:
        """Ids of the attached programs, by device."""
        return self.site.do(lambda: programs_on_devices(self.site.pins / "devices"))

    def failed(self) -> list[str]:
        """The devices that the status reports as failed."""
        return [one.device for one in self.plane.status().packets.failed]

    def old_programs(self) -> list[str]:
        """Folders of older programs that are still pinned."""
        return [path.name for path in self.site.pins.iterdir() if path.name.startswith("old-")]

    def incomplete_frontends(self) -> list[str]:
        """Frontends that a program which may still be attached would refuse, because its maps lack
        a slot of the set, or a slot's backend.
        """
        found = []
        for folder in self.site.pins.glob("*programs-tc-*"):
            if folder.name.startswith("new-") or not (folder / "tc_choose").exists():
                continue
            with Program.open(folder / "tc_choose") as program:
                program_id = program.read_info().id
            maps = {}
            for number in map_ids_read_by(program_id):
                with objects.open_map_by_id(number) as held:
                    if held.short_name in START:
                        maps[held.short_name] = dict(held.items())
            for at, raw in maps["services"].items():
                value = layout.ServiceValue.unpack(raw)
                for index in range(value.cluster_size):
                    slot = maps["backend_slots"].get(layout.U32_PAIR.pack(value.cluster_set, index))
                    if slot is None or slot not in maps["backends"]:
                        found.append(f"{folder.name} {layout.Target.unpack(at)}")
        return found

    def uses_pinned_maps(self) -> bool:
        """Whether all attached programs read the maps that are pinned now. False if one has just
        been replaced.
        """
        try:
            return self.site.use_pinned_maps(set().union(*self.attached().values()))
        except KernelError as error:
            if error.errno != errno.ENOENT:
                raise
            return False


@pytest.fixture
def node(artifact_cache: Path, namespace: Namespace, stub_programs: None, monkeypatch) -> Iterator[Node]:
    size_maps(monkeypatch, **START)
    monkeypatch.setattr(device_thread, "RETRY_DELAY_S", 0.1)
    monkeypatch.setattr(device_thread, "PUBLISH_STALL_TIMEOUT_S", 4 * PATIENCE)
    namespace.ip("link add here type veth peer name far")
    with sites(artifact_cache) as make, ExitStack() as stack:
        made = Node(make(node=namespace.name))
        stack.callback(made.resume.set)
        attach = TcAttacher.attach

        def watched(tc: TcAttacher, ifindex: int, to: Direction, program: Program) -> Attachment | None:
            name = socket.if_indextoname(ifindex)
            if name == made.slow:
                made.reached.set()
                made.resume.wait(PATIENCE)
            if name == made.broken:
                raise KernelError("broken by hand", name, errno=errno.EIO)
            return attach(tc, ifindex, to, program)

        monkeypatch.setattr(TcAttacher, "attach", watched)
        yield made


def endpoints(count: int, network: int) -> str:
    """Enough endpoints to make the maps of backends grow, but not those of frontends."""
    return " ".join(f"10.0.{network}.{number}:80" for number in range(1, count + 1))


# ---- new programs over other maps -------------------------------------------------------------

SWAPS = ["another layout", "another size", "another layout of the Services"]


def restart(node: Node, monkeypatch: pytest.MonkeyPatch, swap: str) -> None:
    """The next agent has to load other programs than those that are attached."""
    name = {"another layout": "reasons", "another layout of the Services": "services"}.get(swap)
    if name:
        changed = replace(layout.MAPS[name], version=99)
        monkeypatch.setitem(layout.MAPS, name, changed)
    size = 8192 if swap == "another size" else SIZES.connections
    node.site.close_planes()
    node.plane = node.site.open(replace(SIZES, connections=size), packet_path=True)


@pytest.mark.parametrize("swap", SWAPS)
def test_start_waits_for_a_device_that_is_slow_to_take_new_programs(node: Node, monkeypatch, swap: str):
    old = node.serve()
    restart(node, monkeypatch, swap)
    node.slow = "here"
    thread = node.begin(100, "10.0.0.2:80")
    assert node.reached.wait(PATIENCE)
    thread.join(0.5)
    assert thread.is_alive()
    assert node.attached()["here"] == old["here"]
    assert node.incomplete_frontends() == []
    assert len(node.old_programs()) == 1, "its tail calls live as long as their pin"
    node.resume.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert len(node.site.dump()["frontends"]) == 100
    assert node.uses_pinned_maps()
    assert set().union(*old.values()).isdisjoint(set().union(*node.attached().values()))
    until("unused programs are removed", lambda: not node.old_programs())


@pytest.mark.parametrize(("swap", "killed"), [*((swap, False) for swap in SWAPS), (SWAPS[2], True)])
def test_device_that_refuses_new_programs_keeps_the_old_ones(node: Node, monkeypatch, swap: str, killed: bool):
    """With complete maps, while sockets are served and maps grow; the next agent resumes."""
    old = node.serve()
    restart(node, monkeypatch, swap)
    node.broken = "here"
    node.apply(3, "10.0.0.2:80")
    assert node.attached()["here"] == old["here"]
    assert node.attached()["far"].isdisjoint(old["far"])
    until("it is reported", lambda: node.failed() == ["here"])
    node.apply(100, "10.0.0.2:80")
    for number in (2, 3):
        node.apply(3, endpoints(30 * number, number))
        assert len(node.old_programs()) == 1
        assert node.incomplete_frontends() == []
        assert node.site.use_pinned_maps(node.site.hook_programs().values())
    if killed:
        restart(node, monkeypatch, swap)
        node.apply(3, endpoints(60, 4))
        assert node.attached()["here"] == old["here"]
    node.broken = ""
    until("it is repaired", lambda: node.uses_pinned_maps() and node.failed() == [])
    until("unused programs are removed", lambda: not node.old_programs())
    assert node.incomplete_frontends() == []


@pytest.mark.parametrize("when", ["listed", "opened"])
def test_older_programs_removed_while_being_read_are_ignored(node: Node, monkeypatch, when: str):
    """The device thread removes them once all devices have newer ones."""
    node.serve()
    (folder,) = node.site.pins.glob("programs-tc-*")
    old = node.site.pins / f"old-{folder.name}-7"
    real_check, left_folder = PacketPath.uses_other_flows, []

    def leave(packets: PacketPath, flows: Map) -> bool:
        old.mkdir()
        for pin in folder.iterdir():
            with (Map if pin.name == "tails" else Program).open(pin) as held:
                held.pin(old / pin.name)
        left_folder.append(old)
        return real_check(packets, flows)

    where, name = {"listed": (Path, "iterdir"), "opened": (Program, "open")}[when]
    real = getattr(where, name)

    def open_late(path: Path) -> Any:
        # The agent opens its folder by descriptor, so its paths have another beginning.
        if left_folder and (path.name == old.name or path.parts[-2:] == (old.name, "tc_choose")):
            left_folder.clear()
            shutil.rmtree(old)
        return real(path)

    restart(node, monkeypatch, "another size")
    monkeypatch.setattr(PacketPath, "uses_other_flows", leave)
    monkeypatch.setattr(where, name, open_late)
    node.apply(100, "10.0.0.2:80")
    assert not left_folder
    assert not old.exists()
    assert node.uses_pinned_maps()


@pytest.fixture
def no_compiler(begun: Node, monkeypatch) -> Callable[[], None]:
    """The packet programs cannot be compiled from the next start on, until the fixture is
    called.
    """
    return refuse_to_compile(monkeypatch, "tc")


@pytest.fixture
def begun(node: Node) -> Node:
    """An agent with a packet path has served and exited."""
    node.serve()
    node.site.close_planes()
    assert node.attached().keys() == {"here", "far"}
    return node


def test_left_programs_serve_although_maps_grow(begun: Node, no_compiler: Callable[[], None]):
    """The next agent cannot compile programs at first, and attaches them as soon as it can."""
    node = begun
    old = node.attached()
    node.open()
    node.apply(3, "10.0.0.2:80")
    assert node.attached() == old
    assert node.uses_pinned_maps()
    node.apply(3, endpoints(50, 1))
    assert node.attached() == old
    assert node.uses_pinned_maps()
    assert node.incomplete_frontends() == []
    assert node.plane.status().packets.problem
    no_compiler()
    node.plane.invalidate()
    node.apply(3, endpoints(50, 1))
    node.until_ready()
    assert node.plane.status().packets.problem == ""
    assert node.attached().keys() == {"here", "far"}
    assert node.uses_pinned_maps()


@pytest.mark.parametrize("works", [True, False], ids=["at once", "not at all"])
def test_programs_with_another_map_layout_are_detached_after_apply(
    begun: Node, no_compiler: object, monkeypatch, works: bool
):
    """Sockets are served by the new programs, whether detaching from the devices works or not."""
    node = begun
    old = node.attached()
    monkeypatch.setitem(layout.MAPS, "services", replace(layout.MAPS["services"], version=99))
    node.open()
    assert node.attached() == old, "they serve until the maps are filled"
    if not works:
        monkeypatch.setattr(TcAttacher, "detach", Mock(side_effect=KernelError("broken by hand", errno=errno.EIO)))
    node.apply(3, "10.0.0.2:80")
    assert node.attached() == ({} if works else old)
    assert node.site.use_pinned_maps(node.site.hook_programs().values())


def test_flows_of_left_programs_move_to_new_maps(begun: Node, no_compiler: Callable[[], None]):
    """The new programs use flow maps of another size."""
    node, sizes = begun, replace(SIZES, connections=8192)
    old = node.attached()
    with node.site.pinned("flows") as flows:
        node.plane = node.site.open(sizes, packet_path=True)
        node.apply(3, "10.0.0.1:80")
        assert node.attached() == old
        assert node.site.pinned("flows").id == flows.id, "the map in use stays pinned"
        began = begin(flows)
    no_compiler()
    node.plane.invalidate()
    node.serve()
    assert node.uses_pinned_maps()
    with node.site.pinned("flows") as flows:
        assert flows.max_entries == int(8192 * layout.MAPS["flows"].entries_per_object)
        assert dict(flows.items()) == began


def begin(flows: Map) -> dict[bytes, bytes]:
    """Writes the entry of a connection to this map; returns it."""
    client, frontend = (
        layout.pack_target(parse_addr(address), port, Protocol.TCP)
        for address, port in (("198.51.100.7", 2000), ("10.96.0.1", 80))
    )
    raw = bytearray(layout.FLOW.size)
    raw[:8] = time.monotonic_ns().to_bytes(8, "little")
    raw[fields.CLIENT], raw[fields.FRONTEND] = client, frontend
    raw[fields.DIRECTION] = layout.FlowDirection.ORIGINAL
    made = {fields.flow_key(client, frontend): bytes(raw)}
    flows.update(*next(iter(made.items())))
    return made


def test_flows_in_old_maps_move_when_the_last_device_is_swapped(node: Node, monkeypatch):
    """The maps have another layout and another size. The old version's maps are removed
    only then.
    """
    node.serve()
    flows, former = node.site.pinned("flows"), node.site.maps
    monkeypatch.setitem(layout.MAPS, "reasons", replace(layout.MAPS["reasons"], version=99))
    node.broken = "here"
    restart(node, monkeypatch, "another size")
    node.apply(3, "10.0.0.1:80")
    until("it is reported", lambda: node.failed() == ["here"])
    begun = begin(flows)
    node.plane.tick(time.monotonic())
    assert node.site.entries("flows") == {}
    assert former.exists()
    node.broken = ""

    def has_moved() -> bool:
        node.plane.tick(time.monotonic())
        return not former.exists()

    until("all flows have moved", has_moved)
    assert node.attached().keys() == {"here", "far"}
    assert node.site.entries("flows") == begun
    flows.close()

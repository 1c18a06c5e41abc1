"""The data plane and the thread of its devices: who waits for whom when maps grow."""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kbpf.agent.agent import Agent
from kbpf.dataplane.bpf import keeper, layout
from kbpf.dataplane.bpf.layout import NODE, NodeFlag, pack_network
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.errors import KernelError
from kbpf.kernel import libbpf, netns
from kbpf.kernel.libbpf import Map, Program
from kbpf.kernel.tc import Attachment, Direction, Tc
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import ServiceState
from kbpf.model.events import Kind, ObjectKey, Synced, Upsert
from kbpf.model.objects import Node as KubeNode
from kbpf.source.fields import parse_cidr
from tests.support.lab import PATIENCE, ip, until
from tests.support.plane import SIZES, Site, desired, service, sites

START = {"services": 8, "service_names": 8, "backend_slots": 16, "backends": 8, "set_members": 8}


def many(count: int, to: str) -> list[ServiceState]:
    return [service(f"s{i:04}", f"10.96.0.{i + 1}:80", to) for i in range(count)]


class Node:
    """A node with two devices, and a plane; a device can be made slow, or broken."""

    def __init__(self, name: str, site: Site) -> None:
        self.name, self.site = name, site
        self.slow = self.broken = ""
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.plane = self.open()

    def open(self) -> BpfPlane:
        self.plane = self.site.open(packet_path=True)
        return self.plane

    def apply(self, *services: ServiceState) -> None:
        netns.inside(
            Path("/run/netns") / self.name, lambda: self.plane.apply(desired(*services), None)
        )

    def begin(self, *services: ServiceState) -> threading.Thread:
        thread = threading.Thread(target=lambda: self.apply(*services))
        thread.start()
        return thread

    def attached(self) -> dict[str, set[int]]:
        """The programs by device."""

        def read() -> dict[str, set[int]]:
            found: dict[str, set[int]] = {}
            with Tc(self.site.pins / "devices") as tc:
                for one in tc.everything():
                    found.setdefault(socket.if_indextoname(one.ifindex), set()).add(one.program)
            return found

        return netns.inside(Path("/run/netns") / self.name, read)

    def failed(self) -> list[str]:
        """The devices that the status tells of."""
        return [one.device for one in self.plane.packet_status().failed]

    def kept(self) -> list[str]:
        """Folders of older programs."""
        return [path.name for path in self.site.pins.iterdir() if path.name.startswith("old-")]

    def in_step(self) -> bool:
        """Whether all that runs reads the maps that are pinned now."""
        (folder,) = self.site.pins.glob("programs-tc-*")
        now = set()
        for path in (*self.site.maps.iterdir(), folder / "tails"):
            with Map.open(path) as opened:
                now.add(opened.id)
        reads = set()
        for number in set().union(*self.attached().values()):
            with libbpf.program_by_id(number) as program:
                reads |= set(program.info().map_ids)
        return reads <= now


@pytest.fixture
def node(artifact_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    for name, entries in START.items():
        monkeypatch.setitem(layout.MAPS, name, replace(layout.MAPS[name], entries=entries))
    monkeypatch.setattr(keeper, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(keeper, "STUCK_SECONDS", 4 * PATIENCE)
    where = f"kbpd{os.getpid()}"
    with ExitStack() as stack:
        ip(f"netns add {where}")
        stack.callback(ip, f"netns del {where}")
        ip("link add here type veth peer name far", netns=where)
        make = stack.enter_context(sites(artifact_cache))
        made = Node(where, make(node=where))
        stack.callback(made.go_on.set)
        attach = Tc.attach

        def watched(tc: Tc, ifindex: int, to: Direction, program: Program) -> Attachment | None:
            name = socket.if_indextoname(ifindex)
            if name == made.slow:
                made.reached.set()
                made.go_on.wait(PATIENCE)
            if name == made.broken:
                raise KernelError("broken by hand", name, errno=errno.EIO)
            return attach(tc, ifindex, to, program)

        monkeypatch.setattr(Tc, "attach", watched)
        yield made


def ready(node: Node) -> None:
    until("all devices have had their turn", node.plane.ready)


def test_the_writer_goes_on_while_a_device_is_slow(node: Node):
    node.slow = "here"
    node.apply(*many(3, "10.0.0.1:80"))
    assert node.reached.wait(PATIENCE)
    assert not node.plane.ready()
    node.apply(*many(3, "10.0.0.2:80"))
    shown = node.site.dump()["frontends"]
    assert {str(each["cluster"]) for each in shown.values()} == {"['10.0.0.2:80/TCP']"}
    assert not node.plane.ready()
    node.go_on.set()
    ready(node)
    assert node.attached().keys() == {"here", "far"}


def test_maps_that_grow_are_written_only_when_all_devices_read_them(node: Node):
    node.apply(*many(3, "10.0.0.1:80"))
    ready(node)
    before = node.site.dump()["frontends"]
    old = node.attached()
    node.slow = "here"
    thread = node.begin(*many(100, "10.0.0.2:80"))
    assert node.reached.wait(PATIENCE)
    thread.join(0.5)
    assert thread.is_alive()
    assert node.attached()["here"] == old["here"]
    assert node.site.dump()["frontends"] == before, "an old program would not find the new sets"
    assert len(node.kept()) == 1, "its tail calls live as long as their pin"
    node.go_on.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert len(node.site.dump()["frontends"]) == 100
    assert node.in_step()
    assert set().union(*old.values()).isdisjoint(set().union(*node.attached().values()))
    until("what nobody runs is gone", lambda: not node.kept())


def test_a_device_that_refuses_new_programs_keeps_its_old_ones_whole(node: Node):
    node.apply(*many(3, "10.0.0.1:80"))
    ready(node)
    old = node.attached()
    node.broken = "here"
    node.apply(*many(100, "10.0.0.2:80"))
    assert node.attached()["here"] == old["here"]
    assert node.attached()["far"] != old["far"]
    until("it is told", lambda: node.failed() == ["here"])
    assert len(node.kept()) == 1
    node.broken = ""
    until("it is made good", lambda: node.in_step() and node.failed() == [])
    until("what nobody runs is gone", lambda: not node.kept())


def test_an_agent_that_was_killed_before_all_were_swapped_begins_with_it(node: Node):
    """The maps have grown and new programs are pinned, but a device still has the old ones."""
    node.apply(*many(3, "10.0.0.1:80"))
    ready(node)
    old = node.attached()
    node.broken = "here"
    node.apply(*many(100, "10.0.0.1:80"))
    node.site.close_planes()
    node.broken = ""
    assert node.attached()["here"] == old["here"]
    node.open()
    node.slow = "here"
    before = node.site.dump()["frontends"]
    thread = node.begin(*many(100, "10.0.0.2:80"))
    assert node.reached.wait(PATIENCE)
    thread.join(0.3)
    assert thread.is_alive()
    assert node.site.dump()["frontends"] == before
    node.go_on.set()
    thread.join(PATIENCE)
    assert node.in_step()
    until("what nobody runs is gone", lambda: not node.kept())


def test_programs_that_could_not_be_loaded_are_loaded_by_the_next_apply(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    """What was attached goes on meanwhile, at the sockets too."""
    node.apply(*many(3, "10.0.0.1:80"))
    ready(node)
    links = len(list((node.site.pins / "links").iterdir()))
    load = Program.load

    def refuse(name: str, *arguments: object) -> Program:
        raise KernelError("no room", name, errno=errno.ENOMEM)

    monkeypatch.setattr(Program, "load", refuse)
    for _ in range(2):
        with pytest.raises(KernelError, match="no room"):
            node.apply(*many(100, "10.0.0.2:80"))
        assert len(list((node.site.pins / "links").iterdir())) == links
        assert node.attached().keys() == {"here", "far"}
    monkeypatch.setattr(Program, "load", load)
    node.apply(*many(100, "10.0.0.2:80"))
    assert len(list((node.site.pins / "links").iterdir())) == links
    assert node.in_step()


def test_pod_networks_that_come_later_reach_the_programs(
    site: Site, caplog: pytest.LogCaptureFixture
):
    """From the Node's event to the maps; until then it is said once that nobody is detected."""
    config = Config(
        node_name="me", packet_path=True, detect_local_mode=LocalMode.NODE_CIDR, sizes=SIZES
    )
    plane = site.open(
        packet_path=True, detect_local_mode=LocalMode.NODE_CIDR, excluded_devices=("*",)
    )
    agent = Agent(config, plane, lambda _: ())

    def flags() -> NodeFlag:
        return NodeFlag(NODE.unpack(site.entries("node")[bytes(4)])[2])

    def hears(*cidrs: str) -> None:
        said = KubeNode("me", pod_cidrs=tuple(parse_cidr(text, "") for text in cidrs))
        agent.step([Upsert(ObjectKey(Kind.NODE, "", "me"), said)])

    agent.step([Synced(kind) for kind in Kind])
    hears()
    assert flags() == NodeFlag(0)
    hears("10.1.0.0/24", "fd00:1::/64")
    assert flags() == NodeFlag.DETECTS_LOCAL | NodeFlag.LOCAL_NETWORKS
    both = {pack_network(parse_cidr(text, "")) for text in ("10.1.0.0/24", "fd00:1::/64")}
    assert site.entries("local_networks").keys() == both
    hears("10.2.0.0/24")
    assert site.entries("local_networks").keys() == {pack_network(parse_cidr("10.2.0.0/24", ""))}
    told = [line for line in caplog.messages if line.startswith("detect-local-mode=NodeCIDR")]
    assert len(told) == 1

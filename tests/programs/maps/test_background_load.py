# SPDX-License-Identifier: Apache-2.0
"""A first start serves sockets before the packet programs are loaded, and loads these
soon after.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kbpf.dataplane.bpf.hooks import CONNTRACK_PROGRAMS
from kbpf.dataplane.bpf.packet_path import nat_table
from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.programs.artifact import Bytecode
from kbpf.dataplane.bpf.programs.loader import LoadedPrograms
from kbpf.errors import CompileError, KbpfError, KernelError, ProgramLoadError
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.model.config import SocketLb
from kbpf.model.desired import ServiceState
from tests.programs.packets.tc.net import programs_on_devices
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE, until
from tests.support.lab.namespace import Namespace
from tests.support.plane import HOOKS, Site, desired, service, sites, size_maps


def many(count: int) -> list[ServiceState]:
    return [service(f"s{i:04}", f"10.96.0.{i + 1}:80", "10.0.0.1:80") for i in range(count)]


class Start(Namespace):
    """A node with a device, and agents that start on it. Loading the packet programs waits for
    `resume`, and fails with `error` if it is set.
    """

    def __init__(self, name: str, site: Site) -> None:
        super().__init__(name)
        self.site = site
        self.begun, self.resume = threading.Event(), threading.Event()
        self.error: KbpfError | None = None
        self.loads = 0
        self.plane = self.open()

    def open(self, **settings: Any) -> BpfPlane:
        self.plane = self.site.open(packet_path=True, sockets_first=True, **settings)
        return self.plane

    def apply(self, *services: ServiceState) -> None:
        self.do(lambda: self.plane.apply(desired(*services), None))

    def tick(self) -> None:
        self.do(lambda: self.plane.tick(time.monotonic()))

    def ready(self) -> bool:
        self.tick()
        return self.plane.status().ready

    def hooks(self) -> set[str]:
        links = self.site.pins / "links"
        return {path.name for path in links.iterdir()} if links.is_dir() else set()

    def attached(self) -> dict[str, set[int]]:
        """Ids of the packet programs, by device."""

        return self.do(lambda: programs_on_devices(self.site.pins / "devices"))

    def uses_pinned_maps(self) -> bool:
        """Whether all attached programs read the maps that are pinned now."""
        return self.site.use_pinned_maps(set().union(*self.attached().values()))


@pytest.fixture
def start(artifact_cache: Path, namespace: Namespace, monkeypatch) -> Iterator[Start]:
    size_maps(monkeypatch, services=8, service_names=8, backend_slots=16, backends=8, set_members=8)
    namespace.ip("link add here type veth peer name far")
    with sites(artifact_cache) as make:
        made = Start(namespace.name, make(node=namespace.name))
        prepare = PacketPath.prepare

        def waiting_prepare(packets: PacketPath, maps: Mapping[str, Map]) -> LoadedPrograms:
            made.loads += 1
            made.begun.set()
            assert made.resume.wait(PATIENCE)
            if made.error is not None:
                raise made.error
            return prepare(packets, maps)

        monkeypatch.setattr(PacketPath, "prepare", waiting_prepare)
        yield made
        made.resume.set()


def test_sockets_are_served_before_packet_programs_are_loaded(start: Start):
    start.apply(*many(3))
    assert start.begun.wait(PATIENCE)
    assert start.hooks() == HOOKS
    assert len(start.site.dump()["frontends"]) == 3
    assert start.attached() == {}
    assert not start.ready()
    start.apply(*many(5))
    assert len(start.site.dump()["frontends"]) == 5, "changes do not wait, either"
    start.resume.set()
    until("the packet path is ready", start.ready)
    assert start.attached().keys() == {"here", "far"}
    assert start.uses_pinned_maps()
    assert start.plane.status().packets.problem == ""


def test_packet_programs_read_maps_that_grew_meanwhile(start: Start):
    start.resume.set()
    start.apply(*many(3))
    start.apply(*many(100))
    until("the packet path is ready", start.ready)
    assert start.loads == 1, "the same programs read the larger maps"
    assert start.uses_pinned_maps()
    assert len(start.site.dump()["frontends"]) == 100


ERRORS = [KernelError("refused by hand"), CompileError("no such header", "tc.c", "install it")]


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_failed_load_of_the_packet_path_is_reported_and_retried(start: Start, error: KbpfError):
    start.error = error
    start.resume.set()
    start.apply(*many(3))
    until("the error is reported", start.ready)
    assert str(error) in start.plane.status().packets.problem
    assert start.hooks() == HOOKS
    start.error = None
    start.do(start.plane.invalidate)
    start.apply(*many(3))
    until("the packet path is ready", start.ready)
    assert start.plane.status().packets.problem == ""
    assert start.attached().keys() == {"here", "far"}


def test_agent_closed_during_the_load_leaves_the_hooks(start: Start):
    """The next agent finds hooks, so it loads all programs before it changes anything."""
    start.apply(*many(3))
    assert start.begun.wait(PATIENCE)
    start.resume.set()
    start.site.close_planes()
    assert (start.hooks(), start.attached()) == (HOOKS, {})
    start.open()
    assert start.loads == 2
    start.apply(*many(3))
    until("the packet path is ready", start.ready)
    assert start.attached().keys() == {"here", "far"}
    assert start.uses_pinned_maps()


@pytest.mark.parametrize("lb", [SocketLb.OFF, SocketLb.HOST_NAMESPACE_ONLY], ids=["no hooks", "no hooks for pods"])
def test_packet_path_is_loaded_first_if_hooks_cannot_serve(start: Start, lb: SocketLb):
    """Whether mode bpf can be used depends on it. Beside another data plane, too: until that one is drained, its
    connections need the packet programs' exemption.
    """
    start.resume.set()
    start.open(socket_lb=lb)
    start.site.close_planes()
    plane = start.site.plane(packet_path=True, sockets_first=True)
    start.do(lambda: plane.open(coexisting=True))
    assert start.loads == 2
    start.error = KernelError("refused by hand")
    start.site.remove()
    with pytest.raises(KernelError, match="refused by hand"):
        start.open(socket_lb=lb)


@needs("conntrack_nat")
@pytest.mark.parametrize("lb", [SocketLb.ON, SocketLb.OFF], ids=["in the background", "at once"])
def test_auto_loads_the_other_programs_if_one_is_refused(start: Start, monkeypatch, lb: SocketLb):
    """A kernel that refuses conntrack's functions for programs gets kbpf's own table."""

    def refuse(packets: PacketPath, code: Bytecode, *arguments: Any) -> Program:
        if code.name in CONNTRACK_PROGRAMS:
            raise ProgramLoadError("refused by hand")
        return load_code(packets, code, *arguments)

    load_code = PacketPath._load_code
    monkeypatch.setattr(PacketPath, "_load_code", refuse)
    start.resume.set()
    start.site.remove()
    start.open(forwarding="auto", socket_lb=lb)
    start.apply()
    until("the packet path serves", start.ready)
    packets = start.plane.status().packets
    assert (packets.problem, packets.forwarding, packets.fallback) == ("", "stack", "refused by hand")
    start.do(lambda: start.plane.maintain_host(time.monotonic()))
    assert not start.do(nat_table.exists)

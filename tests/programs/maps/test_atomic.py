# SPDX-License-Identifier: Apache-2.0
"""An update is atomic: a connect() during it gets a backend of the set before or of the set after.

Processes connect as fast as they can while endpoints are changed as fast as they can be written.
Each connect is recorded with its start, its end and the backend's address, each change with its
start and end, all by one clock. A connect is right if its backend belongs to a set that was in
force at some moment between its start and its end. Consecutive sets have no backend in common.
"""

import bisect
import errno
import itertools
import mmap
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.layout import Reason, pack_target, unpack_ports
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.state.contents import unpack_address
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import Addr
from kbpf.model.desired import DesiredState, FrontendAddress, ServicePortKey, ServiceState
from kbpf.model.objects import Protocol
from tests.support.lab.lab import Node
from tests.support.plane import (
    LOCAL,
    Site,
    at,
    desired,
    pick,
    service,
    services,
    size_maps,
    start_within,
)

HOST, PORT = "10.96.0.1", 53
READERS = 2
DIALS, CHANGES, SECONDS = 12_000, 400, 0.8
"""Minimum of connects by each reader, of changes meanwhile, and of seconds."""
DEADLINE = 240.0
MAX_DIALS = 1_000_000
"""A race of a few nanoseconds needs many tries; on a busy machine five seconds have to be
enough.
"""
START = {"services": 16, "service_names": 16, "backend_slots": 64, "backends": 16, "set_members": 16}


class Connect(NamedTuple):
    """One connect: start and end in ns, and the backend's address or an errno."""

    start: int
    end: int
    got: str


@dataclass
class History:
    """Sets in the order in which they were programmed, each with the start and end of its apply."""

    sets: list[frozenset[str]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def change(self, backends: frozenset[str], write: Callable[[], None]) -> None:
        """`write` makes these the backends."""
        self.sets.append(backends)
        self.starts.append(time.monotonic_ns())
        write()
        self.ends.append(time.monotonic_ns())

    def allowed(self, one: Connect) -> frozenset[str]:
        """The backends of all sets that were in force at some moment of this connect."""
        last = bisect.bisect_right(self.starts, one.end)  # begun before the connect ended
        first = max(0, bisect.bisect_left(self.ends, one.start) - 1)  # not surely replaced before it
        return frozenset().union(*self.sets[first:last])

    def wrong(self, dials: list[Connect]) -> list[Connect]:
        """Connects that failed, or that reached a backend of no such set."""
        return [one for one in dials if one.got not in self.allowed(one)]


@dataclass
class Bench:
    """A node whose own addresses are the backends."""

    node: Node
    site: Site
    plane: BpfPlane


@pytest.fixture
def bench(local_node: Node, node_site: Site, monkeypatch) -> Bench:
    """Maps start small, so that they grow during the test."""
    size_maps(monkeypatch, **START)
    return Bench(local_node, node_site, node_site.open())


# ---- the readers -------------------------------------------------------------------------------


class Counters:
    """Counters in memory that readers and the writer share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def __getitem__(self, index: int) -> int:
        return struct.unpack_from("=Q", self._memory, index * 8)[0]

    def __setitem__(self, index: int, number: int) -> None:
        struct.pack_into("=Q", self._memory, index * 8, number)


def read(counters: Counters, number: int) -> list[Connect]:
    """Connects until counter 0 is set; keeps its number of connects in counter `number`."""
    dials = []
    while not counters[0]:
        start = time.monotonic_ns()
        got = pick(HOST, PORT)
        dials.append(Connect(start, time.monotonic_ns(), got))
        counters[number] = len(dials)
    return dials


def play(bench: Bench, history: History, step: Callable[[], None]) -> list[Connect]:
    """Repeats the step without a pause while readers connect; returns their connects."""
    counters, numbers = Counters(), range(1, READERS + 1)
    waiting = [start_within(bench.node.host, lambda n=n: read(counters, n)) for n in numbers]
    started = time.monotonic()
    try:
        while (
            time.monotonic() < started + SECONDS
            or len(history.sets) < CHANGES
            or min(counters[n] for n in numbers) < DIALS
        ):
            assert time.monotonic() < started + DEADLINE, "too slow"
            step()
    finally:
        counters[0] = 1
        seen = [result() for result in waiting]
    return list(itertools.chain.from_iterable(seen))


# ---- what the agent writes ---------------------------------------------------------------------


@dataclass
class Story:
    """What changes. `sizes` of the sets, in turn; `others`: Services that are added and deleted."""

    name: str
    sizes: tuple[int, ...]
    affinity: int = 0
    others: int = 0

    def sets(self) -> Iterator[list[str]]:
        """Endless; consecutive sets have no backend in common."""
        at = 0
        for size in itertools.cycle(self.sizes):
            yield [LOCAL[(at + i) % len(LOCAL)] for i in range(size)]
            at += size


STORIES = [
    Story("between 1 and 50 endpoints", sizes=(1, 50)),
    Story("other Services are added and deleted", sizes=(1, 9), others=30),
    Story("with affinity", sizes=(2, 20), affinity=60),
]


def web(backends: list[str], story: Story) -> ServiceState:
    """No backend counts as serving. Otherwise the plane would, rightly, destroy the readers'
    sockets before they read the backend's address.
    """
    to = " ".join(f"{one}:1" for one in backends)
    return service("web", f"{HOST}:{PORT}", to, Protocol.UDP, serving="", affinity_timeout=story.affinity)


def crowd(number: int, turn: int) -> dict[ServicePortKey, ServiceState]:
    """Other Services; each turn half of them are new, with keys that were free before."""
    found = (
        service(f"o{i}", f"10.97.{turn % 7}.{i}:53", "192.0.2.1:1", Protocol.UDP)
        for i in range(1, number + 1)
        if (i + turn) % 2
    )
    return {one.key: one for one in found}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_connects_during_changes_get_a_current_backend(bench: Bench, story: Story):
    history, turns, sets = History(), itertools.count(), story.sets()
    known: dict[ServicePortKey, ServiceState] = {}

    def step() -> None:
        backends, turn = next(sets), next(turns)
        state = web(backends, story)
        wanted = {state.key: state, **crowd(story.others, turn)}
        touched = wanted.keys() | known.keys()
        known.clear()
        known.update(wanted)

        def write() -> None:
            report = bench.plane.apply(DesiredState(dict(wanted)), touched if turn else None)
            assert not report.refused

        history.change(frozenset(backends), write)
        bench.plane.tick(time.monotonic())

    step()
    before = bench.site.reasons()
    sizes = {name: bench.site.pinned(name).max_entries for name in START}
    dials = play(bench, history, step)
    grown = {name for name in START if bench.site.pinned(name).max_entries > sizes[name]}
    print(f"{len(dials)} connects, {len(history.sets)} changes, grown: {sorted(grown)}")
    assert history.wrong(dials) == []
    assert "backend_slots" in grown, "the maps grew"
    assert len({one.got for one in dials}) > 5, "many sets were used"
    assert (bench.site.reasons() - before).total() >= len(dials), "these programs translated"


def test_frontends_are_not_confused_while_all_are_overwritten(bench: Bench):
    """The kernel overwrites an element in two steps. A concurrent look-up may find neither the old
    nor the new element if others of the same bucket were written (lookup.h, service_at()), and the
    old element's memory is reused for the next key at once (read_service()). Every second frontend
    has no endpoints, so a value read from a neighbour shows.
    """
    hosts = [f"10.97.0.{i}" for i in range(1, 65)]
    several = [
        service(f"o{i}", f"{host}:{PORT}", f"{LOCAL[1]}:1" if i % 2 else "", Protocol.UDP)
        for i, host in enumerate(hosts)
    ]
    bench.plane.apply(desired(*several), None)
    counters = Counters()

    def connect_repeatedly() -> tuple[int, Counter[tuple[bool, str]]]:
        """Connects one socket repeatedly, which is the fastest way."""
        wrong: Counter[tuple[bool, str]] = Counter()
        right = (errno.ECONNREFUSED, 0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            while not counters[0]:
                for i, host in enumerate(hosts):
                    got = s.connect_ex((host, PORT))
                    if got != right[i % 2]:
                        wrong[bool(i % 2), errno.errorcode.get(got, "connected")] += 1
                counters[1] += len(hosts)
        return counters[1], wrong

    before = bench.site.reasons()
    result = start_within(bench.node.host, connect_repeatedly)
    try:
        with bench.site.pinned("services") as services:
            pairs = dict(services.items())
            order = [pack_target(*at(f"{host}:{PORT}", Protocol.UDP)) for host in hosts]
            keys, values = b"".join(order), b"".join(pairs[key] for key in order)
            started = time.monotonic()
            while counters[1] <= DIALS or (counters[1] < MAX_DIALS and time.monotonic() < started + 5):
                assert time.monotonic() < started + DEADLINE, "too slow"
                services.update_batch(keys, values)
    finally:
        counters[0] = 1
        dials, wrong = result()
    assert wrong == {}
    assert dials > DIALS
    seen = bench.site.reasons() - before
    assert seen == {Reason.TRANSLATED: dials // 2, Reason.NO_ENDPOINTS: dials // 2}


# ---- maps that are written together --------------------------------------------------------------

VERSIONS = [
    desired(*services(text, {}))
    for text in (
        "web 10.96.0.1:80 -> 10.0.0.1:80; dns 10.96.0.2:53",
        "web 10.96.0.1:81 10.96.0.1:82 -> 10.0.0.1:80",
        "web 10.96.0.3:80 -> 10.0.0.1:80; db 10.96.0.1:5432",
        "",
    )
]


def frontends_of(state: DesiredState) -> set[FrontendAddress]:
    return {frontend.at for each in state.services.values() for frontend in each.frontends}


def test_frontends_are_found_after_each_write(site: Site, monkeypatch):
    """A ClusterIP in `cluster_ips` refuses all ports that have no frontend, so a new one may appear
    there only after its frontends. A frontend is only looked up if the bit of its port is set in
    `frontend_ports`.
    """
    plane, write, count = site.open(), AgentMaps._write, 0
    old = new = desired()

    def write_and_check(maps: AgentMaps, name: str, action: Callable[[Map], int | None]) -> None:
        nonlocal count
        write(maps, name, action)
        count += name in ("services", "cluster_ips", "frontend_ports")
        held = {unpack_address(key) for key, _ in maps.maps["services"].items()}
        added = {Addr(key) for key, _ in maps.maps["cluster_ips"].items()}
        added -= {frontend.address for frontend in frontends_of(old)}
        assert {each for each in frontends_of(new) if each.address in added} <= held, name
        assert frontends_of(old) & frontends_of(new) <= held, name
        ports = set(unpack_ports(maps.maps["frontend_ports"].items()))
        assert {each.port for each in held} <= ports, name

    plane.apply(old, None)
    monkeypatch.setattr(AgentMaps, "_write", write_and_check)
    for new in (*VERSIONS, *VERSIONS[::-1]):
        plane.apply(new, old.services.keys() | new.services.keys())
        old = new
    assert count > 20

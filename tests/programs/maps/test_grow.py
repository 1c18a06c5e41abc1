# SPDX-License-Identifier: Apache-2.0
"""Maps grow while they are used. What finds no room is refused, reported and retried."""

import errno
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import Mock

import pytest

from kbpf.dataplane.base import Report
from kbpf.dataplane.bpf.maps import agent_maps as growth
from kbpf.dataplane.bpf.maps import layout, pinning
from kbpf.dataplane.bpf.state.planner import LARGE_ENTRIES
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Map
from kbpf.model.desired import ServicePortKey, ServiceState
from kbpf.model.objects import Protocol
from tests.support.lab.lab import Node, until
from tests.support.plane import (
    LOCAL,
    SIZES,
    Site,
    desired,
    flush,
    map_ids_read_by,
    picks,
    service,
    size_maps,
)

UDP = Protocol.UDP
START = {"services": 8, "service_names": 8, "backend_slots": 16, "backends": 8, "set_members": 8}


small = pytest.mark.usefixtures("small_maps")


@pytest.fixture
def small_maps(monkeypatch) -> None:
    """Maps start small."""
    size_maps(monkeypatch, **START)


def many(count: int, to: str = "10.0.0.1:80", **more) -> list[ServiceState]:
    return [service(f"s{i:04}", f"10.96.{i // 250}.{i % 250 + 1}:53", to, UDP, **more) for i in range(count)]


def sizes_of(site: Site) -> dict[str, int]:
    found = {}
    for name in START:
        with site.pinned(name) as opened:
            found[name] = opened.max_entries
    return found


def read_by_programs(site: Site) -> set[int]:
    """Ids of the maps that attached programs use, also through arrays of maps."""
    return set().union(*map(map_ids_read_by, site.hook_programs().values()))


def is_freed(map_id: int) -> bool:
    try:
        objects.open_map_by_id(map_id).close()
    except KernelError as error:
        return error.errno == errno.ENOENT
    return False


# ---- growing -----------------------------------------------------------------------------------


@small
def test_grown_maps_keep_all_entries(site: Site):
    plane = site.start(desired(*many(3, affinity_timeout=9)))
    assert sizes_of(site) == START
    before = site.dump()["frontends"]
    programs = site.hook_programs()
    old_ids = read_by_programs(site)
    plane.apply(desired(*many(100, affinity_timeout=9)), None)
    flush(plane)
    after = site.dump()
    assert len(after["frontends"]) == 100
    assert before.items() <= after["frontends"].items()
    assert after["strays"] == {}
    assert sizes_of(site) == {
        "services": 128,
        "service_names": 128,
        "backend_slots": 128,
        "backends": 8,
        "set_members": 128,
    }, "doubled as often as needed, with a fifth to spare"
    ids = {site.pinned(name).id for name in layout.MAPS if name in START} - {site.pinned("service_names").id}
    assert ids <= read_by_programs(site), "the programs read the larger maps"
    assert site.hook_programs() == programs, "no program was loaded again"
    unread = old_ids - read_by_programs(site)
    assert len(unread) == 3
    until("the smaller maps are freed", lambda: all(map(is_freed, unread)))
    sizes = sizes_of(site)
    assert dict(site.open().apply(desired(*many(100, affinity_timeout=9)), None).writes) == {}, "after a restart"
    assert (sizes_of(site), site.dump()) == (sizes, after)


class Growing:
    """A data plane whose maps start to grow for a Service port that does not fit, in slices of a
    few entries.
    """

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(growth, "COPY_BATCH_ENTRIES", 4)
        monkeypatch.setattr("kbpf.dataplane.bpf.plane.SLICE_BUDGET_S", 1e-9)
        self.site, self.most = site, 0
        self.plane = site.open()
        self.small = many(5)
        crowd = " ".join(f"10.245.{i // 250}.{i % 250 + 1}:80" for i in range(LARGE_ENTRIES))
        self.big = service("big", "10.97.0.1:80", crowd)
        self.plane.apply(desired(*self.small), None)
        flush(self.plane)

    def begin(self) -> Self:
        """Applies the large Service, too."""
        self.change(*self.small, self.big)
        return self

    def change(self, *services: ServiceState) -> Report:
        """Applies these; those that differ are touched."""
        before = getattr(self, "state", desired(*self.small)).services
        self.state = desired(*services)
        after = self.state.services
        touched = {k for k in before.keys() | after.keys() if before.get(k) is not after.get(k)}
        return self.plane.apply(self.state, touched)

    def tick(self) -> None:
        self.plane.tick(time.monotonic())

    def until(self, what: str, done: Callable[[], Any]) -> None:
        """Ticks until `done`."""
        until(what, lambda: done() or self.tick())

    def until_refused(self) -> None:
        self.until("it is refused", lambda: self.plane.apply(self.state, ()).refused)

    def until_served(self) -> None:
        self.until("the large one is served", lambda: self.plane.apply(self.state, ()) and "big" in served(self.site))


@small
def test_changes_are_programmed_while_maps_grow(site: Site, monkeypatch):
    """Each tick copies a few entries. Services added, changed and deleted meanwhile are programmed
    at once, and are right in the maps of both sizes.
    """
    at = Growing(site, monkeypatch).begin()
    update_batch, sizes = Map.update_batch, []

    def watched(held: Map, keys: bytes, values: bytes) -> int:
        sizes.append(len(keys) // held.key_size)
        return update_batch(held, keys, values)

    monkeypatch.setattr(Map, "update_batch", watched)
    left, changed = many(5)[1:], service("s0002", "10.96.0.3:53", "10.0.0.9:80", UDP)
    stages = iter(
        [
            (*at.small, at.big),
            (*left, at.big),
            (left[0], changed, *left[2:], at.big),
            (left[0], changed, *left[2:], service("new", "10.96.9.9:53", "10.0.0.9:80"), at.big),
        ]
    )
    copying = 0

    def grown() -> bool:
        nonlocal copying
        if at.plane._agent_maps._copies:
            copying += 1
            if wanted := next(stages, None):
                report = at.change(*wanted)
                assert report.deferred == {at.big.key.service}
                names = sorted(state.key.name for state in wanted if state is not at.big)
                assert served(site) == names
        sizes.clear()
        at.tick()
        assert max(sizes, default=0) <= growth.COPY_BATCH_ENTRIES
        return sizes_of(site) != START

    until("the maps have grown", grown)
    assert copying > 4, "copied in several slices"
    at.until_served()
    flush(at.plane)
    shown = site.dump()
    assert shown["strays"] == {}
    assert len(shown["frontends"]["10.97.0.1:80/TCP"]["cluster"]) == LARGE_ENTRIES
    assert shown["frontends"]["10.96.0.3:53/UDP"]["cluster"] == ["10.0.0.9:80/UDP"]
    assert len(shown["frontends"]) == 6
    ids = {site.pinned(name).id for name in START if name != "service_names"}
    assert ids <= read_by_programs(site)
    assert dict(site.open().apply(at.state, None).writes) == {}, "the next agent writes nothing"


@small
def test_small_services_beyond_the_old_size_do_not_wait(site: Site, monkeypatch):
    at = Growing(site, monkeypatch).begin()
    report = at.change(*many(40), at.big)
    assert (report.refused, set(report.deferred)) == ({}, {at.big.key.service})
    assert len(site.dump()["frontends"]) == 40


@small
@pytest.mark.parametrize("what", ["make_map", "_pin_temporarily", "_set_inner"])
def test_failed_growth_refuses_only_what_does_not_fit(site: Site, monkeypatch, what: str):
    """And is repeated after a delay."""
    refuse = Mock(side_effect=KernelError("no memory", errno=errno.ENOMEM))
    monkeypatch.setattr(growth, "RETRY_DELAY_S", 3600.0)
    at = Growing(site, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(pinning, what, refuse)
        at.begin()
        at.until_refused()
        before = refuse.call_count
        report = at.change(service("s0000", "10.96.0.1:53", "10.0.0.9:80", UDP), *at.small[1:], at.big)
        assert list(report.refused) == [at.big.key]
        assert "no memory" in report.refused[at.big.key]
        for _ in range(20):
            assert at.plane.apply(at.state, ()).refused
            at.tick()
        assert refuse.call_count == before
        assert sizes_of(site) == START
        assert site.dump()["frontends"]["10.96.0.1:53/UDP"]["cluster"] == ["10.0.0.9:80/UDP"]

    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(growth, "time", later)
    at.until_served()


@small
@pytest.mark.parametrize("fails", ["the map", "its larger copy"])
def test_failed_write_while_maps_grow_fails_the_growth(site: Site, monkeypatch, fails: str):
    """Part of the batch was written, so the map and its copy differ. The change fails only if the
    map itself could not be written.
    """
    monkeypatch.setattr(growth, "RETRY_DELAY_S", 0.0)
    at = Growing(site, monkeypatch).begin()
    agent_maps, update_batch = at.plane._agent_maps, Map.update_batch
    at.until("both maps are being copied", lambda: len(agent_maps._copies) == 2)
    maps = agent_maps._copies if fails == "its larger copy" else agent_maps.maps
    target = maps["backend_slots"]

    def refuse(held: Map, keys: bytes, values: bytes) -> int:
        if held is not target:
            return update_batch(held, keys, values)
        update_batch(held, keys[: len(keys) // 2], values[: len(values) // 2])
        raise KernelError("cannot write", "backend_slots", errno=errno.ENOMEM)

    changed = [service(f"t{i}", f"10.98.0.{i}:53", "10.0.0.1:80", UDP) for i in (1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(Map, "update_batch", refuse)
        if fails == "the map":
            with pytest.raises(KernelError, match="cannot write"):
                at.change(*at.small[2:], *changed, at.big)
        else:
            assert at.change(*at.small[2:], *changed, at.big).refused == {}
    at.until_served()
    flush(at.plane)
    shown = site.dump()
    assert served(site) == sorted(key.name for key in at.state.services)
    assert shown["strays"] == {}
    assert shown["frontends"]["10.98.0.2:53/UDP"]["cluster"] == ["10.0.0.1:80/UDP"]


TWO_STICKY = desired(*many(2, f"{LOCAL[1]}:1", affinity_timeout=900))


def open_with(site: Site, affinity: int) -> None:
    """Starts an agent with room for so many affinities."""
    site.open(replace(SIZES, affinity=affinity)).apply(TWO_STICKY, None)


def test_resized_lru_maps_keep_their_entries(node_site: Site, local_node: Node):
    open_with(node_site, 512)
    assert picks(local_node.host, "10.96.0.1:53") == [LOCAL[1]]
    before = node_site.entries("affinity")
    assert len(before) == 1
    for entries in (2048, 256):
        open_with(node_site, entries)
        assert node_site.pinned("affinity").max_entries == entries
        assert node_site.entries("affinity") == before
    assert picks(local_node.host, "10.96.0.2:53") == [LOCAL[1]]
    assert len(node_site.entries("affinity")) == 2, "the programs write to the new map"


# ---- no room -----------------------------------------------------------------------------------


def names(found: dict[ServicePortKey, str] | set[ServicePortKey]) -> list[str]:
    return sorted(key.name for key in found)


def served(site: Site) -> list[str]:
    return sorted({one["service"].removeprefix("default/") for one in site.dump()["frontends"].values()})


@pytest.mark.parametrize("touched", [False, True], ids=["all", "touched"])
def test_services_without_room_are_refused_and_others_served(site: Site, touched: bool):
    plane = site.open(replace(SIZES, frontends=3))
    plane.apply(desired(), None)
    state = desired(*many(5))
    report = plane.apply(state, state.services.keys() if touched else None)
    assert names(report.refused) == ["s0003", "s0004"]
    assert set(report.refused.values()) == {
        "the map services would need 4 entries and has room for 3; raise --max-frontends"
    }
    assert served(site) == ["s0000", "s0001", "s0002"]
    assert names(plane.apply(state, ()).refused) == ["s0003", "s0004"], "retried and reported again"
    for left in (4, 3):  # freed room is used at the next apply
        plane.apply(desired(*many(5)[-left:]), state.services.keys())
        flush(plane)
        assert names(plane.apply(desired(*many(5)[-left:]), ()).refused) == ["s0004"] * (left - 3)
        assert served(site) == [f"s{5 - left + i:04}" for i in range(3)]
    flush(plane)
    assert site.dump()["strays"] == {}


def test_service_that_grows_too_large_keeps_its_endpoints(site: Site):
    plane = site.open(replace(SIZES, slots=6))
    big = service("web", "10.96.0.1:80", " ".join(f"10.0.1.{i}:80" for i in range(1, 8)))
    plane.apply(desired(service("web", "10.96.0.1:80", TWO)), None)
    report = plane.apply(desired(big), {big.key})
    assert names(report.refused) == ["web"]
    assert "backend_slots" in report.refused[big.key]
    assert "--max-backends" in report.refused[big.key]
    assert site.dump()["frontends"]["10.96.0.1:80/TCP"]["cluster"] == [f"{b}/TCP" for b in TWO.split()]
    gone = plane.apply(desired(), {big.key})
    assert gone.refused == {}, "no longer desired"
    flush(plane)
    assert site.dump() == {"frontends": {}, "node_addresses": [], "strays": {}}


@pytest.mark.parametrize("part", ["slots", "backends"])
def test_old_sets_are_retired_early_to_make_room(site: Site, part: str):
    """As many are desired as the limit allows. Old sets wait next to new ones, in as much room
    again; when that is used up as well, a change waits for the short grace period only.
    """
    now = [100.0]
    plane = site.open(replace(SIZES, **{part: 6}), clock=lambda: now[0])
    for turn in range(4):
        to = " ".join(f"10.0.{turn}.{i}:80" for i in range(1, 7))
        now[0] += 0.2
        report = plane.apply(desired(service("web", "10.96.0.1:80", to)), None)
        assert report.refused == {}, turn
    now[0] += 0.01
    other = service("web", "10.96.0.1:80", " ".join(f"10.0.9.{i}:80" for i in range(1, 7)))
    assert names(plane.apply(desired(other), {other.key}).refused) == ["web"], "too early"
    now[0] += 0.2
    assert plane.apply(desired(other), ()).refused == {}


TWO = "10.0.0.1:80 10.0.0.2:80"


def test_source_ranges_are_limited(site: Site, monkeypatch):
    size_maps(monkeypatch, source_ranges=3)
    vip, others = "LoadBalancer=192.0.2.1:80", "LoadBalancer=192.0.2.2:80"
    one = service("one", vip, "10.0.0.1:80", ranges="10.1.0.0/16 10.2.0.0/16")
    two = service("two", others, "10.0.0.1:80", ranges="10.1.0.0/16 10.2.0.0/16")
    plane = site.open()
    assert list(plane.apply(desired(one, two), None).refused.values()) == [
        "the map source_ranges would need 4 entries and has room for 3"
    ]
    plane.apply(desired(two), {one.key})
    assert plane.apply(desired(two), ()).refused == {}
    assert site.dump()["frontends"]["192.0.2.2:80/TCP"]["ranges"] == ["10.1.0.0/112", "10.2.0.0/112"]


def test_maps_have_their_size_after_a_start_without_the_packet_path(node_site: Site):
    for packet_path in (False, True):
        node_site.open(SIZES, packet_path=packet_path)
    for spec in layout.MAPS.values():  # the others are resized
        if spec.packet_path_only and not spec.sized_by:
            with node_site.pinned(spec.name) as opened:
                assert opened.max_entries == spec.max_entries(SIZES), spec.name

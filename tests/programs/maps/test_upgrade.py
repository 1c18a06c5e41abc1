# SPDX-License-Identifier: Apache-2.0
"""Another version of kbpf, with another layout of one map, takes over from the one before."""

import errno
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import Mock

import pytest

from kbpf.dataplane.bpf.maps import layout, pinning
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from tests.support.lab.lab import until
from tests.support.plane import CGROUP_HOOKS, Site, desired, flush, service, size_maps

WEB = service("web", "10.96.0.1:80", "127.0.1.1:8080 127.0.1.2:8080", affinity_timeout=100)


def another_version(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on the code has another version of this map."""
    monkeypatch.setitem(layout.MAPS, name, replace(layout.MAPS[name], version=99))


def link_ids(site: Site) -> dict[str, int]:
    """Of the links to the cgroup. Those at tracepoints cannot get another program: they are
    replaced.
    """
    return {hook: link for hook, (link, _) in site.links().items() if hook in CGROUP_HOOKS}


@pytest.mark.parametrize("name", ["services", "backend_slots", "backends", "sock_peers", "meta", "counts"])
def test_upgrade_keeps_what_is_served(site: Site, monkeypatch, name: str):
    site.start(desired(WEB))
    before, links, ids = site.dump(), link_ids(site), site.entries("service_names")
    peers = site.pinned("sock_peers").id
    site.close_planes()
    another_version(monkeypatch, name)
    plane = site.open()
    assert link_ids(site) == links, "nothing is attached again before the maps are filled"
    plane.apply(desired(WEB), None)
    flush(plane)
    assert site.dump() == before
    assert link_ids(site) == links, "each link got the new program"
    assert site.entries("service_names") == ids, "sockets still know their Service by its id"
    assert (site.pinned("sock_peers").id == peers) == (name != "sock_peers")
    left = sorted(p.name.split("-")[0] for p in site.pins.iterdir())
    assert left == ["layout", "links", "maps", "programs"], "the old version's maps are gone"


@pytest.mark.parametrize(
    ("name", "replaced"),
    [
        ("flows", "flows flow_queue"),
        ("unconfirmed", "unconfirmed unconfirmed_queue port_slots"),
        ("unconfirmed_queue", "unconfirmed unconfirmed_queue port_slots"),
        ("port_slots", "unconfirmed unconfirmed_queue port_slots"),
        ("flow_marks", "flow_marks"),
    ],
)
def test_maps_that_belong_together_are_replaced_together(site: Site, monkeypatch, name: str, replaced: str):
    def ids() -> set[tuple[str, int]]:
        with ExitStack() as stack:
            return {(each, stack.enter_context(site.pinned(each)).id) for each in layout.MAPS}

    site.start(desired(WEB))
    before = ids()
    site.close_planes()
    another_version(monkeypatch, name)
    site.start(desired(WEB))
    assert {each for each, _ in ids() - before} == set(replaced.split())


@pytest.mark.parametrize("killed", [False, True], ids=["", "killed after the maps were made"])
def test_connections_are_served_during_an_upgrade(site: Site, monkeypatch, killed: bool):
    """The old version's maps are in use until the new version's first complete apply."""
    server = site.place("server").serve(8080, address="127.0.1.1")
    client = site.place("client")
    one = service("web", "10.96.0.1:80", "127.0.1.1:8080")
    site.start(desired(one))
    client.ask("start_load", host="10.96.0.1", port=80)
    until("it is served", lambda: client.ask("peek_load")["names"].get(server.name))
    site.close_planes()
    another_version(monkeypatch, "services")
    plane = site.open()
    if killed:
        plane = site.open()
    assert client.tcp("10.96.0.1", 80)["name"] == server.name
    plane.apply(desired(one), None)
    flush(plane)
    assert client.tcp("10.96.0.1", 80)["name"] == server.name
    assert client.ask("stop_load")["errors"] == []


@pytest.mark.parametrize("killed", [False, True], ids=["", "before the old maps were removed"])
def test_downgrade_keeps_what_is_served(site: Site, monkeypatch, killed: bool):
    """The newer version has made shared maps larger meanwhile."""
    size_maps(monkeypatch, services=8, backend_slots=8)
    site.start(desired(WEB))
    links = link_ids(site)
    many = desired(WEB, *(service(f"s{i}", f"10.96.1.{i}:80", "127.0.1.1:80") for i in range(40)))
    with monkeypatch.context() as newer:
        another_version(newer, "reasons")
        plane = site.open()
        if killed:
            newer.setattr(pinning, "remove_old_maps", lambda _: None)
        plane.apply(many, None)
        before, size = site.dump(), site.pinned("services").max_entries
        assert size > 8
    plane = site.open()
    assert site.dump() == before
    assert link_ids(site) == links
    assert dict(plane.apply(many, None).writes) == {}
    assert site.dump() == before
    assert site.pinned("services").max_entries == size
    assert site.use_pinned_maps(site.hook_programs().values())


def test_failed_growth_replaces_the_map_of_neither_version(site: Site, monkeypatch):
    size_maps(monkeypatch, services=8)
    site.start(desired(WEB))
    former_maps, services_id = site.maps, site.pinned("services").id
    another_version(monkeypatch, "reasons")
    monkeypatch.setattr(pinning, "remove_old_maps", lambda _: None)
    plane = site.start(desired(WEB))
    monkeypatch.setattr(pinning, "_set_inner", Mock(side_effect=KernelError("no memory", errno=errno.ENOMEM)))
    many = (service(f"s{i}", f"10.96.1.{i}:80", "127.0.1.1:80") for i in range(40))
    with pytest.raises(KernelError, match="no memory"):
        plane.apply(desired(WEB, *many), None)
    for folder in (former_maps, site.maps):
        with Map.open(folder / "services") as pinned:
            assert pinned.id == services_id
    assert not list(site.pins.glob("new-map-*"))

# SPDX-License-Identifier: Apache-2.0
"""Another version of kbpf, with another layout of one map, takes over from the one before."""

from dataclasses import replace

import pytest

from kbpf.dataplane.bpf.maps import layout
from kbpf.kernel.bpf.objects import Link
from tests.support.plane import Site, desired, service

WEB = service("web", "10.96.0.1:80", "127.0.1.1:8080 127.0.1.2:8080", affinity_timeout=100)


def another_version(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on the code has another version of this map."""
    monkeypatch.setitem(layout.MAPS, name, replace(layout.MAPS[name], version=99))


def link_ids(site: Site) -> dict[str, int]:
    found = {}
    for pin in sorted((site.pins / "links").iterdir()):
        with Link.open(pin) as link:
            found[pin.name] = link.read_info().id
    return found


@pytest.mark.parametrize(
    "name", ["services", "backend_slots", "backends", "sock_peers", "meta", "counts"]
)
def test_upgrade_keeps_what_is_served(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    site.open().apply(desired(WEB), None)
    before, links, ids = site.dump(), link_ids(site), site.entries("service_names")
    peers = site.pinned("sock_peers").id
    another_version(monkeypatch, name)
    plane = site.open()
    assert link_ids(site) == links, "nothing is attached again before the maps are filled"
    plane.apply(desired(WEB), None)
    plane.flush()
    assert site.dump() == before
    assert link_ids(site) == links, "each link got the new program"
    assert site.entries("service_names") == ids, "sockets still know their Service by its id"
    assert (site.pinned("sock_peers").id == peers) == (name != "sock_peers")
    left = sorted(p.name.split("-")[0] for p in site.pins.iterdir())
    assert left == ["layout", "links", "maps", "programs"], "the old version's maps are gone"


def test_connections_are_served_during_an_upgrade(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old version's maps are in use until the new version's first complete apply."""
    server = site.place("server").serve(8080, address="127.0.1.1")
    client = site.place("client")
    one = service("web", "10.96.0.1:80", "127.0.1.1:8080")
    site.open().apply(desired(one), None)
    client.ask("start_load", host="10.96.0.1", port=80)
    another_version(monkeypatch, "services")
    plane = site.open()
    assert client.tcp("10.96.0.1", 80)["name"] == server.name
    plane.apply(desired(one), None)
    plane.flush()
    assert client.tcp("10.96.0.1", 80)["name"] == server.name
    result = client.ask("stop_load")
    assert result["errors"] == []
    assert result["names"][server.name] > 0

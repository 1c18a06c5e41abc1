# SPDX-License-Identifier: Apache-2.0
"""The map `endpoint_names`: Pod, node, zone and conditions of endpoints, for `kbpf inspect`.

It is written between other changes, so a test says when: name_all() runs what is deferred.
"""

import errno
import time
from dataclasses import replace as replace_fields
from typing import Any

import pytest
from msgspec.structs import replace

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.state import endpoint_names
from kbpf.errors import KernelError
from kbpf.model.address import parse_addr
from kbpf.model.desired import DesiredState, ServicePortKey, ServiceState
from kbpf.model.inspection import EndpointEntry, Part
from kbpf.model.objects import Endpoint, EndpointSlice, SlicePort, pack_names
from kbpf.policy.endpoints import merge_endpoints
from tests.support.lab.lab import until
from tests.support.plane import SIZES, Site, desired, flush, service, size_maps
from tests.support.table import each_cells

MAP = endpoint_names.MAP_NAME
PORT = 8080
READY = Endpoint(parse_addr("10.244.0.1"), node="node-a", zone="zone-a")
OTHER = Endpoint(parse_addr("10.244.0.2"), node="node-b", zone="zone-b")
DRAINING = replace(READY, ready=False, terminating=True)
ENDPOINTS = {
    "ready": READY,
    "other": OTHER,
    "draining": DRAINING,
    "draining-in-x": replace(DRAINING, zone="x"),
    "not-ready": replace(READY, ready=False, serving=False),
    "published": replace(READY, ready=False),
    "on-c": replace(READY, node="c"),
    "nowhere": replace(READY, node="", zone=""),
}
Names = dict[str, str]
"""Endpoint → Pod, node, zone and state, for each Service."""


def slice_of(*pairs: tuple[Endpoint, str], name: str = "a") -> EndpointSlice:
    """A slice of these endpoints and their Pods."""
    protocol = service("web", "").key.protocol
    return EndpointSlice(
        "default",
        name,
        "web",
        4,
        tuple(endpoint for endpoint, _ in pairs),
        (SlicePort("", protocol, PORT),),
        packed_pods=pack_names([pod for _, pod in pairs]),
    )


def piece(text: str, name: str = "a") -> EndpointSlice:
    """The slice with these endpoints, as "ready=web-0 other=web-1": one of ENDPOINTS, and its Pod."""
    words = (word.split("=") for word in text.split())
    return slice_of(*((ENDPOINTS[kind], pod) for kind, pod in words), name=name)


def slices(text: str) -> tuple[EndpointSlice, ...]:
    """Slices separated by a plus."""
    return tuple(piece(words, name) for words, name in zip(text.split("+"), "ab", strict=False)) if text else ()


def web(*slices: EndpointSlice, name: str = "web", at: str = "10.96.0.1:80") -> ServiceState:
    """A Service port with these slices; its backends are the endpoints that are ready, or else
    those that still serve.
    """
    state = service(name, at)
    endpoints = merge_endpoints(slices, SlicePort("", state.key.protocol, 0), 4)
    ready = tuple(backend for backend, endpoint in endpoints if endpoint.ready)
    serving = tuple(backend for backend, endpoint in endpoints if endpoint.serving)
    return replace(state, cluster=ready or serving, serving=serving, slices=slices)


def name_all(plane: BpfPlane) -> None:
    """Runs all deferred work that is due now."""
    while (due := plane._names.due()) is not None and due <= time.monotonic():
        plane.tick(time.monotonic())


def named(site: Site, state: DesiredState) -> BpfPlane:
    """Starts an agent that programs this state and names its endpoints."""
    plane = site.start(state)
    name_all(plane)
    return plane


def apply(plane: BpfPlane, *states: ServiceState, gone: tuple[ServicePortKey, ...] = ()) -> Any:
    """Programs only these changes, and then names them."""
    services = {state.key: state for state in states}
    report = plane.apply(DesiredState(services), [*services, *gone])
    name_all(plane)
    return report


def read_endpoints(site: Site) -> dict[str, list[EndpointEntry]]:
    """What an agent that is down has left: by Service."""
    ports = snapshot.read(site.pins, Part.ENDPOINTS).services
    return {
        port.key.name: sorted(port.endpoints.values(), key=lambda entry: entry.backend)
        for port in ports
        if port.key is not None
    }


def read_names(site: Site) -> dict[str, Names]:
    return {
        name: {str(entry.backend): f"{entry.pod} {entry.node} {entry.zone} {entry.state}" for entry in entries}
        for name, entries in read_endpoints(site).items()
    }


READY_NAME = "default/web-0 node-a zone-a ready"
OTHER_NAME = "default/web-1 node-b zone-b ready"
A, B = "10.244.0.1:8080", "10.244.0.2:8080"


@each_cells(
    "steps, names",
    """
one endpoint | ready=web-0 | A default/web-0 node-a zone-a ready
one more | ready=web-0; ready=web-0 other=web-1 | \
    A default/web-0 node-a zone-a ready; B default/web-1 node-b zone-b ready
one less | ready=web-0 other=web-1; other=web-1 | B default/web-1 node-b zone-b ready
another Pod has the address now | ready=web-0; on-c=api-7 | A default/api-7 c zone-a ready
in the set while it terminates | ready=web-0; draining=web-0 | A default/web-0 node-a zone-a terminating, serving
in no set while it terminates | draining=web-0 other=web-1 | \
    A default/web-0 node-a zone-a terminating, serving; B default/web-1 node-b zone-b ready
not ready, so in no set | not-ready=web-0 other=web-1 | \
    A default/web-0 node-a zone-a not ready; B default/web-1 node-b zone-b ready
not a Pod, without a node | nowhere= | A    ready
in the second slice | ready=web-0 + other=web-1 | \
    A default/web-0 node-a zone-a ready; B default/web-1 node-b zone-b ready
moved to the second slice | ready=web-0 + other=web-1; + ready=web-0 other=web-1 | \
    A default/web-0 node-a zone-a ready; B default/web-1 node-b zone-b ready
in both slices, which disagree: the last that does not terminate | ready=web-0 + on-c=new-0 | \
    A default/new-0 c zone-a ready
only a slice changes that does not count | draining=web-0 + ready=new-0; draining-in-x=web-0 + ready=new-0 | \
    A default/new-0 node-a zone-a ready
the slice that counted is gone | draining=web-0 + ready=new-0; draining=web-0 | \
    A default/web-0 node-a zone-a terminating, serving
no slice any more | ready=web-0;
""",
)
def test_the_map_has_what_the_slices_say(site: Site, steps, names):
    """Slices after each step, and the names in the end: an endpoint, its Pod, node, zone and state. However it got
    there: step by step, at once, and after a restart.
    """
    steps = steps.split(";")
    named_ends = (one.split(" ", 1) for one in names.split("; ") if one)
    expected = {{"A": A, "B": B}[end]: name for end, name in named_ends}
    plane = site.start(desired())
    for step in steps:
        apply(plane, web(*slices(step)))
    site.close_planes()
    assert read_names(site) == {"web": expected}
    written = site.entries(MAP)
    plane = named(site, desired(web(*slices(steps[-1]))))
    assert site.entries(MAP) == written, "the Service port keeps its id"
    assert "endpoint_names" not in plane.apply(desired(web(*slices(steps[-1]))), ()).writes


def test_services_that_disagree_have_their_own_names(site: Site):
    """One may publish addresses that are not ready."""
    states = (web(piece("ready=web-0")), web(piece("published=web-0"), name="twin", at="10.96.0.2:80"))
    plane = named(site, desired(*states))
    assert len(site.entries("backends")) == 1
    expected = {"web": {A: READY_NAME}, "twin": {A: "default/web-0 node-a zone-a not ready, serving"}}
    assert read_names(site) == expected
    apply(plane, states[1], gone=(states[0].key,))
    assert read_names(site)["twin"] == expected["twin"]
    assert len(site.entries(MAP)) == 1


def test_address_of_another_node_is_not_a_pods(site: Site):
    """A Pod with hostNetwork has its node's address: a client with that address may be anything."""
    state = web(piece("ready=web-0 other=agent-x"))
    named(site, DesiredState({state.key: state}, other_node_addresses={OTHER.address}))
    inspection = snapshot.read(site.pins, Part.ENDPOINTS)
    assert inspection.pods == {READY.address: "default/web-0"}
    assert read_names(site)["web"][B] == "default/agent-x node-b zone-b ready"


def test_work_comes_in_pieces(site: Site, monkeypatch):
    """A large Service is named after it is served, in several pieces, between which other changes are written."""
    monkeypatch.setattr(endpoint_names, "BATCH_ENTRIES", 10)
    many = slice_of(*((replace(READY, address=parse_addr(f"10.244.1.{i}")), f"web-{i}") for i in range(100)))
    plane = site.start(desired(web(many)))
    assert (len(site.entries("services")), site.entries(MAP)) == (1, {})
    plane._names._step()
    pieces = [len(site.entries(MAP))]
    newer = slice_of((replace(OTHER, zone="z"), "web-0"))
    while plane._names._step():
        pieces.append(len(site.entries(MAP)))
        if pieces[-1] == 50:
            plane.apply(desired(web(newer)), [web().key])
    assert {0, 10, 20, 50, 100} <= set(pieces)
    assert read_names(site)["web"] == {B: "default/web-0 node-b z ready"}


HOSTILE: dict[str, tuple[tuple[str, str, str], str]] = {
    "long": (("p" * 300, "n" * 300, "z" * 300), f"{'p' * 18}…{'p' * 18}"),
    "a long Pod, and the others as they are": (
        (f"web-{'x' * 120}-7f9c-x2v8k", "node-a", "z"),
        f"web-{'x' * 50}…{'x' * 42}-7f9c-x2v8k",
    ),
    "unprintable": (("web\x1b[31m", "\x07", "\u202e"), "web\x1b[31m"),
    "the separator": (("web\0-0", "n\0", "\0"), "web�-0"),
    "half of a character": (("\ud800", "n", "z"), "?"),
    "characters of several bytes": (("ä" * 200, "n", "z"), f"{'ä' * 28}…{'ä' * 28}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_shortened_and_stay_apart(site: Site, name: str):
    (pod, node, zone), shown = HOSTILE[name]
    named(site, desired(web(slice_of((replace(READY, node=node, zone=zone), pod)))))
    (entry,) = read_endpoints(site)["web"]
    assert entry.pod == f"default/{shown}"
    assert len(f"{shown}{entry.node}{entry.zone}".encode()) <= layout.ENDPOINT_TEXT_SIZE - 2
    assert (bool(entry.node), bool(entry.zone)) == (True, True)
    assert entry.is_pod(pod) == ("\0" not in pod and pod != "\ud800")


def test_names_without_room_are_left_out(site: Site, monkeypatch, caplog):
    """All are served; when others have left, the names appear."""
    monkeypatch.setattr(endpoint_names, "RETRY_DELAY_S", 0.0)
    few = replace_fields(SIZES, backends=64)

    def endpoints(number: int) -> EndpointSlice:
        addresses = (parse_addr(f"10.{number}.0.{i}") for i in range(1, 31))
        unready = ENDPOINTS["not-ready"]
        return slice_of((OTHER, "web"), *((replace(unready, address=one), "web-0") for one in addresses))

    states = {f"s{i}": web(endpoints(i), name=f"s{i}", at=f"10.96.0.{i}:80") for i in range(1, 4)}
    plane = site.open(sizes=few)

    def has_names(*expected: int) -> bool:
        plane.tick(time.monotonic())
        return sorted(map(len, read_endpoints(site).values())) == [*expected]

    assert plane.apply(desired(*states.values()), None).refused == {}
    until("one has names", lambda: has_names(0, 0, 31))
    assert all(has_names(0, 0, 31) for _ in range(20)), "further ticks change nothing"
    (named,) = (name for name, entries in read_endpoints(site).items() if entries)
    gone = states.pop(named).key
    plane.apply(desired(*states.values()), [gone])
    flush(plane)
    until("another one has names", lambda: has_names(0, 31))
    assert caplog.text.count("names of endpoints find no room") == 1


@pytest.mark.parametrize("call", ["put", "delete"])
def test_error_costs_names_only(site: Site, monkeypatch, call: str, caplog):
    """Later the map is read again, and completed."""
    plane = named(site, desired(web(piece("ready=web-0"))))
    real = getattr(AgentMaps, call)

    def refuse(self: AgentMaps, name: str, *arguments: Any, **more: Any) -> None:
        if name == MAP:
            raise KernelError("cannot write", errno=errno.ENOMEM)
        real(self, name, *arguments, **more)

    after = web(piece("other=web-1"))
    start = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(AgentMaps, call, refuse)
        assert apply(plane, after).refused == {}
    assert "names of endpoints are missing" in caplog.text
    due = plane._names.due()
    assert due is not None
    assert due > start + 1, "not at once"
    monkeypatch.setattr(plane._names, "_due", 0.0)
    name_all(plane)
    assert read_names(site)["web"] == {B: OTHER_NAME}


@pytest.mark.parametrize("authoritative", [True, False])
def test_restart_deletes_names_of_services_that_are_gone(site: Site, authoritative: bool):
    """Not while some objects could not be read: they may belong to one of these."""
    one, twin = (web(piece("ready=web-0"), name=f"s{i}", at=f"10.96.0.{i}:80") for i in (1, 2))
    named(site, desired(one, twin))
    assert len(site.entries(MAP)) == 2
    plane = site.open()
    plane.apply(desired(one), None, authoritative=authoritative)
    name_all(plane)
    assert len(site.entries(MAP)) == (1 if authoritative else 2)


def test_growth_for_names_makes_way_for_what_serves(site: Site, monkeypatch):
    size_maps(monkeypatch, endpoint_names=8, services=32)
    many = slice_of(*((replace(READY, address=parse_addr(f"10.244.1.{i}")), "web-0") for i in range(1, 41)))
    plane = site.start(desired(web(many)))
    while plane._names._step():
        pass
    assert plane._growth.is_busy
    plane._growth.begin({"services": 64}, time.monotonic())
    plane._growth.advance(float("inf"))
    assert site.pinned("services").max_entries == 64
    assert site.pinned(MAP).max_entries == 8, "its growth was abandoned"
    while plane._names.due() is not None:
        plane.tick(time.monotonic())
    assert len(read_endpoints(site)["web"]) == 40

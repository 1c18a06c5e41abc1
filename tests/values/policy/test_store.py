# SPDX-License-Identifier: Apache-2.0
"""What the ObjectStore keeps of the events, and which Services they touch."""

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from kbpf.model.address import Addr, parse_addr
from kbpf.model.events import Event, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.objects import (
    Cidr,
    Endpoint,
    EndpointSlice,
    Node,
    Pod,
    Protocol,
    Service,
    ServiceName,
    ServicePort,
    SlicePort,
)
from kbpf.policy.store import ChangeSet, ObjectStore
from tests.values.policy.services import gone, key, up

WEB = Service("ns", "web", "ClusterIP", (parse_addr("10.96.0.1"),), (ServicePort("", Protocol.TCP, 80),))
ONE = EndpointSlice("ns", "web-1", "web", 4, (Endpoint(parse_addr("10.1.0.1")),), (SlicePort("", Protocol.TCP, 8080),))
TWO = replace(ONE, name="web-2")
POD = Pod("ns", "p1", "1234", "me")
ME = Node("me", (parse_addr("10.0.0.1"),), "a")
NAME = ServiceName("ns", "web")
OTHER = ServiceName("ns", "other")


def store(*events: Event) -> ObjectStore:
    world = ObjectStore("me")
    world.apply(events)
    return world


class Row(NamedTuple):
    """Earlier events, the events of one batch, and the expected ChangeSet of that batch."""

    name: str
    before: list[Event]
    now: list[Event]
    services: tuple[ServiceName, ...] = ()
    everything: bool = False
    pods: bool = False
    addresses: tuple[Addr, ...] = ()


YOU = replace(ME, name="you", zone="b", addresses=(parse_addr("10.0.0.2"),))
ALL = [up(ME), up(WEB), up(ONE), up(POD)]
ROWS = [
    Row("nothing", ALL, []),
    Row("a new Service", [], [up(WEB)], (NAME,), addresses=WEB.cluster_ips),
    Row("a slice before its Service", [], [up(ONE)], (NAME,)),
    Row("several things at once", [up(ME)], [up(WEB), up(ONE), up(TWO)], (NAME,), addresses=WEB.cluster_ips),
    Row("the same again", ALL, [up(ME), up(WEB), up(ONE)]),
    Row("the same again, received later", ALL, [Upsert(key(WEB), WEB, 5.0)]),
    Row("a Service changes", ALL, [up(replace(WEB, affinity_timeout=5))], (NAME,)),
    Row("a Service is deleted", ALL, [gone(WEB)], (NAME,), addresses=WEB.cluster_ips),
    Row("an unknown Service is deleted", [], [gone(WEB)]),
    Row("a slice changes", ALL, [up(replace(ONE, endpoints=()))], (NAME,)),
    Row("a slice is deleted", ALL, [gone(ONE)], (NAME,)),
    Row("an unknown slice is deleted", ALL, [gone(TWO)]),
    Row("a slice moves to another Service", ALL, [up(replace(ONE, service="other"))], (NAME, OTHER)),
    Row("a rejected Service touches nothing", ALL, [Rejected(key(WEB), "bad")]),
    Row("Synced touches nothing", ALL, [Synced(Kind.SERVICE)]),
    Row("our Node is added", [], [up(ME)], (), True),
    Row("our Node moves to another zone", ALL, [up(replace(ME, zone="b"))], (), True),
    Row("our Node loses its address", ALL, [up(replace(ME, addresses=()))], (), True),
    Row("our Node gets pod networks", ALL, [up(replace(ME, pod_cidrs=(Cidr(parse_addr("10.1.0.0"), 120),)))], (), True),
    Row("a field of our Node changes that policy does not read", ALL, [up(replace(ME, skipped=("x",)))]),
    Row("our Node is deleted: its fields stay in use", ALL, [gone(ME)]),
    Row("our Node is deleted and added again", [*ALL, gone(ME)], [up(ME)]),
    Row(
        "our Node is deleted and added with another address",
        [*ALL, gone(ME)],
        [up(replace(ME, addresses=(parse_addr("10.0.0.2"),)))],
        (),
        True,
    ),
    Row("another Node is added", ALL, [up(YOU)], addresses=YOU.addresses),
    Row("another Node changes, but not its addresses", [*ALL, up(YOU)], [up(replace(YOU, zone="c"))]),
    Row(
        "another Node gets another address",
        [*ALL, up(YOU)],
        [up(replace(YOU, addresses=(parse_addr("10.0.0.3"),)))],
        addresses=(*YOU.addresses, parse_addr("10.0.0.3")),
    ),
    Row("a third Node has an address of another Node", [*ALL, up(YOU)], [up(replace(YOU, name="they"))]),
    Row("another Node is deleted", [*ALL, up(YOU)], [gone(YOU)], addresses=YOU.addresses),
    Row("another Node is rejected: its fields stay in use", [*ALL, up(YOU)], [Rejected(key(YOU), "bad")]),
    Row("a Pod is added", [], [up(POD)], pods=True),
    Row("the same Pod again", ALL, [up(POD)]),
    Row("a Pod is recreated with the same name", ALL, [up(replace(POD, uid="99"))], pods=True),
    Row("a Pod is deleted", ALL, [gone(POD)], pods=True),
    Row("an unknown Pod is deleted", [], [gone(POD)]),
    Row("a Pod of another node", [], [up(replace(POD, node="you"))]),
    Row("a Pod without a node, as a folder may have", [], [up(replace(POD, node=""))], pods=True),
    Row("a rejected Pod touches nothing", ALL, [Rejected(key(POD), "bad")]),
    Row("Pods are known for the first time", ALL, [Synced(Kind.POD)], pods=True),
    Row("Pods are listed again", [*ALL, Synced(Kind.POD)], [Synced(Kind.POD)]),
    Row("an unknown Node is deleted", ALL, [gone(replace(ME, name="you"))]),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_touched(row: Row):
    world = store(*row.before)
    touched = world.apply(row.now)
    assert touched == ChangeSet(set(row.services), row.everything, row.pods, set(row.addresses))
    assert bool(touched) is (row.everything or row.pods or bool(row.services or row.addresses))


def test_store_returns_the_current_objects():
    world = store(up(TWO), up(WEB), up(ONE), up(ME))
    assert world.service(NAME) == WEB
    assert set(world.service_names()) == {NAME}
    assert world.slices(NAME) == (ONE, TWO)
    assert world.node == ME
    world.apply([gone(ONE), gone(WEB), gone(ME)])
    assert world.service(NAME) is None
    assert not world.service_names()
    assert world.slices(NAME) == (TWO,)
    assert world.node == replace(ME, being_deleted=True)
    world.apply([gone(TWO)])
    assert world.slices(NAME) == ()


def problems(world: ObjectStore) -> dict[ObjectKey, tuple[str, ...]]:
    """The problem lines of those objects of this file that have any."""
    known = {key(one): world.problems_of(key(one)) for one in (WEB, ONE, TWO, ME, POD)}
    return {each: lines for each, lines in known.items() if lines}


def test_skipped_field_of_our_node_is_a_problem_until_corrected():
    world = store(up(replace(ME, skipped=("spec.podCIDRs[0]: bad",))))
    assert problems(world) == {key(ME): ("spec.podCIDRs[0]: bad",)}
    world.apply([up(ME)])
    assert problems(world) == {}


def test_slice_that_moves_to_another_service_leaves_the_first():
    world = store(up(ONE), up(replace(ONE, service="other")))
    assert world.slices(NAME) == ()
    assert [piece.name for piece in world.slices(OTHER)] == ["web-1"]


def test_slices_of_one_name_in_two_namespaces_are_distinct():
    world = store(up(ONE), up(replace(ONE, namespace="other")))
    assert world.slices(NAME) == (ONE,)
    assert len(world.slices(ServiceName("other", "web"))) == 1


def test_node_is_empty_with_our_name_until_it_is_known():
    world = store(up(replace(ME, name="you")))
    assert world.node == Node("me")
    assert not world.node_known
    world.apply([up(ME), gone(ME)])
    assert world.node_known


def test_bind_address_precedes_the_nodes_addresses():
    own, other = parse_addr("10.0.0.9"), parse_addr("fd00::1")
    world = ObjectStore("me", own)
    assert world.node.addresses == (own,)
    world.apply([up(replace(ME, addresses=(*ME.addresses, other, own)))])
    assert world.node.addresses == (own, *ME.addresses, other)


def of_api_server(name: str, *ready: bool, service: str = "kubernetes") -> EndpointSlice:
    ends = tuple(
        Endpoint(parse_addr(f"198.18.0.{i}"), is_ready, is_ready, False) for i, is_ready in enumerate(ready, 1)
    )
    return EndpointSlice("default", name, service, 4, ends, ONE.ports)


UP, TWO_UP = of_api_server("kubernetes", True), of_api_server("kubernetes", True, True)
EMPTY, UNREADY = of_api_server("kubernetes"), of_api_server("kubernetes", False)
SECOND, SECOND_EMPTY = of_api_server("second", True), of_api_server("second")
KUBERNETES_ROWS = {
    "a ready endpoint": ([up(UP)], (UP,)),
    "a second ready endpoint": ([up(UP), up(TWO_UP)], (TWO_UP,)),
    "empty from the start: nothing to keep": ([up(EMPTY)], ()),
    "emptied: the last endpoint is kept": ([up(UP), up(EMPTY)], (UP,)),
    "no longer ready": ([up(UP), up(UNREADY)], (UP,)),
    "deleted": ([up(UP), gone(UP)], (UP,)),
    "deleted and recreated": ([up(UP), gone(UP), up(TWO_UP)], (TWO_UP,)),
    "empty for a while": ([up(TWO_UP), up(EMPTY), up(EMPTY), up(UP)], (UP,)),
    "one of two slices is emptied": ([up(UP), up(SECOND), up(SECOND_EMPTY)], (UP, SECOND_EMPTY)),
    "two are deleted, one is recreated": ([up(UP), up(SECOND), gone(UP), gone(SECOND), up(SECOND)], (SECOND,)),
    "one is deleted, then the other emptied: the later one is kept": (
        [up(UP), up(SECOND), gone(UP), up(SECOND_EMPTY)],
        (SECOND,),
    ),
    "a slice moves to another Service": (
        [up(UP), up(SECOND), up(of_api_server("second", True, service="other"))],
        (UP,),
    ),
}
"""Events about the slices of Service kubernetes, and the slices in use after the last."""


@pytest.mark.parametrize("name", KUBERNETES_ROWS)
def test_service_kubernetes_keeps_its_last_endpoints(name: str):
    events, in_force = KUBERNETES_ROWS[name]
    world = ObjectStore("me")
    for event in events:
        world.apply([event])
    assert world.slices(ServiceName("default", "kubernetes")) == in_force


def test_other_services_do_not_keep_their_last_endpoints():
    world = store(up(ONE), up(replace(ONE, endpoints=())))
    assert world.slices(NAME) == (replace(ONE, endpoints=()),)


def test_rejected_object_keeps_its_previous_version():
    world = store(*ALL, Rejected(key(WEB), "no ports"), Rejected(key(ONE), "no label"))
    assert world.service(NAME) == WEB
    assert world.slices(NAME) == (ONE,)
    assert problems(world) == {key(WEB): ("no ports",), key(ONE): ("no label",)}
    assert not world.all_usable


def test_a_rejection_ends_with_an_upsert_or_a_delete():
    world = store(*ALL, Rejected(key(WEB), "bad"), Rejected(key(TWO), "bad"))
    assert world.apply([up(WEB), gone(TWO)]) == ChangeSet()
    assert problems(world) == {}
    assert world.all_usable
    world.apply([Rejected(key(WEB), "bad"), Rejected(key(WEB), "worse")])
    assert problems(world) == {key(WEB): ("worse",)}


def test_rejection_of_another_node_is_no_problem():
    world = store(Rejected(key(replace(ME, name="you")), "bad"), Rejected(key(ME), "bad"))
    assert problems(world) == {key(ME): ("bad",)}


def test_skipped_endpoints_are_problems_until_the_slice_is_corrected_or_deleted():
    world = ObjectStore("me")
    bad = replace(ONE, skipped=("endpoint 3: not an IP address",))
    world.apply([up(bad), up(replace(bad, name="web-2")), Rejected(key(ONE), "bad")])
    assert problems(world) == {
        key(ONE): ("bad", "endpoint 3: not an IP address"),
        key(TWO): ("endpoint 3: not an IP address",),
    }
    world.apply([up(ONE), gone(TWO)])
    assert problems(world) == {}


def test_skipped_fields_of_a_service_and_our_node_are_problems():
    world = ObjectStore("me")
    web, me = replace(WEB, skipped=("an annotation",)), replace(ME, skipped=("an address",))
    world.apply([up(web), up(me), up(replace(me, name="you"))])
    assert problems(world) == {key(WEB): ("an annotation",), key(ME): ("an address",)}
    assert world.service(NAME) == web, "served on"
    world.apply([gone(web), up(ME)])
    assert problems(world) == {}


def test_kinds_are_synced_one_by_one():
    world = ObjectStore("me")
    assert world.synced == frozenset()
    world.apply([Synced(Kind.SERVICE), Synced(Kind.SLICE), Synced(Kind.SERVICE)])
    assert world.synced == {Kind.SERVICE, Kind.SLICE}


def test_returned_values_do_not_change_later():
    world = store(Rejected(key(WEB), "bad"), up(ONE))
    slices, synced = world.slices(NAME), world.synced
    world.apply([up(WEB), gone(ONE), Synced(Kind.NODE)])
    assert (slices, synced) == ((ONE,), frozenset())


def test_rejected_pod_leaves_all_usable():
    world = store(Rejected(key(POD), "bad"))
    assert world.all_usable

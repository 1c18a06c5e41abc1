# SPDX-License-Identifier: Apache-2.0
"""What the ObjectStore keeps of the events, and which Services they touch."""

from typing import Any

import yaml
from msgspec.structs import replace

from kbpf.model.address import parse_addr
from kbpf.model.events import Event, Kind, Rejected, Synced, Upsert
from kbpf.model.objects import (
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
from tests.support.table import each_cells, pairs
from tests.values.policy.services import addrs, cidrs, gone, key, up

WEB = Service("ns", "web", "ClusterIP", (parse_addr("10.96.0.1"),), (ServicePort("", Protocol.TCP, 80),))
ONE = EndpointSlice("ns", "web-1", "web", 4, (Endpoint(parse_addr("10.1.0.1")),), (SlicePort("", Protocol.TCP, 8080),))
TWO = replace(ONE, name="web-2")
POD = Pod("ns", "p1", "1234", "me")
ME = Node("me", (parse_addr("10.0.0.1"),), "a")
NAME = ServiceName("ns", "web")
OTHER = ServiceName("ns", "other")


def store(text: str) -> ObjectStore:
    """A store after these events(), applied one by one."""
    world = ObjectStore("me")
    for event in events(text):
        world.apply([event])
    return world


OBJECTS: dict[str, Service | EndpointSlice | Node | Pod] = {"web": WEB, "one": ONE, "pod": POD, "me": ME}


def frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


FIELDS = {"addresses": lambda value: addrs(*value), "pod_cidrs": lambda value: cidrs(" ".join(value))}
for name, text in pairs("""\
web-affine → web {affinity_timeout: 5}
one-empty → one {endpoints: []}
one-of-other → one {service: other}
two → one {name: web-2}
pod-recreated → pod {uid: '99'}
pod-elsewhere → pod {node: you}
pod-nowhere → pod {node: ''}
me-in-zone-b → me {zone: b}
me-without-address → me {addresses: []}
me-at-another-address → me {addresses: [10.0.0.2]}
me-with-pods → me {pod_cidrs: [10.1.0.0/24]}
you → me {name: you, zone: b, addresses: [10.0.0.2]}
you-in-zone-c → you {zone: c}
you-at-another-address → you {addresses: [10.0.0.3]}
they → me {name: they, addresses: [10.0.0.2]}
web-odd → web {skipped: [odd]}
one-odd → one {skipped: [odd]}
two-odd → two {skipped: [odd]}
me-odd → me {skipped: [odd]}
you-odd → you {skipped: [odd]}
"""):
    kind, _, fields = text.partition(" ")
    given = yaml.safe_load(fields).items()
    OBJECTS[name] = replace(OBJECTS[kind], **{key: FIELDS.get(key, frozen)(value) for key, value in given})


def events(text: str) -> list[Event]:
    """``web``: upserted; ``-web``: deleted; ``!web``: rejected; ``synced:Pod``: that kind is synced."""
    made: list[Event] = []
    for word in text.split():
        if word.startswith("synced:"):
            made.append(Synced(Kind(word.removeprefix("synced:"))))
        elif word.startswith("!"):
            made.append(Rejected(key(OBJECTS[word[1:]]), "bad"))
        else:
            made.append(gone(OBJECTS[word[1:]]) if word.startswith("-") else up(OBJECTS[word]))
    return made


ALL = "me web one pod"


@each_cells(
    "before, now, touched_text",
    """
nothing                                               | ALL
a new Service                                         |                | web                    | ns/web 10.96.0.1
a slice before its Service                            |                | one                    | ns/web
several things at once                                | me             | web one two            | ns/web 10.96.0.1
the same again                                        | ALL            | me web one
a Service changes                                     | ALL            | web-affine             | ns/web
a Service is deleted                                  | ALL            | -web                   | ns/web 10.96.0.1
an unknown Service is deleted                         |                | -web
a slice changes                                       | ALL            | one-empty              | ns/web
a slice is deleted                                    | ALL            | -one                   | ns/web
an unknown slice is deleted                           | ALL            | -two
a slice moves to another Service                      | ALL            | one-of-other           | ns/web ns/other
a rejected Service touches nothing                    | ALL            | !web
Synced touches nothing                                | ALL            | synced:Service
our Node is added                                     |                | me                     | all
our Node moves to another zone                        | ALL            | me-in-zone-b           | all
our Node loses its address                            | ALL            | me-without-address     | all
our Node gets pod networks                            | ALL            | me-with-pods           | all
a field of our Node changes that policy does not read | ALL            | me-odd
our Node is deleted: its fields stay in use           | ALL            | -me
our Node is deleted and added again                   | ALL -me        | me
our Node is deleted and added with another address    | ALL -me        | me-at-another-address  | all
another Node is added                                 | ALL            | you                    | 10.0.0.2
another Node changes, but not its addresses           | ALL you        | you-in-zone-c
another Node gets another address                     | ALL you        | you-at-another-address | 10.0.0.2 10.0.0.3
a third Node has an address of another Node           | ALL you        | they
another Node is deleted                               | ALL you        | -you                   | 10.0.0.2
another Node is rejected: its fields stay in use      | ALL you        | !you
a Pod is added                                        |                | pod                    | pods
the same Pod again                                    | ALL            | pod
a Pod is recreated with the same name                 | ALL            | pod-recreated          | pods
a Pod is deleted                                      | ALL            | -pod                   | pods
an unknown Pod is deleted                             |                | -pod
a Pod of another node                                 |                | pod-elsewhere
a Pod without a node, as a folder may have            |                | pod-nowhere            | pods
a rejected Pod touches nothing                        | ALL            | !pod
Pods are known for the first time                     | ALL            | synced:Pod             | pods
Pods are listed again                                 | ALL synced:Pod | synced:Pod
an unknown Node is deleted                            | ALL            | -you
""",
)
def test_what_is_touched(before, now, touched_text):
    """Earlier events (ALL: those of `ALL`), those of one batch, and what the batch touches: Services by name, `all`,
    `pods`, addresses.
    """
    world = store(before.replace("ALL", ALL))
    words = touched_text.split()
    services = {ServiceName(*word.split("/")) for word in words if "/" in word}
    addresses = {parse_addr(word) for word in words if "." in word}
    touched = world.apply(events(now))
    assert touched == ChangeSet(services, "all" in words, "pods" in words, addresses)
    assert bool(touched) is bool(words)


def test_an_object_that_is_only_received_again_touches_nothing():
    assert not store(ALL).apply([Upsert(key(WEB), WEB, 5.0)])


def test_store_returns_the_current_objects():
    world = store("two web one me")
    assert world.service(NAME) == WEB
    assert set(world.service_names()) == {NAME}
    assert world.slices(NAME) == (ONE, TWO)
    assert world.node == ME
    world.apply(events("-one -web -me"))
    assert world.service(NAME) is None
    assert not world.service_names()
    assert world.slices(NAME) == (TWO,)
    assert world.node == replace(ME, being_deleted=True)
    world.apply(events("-two"))
    assert world.slices(NAME) == ()


def test_node_is_empty_with_our_name_until_it_is_known():
    world = store("you")
    assert world.node == Node("me")
    assert not world.node_known
    world.apply(events("me -me"))
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


OBJECTS |= {
    "up": of_api_server("kubernetes", True),
    "two-up": of_api_server("kubernetes", True, True),
    "empty": of_api_server("kubernetes"),
    "unready": of_api_server("kubernetes", False),
    "second": of_api_server("second", True),
    "second-empty": of_api_server("second"),
    "second-of-other": of_api_server("second", True, service="other"),
}


@each_cells(
    "events, used",
    """
a ready endpoint                                              | up                           | up
a second ready endpoint                                       | up two-up                    | two-up
empty from the start: nothing to keep                         | empty
emptied: the last endpoint is kept                            | up empty                     | up
no longer ready                                               | up unready                   | up
deleted                                                       | up -up                       | up
deleted and recreated                                         | up -up two-up                | two-up
empty for a while                                             | two-up empty empty up        | up
one of two slices is emptied                                  | up second second-empty       | up second-empty
two are deleted, one is recreated                             | up second -up -second second | second
one is deleted, then the other emptied: the later one is kept | up second -up second-empty   | second
a slice moves to another Service                              | up second second-of-other    | up
""",
)
def test_service_kubernetes_keeps_its_last_endpoints(events, used):
    """Events about the slices of Service kubernetes, and the slices in use after the last."""
    found = store(events).slices(ServiceName("default", "kubernetes"))
    assert found == tuple(OBJECTS[word] for word in used.split())


def test_other_services_do_not_keep_their_last_endpoints():
    assert store("one one-empty").slices(NAME) == (OBJECTS["one-empty"],)


@each_cells(
    "events, lines_text, usable",
    """
rejected objects                                  | ALL !web !one     | web: bad; one: bad | no
a rejection ends with an upsert or a delete       | ALL !web !two web -two
rejected again                                    | ALL !web !web     | web: bad           | no
another Node is rejected                          | ALL !you
our Node is rejected                              | ALL !me           | me: bad            | no
a rejected Pod | !pod | pod: bad
what is skipped in two slices, one rejected since | one-odd two-odd !one | one: bad, odd; two: odd | no
slices that are corrected or deleted              | one-odd two-odd !one one -two
what is skipped in a Service and our Node alone   | web-odd me-odd you-odd | web: odd; me: odd
a Service and our Node that are corrected         | web-odd me-odd -web me
""",
    usable=lambda cell: cell != "no",
)
def test_problems(events, lines_text, usable):
    """Events, and the lines of each object that has any; `usable`: no object is missing because it was rejected."""
    world = store(events.replace("ALL", ALL))
    lines = {name: world.problems_of(key(OBJECTS[name])) for name in ("web", "one", "two", "me", "pod", "you")}
    assert "; ".join(f"{name}: {', '.join(each)}" for name, each in lines.items() if each) == lines_text
    assert world.all_usable is usable


def test_rejected_object_keeps_its_previous_version():
    world = store(f"{ALL} !web !one")
    assert world.service(NAME) == WEB
    assert world.slices(NAME) == (ONE,)
    assert store("web-odd").service(NAME) == OBJECTS["web-odd"], "served on"


def test_kinds_are_synced_one_by_one():
    assert store("").synced == frozenset()
    assert store("synced:Service synced:EndpointSlice synced:Service").synced == {Kind.SERVICE, Kind.SLICE}


def test_returned_values_do_not_change_later():
    world = store("!web one")
    slices, synced = world.slices(NAME), world.synced
    world.apply(events("web -one synced:Node"))
    assert (slices, synced) == ((ONE,), frozenset())

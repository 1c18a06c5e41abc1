# SPDX-License-Identifier: Apache-2.0
"""What differs between two states of a cluster: the share of each backend before and after, against
shares computed by hand, and all else that clients of a node notice.
"""

from collections.abc import Iterable
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from kbpf.cli.differences import ModelObject, World, WorldChange, make_events
from kbpf.model.config import Config
from kbpf.model.events import ObjectKey
from kbpf.model.objects import (
    Endpoint,
    EndpointSlice,
    Node,
    Protocol,
    Service,
    ServicePort,
    SlicePort,
    Weights,
    pack_names,
)
from kbpf.views.differences import DifferenceRow
from tests.values.policy.services import HTTP, addrs, key

WEB = Service("shop", "web", "ClusterIP", addrs("10.96.0.1"), (ServicePort("http", Protocol.TCP, 80),))
NODES = (Node("a1", addrs("192.0.2.1"), "a"), Node("a2", addrs("192.0.2.2"), "a"), Node("b1", addrs("192.0.2.3"), "b"))


def end(number: int, node: str, **said: object) -> Endpoint:
    """The endpoint 10.1.0.NUMBER of the Pod p-NUMBER, in the zone of its node's first letter."""
    return Endpoint(*addrs(f"10.1.0.{number}"), node=node, zone=node[:1], **said)  # type: ignore[arg-type]


def slice_of(*ends: Endpoint, service: str = "web") -> EndpointSlice:
    pods = pack_names([f"p-{endpoint.address[-1]}" for endpoint in ends])
    return EndpointSlice("shop", f"{service}-1", service, 4, ends, HTTP, (), pods)


def world(*objects: ModelObject) -> dict[ObjectKey, ModelObject]:
    return {key(obj): obj for obj in objects}


FOUR = (end(1, "a1"), end(2, "a2"), end(3, "b1"), end(4, "b1"))
PLAIN = world(WEB, slice_of(*FOUR), *NODES)
CONFIG = Config()
Shares = dict[int, tuple[float | None, float | None]]
"""Last byte of the backend's address → its share before and after."""


def shares(differences: Iterable[DifferenceRow], set_name: str = "cluster") -> Shares:
    return {
        int(d.name.partition(":")[0].rpartition(".")[2]): (d.share_before, d.share_after)
        for d in differences
        if d.what == "backend" and d.set == set_name
    }


def run(before: World, after: World, node: str = "a1", config: Config = CONFIG) -> list[DifferenceRow]:
    return [row for _, row in WorldChange(before, after, config).compute(node)]


def with_ends(*ends: Endpoint) -> dict[ObjectKey, ModelObject]:
    return PLAIN | world(slice_of(*ends))


def not_ready(endpoint: Endpoint) -> Endpoint:
    return replace(endpoint, ready=False, serving=False)


def terminating(endpoint: Endpoint) -> Endpoint:
    return replace(endpoint, ready=False, terminating=True)


def with_weights(**weights: object) -> dict[ObjectKey, ModelObject]:
    return PLAIN | world(replace(WEB, weights=Weights(**weights)))  # type: ignore[arg-type]


HINTED = with_ends(*(replace(end, zone_hints=(end.zone,)) for end in FOUR))
DRAINED = with_ends(*FOUR[:2], *map(terminating, FOUR[2:]))


class Row(NamedTuple):
    """The state afterwards, a node, and what becomes of the four endpoints' shares, each 1/4
    before. `why`: of the third backend.
    """

    after: World
    node: str
    shares: str
    why: str = ""


HALVES = "1=0.5 2=0.5 3=None 4=None"
ROWS = {
    "zone b is down": Row(with_ends(*FOUR[:2], *map(not_ready, FOUR[2:])), "a1", HALVES, "not ready, not serving"),
    "a node is drained": Row(DRAINED, "b1", HALVES, "terminating: other endpoints get new connections"),
    "all nodes are drained: terminating endpoints serve": Row(with_ends(*map(terminating, FOUR)), "a1", ""),
    "weight 0": Row(
        with_weights(pods=(("p-3", 0),)),
        "a1",
        "1=0.3333 2=0.3333 3=None 4=0.3333",
        "its weight is 0: no new connections",
    ),
    "weight of a zone": Row(with_weights(zones=(("b", 3),)), "a1", "1=0.125 2=0.125 3=0.375 4=0.375"),
    "same zone, in zone a": Row(
        HINTED, "a1", HALVES, "ready, but PreferSameZone prefers other endpoints for this node"
    ),
    "same zone, in zone b": Row(HINTED, "b1", "1=None 2=None 3=0.5 4=0.5"),
}


@pytest.mark.parametrize("name", ROWS)
def test_shares(name: str):
    row = ROWS[name]
    found = run(PLAIN, row.after, row.node)
    after = shares(found)
    assert " ".join(f"{number}={share}" for number, (_, share) in after.items()) == row.shares
    assert {before for before, _ in after.values()} <= {0.25}
    if row.why:
        (third,) = (d for d in found if d.name == "10.1.0.3:8080")
        assert (third.pod, third.node, third.zone, third.reason) == ("p-3", "b1", "b", row.why)


def test_shares_of_one_state_are_its_difference_from_nothing():
    assert shares(run({}, PLAIN)) == dict.fromkeys((1, 2, 3, 4), (None, 0.25))
    third = shares(run({}, with_weights(pods=(("p-3", 0),))))
    assert third == dict.fromkeys((1, 2, 4), (None, 0.3333))


def test_a_set_that_becomes_empty_says_what_clients_see():
    def sets(before: World, after: World) -> list[tuple[str, str | None, str | None]]:
        found = run(before, after)
        return [(d.set, d.before, d.after) for d in found if d.what == "set"]

    nothing = with_ends(*map(not_ready, FOUR))
    assert sets(PLAIN, nothing) == [("cluster", "4 backends", "empty: refused")]
    local = world(replace(WEB, internal_local=True))
    gone = with_ends(not_ready(FOUR[0]), *FOUR[1:])
    assert sets(PLAIN | local, gone | local) == [("local", "1 backend", "empty: dropped")]
    # One of this node serves while it terminates.
    drained = with_ends(terminating(FOUR[0]), *FOUR[1:])
    assert sets(PLAIN | local, drained | local) == []


# ---- two worlds ----------------------------------------------------------------------------------

OLDER = replace(WEB, creation_timestamp="2024-01-01T00:00:00Z")
EXTERNAL = replace(WEB, name="ext", cluster_ips=addrs("10.96.0.9"), external_ips=addrs("203.0.113.9"))
GONE_BACKENDS = "".join(f"\nbackend 10.1.0.{n}:8080: 0.25 → None" for n in (1, 2, 3, 4))
CHANGES = {
    "nothing": (PLAIN, PLAIN, ""),
    "a Service is gone": (
        PLAIN,
        {k: v for k, v in PLAIN.items() if not isinstance(v, Service)},
        f"frontend 10.96.0.1:80/TCP: ClusterIP → \nset : 4 backends → {GONE_BACKENDS}",
    ),
    "another ClusterIP": (
        PLAIN,
        PLAIN | world(replace(WEB, cluster_ips=addrs("10.96.0.7"))),
        "frontend 10.96.0.1:80/TCP: ClusterIP → \nfrontend 10.96.0.7:80/TCP:  → ClusterIP",
    ),
    "policy and affinity": (
        PLAIN,
        PLAIN | world(replace(WEB, internal_local=True, affinity_timeout=60)),
        "setting internal policy: Cluster → Local\n"
        "setting affinity: none → 60 s\n"
        f"set : 4 backends → {GONE_BACKENDS}\n"
        "set :  → 1 backend\n"
        "backend 10.1.0.1:8080: None → 1.0",
    ),
    "an address that an older Service has": (
        PLAIN | world(replace(OLDER, external_ips=addrs("203.0.113.9"))),
        PLAIN
        | world(
            replace(OLDER, external_ips=addrs("203.0.113.9")),
            replace(EXTERNAL, creation_timestamp="2025-01-01T00:00:00Z"),
        ),
        "frontend 10.96.0.9:80/TCP:  → ClusterIP\n"
        "setting lost frontends:  → 203.0.113.9:80/TCP to shop/web\n"
        "set :  → empty: refused",
    ),
    "the node's zone and address": (
        PLAIN,
        PLAIN | world(Node("a1", addrs("192.0.2.11"), "b")),
        "node NodePort addresses: 192.0.2.1 → 192.0.2.11\nnode SNAT addresses: 192.0.2.1 → 192.0.2.11",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_difference_of_two_worlds(name: str):
    before, after, rows = CHANGES[name]
    found = []
    for d in run(before, after):
        was, is_ = (d.share_before, d.share_after) if d.what == "backend" else (d.before, d.after)
        found.append(f"{d.what} {d.name}: {was} → {is_}")
    assert "\n".join(found) == rows


GONE = {
    "Service port": {k: v for k, v in PLAIN.items() if not isinstance(v, Service)},
    "endpoint": PLAIN | world(slice_of(*FOUR[:3])),
}


@pytest.mark.parametrize("what", GONE)
def test_what_is_gone_is_the_reason(what: str):
    (last,) = (d for d in run(PLAIN, GONE[what]) if d.name == "10.1.0.4:8080")
    assert last.reason == f"its {what} is gone"
    assert (last.pod, last.node, last.zone) == ("p-4", "b1", "b")


def test_events_lead_from_one_world_to_the_other():
    after = {k: v for k, v in PLAIN.items() if not isinstance(v, Node)} | world(
        slice_of(FOUR[0]), slice_of(FOUR[1], service="new")
    )
    result = dict(PLAIN)
    for event in make_events(PLAIN, after):
        result.pop(event.key, None)  # type: ignore[union-attr]
        if hasattr(event, "object"):
            result[event.key] = event.object  # type: ignore[union-attr]
    assert result == after
    assert make_events(after, after) == []


def test_the_ports_of_one_service_are_separate():
    two = replace(WEB, ports=(*WEB.ports, ServicePort("dns", Protocol.UDP, 53)))
    ports = (*HTTP, SlicePort("dns", Protocol.UDP, 5353))
    before = world(two, replace(slice_of(*FOUR), ports=ports), *NODES)
    after = before | world(replace(slice_of(*FOUR[:2]), ports=ports))
    assert {(d.port, d.protocol) for d in run(before, after)} == {("http", "TCP"), ("dns", "UDP")}

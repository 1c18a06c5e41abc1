# SPDX-License-Identifier: Apache-2.0
"""What differs between two states of a cluster: the share of each backend before and after, against
shares computed by hand, and all else that clients of a node notice.
"""

import pytest
from msgspec.structs import replace

from kbpf.cli.differences import ModelObject, World, WorldChange, make_events
from kbpf.model.config import Config
from kbpf.model.events import ObjectKey
from kbpf.model.objects import Node, Protocol, Service, ServicePort, SlicePort
from kbpf.source.decode.annotations import parse_weights
from kbpf.views.differences import DifferenceRow
from tests.support.table import each_case, each_cells, each_pair
from tests.values.policy.services import HTTP, addrs, key, piece, service

NODES = (Node("a1", addrs("192.0.2.1"), "a"), Node("a2", addrs("192.0.2.2"), "a"), Node("b1", addrs("192.0.2.3"), "b"))
FOUR = "1@a1,a 2@a2,a 3@b1,b 4@b1,b"
"""Endpoints of the Pods p-1 to p-4, as in ends(): on two nodes in zone a, and one in zone b."""


def worlds(*objects: ModelObject) -> dict[ObjectKey, ModelObject]:
    return {key(each): each for each in objects}


def world(text: str = "", ends: str = "", weights: str = "") -> dict[ObjectKey, ModelObject]:
    """The ClusterIP Service web with these words of service(), these endpoints or FOUR, and the nodes."""
    web = replace(service(f"web ClusterIP {text}"), weights=parse_weights(weights, []))
    pods = " ".join(f"p-{word[0]}" for word in (ends or FOUR).split())
    return worlds(web, piece(ends or FOUR, pods=pods), *NODES)


def run(before: World, after: World, node: str = "a1") -> list[DifferenceRow]:
    return [row for _, row in WorldChange(before, after, Config()).compute(node)]


def shares(differences: list[DifferenceRow]) -> str:
    """Last byte of each backend's address=its share before>after."""
    found = (d for d in differences if d.what == "backend" and d.set == "cluster")
    return " ".join(f"{d.name.split(':')[0].split('.')[-1]}={d.share_before}>{d.share_after}" for d in found)


@each_cells(
    "ends, weights, node, shares_text, why",
    """\
zone b is down | 1@a1,a 2@a2,a 3/down@b1,b 4/down@b1,b |  | a1 | 1=0.25>0.5 2=0.25>0.5 3=0.25>None 4=0.25>None \
| not ready, not serving
a node is drained | 1@a1,a 2@a2,a 3/draining@b1,b 4/draining@b1,b |  | b1 \
| 1=0.25>0.5 2=0.25>0.5 3=0.25>None 4=0.25>None | terminating: other endpoints get new connections
all nodes are drained: terminating endpoints serve | 1/draining@a1,a 2/draining@a2,a 3/draining@b1,b 4/draining@b1,b \
|  | a1 |
weight 0 |  | p-3=0 | a1 | 1=0.25>0.3333 2=0.25>0.3333 3=0.25>None 4=0.25>0.3333 | its weight is 0: no new connections
weight of a zone |  | zone:b=3 | a1 | 1=0.25>0.125 2=0.25>0.125 3=0.25>0.375 4=0.25>0.375
same zone, in zone a | 1@a1,a>a 2@a2,a>a 3@b1,b>b 4@b1,b>b |  | a1 \
| 1=0.25>0.5 2=0.25>0.5 3=0.25>None 4=0.25>None | ready, but PreferSameZone prefers other endpoints for this node
same zone, in zone b | 1@a1,a>a 2@a2,a>a 3@b1,b>b 4@b1,b>b |  | b1 | 1=0.25>None 2=0.25>None 3=0.25>0.5 4=0.25>0.5
""",
)
def test_shares(ends, weights, node, shares_text, why):
    """The endpoints and weights afterwards, a node, and what becomes of the four endpoints' shares there. `why`: of the
    third backend.
    """
    found = run(world(), world("", ends, weights), node)
    assert shares(found) == shares_text
    if why:
        (third,) = (d for d in found if d.name == "10.1.0.3:8080")
        assert (third.pod, third.node, third.zone, third.reason) == ("p-3", "b1", "b", why)


def test_shares_of_one_state_are_its_difference_from_nothing():
    assert shares(run({}, world())) == "1=None>0.25 2=None>0.25 3=None>0.25 4=None>0.25"
    assert shares(run({}, world(weights="p-3=0"))) == "1=None>0.3333 2=None>0.3333 4=None>0.3333"


@each_pair(
    "given, expected",
    """\
 | 1/down@a1,a → cluster: 1 backend, empty: refused
internal-local | 1/down@a1,a 2@a2,a → local: 1 backend, empty: dropped
internal-local | 1/draining@a1,a 2@a2,a →
""",
)
def test_a_set_that_becomes_empty_says_what_clients_see(given, expected):
    """Words of the Service | its endpoints → the set that becomes empty if the first one is no longer ready. One of
    this node serves while it terminates.
    """
    text, ends = (part.strip() for part in given.split("|"))
    before = ends.replace("/down", "").replace("/draining", "")
    found = [d for d in run(world(text, before), world(text, ends)) if d.what == "set"]
    assert "; ".join(f"{d.set}: {d.before}, {d.after}" for d in found) == expected


# ---- two worlds ----------------------------------------------------------------------------------

OLD_IP = world("external=203.0.113.9 created=old")
NO_SERVICE = {k: v for k, v in world().items() if not isinstance(v, Service)}
GONE_BACKENDS = "".join(f"\nbackend 10.1.0.{n}:8080: 0.25 → None" for n in (1, 2, 3, 4))
CHANGES = {
    "nothing": (world(), world(), ""),
    "a Service is gone": (
        world(),
        NO_SERVICE,
        f"frontend 10.96.0.1:80/TCP: ClusterIP → \nset : 4 backends → {GONE_BACKENDS}",
    ),
    "another ClusterIP": (
        world(),
        world("ip=10.96.0.7"),
        "frontend 10.96.0.1:80/TCP: ClusterIP → \nfrontend 10.96.0.7:80/TCP:  → ClusterIP",
    ),
    "policy and affinity": (
        world(),
        world("internal-local affinity=60"),
        "setting internal policy: Cluster → Local\n"
        "setting affinity: none → 60 s\n"
        f"set : 4 backends → {GONE_BACKENDS}\n"
        "set :  → 1 backend\n"
        "backend 10.1.0.1:8080: None → 1.0",
    ),
    "an address that an older Service has": (
        OLD_IP,
        OLD_IP | worlds(service("ext ClusterIP ip=10.96.0.9 external=203.0.113.9 created=new")),
        "frontend 10.96.0.9:80/TCP:  → ClusterIP\n"
        "setting lost frontends:  → 203.0.113.9:80/TCP to ns/web\n"
        "set :  → empty: refused",
    ),
    "the node's zone and address": (
        world(),
        world() | worlds(Node("a1", addrs("192.0.2.11"), "b")),
        "node NodePort addresses: 192.0.2.1 → 192.0.2.11\nnode SNAT addresses: 192.0.2.1 → 192.0.2.11",
    ),
}


@each_case("before, after, rows", CHANGES)
def test_difference_of_two_worlds(before: World, after: World, rows):
    found = []
    for d in run(before, after):
        was, is_ = (d.share_before, d.share_after) if d.what == "backend" else (d.before, d.after)
        found.append(f"{d.what} {d.name}: {was} → {is_}")
    assert "\n".join(found) == rows


GONE = {"Service port": NO_SERVICE, "endpoint": world("", "1@a1,a 2@a2,a 3@b1,b")}


@pytest.mark.parametrize("what", GONE)
def test_what_is_gone_is_the_reason(what):
    (last,) = (d for d in run(world(), GONE[what]) if d.name == "10.1.0.4:8080")
    assert (last.reason, last.pod, last.node, last.zone) == (f"its {what} is gone", "p-4", "b1", "b")


def test_events_lead_from_one_world_to_the_other():
    after = {k: v for k, v in world("", "1").items() if not isinstance(v, Node)} | worlds(piece("2", "new"))
    result = dict(world())
    for event in make_events(world(), after):
        result.pop(event.key, None)  # type: ignore[union-attr]
        if hasattr(event, "object"):
            result[event.key] = event.object  # type: ignore[union-attr]
    assert result == after
    assert make_events(after, after) == []


def test_the_ports_of_one_service_are_separate():
    web = service("web ClusterIP")
    two = replace(web, ports=(*web.ports, ServicePort("dns", Protocol.UDP, 53)))
    ports = (*HTTP, SlicePort("dns", Protocol.UDP, 5353))
    before, after = (worlds(two, piece(ends, ports=ports), *NODES) for ends in ("1 2", "1"))
    assert {(d.port, d.protocol) for d in run(before, after)} == {("http", "TCP"), ("dns", "UDP")}

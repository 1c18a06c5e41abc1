# SPDX-License-Identifier: Apache-2.0
"""What-if: the share of each backend before and after, against shares computed by hand."""

from collections.abc import Iterable
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from kbpf.errors import NotFoundError
from kbpf.model.config import Config
from kbpf.model.events import ObjectKey
from kbpf.model.objects import (
    Endpoint,
    EndpointSlice,
    Node,
    Protocol,
    Service,
    ServiceName,
    ServicePort,
    SlicePort,
    Weights,
    pack_names,
)
from kbpf.policy.what_if import Distribution, Scenario, apply_scenario
from kbpf.policy.worlds import Difference, ModelObject, Subject, WorldChange, make_events
from tests.values.policy.services import HTTP, addrs, key

WEB = Service(
    "shop", "web", "ClusterIP", addrs("10.96.0.1"), (ServicePort("http", Protocol.TCP, 80),)
)
NODES = (
    Node("a1", addrs("192.0.2.1"), "a"),
    Node("a2", addrs("192.0.2.2"), "a"),
    Node("b1", addrs("192.0.2.3"), "b"),
)


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


def shares(differences: Iterable[Difference], set_name: str = "cluster") -> Shares:
    return {
        int(d.name.partition(":")[0].rpartition(".")[2]): (d.share_before, d.share_after)
        for d in differences
        if d.subject is Subject.BACKEND and d.set == set_name
    }


def run(
    before: dict[ObjectKey, ModelObject], scenario: Scenario, node: str, config: Config = CONFIG
) -> list[Difference]:
    outcome = apply_scenario(before, scenario)
    return WorldChange(before, outcome.world, config, outcome.causes).compute(node)


class Row(NamedTuple):
    """A scenario on a node, and what becomes of the four endpoints' shares, each 1/4 before."""

    scenario: Scenario
    node: str
    after: Shares


THIRD = 1 / 3
ROWS = {
    "zone b is down": Row(
        Scenario(zones_down=("b",)), "a1",
        {1: (0.25, 0.5), 2: (0.25, 0.5), 3: (0.25, None), 4: (0.25, None)},
    ),
    "a node is down": Row(
        Scenario(nodes_down=("a1",)), "a2",
        {1: (0.25, None), 2: (0.25, THIRD), 3: (0.25, THIRD), 4: (0.25, THIRD)},
    ),
    "a node is drained": Row(
        Scenario(drained=("b1",)), "b1",
        {1: (0.25, 0.5), 2: (0.25, 0.5), 3: (0.25, None), 4: (0.25, None)},
    ),
    "all nodes are drained: terminating endpoints serve": Row(
        Scenario(drained=("a1", "a2", "b1")), "a1", {},
    ),
    "weight 0": Row(
        Scenario(weights=Weights(pods=(("p-1", 0),))), "a1",
        {1: (0.25, None), 2: (0.25, THIRD), 3: (0.25, THIRD), 4: (0.25, THIRD)},
    ),
    "weight of a zone": Row(
        Scenario(weights=Weights(zones=(("b", 3),))), "a1",
        {1: (0.25, 0.125), 2: (0.25, 0.125), 3: (0.25, 0.375), 4: (0.25, 0.375)},
    ),
    "weight of an address, and of all others": Row(
        Scenario(weights=Weights(((addrs("10.1.0.2")[0], 5),)), default_weight=1), "a1",
        {1: (0.25, 0.125), 2: (0.25, 0.625), 3: (0.25, 0.125), 4: (0.25, 0.125)},
    ),
    "same zone, in zone a": Row(
        Scenario(distribution=Distribution.SAME_ZONE), "a1",
        {1: (0.25, 0.5), 2: (0.25, 0.5), 3: (0.25, None), 4: (0.25, None)},
    ),
    "same zone, by its older name, in zone b": Row(
        Scenario(distribution=Distribution.PREFER_CLOSE), "b1",
        {1: (0.25, None), 2: (0.25, None), 3: (0.25, 0.5), 4: (0.25, 0.5)},
    ),
    "same node": Row(
        Scenario(distribution=Distribution.SAME_NODE), "a2",
        {1: (0.25, None), 2: (0.25, 1.0), 3: (0.25, None), 4: (0.25, None)},
    ),
    "same zone, which is down: those of other zones serve": Row(
        Scenario(distribution=Distribution.SAME_ZONE, zones_down=("a",)), "b1",
        {1: (0.25, None), 2: (0.25, None), 3: (0.25, 0.5), 4: (0.25, 0.5)},
    ),
    "same node and weight 0": Row(
        Scenario(distribution=Distribution.SAME_NODE, weights=Weights(pods=(("p-3", 0),))), "b1",
        {1: (0.25, None), 2: (0.25, None), 3: (0.25, None), 4: (0.25, 1.0)},
    ),
    "another Service": Row(
        Scenario(distribution=Distribution.SAME_NODE, service=ServiceName("shop", "other")), "a1",
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_shares(name: str) -> None:
    row = ROWS[name]
    other = replace(WEB, name="other", cluster_ips=addrs("10.96.0.2"))
    assert shares(run(PLAIN | world(other), row.scenario, row.node)) == row.after


REASONS = {
    "zone b is down": (Scenario(zones_down=("b",)), 3, "zone b is down"),
    "a node is drained": (Scenario(drained=("b1",)), 3, "node b1 is drained"),
    "weight 0": (Scenario(weights=Weights(pods=(("p-3", 0),))), 3,
                 "its weight is 0: no new connections"),
    "hints": (Scenario(distribution=Distribution.SAME_ZONE), 3,
              "ready, but PreferSameZone prefers other endpoints for this node"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_why_an_endpoint_is_not_used_any_more(name: str) -> None:
    scenario, number, reason = REASONS[name]
    found = {d.name: d for d in run(PLAIN, scenario, "a1") if d.subject is Subject.BACKEND}
    difference = found[f"10.1.0.{number}:8080"]
    assert difference.reason == reason
    assert (difference.pod, difference.node, difference.zone) == (f"p-{number}", "b1", "b")


def test_a_set_that_becomes_empty_says_what_clients_see() -> None:
    scenario = Scenario(zones_down=("a", "b"))
    sets = [d for d in run(PLAIN, scenario, "a1") if d.subject is Subject.SET]
    assert [(d.set, d.before, d.after) for d in sets] == [
        ("cluster", "4 backends", "empty: refused")
    ]
    local = PLAIN | world(replace(WEB, internal_local=True))
    sets = [d for d in run(local, Scenario(drained=("a1",)), "a1") if d.subject is Subject.SET]
    assert sets == []  # the one of this node serves while it terminates
    sets = [d for d in run(local, Scenario(nodes_down=("a1",)), "a1") if d.subject is Subject.SET]
    assert [(d.set, d.before, d.after) for d in sets] == [("local", "1 backend", "empty: dropped")]


MISSING = {
    "zone": (Scenario(zones_down=("c",)), "no zone c; there are a, b"),
    "node": (Scenario(drained=("b3",)), "no node b3; there are a1, a2, b1"),
    "Pod": (Scenario(weights=Weights(pods=(("p1", 0),))), "no endpoint of a Pod p1; is p-1 meant?"),
    "address": (Scenario(weights=Weights(((addrs("10.9.9.9")[0], 0),))), "no endpoint 10.9.9.9"),
    "Service": (Scenario(service=ServiceName("shop", "wep")),
                "no Service shop/wep; is shop/web meant?"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISSING)
def test_a_name_that_does_not_exist_is_an_error(what: str) -> None:
    scenario, text = MISSING[what]
    with pytest.raises(NotFoundError) as error:
        apply_scenario(PLAIN, scenario)
    assert str(error.value) == text


# ---- two worlds ----------------------------------------------------------------------------------

OLDER = replace(WEB, creation_timestamp="2024-01-01T00:00:00Z")
EXTERNAL = replace(
    WEB, name="ext", cluster_ips=addrs("10.96.0.9"), external_ips=addrs("203.0.113.9")
)
CHANGES = {
    "nothing": (PLAIN, PLAIN, []),
    "a Service is gone": (
        PLAIN,
        {k: v for k, v in PLAIN.items() if not isinstance(v, Service)},
        [("frontend", "10.96.0.1:80/TCP", "ClusterIP", ""), ("set", "", "4 backends", ""),
         *((("backend", f"10.1.0.{n}:8080", 0.25, None)) for n in (1, 2, 3, 4))],
    ),
    "another ClusterIP": (
        PLAIN,
        PLAIN | world(replace(WEB, cluster_ips=addrs("10.96.0.7"))),
        [("frontend", "10.96.0.1:80/TCP", "ClusterIP", ""),
         ("frontend", "10.96.0.7:80/TCP", "", "ClusterIP")],
    ),
    "policy and affinity": (
        PLAIN,
        PLAIN | world(replace(WEB, internal_local=True, affinity_timeout=60)),
        [("setting", "internal policy", "Cluster", "Local"),
         ("setting", "affinity", "none", "60 s"),
         ("set", "", "4 backends", ""),
         *((("backend", f"10.1.0.{n}:8080", 0.25, None)) for n in (1, 2, 3, 4)),
         ("set", "", "", "1 backend"), ("backend", "10.1.0.1:8080", None, 1.0)],
    ),
    "an address that an older Service has": (
        PLAIN | world(replace(OLDER, external_ips=addrs("203.0.113.9"))),
        PLAIN | world(replace(OLDER, external_ips=addrs("203.0.113.9")), replace(
            EXTERNAL, creation_timestamp="2025-01-01T00:00:00Z")),
        [("frontend", "10.96.0.9:80/TCP", "", "ClusterIP"),
         ("setting", "lost frontends", "", "203.0.113.9:80/TCP to shop/web"),
         ("set", "", "", "empty: refused")],
    ),
    "the node's zone and address": (
        PLAIN,
        PLAIN | world(Node("a1", addrs("192.0.2.11"), "b")),
        [("node", "NodePort addresses", "192.0.2.1", "192.0.2.11"),
         ("node", "SNAT addresses", "192.0.2.1", "192.0.2.11")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_difference_of_two_worlds(name: str) -> None:
    before, after, rows = CHANGES[name]
    differences = WorldChange(before, after, Config()).compute("a1")
    found = [
        (
            str(d.subject), d.name,
            *((d.share_before, d.share_after) if d.subject is Subject.BACKEND
              else (d.before, d.after)),
        )
        for d in differences
    ]  # fmt: skip
    assert found == rows


GONE = {
    "Service port": {k: v for k, v in PLAIN.items() if not isinstance(v, Service)},
    "endpoint": PLAIN | world(slice_of(*FOUR[:3])),
}


@pytest.mark.parametrize("what", GONE)
def test_what_is_gone_is_the_reason(what: str) -> None:
    differences = WorldChange(PLAIN, GONE[what], Config()).compute("a1")
    (last,) = (d for d in differences if d.name == "10.1.0.4:8080")
    assert last.reason == f"its {what} is gone"
    assert (last.pod, last.node, last.zone) == ("p-4", "b1", "b")


def test_events_lead_from_one_world_to_the_other() -> None:
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


def test_the_ports_of_one_service_are_separate() -> None:
    two = replace(WEB, ports=(*WEB.ports, ServicePort("dns", Protocol.UDP, 53)))
    ports = (*HTTP, SlicePort("dns", Protocol.UDP, 5353))
    before = world(two, replace(slice_of(*FOUR), ports=ports), *NODES)
    differences = run(before, Scenario(zones_down=("b",)), "a1")
    assert {(d.port.port, d.port.protocol.name) for d in differences if d.port} == {
        ("http", "TCP"), ("dns", "UDP")
    }  # fmt: skip

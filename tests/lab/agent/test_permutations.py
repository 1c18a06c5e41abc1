# SPDX-License-Identifier: Apache-2.0
"""The same objects lead to the same maps, in whatever order they arrive (see also
tests/values/policy/test_any_order.py); no objects to empty maps.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import scenario
from tests.support.cluster.kube import Object
from tests.support.cluster.scenario import FolderNode
from tests.support.lab.lab import Lab

Objects = list[Object]
Way = Callable[[FolderNode, Objects], None]


def by_a_detour(node: FolderNode, objects: Objects) -> None:
    """Each object is different at first: other ports, other endpoints, another zone. Its last state
    arrives in a random but reproducible order, a third at a time.
    """
    node.agent.start()
    node.write([detour(obj) for obj in objects])
    node.settle()
    for i in range(3):
        node.write(random.Random(7).sample(objects, len(objects))[i::3])
        node.settle()


def through_restarts(node: FolderNode, objects: Objects) -> None:
    """The agent is stopped after a third and killed after two; objects also arrive while it is
    down.
    """
    node.agent.start()
    for i, end in enumerate((node.agent.stop, node.agent.kill)):
        node.write(objects[i::3])
        node.settle()
        end()
        node.write(objects[i + 1 :: 3])
        node.agent.start()


WAYS = (by_a_detour, through_restarts)


def detour(obj: Object) -> Object:
    """An earlier, different state of the object."""
    if obj["kind"] == "Service":
        ports = [{**port, "port": port["port"] + 1000} for port in obj["spec"].get("ports", ())]
        spec = obj["spec"] | ({"ports": ports} if ports else {})
        return obj | {"spec": spec | {"externalTrafficPolicy": "Local", "externalIPs": []}}
    if obj["kind"] == "EndpointSlice":
        ports = [{**port, "port": 9} for port in obj["ports"]]
        return obj | {"endpoints": obj["endpoints"][::-1][:1], "ports": ports}
    return obj | {"status": {}} if obj["kind"] == "Node" else obj


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One node, without an API server."""
    with Lab(1, "p", apart=True) as made:
        yield made


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_all_orders_lead_to_the_same_maps(lab: Lab, tmp_path: Path, way: Way):
    """All scenarios together."""
    names = scenario.names()
    with FolderNode(lab, tmp_path / "objects") as node:
        way(node, scenario.documents(*names))
        node.settle()
        assert scenario.lines(node.agent) == scenario.expected(*names)
        node.empty()

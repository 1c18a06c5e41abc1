# SPDX-License-Identifier: Apache-2.0
"""The same objects lead to the same maps though an agent is stopped and killed meanwhile (in any order:
tests/values/policy/test_any_order.py); no objects to empty maps.
"""

from collections.abc import Iterator

import pytest

from tests.support.cluster import scenario
from tests.support.cluster.kube import Object
from tests.support.cluster.scenario import FolderNode
from tests.support.lab.lab import Lab

Objects = list[Object]


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


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One node, without an API server."""
    with Lab(1, "p", apart=True) as made:
        yield made


def test_restarts_lead_to_the_same_maps(lab: Lab, tmp_path):
    """All scenarios together."""
    names = scenario.names()
    with FolderNode(lab, tmp_path / "objects") as node:
        through_restarts(node, scenario.documents(*names))
        node.settle()
        assert scenario.lines(node.agent) == scenario.expected(*names)
        node.empty()

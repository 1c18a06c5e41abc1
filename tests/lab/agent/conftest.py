# SPDX-License-Identifier: Apache-2.0
"""A node with a folder as its source, for tests that need no API server."""

from collections.abc import Iterator

import pytest

from tests.support.cluster import scenario
from tests.support.cluster.scenario import FolderNode
from tests.support.lab.lab import Lab


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[FolderNode]:
    """It serves the scenario `shop`, whose endpoints are the node's three pods."""
    folder = tmp_path_factory.mktemp("shop") / "objects"
    with Lab(1, "sh", apart=True) as lab, FolderNode(lab, folder, pods=3) as made:
        made.write(scenario.documents("shop"))
        made.agent.start()
        made.settle()
        yield made

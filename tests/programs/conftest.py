# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the data plane tests: a node, whose pods are clients and backends."""

from collections.abc import Iterator

import pytest

from tests.support.lab.lab import Lab, Node
from tests.support.plane import artifact_cache, plane, site

__all__ = ["artifact_cache", "plane", "site"]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A node with its own network and no pods yet."""
    with Lab(1, "t", apart=True) as lab:
        yield lab.nodes[0]

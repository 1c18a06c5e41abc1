# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the IPVS data plane: a node whose IPVS is a fake."""

import pytest

from tests.support.faults.fake_ipvs import Node, fake_node

__all__ = ["fake_node"]


@pytest.fixture
def node(fake_node: Node) -> Node:
    """The fake node with its data plane."""
    fake_node.start()
    return fake_node

# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the data plane tests: a node, whose pods are clients and backends."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.packet_path import device_thread
from tests.support.lab import namespace as namespaces
from tests.support.lab.lab import PATIENCE, Lab, Node
from tests.support.plane import Site, artifact_cache, make_local, plane, site, sites
from tests.support.stub_programs import only_name_their_maps

__all__ = ["artifact_cache", "plane", "site"]


@pytest.fixture(scope="session", autouse=True)
def _patient_publish() -> Iterator[None]:
    """apply() returns after ten seconds without progress of the device thread, so that the agent
    runs on. Tests expect that the thread has made its pass then, also on a busy machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_thread, "PUBLISH_STALL_TIMEOUT_S", 2 * PATIENCE)
        yield


@pytest.fixture
def stub_programs(monkeypatch) -> None:
    """The agent's programs do nothing, quickly: no test that takes this looks at connections or packets."""
    only_name_their_maps(monkeypatch)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A node with its own network and no pods yet."""
    with Lab(1, "t", apart=True) as lab:
        yield lab.nodes[0]


@pytest.fixture(scope="module")
def local_node(node: Node) -> Node:
    """The node, whose loopback device has the addresses LOCAL and LOCAL6, for picks()."""
    make_local(node.netns)
    return node


@pytest.fixture(scope="module")
def shared_site(node: Node, artifact_cache: Path) -> Iterator[Site]:
    """A site for all tests of a file, whose hooks see the sockets of the node and of its pods."""
    with sites(artifact_cache) as make:
        yield make(cgroup=node.cgroup, node=node.netns)


@pytest.fixture
def namespace() -> Iterator[namespaces.Namespace]:
    with namespaces.made() as made:
        yield made


@pytest.fixture
def node_site(node: Node, artifact_cache: Path) -> Iterator[Site]:
    """The same for one test."""
    with sites(artifact_cache) as make:
        yield make(cgroup=node.cgroup, node=node.netns)

# SPDX-License-Identifier: Apache-2.0
"""Fixtures of UDP: a node whose pods are clients and backends."""

from collections.abc import Iterator

import pytest

from tests.programs.sockets.udp.bench import Bench
from tests.support.lab.lab import Node, until
from tests.support.plane import Site, flush


@pytest.fixture(scope="module")
def whole(node: Node, shared_site: Site) -> Bench:
    pods = {name: node.pod(name) for name in ("pod", "other", "one", "two", "three")}
    for name in ("one", "two", "three"):
        pods[name].serve(8080, udp=(8080,))
    return Bench(node, shared_site, shared_site.open(), {**pods, "host": node.host})


@pytest.fixture
def bench(whole: Bench) -> Iterator[Bench]:
    """No Service at the start, and no entries of sockets at the end."""
    whole.serve()
    flush(whole.plane)
    assert whole.held() == {}
    yield whole
    until("all entries of sockets are deleted", lambda: whole.held() == {}, state=whole.held)

# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the socket hooks: a client whose connections show where they are translated to, and the servers of the
connections that are counted.
"""

from collections.abc import Iterator

import pytest

from tests.programs.sockets import account
from tests.support.lab import namespace as namespaces
from tests.support.lab.lab import Node, Place, ip, until
from tests.support.plane import Site, make_local, start_within, within


@pytest.fixture
def client(site: Site) -> Iterator[Place]:
    """A client below the hooks, which reaches nothing unless its destination is translated."""
    with namespaces.made() as made:
        ip(f"link add {site.name}x type veth peer name eth0 netns {made.name}")  # or it would not count as a pod
        make_local(made.name)
        yield site.place("client", made.name)


@pytest.fixture(scope="module")
def bench(node: Node, shared_site: Site) -> Iterator[account.Bench]:
    """Its servers run until the end of the file; no agent has started yet."""
    client, one, two = (node.pod(name) for name in ("client", "one", "two"))
    two.serve(8080)
    join_server = start_within(one, account.serve)
    yield account.Bench(shared_site, client, one, two)
    until("the servers are ended", lambda: within(one, account.quit_servers))
    join_server()

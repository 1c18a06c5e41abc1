# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the socket hooks: a client whose connections show where they are translated to."""

from collections.abc import Iterator

import pytest

from tests.support.lab.lab import Place, ip, run
from tests.support.plane import Site, make_local


@pytest.fixture
def client(site: Site) -> Iterator[Place]:
    """A client below the hooks, which reaches nothing unless its destination is translated."""
    name = f"{site.name}x"
    run("ip", "netns", "add", name)
    ip(f"link add {name} type veth peer name eth0 netns {name}")  # or it would not count as a pod
    make_local(name)
    yield site.place("client", name)
    run("ip", "netns", "del", name)

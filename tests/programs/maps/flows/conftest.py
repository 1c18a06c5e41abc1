# SPDX-License-Identifier: Apache-2.0
"""Fixtures of a small table of flows."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from kbpf.kernel.net import links
from kbpf.kernel.system import netns
from tests.programs.maps.flows.table import ROOM, Flows
from tests.support.plane import Site, network, sites


@pytest.fixture(scope="module")
def site(artifact_cache: Path) -> Iterator[Site]:
    """Test runs are in its network too: a socket of the machine may have the port of a client."""
    here = Path(f"/proc/{os.getpid()}/fd/{os.open('/proc/thread-self/ns/net', os.O_RDONLY)}")
    with network("kbpo") as where, sites(artifact_cache) as make:
        netns.enter(links.namespace_path(where))
        yield make(node=where)
        netns.enter(here)
    os.close(int(here.name))


@pytest.fixture(scope="module")
def started(site: Site) -> Iterator[Flows]:
    made = Flows(site)
    made.start(ROOM)
    yield made
    made.close()


@pytest.fixture
def flows(started: Flows, request) -> Iterator[Flows]:
    """Flows whose source is translated, which have more entries; `both_kinds` adds the others."""
    started.kind = getattr(request, "param", "translated")
    started.empty()
    started.before = started.site.reasons()[Reason.EVICTED]
    with started.site.telling():
        yield started

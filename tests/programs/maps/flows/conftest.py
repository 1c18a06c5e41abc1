# SPDX-License-Identifier: Apache-2.0
"""Fixtures of a small table of flows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from tests.programs.maps.flows.table import ROOM, Flows
from tests.support.plane import Site, network, sites


@pytest.fixture(scope="module")
def site(artifact_cache: Path) -> Iterator[Site]:
    with network("kbpo") as where, sites(artifact_cache) as make:
        yield make(node=where)


@pytest.fixture(scope="module")
def started(site: Site) -> Iterator[Flows]:
    made = Flows(site)
    made.start(ROOM)
    yield made
    made.close()


@pytest.fixture
def flows(started: Flows, request: pytest.FixtureRequest) -> Iterator[Flows]:
    """Flows whose source is translated, which have more entries; `both_kinds` adds the others."""
    started.kind = getattr(request, "param", "translated")
    started.empty()
    started.before = started.site.reasons()[Reason.EVICTED]
    with started.site.telling():
        yield started

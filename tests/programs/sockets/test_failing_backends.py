# SPDX-License-Identifier: Apache-2.0
"""Backends that keep failing, with real sockets. A row is what clients do in each interval, and
whether a backend then counts as failing. The servers and clients are those of test_account.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.failing_backends import MIN_FAILURES, FailingBackends
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.model.config import Accounting
from kbpf.model.metrics import FailingBackend
from tests.programs.sockets.account import (
    NOBODY,
    Bench,
    fair,
    quit_servers,
    refused,
    reset,
    serve,
    start,
)
from tests.support.features import needs
from tests.support.lab.lab import Node, until
from tests.support.plane import (
    sites,
    start_within,
    within,
)

pytestmark = needs("tracing")
FAIR, RUDE, REFUSING, EMPTY = "10.96.0.1", "10.96.0.2", "10.96.0.5", "10.96.0.7"
N = MIN_FAILURES


@pytest.fixture(scope="module")
def bench(node: Node, artifact_cache: Path) -> Iterator[Bench]:
    client, one, two = (node.pod(name) for name in ("client", "one", "two"))
    join_server = start_within(one, serve)
    with sites(artifact_cache) as make:
        yield Bench(make(cgroup=node.cgroup, node=node.netns), client, one, two)
    until("the servers are ended", lambda: within(one, quit_servers))
    join_server()


class Row(NamedTuple):
    """For each interval how often a client connects: to a backend that refuses, to one that
    accepts, to one that resets, and to a Service without backends. `failing`: how many backends are
    failing after the last one.
    """

    name: str
    intervals: tuple[tuple[int, int, int, int], ...]
    failing: int


FULL = (N, 0, 0, 0)
ROWS = (
    Row("nothing fails", ((0, N, 0, 0),) * 4, 0),
    Row("too short", (FULL, FULL), 0),
    Row("two intervals after the first failure", (FULL, FULL, FULL), 1),
    Row("it continues", (FULL, FULL, FULL, FULL), 1),
    Row("too few", ((N - 1, 0, 0, 0),) * 4, 0),
    Row("it stops", (FULL, FULL, FULL, (0, 0, 0, 0)), 0),
    Row("it begins again", (FULL, FULL, FULL, (0, 0, 0, 0), FULL, FULL), 0),
    Row("another backend works", ((N, N, 0, 0),) * 3, 1),
    Row("resets do not count", ((0, 0, N, 0),) * 4, 0),
    Row("a Service without backends has none", ((0, 0, 0, N),) * 4, 0),
)


@needs("set_retval")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_backends_that_keep_failing_are_found(bench: Bench, row: Row) -> None:
    start(bench, Accounting.CONNECTIONS)
    finder = FailingBackends(Pins(bench.site.pins))
    found: tuple[FailingBackend, ...] | None = ()
    for to_refusing, to_fair, to_rude, to_empty in row.intervals:

        def act(counts: tuple[int, ...] = (to_refusing, to_fair, to_rude, to_empty)) -> None:
            for count, client, host in zip(
                counts, (refused, fair, reset, refused), (REFUSING, FAIR, RUDE, EMPTY), strict=True
            ):
                for _ in range(count):
                    client(host, 80)

        within(bench.client, act)
        found = finder.find()
    assert found is not None
    assert len(found) == row.failing
    if found:
        (backend,) = found
        assert backend.name == ("default", "refusing", "", "TCP")
        assert backend.backend == f"{bench.one.ip}:{NOBODY}"
        assert backend.failed == backend.opened == N * (len(row.intervals) - 1)
        assert backend.seconds > 0


def test_a_backend_that_works_for_others_is_not_failing(bench: Bench) -> None:
    """Two frontends lead to one address: a Service counts for itself."""
    start(bench, Accounting.CONNECTIONS)
    finder = FailingBackends(Pins(bench.site.pins))
    for _ in range(4):
        within(bench.client, lambda: [fair(FAIR) for _ in range(N)])
        assert finder.find() == ()


def test_nothing_is_known_without_maps(tmp_path: Path) -> None:
    assert FailingBackends(Pins(tmp_path)).find() is None

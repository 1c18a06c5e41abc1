# SPDX-License-Identifier: Apache-2.0
"""Failed connections through the socket hooks, as `kbpf inspect failures` lists them.

The same servers and clients as in test_account.py. A row names how a connection fails, and what
must be recorded of it: nothing else may be, and nothing of a connection that succeeds.
"""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.layout import COUNTS, FAILURES_PER_CLIENT
from kbpf.model.config import Accounting
from kbpf.model.metrics import ConnectionStats
from kbpf.model.objects import Protocol
from kbpf.views import failures as view
from tests.programs.sockets.account import NOBODY, RUDE, Bench, fair, gives_up, open_bench, refused, reset, start, waits
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE, Node, until
from tests.support.plane import desired, service, within

pytestmark = needs("tracing")


@pytest.fixture(scope="module")
def bench(node: Node, artifact_cache: Path) -> Iterator[Bench]:
    with open_bench(node, artifact_cache) as opened:
        yield opened


@pytest.fixture
def served(bench: Bench) -> Bench:
    start(bench, Accounting.CONNECTIONS)
    return bench


def recorded(bench: Bench, **filters: object) -> list[view.FailureRow]:
    """The failures of the clients `client` and `two`."""
    rows = view.build_rows(snapshot.read(bench.site.pins, view.NEEDS), **filters)
    names = {str(place.cgroup): place.name for place in (bench.client, bench.two)}
    clients = ((row, name) for row in rows for path, name in names.items() if path.endswith(row.client))
    return [row for row, _ in clients]


def forget(bench: Bench) -> None:
    with bench.site.pinned("failures") as failures:
        for key, _ in list(failures.items()):
            failures.delete(key)


def rejected(host: str, number: int) -> None:
    """A connected UDP socket to a port that nobody has."""
    with socket.socket(type=socket.SOCK_DGRAM) as s:
        s.settimeout(PATIENCE)
        s.connect((host, number))
        s.send(b"?")
        with pytest.raises(ConnectionRefusedError):
            s.recv(1)


class Failure(NamedTuple):
    """How a connection fails, and what is recorded: the Service, the reason, what the client saw,
    and the backend ("": none was chosen, and the socket has no address yet).
    """

    name: str
    does: Callable[[str, int], None]
    to: str
    service: str
    reason: str
    saw: str
    backend: str = ""


REFUSED = "ECONNREFUSED"
FAILURES = (
    Failure("no endpoints", refused, "10.96.0.7:80", "default/empty", "no_endpoints", REFUSED),
    Failure("no port", refused, "10.96.0.7:81", "default/empty", "unknown_port", REFUSED),
    Failure("only elsewhere", refused, "10.96.0.8:80", "default/elsewhere", "no_local_endpoints", "ETIMEDOUT"),
    Failure(
        "refused by the backend",
        refused,
        "10.96.0.5:80",
        "default/refusing",
        "backend_refused",
        REFUSED,
        f"one:{NOBODY}",
    ),
    Failure(
        "not answered",
        waits,
        "10.96.0.6:80",
        "default/silent",
        "backend_unanswered",
        "ETIMEDOUT, unless a later SYN was answered",
        "192.0.2.99:80",
    ),
    Failure("reset", reset, "10.96.0.2:80", "default/rude", "backend_reset", "ECONNRESET or ETIMEDOUT", f"one:{RUDE}"),
)


@needs("set_retval")
@pytest.mark.parametrize("row", FAILURES, ids=lambda row: row.name)
def test_failure_is_recorded(served: Bench, row: Failure) -> None:
    forget(served)
    host, _, number = row.to.rpartition(":")
    for _ in range(2):
        within(served.client, lambda: row.does(host, int(number)))
    (found,) = recorded(served)
    assert (found.service, found.reason, found.client_saw) == (row.service, row.reason, row.saw)
    assert found.frontend == f"{row.to}/TCP"
    assert found.backend == row.backend.replace("one", served.one.ip)
    assert found.count == 2
    assert found.address == (served.client.ip if row.backend else "")
    assert found.kind == "cgroup"
    assert str(served.client.cgroup).endswith(found.client)
    assert 0 <= found.last_seconds <= found.first_seconds < 60


def test_rejected_datagram_is_recorded(served: Bench) -> None:
    deaf = service("deaf", "10.96.0.9:53", f"{served.one.ip}:5353", Protocol.UDP)
    served.site.open(accounting=Accounting.CONNECTIONS).apply(desired(deaf), None)
    forget(served)
    within(served.client, lambda: rejected("10.96.0.9", 53))
    (found,) = recorded(served)
    assert (found.service, found.reason) == ("default/deaf", "backend_refused")


def count_refused(bench: Bench) -> int:
    with bench.site.pinned("counts") as counts:
        return sum(ConnectionStats(*COUNTS.unpack(raw)).refused for _, raw in counts.items())


def test_socket_counts_once_as_refused_however_often_it_sends(served: Bench) -> None:
    """Otherwise a socket that sends errors to itself could make any backend look broken."""
    deaf = service("deaf", "10.96.0.9:53", f"{served.one.ip}:5353", Protocol.UDP)
    served.site.open(accounting=Accounting.CONNECTIONS).apply(desired(deaf), None)
    forget(served)
    before = count_refused(served)

    def sends_often() -> None:
        with socket.socket(type=socket.SOCK_DGRAM) as s:
            s.settimeout(PATIENCE)
            for _ in range(2):
                s.connect(("10.96.0.9", 53))
                for _ in range(2):  # the kernel limits ICMP errors to six at once
                    s.send(b"?")
                    with pytest.raises(ConnectionRefusedError):
                        s.recv(1)

    within(served.client, sends_often)
    (found,) = recorded(served)
    assert found.count == 4
    assert count_refused(served) - before == 2, "once for each connect()"


def test_connection_that_succeeds_records_nothing(served: Bench) -> None:

    def gives_up_early() -> bool:
        forget(served)
        return within(served.client, lambda: gives_up("10.96.0.6", 80))

    until("a client gives up within the first second", gives_up_early)
    within(served.client, lambda: fair("10.96.0.1"))
    within(served.client, lambda: refused(served.one.ip, NOBODY))  # no Service
    assert served.site.entries("failures") == {}


@needs("set_retval")
def test_accounting_off_records_nothing(bench: Bench) -> None:
    start(bench, Accounting.OFF)
    forget(bench)
    within(bench.client, lambda: refused("10.96.0.7", 80))
    within(bench.client, lambda: refused("10.96.0.5", 80))
    assert bench.site.entries("failures") == {}


@needs("set_retval")
def test_client_overwrites_only_its_own_failures(served: Bench) -> None:
    """A container that fails everywhere has a bounded number of entries."""
    forget(served)
    within(served.two, lambda: refused("10.96.0.5", 80))

    def fails_everywhere() -> None:
        for number in range(1000, 1400):
            refused("10.96.0.7", number)

    within(served.client, fails_everywhere)
    rows = recorded(served)
    assert [row.service for row in rows if row.reason == "backend_refused"] == ["default/refusing"]
    assert FAILURES_PER_CLIENT // 2 < len(rows) <= FAILURES_PER_CLIENT + 1


@needs("set_retval")
def test_failures_survive_the_agent(served: Bench) -> None:
    forget(served)
    within(served.client, lambda: refused("10.96.0.5", 80))
    start(served, Accounting.CONNECTIONS)
    within(served.client, lambda: refused("10.96.0.5", 80))
    assert [row.count for row in recorded(served)] == [2]


@needs("set_retval")
def test_filters(served: Bench) -> None:
    forget(served)
    within(served.client, lambda: refused("10.96.0.5", 80))
    within(served.client, lambda: refused("10.96.0.7", 80))
    assert [row.service for row in recorded(served, service="default/empty")] == ["default/empty"]
    assert [row.service for row in recorded(served, service="refusing")] == ["default/refusing"]
    assert len(recorded(served, since=600)) == 2
    assert recorded(served, pod="default/web") == []

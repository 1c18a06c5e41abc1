# SPDX-License-Identifier: Apache-2.0
"""Failed connections through the socket hooks, as `kbpf inspect failures` lists them.

The same servers and clients as in test_account.py. A row names how a connection fails, and what
must be recorded of it: nothing else may be, and nothing of a connection that succeeds.
"""

import socket
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.layout import COUNTS, FAILURES_PER_CLIENT
from kbpf.model.config import Accounting
from kbpf.model.metrics import ConnectionStats
from kbpf.model.objects import Protocol
from kbpf.views import failures as view
from tests.programs.sockets.account import NOBODY, Bench, refused, start
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE, until
from tests.support.plane import desired, service, within
from tests.support.table import table

pytestmark = needs("tracing")


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


class Failure(NamedTuple):
    """How a connection fails (see account.CLIENTS), and what is recorded: the Service, the reason, what the client
    saw, and the backend (none: nothing was chosen, and the socket has no address yet).
    """

    does: str
    to: str
    service: str
    backend: str
    reason: str
    saw: str


FAILURES = table(
    Failure,
    """
refused | 10.96.0.7:80 | empty     | none          | no_endpoints       | ECONNREFUSED
refused | 10.96.0.7:81 | empty     | none          | unknown_port       | ECONNREFUSED
refused | 10.96.0.8:80 | elsewhere | none          | no_local_endpoints | ETIMEDOUT
refused | 10.96.0.5:80 | refusing  | one:9009      | backend_refused    | ECONNREFUSED
waits   | 10.96.0.6:80 | silent    | 192.0.2.99:80 | backend_unanswered | ETIMEDOUT, unless a later SYN was answered
reset   | 10.96.0.2:80 | rude      | one:9001      | backend_reset      | ECONNRESET or ETIMEDOUT
""",
)


@needs("set_retval")
@pytest.mark.parametrize("row", FAILURES, ids=lambda row: row.reason)
def test_failure_is_recorded(served: Bench, row: Failure):
    forget(served)
    for _ in range(2):
        served.act(row.does, row.to)
    (found,) = recorded(served)
    assert (found.service, found.reason, found.client_saw) == (f"default/{row.service}", row.reason, row.saw)
    assert found.frontend == f"{row.to}/TCP"
    assert (found.backend or "none") == served.fill(row.backend)
    assert found.count == 2
    assert found.address == (served.client.ip if found.backend else "")
    assert found.kind == "cgroup"
    assert str(served.client.cgroup).endswith(found.client)
    assert 0 <= found.last_seconds <= found.first_seconds < 60


def count_refused(bench: Bench) -> int:
    with bench.site.pinned("counts") as counts:
        return sum(ConnectionStats(*COUNTS.unpack(raw)).refused for _, raw in counts.items())


def test_rejected_datagrams_of_a_socket_count_once_as_refused(served: Bench):
    """Each is recorded. But a socket that sends errors to itself must not make any backend look broken."""
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
    assert (found.service, found.reason, found.count) == ("default/deaf", "backend_refused", 4)
    assert count_refused(served) - before == 2, "once for each connect()"


def test_connection_that_succeeds_records_nothing(served: Bench):
    def gives_up_early() -> bool:
        forget(served)
        return served.act("gives_up", "10.96.0.6:80")

    until("a client gives up within the first second", gives_up_early)
    served.act("fair", "10.96.0.1:80")
    within(served.client, lambda: refused(served.one.ip, NOBODY))  # no Service
    assert served.site.entries("failures") == {}


@needs("set_retval")
def test_client_overwrites_only_its_own_failures(served: Bench):
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
def test_failures_survive_the_agent(served: Bench):
    forget(served)
    served.act("refused", "10.96.0.5:80")
    start(served, Accounting.CONNECTIONS)
    served.act("refused", "10.96.0.5:80")
    assert [row.count for row in recorded(served)] == [2]


@needs("set_retval")
def test_filters(served: Bench):
    forget(served)
    served.act("refused", "10.96.0.5:80")
    served.act("refused", "10.96.0.7:80")
    assert [row.service for row in recorded(served, service="default/empty")] == ["default/empty"]
    assert [row.service for row in recorded(served, service="refusing")] == ["default/refusing"]
    assert len(recorded(served, since=600)) == 2
    assert recorded(served, pod="default/web") == []

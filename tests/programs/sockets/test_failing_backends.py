# SPDX-License-Identifier: Apache-2.0
"""Backends that keep failing, and which failures are kept, with real sockets. A row is what clients
do in each interval, and whether a backend then counts as failing. The servers and clients are those
of test_account.py, which has a failure of each kind.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Callable

import pytest

from kbpf.dataplane.bpf import udp as udp_plane
from kbpf.dataplane.bpf.failing_backends import MIN_FAILURES, FailingBackends
from kbpf.dataplane.bpf.maps.layout import COUNTS, FAILURES_PER_CLIENT
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.kernel.system import pods
from kbpf.model.config import Accounting
from kbpf.model.metrics import ConnectionStats, FailingBackend
from kbpf.model.objects import Protocol
from tests.programs.sockets.account import NOBODY, UDP_PORT, Bench, fair, recorded, refused, reset, start
from tests.support.features import needs
from tests.support.lab import prober
from tests.support.lab.lab import PATIENCE, until
from tests.support.packets.packets import icmp_error, udp
from tests.support.plane import desired, join_pod, service, start_within, within
from tests.support.table import each_cells

pytestmark = needs("tracing")
FAIR, RUDE = "10.96.0.1", "10.96.0.2"
REFUSING, EMPTY = "10.96.0.5", "10.96.0.7"
N = MIN_FAILURES


ACTS: dict[str, tuple[Callable[[str, int], object], str, int]] = {
    "refused": (refused, REFUSING, N),
    "few": (refused, REFUSING, N - 1),
    "fair": (fair, FAIR, N),
    "reset": (reset, RUDE, N),
    "empty": (refused, EMPTY, N),
    "nothing": (refused, REFUSING, 0),
}
"""What clients do in an interval: how, where and how often they connect."""


@needs("set_retval")
@each_cells(
    "intervals, failing",
    """
nothing fails                         | fair fair fair fair                             | 0
too short                             | refused refused                                 | 0
two intervals after the first failure | refused refused refused                         | 1
it continues                          | refused refused refused refused                 | 1
too few                               | few few few few                                 | 0
it stops                              | refused refused refused nothing                 | 0
it begins again                       | refused refused refused nothing refused refused | 0
another backend works                 | refused+fair refused+fair refused+fair          | 1
resets do not count                   | reset reset reset reset                         | 0
a Service without backends has none   | empty empty empty empty                         | 0
""",
    failing=int,
)
def test_backends_that_keep_failing_are_found(bench: Bench, intervals, failing):
    """What clients do in each interval, and how many backends are failing after the last one."""
    start(bench, Accounting.CONNECTIONS)
    finder = FailingBackends(Pins(bench.site.pins))
    found: tuple[FailingBackend, ...] | None = ()
    intervals = intervals.split()
    for interval in intervals:

        def act(names: str = interval) -> None:
            for client, host, count in (ACTS[name] for name in names.split("+")):
                for number in range(count):
                    join_pod(bench.site.cgroup, f"client{number % 2}")
                    client(host, 80)

        within(bench.client, act)
        found = finder.find()
    assert found is not None
    assert len(found) == failing
    if found:
        (backend,) = found
        assert backend.name == ("default", "refusing", "", "TCP")
        assert backend.backend == f"{bench.one.ip}:{NOBODY}"
        assert backend.failed == backend.opened == N * (len(intervals) - 1)
        assert backend.seconds > 0


# ---- who has to fail -----------------------------------------------------------------------------


def unheard(host: str) -> None:
    """Connections whose SYNs expire at the next hop: any process can have them."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(N)]
        for s in clients:
            s.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
            s.setblocking(False)
            assert s.connect_ex((host, 80)) == errno.EINPROGRESS
        until("the SYNs have been sent again", lambda: all(map(prober.retransmitted, clients)))


def tells_itself(host: str, backend: str) -> None:
    """ICMP errors that a client with CAP_NET_RAW sends to its own connected sockets."""
    with socket.socket(type=socket.SOCK_RAW, proto=socket.IPPROTO_RAW) as raw:
        for _ in range(N):
            with socket.socket(type=socket.SOCK_DGRAM) as s:
                s.connect((host, 53))
                own, number = s.getsockname()
                sent = udp(f"{own}:{number}", f"{backend}:{UDP_PORT}")
                raw.sendto(icmp_error("port unreachable", backend, sent), (own, 0))
                s.settimeout(PATIENCE)
                with pytest.raises(ConnectionRefusedError):
                    s.recv(1)


@needs("set_retval")
@each_cells(
    "does, host, who, is_failing",
    """
a Pod with two containers     | refused      | 10.96.0.5 | a/1 a/2           | no
two Pods                      | refused      | 10.96.0.5 | a/1 b/1           | yes
two Pods of another tenant    | refused      | 10.96.0.5 | evil1/1 evil2/1   | no
Pods of two other tenants     | refused      | 10.96.0.5 | evil1/1 other/1   | yes
a Pod beside a rare failure   | refused      | 10.96.0.5 | evil1/1/99 a/1/1  | no
a Pod whose SYNs expire       | unheard      | 10.96.0.1 | evil1/1 evil1/2   | no
a Pod that sends itself errors | tells_itself | 10.96.0.4 | evil1/1 evil1/2  | no
""",
    is_failing=bool,
)
def test_a_tenant_alone_makes_no_backend_of_others_failing(bench: Bench, does, host, who, is_failing, monkeypatch):
    """What these clients (the uid of a Pod, its container, and how often if not N times) do, and whether the backend
    counts as failing.
    """
    names = {"a": "default/a", "b": "default/b", "other": "other/c"}
    names |= {f"evil{number}": f"evil/{number}" for number in (1, 2)}
    monkeypatch.setattr(pods, "list_pod_names", lambda: names)
    start(bench, Accounting.CONNECTIONS)
    finder = FailingBackends(Pins(bench.site.pins))

    def act() -> None:
        for pod in who.split():
            uid, container, *count = pod.split("/")
            join_pod(bench.site.cgroup, uid, container)
            if does == "refused":
                for _ in range(int(*count) or N):
                    refused(host)
            elif does == "unheard":
                unheard(host)
            else:
                tells_itself(host, bench.one.ip)

    for _ in range(3):
        within(bench.client, act)
        found = finder.find()
    assert found is not None
    assert bool(found) is is_failing
    with bench.site.pinned("failures") as failures:
        assert list(failures.items()), "`kbpf inspect failures` shows them all the same"


# ---- `kbpf inspect failures` ---------------------------------------------------------------------


@pytest.fixture
def served(bench: Bench) -> Bench:
    start(bench, Accounting.CONNECTIONS)
    bench.site.clear("failures")
    return bench


def count_refused(bench: Bench) -> int:
    with bench.site.pinned("counts") as counts:
        return sum(ConnectionStats(*COUNTS.unpack(raw)).refused for _, raw in counts.items())


def test_rejected_datagrams_of_a_socket_count_once_as_refused(served: Bench):
    """Each is recorded. But a socket that sends errors to itself must not make any backend look broken."""
    deaf = service("deaf", "10.96.0.9:53", f"{served.one.ip}:5353", Protocol.UDP)
    served.site.start(desired(deaf), accounting=Accounting.CONNECTIONS)
    served.site.clear("failures")
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
    assert count_refused(served) - before == 1, "the second connect() keeps the backend"


@needs("set_retval")
def test_refused_socket_that_connects_again_leaves_a_backend_that_does_not_serve(served: Bench, monkeypatch):
    """The backend still serves another Service."""
    ends = f"{served.one.ip}:5353"
    other = service("other", "10.96.0.10:53", ends, Protocol.UDP)
    plane = served.site.start(desired(service("deaf", "10.96.0.9:53", ends, Protocol.UDP), other))
    monkeypatch.setattr(udp_plane.UdpPasses, "advance", lambda *_: None)
    (refused_from, refused_to), (cut_from, cut_to) = os.pipe(), os.pipe()

    def connects_again() -> int:
        with socket.socket(type=socket.SOCK_DGRAM) as s:
            s.settimeout(PATIENCE)
            s.connect(("10.96.0.9", 53))
            s.send(b"?")
            with pytest.raises(ConnectionRefusedError):
                s.recv(1)
            os.write(refused_to, b"x")
            os.read(cut_from, 1)
            return s.connect_ex(("10.96.0.9", 53))

    error = start_within(served.client, connects_again)
    os.read(refused_from, 1)
    plane.apply(desired(service("deaf", "10.96.0.9:53", "", Protocol.UDP), other), None)
    os.write(cut_to, b"x")
    assert error() == errno.ECONNREFUSED


@needs("set_retval")
def test_client_overwrites_only_its_own_failures(served: Bench):
    """A container that fails everywhere has a bounded number of entries."""
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
    served.act("refused", "10.96.0.5:80")
    start(served, Accounting.CONNECTIONS)
    served.act("refused", "10.96.0.5:80")
    assert [row.count for row in recorded(served)] == [2]

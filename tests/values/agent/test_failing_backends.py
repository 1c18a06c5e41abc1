# SPDX-License-Identifier: Apache-2.0
"""Events about backends that keep failing: which Services get one, how often, and what it says."""

import itertools
from typing import NamedTuple

import pytest

from kbpf.agent.problem_book import INTERVAL_S, NAMESPACE_EVENTS, TOTAL_EVENTS, FailingBackendReporter, format_note
from kbpf.agent.self_check import SelfCheck
from kbpf.dataplane.base import SharedAccess
from kbpf.dataplane.bpf.failing_backends import MIN_CLIENT_FAILURES, count_independent
from kbpf.model.config import Config
from kbpf.model.metrics import ConnectionProbe, FailingBackend
from kbpf.model.objects import ServiceName
from kbpf.serve import events as serve_events
from kbpf.serve.events import EventObject, EventRecorder
from tests.support.faults.event_server import EventServer
from tests.support.lab.lab import until
from tests.values.agent.recording import begun


class FakeRecorder(EventRecorder):
    """A fake: notes what would be sent."""

    def __init__(self) -> None:
        super().__init__(None, "n1")
        self.noted: list[tuple[EventObject, str]] = []

    def emit(self, regarding: EventObject, reason: str, action: str, note: str = "", warning: bool = True) -> None:
        assert (reason, action, warning) == ("BackendFailing", "Connect", True)
        self.noted.append((regarding, note))


def failing(service: str, number: int = 1, port: str = "http") -> FailingBackend:
    namespace, _, name = service.partition("/")
    return FailingBackend((namespace, name, port, "TCP"), f"10.0.0.{number}:80", 12, 12, 61.0)


class Row(NamedTuple):
    """Calls as (seconds, the Services that fail), and the Services that get an Event."""

    name: str
    calls: tuple[tuple[float, str], ...]
    events: str


MANY_EACH = "a/1 a/2 a/3 b/1 b/2 b/3 c/1 c/2 c/3 d/1 d/2 d/3"
MANY = " ".join(f"ns{number}/a" for number in range(TOTAL_EVENTS + 5))
ROWS = (
    Row("none", ((0.0, ""), (30.0, "")), ""),
    Row("one", ((0.0, "a/web"),), "a/web"),
    Row("once, while it continues", ((0.0, "a/web"), (30.0, "a/web"), (60.0, "a/web")), "a/web"),
    Row("once, if it stops meanwhile", ((0.0, "a/web"), (30.0, ""), (60.0, "a/web")), "a/web"),
    Row("again later", ((0.0, "a/web"), (INTERVAL_S + 1, "a/web")), "a/web a/web"),
    Row("at most three of a namespace", ((0.0, "a/1 a/2 a/3 a/4 a/5 b/1"),), "b/1 a/1 a/2 a/3"),
    Row(
        "no more of that namespace until the interval is over",
        ((0.0, "a/1 a/2 a/3"), (30.0, "a/4"), (INTERVAL_S + 30, "a/4")),
        "a/1 a/2 a/3 a/4",
    ),
    Row("at most ten in all", ((0.0, MANY),), " ".join(sorted(MANY.split())[:TOTAL_EVENTS])),
    Row("a namespace without an Event comes first", ((0.0, "a/1"), (30.0, "a/2 b/1")), "a/1 b/1 a/2"),
    Row(
        "namespaces share the ten",
        ((0.0, "a/1 a/2 a/3 b/1 b/2 b/3 c/1 c/2 c/3 d/1 d/2 e/1 f/1"),),
        "a/1 a/2 b/1 b/2 c/1 c/2 d/1 d/2 e/1 f/1",
    ),
    Row(
        "others do not wait until the interval is over",
        ((0.0, MANY_EACH), (INTERVAL_S / TOTAL_EVENTS, f"{MANY_EACH} z/1")),
        "a/1 a/2 a/3 b/1 b/2 b/3 c/1 c/2 d/1 d/2 z/1",
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_services_get_events(row: Row) -> None:
    recorder = FakeRecorder()
    reporter = FailingBackendReporter(recorder)
    for now, services in row.calls:
        reporter.report([failing(service) for service in services.split()], now)
    got = [f"{event.namespace}/{event.name}" for event, _ in recorder.noted]
    assert sorted(got) == sorted(row.events.split())
    assert all(event.kind == "Service" for event, _ in recorder.noted)


def test_a_tenant_leaves_events_for_others() -> None:
    """However many Services of a namespace fail, the recorder still has tokens."""
    recorder = FakeRecorder()
    reporter = FailingBackendReporter(recorder)
    for now in range(0, 3600, 30):
        reporter.report([failing(f"evil/{number}") for number in range(4096)], float(now))
    assert len(recorder.noted) == 4 * NAMESPACE_EVENTS
    assert len(reporter._reported) <= 2 * TOTAL_EVENTS < serve_events.BURST


def test_the_note_names_backends_and_is_bounded() -> None:
    name = ServiceName("shop", "prices")
    note = format_note(name, [failing("shop/prices", number) for number in range(1, 9)])
    assert note == (
        "10.0.0.1:80 (http) did not accept 12 of 12 connections from this node in 61 s; "
        "10.0.0.2:80 (http) did not accept 12 of 12 connections from this node in 61 s; "
        "10.0.0.3:80 (http) did not accept 12 of 12 connections from this node in 61 s; "
        "and 5 more backends; `kbpf inspect failures --service shop/prices` on the node shows the "
        "clients and the reasons"
    )
    longest = ServiceName("n" * 63, "s" * 63)
    backends = [failing(f"{longest}", number, "p" * 63) for number in range(1, 9)]
    assert len(format_note(longest, backends)) < serve_events.MAX_NOTE_BYTES


def test_the_note_has_no_control_characters() -> None:
    """A map that was damaged may hold any name."""
    assert "\n" not in format_note(ServiceName("a", "b"), [failing("a/b", 1, "x\n\x1b[2J")])


def test_the_event_reaches_the_api_server() -> None:
    server = EventServer(201)
    recorder = EventRecorder(server, "n1")
    FailingBackendReporter(recorder).report([failing("shop/prices")], 0.0)
    until("the Event is sent", lambda: recorder.sent == 1)
    recorder.stop()
    (event,) = server.events
    assert (event["reason"], event["regarding"]["name"]) == ("BackendFailing", "prices")
    assert event["metadata"]["namespace"] == "shop"


@pytest.mark.parametrize(
    ("clients", "independent"),
    [
        ("a/1", 1),
        ("a/1 a/1", 1),
        ("a/1 a/2", 2),
        ("evil/1 evil/2 evil/3", 1),
        ("evil/1 b/1", 2),
        ("a/1 evil/1 evil/2", 2),
        ("-", 1),
        ("- -", 1),
        ("a/1 -", 2),
        ("evil/1 -", 2),
        ("uid:1 uid:2", 2),
        ("uid:1 uid:1", 1),
        ("", 0),
        ("a/1 a/2*2", 1),
        ("a/1*2 a/1*1 a/2", 2),
        ("evil/1*2 evil/2*1 a/2", 2),
        ("evil/1*99 a/1*2", 1),
    ],
)
def test_clients_that_one_tenant_may_have_made_count_once(clients: str, independent: int) -> None:
    """Clients of a Service in namespace a, and how often they failed (else often enough); "-": a
    process of the node.
    """
    words = (word.partition("*") for word in clients.split())
    failed = [
        (client.replace("-", "").replace(":", " "), int(count or MIN_CLIENT_FAILURES)) for client, _, count in words
    ]
    assert count_independent(failed, "a") == independent


# ---- the thread's work ---------------------------------------------------------------------------


class FakeShared(SharedAccess):
    """A fake data plane: returns these results, one after the other."""

    def __init__(self, *probes: ConnectionProbe | None) -> None:
        self.probes = list(probes)

    def probe_connections(self) -> ConnectionProbe | None:
        return self.probes.pop(0)

    def find_failing_backends(self) -> tuple[FailingBackend, ...] | None:
        return None if not self.probes else (failing("a/web"),)


GOOD, BAD = ConnectionProbe(2, ()), ConnectionProbe(2, ("10.96.0.1:80/TCP leads nowhere",))
PROBES = (
    ("nothing could be tried", (None,), (False,), None, 0),
    ("all arrive", (GOOD,), (False,), 0, 0),
    ("one failure may be a moment's", (BAD,), (True,), 1, 0),
    ("two in a row", (BAD, BAD), (True, True), 1, 1),
    ("it recovers", (BAD, BAD, GOOD), (True, True, False), 0, 0),
    ("nothing tried says nothing new", (BAD, BAD, None), (True, True, False), 1, 1),
    ("all are compared only once", (BAD,) * 5, (True,) * 5, 1, 1),
    ("a good one in between", (BAD, GOOD, BAD), (True, False, True), 1, 0),
)


@pytest.mark.parametrize(("name", "probes", "failed", "differences", "faults"), PROBES, ids=[row[0] for row in PROBES])
def test_connections_count_as_broken_after_two_failures(
    name: str,
    probes: tuple[ConnectionProbe | None, ...],
    failed: tuple[bool, ...],
    differences: int | None,
    faults: int,
) -> None:
    shared, compared = FakeShared(*probes), list[bool]()
    check = SelfCheck(Config(), lambda: shared, FailingBackendReporter(FakeRecorder()), lambda: compared.append(True))
    assert tuple(check.probe() for _ in probes) == failed
    assert len(compared) == ((BAD, BAD) in itertools.pairwise(probes))
    part = check.connections
    assert (None if part is None else part.differences) == differences
    assert len(check.failures) == faults


NONE = ConnectionProbe(2, ("10.96.0.1:80/TCP leads nowhere", "10.96.0.2:53/UDP leads nowhere"))
BREAKS = (
    ("some fail", (BAD, BAD, BAD), False),
    ("all fail once", (NONE,), False),
    ("all fail twice", (NONE, NONE), True),
    ("all fail, then some", (NONE, BAD), False),
    ("it stays so while nothing can be tried", (NONE, NONE, None), True),
    ("one arrives again", (NONE, NONE, BAD), False),
)


@pytest.mark.parametrize(("name", "probes", "broken"), BREAKS, ids=[row[0] for row in BREAKS])
def test_a_node_is_broken_if_nothing_is_translated(
    name: str, probes: tuple[ConnectionProbe | None, ...], broken: bool
) -> None:
    """A tenant can have a Service that fails, but not make all others fail."""
    shared = FakeShared(*probes)
    check = SelfCheck(Config(), lambda: shared, FailingBackendReporter(FakeRecorder()))
    for _ in probes:
        check.probe()
    assert check.is_broken is broken


def test_failing_backends_are_counted_and_unknown_is_no_zero() -> None:
    recorder, shared = FakeRecorder(), FakeShared(GOOD)
    check = SelfCheck(Config(), lambda: shared, FailingBackendReporter(recorder))
    assert check.failing_backends is None
    check.find_failing()
    assert check.failing_backends == 1
    assert len(recorder.noted) == 1
    shared.probes.clear()
    check.find_failing()
    assert check.failing_backends is None


def test_the_agent_compares_everything_when_connections_fail() -> None:
    agent, plane = begun(0.0)
    agent.step([])
    assert plane.doubts == 0
    agent._self_check._on_failure()
    agent.step(agent._inbox.get_batch(0.0))
    assert plane.doubts == 1
    agent.step([])
    assert plane.doubts == 1

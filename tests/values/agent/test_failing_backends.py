# SPDX-License-Identifier: Apache-2.0
"""Events about backends that keep failing: which Services get one, how often, and what it says."""

from collections.abc import Callable

from kbpf.agent.problem_book import INTERVAL_S, NAMESPACE_EVENTS, TOTAL_EVENTS, FailingBackendReporter, format_note
from kbpf.agent.self_check import SelfCheck
from kbpf.dataplane.base import SharedAccess
from kbpf.dataplane.bpf.connection_probe import ConnectionProber
from kbpf.dataplane.bpf.failing_backends import MIN_CLIENT_FAILURES, FailingBackends, count_independent
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.model.config import Config
from kbpf.model.metrics import ConnectionProbe, FailingBackend
from kbpf.model.objects import ServiceName
from kbpf.serve import events as serve_events
from kbpf.serve.events import EventObject, EventRecorder
from tests.support.table import each_named_pair, each_pair
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


MANY_EACH = "a/1 a/2 a/3 b/1 b/2 b/3 c/1 c/2 c/3 d/1 d/2 d/3"
MANY = " ".join(f"ns{number}/a" for number in range(TOTAL_EVENTS + 5))
OVER, TENTH = INTERVAL_S + 30, INTERVAL_S / TOTAL_EVENTS


@each_named_pair(
    "reports, events",
    f"""\
none: 0, 30 →
one: 0 a/web → a/web
once, while it continues: 0 a/web, 30 a/web, 60 a/web → a/web
once, if it stops meanwhile: 0 a/web, 30, 60 a/web → a/web
again later: 0 a/web, {INTERVAL_S + 1} a/web → a/web a/web
at most three of a namespace: 0 a/1 a/2 a/3 a/4 a/5 b/1 → b/1 a/1 a/2 a/3
no more of that namespace until the interval is over: 0 a/1 a/2 a/3, 30 a/4, {OVER} a/4 → a/1 a/2 a/3 a/4
at most ten in all: 0 {MANY} → {" ".join(sorted(MANY.split())[:TOTAL_EVENTS])}
a namespace without an Event comes first: 0 a/1, 30 a/2 b/1 → a/1 b/1 a/2
they share the ten: 0 a/1 a/2 a/3 b/1 b/2 b/3 c/1 c/2 c/3 d/1 d/2 e/1 f/1 → a/1 a/2 b/1 b/2 c/1 c/2 d/1 d/2 e/1 f/1
others do not wait: 0 {MANY_EACH}, {TENTH} {MANY_EACH} z/1 → a/1 a/2 a/3 b/1 b/2 b/3 c/1 c/2 d/1 d/2 z/1
""",
)
def test_services_get_events(reports, events):
    """The second of each report and the Services that fail then → those that get an Event."""
    recorder = FakeRecorder()
    reporter = FailingBackendReporter(recorder)
    for report in reports.split(", "):
        now, *services = report.split()
        reporter.report([failing(service) for service in services], float(now))
    got = [f"{event.namespace}/{event.name}" for event, _ in recorder.noted]
    assert sorted(got) == sorted(events.split())
    assert all(event.kind == "Service" for event, _ in recorder.noted)


def test_a_tenant_leaves_events_for_others():
    """However many Services of a namespace fail, the recorder still has tokens."""
    recorder = FakeRecorder()
    reporter = FailingBackendReporter(recorder)
    for now in range(0, 3600, 30):
        reporter.report([failing(f"evil/{number}") for number in range(256)], float(now))
    assert len(recorder.noted) == 4 * NAMESPACE_EVENTS
    assert len(reporter._reported) <= 2 * TOTAL_EVENTS < serve_events.BURST


def test_the_note_names_backends_and_is_bounded():
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


def test_the_note_has_no_control_characters():
    """A map that was damaged may hold any name."""
    assert "\n" not in format_note(ServiceName("a", "b"), [failing("a/b", 1, "x\n\x1b[2J")])


@each_pair(
    "clients, independent",
    """\
a/1 → 1
a/1 a/1 → 1
a/1 a/2 → 2
evil/1 evil/2 evil/3 → 1
evil/1 b/1 → 2
a/1 evil/1 evil/2 → 2
- → 1
- - → 1
a/1 - → 2
evil/1 - → 2
uid:1 uid:2 → 2
uid:1 uid:1 → 1
 → 0
a/1 a/2*2 → 1
a/1*2 a/1*1 a/2 → 2
evil/1*2 evil/2*1 a/2 → 2
evil/1*99 a/1*2 → 1
""",
)
def test_clients_that_one_tenant_may_have_made_count_once(clients, independent):
    """Clients of a Service in namespace a, and how often they failed (else often enough); "-": a
    process of the node.
    """
    words = (word.partition("*") for word in clients.split())
    failed = [
        (client.replace("-", "").replace(":", " "), int(count or MIN_CLIENT_FAILURES)) for client, _, count in words
    ]
    assert count_independent(failed, "a") == int(independent)


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
NONE = ConnectionProbe(2, ("10.96.0.1:80/TCP leads nowhere", "10.96.0.2:53/UDP leads nowhere"))
RESULTS = {"untried": None, "good": GOOD, "bad": BAD, "none": NONE}


def probe(words: str, on_failure: Callable[[], object] = lambda: None) -> tuple[SelfCheck, list[bool]]:
    """A check after these probes, and whether each failed."""
    shared = FakeShared(*(RESULTS[word] for word in words.partition(": ")[2].split()))
    check = SelfCheck(Config(), lambda: shared, FailingBackendReporter(FakeRecorder()), on_failure)
    return check, [check.probe() for _ in shared.probes.copy()]


@each_pair(
    "probes, found",
    """\
nothing could be tried: untried → None differences, 0 faults
all arrive: good → 0 differences, 0 faults
one failure may be a moment's: bad → 1 differences, 0 faults
two in a row: bad bad → 1 differences, 1 faults
it recovers: bad bad good → 0 differences, 0 faults
nothing tried says nothing new: bad bad untried → 1 differences, 1 faults
all are compared only once: bad bad bad bad bad → 1 differences, 1 faults
a good one in between: bad good bad → 1 differences, 0 faults
""",
)
def test_connections_count_as_broken_after_two_failures(probes, found):
    compared: list[bool] = []
    check, failed = probe(probes, lambda: compared.append(True))
    assert failed == [word == "bad" for word in probes.partition(": ")[2].split()]
    assert len(compared) == ("bad bad" in probes)
    part = check.connections
    assert f"{part and part.differences} differences, {len(check.failures)} faults" == found


@each_pair(
    "probes, broken",
    """\
some fail: bad bad bad → False
all fail once: none → False
all fail twice: none none → True
all fail, then some: none bad → False
it stays so while nothing can be tried: none none untried → True
one arrives again: none none bad → False
""",
)
def test_a_node_is_broken_if_nothing_is_translated(probes, broken):
    """A tenant can have a Service that fails, but not make all others fail."""
    assert str(probe(probes)[0].is_broken) == broken


def test_failing_backends_are_counted_and_unknown_is_no_zero():
    recorder, shared = FakeRecorder(), FakeShared(GOOD)
    check = SelfCheck(Config(), lambda: shared, FailingBackendReporter(recorder))
    assert check.failing_backends is None
    check.find_failing()
    assert check.failing_backends == 1
    assert len(recorder.noted) == 1
    shared.probes.clear()
    check.find_failing()
    assert check.failing_backends is None


def test_the_agent_compares_everything_when_connections_fail():
    agent, plane = begun(0.0)
    agent.step([])
    assert plane.doubts == 0
    agent._self_check._on_failure()
    agent.step(agent._inbox.get_batch(0.0))
    assert plane.doubts == 1
    agent.step([])
    assert plane.doubts == 1


def test_nothing_is_known_without_maps(tmp_path):
    assert FailingBackends(Pins(tmp_path)).find() is None


def test_nothing_is_tried_without_maps(tmp_path):
    assert ConnectionProber(Pins(tmp_path), Config()).probe() is None

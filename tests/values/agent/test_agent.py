# SPDX-License-Identifier: Apache-2.0
"""The agent's event loop with a data plane that records its calls and a clock set by the test."""

import contextlib
import errno
import json
from collections.abc import Collection
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from kbpf.agent import agent as module
from kbpf.agent.agent import RETRY_INTERVAL_S, Agent
from kbpf.agent.inbox import Wake
from kbpf.agent.work_queue import LARGE_SERVICE_ENDPOINTS
from kbpf.dataplane.base import Report
from kbpf.errors import KernelError, PinsRemovedError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, Serving
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.events import Delete, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.metrics import UdpCuts
from kbpf.model.objects import (
    Cidr,
    Endpoint,
    EndpointSlice,
    Node,
    Protocol,
    Service,
    ServicePort,
    SlicePort,
)
from kbpf.model.status import MAX_PROBLEMS
from kbpf.serve.health import HealthTracker
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from kbpf.serve.message import HttpRequest
from kbpf.serve.server import AgentServer
from kbpf.source.base import SourceStatus
from kbpf.source.decode.fields import leading_zeros_problem
from tests.support.faults.fake_plane import FakePlane
from tests.support.lab.lab import until
from tests.support.prometheus import parse


class RecordingPlane(FakePlane):
    """A data plane that records which Services each apply() touched (None: all)."""

    name = "counting"

    def __init__(self) -> None:
        self.applied: list[set[str] | None] = []
        self.sound: list[bool] = []
        self.doubts = 0
        self.writes: dict[str, int] = {}
        self.refused: dict[ServicePortKey, str] = {}
        self.plain: dict[ServicePortKey, str] = {}
        self.error = ""

    def apply(
        self,
        _: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        self.applied.append(None if touched is None else {key.name for key in touched})
        self.sound.append(authoritative)
        return Report(self.writes, 0, self.refused, self.plain)

    def invalidate(self) -> None:
        self.doubts += 1

    def tick(self, _: float) -> float | None:
        if self.error:
            raise KernelError(self.error)
        return None


class FakeSource:
    """A source that is authoritative or not, as `sound` says."""

    sound = True

    def status(self) -> SourceStatus:
        return SourceStatus("folder", tuple(Kind), authoritative=self.sound)


class Clock:
    """Replaces the module `time`; all its functions return `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __getattr__(self, _: str):
        return lambda *_: self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def service(name: str) -> Upsert:
    ports = (ServicePort("", Protocol.TCP, 80),)
    made = Service("ns", name, "ClusterIP", (parse_addr(f"10.96.0.{ord(name)}"),), ports)
    return Upsert(ObjectKey(Kind.SERVICE, "ns", name), made)


def large(name: str) -> list[Upsert]:
    """A Service with enough endpoints to be computed in steps."""
    ends = tuple(
        Endpoint(parse_addr(f"10.1.{n >> 8}.{n & 255}"), True, True, False)
        for n in range(LARGE_SERVICE_ENDPOINTS)
    )
    ports = (SlicePort("", Protocol.TCP, 80),)
    made = EndpointSlice("ns", name, name, 4, ends, ports)
    return [service(name), Upsert(ObjectKey(Kind.SLICE, "ns", name), made)]


def begun(period: float) -> tuple[Agent, RecordingPlane]:
    plane = RecordingPlane()
    agent = Agent(Config("me", min_sync_period=period), plane, lambda _: ())
    node = Upsert(ObjectKey(Kind.NODE, "", "me"), Node("me"))
    agent.step([node, *(Synced(kind) for kind in Kind)])
    assert plane.applied == [None]
    return agent, plane


@pytest.mark.parametrize(("mode", "told"), [("bpf", 1), ("ipvs", 0)])
def test_netfilter_bypass_is_logged_in_mode_bpf_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, mode: str, told: int
):
    plane = RecordingPlane()
    plane.name = mode
    caplog.set_level("INFO")
    Agent(Config("me", forwarding="direct"), plane, lambda _: ())._log_netfilter_bypass()
    assert sum("forwarding=direct" in line for line in caplog.messages) == told


def test_without_min_sync_period_changes_are_programmed_at_once(clock: Clock):
    agent, plane = begun(0.0)
    for name in "abc":
        agent.step([service(name)])
    assert plane.applied[1:] == [{"a"}, {"b"}, {"c"}]


def test_changes_within_min_sync_period_are_programmed_together_after_it(clock: Clock):
    agent, plane = begun(5.0)
    for name in "abc":
        clock.now += 1.0
        agent.step([service(name)])
    assert plane.applied[1:] == []
    clock.now += 1.9
    agent.step([])
    assert plane.applied[1:] == []
    clock.now += 0.2
    agent.step([])
    assert plane.applied[1:] == [{"a", "b", "c"}]
    clock.now += 5.0
    agent.step([service("d")])
    assert plane.applied[2:] == [{"d"}], "after the pause a change is programmed at once"


def test_wait_is_at_most_the_rest_of_min_sync_period(clock: Clock):
    agent, _ = begun(0.4)
    agent.step([service("a")])
    assert agent._seconds_until_due() == pytest.approx(0.4)
    clock.now += 0.3
    assert agent._seconds_until_due() == pytest.approx(0.1)


def test_missing_node_is_logged_once(clock: Clock, caplog: pytest.LogCaptureFixture):
    agent = Agent(Config("me"), RecordingPlane(), lambda _: ())
    agent.step([Synced(kind) for kind in Kind])
    agent.step([service("a")])
    agent.step([])
    assert ["there is no Node me yet" in line for line in caplog.messages] == [True]


def test_events_and_writes_are_logged_at_debug(clock: Clock, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "kbpf.agent")
    agent, plane = begun(0.0)
    assert caplog.messages == []
    caplog.set_level("DEBUG", "kbpf.agent")
    plane.writes = {"services": 2, "backends": 1}
    agent.step([service("a"), Delete(ObjectKey(Kind.SLICE, "ns", "b")), Synced(Kind.NODE)])
    assert caplog.messages == [
        "event upsert Service ns/a", "event delete EndpointSlice ns/b", "event synced Node",
        "programmed service_ports=1 entries=3 ms=0.0",
    ]  # fmt: skip


def test_sweep_compares_everything_every_15_minutes(clock: Clock, caplog: pytest.LogCaptureFixture):
    agent, plane = begun(0.0)
    clock.now += 899.0
    agent.step([service("a")])
    assert (plane.doubts, plane.applied[1:]) == (0, [{"a"}])
    clock.now += 2.0
    agent.step([])
    agent.step([])
    assert (plane.doubts, plane.applied[2:]) == (1, [None])
    assert caplog.records == []
    clock.now += 901.0
    plane.writes = {"services": 2, "backends": 0}
    agent.step([])
    assert plane.doubts == 2
    (record,) = caplog.records
    assert record.getMessage().endswith("repaired: services=2")
    plane.writes = {}
    clock.now += 901.0
    agent.step([service("b")])
    assert plane.applied[4:] == [{"b"}], "news goes first"
    agent.step([])
    assert (plane.doubts, plane.applied[5:]) == (3, [None])
    assert len(caplog.records) == 1


def test_new_local_address_leads_to_a_full_apply(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    """Even an address without NodePorts, such as a VIP that moves to this node."""
    agent, plane = begun(0.0)
    vip = (parse_addr("192.0.2.1"),)
    for found in (vip, vip, ()):
        monkeypatch.setattr(module.addresses, "local_addresses", lambda *_, f=found: f)
        agent.step([Wake("addresses")])
    agent.step([service("a")])
    assert plane.applied[1:] == [None, None, {"a"}]


def test_failed_deferred_work_is_logged_once_and_stays_in_the_status(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    agent, plane = begun(0.0)
    for tick, error in (("no", "no"), ("no", "no"), ("", "")):
        plane.error = tick
        assert agent._seconds_until_due() <= 1.0
        assert agent.status().error == error
        clock.now += 1.0
    assert caplog.messages == ["deferred work failed; retrying: no"]


def test_failed_deferred_work_does_not_prevent_serving(clock: Clock):
    """For example, a FORWARD chain that cannot be changed."""
    plane = RecordingPlane()
    plane.error = "no"
    agent = Agent(Config("me", min_sync_period=0.0), plane, lambda _: ())
    node = Upsert(ObjectKey(Kind.NODE, "", "me"), Node("me"))
    agent.step([node, *(Synced(kind) for kind in Kind)])
    agent.step([service("a")])
    assert plane.applied == [None, {"a"}]
    agent._seconds_until_due()
    status = agent.status()
    assert (status.synced, status.error) == (True, "no")


def test_no_sweep_while_an_object_is_rejected(clock: Clock):
    agent, plane = begun(0.0)
    clock.now += 901.0
    agent.step([Rejected(ObjectKey(Kind.SERVICE, "ns", "a"), "bad")])
    assert plane.doubts == 0
    agent.step([service("a")])
    agent.step([])
    assert plane.doubts == 1


@pytest.mark.parametrize(
    ("kind", "sound"),
    [(Kind.SERVICE, False), (Kind.SLICE, False), (Kind.NODE, False), (Kind.POD, True)],
)
def test_apply_is_not_authoritative_while_an_object_is_rejected(
    clock: Clock, kind: Kind, sound: bool
):
    """The unreadable object may be what a frontend or backend depends on. Pods never are."""
    plane = RecordingPlane()
    agent = Agent(Config("me", min_sync_period=0.0), plane, lambda _: ())
    key = ObjectKey(kind, "" if kind is Kind.NODE else "ns", "me")
    agent.step([Rejected(key, "bad"), *(Synced(kind) for kind in Kind)])
    agent.step([])
    assert plane.sound == [sound]
    agent.step([Delete(key)])
    assert plane.sound[-1] is True, "the first apply that knows of everything"


def test_apply_is_not_authoritative_while_a_source_is_not(clock: Clock):
    """For example, an unreadable file of a folder: its objects are unknown."""
    plane, source = RecordingPlane(), FakeSource()
    agent = Agent(Config("me", min_sync_period=0.0), plane, lambda _: (source,))
    source.sound = False
    agent.step([Synced(kind) for kind in Kind])
    assert plane.sound == [False]
    source.sound = True
    agent.step([service("a")])
    assert plane.sound == [False, True]


def test_failed_apply_is_counted(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    agent, plane = begun(0.0)

    def failures() -> float:
        return parse(agent._server.format_metrics().decode())["kbpf_sync_failures_total"].value()

    def refuse(*_: object) -> Report:
        raise KernelError("no")

    with monkeypatch.context() as patch:
        patch.setattr(plane, "apply", refuse)
        agent.step([service("a")])
        assert failures() == 1
        clock.now += 2.0
        agent.step([])
        assert failures() == 2
    clock.now += 2.0
    agent.step([])
    assert failures() == 2
    assert plane.applied[1:] == [{"a"}]


@pytest.mark.parametrize("waiting", ["nothing", "large Service", "deferred work", "new event"])
def test_failed_apply_is_retried_once_per_interval(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, waiting: str
):
    agent, plane = begun(0.0)
    attempts: list[float] = []

    def refuse(*_: object) -> Report:
        attempts.append(clock.now)
        raise KernelError("no")

    monkeypatch.setattr(plane, "apply", refuse)
    if waiting == "deferred work":
        monkeypatch.setattr(plane, "tick", lambda now: now)
    agent.step([service("a"), *(large("b") if waiting == "large Service" else ())])
    for _ in range(4):
        agent.step([service("c")] if waiting == "new event" else [])
        if waiting != "deferred work":
            assert agent._seconds_until_due() > 0
    assert attempts == [100.0]
    clock.now += RETRY_INTERVAL_S
    agent.step([])
    assert attempts == [100.0, 100.0 + RETRY_INTERVAL_S]


def test_failed_first_apply_is_retried_once_per_interval(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    plane = RecordingPlane()
    agent = Agent(Config("me"), plane, lambda _: ())
    attempts: list[float] = []

    def refuse(*_: object) -> Report:
        attempts.append(clock.now)
        raise KernelError("no")

    with monkeypatch.context() as patch:
        patch.setattr(plane, "apply", refuse)
        agent.step([Upsert(ObjectKey(Kind.NODE, "", "me"), Node("me")), *map(Synced, Kind)])
        for name in "abc":
            agent.step([service(name)])
        assert attempts == [100.0]
    clock.now += RETRY_INTERVAL_S
    agent.step([])
    assert plane.applied == [None]


def test_refused_change_becomes_unhealthy_although_others_arrive(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """Neither small changes nor a large Service, which waits longer, make it healthy again."""
    desk = AgentServer(Config("me", serving=Serving(healthz="", metrics="")))
    desk.health = HealthTracker(60.0, clock.time)
    plane = RecordingPlane()
    agent = Agent(Config("me", min_sync_period=0.0), plane, lambda _: (), desk)

    def come(*items: Upsert | Synced) -> bool:
        for item in items:
            agent._enqueue(item)
        desk.health.record_dequeued()
        agent.step(agent._inbox.get_batch(0.0))
        return desk.health.verdict().healthy

    def refuse(*_: object) -> Report:
        raise KernelError("no")

    assert come(service("a"), *(Synced(kind) for kind in Kind))
    with monkeypatch.context() as patch:
        patch.setattr(plane, "apply", refuse)
        assert come(service("b"))
        clock.now += 40.0
        assert come(service("c"), *large("d"))
        clock.now += 19.0
        assert come()
        clock.now += 1.0
        assert not come()
        assert not come(service("e"))
    clock.now += 2.0
    come()
    clock.now += 2.0
    assert come()


class StatusError(NamedTuple):
    """An error of write_status(), and whether it ends the agent."""

    name: str
    error: KernelError
    ends: bool


STATUS_ERRORS = [
    StatusError(
        "the kernel has no memory for it", KernelError("cannot write", errno=errno.ENOMEM), False
    ),
    StatusError(
        "the pins were removed: no other process can find this agent's maps",
        PinsRemovedError("removed"),
        True,
    ),
]


@pytest.mark.parametrize("row", STATUS_ERRORS, ids=lambda row: row.name)
def test_removed_pins_end_the_agent(
    clock: Clock, caplog: pytest.LogCaptureFixture, row: StatusError
):
    agent, plane = begun(0.0)

    def write_status(_: bytes) -> None:
        raise row.error

    plane.write_status = write_status
    clock.now += 10.0
    with pytest.raises(PinsRemovedError) if row.ends else contextlib.nullcontext():
        agent.step([])
    assert ("cannot write the status" in caplog.text) is not row.ends


def test_an_error_of_the_status_is_logged_once_until_it_changes(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    agent, plane = begun(0.0)
    for error in ("no memory", "no memory", "no space", "", "no space"):
        plane.write_status = lambda _, error=error: _raise_unless_empty(error)
        clock.now += 10.0
        agent.step([])
    lines = [line for line in caplog.messages if line.startswith("cannot write the status")]
    assert lines == [f"cannot write the status: no {what}" for what in ("memory", "space", "space")]


def _raise_unless_empty(error: str) -> None:
    if error:
        raise KernelError(error)


def test_problems_of_the_node_are_listed(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Each problem is listed while it exists. Unserved NodePorts are logged too, once each time."""
    networks = (Cidr(parse_addr("198.51.100.0"), 96 + 24),)
    config = Config("me", node_port_addresses=networks)
    desk = AgentServer(config)
    unheard, wrong = ["cannot listen on 0.0.0.0:1: no"], ["not YAML"]
    monkeypatch.setattr(desk, "problems", lambda: tuple(unheard))
    agent = Agent(config, RecordingPlane(), lambda _: (), desk)
    agent.config_error = lambda: wrong[0]

    def told(address: str) -> tuple[str, ...]:
        agent._node_addresses = (parse_addr(address),)
        agent._write_status()
        return agent.status().problems

    refused = "the configuration file was rejected, and the next start would fail: not YAML"
    nowhere = (
        "IPv4 NodePorts are not served: this node has no address in the networks of "
        "nodePortAddresses (--nodeport-addresses)"
    )
    for _ in range(2):
        assert told("192.0.2.1") == (nowhere, unheard[0], refused)
        assert told("192.0.2.2") == (nowhere, unheard[0], refused)
        assert told("198.51.100.1") == (unheard[0], refused)
    assert caplog.messages.count(nowhere) == 2
    unheard.clear()
    wrong[0] = ""
    assert told("198.51.100.1") == ()


def test_first_apply_does_not_wait_for_min_sync_period(clock: Clock):
    clock.now = 0.5  # the monotonic clock of a machine that has just booted
    begun(3600.0)


def test_health_server_starts_before_the_data_plane_is_opened(monkeypatch: pytest.MonkeyPatch):
    """The first start on a node compiles for seconds; a liveness probe must not kill the agent."""
    order: list[str] = []

    class FailingPlane(RecordingPlane):
        def open(self) -> None:
            order.append("open")
            raise KernelError("not today", "here")

    desk = AgentServer(Config(serving=Serving(healthz="", metrics="")))
    monkeypatch.setattr(desk, "start", lambda: order.append("answers"))
    monkeypatch.setattr(desk, "stop", lambda: order.append("ends"))
    with pytest.raises(KernelError):
        Agent(Config("me"), FailingPlane(), lambda _: (), desk).run()
    assert order == ["answers", "open", "ends"]


def test_log_lines_about_unserved_services_are_limited(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    """For rejected objects as well as for Services over a limit."""
    agent, plane = begun(0.0)
    names = [f"s{number:03}" for number in range(MAX_PROBLEMS + 7)]
    agent.step([Rejected(ObjectKey(Kind.SERVICE, "ns", name), "bad") for name in names])
    key = ServicePortKey("ns", "x", "", Protocol.TCP, 4)
    plane.refused = {key._replace(name=name): "no room" for name in names}
    agent.step([service("a")])
    for what in ("left out", "not programmed"):
        lines = [line for line in caplog.messages if line.startswith(f"{what}: ")]
        assert len(lines) == MAX_PROBLEMS + 1
        assert names[0] in lines[0]
        assert "and 7 more" in lines[-1]
    agent.step([service("b")])
    assert sum(line.startswith("not programmed") for line in caplog.messages) == MAX_PROBLEMS + 1


def test_unusual_value_that_is_used_is_logged_as_unusual(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    agent, _ = begun(0.0)
    zeros = leading_zeros_problem("10.96.0.01", parse_addr("10.96.0.1"))
    made = service("a")
    spoilt = ("weights: bad", zeros)
    agent.step([Upsert(made.key, replace(made.object, skipped=spoilt))])
    assert caplog.messages == [
        "left out: Service ns/a: weights: bad", f"unusual: Service ns/a: {zeros}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("namespace", "status", "system"), [("kube-system", 503, True), ("tenant", 200, False)]
)
def test_service_that_is_not_programmed_is_reported_everywhere(
    clock: Clock, namespace: str, status: int, system: bool
):
    """In a problem line, /readyz, the metric by namespace and Events, until it is programmed."""
    posted: list[dict[str, Any]] = []

    def post(_: str, body: bytes) -> int:
        posted.append(json.loads(body))
        return 201

    desk = AgentServer(Config("me", serving=Serving(healthz="", metrics="")), post_event=post)
    plane = RecordingPlane()
    agent = Agent(Config("me", min_sync_period=0.0), plane, lambda _: (), desk)
    agent.step([Upsert(ObjectKey(Kind.NODE, "", "me"), Node("me")), *(Synced(k) for k in Kind)])
    key = ServicePortKey(namespace, "dns", "", Protocol.TCP, 4)
    other = key._replace(name="web")
    plane.refused, plane.plain = {key: "no room"}, {other: "spread evenly"}
    agent.step([service("a")])
    agent._write_status()
    assert agent.status().refused_system == ((f"{namespace}/dns",) if system else ())
    assert {f"{key}: no room", f"{other}: spread evenly"} <= set(agent.status().problems)
    answer = desk._handle_healthz(HttpRequest("GET", "/readyz", ""))
    assert answer.status == status
    assert (f"{namespace}/dns" in answer.body.decode()) is system
    refused = parse(desk.format_metrics().decode())["kbpf_namespace_service_ports_refused"]
    assert (len(refused.samples), refused.value(namespace=namespace)) == (1, 1)
    until("both Events are sent", lambda: len(posted) == 2)
    desk.events.stop()
    assert {(e["reason"], e["regarding"]["name"], e["regarding"]["namespace"]) for e in posted} == {
        ("NotProgrammed", "dns", namespace), ("AnnotationsNotApplied", "web", namespace),
    }  # fmt: skip
    plane.refused, plane.plain = {}, {}
    agent.step([service("b")])
    agent._write_status()
    assert agent.status().problems == ()
    assert desk._handle_healthz(HttpRequest("GET", "/readyz", "")).status == 200


def test_queued_timestamp_is_settled_in_both_families_after_a_pass(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """Also with a Service of one family, an event without a change, and a data plane that fails."""
    desk = AgentServer(
        Config("me", serving=Serving(healthz="", metrics="")),
        proxy_metrics=KubeProxyMetrics(clock.time),
    )
    plane = RecordingPlane()
    agent = Agent(Config("me"), plane, lambda _: (), desk)

    def come(*items: Upsert | Synced) -> None:
        for item in items:
            clock.now += 1.0
            agent._enqueue(item)
        clock.now += 1.0
        agent.step(agent._inbox.get_batch(0.0))

    def behind() -> list[float]:
        found = parse(desk.format_metrics().decode())
        prefix = "kubeproxy_sync_proxy_rules_last"
        asked = found[f"{prefix}_queued_timestamp_seconds"]
        done = found[f"{prefix}_timestamp_seconds"]
        return [asked.value(ip_family=f) - done.value(ip_family=f) for f in ("IPv4", "IPv6")]

    come(service("a"), *(Synced(kind) for kind in Kind))
    assert max(behind()) <= 0
    for _ in range(2):
        clock.now += 600.0
        come(service("b"))
        assert max(behind()) <= 0, "one of IPv4, and the same again"

    def refuse(*_: object) -> Report:
        raise KernelError("no")

    with monkeypatch.context() as patch:
        patch.setattr(plane, "apply", refuse)
        clock.now += 600.0
        come(service("c"))
        assert min(behind()) > 600
    clock.now += 60.0
    agent.step([])
    assert max(behind()) <= 0


def test_ended_udp_flows_are_counted_once(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    """UDP flows ended by the step's own pass or by a tick since the previous step."""
    desk = AgentServer(Config("me", serving=Serving(healthz="", metrics="")))
    plane = RecordingPlane()
    agent = Agent(Config("me"), plane, lambda _: (), desk)
    ended = [(UdpCuts(0.5, {4: 3}), UdpCuts(0.25, {4: 1, 6: 2})), ()]
    monkeypatch.setattr(plane, "take_udp_cuts", lambda: ended.pop(0), raising=False)
    agent.step([])
    agent.step([])
    found = parse(desk.format_metrics().decode())
    total = found["kubeproxy_conntrack_reconciler_deleted_entries_total"]
    assert [total.value(ip_family=f) for f in ("IPv4", "IPv6")] == [4, 2]

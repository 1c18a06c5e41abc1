# SPDX-License-Identifier: Apache-2.0
"""The agent's passes over the Services, with a data plane that records its calls and a clock set by
the test.
"""

import msgspec
import pytest

from kbpf.agent import agent as module
from kbpf.agent.agent import Agent
from kbpf.agent.applier import RETRY_INTERVAL_S
from kbpf.agent.computer import LARGE_SERVICE_ENDPOINTS
from kbpf.agent.inbox import Wake
from kbpf.model.address import NodeAddresses, parse_addr
from kbpf.model.config import Config, Serving
from kbpf.model.desired import ServicePortKey
from kbpf.model.events import Delete, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.objects import Cidr, Endpoint, Protocol
from kbpf.serve.health import HealthTracker
from kbpf.serve.server import AgentServer
from kbpf.source.base import SourceStatus
from tests.values.agent.recording import (
    SYNCED,
    Clock,
    RecordingPlane,
    begun,
    metrics,
    service,
)
from tests.values.policy.services import piece, up


class FakeSource:
    """A source that is authoritative or not, as `sound` says."""

    sound = True

    def status(self) -> SourceStatus:
        return SourceStatus("folder", tuple(Kind), authoritative=self.sound)


def large(name: str) -> list[Upsert]:
    """A Service with enough endpoints to be computed in steps."""
    ends = tuple(Endpoint(parse_addr(f"10.1.{n >> 8}.{n & 255}")) for n in range(LARGE_SERVICE_ENDPOINTS))
    return [service(name), up(piece(ends, name))]


@pytest.mark.parametrize(("mode", "count"), [("bpf", 1), ("ipvs", 0)])
def test_netfilter_bypass_is_logged_in_mode_bpf_only(caplog, monkeypatch, mode, count):
    caplog.set_level("INFO")
    agent = Agent(Config("me", forwarding="direct"), RecordingPlane(), lambda _: ())
    agent._log_netfilter_bypass(mode)
    assert sum("forwarding=direct" in line for line in caplog.messages) == count


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


def test_missing_node_is_logged_once(clock: Clock, caplog):
    agent = Agent(Config("me"), RecordingPlane(), lambda _: ())
    agent.step(SYNCED)
    agent.step([service("a")])
    agent.step([])
    assert ["there is no Node me yet" in line for line in caplog.messages] == [True]


def test_events_and_writes_are_logged_at_debug(clock: Clock, caplog):
    caplog.set_level("INFO", "kbpf.agent")
    agent, plane = begun(0.0)
    assert caplog.messages == []
    caplog.set_level("DEBUG", "kbpf.agent")
    plane.writes = {"services": 2, "backends": 1}
    agent.step([service("a"), Delete(ObjectKey(Kind.SLICE, "ns", "b")), Synced(Kind.NODE)])
    assert caplog.messages == [
        "event upsert Service ns/a",
        "event delete EndpointSlice ns/b",
        "event synced Node",
        "programmed service_ports=1 entries=3 ms=0.0",
    ]


def test_sweep_compares_everything_every_15_minutes(clock: Clock, caplog):
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


def test_new_local_address_leads_to_a_full_apply(clock: Clock, monkeypatch):
    """Even an address without NodePorts, such as a VIP that moves to this node."""
    agent, plane = begun(0.0)
    vip, network = (parse_addr("192.0.2.1"),), NodeAddresses()
    network.networks = (Cidr.parse("192.0.2.0/24"),)
    for found in (vip, vip, (), network, network, ()):
        monkeypatch.setattr(module.addresses, "local_addresses", lambda *_, f=found: f)
        agent.step([Wake("addresses")])
    agent.step([service("a")])
    assert plane.applied[1:] == [None, None, None, None, {"a"}]


def test_failed_deferred_work_is_logged_once_and_stays_in_the_status(clock: Clock, caplog):
    """It prevents no change: for example, a FORWARD chain that cannot be changed."""
    agent, plane = begun(0.0)
    plane.error = "no"
    agent.step([service("a")])
    assert (plane.applied, agent.status().synced) == ([None, {"a"}], True)
    for tick, error in (("no", "no"), ("no", "no"), ("", "")):
        plane.error = tick
        assert agent._seconds_until_due() <= 1.0
        assert agent.status().error == error
        clock.now += 1.0
    assert caplog.messages == ["deferred work failed; retrying: no"]


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
def test_apply_is_not_authoritative_while_an_object_is_rejected(clock: Clock, kind: Kind, sound):
    """The unreadable object may be what a frontend or backend depends on. Pods never are."""
    plane = RecordingPlane()
    agent = Agent(Config("me", min_sync_period=0.0), plane, lambda _: ())
    key = ObjectKey(kind, "" if kind is Kind.NODE else "ns", "me")
    agent.step([Rejected(key, "bad"), *SYNCED])
    agent.step([])
    assert plane.sound == [sound]
    agent.step([Delete(key)])
    assert plane.sound[-1] is True, "the first apply that knows of everything"


def test_apply_is_not_authoritative_while_a_source_is_not(clock: Clock):
    """For example, an unreadable file of a folder: its objects are unknown."""
    plane, source = RecordingPlane(), FakeSource()
    agent = Agent(Config("me", min_sync_period=0.0), plane, lambda _: (source,))
    source.sound = False
    agent.step(SYNCED)
    assert plane.sound == [False]
    source.sound = True
    agent.step([service("a")])
    assert plane.sound == [False, True]


def test_retry_that_programs_nothing_is_no_sync(clock: Clock):
    agent, plane = begun(0.0)

    def partial_syncs() -> float:
        name = "kubeproxy_sync_partial_proxy_rules_duration_seconds"
        samples = metrics(agent)[name].samples
        return samples[f"{name}_count", frozenset({("ip_family", "IPv4")})]

    plane.refused = {ServicePortKey("ns", "a", "", Protocol.TCP, 4): "full"}
    agent.step([service("a")])
    assert partial_syncs() == 1
    for writes, count in (({}, 1), ({"services": 0}, 1), ({"services": 2}, 2), ({}, 2)):
        plane.writes = writes
        clock.now += RETRY_INTERVAL_S
        agent.step([])
        assert plane.applied[-1] == set()
        assert partial_syncs() == count


@pytest.mark.parametrize("waiting", ["nothing", "large Service", "deferred work", "new event"])
def test_failed_apply_is_counted_and_retried_once_per_interval(clock: Clock, monkeypatch, waiting):
    agent, plane = begun(0.0)
    plane.apply_error = "no"
    if waiting == "deferred work":
        monkeypatch.setattr(plane, "tick", lambda now: now)
    agent.step([service("a"), *(large("b") if waiting == "large Service" else ())])
    for _ in range(4):
        agent.step([service("c")] if waiting == "new event" else [])
        if waiting != "deferred work":
            assert agent._seconds_until_due() > 0
    assert plane.failed_applies == 1
    clock.now += RETRY_INTERVAL_S
    agent.step([])
    assert plane.failed_applies == 2
    plane.apply_error = ""
    clock.now += RETRY_INTERVAL_S
    agent.step([])
    assert plane.applied[1:]
    assert metrics(agent)["kbpf_sync_failures_total"].value() == 2


def test_refused_change_becomes_unhealthy_although_others_arrive(clock: Clock):
    """Neither small changes nor a large Service, which waits longer, make it healthy again."""
    desk = AgentServer(Config("me", serving=Serving(healthz="", metrics="")))
    desk.health = HealthTracker(60.0, clock.time)
    plane = RecordingPlane()
    agent = Agent(Config("me", min_sync_period=0.0), plane, lambda _: (), desk)

    def come(*items: Upsert | Synced) -> bool:
        for item in items:
            agent._enqueue(item)
        agent.step(agent._inbox.get_batch(0.0))
        return desk.health.verdict().healthy

    assert come(service("a"), *SYNCED)
    plane.apply_error = "no"
    assert come(service("b"))
    clock.now += 40.0
    assert come(service("c"), *large("d"))
    clock.now += 19.0
    assert come()
    clock.now += 1.0
    assert not come()
    assert not come(service("e"))
    plane.apply_error = ""
    clock.now += 2.0
    come()
    clock.now += 2.0
    assert come()


def test_time_from_event_to_map_is_recorded_once_programmed(clock: Clock):
    agent, _ = begun(5.0)
    event = service("a")
    clock.now += 1.0
    agent.step([msgspec.structs.replace(event, received_at=clock.now)])
    assert event_count(agent) == 0
    clock.now += 9.0
    agent.step([])
    assert event_count(agent) == 1


def event_count(agent: Agent) -> float:
    samples = metrics(agent)["kbpf_event_to_map_duration_seconds"].samples
    return samples["kbpf_event_to_map_duration_seconds_count", frozenset()]

# SPDX-License-Identifier: Apache-2.0
"""What the agent reports: its status, log lines, events and metrics."""

import contextlib
import errno

import pytest
from msgspec.structs import replace

from kbpf.agent.agent import Agent
from kbpf.agent.problem_book import AT_THIS_NODE, LEFT_TO_NODE
from kbpf.dataplane.base import TickResult
from kbpf.errors import KernelError, PinsRemovedError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, Serving
from kbpf.model.desired import FrontendAddress, ServicePortKey
from kbpf.model.events import Delete, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.metrics import UdpCuts
from kbpf.model.objects import Cidr, Protocol
from kbpf.model.status import MAX_PROBLEMS, AgentStatus, decode, encode
from kbpf.policy.admission import ReservedAddresses
from kbpf.serve.kubeproxy_metrics import KubeProxyMetrics
from kbpf.serve.message import HttpRequest
from kbpf.serve.server import AgentServer
from kbpf.source.base import SourceState, SourceStatus
from kbpf.source.decode.fields import leading_zeros_problem
from tests.support.faults.event_server import EventServer
from tests.support.lab.lab import until
from tests.support.plane import service as made_service
from tests.support.table import each_case
from tests.values.agent.recording import SYNCED, Clock, RecordingPlane, begun, metrics, service

STATUS_ERRORS = {
    "the kernel has no memory for it": (KernelError("cannot write", errno=errno.ENOMEM), False),
    "the pins were removed: no other process can find this agent's maps": (
        PinsRemovedError("removed"),
        True,
    ),
}
"""An error of write_status(), and whether it ends the agent."""


@each_case("error, ends", STATUS_ERRORS)
def test_removed_pins_end_the_agent(clock: Clock, caplog, error, ends):
    agent, plane = begun(0.0)

    def write_status(_: bytes) -> None:
        raise error

    plane.write_status = write_status
    clock.now += 10.0
    with pytest.raises(PinsRemovedError) if ends else contextlib.nullcontext():
        agent.step([])
    assert ("cannot write the status" in caplog.text) is not ends


def test_status_is_published_once_it_is_written(clock: Clock):
    """A client that sees /readyz succeed can then read everything else."""
    agent, plane = begun(0.0)
    published_when_written: list[AgentStatus | None] = []
    agent._server._status = None
    plane.write_status = lambda _: published_when_written.append(agent._server._status)
    agent.reporter.write_status()
    assert published_when_written == [None]
    assert agent._server._status is not None


def test_an_error_of_the_status_is_logged_once_until_it_changes(clock: Clock, caplog):
    agent, plane = begun(0.0)

    errors = ["no memory", "no memory", "no space", "", "no space"]

    def write_status(_: bytes) -> None:
        if error := errors.pop(0):
            raise KernelError(error)

    plane.write_status = write_status
    while errors:
        clock.now += 10.0
        agent.step([])
    lines = [line for line in caplog.messages if line.startswith("cannot write the status")]
    assert lines == [f"cannot write the status: no {what}" for what in ("memory", "space", "space")]


class UnknownPods:
    """A source of Pods that the agent may not read."""

    kinds = (Kind.POD,)

    def status(self) -> SourceStatus:
        return SourceStatus("pods", self.kinds, SourceState.FORBIDDEN)


@pytest.mark.parametrize("mesh_pods", [True, False])
def test_a_mesh_whose_pods_are_not_recognized_is_no_problem(clock: Clock, mesh_pods):
    """The labels of its Service may be those of any tenant's, and a problem raises an alert."""
    config = Config("me", mesh_pods=mesh_pods)
    sources = (UnknownPods(),) if mesh_pods else ()
    agent = Agent(config, RecordingPlane(), lambda _: sources, AgentServer(config))
    agent.step([*SYNCED, service("a")])
    (line,) = agent.status().disabled_features
    assert ("manifests/components/mesh-pods" in line) is mesh_pods

    def list_meshes() -> list[str]:
        assert agent.status().problems == ()
        assert agent.status().problem_count == 0
        first, *lines = agent.status().disabled_features
        assert first == line
        assert all(each.endswith(": its Pods are translated like all others") for each in lines)
        return [each.partition(":")[0] for each in lines]

    assert list_meshes() == []
    for name, mesh in {"d": "Linkerd", "e": "Linkerd", "i": "Istio"}.items():
        event = service(name)
        agent.step([Upsert(event.key, replace(event.object, mesh=mesh))])
    assert list_meshes() == mesh_pods * [
        "the Service ns/i has the labels of the mesh Istio",
        "the Service ns/d has the labels of the mesh Linkerd",
    ]
    agent.step([service("i"), Delete(service("d").key)])
    assert list_meshes() == mesh_pods * ["the Service ns/e has the labels of the mesh Linkerd"]


def test_problems_of_the_node_are_listed(clock: Clock, caplog, monkeypatch):
    """Each problem is listed while it exists. Unserved NodePorts are logged too, once each time."""
    networks = (Cidr(parse_addr("198.51.100.0"), 96 + 24),)
    config = Config("me", node_port_addresses=networks)
    desk = AgentServer(config)
    unheard, wrong = ["cannot listen on 0.0.0.0:1: no"], ["not YAML"]
    monkeypatch.setattr(desk, "problems", lambda: tuple(unheard))
    agent = Agent(config, RecordingPlane(), lambda _: (), desk)
    agent.reporter.config_error = lambda: wrong[0]

    def told(address: str) -> tuple[str, ...]:
        agent.reconciler.node_addresses = (parse_addr(address),)
        agent.reporter.write_status()
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


def test_health_server_starts_before_the_data_plane_is_opened(monkeypatch):
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


def test_a_tenant_hides_nothing_about_others(clock: Clock, caplog):
    """However many Services it has, however long its lines are, and whatever they are named: in the
    log, the status and Events.
    """
    post = EventServer()
    desk = AgentServer(Config("me", serving=Serving(healthz="", metrics="")), post_event=post)
    desk._listen_errors["0.0.0.0:1"] = "cannot listen on 0.0.0.0:1"
    agent, plane = begun(0.0, desk)
    names = [*(f"evil/s{number:03}" for number in range(2 * MAX_PROBLEMS)), "shop/web"]
    keys = [made_service(name, "10.96.0.1:80").key for name in names]
    agent.step([Rejected(ObjectKey(Kind.SERVICE, *key[:2]), "bad" * 1000) for key in keys])
    plane.refused = dict.fromkeys(keys, "no room")
    plane.plain = {key._replace(port="x"): "spread evenly" for key in keys}
    agent.step([service("a")])
    at = FrontendAddress(parse_addr("192.0.2.1"), 53, Protocol.TCP)
    states = {
        key: made_service(name, "ExternalIP=192.0.2.1:53", left_to_node=(at,), refused=((at, "no"),))
        for key, name in zip(keys, names, strict=True)
    }
    reserved = ReservedAddresses(local_addresses=frozenset({at.address}))
    with caplog.at_level("INFO"):
        agent.reconciler.book.report_addresses(states, states, reserved)
    for line in (
        "left out: Service shop/web: bad",
        "not programmed: shop/web TCP",
        "annotations: shop/web:x",
        "Service shop/web: 192.0.2.1:53/TCP is not served",
        f"{AT_THIS_NODE}: 192.0.2.1:53/TCP of Service shop/web",
        f"{LEFT_TO_NODE}: 192.0.2.1:53/TCP of Service shop/web",
    ):
        assert [text for text in caplog.messages if text.startswith(line)], line
    agent.step([service("b")])
    for what in ("left out", "not programmed"):
        lines = [text for text in caplog.messages if text.startswith(f"{what}: ")]
        assert len(lines) == MAX_PROBLEMS + 1
        assert f"and {MAX_PROBLEMS + 1} more" in lines[-1]
    written = decode(encode(agent.status()))
    problems = " ".join(line[:60] for line in written.problems)
    for text in ("cannot listen", "Service shop/web: bad", "IPv4: no room", "shop/web:x"):
        assert text in problems
    assert "shop/web" in " ".join(written.left_to_node)
    wanted, web = {"NotProgrammed", "AnnotationsNotApplied", "AddressRefused"}, {"name": "web", "namespace": "shop"}
    until(
        "the Events are sent",
        lambda: {e["reason"] for e in post.events if e["regarding"].items() >= web.items()} == wanted,
    )
    desk.events.stop()


def test_unusual_value_that_is_used_is_logged_as_unusual(clock: Clock, caplog):
    agent, _ = begun(0.0)
    zeros = leading_zeros_problem("10.96.0.01", parse_addr("10.96.0.1"))
    event = service("a")
    problems = ("weights: bad", zeros)
    agent.step([Upsert(event.key, replace(event.object, skipped=problems))])
    assert caplog.messages == [
        "left out: Service ns/a: weights: bad",
        f"unusual: Service ns/a: {zeros}",
    ]


@pytest.mark.parametrize(("namespace", "status", "system"), [("kube-system", 503, True), ("tenant", 200, False)])
def test_service_that_is_not_programmed_is_reported_everywhere(clock: Clock, namespace, status, system):
    """In a problem line, /readyz and the metric by namespace, until it is programmed; Events: see above."""
    desk = AgentServer(Config("me", serving=Serving(healthz="", metrics="")))
    agent, plane = begun(0.0, desk)
    key = ServicePortKey(namespace, "dns", "", Protocol.TCP, 4)
    other = key._replace(name="web")
    plane.refused, plane.plain = {key: "no room"}, {other: "spread evenly"}
    agent.step([service("a")])
    agent.reporter.write_status()
    assert agent.status().refused_system == ((f"{namespace}/dns",) if system else ())
    assert {f"{key}: no room", f"{other}: spread evenly"} <= set(agent.status().problems)
    answer = desk._handle_healthz(HttpRequest("GET", "/readyz", ""))
    assert answer.status == status
    assert (f"{namespace}/dns" in answer.body.decode()) is system
    refused = metrics(agent)["kbpf_namespace_service_ports_refused"]
    assert (len(refused.samples), refused.value(namespace=namespace)) == (1, 1)
    plane.refused, plane.plain = {}, {}
    agent.step([service("b")])
    agent.reporter.write_status()
    assert agent.status().problems == ()
    assert desk._handle_healthz(HttpRequest("GET", "/readyz", "")).status == 200


def test_queued_timestamp_is_settled_in_both_families_after_a_pass(clock: Clock):
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
        prefix = "kubeproxy_sync_proxy_rules_last"
        asked = metrics(agent)[f"{prefix}_queued_timestamp_seconds"]
        done = metrics(agent)[f"{prefix}_timestamp_seconds"]
        return [asked.value(ip_family=f) - done.value(ip_family=f) for f in ("IPv4", "IPv6")]

    come(service("a"), *SYNCED)
    assert max(behind()) <= 0
    for _ in range(2):
        clock.now += 600.0
        come(service("b"))
        assert max(behind()) <= 0, "one of IPv4, and the same again"

    plane.apply_error = "no"
    clock.now += 600.0
    come(service("c"))
    assert min(behind()) > 600
    plane.apply_error = ""
    clock.now += 60.0
    agent.step([])
    assert max(behind()) <= 0


def test_ended_udp_flows_are_counted_once(clock: Clock, monkeypatch):
    """UDP flows ended by a tick, or by an apply() before it."""
    agent, plane = begun(0.0)
    ended = [(UdpCuts(0.5, {4: 3}), UdpCuts(0.25, {4: 1, 6: 2})), ()]
    monkeypatch.setattr(plane, "tick", lambda _: TickResult(None, ended.pop(0)))
    agent._seconds_until_due()
    agent._seconds_until_due()
    total = metrics(agent)["kubeproxy_conntrack_reconciler_deleted_entries_total"]
    assert [total.value(ip_family=f) for f in ("IPv4", "IPv6")] == [4, 2]

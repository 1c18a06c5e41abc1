# SPDX-License-Identifier: Apache-2.0
"""/healthz, /livez and the health checks of Services, byte for byte as kube-proxy 1.37.1 answers.

tests/lab/agent/test_observe.py compares them with a real kube-proxy.
"""

import contextlib
import errno
import json
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from kbpf.errors import ConfigError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config, Serving
from kbpf.model.objects import Endpoint, EndpointSlice, Protocol, Service, ServiceName, SlicePort
from kbpf.model.status import AgentStatus, SourceView
from kbpf.policy.health_check import HealthCheck, compute_health_check
from kbpf.serve import server as desk_module
from kbpf.serve.health import (
    HealthTracker,
    HealthVerdict,
    format_go_time,
    healthz,
    livez,
    readyz,
    service_health_response,
)
from kbpf.serve.message import HttpRequest, HttpResponse
from kbpf.serve.server import AgentServer
from tests.support.lab.lab import until
from tests.support.lab.web import get

SYNCED, NOW = 1_795_300_289_792_282_716, 1_795_300_297_135_646_100
AT, THEN = "2026-11-21T22:31:37.1356461Z", "2026-11-21T22:31:29.792282716Z"


def told(good: bool) -> str:
    one = f'{{"lastUpdated":"{THEN}","healthy":{str(good).lower()}}}'
    return f'"status":{{"IPv4":{one},"IPv6":{one}}}'


class HealthRow(NamedTuple):
    """The health, the requested path, and the status and body of the response."""

    name: str
    verdict: HealthVerdict
    eligible: bool
    path: str
    status: int
    body: str


WELL, LATE = HealthVerdict(True, SYNCED, NOW), HealthVerdict(False, SYNCED, NOW)
FIRST = HealthVerdict(True, None, NOW)
HEALTH_ROWS = [
    HealthRow("healthy", WELL, True, "/healthz", 200,
              f'{{"lastUpdated":"{AT}","currentTime":"{AT}","nodeEligible":true,"healthy":true,'
              f'{told(True)}}}'),
    HealthRow("healthy: livez does not mention the node", WELL, True, "/livez", 200,
              f'{{"lastUpdated":"{AT}","currentTime":"{AT}","healthy":true,{told(True)}}}'),
    HealthRow("the node is being deleted", WELL, False, "/healthz", 503,
              f'{{"lastUpdated":"{THEN}","currentTime":"{AT}","nodeEligible":false,"healthy":true,'
              f'{told(True)}}}'),
    HealthRow("the node is being deleted: livez ignores it", WELL, False, "/livez", 200,
              f'{{"lastUpdated":"{AT}","currentTime":"{AT}","healthy":true,{told(True)}}}'),
    HealthRow("late", LATE, True, "/healthz", 503,
              f'{{"lastUpdated":"{THEN}","currentTime":"{AT}","nodeEligible":true,"healthy":false,'
              f'{told(False)}}}'),
    HealthRow("late: livez", LATE, True, "/livez", 503,
              f'{{"lastUpdated":"{THEN}","currentTime":"{AT}","healthy":false,{told(False)}}}'),
    HealthRow("starting", FIRST, True, "/healthz", 200,
              f'{{"lastUpdated":"{AT}","currentTime":"{AT}","nodeEligible":true,"healthy":true}}'),
    HealthRow("starting on a node that is being deleted", FIRST, False, "/healthz", 503,
              f'{{"lastUpdated":"0001-01-01T00:00:00Z","currentTime":"{AT}","nodeEligible":false,'
              f'"healthy":true}}'),
]  # fmt: skip


@pytest.mark.parametrize("asked", HEALTH_ROWS, ids=lambda asked: asked.name)
def test_healthz_and_livez_responses(asked: HealthRow):
    whole = asked.path == "/healthz"
    answer = healthz(asked.verdict, asked.eligible) if whole else livez(asked.verdict)
    assert answer == HttpResponse(asked.status, asked.body.encode(), "application/json")


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (1_795_300_297_000_000_000, "2026-11-21T22:31:37Z"),
        (1_795_300_297_100_000_000, "2026-11-21T22:31:37.1Z"),
        (1_795_300_297_000_000_010, "2026-11-21T22:31:37.00000001Z"),
        (0, "1970-01-01T00:00:00Z"),
        (None, "0001-01-01T00:00:00Z"),
    ],
)
def test_go_time_format(moment: int | None, text: str):
    assert format_go_time(moment) == text


AGENT = AgentStatus("1", 42, "bpf", "n", 4000.0, 4999.0, True, 3, 4, 7, 1.5, 2.5, 9.5, (), (), 0)
STARTING = replace(AGENT, synced=False)


def watch(name: str, error: str = "", synced: bool = False) -> SourceView:
    return SourceView(name, "retrying", synced, "", error)


READY = [
    # name, verdict, the agent's status, the text of the response
    ("serving", WELL, AGENT, "kbpf serves"),
    ("no status yet", FIRST, None, "kbpf is not ready: the data plane is being opened"),
    ("not all kinds are listed yet", FIRST,
     replace(STARTING, sources=(watch("services", synced=True), watch("nodes"))),
     "kbpf is not ready: nodes not listed yet"),
    ("listing is forbidden", FIRST,
     replace(STARTING, sources=(watch("pods", "no"), watch("nodes"), watch("services", "403"))),
     "kbpf is not ready: services not listed yet: 403"),
    ("pods are not waited for", FIRST, replace(STARTING, sources=(watch("pods", "403 pods"),)),
     "kbpf is not ready: the first pass is not complete"),
    ("the kernel refuses the first pass", FIRST,
     replace(STARTING, error="no room", sources=(watch("services", synced=True),)),
     "kbpf is not ready: not programmed: no room"),
    ("devices are still to be attached", WELL, STARTING,
     "kbpf is not ready: the first pass is not complete"),
    ("late", LATE, AGENT, "kbpf is not ready: changes are waiting to be programmed"),
    ("late, with an error", LATE, replace(AGENT, error="no room"),
     "kbpf is not ready: changes are waiting to be programmed: no room"),
    ("an error with escape codes", LATE, replace(AGENT, error="no \x1b[2J\u202eroom\n"),
     "kbpf is not ready: changes are waiting to be programmed: no \\x1b[2J\\u202eroom\\n"),
    ("a system Service is not programmed", WELL,
     replace(AGENT, refused_system=("kube-system/dns",)),
     "kbpf is not ready: not programmed: kube-system/dns; see `kbpf inspect status`"),
    ("five system Services are not programmed", WELL,
     replace(AGENT, refused_system=tuple(f"kube-system/{name}" for name in "abcde")),
     "kbpf is not ready: not programmed: kube-system/a, kube-system/b, kube-system/c and 2 more; "
     "see `kbpf inspect status`"),
    ("the API server is unreachable: programmed Services are served", WELL,
     replace(AGENT, sources=(watch("services", "refused", synced=True),)), "kbpf serves"),
    ("the configuration file is valid", WELL, replace(AGENT, config_error=""), "kbpf serves"),
    ("the configuration file is invalid", WELL, replace(AGENT, config_error="not YAML\x1b"),
     "kbpf serves, but its configuration file was rejected: not YAML\\x1b"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "verdict", "status", "text"), READY, ids=[r[0] for r in READY])
def test_readyz_responses(name: str, verdict: HealthVerdict, status: AgentStatus | None, text: str):
    answer = readyz(verdict, status)
    assert answer == HttpResponse(
        200 if text.startswith("kbpf serves") else 503, f"{text}\n".encode()
    )


# ---- health over time --------------------------------------------------------------------------


class Step(NamedTuple):
    """At `at` seconds `do` is recorded; then the verdict is `healthy` or not."""

    at: float
    do: str
    healthy: bool


HISTORIES = {
    "nothing to do for a day": [Step(0, "programmed", True), Step(86_400, "", True)],
    "a change is late after 60 s": [
        Step(0, "programmed", True), Step(10, "queued", True), Step(69.9, "", True),
        Step(70, "", False),
    ],
    "the oldest change decides": [
        Step(0, "programmed", True), Step(0, "queued", True), Step(50, "queued", True),
        Step(60, "", False),
    ],
    "a programmed change is settled": [
        Step(0, "programmed", True), Step(0, "queued", True), Step(1, "taken", True),
        Step(2, "programmed", True), Step(100, "", True),
    ],
    "a change without effect is settled": [
        Step(0, "programmed", True), Step(0, "queued", True), Step(1, "taken", True),
        Step(2, "nothing new", True), Step(100, "", True),
    ],
    "a change that arrives during a pass counts from its own time": [
        Step(0, "programmed", True), Step(0, "queued", True), Step(1, "taken", True),
        Step(50, "queued", True), Step(55, "programmed", True), Step(109, "", True),
        Step(110, "", False),
    ],
    "refused by the kernel repeatedly": [
        Step(0, "programmed", True), Step(0, "queued", True), Step(1, "taken", True),
        Step(30, "taken", True), Step(60, "", False), Step(61, "programmed", True),
    ],
    "refused by the kernel, and more changes arrive": [
        Step(0, "programmed", True), Step(0, "queued", True), Step(1, "taken", True),
        Step(40, "queued", True), Step(41, "taken", True), Step(60, "", False),
        Step(61, "queued", False), Step(62, "taken", False), Step(63, "programmed", True),
    ],
    "healthy during a start of any length": [
        Step(0, "queued", True), Step(1, "taken", True), Step(600, "", True),
        Step(601, "programmed", True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("steps", HISTORIES.values(), ids=HISTORIES.keys())
def test_health_over_time(steps: list[Step]):
    now = 0.0
    health = HealthTracker(60.0, lambda: now, lambda: round(now * 1e9))
    for step in steps:
        now = step.at
        match step.do:
            case "queued":
                health.record_queued()
            case "taken":
                health.record_dequeued()
            case "programmed" | "nothing new":
                health.record_settled(step.do == "programmed")
        assert health.verdict().healthy is step.healthy, step


def test_verdict_has_the_time_of_the_last_programmed_pass():
    now = 5.0
    health = HealthTracker(60.0, lambda: now, lambda: round(now * 1e9))
    assert health.verdict() == HealthVerdict(True, None, 5_000_000_000)
    health.record_settled(True)
    now = 7.0
    health.record_settled(False)
    assert health.verdict() == HealthVerdict(True, 5_000_000_000, 7_000_000_000)


# ---- health checks of Services -----------------------------------------------------------------

BODY = """{
\t"service": {
\t\t"namespace": "default",
\t\t"name": "web"
\t},
\t"localEndpoints": %d,
\t"serviceProxyHealthy": %s
}"""


@pytest.mark.parametrize(
    ("endpoints", "healthy", "status"),
    [(1, True, 200), (7, True, 200), (0, True, 503), (1, False, 503), (0, False, 503)],
)
def test_service_health_response(endpoints: int, healthy: bool, status: int):
    answer = service_health_response(ServiceName("default", "web"), endpoints, healthy)
    assert answer.body.decode() == BODY % (endpoints, str(healthy).lower())
    assert (answer.status, answer.content_type) == (status, "application/json")
    assert answer.headers == (("X-Load-Balancing-Endpoint-Weight", str(endpoints)),)
    assert json.loads(answer.body)["localEndpoints"] == endpoints


WEB = Service(
    "default", "web", "LoadBalancer",
    (parse_addr("10.96.0.1"), parse_addr("fd00::1")), (), external_local=True,
    health_check_node_port=31_999,
)  # fmt: skip


def end(address: str, node: str = "n1", ready: bool = True, terminating: bool = False) -> Endpoint:
    return Endpoint(parse_addr(address), ready, True, terminating, node)


def piece(*ends: Endpoint, family: int = 4, ports: int = 1, name: str = "a") -> EndpointSlice:
    made = tuple(SlicePort(f"p{i}", Protocol.TCP, 80 + i) for i in range(ports))
    return EndpointSlice("default", name, "web", family, ends, made)


class EndpointCount(NamedTuple):
    """Slices, and the number of local endpoints counted in each family."""

    name: str
    slices: tuple[EndpointSlice, ...]
    v4: int
    v6: int


ENDPOINT_COUNTS = [
    EndpointCount("no slices", (), 0, 0),
    EndpointCount("one on this node", (piece(end("10.0.0.1")),), 1, 0),
    EndpointCount("one on another node", (piece(end("10.0.0.1", "n2")),), 0, 0),
    EndpointCount("on no node", (piece(end("10.0.0.1", "")),), 0, 0),
    EndpointCount("one that is not ready", (piece(end("10.0.0.1", ready=False)),), 0, 0),
    EndpointCount("one that terminates and still serves",
                  (piece(end("10.0.0.1", ready=False, terminating=True)),), 0, 0),
    EndpointCount("one with two ports", (piece(end("10.0.0.1"), ports=2),), 1, 0),
    EndpointCount("a slice without ports", (piece(end("10.0.0.1"), ports=0),), 0, 0),
    EndpointCount("one in two slices",
            (piece(end("10.0.0.1")), piece(end("10.0.0.1"), end("10.0.0.2"), name="b")), 2, 0),
    EndpointCount("one that terminates, and one with two ports at its address on another node",
                  (piece(end("10.0.0.1", "n2"), ports=2), piece(end("10.0.0.1", terminating=True),
                                                                name="b")), 0, 0),
    EndpointCount("one address, ready and unready, with different ports",
                  (piece(end("10.0.0.1"), ports=1), piece(end("10.0.0.1", ready=False), ports=2,
                                                          name="b")), 0, 0),
    EndpointCount("both families",
            (piece(end("10.0.0.1")), piece(end("fd00::2"), end("fd00::3"), family=6, name="b")),
            1, 2),
]  # fmt: skip


@pytest.mark.parametrize("row", ENDPOINT_COUNTS, ids=lambda row: row.name)
def test_local_endpoints_are_counted(row: EndpointCount):
    assert compute_health_check(WEB, row.slices, "n1") == HealthCheck(31_999, row.v4, row.v6)


def test_single_family_service_reports_its_count_in_both_families():
    single = Service(
        "default", "web", "LoadBalancer", WEB.cluster_ips[:1], (), external_local=True,
        health_check_node_port=31_999,
    )  # fmt: skip
    assert compute_health_check(single, (piece(end("10.0.0.1")),), "n1") == HealthCheck(
        31_999, 1, 1
    )


def test_service_without_health_check_port_has_no_check():
    assert compute_health_check(None, (), "n1") is None
    plain = Service("default", "web", "LoadBalancer", WEB.cluster_ips, ())
    assert compute_health_check(plain, (), "n1") is None


# ---- listen addresses of health checks ---------------------------------------------------------


class ListenRow(NamedTuple):
    """The NodePort addresses (None: all), those of the node, and where a health check listens."""

    name: str
    at: tuple[str, ...] | None
    own: tuple[str, ...]
    on: tuple[str, ...]


LISTEN_ROWS = [
    ListenRow("all", None, ("10.0.0.1",), ("0.0.0.0", "::")),
    ListenRow("both families", ("10.0.0.1", "fd00::1"), ("10.0.0.1", "fd00::1"),
              ("10.0.0.1", "fd00::1")),
    ListenRow("two of one family, none of the other", ("10.0.0.1", "10.0.0.2"),
              ("10.0.0.1", "10.0.0.2"), ("10.0.0.1", "10.0.0.2", "::")),
    ListenRow("one is not an address of the node", ("10.0.0.1", "10.0.0.2", "fd00::1"),
              ("10.0.0.2", "fd00::1"), ("10.0.0.2", "fd00::1")),
    ListenRow("none is an address of the node", ("10.0.0.1", "fd00::1"), (), ("0.0.0.0", "::")),
]  # fmt: skip


@pytest.mark.parametrize("row", LISTEN_ROWS, ids=lambda row: row.name)
def test_listen_addresses_of_a_health_check(row: ListenRow, monkeypatch: pytest.MonkeyPatch):
    """As kube-proxy: a family without a usable address listens on the wildcard address."""
    opened: list[str] = []
    desk = AgentServer(Config())

    def listen(host: str, port: int, *_: object, **__: object) -> object:
        if host not in (*row.own, "0.0.0.0", "::"):
            raise OSError(errno.EADDRNOTAVAIL, "not ours")
        opened.append(host)
        return object()

    monkeypatch.setattr(desk._http, "listen", listen)
    at = None if row.at is None else tuple(map(parse_addr, row.at))
    desk._sync_checks({ServiceName("a", "web"): HealthCheck(31_999, 1, 1)}, at)
    assert tuple(opened) == row.on


# ---- Services with the same health check port ---------------------------------------------------


class Ports:
    """A fake HTTP server: a port has one handler, and delayed work runs when wait() is called."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, int], object] = {}
        self.waiting: list[Callable[[], None]] = []

    def listen(self, host: str, port: int, handler: object, **_: object) -> tuple[str, int]:
        if (host, port) in self.taken:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self.taken[host, port] = handler
        return host, port

    def close(self, port: tuple[str, int]) -> None:
        del self.taken[port]

    def call_later(self, _: float, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def wait(self) -> None:
        """Runs all delayed work: the retries of ports that were taken."""
        works, self.waiting = self.waiting, []
        for work in works:
            work()


class PortRow(NamedTuple):
    """The health check port of each Service in every step, and the result after the last step.

    Retries run after each step. `served` maps a port to its Service; `failed` is the number of
    Services without their port.
    """

    name: str
    steps: tuple[dict[str, int], ...]
    served: dict[int, str]
    failed: int = 0


PORT_ROWS = [
    PortRow("another number", ({"a": 1}, {"a": 2}), {2: "a"}),
    PortRow("the same again", ({"a": 1}, {"a": 1}), {1: "a"}),
    PortRow("deleted", ({"a": 1}, {}), {}),
    PortRow("two with one port", ({"a": 1, "b": 1},), {1: "a"}, 1),
    PortRow("the second gets it when the first is deleted", ({"a": 1, "b": 1}, {"b": 1}), {1: "b"}),
    PortRow("the second is deleted", ({"a": 1, "b": 1}, {"a": 1}), {1: "a"}),
    PortRow("both are deleted while one waits", ({"a": 1, "b": 1}, {}), {}),
    PortRow("the second changes its port", ({"a": 1, "b": 1}, {"a": 1, "b": 2}), {1: "a", 2: "b"}),
    PortRow("two swap their ports", ({"a": 1, "b": 2}, {"a": 2, "b": 1}), {1: "b", 2: "a"}),
]


@pytest.mark.parametrize("row", PORT_ROWS, ids=lambda row: row.name)
def test_which_service_gets_a_health_check_port(row: PortRow, monkeypatch: pytest.MonkeyPatch):
    desk, ports = AgentServer(Config()), Ports()
    monkeypatch.setattr(desk, "_http", ports)
    for wanted in row.steps:
        told = {ServiceName("x", name): HealthCheck(port, 1, 1) for name, port in wanted.items()}
        desk._sync_checks(told, None)
        ports.wait()
    served = {port: json.loads(ask(handler).body)["service"]["name"]
              for (host, port), handler in ports.taken.items() if host == "::"}  # fmt: skip
    assert served == row.served
    assert len(ports.taken) == 2 * len(served)
    page = desk.format_metrics().decode()
    assert f"\nkbpf_service_health_checks_failed {row.failed}\n" in page
    assert f"\nkbpf_service_health_checks {len(row.steps[-1])}\n" in page


def ask(handler: Any) -> HttpResponse:
    return handler(HttpRequest("GET", "/", ""))


# ---- listen addresses in use ---------------------------------------------------------------------

TAKEN = {"healthz": "FailedToStartProxierHealthcheck", "metrics": "FailedToStartMetricServer"}
"""The setting, and the reason of the Event if its address is in use."""


@pytest.mark.parametrize("hard", [False, True], ids=["tried again", "hard"])
@pytest.mark.parametrize("which", TAKEN)
def test_listen_address_in_use_is_an_event_and_a_problem(
    which: str, hard: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(desk_module, "LISTEN_RETRY_INTERVAL_S", 0.01)
    made: list[dict[str, Any]] = []

    def post(path: str, body: bytes) -> int:
        made.append(json.loads(body))
        return 201

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serving = Serving(
            **{"healthz": "", "metrics": "", which: f"127.0.0.1:{port}"}, hard_fail=hard
        )
        desk = AgentServer(Config(serving=serving, node_name="n1"), post_event=post)
        try:
            if hard:
                with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                    desk.start()
            else:
                desk.start()
            until("the Event is sent", lambda: made)
            if not hard:
                assert desk.problems() == (made[0]["note"],)
                taken.close()
                until("the server listens", lambda: answers(port))
                assert desk.problems() == ()
        finally:
            desk.stop()
    (event,) = made
    assert (event["reason"], event["type"]) == (TAKEN[which], "Warning")
    assert event["regarding"]["name"] == "n1"
    assert event["note"] == f"cannot listen on 127.0.0.1:{port}: Address already in use"


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return get(None, "127.0.0.1", port, "/healthz").status == 200
    return False


def test_livez_names_a_stalled_thread():
    answer = livez(WELL, ("thread devices: no progress for 130 s",))
    assert answer.status == 503
    assert json.loads(answer.body)["threads"] == ["thread devices: no progress for 130 s"]
    assert livez(WELL, ()).status == 200

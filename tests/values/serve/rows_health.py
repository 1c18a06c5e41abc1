# SPDX-License-Identifier: Apache-2.0
"""The rows of test_health.py."""

from typing import NamedTuple

from msgspec.structs import replace

from kbpf.model.address import parse_addr
from kbpf.model.objects import Endpoint, EndpointSlice, Protocol, Service, SlicePort
from kbpf.model.status import AgentStatus, SourceView
from kbpf.serve.health import HealthVerdict

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
]


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
]


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
}


WEB = Service(
    "default", "web", "LoadBalancer",
    (parse_addr("10.96.0.1"), parse_addr("fd00::1")), (), external_local=True,
    health_check_node_port=31_999,
)


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
]


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
]

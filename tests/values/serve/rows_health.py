# SPDX-License-Identifier: Apache-2.0
"""The rows of test_health.py."""

from msgspec.structs import replace

from kbpf.model.address import family_of, parse_addr
from kbpf.model.objects import Endpoint, EndpointSlice, Protocol, Service, SlicePort
from kbpf.model.status import AgentStatus, SourceView
from kbpf.serve.health import HealthVerdict
from tests.support.table import pairs
from tests.values.views.snapshots import AGENT

SYNCED, NOW = 1_795_300_289_792_282_716, 1_795_300_297_135_646_100
AT, THEN = "2026-11-21T22:31:37.1356461Z", "2026-11-21T22:31:29.792282716Z"


def told(good: bool) -> str:
    one = f'{{"lastUpdated":"{THEN}","healthy":{str(good).lower()}}}'
    return f'"status":{{"IPv4":{one},"IPv6":{one}}}'


WELL, LATE = HealthVerdict(True, SYNCED, NOW), HealthVerdict(False, SYNCED, NOW)
FIRST = HealthVerdict(True, None, NOW)
HEALTH_ROWS = {
    # the rule, the health, whether the node is eligible, the path; the response's status and body
    "healthy": (WELL, True, "/healthz", 200,
              f'{{"lastUpdated":"{AT}","currentTime":"{AT}","nodeEligible":true,"healthy":true,'
              f'{told(True)}}}'),
    "healthy: livez does not mention the node": (WELL, True, "/livez", 200,
              f'{{"lastUpdated":"{AT}","currentTime":"{AT}","healthy":true,{told(True)}}}'),
    "the node is being deleted": (WELL, False, "/healthz", 503,
              f'{{"lastUpdated":"{THEN}","currentTime":"{AT}","nodeEligible":false,"healthy":true,'
              f'{told(True)}}}'),
    "the node is being deleted: livez ignores it": (WELL, False, "/livez", 200,
              f'{{"lastUpdated":"{AT}","currentTime":"{AT}","healthy":true,{told(True)}}}'),
    "late": (LATE, True, "/healthz", 503,
              f'{{"lastUpdated":"{THEN}","currentTime":"{AT}","nodeEligible":true,"healthy":false,'
              f'{told(False)}}}'),
    "late: livez": (LATE, True, "/livez", 503,
              f'{{"lastUpdated":"{THEN}","currentTime":"{AT}","healthy":false,{told(False)}}}'),
    "starting": (FIRST, True, "/healthz", 200,
              f'{{"lastUpdated":"{AT}","currentTime":"{AT}","nodeEligible":true,"healthy":true}}'),
    "starting on a node that is being deleted": (FIRST, False, "/healthz", 503,
              f'{{"lastUpdated":"0001-01-01T00:00:00Z","currentTime":"{AT}","nodeEligible":false,'
              f'"healthy":true}}'),
}


VERDICTS = {"well": WELL, "late": LATE, "first": FIRST}
READY = pairs("""\
serving: well → kbpf serves
no status yet: first; none → kbpf is not ready: the data plane is being opened
not all kinds are listed yet: first; starting; services+; nodes → kbpf is not ready: nodes not listed yet
listing is forbidden: first; starting; pods no; nodes; services 403 → kbpf is not ready: services not listed yet: 403
pods are not waited for: first; starting; pods 403 pods → kbpf is not ready: the first pass is not complete
the kernel refuses the first pass: first; starting; error=no room; services+ → \
kbpf is not ready: not programmed: no room
devices are still to be attached: well; starting → kbpf is not ready: the first pass is not complete
late: late → kbpf is not ready: changes are waiting to be programmed
late, with an error: late; error=no room → kbpf is not ready: changes are waiting to be programmed: no room
an error with escape codes: late; error=no \x1b[2J\u202eroom → \
kbpf is not ready: changes are waiting to be programmed: no \\x1b[2J\\u202eroom
a system Service is not programmed: well; refused_system=kube-system/dns → \
kbpf is not ready: not programmed: kube-system/dns; see `kbpf inspect status`
five system Services are not programmed: well; refused_system=x/a x/b x/c x/d x/e → \
kbpf is not ready: not programmed: x/a, x/b, x/c and 2 more; see `kbpf inspect status`
the API server is unreachable, programmed Services are served: well; services+ refused → kbpf serves
the configuration file is valid: well; config_error= → kbpf serves
the configuration file is invalid: well; config_error=not YAML\x1b → \
kbpf serves, but its configuration file was rejected: not YAML\\x1b
""")
"""The verdict and facts of the status: watches with their errors (`+`: listed), and fields → the response."""


def ready_case(text: str) -> tuple[HealthVerdict, AgentStatus | None]:
    """The verdict and the status of a row."""
    verdict, *facts = text.partition(": ")[2].split("; ")
    made, sources = AGENT, []
    for fact in facts:
        name, _, value = fact.partition("=")
        match name:
            case "none":
                return VERDICTS[verdict], None
            case "starting":
                made = replace(made, synced=False)
            case "refused_system":
                made = replace(made, refused_system=tuple(value.split()))
            case "error" | "config_error":
                made = replace(made, **{name: value})
            case _:
                kind, _, error = fact.partition(" ")
                sources.append(SourceView(kind.rstrip("+"), "retrying", kind.endswith("+"), "", error))
    return VERDICTS[verdict], replace(made, sources=tuple(sources))


HISTORIES = {
    "nothing to do for a day": "0 programmed, 86400",
    "a change is late after 60 s": "0 programmed, 10 queued, 69.9, 70 late",
    "the oldest change decides": "0 programmed, 0 queued, 50 queued, 60 late",
    "a programmed change is settled": "0 programmed, 0 queued, 1 taken, 2 programmed, 100",
    "a change without effect is settled": "0 programmed, 0 queued, 1 taken, 2 nothing new, 100",
    "a change that arrives during a pass counts from its own time": (
        "0 programmed, 0 queued, 1 taken, 50 queued, 55 programmed, 109, 110 late"
    ),
    "refused by the kernel repeatedly": "0 programmed, 0 queued, 1 taken, 30 taken, 60 late, 61 programmed",
    "refused by the kernel, and more changes arrive": (
        "0 programmed, 0 queued, 1 taken, 40 queued, 41 taken, 60 late, 61 queued late, 62 taken late, 63 programmed"
    ),
    "healthy during a start of any length": "0 queued, 1 taken, 600, 601 programmed",
}
"""What is recorded at which second; then the agent is healthy, unless the step says that it is late."""


WEB = Service(
    "default", "web", "LoadBalancer",
    (parse_addr("10.96.0.1"), parse_addr("fd00::1")), (), external_local=True,
    health_check_node_port=31_999,
)


def slices(text: str) -> tuple[EndpointSlice, ...]:
    """Slices separated by semicolons, with endpoints on n1: `10.0.0.1`, or `10.0.0.1@n2/unready/terminating` (`@-`: on
    no node). `ports=2`: the slice has two.
    """
    made = []
    for number, part in enumerate(filter(None, text.split(";"))):
        ends, _, ports = part.partition("ports=")
        endpoints = []
        for word in ends.split():
            at, *conditions = word.split("/")
            address, _, node = at.partition("@")
            is_ready, is_terminating = "unready" not in conditions, "terminating" in conditions
            where = (node or "n1").strip("-")
            endpoints.append(Endpoint(parse_addr(address), is_ready, True, is_terminating, where))
        numbered = tuple(SlicePort(f"p{i}", Protocol.TCP, 80 + i) for i in range(int(ports or 1)))
        family = family_of(endpoints[0].address)
        made.append(EndpointSlice("default", f"s{number}", "web", family, tuple(endpoints), numbered))
    return tuple(made)


ENDPOINT_COUNTS = pairs("""\
no slices: → 0 0
one on this node: 10.0.0.1 → 1 0
one on another node: 10.0.0.1@n2 → 0 0
on no node: 10.0.0.1@- → 0 0
one that is not ready: 10.0.0.1/unready → 0 0
one that terminates and still serves: 10.0.0.1/unready/terminating → 0 0
one with two ports: 10.0.0.1 ports=2 → 1 0
a slice without ports: 10.0.0.1 ports=0 → 0 0
one in two slices: 10.0.0.1; 10.0.0.1 10.0.0.2 → 2 0
one that terminates, and one with two ports at its address elsewhere: 10.0.0.1@n2 ports=2; 10.0.0.1/terminating → 0 0
one address, ready and unready, with different ports: 10.0.0.1; 10.0.0.1/unready ports=2 → 0 0
both families: 10.0.0.1; fd00::2 fd00::3 → 1 2
""")
"""Slices → the number of local endpoints counted in each family."""


LISTEN_ROWS = pairs("""\
all | 10.0.0.1 → 0.0.0.0 ::
10.0.0.1 fd00::1 | 10.0.0.1 fd00::1 → 10.0.0.1 fd00::1
10.0.0.1 10.0.0.2 | 10.0.0.1 10.0.0.2 → 10.0.0.1 10.0.0.2 ::
10.0.0.1 10.0.0.2 fd00::1 | 10.0.0.2 fd00::1 → 10.0.0.2 fd00::1
10.0.0.1 fd00::1 | → 0.0.0.0 ::
""")
"""The NodePort addresses | those of the node → where a health check listens."""

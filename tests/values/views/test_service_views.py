# SPDX-License-Identifier: Apache-2.0
"""Views of Services, affinity, maps and programs, and the targets of `check --attached`, built from
constructed snapshots: states that a kernel cannot be made to show.
"""

import pytest
from msgspec.structs import replace

from kbpf.checks.connect import MAX_BACKENDS, select_targets
from kbpf.dataplane.bpf.inspect.snapshot import read_map
from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.maps.layout import ServiceFlag, ServiceValue
from kbpf.errors import NotFoundError
from kbpf.model.address import format_addr, parse_addr
from kbpf.model.desired import Backend, FrontendAddress, FrontendKind
from kbpf.model.inspection import (
    BackendEntry,
    BackendSet,
    Difference,
    DifferenceKind,
    EndpointEntry,
    FrontendEntry,
    ServicePort,
    Verification,
    index_pods,
)
from kbpf.model.objects import Protocol
from kbpf.model.status import SourceView, ThreadView
from kbpf.views import maps, service, status, trace, verification
from tests.support.faults.fake_maps import FakeMap
from tests.support.table import each_named_pair, each_pair
from tests.values.views.snapshots import AGENT, ATTACHED, TCP, UDP, key, snapshot

CLUSTER_IP = int(ServiceFlag.CLUSTER_IP)


def at(address: str, port: int = 80, protocol: Protocol = TCP) -> FrontendAddress:
    return FrontendAddress(parse_addr(address), port, protocol)


def backend(index: int, protocol: Protocol = TCP) -> Backend:
    return Backend(parse_addr(f"10.244.0.{index}"), 8080, protocol)


def value(service_id: int, size: int = 1, flags: int = CLUSTER_IP, timeout: int = 0) -> ServiceValue:
    return ServiceValue(service_id, flags, timeout, service_id if size else 0, size, 0, 0)


def backends(*indexes: int) -> BackendSet:
    slots = {n: BackendEntry(index, backend(index)) for n, index in enumerate(indexes)}
    return BackendSet(1, len(indexes), slots)


@each_pair(
    "sets, why",
    """\
1 | → used: ready
1 | 1 Local → used: ready
1 | 2 Local → used by policy Cluster: ready
1 | Local → used by policy Cluster: ready
 | 1 Local → used by policy Local: ready
2 | 2 Local → unknown
""",
)
def test_trace_names_the_policy_that_uses_an_endpoint(sets, why):
    """Members of the cluster set | of the local set, and whether a policy is Local → the reason of endpoint 1."""
    cluster, local = (map(int, part.replace("Local", "").split()) for part in sets.split("|"))
    frontend = FrontendEntry(at("10.96.0.1"), FrontendKind.CLUSTER_IP, False, backends(*cluster), backends(*local))
    port = ServicePort(
        1,
        key("web"),
        (frontend,),
        external_local="Local" in sets,
        endpoints={backend(1): EndpointEntry(backend(1), node="node-2")},
    )
    assert [row.why for row in trace.build_endpoint_rows(port)] == [why.replace("unknown", trace.UNKNOWN)]


def test_advice_that_fits_several_differences_is_given_once():
    differences = (
        Difference(DifferenceKind.CHANGED, "hook connect4", "a", advice="wait"),
        Difference(DifferenceKind.CHANGED, "hook connect6", "b", advice="wait"),
        Difference(DifferenceKind.CHANGED, "hook connect6", "c", advice="wait"),
        Difference(DifferenceKind.MISSING, "hook connect6", "b", advice="wait"),
        Difference(DifferenceKind.STALE, "backends", "b"),
    )
    page = verification.build_page(differences, Verification(not differences, len(differences), 1, 2, 3, 1), 0)
    assert page.text is not None
    _, advice = page.text(False).split("what to do\n")
    assert advice.split("\n\n")[0].split("\n") == [
        "  changed, hook connect4, hook connect6: wait",
        "  missing, hook connect6: wait",
    ]


# ---- services ----------------------------------------------------------------------------------


LONG_POD = f"dns-{120 * 'x'}-7f9c"
ENDPOINTS = {
    layout.pack_endpoint_key(service_id, parse_addr(address), 8080, TCP): layout.pack_endpoint_name(
        pod, "node-1", "", 0
    )
    for service_id, address, pod in ((2, "10.244.0.7", "web-0"), (3, "10.244.0.8", LONG_POD), (3, "10.244.0.6", ""))
}
NAMES = {1: key("web"), 2: key("web", "shop"), 3: key("dns", "kube-system")}
FRONTENDS = {
    at("10.96.0.1"): value(1),
    at("fd00:96::2"): value(2),
    at("0.0.0.0", 30080): value(2, flags=int(ServiceFlag.NODE_PORT)),
    at("10.96.0.3", 53, UDP): value(3),
}


@each_pair(
    "asked, found",
    f"""\
web → default/web shop/web
web -n shop → shop/web
shop/web → shop/web
dns -n default → no: kube-system/dns
wbe → no: default/web or shop/web
zzzzzz → no: kbpf inspect services
10.96.0.1 → default/web
10.96.0.1:80 → default/web
10.96.0.1:81 → no: kbpf inspect services
fd00:96::2 → shop/web
[fd00:96::2]:80 → shop/web
:30080 → shop/web
:80 → no: kbpf inspect services
10.244.0.1 → kube-system/dns
10.244.0.1:8080 → kube-system/dns
10.244.0.9 → no: kbpf inspect services
10.244.0.7 → shop/web
10.244.0.7:8080 → shop/web
10.244.0.7:8081 → no: kbpf inspect services
web-0 → shop/web
shop/web-0 → shop/web
web-0 -n default → no: shop/web-0
web-1 -n shop → no: shop/web-0
{LONG_POD} → kube-system/dns
{LONG_POD}y → no: did you mean kube-system/dns-xxx
""",
)
def test_service_is_found_by_name_and_namespace(asked, found):
    """A name and a namespace → the Services that are shown, or words of the error's hint."""
    held = snapshot(names=NAMES, frontends=FRONTENDS, backends={5: backend(1)}, sets={3: {0: 5}}, endpoints=ENDPOINTS)
    name, _, namespace = asked.partition(" -n ")
    if hint := found.partition("no: ")[2]:
        with pytest.raises(NotFoundError) as caught:
            service.build_details(held, name, namespace)
        assert hint in caught.value.hint
    else:
        shown = service.build_details(held, name, namespace)
        assert [each.service.full_name for each in shown] == found.split()


@each_pair(
    "conditions, words",
    """\
ready, serving → ready
serving → not ready, serving
 → not ready
serving, terminating → terminating, serving
terminating → terminating
ready, serving, terminating → ready, terminating, serving
""",
)
def test_state_of_an_endpoint_is_its_conditions(conditions, words):
    given = [name in conditions.split(", ") for name in ("ready", "serving", "terminating")]
    assert EndpointEntry(backend(1), "", "", "", *given).state == words


@each_named_pair(
    "endpoints, expected",
    """\
one Pod behind two Services: 1 10.244.0.1 a, 2 10.244.0.1 a → 10.244.0.1 default/a
two Pods with the address of their node: 1 10.0.0.1 a, 2 10.0.0.1 b →
the address of this node: 1 10.0.0.9 a, 1 10.244.0.1 b → 10.244.0.1 default/b
no Pod: 1 10.244.0.1 - →
""",
)
def test_address_is_a_pods_if_only_one_pod_has_it(endpoints, expected):
    """Service, address and Pod of endpoints → the address that is a Pod's."""
    ports: dict[str, ServicePort] = {}
    for endpoint in endpoints.split(", "):
        service_id, address, pod = endpoint.split()
        entry = EndpointEntry(at(address), f"default/{pod}" if pod != "-" else "")
        port = ports.setdefault(service_id, ServicePort(int(service_id), None, endpoints={}))
        port.endpoints[entry.backend] = entry
    index = index_pods(ports.values(), {parse_addr("10.0.0.9")})
    assert ", ".join(f"{format_addr(address)} {pod}" for address, pod in index.items()) == expected


# ---- maps, programs ----------------------------------------------------------------------------


@each_pair(
    "given, fill",
    """\
services 79 → 79.0%
services 80 → 80.0% !
affinity 100 → 100.0% !
source_ranges 80 → 80.0% !
node → -
flow_queue → -
flows 100 → 100.0%
""",
)
def test_map_alarm_is_at_80_percent(given, fill):
    """A map with room for 100 entries, and how many it has → its cell FILL; `!` is the alarm."""
    name, *entries = given.split()
    contents = {bytes([i]): b"" for i in range(int(*entries or (100,)))}
    (row,) = maps.build_rows(snapshot(maps=(read_map(name, FakeMap(name, contents, 100)),)))
    assert (row.entries, row.alarm) == (int(entries[0]) if entries else None, "!" in fill)
    assert [column.text(row).strip() for column in maps.COLUMNS if column.title == "FILL"] == [fill]


def test_sources_and_threads_are_not_shown_as_running_while_the_agent_is_down():
    watches = (SourceView("services", "watching", True, "7", ""),)
    agent = replace(AGENT, sources=watches, threads=(ThreadView("http", True, 0.1),))
    up, down = ["watching", "yes", "running"], ["was watching", "-", "ended"]
    for alive, wanted in ((True, up), (False, down)):
        seen = status.build_view(snapshot(status=agent, agent_alive=alive, hooks=ATTACHED))
        source, thread = seen.sources[0], seen.threads[0]
        cells = [column.text(source) for column in status.SOURCE_COLUMNS[1:3]]
        assert [*cells, status.THREAD_COLUMNS[1].text(thread)] == wanted


# ---- targets of check --attached ---------------------------------------------------------------


@each_named_pair(
    "frontends, dialled",
    """\
the smallest set: 3 2 4 → 2
affinity only if there is no other: 1/affinity 4 → 2
affinity alone: 1/affinity → 1
no backends: 1/empty →
too many: 100 →
NodePort: 1/NODE_PORT →
restricted: 1/LOAD_BALANCER/RESTRICTED →
no local backend: 1/CLUSTER_IP/INTERNAL_LOCAL →
the set is gone: 11 →
""",
)
def test_which_frontend_is_dialled(frontends, dialled):
    """The set of each frontend and its flags → the number of the frontend. Set N has N backends, 100 too many, and 11
    does not exist.
    """
    held = {}
    for number, word in enumerate(frontends.split(), 1):
        set_id, *more = word.split("/")
        flags = sum(ServiceFlag[name] for name in more if name.isupper()) or CLUSTER_IP
        held[at(f"10.96.0.{number}")] = value(int(set_id), "empty" not in more, flags, 5 * ("affinity" in more))
    sets = {i: {slot: slot + 1 for slot in range(i)} for i in range(1, 10)}
    sets[100] = {slot: slot + 1 for slot in range(MAX_BACKENDS + 1)}
    entries = {i: backend(i) for i in range(1, MAX_BACKENDS + 2)}
    found = select_targets(snapshot(frontends=held, sets=sets, backends=entries))
    assert [str(where) for where, _ in found] == [f"10.96.0.{number}:80/TCP" for number in dialled.split()]

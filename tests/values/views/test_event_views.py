# SPDX-License-Identifier: Apache-2.0
"""The lines of `kbpf monitor`, and the pages of `kbpf top`, from given events and counters."""

import json
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from kbpf.cli import render
from kbpf.cli.options import Output
from kbpf.cli.schema import build_schema
from kbpf.model.address import parse_addr
from kbpf.model.desired import Backend, FrontendAddress, ServicePortKey
from kbpf.model.inspection import (
    BackendTraffic,
    ConnectionEvent,
    EndpointEntry,
    EventFilter,
    Inspection,
    NodeEntry,
    ServicePort,
)
from kbpf.model.metrics import (
    ALL_COUNTERS,
    CHOICE_COUNTERS,
    FAILURE_COUNTERS,
    IPVS_COUNTERS,
    LATENCY_EXPONENT,
    ConnectionStats,
    Latency,
    ServiceLatencies,
)
from kbpf.model.objects import Protocol
from kbpf.model.reasons import EventVerdict, Reason, Verdict
from kbpf.views import failures, monitor, top
from kbpf.views.latency import LatencyRow, format_milliseconds
from kbpf.views.page import Page
from kbpf.views.top import By, TopSummary
from tests.support.golden import Golden
from tests.support.table import each_named_pair, each_pair
from tests.values.views.snapshots import TCP, UDP, key, snapshot, stats

PORT = ServicePort(1, ServicePortKey("shop", "prices", "http", TCP, 4))
FRONTEND = FrontendAddress(parse_addr("10.96.12.3"), 80, Protocol.TCP)
OTHER_PORT = FRONTEND._replace(port=81)
CLIENT = FrontendAddress(parse_addr("203.0.113.77"), 40_000, Protocol.TCP)
BACKEND = Backend(parse_addr("10.244.2.9"), 8080, Protocol.TCP)
EVENT = ConnectionEvent(
    1_764_151_200.123456,
    Reason.TRANSLATED,
    PORT,
    FRONTEND,
    BACKEND,
    None,
    77,
    "/kubepods/podx/c",
    "shop/cart-5d6f",
    "shop/prices-0",
)
UNKNOWN = replace(
    EVENT,
    reason=Reason.UNKNOWN_PORT,
    service=ServicePort(0, None),
    backend=None,
    pod="",
    cgroup_path="/system.slice/cron.service",
)
PACKET = replace(EVENT, reason=Reason.NEW_FLOW, client=CLIENT, cgroup=0, cgroup_path="", pod="")

OTHER_PACKET = replace(PACKET, client=CLIENT._replace(address=parse_addr("203.0.113.78")))


def events() -> Iterator[ConnectionEvent]:
    yield EVENT
    yield UNKNOWN
    yield PACKET
    yield replace(EVENT, cgroup_path="", pod="", cgroup=99)
    yield from (replace(PACKET, reason=reason) for reason in monitor.VERDICTS)
    yield replace(EVENT, pod="shop/\x1b[31mred\u202e")


FILTERED = {"first": EVENT, "second": replace(EVENT, cgroup=78), "third": replace(UNKNOWN, frontend=OTHER_PORT)}


@pytest.mark.parametrize(
    ("fields", "admitted"),
    [
        ({}, "first second third"),
        ({"services": {1}}, "first second"),
        ({"services": {2}, "frontends": {FRONTEND.address}}, "third"),
        ({"services": {2}}, ""),
        ({"cgroups": {77}}, "first third"),
        ({"address": FRONTEND.address}, "first second third"),
        ({"address": FRONTEND.address, "port": 81}, "third"),
        ({"address": BACKEND.address}, "first second"),
        ({"reasons": {Reason.UNKNOWN_PORT}}, "third"),
        ({"services": {1}, "cgroups": {77}}, "first"),
    ],
)
def test_a_filter_admits_events(fields, admitted):
    """The third event is of a port that no Service has."""
    assert [name for name, event in FILTERED.items() if EventFilter(**fields).admits(event)] == admitted.split()


@pytest.fixture
def _utc(monkeypatch) -> None:
    monkeypatch.setattr(monitor, "_format_local", lambda time: time[11:23])


@pytest.mark.usefixtures("_utc")
def test_lines_of_events(golden: Golden):
    rows = [monitor.build_row(event) for event in events()]
    texts = []
    for wide in (False, True):
        lines = monitor.LineFormatter(wide)
        texts += [lines.titles(), *map(lines.line, rows), ""]
    texts += [monitor.format_left_out(1234, 100), ""]
    documents = [monitor.build_document(row) for row in rows]
    documents.append(monitor.build_document(monitor.LeftOutRow(rows[0].time, 1234)))
    texts += [render.escape_json(json.dumps(each, ensure_ascii=False)) for each in documents]
    assert all(text.isprintable() for text in texts)
    golden("monitor.txt", "\n".join(texts) + "\n")


def test_documents_have_a_schema():
    kinds = (monitor.KIND, monitor.LEFT_OUT_KIND)
    definitions = build_schema(kinds)["$defs"]
    assert set(definitions["ConnectionEvent"]["required"]) == set(monitor.build_document(monitor.build_row(EVENT)))


def test_every_refusal_and_drop_is_an_event():
    decisions = {Verdict.REFUSE: EventVerdict.REFUSED, Verdict.DROP: "dropped"}
    wanted = {r: decisions[r.verdict] for r in Reason if r.verdict in decisions}
    assert wanted.items() <= monitor.VERDICTS.items()
    assert Reason.NOT_A_SERVICE not in monitor.VERDICTS


@pytest.mark.parametrize("verdict", [Verdict.NOTE, Verdict.TRANSLATE])
def test_a_note_has_to_say_who_sees_it(verdict: Verdict):
    """Without it `kbpf monitor` would never show it, or name a wrong error."""
    with pytest.raises(KeyError):
        Reason._new_member_(Reason, 99, verdict, "words")


# ---- top -----------------------------------------------------------------------------------------

NAMES = {
    1: key("web"),
    2: ServicePortKey("default", "web", "http", TCP, 6),
    3: key("idle"),
    4: key("dns", "kube-system"),
    5: key("broken"),
    6: key("new", "udp", UDP),
    7: key("old", "udp", UDP),
    8: key("quiet", "udp", UDP),
    9: key("sctp", "udp", Protocol.SCTP),
}
BACKENDS = {i: Backend(parse_addr(f"10.244.0.{i}"), 8080, TCP) for i in (5, 6, 7, 8)}
ENDPOINTS = {
    BACKENDS[5]: EndpointEntry(BACKENDS[5], "default/web-0", "node-1", "zone-a"),
    BACKENDS[6]: EndpointEntry(BACKENDS[6], "default/web-1", "node-2", "zone-b"),
}
BEFORE = stats("""\
1 5 opened=100 refused=1 bytes_in=1000 bytes_out=1048576
1 6 opened=50
1 4294967295 opened=7
3 7 opened=9
4 7 opened=1000
7 7 bytes_in=4096
""")
AFTER = stats("""\
1 5 opened=130 refused=3 bytes_in=3048 bytes_out=3145728
1 6 opened=51
1 4294967295 opened=7
2 8 opened=4
3 7 opened=9
4 7 opened=3
5 0 no_endpoint=400
6 7 opened=1 bytes_in=4096
7 7 opened=1 bytes_in=4096
8 7 opened=1
9 7 opened=1
""")
"""The counters of `dns` began again. Bytes of UDP are known only once a packet had some."""
OPEN = {(1, 5): 3, (2, 8): 1, (4, 7): 2}


def latencies(text: str) -> ServiceLatencies | None:
    """``-12*90 -9*10 / -13*1``: how many values there are up to 2^exponent s, of connect() and of round trips."""

    def histogram(part: str) -> Latency:
        counts = dict(map(int, word.split("*")) for word in part.split())
        return Latency(tuple(counts.get(i - LATENCY_EXPONENT, 0) for i in range(BUCKETS)))

    connect, _, round_trip = text.partition("/")
    return ServiceLatencies(histogram(connect), histogram(round_trip)) if text else None


BUCKETS = len(Latency().counts)
LATENCIES = latencies("-12*90 -9*10 / -13*1")


def read(totals: dict[tuple[int, int], ConnectionStats], when: float, counted: frozenset[str], **more: object):
    inspection = snapshot(names=NAMES, backends=BACKENDS, totals=totals, open=OPEN)
    measured = LATENCIES if totals is AFTER and counted == ALL_COUNTERS else None
    services = tuple(
        msgspec.structs.replace(port, endpoints=ENDPOINTS, latencies=measured) if port.id == 1 else port
        for port in inspection.services
    )
    return replace(inspection, services=services, monotonic=when, counted=counted, **more)


COUNTED = {
    "full": ALL_COUNTERS,
    "failures": CHOICE_COUNTERS | FAILURE_COUNTERS,
    "choices": CHOICE_COUNTERS,
    "off": frozenset[str](),
    "in mode ipvs": IPVS_COUNTERS,
}


def shown(made: Page) -> str:
    text = "".join(render.render_page(made, Output.TABLE))
    return text + "".join(f"{note}\n" for note in made.notes if note)


def page(
    by: By,
    counted: str,
    service: str = "",
    limit: int = 0,
    namespace: str = "",
    in_conntrack: bool = False,
    lists_sockets: bool = True,
) -> str:
    before, after = (
        read(totals, when, COUNTED[counted], lists_sockets=lists_sockets)
        for totals, when in ((BEFORE, 10.0), (AFTER, 12.0))
    )
    rows = top.build_rows(before, after, by, service, namespace)
    summary = TopSummary(by, 2.0, None)
    return shown(top.build_page(rows, summary, after.counted, in_conntrack, limit))


def clients() -> str:
    counts = top.ClientCounts()
    counts.add([EVENT, EVENT, replace(EVENT, reason=Reason.BACKEND_REFUSED)])
    counts.add([UNKNOWN, PACKET])
    return shown(top.build_page(counts.build_rows(2.0), TopSummary(By.CLIENTS, 2.0, 1200), frozenset()))


def test_pages_of_top(golden: Golden):
    texts = [
        f"# by {by}, counted: {counted}\n{page(by, counted)}"
        for by in (By.SERVICES, By.BACKENDS)
        for counted in COUNTED
    ]
    texts += [f"# by {by}\n{page(by, 'full')}" for by in (By.ZONES, By.NODES)]
    texts.append(f"# one Service\n{page(By.BACKENDS, 'full', 'default/web')}")
    texts.append(f"# one namespace\n{page(By.SERVICES, 'full', namespace='kube-system')}")
    texts.append(f"# two rows\n{page(By.SERVICES, 'full', limit=2)}")
    texts.append(f"# with conntrack\n{page(By.SERVICES, 'full', limit=1, in_conntrack=True)}")
    texts.append(f"# no list of sockets\n{page(By.SERVICES, 'full', limit=1, lists_sockets=False)}")
    texts.append(f"# by clients\n{clients()}")
    before, after = read(BEFORE, 10.0, ALL_COUNTERS), read(AFTER, 12.0, ALL_COUNTERS)
    rows = top.build_rows(before, after, By.SERVICES)
    made = top.build_page(rows, TopSummary(By.SERVICES, 2.0, None), after.counted)
    texts.append("".join(render.render_page(made, Output.JSON)))
    golden("top.txt", "\n".join(texts))


def read_port(when: float, text: str, opened: int) -> Inspection:
    traffic = (BackendTraffic(1, None, "all", 0, ConnectionStats(opened=opened)),)
    ports = (
        ServicePort(
            family, ServicePortKey("shop", "web", "", TCP, family), traffic=traffic, latencies=latencies(each.strip())
        )
        for family, each in zip((4, 6), text.split(","), strict=False)
    )
    return Inspection("pins", counted=ALL_COUNTERS, monotonic=when, services=tuple(ports))


@each_named_pair(
    "histograms, expected",
    """\
none: | →
first: | -10*3 / -9*3 → 0.977 0.977 1.953 1.953
only new ones: -10*90 | -10*90 0*1 → 1000 1000 - -
no new ones: -10*90 | -10*90 →
of another agent: -10*90 | -10*1 →
two families: , | -10*1, -2*1 → 0.977 250 - -
""",
)
def test_latencies_are_those_between_the_two_reads(histograms, expected):
    """Latencies of a Service's ports before | after → those in between: of connect(), then of round trips."""
    before, after = histograms.split("|")
    reads = read_port(10.0, before, 0), read_port(12.0, after, 4)
    (row,) = top.build_rows(*reads, By.SERVICES)
    values = [None if word == "-" else float(word) for word in expected.split()]
    assert row.latency == (LatencyRow(*values) if values else None)
    (row,) = top.build_rows(*reads, By.BACKENDS)
    assert row.latency is None


@each_pair("milliseconds, text", "0.244 → 0.244ms\n999 → 999ms\n1000 → 1s\n64000 → 64s\ninf → >64s")
def test_times(milliseconds, text):
    assert format_milliseconds(float(milliseconds)) == text
    assert format_milliseconds(None) == "-"


def test_a_flood_from_many_addresses_takes_bounded_room(monkeypatch):
    """And hides no Pod."""
    monkeypatch.setattr(top, "MAX_CLIENTS", 1)
    counts = top.ClientCounts()
    counts.add([PACKET, OTHER_PACKET, EVENT, OTHER_PACKET, EVENT])
    rows = counts.build_rows(1.0)
    assert [(row.name, row.new) for row in rows] == [("shop/cart-5d6f", 2.0), ("203.0.113.77", 1.0)]
    assert counts.left_out == 2


@pytest.mark.parametrize(("forwarding", "notes"), [("stack", ()), ("netfilter", (failures.CONNTRACK_NOTE,))])
def test_failures_say_what_is_not_seen(forwarding, notes: tuple[str, ...]):
    """An empty list must not look like a node without failures."""
    inspection = Inspection("/pins", node=NodeEntry(forwarding=forwarding))
    assert failures.build_page(inspection, "", "", 0.0).notes == notes

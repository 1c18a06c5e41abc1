# SPDX-License-Identifier: Apache-2.0
"""The HTML page: what it shows, its limits, and that it is well-formed whatever names say."""

import re
from html.parser import HTMLParser

import pytest

from kbpf.model.address import parse_addr
from kbpf.model.desired import Backend, FrontendAddress, FrontendKind, ServicePortKey
from kbpf.model.inspection import (
    EMPTY_SET,
    BackendEntry,
    BackendSet,
    BackendTraffic,
    FailureEntry,
    FrontendEntry,
    Inspection,
    MapEntry,
    ServicePort,
)
from kbpf.model.metrics import ALL_COUNTERS, CHOICE_COUNTERS, ConnectionStats
from kbpf.model.objects import Protocol
from kbpf.model.reasons import Reason
from kbpf.model.status import AgentStatus
from kbpf.views import html_page
from tests.values.views.snapshots import AGENT

VOID = frozenset(("meta", "br"))
EVIL = '"><script>alert(1)</script>\x1b[31m'


class Reader(HTMLParser):
    """Checks that elements are closed in order, and collects text and tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def backend(number: int) -> Backend:
    return Backend(parse_addr("10.244.1.1"), number, Protocol.TCP)


def port(name: str, count: int = 2, opened: int = 0, refused: int = 0) -> ServicePort:
    entries = {n: BackendEntry(n + 1, backend(8000 + n)) for n in range(count)}
    at = FrontendAddress(parse_addr("10.96.0.1"), 80, Protocol.TCP)
    namespace, _, name = name.rpartition("/")
    frontend = FrontendEntry(at, FrontendKind.CLUSTER_IP, False, BackendSet(1, count, entries), EMPTY_SET)
    totals = ConnectionStats(opened=opened, refused=refused)
    return ServicePort(
        1,
        ServicePortKey(namespace or "shop", name, "", Protocol.TCP, 4),
        (frontend,),
        traffic=(BackendTraffic(1, backend(8000), "", opened, totals),),
    )


def page(**parts: object) -> Reader:
    return Reader(html_page.format_html(Inspection("pins", counted=ALL_COUNTERS, **parts), "now"))


def test_services_with_failures_come_first():
    services = (port("quiet", opened=9), port("failing", opened=3, refused=2), port("idle"))
    names = [text for text in page(services=services).texts if text.startswith("shop/")]
    assert names == ["shop/failing", "shop/quiet", "shop/idle"]


def test_backends_have_their_shares_and_failures():
    texts = "|".join(page(services=(port("web", 4, opened=5, refused=2),)).texts)
    assert "10.244.1.1:8000: 25%, 5 open|, 2 failed" in texts
    assert "10.244.1.1:8003: 25%, 0 open" in texts


def test_what_is_not_counted_is_no_number():
    inspection = Inspection("pins", services=(port("web", refused=0),), counted=CHOICE_COUNTERS)
    cells = re.findall(r"<td class=\"number\">([^<]*)</td>", html_page.format_html(inspection, "now"))
    assert cells == ["0", "0", "0", "-", "-", "-"]


@pytest.mark.parametrize("lists_sockets", [True, False])
def test_open_connections_are_no_number_if_the_kernel_lists_no_sockets(lists_sockets: bool):
    services = (port("web", opened=5),)
    texts = "|".join(page(services=services, lists_sockets=lists_sockets).texts)
    assert ("0 open" in texts) is lists_sockets
    assert ("5 open" in texts) is lists_sockets
    assert ("|-|" in texts) is not lists_sockets


@pytest.mark.parametrize(
    ("agent", "age", "text"),
    [
        (AGENT, 1.0, "The agent runs. Mode bpf"),
        (AGENT, 90.0, "The agent is down: this is what it had programmed 1m30s ago. Mode bpf"),
        (None, 1.0, "No agent has written its status. Mode -"),
    ],
)
def test_page_says_how_old_it_is_if_the_agent_is_down(agent: AgentStatus | None, age: float, text: str):
    boottime = AGENT.heartbeat + age
    reader = page(status=agent, agent_alive=age < 90, boottime=boottime)
    assert any(text in line for line in reader.texts)


def failure(service: ServicePort, pod: str, last: float = 2.0, number: int = 80) -> FailureEntry:
    at = FrontendAddress(parse_addr("10.96.0.1"), number, Protocol.TCP)
    return FailureEntry(1.0, last, 3, Reason.BACKEND_REFUSED, service, at, None, None, 7, pod, pod)


def test_no_text_becomes_markup():
    reader = page(services=(port(EVIL),), failures=(failure(port(EVIL), EVIL),), monotonic=5.0)
    assert "script" not in reader.tags
    assert not any("\x1b" in text for text in reader.texts)
    assert any("<script>" in text for text in reader.texts)


def test_page_needs_nothing_from_elsewhere():
    reader = page(services=(port("web"),))
    assert reader.links == []
    assert reader.tags.isdisjoint(("script", "link", "img", "iframe", "object"))


@pytest.mark.parametrize("count", [html_page.MAX_SERVICES - 1, html_page.MAX_SERVICES + 3])
def test_long_lists_are_cut_and_say_so(count: int):
    """A tenant's failures, however many, leave a row to others."""
    services = (*(port(f"web-{n}", refused=1) for n in range(count)), port("other/web", opened=1))
    failures = tuple(
        failure(services[0], pod, last, number)
        for pod, last, numbers in (("shop/a", 4.0, range(1, count)), ("other/b", 2.0, (80,)))
        for number in numbers
    )
    texts = page(services=services, failures=failures, monotonic=5.0).texts
    names = [text for text in texts if re.fullmatch(r"(shop|other)/web(-\d+)?", text)]
    assert len(names) == html_page.MAX_SERVICES + html_page.MAX_FAILURES
    assert names[html_page.MAX_SERVICES - 1] == "other/web"
    left_out = count + 1 - html_page.MAX_SERVICES
    assert (f"and {left_out} more Services" in texts) is bool(left_out)
    assert texts.count("shop/a") == html_page.MAX_FAILURES - 1
    assert texts.count("other/b") == 1


def test_the_fullest_maps_are_shown():
    count = html_page.MAX_MAPS + 2
    maps = tuple(MapEntry(f"map-{n}", "hash", n, 1000, True, 1, "p") for n in range(count))
    texts = page(maps=maps).texts
    shown = [text for text in texts if text.startswith("map-")]
    assert shown == [f"map-{n}" for n in range(count - 1, 1, -1)]
    assert "and 2 more maps" in texts


def test_an_empty_node_has_a_page():
    texts = page().texts
    assert {"no Services", "no failed connections"} <= set(texts)

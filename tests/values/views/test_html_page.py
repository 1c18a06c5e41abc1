# SPDX-License-Identifier: Apache-2.0
"""The HTML page: what it shows, its limits, and that it is well-formed whatever names say."""

import re
from html.parser import HTMLParser

import pytest

from kbpf import __version__
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
from kbpf.views import html_page
from tests.support.golden import Golden
from tests.values.views.snapshots import AGENT

VOID = frozenset(("meta", "br"))
ROWS = ("h1", "h2", "p", "tr")
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
        self.texts += ["\n"] * (tag in ROWS)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(" ".join(data.split()))


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
    given = {"counted": ALL_COUNTERS, "status": AGENT, "boottime": AGENT.heartbeat + 1, **parts}
    return Reader(html_page.format_html(Inspection("pins", **given), "now"))


def failure(service: ServicePort, pod: str, last: float = 2.0, number: int = 80) -> FailureEntry:
    at = FrontendAddress(parse_addr("10.96.0.1"), number, Protocol.TCP)
    return FailureEntry(1.0, last, 3, Reason.BACKEND_REFUSED, service, at, None, None, 7, pod, pod)


def test_no_text_becomes_markup():
    reader = page(services=(port(EVIL),), failures=(failure(port(EVIL), EVIL),), monotonic=5.0)
    assert "script" not in reader.tags
    assert not any("\x1b" in text for text in reader.texts)
    assert any("<script>" in text for text in reader.texts)


MAPS = tuple(MapEntry(f"map-{n}", "hash", n, 1000, True, 1, "p") for n in range(html_page.MAX_MAPS + 2))
PAGES: dict[str, dict[str, object]] = {
    "Services with failures come first, and the fullest maps": {
        "services": (port("quiet", opened=9), port("failing", 4, opened=3, refused=2), port("idle")),
        "failures": (failure(port("failing"), "shop/cart"),),
        "maps": MAPS,
        "agent_alive": True,
        "monotonic": 5.0,
    },
    "the agent is down": {"boottime": AGENT.heartbeat + 90},
    "no agent has run": {"status": None},
    "what is not known is no number": {
        "services": (port("web", opened=5),),
        "counted": CHOICE_COUNTERS,
        "lists_sockets": False,
    },
}


def test_texts_of_a_page(golden: Golden):
    found = []
    for name, parts in PAGES.items():
        reader = page(**parts)
        assert reader.links == [], "it needs nothing from elsewhere"
        assert reader.tags.isdisjoint(("script", "link", "img", "iframe", "object"))
        text = " ".join(filter(None, reader.texts)).replace(__version__, "VERSION")
        found += [f"# {name}", *filter(None, map(str.strip, text.splitlines())), ""]
    golden("page.txt", "\n".join(found))


@pytest.mark.parametrize("count", [html_page.MAX_SERVICES - 1, html_page.MAX_SERVICES + 3])
def test_long_lists_are_cut_and_say_so(count):
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

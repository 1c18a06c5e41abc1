# SPDX-License-Identifier: Apache-2.0
"""The state of this node as one HTML page: Services, backends, failed connections and how full the
maps are. It needs nothing from elsewhere: no script, no font, no image.

Tenants control names and addresses, so all text goes through element(), which escapes it, and each
table is limited, with a share for each namespace.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

import msgspec

from kbpf import __version__
from kbpf.errors import escape_unprintable
from kbpf.model.fairness import take_turns
from kbpf.model.inspection import EMPTY_SET, Inspection, Part, ServicePort
from kbpf.model.metrics import ConnectionStats
from kbpf.views import failures, maps, status
from kbpf.views.columns import Column, format_duration, format_number
from kbpf.views.services import NEEDS as SERVICES

NEEDS: Final = SERVICES | Part.TRAFFIC | failures.NEEDS | maps.NEEDS | status.NEEDS

MAX_SERVICES: Final = 200
MAX_BACKENDS: Final = 20
MAX_FRONTENDS: Final = 6
"""Of one Service."""
MAX_FAILURES: Final = 50
MAX_MAPS: Final = 10
"""The fullest ones."""

STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --bar: #3987e5; --bad: #d03b3b; --good: #0a8f4d; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; } .number { text-align: right; font-variant-numeric: tabular-nums; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.quiet { opacity: .7; } svg { display: block; } summary { cursor: pointer; }
"""


class BackendFigures(msgspec.Struct, frozen=True):
    """A backend of a Service. `share`: its part of new connections, None if it gets none."""

    name: str
    share: float | None
    open: int
    stats: ConnectionStats


class ServiceFigures(msgspec.Struct, frozen=True):
    """All ports of a Service, in both families, together."""

    name: str
    frontends: tuple[str, ...]
    backends: tuple[BackendFigures, ...]
    open: int
    stats: ConnectionStats


def build_figures(inspection: Inspection) -> list[ServiceFigures]:
    """Of all Services."""
    ports: dict[str, list[ServicePort]] = {}
    for port in inspection.services:
        name = str(port.key.service) if port.key is not None else port.text
        ports.setdefault(name, []).append(port)
    return [_build_service(name, own) for name, own in ports.items()]


def _build_service(name: str, ports: Sequence[ServicePort]) -> ServiceFigures:
    frontends = [str(frontend) for port in ports for frontend in port.frontends]
    backends: dict[str, BackendFigures] = {}
    stats, open_count = ConnectionStats(), 0
    for port in ports:
        cluster = next((f.cluster for f in port.frontends if f.cluster.size), EMPTY_SET)
        for backend, share in cluster.shares().items():
            backends[str(backend)] = BackendFigures(str(backend), share, 0, ConnectionStats())
        for traffic in port.traffic:
            stats = stats.plus(traffic.totals)
            open_count += traffic.open
            if traffic.backend is None:
                continue
            key = str(traffic.backend)
            before = backends.get(key, BackendFigures(key, None, 0, ConnectionStats()))
            backends[key] = BackendFigures(
                key, before.share, before.open + traffic.open, before.stats.plus(traffic.totals)
            )
    return ServiceFigures(
        name, tuple(dict.fromkeys(frontends)), tuple(backends.values()), open_count, stats
    )


# ---- HTML ----------------------------------------------------------------------------------------


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Markup:
    """An element. Children are escaped unless they are Markup; `class_` is the attribute class."""
    names = "".join(
        f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes.items() if value
    )
    inside = "".join(
        child if isinstance(child, Markup) else escape(escape_unprintable(child))
        for child in children
    )
    return Markup(f"<{tag}{names}>{inside}</{tag}>")


def bar(share: float, label: str, bad: bool = False) -> Markup:
    """A horizontal bar for a share from 0 to 1, with a label for screen readers."""
    width = round(100 * min(1.0, max(0.0, share)), 1)
    colour = "var(--bad)" if bad else "var(--bar)"
    track = element("rect", width="100", height="10", fill="var(--line)", rx="2")
    filled = element("rect", width=str(width), height="10", fill=colour, rx="2")
    return element(
        "svg", element("title", label), track, filled,
        viewBox="0 0 100 10", width="100", height="10", role="img",
    )  # fmt: skip


def table(titles: Sequence[Column], rows: Iterable[Sequence[str]], more: int, noun: str) -> Markup:
    """A table, and below it how many rows are left out."""
    classes = ["number" if column.right else "" for column in titles]
    head = element("tr", *(element("th", column.title, class_=class_)
                           for column, class_ in zip(titles, classes, strict=True)))  # fmt: skip
    body = [
        element("tr", *(element("td", cell, class_=class_)
                        for cell, class_ in zip(row, classes, strict=True)))
        for row in rows
    ]  # fmt: skip
    if not body:
        return element("p", f"no {noun}", class_="quiet")
    left_out = element("p", f"and {more} more {noun}", class_="quiet") if more > 0 else ""
    return Markup(element("table", head, *body) + left_out)


def format_html(inspection: Inspection, generated_at: str) -> str:
    """The page. `generated_at`: the time as text."""
    view = status.build_view(inspection)
    node = view.node or inspection.location
    body = element(
        "body",
        element("h1", f"kbpf on {node}"),
        _format_status(inspection, view, generated_at),
        element("h2", "Services"),
        _format_services(inspection),
        element("h2", "Failed connections"),
        _format_failures(inspection),
        element("h2", "Maps"),
        _format_maps(inspection),
    )
    head = element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"kbpf on {node}"),
        element("style", Markup(STYLE)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _format_status(inspection: Inspection, view: status.StatusView, generated_at: str) -> Markup:
    unknown = "the agent runs" if view.running else "no agent has written its status"
    agent = status.describe_age(inspection) or unknown
    facts = (
        f"{agent.capitalize()}. Mode {view.mode or '-'}, kbpf {view.version or __version__}, "
        f"{view.services} Services. Read at {generated_at}."
    )
    problems = [element("li", line) for line in view.problems]
    return Markup(
        element("p", element("span", "healthy" if view.ok else "not healthy",
                             class_="good" if view.ok else "bad"), Markup(" &middot; "), facts)
        + (element("p", view.error, class_="bad") if view.error else "")
        + (element("ul", *problems) if problems else "")
    )  # fmt: skip


def _number(title: str) -> Column:
    return Column(title, str, right=True)


def _format_services(inspection: Inspection) -> Markup:
    def rank(service: ServiceFigures) -> tuple[int, int, str]:
        """The most failures first, then the most open connections."""
        return -service.stats.failed, -service.open, service.name

    services = build_figures(inspection)
    turns = take_turns(sorted(services, key=rank), lambda s: s.name.partition("/")[0])
    most = max((service.open for service in services), default=0) * inspection.lists_sockets
    titles = (
        Column("Service", str), Column("Frontends", str), Column("Backends", str),
        _number("Open"), Column("", str), _number("Opened"), _number("No endpoint"),
        _number("Refused"), _number("Unanswered"), _number("Reset"),
    )  # fmt: skip
    rows = (
        (
            service.name,
            element("div", *(element("div", text) for text in service.frontends[:MAX_FRONTENDS])),
            _format_backends(service, inspection),
            str(service.open) if inspection.lists_sockets else "-",
            bar(service.open / most, f"{service.open} open connections") if most else "",
            *_counts(service.stats, inspection, "opened", "no_endpoint", "refused", "unanswered",
                     "reset"),
        )
        for service in sorted(turns[:MAX_SERVICES], key=rank)
    )  # fmt: skip
    return table(titles, rows, len(services) - MAX_SERVICES, "Services")


def _counts(stats: ConnectionStats, inspection: Inspection, *fields: str) -> list[str]:
    """The counters; ``-`` for those that are not counted."""
    return [
        format_number(getattr(stats, field) if field in inspection.counted else None)
        for field in fields
    ]


def _format_backends(service: ServiceFigures, inspection: Inspection) -> Markup:
    serving = sum(backend.share is not None for backend in service.backends)
    if not serving:
        return element("span", "none", class_="bad")
    lines = []
    for backend in service.backends[:MAX_BACKENDS]:
        share = "no new connections" if backend.share is None else f"{backend.share:.0%}"
        failed = backend.stats.failed
        open_count = f", {backend.open} open" if inspection.lists_sockets else ""
        lines.append(element(
            "li", f"{backend.name}: {share}{open_count}",
            element("span", f", {failed} failed", class_="bad") if failed else "",
        ))  # fmt: skip
    if (more := len(service.backends) - MAX_BACKENDS) > 0:
        lines.append(element("li", f"and {more} more"))
    return element("details", element("summary", str(serving)), element("ul", *lines))


def _format_failures(inspection: Inspection) -> Markup:
    entries = failures.build_rows(inspection)
    turns = take_turns(
        entries, lambda row: row.client.partition("/")[0] if row.kind == "pod" else ""
    )
    titles = (
        Column("Last", str), _number("Count"), Column("Client", str), Column("Service", str),
        Column("Frontend", str), Column("Backend", str), Column("Reason", str),
        Column("Client saw", str),
    )  # fmt: skip
    rows = (
        (
            f"{format_duration(row.last_seconds)} ago", str(row.count), row.client,
            row.service or "-", row.frontend, row.backend or "-", row.reason.replace("_", " "),
            row.client_saw,
        )
        for row in sorted(turns[:MAX_FAILURES], key=lambda row: row.last_seconds)
    )  # fmt: skip
    return table(titles, rows, len(entries) - MAX_FAILURES, "failed connections")


def _format_maps(inspection: Inspection) -> Markup:
    entries: list[Any] = sorted(
        (row for row in maps.build_rows(inspection) if row.fill_percent is not None),
        key=lambda row: (-row.fill_percent, row.name),
    )
    titles = (Column("Map", str), _number("Entries"), _number("Of at most"), Column("", str),
              Column("Holds", str))  # fmt: skip
    rows = (
        (
            row.name, str(row.entries), str(row.max_entries),
            bar(row.fill_percent / 100, f"{row.fill_percent} %", row.alarm), row.purpose,
        )
        for row in entries[:MAX_MAPS]
    )  # fmt: skip
    return table(titles, rows, len(entries) - MAX_MAPS, "maps")

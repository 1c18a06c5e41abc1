# SPDX-License-Identifier: Apache-2.0
"""The state of this node as one HTML page: Services, backends, failed connections and how full the
maps are. It needs nothing from elsewhere: no script, no font, no image.

page.html is its template, which escapes all text. Each table is limited, with a share for each
namespace.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
import msgspec

from kbpf import __version__
from kbpf.errors import escape_unprintable
from kbpf.model.fairness import take_turns
from kbpf.model.inspection import EMPTY_SET, Inspection, Part, ServicePort
from kbpf.model.metrics import ConnectionStats
from kbpf.views import failures, maps, status
from kbpf.views.page import format_duration, format_value
from kbpf.views.services import NEEDS as SERVICES

NEEDS: Final = SERVICES | Part.TRAFFIC | failures.NEEDS | maps.NEEDS | status.NEEDS

TEMPLATE: Final = Path(__file__).with_name("page.html")
MAX_SERVICES: Final = 200
MAX_FAILURES: Final = 50
MAX_MAPS: Final = 10
"""The fullest ones."""


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
    return ServiceFigures(name, tuple(dict.fromkeys(frontends)), tuple(backends.values()), open_count, stats)


class Rows(NamedTuple):
    """Of a table. `left_out`: how many more there are."""

    rows: list[Any]
    left_out: int


def format_html(inspection: Inspection, generated_at: str) -> str:
    """The page. `generated_at`: the time as text."""

    def count(stats: ConnectionStats, field: str) -> str:
        """``-`` if it is not counted."""
        return format_value(getattr(stats, field) if field in inspection.counted else None)

    view = status.build_view(inspection)
    unknown = "the agent runs" if view.running else "no agent has written its status"
    agent = status.describe_age(inspection) or unknown
    services = build_figures(inspection)
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_make_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(TEMPLATE.read_text()).render(
        node=view.node or inspection.location,
        view=view,
        facts=f"{agent.capitalize()}. Mode {view.mode or '-'}, kbpf {view.version or __version__}, "
        f"{view.services} Services. Read at {generated_at}.",
        services=_choose_services(services),
        most_open=max((service.open for service in services), default=0) * inspection.lists_sockets,
        lists_sockets=inspection.lists_sockets,
        failures=_choose_failures(failures.build_rows(inspection)),
        maps=_choose_maps(maps.build_rows(inspection)),
        count=count,
        duration=format_duration,
    )


def _make_printable(value: object) -> object:
    """Of texts that are not HTML yet."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return escape_unprintable(value)
    return value


def _choose_services(services: Sequence[ServiceFigures]) -> Rows:
    def rank(service: ServiceFigures) -> tuple[int, int, str]:
        """The most failures first, then the most open connections."""
        return -service.stats.failed, -service.open, service.name

    turns = take_turns(sorted(services, key=rank), lambda s: s.name.partition("/")[0])
    return Rows(sorted(turns[:MAX_SERVICES], key=rank), len(services) - MAX_SERVICES)


def _choose_failures(rows: Sequence[failures.FailureRow]) -> Rows:
    turns = take_turns(rows, lambda row: row.client.partition("/")[0] if row.kind == "pod" else "")
    chosen = sorted(turns[:MAX_FAILURES], key=lambda row: row.last_seconds)
    return Rows(chosen, len(rows) - MAX_FAILURES)


def _choose_maps(rows: Sequence[maps.MapRow]) -> Rows:
    filled: list[Any] = [row for row in rows if row.fill_percent is not None]
    filled.sort(key=lambda row: (-row.fill_percent, row.name))
    return Rows(filled[:MAX_MAPS], len(filled) - MAX_MAPS)

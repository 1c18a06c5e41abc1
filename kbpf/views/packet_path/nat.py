# SPDX-License-Identifier: Apache-2.0
"""SNAT: the translated sources of connections, and how many ports of the node they use."""

from collections.abc import Iterable
from typing import Final

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.inspection import Inspection, Part, SnatUsage, TranslatedSource
from kbpf.model.reasons import Reason
from kbpf.views.packet_path.availability import unavailable_notice
from kbpf.views.page import Column, Kind, Page, format_duration, format_facts, format_table, namespace_of

NEEDS: Final = Part.NAMES | Part.ENDPOINTS | Part.CONNECTIONS | Part.PACKETS | Part.STATUS

ALARM_PERCENT: Final = 80.0


class UsageRow(msgspec.Struct, frozen=True):
    """How many ports of one node address are in use towards one backend and protocol. Connections
    to different backends may use the same port.

    `closed` of the `used` ports belong to closed connections and are reused if no other is free.
    `ports` is the size of the range, `percent` the used part of it. `alarm`: 80 % or more are used.
    """

    backend: str
    protocol: str
    node_address: str
    used: int
    closed: int
    ports: int
    percent: float
    alarm: bool


class NatView(msgspec.Struct, frozen=True):
    """The summary, without the single sources. `addresses` and `first_port` to `last_port` are
    the node's, for SNAT. `failures`: packets that were dropped because no port was free.
    """

    addresses: tuple[str, ...]
    first_port: int
    last_port: int
    ports: int
    failures: int
    usage: tuple[UsageRow, ...]


def build_view(inspection: Inspection, usage: Iterable[SnatUsage]) -> NatView:
    """Summarises the port usage."""
    node = inspection.node
    rows = [_usage_row(entry, node.ports) for entry in usage]
    rows.sort(key=lambda row: (-row.used, row.backend, row.protocol, row.node_address))
    return NatView(
        addresses=tuple(format_addr(address) for address in node.addresses),
        first_port=node.first_port,
        last_port=node.last_port,
        ports=node.ports,
        failures=inspection.reasons.get(Reason.NO_SNAT_PORT, 0),
        usage=tuple(rows),
    )


def _usage_row(usage: SnatUsage, ports: int) -> UsageRow:
    percent = round(100 * usage.used / ports, 1) if ports else 0.0
    alarm = bool(ports) and usage.used / ports >= ALARM_PERCENT / 100
    return UsageRow(*usage, ports, percent, alarm)


USAGE_COLUMNS: Final = (
    Column("BACKEND", "backend"),
    Column("PROTOCOL", "protocol"),
    Column("NODE-ADDRESS", "node_address"),
    Column("USED", "used", right=True),
    Column("CLOSED", "closed", right=True),
    Column("PORTS", "ports", right=True),
    Column("FILL", lambda r: f"{r.percent:.1f}%" + (" !" if r.alarm else "  "), right=True),
)

COLUMNS: Final = (
    Column("SOURCE", "source"),
    Column("BACKEND", "backend"),
    Column("PROTOCOL", "protocol"),
    Column("CLIENT", "client"),
    Column("CLIENT-POD", "client_pod", wide=True),
    Column("SERVICE", "service"),
    Column("STATE", "state"),
    Column("IDLE", "idle_seconds", format_duration, right=True),
)


# ---- the page ------------------------------------------------------------------------------------


KIND: Final = Kind("TranslatedSourceList", TranslatedSource, NatView, namespaces=lambda row: namespace_of(row.service))


def build_page(inspection: Inspection) -> Page:
    translated = inspection.translated
    assert translated is not None
    view = build_view(inspection, translated.usage())
    return Page(
        KIND,
        translated.sources(),
        COLUMNS,
        text=lambda wide: format_page(view),
        summary=view,
        total=len(translated),
        notes=(unavailable_notice(inspection),),
    )


def format_page(view: NatView) -> str:
    """The node's addresses and ports for SNAT, and how many ports are in use for each backend."""
    ports = f"{view.first_port} to {view.last_port} ({view.ports})" if view.ports else "none"
    facts_text = format_facts(
        (
            ("node addresses", ", ".join(view.addresses) or "none"),
            ("ports", ports),
            ("no free port", f"{view.failures} packets dropped"),
        )
    )
    return f"{facts_text}\n\n{format_table(view.usage, USAGE_COLUMNS)}"

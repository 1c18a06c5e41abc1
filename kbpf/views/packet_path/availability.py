# SPDX-License-Identifier: Apache-2.0
"""Whether the packet path is on, and if not, why."""

from collections.abc import Iterator
from typing import Final

import msgspec

from kbpf.model.inspection import Inspection, Part
from kbpf.model.reasons import Reason
from kbpf.model.status import DeviceFailure
from kbpf.views.page import Column, format_facts, format_table, indent

NEEDS: Final = Part.STATUS | Part.PACKETS | Part.FILL

ALARM_SHARE: Final = 0.8
SWITCHED_OFF: Final = "switched off by --packet-path false"


class PacketView(msgspec.Struct, frozen=True):
    """The packet path of one node.

    `state`: ``on``; ``off``; or ``failed``: it should be on but does not work. `reason` explains
    the other two. `forwarding`: ``stack``, ``direct`` or ``netfilter``; with the latter conntrack
    has new connections, which only `created` counts; `fallback`: why --forwarding auto is not
    netfilter. `connections`: open ones. `entries`: including
    closed and expired ones, which stay until their space is needed. `max_connections`: the value of
    --max-connections.

    `alarm`: 80 % of `max_connections` are connections that are not evicted for new ones (unlike
    half-open and closed ones). At the limit new connections are dropped.

    `created`: connections since the counters started. `entries_lost`: how many of them no longer
    have an entry, because it was evicted, or replaced by a new connection from the same client
    port; None if unknown.
    `evicted`: connections in use, normally UDP streams, that were evicted for new ones.
    """

    state: str
    reason: str
    forwarding: str
    fallback: str
    host_devices: int
    pod_devices: int
    failed: tuple[DeviceFailure, ...]
    failed_count: int
    connections: int
    entries: int
    max_connections: int
    alarm: bool
    created: int
    entries_lost: int | None
    evicted: int


def build_view(inspection: Inspection) -> PacketView:
    """Summarises the packet path. Needs all parts of NEEDS."""
    state, reason = packet_path_state(inspection)
    packet_status = inspection.packet_status
    fill, devices = inspection.fill, inspection.devices.values()
    entries = fill.entries if fill else 0
    created = inspection.reasons.get(Reason.NEW_FLOW, 0)
    return PacketView(
        state=state,
        reason=reason,
        forwarding=inspection.node.forwarding,
        fallback=packet_status.fallback if packet_status else "",
        host_devices=sum(device.role == "host" for device in devices),
        pod_devices=sum(device.role == "pod" for device in devices),
        failed=packet_status.failed if packet_status else (),
        failed_count=packet_status.failed_count if packet_status else 0,
        connections=fill.open if fill else 0,
        entries=entries,
        max_connections=fill.max_connections if fill else 0,
        alarm=fill is not None and state == "on" and fill.needed >= ALARM_SHARE * fill.max_connections,
        created=created,
        # If created < entries, the counters are younger than the map: they were reset.
        entries_lost=created - entries if created >= entries and not uses_conntrack(inspection) else None,
        evicted=inspection.reasons.get(Reason.EVICTED, 0),
    )


def packet_path_state(inspection: Inspection) -> tuple[str, str]:
    """``on``, ``off`` or ``failed``, and why it is not on. Needs Part.STATUS and Part.PACKETS.

    Pinned programs keep serving after the agent has exited, so they decide if there is no status.
    """
    packet_status = inspection.packet_status
    if packet_status is not None and packet_status.enabled and packet_status.problem:
        return "failed", packet_status.problem
    if inspection.packet_programs:
        return "on", ""
    if packet_status is None:
        return "off", "no packet programs are pinned"
    return "off", "not attached yet" if packet_status.enabled else SWITCHED_OFF


def uses_conntrack(inspection: Inspection) -> bool:
    """Whether conntrack keeps new connections."""
    return inspection.node.forwarding == "netfilter"


def unavailable_notice(inspection: Inspection) -> str:
    """One line that explains why a view is empty; "" if the packet path is on, and in mode ipvs."""
    if inspection.mode == "ipvs":
        return ""
    state, reason = packet_path_state(inspection)
    return "" if state == "on" else f"the packet path is {state}: {reason}"


FAILURE_COLUMNS: Final = (
    Column("DEVICE-NOT-ATTACHED", "device"),
    Column("REASON", "detail"),
)


def format_parts(view: PacketView) -> Iterator[str]:
    yield "packet path\n" + indent(format_facts(_packet_path_facts(view)))
    if view.failed:
        more = view.failed_count - len(view.failed)
        yield format_table(view.failed, FAILURE_COLUMNS) + (f"\nand {more} more devices" if more > 0 else "")


def _packet_path_facts(view: PacketView) -> Iterator[tuple[str, str]]:
    yield "state", f"{view.state}: {view.reason}" if view.reason else view.state
    if view.state == "off":
        return
    failed_note = f", NOT on {view.failed_count}" if view.failed_count else ""
    yield "forwarding", ": ".join(filter(None, (view.forwarding, view.fallback)))
    yield "devices", f"{view.host_devices} host, {view.pod_devices} pod{failed_note}"
    alarm = " ! raise --max-connections" if view.alarm else ""
    yield "connections", f"{view.connections} of at most {view.max_connections}{alarm}"
    yield "entries", f"{view.entries}, including closed and expired connections"
    lost_note = f"; {view.entries_lost} no longer have an entry" if view.entries_lost else ""
    yield "created", f"{view.created} since the counters started{lost_note}"
    evicted = "connections in use, normally UDP, for new ones"
    yield "evicted", f"{view.evicted} {evicted}" if view.evicted else "0"

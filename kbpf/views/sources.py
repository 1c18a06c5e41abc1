# SPDX-License-Identifier: Apache-2.0
"""Client addresses: loadBalancerSourceRanges, and which clients count as pods of this node."""

from collections.abc import Iterator
from typing import Final

import msgspec

from kbpf.model.inspection import Inspection, Part
from kbpf.model.reasons import Reason
from kbpf.views.packet_path.availability import unavailable_notice
from kbpf.views.page import Column, Kind, Page, format_facts, namespace_of

NEEDS: Final = Part.SERVICES | Part.RANGES | Part.PACKETS | Part.STATUS


class SourcesRow(msgspec.Struct, frozen=True):
    """A Service port whose LoadBalancer VIPs have source ranges. `addresses` are the VIPs.

    `ranges` is empty if no client is allowed. `addresses` is empty if ranges are left in the map of
    a Service port that has no VIPs.
    """

    service: str
    family: int
    ranges: tuple[str, ...]
    addresses: tuple[str, ...]


class SourcesView(msgspec.Struct, frozen=True):
    """`not_allowed`: packets that were dropped because the client is outside the source ranges.
    `left_alone`: connections from sockets of this node to such VIPs, which the socket hooks left to
    the packet path.

    `pods`: how clients are recognised as pods of this node (detectLocalMode), because a ClusterIP
    masquerades all others: by ``devices``, by ``networks``, or "" if no such distinction is made.
    `local_networks`: these networks. `local_devices`: number of devices that lead to pods.
    """

    not_allowed: int
    left_alone: int
    pods: str
    local_networks: tuple[str, ...]
    local_devices: int


def build_view(inspection: Inspection) -> SourcesView:
    """All of the page but its rows."""
    return SourcesView(
        not_allowed=inspection.reasons.get(Reason.NOT_ALLOWED, 0),
        left_alone=inspection.reasons.get(Reason.NEEDS_SOURCE, 0),
        pods=inspection.node.pods,
        local_networks=tuple(map(str, inspection.local_networks)),
        local_devices=sum(device.pods and device.role != "port" for device in inspection.devices.values()),
    )


def build_rows(inspection: Inspection) -> list[SourcesRow]:
    """The Service ports, sorted by name."""
    return sorted(_build_rows(inspection), key=lambda row: (row.service, row.family))


def _build_rows(inspection: Inspection) -> Iterator[SourcesRow]:
    for port in inspection.services:
        vips = sorted(frontend.at for frontend in port.frontends if frontend.restricted)
        if vips or port.source_ranges:
            yield SourcesRow(
                port.text,
                port.key.family if port.key else 0,
                tuple(map(str, port.source_ranges)),
                tuple(map(str, vips)),
            )


COLUMNS: Final = (
    Column("SERVICE", "service"),
    Column("VIPS", "addresses"),
    Column("ALLOWED", lambda r: ", ".join(r.ranges) or "none"),
    Column("FAMILY", lambda r: f"IPv{r.family}" if r.family else "-", wide=True),
)


# ---- the page ------------------------------------------------------------------------------------


KIND: Final = Kind("SourceRangeList", SourcesRow, SourcesView, namespaces=lambda row: namespace_of(row.service))


def build_page(inspection: Inspection) -> Page:
    view = build_view(inspection)
    return Page(
        KIND,
        build_rows(inspection),
        COLUMNS,
        text=lambda wide: format_page(view),
        summary=view,
        notes=(unavailable_notice(inspection),),
    )


def format_page(view: SourcesView) -> str:
    """What source ranges have dropped, and which clients count as pods of this node."""
    return format_facts(
        (
            ("dropped", f"{view.not_allowed} packets from clients outside the source ranges"),
            ("local sockets", f"{view.left_alone} connections left to the packet path"),
            ("local pods", _format_pods(view)),
        )
    )


def _format_pods(view: SourcesView) -> str:
    devices = f"clients behind {view.local_devices} devices"
    if not view.pods:
        return f"{devices}; ClusterIPs do not masquerade other clients"
    if view.pods == "networks":
        return ", ".join(view.local_networks) or "no networks"
    return devices

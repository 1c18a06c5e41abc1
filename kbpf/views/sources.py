# SPDX-License-Identifier: Apache-2.0
"""Client addresses: loadBalancerSourceRanges, and which clients count as pods of this node."""

from collections.abc import Iterable
from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.maps.layout import DeviceFlag, NodeFlag, ServiceFlag
from kbpf.model.address import family_of, format_addr
from kbpf.model.objects import Cidr
from kbpf.model.reasons import Reason
from kbpf.views.backends import format_service
from kbpf.views.columns import Column

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
    services: tuple[SourcesRow, ...]
    pods: str
    local_networks: tuple[str, ...]
    local_devices: int


def format_cidr(cidr: Cidr) -> str:
    """``192.0.2.0/24`` or ``2001:db8::/32``."""
    bits = cidr.bits - 96 if family_of(cidr.address) == 4 and cidr.bits >= 96 else cidr.bits
    return f"{format_addr(cidr.address)}/{bits}"


def build_view(snapshot: Snapshot) -> SourcesView:
    """The whole page, with the Service ports sorted by name."""
    node = snapshot.node
    return SourcesView(
        not_allowed=snapshot.reasons.get(Reason.NOT_ALLOWED, 0),
        left_alone=snapshot.reasons.get(Reason.NEEDS_SOURCE, 0),
        services=tuple(_build_rows(snapshot)),
        pods=_pod_detection(node.flags),
        local_networks=tuple(format_cidr(entry) for entry in snapshot.local_networks),
        local_devices=sum(DeviceFlag.LOCAL in entry.flags for entry in snapshot.devices.values()),
    )


def _pod_detection(flags: NodeFlag) -> str:
    if NodeFlag.DETECTS_LOCAL not in flags:
        return ""
    return "networks" if NodeFlag.LOCAL_NETWORKS in flags else "devices"


def _build_rows(snapshot: Snapshot) -> Iterable[SourcesRow]:
    ranges: dict[int, list[str]] = {}
    for service_id, cidr in snapshot.ranges:
        ranges.setdefault(service_id, []).append(format_cidr(cidr))
    vips: dict[int, list[str]] = {}
    for address, value in sorted(snapshot.frontends.items()):
        if value.flags & ServiceFlag.RESTRICTED:
            vips.setdefault(value.id, []).append(str(address))
    source_rows = []
    for service_id in ranges.keys() | vips.keys():
        key = snapshot.names.get(service_id)
        source_rows.append(
            SourcesRow(
                format_service(key, service_id),
                key.family if key else 0,
                tuple(ranges.get(service_id, ())),
                tuple(vips.get(service_id, ())),
            )
        )
    return sorted(source_rows, key=lambda row: (row.service, row.family))


COLUMNS: Final = (
    Column("SERVICE", lambda r: r.service),
    Column("VIPS", lambda r: ", ".join(r.addresses) or "-"),
    Column("ALLOWED", lambda r: ", ".join(r.ranges) or "none"),
    Column("FAMILY", lambda r: f"IPv{r.family}" if r.family else "-", wide=True),
)

# SPDX-License-Identifier: Apache-2.0
"""Network devices: the role of each in the packet path, the reason for it, and its programs."""

from typing import Final

import msgspec

from kbpf.model.inspection import HostDevice, Inspection, Part
from kbpf.views.packet_path.availability import unavailable_notice
from kbpf.views.page import Column, Kind, Page, same_fields

NEEDS: Final = Part.STATUS | Part.PACKETS | Part.DEVICES


class DeviceRow(msgspec.Struct, frozen=True):
    """A device of this network namespace.

    `role`: ``host`` (leads to other machines), ``pod``, ``port`` (of a bridge: packets that enter
    it) or ``skipped``, and `reason` why.
    `flags`: ``pods`` (its packets come from pods of this node), ``peer`` (bpf_redirect_peer()
    reaches the pod through it), ``tunnel`` (its packets take the stack). `l2_header`: length of its
    link-layer header in bytes, None if the map `devices` does not have it. `ingress` and `egress`:
    the program and how it is attached, "" if there is none. `problem`: how the programs differ from
    what the role needs, or "".
    """

    device: str
    ifindex: int
    kind: str
    role: str
    reason: str
    flags: tuple[str, ...]
    l2_header: int | None
    ingress: str
    egress: str
    problem: str


def build_rows(inspection: Inspection) -> tuple[DeviceRow, ...]:
    """One row per device, sorted by ifindex."""
    failed = inspection.packet_status.failed if inspection.packet_status else ()
    failures = {failure.device: failure.detail for failure in failed}
    return tuple(_build_row(device, inspection, failures.get(device.name, "")) for device in inspection.host_devices)


def _build_row(device: HostDevice, inspection: Inspection, failure: str) -> DeviceRow:
    entry = inspection.devices.get(device.ifindex)
    flags = (("pods", entry.pods), ("peer", entry.peer), ("tunnel", entry.tunnel)) if entry else ()
    return DeviceRow(
        device=device.name,
        flags=tuple(name for name, is_set in flags if is_set),
        l2_header=entry.header if entry else None,
        problem=failure or (_problem(device) if inspection.packet_programs else ""),
        **same_fields(DeviceRow, device),
    )


def _problem(device: HostDevice) -> str:
    programs = (device.ingress, device.egress)
    if device.role == "skipped":
        return "a skipped device should have no program" if any(programs) else ""
    needed = programs[:1] if device.role == "port" else programs
    return "" if all(needed) else "a program is missing"


COLUMNS: Final = (
    Column("DEVICE", "device"),
    Column("ROLE", "role"),
    Column("INGRESS", "ingress"),
    Column("EGRESS", "egress"),
    Column("FLAGS", lambda d: ",".join(d.flags) or "-"),
    Column("L2-HEADER", "l2_header", right=True),
    Column("IFINDEX", "ifindex", wide=True, right=True),
    Column("KIND", "kind", wide=True),
    Column("REASON", "reason"),
    Column("PROBLEM", "problem"),
)


KIND: Final = Kind("DeviceList", DeviceRow, item_name=lambda row: row.device)


def build_page(inspection: Inspection) -> Page:
    return Page(KIND, build_rows(inspection), COLUMNS, notes=(unavailable_notice(inspection),))

# SPDX-License-Identifier: Apache-2.0
"""Network devices: the role of each in the packet path, the reason for it, and its programs."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.maps.layout import DeviceFlag
from kbpf.dataplane.bpf.packet_path.device_roles import DeviceRole, RoleChoice, decide_roles
from kbpf.errors import KernelError, NotFoundError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.tc import Attachment, Direction, TcAttacher
from kbpf.kernel.net.devices import Device, list_devices
from kbpf.kernel.system import netns
from kbpf.views.columns import Column, format_number
from kbpf.views.packet_path.availability import FLAG_NAMES

NEEDS: Final = Part.STATUS | Part.PACKETS


class DeviceRow(msgspec.Struct, frozen=True):
    """A device of this network namespace.

    `role`: ``host`` (leads to other machines), ``pod`` or ``skipped``, and `reason` why.
    `flags`: ``pods`` (its packets come from pods of this node), ``peer`` (bpf_redirect_peer()
    reaches the pod through it). `l2_header`: length of its link-layer header in bytes, None if the
    map `devices` does not have it. `ingress` and `egress`: the program and how it is attached, ""
    if there is none. `problem`: how the programs differ from what the role needs, or "".
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


@dataclass(frozen=True, slots=True)
class HostDevices:
    """The devices in the kernel, our programs on them, and the names of these programs by id."""

    devices: tuple[Device, ...]
    attachments: tuple[Attachment, ...]
    program_names: Mapping[int, str]


def read_host_devices(snapshot: Snapshot) -> HostDevices:
    """Reads the devices of this network namespace. Raises NotFoundError if the agent's is another
    one.
    """
    netns_cookie = netns.read_cookie()
    if snapshot.host_netns and netns_cookie is not None and netns_cookie != snapshot.host_netns:
        raise NotFoundError(
            "the agent's devices are in another network namespace", str(snapshot.pin_dir),
            "run this there: nsenter --net=/proc/PID/ns/net kbpf inspect devices",
        )  # fmt: skip
    with TcAttacher(snapshot.pin_dir / "devices") as tc:
        attachments = tc.list_all()
    program_names = {}
    for program_id in {attachment.program_id for attachment in attachments}:
        with contextlib.suppress(KernelError), objects.open_program_by_id(program_id) as program:
            program_names[program_id] = program.read_info().name
    return HostDevices(list_devices(), attachments, program_names)


def build_rows(snapshot: Snapshot, host_devices: HostDevices) -> tuple[DeviceRow, ...]:
    """One row per device, sorted by ifindex."""
    packet_status = snapshot.status.packets if snapshot.status else None
    choices = decide_roles(
        host_devices.devices,
        packet_status.devices if packet_status else (),
        packet_status.excluded if packet_status else (),
    )
    failures = (
        {failure.device: failure.detail for failure in packet_status.failed}
        if packet_status
        else {}
    )
    return tuple(
        _build_row(
            device, choices[device.ifindex], snapshot, host_devices, failures.get(device.name, "")
        )
        for device in host_devices.devices
    )


def _build_row(
    device: Device, choice: RoleChoice, snapshot: Snapshot, host_devices: HostDevices, failure: str
) -> DeviceRow:
    entry = snapshot.devices.get(device.ifindex)
    flags = entry.flags if entry else DeviceFlag(0)
    programs = {d: _format_programs(host_devices, device.ifindex, d) for d in Direction}
    return DeviceRow(
        device=device.name,
        ifindex=device.ifindex,
        kind=device.kind or ("loopback" if device.loopback else "hardware"),
        role=str(choice.role),
        reason=choice.reason,
        flags=tuple(name for flag, name in FLAG_NAMES.items() if flag in flags),
        l2_header=entry.header if entry else None,
        ingress=programs[Direction.INGRESS],
        egress=programs[Direction.EGRESS],
        problem=failure
        or (_problem(choice, programs.values()) if snapshot.packet_programs else ""),
    )


def _problem(choice: RoleChoice, programs: Iterable[str]) -> str:
    if choice.role is DeviceRole.SKIPPED:
        return "a skipped device should have no program" if any(programs) else ""
    return "" if all(programs) else "a program is missing"


def _format_programs(host_devices: HostDevices, ifindex: int, direction: Direction) -> str:
    matching = [
        a for a in host_devices.attachments if (a.ifindex, a.direction) == (ifindex, direction)
    ]
    return ", ".join(
        f"{host_devices.program_names.get(a.program_id, a.program_id)} ({a.method})"
        for a in matching
    )


COLUMNS: Final = (
    Column("DEVICE", lambda d: d.device),
    Column("ROLE", lambda d: d.role),
    Column("INGRESS", lambda d: d.ingress or "-"),
    Column("EGRESS", lambda d: d.egress or "-"),
    Column("FLAGS", lambda d: ",".join(d.flags) or "-"),
    Column("L2-HEADER", lambda d: format_number(d.l2_header), right=True),
    Column("IFINDEX", lambda d: format_number(d.ifindex), wide=True, right=True),
    Column("KIND", lambda d: d.kind, wide=True),
    Column("REASON", lambda d: d.reason),
    Column("PROBLEM", lambda d: d.problem or "-"),
)

# SPDX-License-Identifier: Apache-2.0
"""Reads the devices of this network namespace and our programs on them."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path.device_roles import decide_roles
from kbpf.dataplane.bpf.programs.unpinned import open_attacher
from kbpf.errors import KernelError, NotFoundError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.tc import Attachment
from kbpf.kernel.net.devices import Device, list_devices
from kbpf.kernel.system import netns
from kbpf.model.inspection import HostDevice
from kbpf.model.status import PacketStatus

NO_PATTERNS: Final = PacketStatus(enabled=False)


def read(pins: Pins, host_netns: int, status: PacketStatus | None) -> tuple[HostDevice, ...]:
    """All devices, sorted by ifindex, with the roles that the patterns in the status give them.
    Raises NotFoundError if the agent is in another network namespace.
    """
    netns_cookie = netns.read_cookie()
    if host_netns and netns_cookie is not None and netns_cookie != host_netns:
        raise NotFoundError(
            "the agent's devices are in another network namespace",
            str(pins.root),
            "run this there: nsenter --net=/proc/PID/ns/net kbpf inspect devices",
        )
    with open_attacher(pins) as tc:
        attachments = tc.list_all()
    names = {}
    for program_id in {attachment.program_id for attachment in attachments}:
        with contextlib.suppress(KernelError), objects.open_program_by_id(program_id) as program:
            names[program_id] = program.read_info().name

    return build(list_devices(), attachments, names, status or NO_PATTERNS)


def build(
    devices: Sequence[Device], attachments: Iterable[Attachment], program_names: Mapping[int, str], status: PacketStatus
) -> tuple[HostDevice, ...]:
    """The devices with these programs. `program_names`: by id."""
    programs: dict[tuple[int, Direction], list[str]] = {}
    for attachment in attachments:
        name = program_names.get(attachment.program_id, attachment.program_id)
        programs.setdefault((attachment.ifindex, attachment.direction), []).append(f"{name} ({attachment.method})")
    choices = decide_roles(devices, status.devices, status.excluded)
    return tuple(
        HostDevice(
            name=device.name,
            ifindex=device.ifindex,
            kind=device.kind or ("loopback" if device.loopback else "hardware"),
            role=str(choices[device.ifindex].role),
            reason=choices[device.ifindex].reason,
            ingress=", ".join(programs.get((device.ifindex, Direction.INGRESS), ())),
            egress=", ".join(programs.get((device.ifindex, Direction.EGRESS), ())),
        )
        for device in devices
    )

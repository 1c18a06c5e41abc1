# SPDX-License-Identifier: Apache-2.0
"""Reads which programs are attached to the socket hooks, from the pinned links, and to the devices of
this network namespace.
"""

import contextlib
import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path.device_roles import decide_roles
from kbpf.dataplane.bpf.programs.unpinned import open_attacher
from kbpf.errors import IgnoredErrnos, KernelError, NotFoundError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Link, LinkInfo, Program, ProgramInfo
from kbpf.kernel.bpf.tc import Attachment
from kbpf.kernel.net.devices import Device, list_devices
from kbpf.kernel.system import mounts, netns
from kbpf.model.inspection import HookEntry, HostDevice
from kbpf.model.status import PacketStatus

# ---- socket hooks --------------------------------------------------------------------------------


def read_hooks(pins: Pins) -> Iterator[HookEntry]:
    """All hooks in the order of hooks.py, including those without a link."""
    pinned_programs = _pinned_programs(pins)
    links: dict[str, LinkInfo] = {}
    for hook in HOOKS:
        if (pin := pins.links / hook.name).exists():
            with Link.open(pin) as link:
                links[hook.name] = link.read_info()
    cgroups = mounts.find_cgroups(info.cgroup_id for info in links.values() if info.cgroup_id)
    for hook in HOOKS:
        entry = HookEntry(hook.name, hook.purpose, hook.required, hook.only_counts, hook.tracepoint)
        if hook.name not in links:
            yield entry
            continue
        info = links[hook.name]
        program = pinned_programs.get(info.program_id) or _read_program(info.program_id)
        cgroup = cgroups.get(info.cgroup_id) if info.cgroup_id else None
        yield replace(
            entry,
            link=info.id,
            program=info.program_id,
            tag=program.tag if program else "",
            instructions=program.insns if program else None,
            pinned=info.program_id in pinned_programs,
            cgroup_id=info.cgroup_id,
            cgroup=str(cgroup.folder) if cgroup else "",
        )


def _pinned_programs(pins: Pins) -> dict[int, ProgramInfo]:
    programs = {}
    for folder in pins.root.glob("programs-*"):
        for pin in folder.iterdir():
            with Program.open(pin) as program:
                info = program.read_info()
            programs[info.id] = info
    return programs


def _read_program(program_id: int) -> ProgramInfo | None:
    with IgnoredErrnos(errno.ENOENT):
        return objects.read_program_info(program_id)
    return None


# ---- devices -------------------------------------------------------------------------------------

NO_PATTERNS: Final = PacketStatus(enabled=False)


def read_devices(pins: Pins, host_netns: int, status: PacketStatus | None) -> tuple[HostDevice, ...]:
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
        with contextlib.suppress(KernelError):
            names[program_id] = objects.read_program_info(program_id).name
    return build_devices(list_devices(), attachments, names, status or NO_PATTERNS)


def build_devices(
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

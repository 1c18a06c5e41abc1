# SPDX-License-Identifier: Apache-2.0
"""Reads from the pinned links and programs which program is attached to each socket hook."""

import errno
from collections.abc import Iterator
from dataclasses import replace

from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Link, LinkInfo, Program, ProgramInfo
from kbpf.kernel.system import mounts
from kbpf.model.inspection import HookEntry


def read(pins: Pins) -> Iterator[HookEntry]:
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
    try:
        with objects.open_program_by_id(program_id) as program:
            return program.read_info()
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return None
        raise

# SPDX-License-Identifier: Apache-2.0
"""Reads from the pinned links and programs which program is attached to each socket hook."""

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Link, Program, ProgramInfo
from kbpf.kernel.system import mounts
from kbpf.model.inspection import HookEntry


def read(pins: Pins) -> Iterator[HookEntry]:
    """All hooks in the order of hooks.py, including those without a link."""
    pinned_programs = _pinned_programs(pins)
    cgroup_paths: dict[int | None, Path | None] = {0: None, None: None}
    for hook in HOOKS:
        entry = HookEntry(hook.name, hook.purpose, hook.required, hook.only_counts, hook.tracepoint)
        pin = pins.links / hook.name
        if not pin.exists():
            yield entry
            continue
        with Link.open(pin) as link:
            info = link.read_info()
        if info.cgroup_id is not None and info.cgroup_id not in cgroup_paths:
            cgroup_paths[info.cgroup_id] = mounts.find_cgroup_by_id(info.cgroup_id)
        program = pinned_programs.get(info.program_id) or _read_program(info.program_id)
        yield replace(
            entry,
            link=info.id,
            program=info.program_id,
            tag=program.tag if program else "",
            instructions=program.insns if program else None,
            pinned=info.program_id in pinned_programs,
            cgroup_id=info.cgroup_id,
            cgroup=str(cgroup_paths[info.cgroup_id] or ""),
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

# SPDX-License-Identifier: Apache-2.0
"""Reads from the pinned links and programs which program is attached to each socket hook."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kbpf.dataplane.bpf.hooks import HOOKS, Hook
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Link, LinkInfo, Program, ProgramInfo
from kbpf.kernel.system import mounts


@dataclass(frozen=True, slots=True)
class HookFacts:
    """The attachment of one hook.

    - `link`: None if no link is pinned. Its `cgroup_id` is 0 if the cgroup was deleted.
    - `program`: None if there is no link, or the program was unloaded.
    - `cgroup`: the path of the cgroup; None if it is not visible in this mount namespace.
    """

    hook: Hook
    link: LinkInfo | None = None
    program: ProgramInfo | None = None
    program_pinned: bool = False
    cgroup: Path | None = None

    @property
    def attached(self) -> bool:
        """Whether the hook runs for sockets."""
        return self.link is not None and self.link.cgroup_id != 0


def read(pins: Pins) -> Iterator[HookFacts]:
    """All hooks in the order of hooks.py, including those without a link."""
    pinned_programs = _pinned_programs(pins)
    cgroup_paths: dict[int, Path | None] = {}
    for hook in HOOKS:
        pin = pins.links / hook.name
        if not pin.exists():
            yield HookFacts(hook)
            continue
        with Link.open(pin) as link:
            info = link.read_info()
        if info.cgroup_id and info.cgroup_id not in cgroup_paths:
            cgroup_paths[info.cgroup_id] = mounts.find_cgroup_by_id(info.cgroup_id)
        pinned_program = pinned_programs.get(info.program_id)
        yield HookFacts(
            hook,
            info,
            pinned_program or _program(info.program_id),
            pinned_program is not None,
            cgroup_paths.get(info.cgroup_id),
        )


def _pinned_programs(pins: Pins) -> dict[int, ProgramInfo]:
    programs = {}
    for folder in pins.root.glob("programs-*"):
        for pin in folder.iterdir():
            with Program.open(pin) as program:
                info = program.read_info()
            programs[info.id] = info
    return programs


def _program(program_id: int) -> ProgramInfo | None:
    try:
        with objects.open_program_by_id(program_id) as program:
            return program.read_info()
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return None
        raise

"""What is attached to each hook, out of the pinned links and programs."""

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
    """What is attached to a hook: nothing (link None), or a program, to the cgroup with a number
    (0: it is gone) and a path (None: not visible from here).
    """

    hook: Hook
    link: LinkInfo | None = None
    program: ProgramInfo | None = None
    program_pinned: bool = False
    cgroup: Path | None = None

    @property
    def attached(self) -> bool:
        """Whether sockets run it."""
        return self.link is not None and self.link.cgroup != 0


def read(pins: Pins) -> Iterator[HookFacts]:
    """Every hook there is, in the order of hooks.py; those without a link too."""
    pinned = _pinned_programs(pins)
    folders: dict[int, Path | None] = {}
    for hook in HOOKS:
        pin = pins.links / hook.name
        if not pin.exists():
            yield HookFacts(hook)
            continue
        with Link.open(pin) as link:
            info = link.info()
        if info.cgroup and info.cgroup not in folders:
            folders[info.cgroup] = mounts.cgroup_by_id(info.cgroup)
        known = pinned.get(info.program)
        yield HookFacts(
            hook,
            info,
            known or _program(info.program),
            known is not None,
            folders.get(info.cgroup),
        )


def _pinned_programs(pins: Pins) -> dict[int, ProgramInfo]:
    found = {}
    for folder in pins.root.glob("programs-*"):
        for pin in folder.iterdir():
            with Program.open(pin) as program:
                info = program.info()
            found[info.id] = info
    return found


def _program(program_id: int) -> ProgramInfo | None:
    try:
        with objects.program_by_id(program_id) as program:
            return program.info()
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return None
        raise

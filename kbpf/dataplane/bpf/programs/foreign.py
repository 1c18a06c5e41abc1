# SPDX-License-Identifier: Apache-2.0
"""Finds programs of other load balancers (Cilium, Calico in eBPF mode) at our hooks. Both decide
about the same connections, and the first one to see a connection wins.

At the socket hooks only load balancers and policies have programs, so all of them are listed. On
devices a CNI may have unrelated programs, so only those of known balancers are. A second kbpf is
not listed: it refuses to start (unpinned.py).
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.programs.unpinned import attached_program_ids, is_kbpf_program
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.tc import TcAttacher
from kbpf.kernel.net.devices import list_devices

SOCKET_HOOKS: Final = frozenset(("connect4", "connect6", "sendmsg4", "sendmsg6"))
BALANCER_PREFIXES: Final = ("cil_", "cali")
"""Name prefixes of the programs of Cilium and Calico."""


class ForeignProgram(NamedTuple):
    """A program by id and name, and where it is attached; `device` is "" for a socket hook."""

    program: int
    name: str
    hook: str
    device: str = ""


def find_at_sockets(cgroup: Path) -> tuple[ForeignProgram, ...]:
    """Foreign programs at the socket hooks of this cgroup."""
    try:
        descriptor = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ()  # missing hooks are reported elsewhere
    try:
        return tuple(
            foreign
            for hook in HOOKS
            if hook.name in SOCKET_HOOKS
            for program in attached_program_ids(descriptor, hook.attach_type)
            if not is_kbpf_program(program, hook.name)
            and (foreign := _describe(program, hook.name))
        )
    finally:
        os.close(descriptor)


def find_at_devices(
    kernel: TcAttacher, devices: Iterable[tuple[int, str]]
) -> tuple[ForeignProgram, ...]:
    """Programs of known balancers on these devices (ifindex, name), in TCX and as filters."""
    return tuple(
        foreign
        for ifindex, name in devices
        for direction in Direction
        for runner in kernel.list_programs(ifindex, direction)
        if not runner.is_ours
        and (foreign := _describe(runner.program_id, direction, name))
        and foreign.name.startswith(BALANCER_PREFIXES)
    )


def find_all(folder: Path, cgroup: Path | None) -> tuple[ForeignProgram, ...]:
    """All foreign programs, for processes other than the agent. `folder`: the pin folder; `cgroup`:
    where the hooks are attached.
    """
    names = {device.ifindex: device.name for device in list_devices()}
    with TcAttacher(folder / "devices") as kernel:
        our_devices = {attachment.ifindex for attachment in kernel.list_all()}
        on_devices = find_at_devices(
            kernel, ((ifindex, names[ifindex]) for ifindex in sorted(our_devices & names.keys()))
        )
    return (*(find_at_sockets(cgroup) if cgroup is not None else ()), *on_devices)


def _describe(program: int, hook: str, device: str = "") -> ForeignProgram | None:
    """None if the program cannot be opened: it was unloaded, or we lack CAP_SYS_ADMIN."""
    try:
        with objects.open_program_by_id(program) as handle:
            return ForeignProgram(program, handle.read_info().name, hook, device)
    except KernelError:
        return None


def format_lines(programs: Collection[ForeignProgram]) -> Iterator[str]:
    """One line for each program name and hook; names the first of several devices."""
    first: dict[tuple[str, str], ForeignProgram] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for program in programs:
        first.setdefault((program.name, program.hook), program)
        counts[program.name, program.hook] += 1
    for key, program in sorted(first.items()):
        location = f"{program.hook} of {program.device}" if program.device else program.hook
        suffix = f" and {counts[key] - 1} more" if counts[key] > 1 else ""
        name = program.name or "without a name"
        yield (
            f"a program of another load balancer is attached: {name} (id {program.program}) at "
            f"{location}{suffix}; both decide about the same connections, so disable one of them"
        )

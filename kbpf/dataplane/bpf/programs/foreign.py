"""Programs of others at the hooks where ours run: another load balancer (Cilium, Calico in eBPF
mode) decides about the same connections, and the first of the two that sees one wins.

At the socket hooks nothing but a balancer or a policy has a program, so each is named. On devices a
CNI may have programs that balance nothing; there only those of known balancers are. A second kbpf
refuses to start (unheld.py) and is not looked for here.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.programs.unpinned import attached, is_ours
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects, tc
from kbpf.kernel.bpf.tc import ATTACH_TYPE, Direction, Tc
from kbpf.kernel.net.devices import list_devices

SOCKET_HOOKS: Final = frozenset(("connect4", "connect6", "sendmsg4", "sendmsg6"))
BALANCERS: Final = ("cil_", "cali")
"""How the names of programs begin: Cilium's, and Calico's."""


class Foreign(NamedTuple):
    """A program, by its id and name, and where it runs; `device` is "" for a socket hook."""

    program: int
    name: str
    hook: str
    device: str = ""


def at_sockets(cgroup: Path) -> tuple[Foreign, ...]:
    """Those at the socket hooks of this cgroup."""
    try:
        descriptor = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ()  # that the hooks are not attached is told
    try:
        return tuple(
            found
            for hook in HOOKS
            if hook.name in SOCKET_HOOKS
            for program in attached(descriptor, hook.attach_type)
            if not is_ours(program, hook.name) and (found := _foreign(program, hook.name))
        )
    finally:
        os.close(descriptor)


def at_devices(kernel: Tc, devices: Iterable[tuple[int, str]]) -> tuple[Foreign, ...]:
    """Those of known balancers on these devices (number, name), in TCX and as filters."""
    listed, links = tuple(devices), tc.tcx().works
    return tuple(
        found
        for number, name in listed
        for direction in Direction
        for program in (
            *(attached(number, ATTACH_TYPE[direction]) if links else ()),
            *kernel.filters_of_others(number, direction),
        )
        if (found := _foreign(program, direction, name)) and found.name.startswith(BALANCERS)
    )


def all_of(folder: Path, cgroup: Path | None) -> tuple[Foreign, ...]:
    """All of them, for who is not the agent. `folder`: of pins; `cgroup`: that is hooked."""
    names = {device.ifindex: device.name for device in list_devices()}
    with Tc(folder / "devices") as kernel:
        ours = {one.ifindex for one in kernel.everything()}
        found = at_devices(kernel, ((n, names[n]) for n in sorted(ours & names.keys())))
    return (*(at_sockets(cgroup) if cgroup is not None else ()), *found)


def _foreign(program: int, hook: str, device: str = "") -> Foreign | None:
    """None: it has ended."""
    try:
        with objects.program_by_id(program) as held:
            return Foreign(program, held.info().name, hook, device)
    except KernelError:
        return None


def lines(found: Collection[Foreign]) -> Iterator[str]:
    """One for each program name and hook; of several devices the first is named."""
    first: dict[tuple[str, str], Foreign] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for one in found:
        first.setdefault((one.name, one.hook), one)
        counts[one.name, one.hook] += 1
    for key, one in sorted(first.items()):
        where = f"{one.hook} of {one.device}" if one.device else one.hook
        more = f" and {counts[key] - 1} more" if counts[key] > 1 else ""
        name = one.name or "without a name"
        yield (
            f"a program of another load balancer is attached: {name} (id {one.program}) at "
            f"{where}{more}; both decide about the same connections, so switch one of them off"
        )

# SPDX-License-Identifier: Apache-2.0
"""Finds programs of other tools at our hooks: those of other load balancers (Cilium, Calico in eBPF
mode), which decide about the same connections, and those that keep packets from ours.

At the socket hooks only load balancers and policies have programs, so all of them are listed. On
devices a CNI may have unrelated programs, so a packet decides (hook_probe.py): of those that do not
keep it from ours, only known balancers and programs of another kbpf are listed. A second kbpf
refuses to start (unpinned.py), unless both started at the same moment.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.programs.hook_probe import ORDER_HINT, HookProber, Point, format_action
from kbpf.dataplane.bpf.programs.unpinned import (
    OwnPrograms,
    is_kbpf_program,
    list_at_cgroup,
    open_attacher,
    serves_already,
)
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.tc import TcAttacher
from kbpf.kernel.net.devices import Device, list_devices

SOCKET_HOOKS: Final = frozenset(("connect4", "connect6", "sendmsg4", "sendmsg6"))
BALANCERS: Final = {
    "cil_sock": "Cilium's socket load balancing",  # cilium/cilium, bpf/bpf_sock.c
    "cali": "Calico's eBPF mode",  # projectcalico/calico, felix/bpf-gpl
}
"""Name prefixes of programs that translate Services, and whose they are. Calico has programs only
in its eBPF mode. Those of Cilium on devices (`cil_from_netdev`) say nothing: it has them also as a
CNI beside a kube-proxy."""
SWITCH_OFF_HINT: Final = (
    "switch it off (Cilium: kubeProxyReplacement false and socketLB.enabled false; Calico: "
    "linuxDataplane Iptables or Nftables) and restart its agent, or do not run kbpf on this node; "
    "docs/clusters.md"
)


class ForeignProgram(NamedTuple):
    """A program by id and name, and where it is attached; `device` is "" for a socket hook. A
    filter of another kind has id 0 and is named as in tc(8). `is_ahead`: it is no load balancer,
    but runs before ours. `result`: what it returned for a packet that ours did not see because of
    it; None if there is no such packet. `is_kbpf`: it belongs to another kbpf.
    """

    program: int
    name: str
    hook: str
    device: str = ""
    is_ahead: bool = False
    result: int | None = None
    is_kbpf: bool = False


def find_at_sockets(pins: Pins, cgroup: Path) -> tuple[ForeignProgram, ...]:
    """Foreign programs at the socket hooks of this cgroup."""
    own = OwnPrograms(pins)
    return tuple(
        foreign._replace(is_kbpf=is_kbpf_program(program, hook))
        for hook, program in list_at_cgroup(cgroup)
        if hook in SOCKET_HOOKS
        if not own.contains(program) and (foreign := _describe(program, hook))
    )


def find_at_devices(
    kernel: TcAttacher, devices: Iterable[Device], prober: HookProber | None = None
) -> tuple[ForeignProgram, ...]:
    """Programs of known balancers on these devices, and programs and filters before ours, except
    for those that let the prober's packet pass.
    """
    return tuple(
        foreign
        for device in devices
        for direction in Direction
        for foreign in _find_at_hook(Point(device, direction, kernel.list_programs(device.ifindex, direction)), prober)
    )


def _find_at_hook(point: Point, prober: HookProber | None) -> Iterator[ForeignProgram]:
    outcome = prober.read(point) if prober is not None else None
    has_ours = any(runner.is_ours for runner in point.programs)
    suspects = point.before_ours if has_ours and not (outcome and outcome.reached) else ()
    for runner in point.programs:
        if runner.is_ours:
            continue
        program = _describe(runner.program_id, point.direction, point.device.name)
        if not runner.program_id and runner in suspects:
            program = ForeignProgram(0, runner.place, point.direction, point.device.name)
        if program is None:
            continue
        name = f"tc_{point.direction}"
        if program.name == name and is_kbpf_program(runner.program_id, name):
            yield program._replace(is_kbpf=True)
        elif outcome is not None and outcome.taker == runner:
            yield program._replace(is_ahead=runner in suspects, result=outcome.result)
        elif _find_owner(program):
            yield program
        elif runner in suspects:
            yield program._replace(is_ahead=True)


def refuse_balancers(pins: Pins, cgroup: Path) -> None:
    """Raises KernelError if another load balancer serves Services on this node, unless programs of
    ours are attached already: those would not be updated any more.
    """
    if not serves_already(pins) and (error := find_balancer(pins, cgroup)):
        raise error


def find_balancer(pins: Pins, cgroup: Path) -> KernelError | None:
    """The error that names another load balancer which serves Services on this node."""
    program = next(_find_refused(pins, cgroup), None)
    if program is None:
        return None
    location = f"{program.hook} of {program.device or cgroup}"
    return KernelError(
        "another load balancer serves Services on this node",
        f"{_find_owner(program)}: program {program.name} (id {program.program}) at {location}",
        SWITCH_OFF_HINT,
    )


def _find_refused(pins: Pins, cgroup: Path) -> Iterator[ForeignProgram]:
    yield from filter(_find_owner, find_at_sockets(pins, cgroup))
    with open_attacher(pins) as kernel:
        yield from filter(_find_owner, find_at_devices(kernel, list_devices()))


def _find_owner(program: ForeignProgram) -> str:
    """Whose load balancer this program is part of; "" if it is not known to be one."""
    owners = (whose for prefix, whose in BALANCERS.items() if program.name.startswith(prefix))
    return next(owners, "")


def find_all(folder: Path, cgroup: Path | None) -> tuple[ForeignProgram, ...]:
    """All foreign programs, for processes other than the agent. `folder`: the pin folder; `cgroup`:
    where the hooks are attached.
    """
    pins = Pins(folder)
    with open_attacher(pins) as kernel:
        ours = {attachment.ifindex for attachment in kernel.list_all()}
        on_devices = find_at_devices(kernel, (device for device in list_devices() if device.ifindex in ours))
    return (*(find_at_sockets(pins, cgroup) if cgroup is not None else ()), *on_devices)


def program_name(program: int) -> str:
    """ "" if it has none, or cannot be opened: it was unloaded, or we lack CAP_SYS_ADMIN."""
    described = _describe(program, "")
    return described.name if described is not None else ""


def _describe(program: int, hook: str, device: str = "") -> ForeignProgram | None:
    """None if the program cannot be opened: it was unloaded, or we lack CAP_SYS_ADMIN."""
    try:
        return ForeignProgram(program, objects.read_program_info(program).name, hook, device)
    except KernelError:
        return None


def format_lines(programs: Collection[ForeignProgram]) -> Iterator[str]:
    """One line for each program name and hook; names the first of several devices."""
    first: dict[tuple[str, str, bool, int, bool], ForeignProgram] = {}
    counts: Counter[tuple[str, str, bool, int, bool]] = Counter()
    for program in programs:
        kind = (program.name, program.hook, program.is_ahead, program.result or 0, program.is_kbpf)
        first.setdefault(kind, program)
        counts[kind] += 1
    for key, program in sorted(first.items()):
        location = f"{program.hook} of {program.device}" if program.device else program.hook
        suffix = f" and {counts[key] - 1} more" if counts[key] > 1 else ""
        name = program.name or "without a name"
        if program.is_kbpf:
            yield (
                f"another kbpf is attached: {name} (id {program.program}) at {location}{suffix}; "
                "both translate the same connections, so stop one of them; `kbpf check` shows its "
                "pin folder"
            )
            continue
        if program.result is not None:
            action = format_action(program.result)
            yield (
                f"{name} (id {program.program}) runs before kbpf's program at {location}{suffix} "
                f"and returned {action} for a test packet, so kbpf's program did not see it; "
                f"{ORDER_HINT}"
            )
            continue
        if program.is_ahead:
            number = f" (id {program.program})" if program.program else ""
            yield (
                f"{name}{number} runs before kbpf's program at {location}{suffix}; if it ends the "
                "list there, kbpf sees no packet: `kbpf check --attached` tries it"
            )
            continue
        yield (
            f"a program of another load balancer is attached: {name} (id {program.program}) at "
            f"{location}{suffix}; both decide about the same connections, so disable one of them"
        )

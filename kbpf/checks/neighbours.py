# SPDX-License-Identifier: Apache-2.0
"""Checks for others that serve Services on this node, or keep packets from our programs: a
kube-proxy and what it left, programs of other load balancers, programs and filters on devices.

What a program on a device does is tried with a packet (hook_probe.py): its place says little.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from kbpf.checks.row import Check, CheckRow, make_row
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.packet_path.device_roles import DeviceRole, decide_roles
from kbpf.dataplane.bpf.programs import foreign, hook_probe, unpinned
from kbpf.dataplane.bpf.programs.hook_probe import ORDER_HINT, Point, ProbeOutcome
from kbpf.errors import KbpfError, KernelError
from kbpf.kernel.bpf import syscalls
from kbpf.kernel.bpf.tc import Runner
from kbpf.kernel.net.devices import list_devices
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import mounts, netns
from kbpf.model.address import Addr, family_of
from kbpf.model.desired import FrontendKind
from kbpf.model.inspection import Inspection
from kbpf.takeover import detect
from kbpf.takeover.kube_proxy_cleanup import MARK_CHAIN

CNI_FOLDER: Final = Path("/etc/cni/net.d")


def kube_proxy_row() -> CheckRow:
    """Whether a kube-proxy runs on this node, or has left rules."""
    state = detect.find_kube_proxy()
    line, advice = detect.describe(state)
    works = None if state.unreadable else not line
    detail = line or state.unreadable or "none runs here, and none has left rules"
    return make_row(Check.KUBE_PROXY, Probe(works, detail), advice)


def mark_chain_rows(folder: Path = CNI_FOLDER) -> Iterator[CheckRow]:
    """Yields a row if the CNI plugin portmap needs a chain of kube-proxy. The agent's pod does not see the CNI's
    configuration, which may contain credentials.
    """
    try:
        files = [path for path in sorted(folder.iterdir()) if path.is_file()]
        names = [str(path) for path in files if MARK_CHAIN in path.read_text(errors="replace")]
    except OSError:
        return
    if names:
        what = f"kube-proxy's chain {MARK_CHAIN}: without it, pods with hostPorts do not start"
        advice = "remove externalSetMarkChain there: the plugin then has a chain of its own"
        yield CheckRow(Check.KUBE_PROXY, "no", f"{', '.join(names)} names {what}", advice)


def refusal_rows(pin_dir: Path, cgroup: Path | None, packet_path: bool = True) -> Iterator[CheckRow]:
    """Yields whether another load balancer or another kbpf serves Services on this node. Then kbpf
    refuses to start, unless it serves already. `packet_path`: whether it will have one.
    """
    reason = "" if syscalls.may_open_by_id() else "needs CAP_SYS_ADMIN to see programs of others"
    try:
        root = cgroup or mounts.find_cgroup_root()
    except KernelError as error:
        reason = str(error)
    if reason:
        for check in (Check.BALANCERS, Check.OTHER_KBPF):
            yield make_row(check, Probe(None, reason))
        return
    yield balancer_row(pin_dir, root)
    yield other_kbpf_row(pin_dir, root, packet_path)


def balancer_row(pin_dir: Path, cgroup: Path) -> CheckRow:
    pins = pinning.Pins(pin_dir)
    error = foreign.find_balancer(pins, cgroup)
    if error is None:
        return CheckRow(Check.BALANCERS, "yes", "none at kbpf's hooks", needed=True)
    return _refusal_row(Check.BALANCERS, error, pins)


def other_kbpf_row(pin_dir: Path, cgroup: Path, packet_path: bool = True) -> CheckRow:
    pins = pinning.Pins(pin_dir)
    programs = unpinned.find_lasting(pins, cgroup, packet_path)
    if not programs:
        devices = " and the devices of this network namespace" if packet_path else ""
        return CheckRow(Check.OTHER_KBPF, "yes", f"none at {cgroup}{devices}", needed=True)
    return _refusal_row(Check.OTHER_KBPF, unpinned.describe_unpinned(programs, pin_dir), pins)


def _refusal_row(check: Check, error: KbpfError, pins: pinning.Pins) -> CheckRow:
    detail, is_serving = f"{error.what} ({error.where})", unpinned.serves_already(pins)
    if is_serving:
        detail += "; this kbpf serves as well, so both decide about the same connections"
    return CheckRow(check, "no", detail, error.hint, needed=not is_serving)


def foreign_rows(inspection: Inspection) -> Iterator[CheckRow]:
    """Yields a row for each program of another load balancer at the same hooks."""
    cgroup = next((Path(f.cgroup) for f in inspection.hooks if f.attached and f.cgroup), None)
    for line in foreign.format_lines(foreign.find_all(Path(inspection.location), cgroup)):
        yield CheckRow(Check.FOREIGN_PROGRAMS, "no", line, "see docs/troubleshoot.md")


_packet_row: Final = partial(CheckRow, needed=True)


def packet_rows(inspection: Inspection) -> Iterator[CheckRow]:
    """Yields whether packets reach our programs: a row for each hook that they do not reach, or one
    for all. Nothing if the packet path is off.
    """
    if not inspection.packet_programs:
        return
    cookie = netns.read_cookie()
    if inspection.host_netns and cookie is not None and cookie != inspection.host_netns:
        reason = "the agent's devices are in another network namespace"
        yield _packet_row(Check.PACKETS, "unknown", reason, "run it on the host")
        return
    try:
        outcomes = tuple(_probe_devices(inspection))
    except KernelError as error:
        yield _packet_row(Check.PACKETS, "unknown", str(error), error.hint)
        return
    missed = [outcome for outcome in outcomes if not outcome.reached]
    devices = {outcome.point.device.name for outcome in outcomes}
    if not outcomes:
        advice = "see `kbpf inspect devices` and the agent's log"
        yield _packet_row(Check.PACKETS, "no", "no device has kbpf's programs", advice)
    elif not missed:
        detail = f"kbpf's programs see them at ingress and egress; tried on {len(devices)} devices"
        yield _packet_row(Check.PACKETS, "yes", detail)
    for outcome in missed:
        where = f"{outcome.point.direction} of {outcome.point.device.name}"
        yield _packet_row(Check.PACKETS.of(where), "no", describe_outcome(outcome), advise(outcome))


def _probe_devices(inspection: Inspection) -> Iterator[ProbeOutcome]:
    devices = list_devices()
    host = [ifindex for ifindex, choice in decide_roles(devices).items() if choice.role is DeviceRole.HOST]
    pins = pinning.Pins(Path(inspection.location))
    targets = _select_targets(inspection)
    with unpinned.open_attacher(pins) as kernel, pins.open_map("fragments") as fragments:
        points = hook_probe.list_points(kernel, devices)
        names = _read_names(points)
        for point in hook_probe.select_representative(points, names, host):
            for address, port in targets:
                outcome = hook_probe.probe(fragments, point, address, port)
                if not outcome.reached or (address, port) == targets[-1]:
                    yield outcome
                if not outcome.reached:
                    break  # the other family would say the same


def _select_targets(inspection: Inspection) -> tuple[tuple[Addr, int], ...]:
    """What clients from outside dial: for each family an address of the node, and a NodePort."""
    node_ports = {
        family_of(frontend.at.address): frontend.at.port
        for port in inspection.services
        for frontend in port.frontends
        if frontend.kind is FrontendKind.NODE_PORT
    }
    addresses = inspection.node.addresses or (hook_probe.FRONTEND4,)
    return tuple((Addr(address), node_ports.get(family_of(address), hook_probe.FRONTEND_PORT)) for address in addresses)


def _read_names(points: Iterable[Point]) -> dict[int, str]:
    ids = {runner.program_id for point in points for runner in point.programs}
    return {program_id: foreign.program_name(program_id) for program_id in ids if program_id}


def describe_outcome(outcome: ProbeOutcome) -> str:
    """Why kbpf's program did not see the packet."""
    if outcome.taker is not None:
        action = hook_probe.format_action(outcome.result)
        return (
            f"{_describe_runner(outcome.taker)} runs before kbpf's program and returned "
            f"{action}, so kbpf's program did not see the packet"
        )
    before = ", ".join(map(_describe_runner, outcome.point.before_ours))
    return f"kbpf's program did not see the packet; before it: {before or 'nothing'}"


def advise(outcome: ProbeOutcome) -> str:
    """What to do where kbpf's program did not see the packet."""
    if outcome.taker is not None or outcome.point.before_ours:
        return ORDER_HINT
    device = outcome.point.device.name
    return (
        f"if the row {Check.OTHER_KBPF} shows another kbpf, stop one of the two; otherwise see "
        f"whether the device drops packets: ip -s link show {device}"
    )


def _describe_runner(runner: Runner) -> str:
    if not runner.program_id:
        return runner.place
    name = foreign.program_name(runner.program_id) or "a program"
    return f"{name} (id {runner.program_id}, {runner.place})"

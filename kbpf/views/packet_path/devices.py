"""Network devices: which part each plays for the packet path, why, and what it runs."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.maps.layout import DeviceFlag
from kbpf.dataplane.bpf.packet_path.device_roles import Choice, Role, decide
from kbpf.errors import KernelError, NotFoundError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.tc import Attachment, Direction, Tc
from kbpf.kernel.net.devices import Device, list_devices
from kbpf.kernel.system import netns
from kbpf.views.columns import Column, number
from kbpf.views.packet_path.availability import FLAGS

NEEDS: Final = Part.STATUS | Part.PACKETS


class DeviceRow(msgspec.Struct, frozen=True):
    """A device of this network namespace.

    `role`: what it is by its kind: ``host`` (to other machines), ``pod``, or ``skipped``; `why`.
    `flags`: ``pods`` (what comes in here comes from pods of this node), ``peer`` (packets are put
    straight into the pod behind it). `header`: bytes of its link header; None when the programs do
    not know the device. `ingress` and `egress`: the program there and the way it is attached, ""
    if there is none. `problem`: what is not as its role asks for.
    """

    device: str
    ifindex: int
    kind: str
    role: str
    why: str
    flags: tuple[str, ...]
    header: int | None
    ingress: str
    egress: str
    problem: str


@dataclass(frozen=True, slots=True)
class Found:
    """What the kernel has: devices, and programs of ours on them with their names by id."""

    devices: tuple[Device, ...]
    attached: tuple[Attachment, ...]
    names: Mapping[int, str]


def look(snapshot: Snapshot) -> Found:
    """Reads it. NotFoundError outside of the network namespace of the agent."""
    here = netns.cookie()
    if snapshot.host_netns and here is not None and here != snapshot.host_netns:
        raise NotFoundError(
            "the agent's devices are in another network namespace", str(snapshot.pin_dir),
            "run it there: nsenter --net=/proc/PID/ns/net kbpf inspect devices",
        )  # fmt: skip
    with Tc(snapshot.pin_dir / "devices") as tc:
        attached = tc.everything()
    names = {}
    for program_id in {one.program for one in attached}:
        with contextlib.suppress(KernelError), objects.program_by_id(program_id) as program:
            names[program_id] = program.info().name
    return Found(list_devices(), attached, names)


def rows(snapshot: Snapshot, found: Found) -> tuple[DeviceRow, ...]:
    """Every device, by its number."""
    said = snapshot.status.packets if snapshot.status else None
    choices = decide(found.devices, said.devices if said else (), said.excluded if said else ())
    failed = {one.device: one.why for one in said.failed} if said else {}
    return tuple(
        _row(device, choices[device.ifindex], snapshot, found, failed.get(device.name, ""))
        for device in found.devices
    )


def _row(
    device: Device, choice: Choice, snapshot: Snapshot, found: Found, failed: str
) -> DeviceRow:
    told = snapshot.devices.get(device.ifindex)
    flags = told.flags if told else DeviceFlag(0)
    on = {d: _programs(found, device.ifindex, d) for d in Direction}
    return DeviceRow(
        device=device.name,
        ifindex=device.ifindex,
        kind=device.kind or ("loopback" if device.loopback else "hardware"),
        role=str(choice.role),
        why=choice.why,
        flags=tuple(word for flag, word in FLAGS.items() if flag in flags),
        header=told.header if told else None,
        ingress=on[Direction.INGRESS],
        egress=on[Direction.EGRESS],
        problem=failed or (_problem(choice, on.values()) if snapshot.packet_programs else ""),
    )


def _problem(choice: Choice, on: Iterable[str]) -> str:
    if choice.role is Role.SKIPPED:
        return "it should have no program" if any(on) else ""
    return "" if all(on) else "a program is missing"


def _programs(found: Found, ifindex: int, direction: Direction) -> str:
    here = [a for a in found.attached if (a.ifindex, a.direction) == (ifindex, direction)]
    return ", ".join(f"{found.names.get(a.program, a.program)} ({a.how})" for a in here)


COLUMNS: Final = (
    Column("DEVICE", lambda d: d.device),
    Column("ROLE", lambda d: d.role),
    Column("INGRESS", lambda d: d.ingress or "-"),
    Column("EGRESS", lambda d: d.egress or "-"),
    Column("FLAGS", lambda d: ",".join(d.flags) or "-"),
    Column("HEADER", lambda d: number(d.header), right=True),
    Column("IFINDEX", lambda d: number(d.ifindex), wide=True, right=True),
    Column("KIND", lambda d: d.kind, wide=True),
    Column("WHY", lambda d: d.why),
    Column("PROBLEM", lambda d: d.problem or "-"),
)

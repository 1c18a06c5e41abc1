# SPDX-License-Identifier: Apache-2.0
"""Attaches the packet programs to the chosen devices, and detaches them from all others.

A pass has five stages. Each goes through all devices:

    swap     replace the attached programs by the current ones: 0.1 ms per device
    pod      attach to pod devices without programs: 25 ms per device (kernel/bpf/tc.py says why)
    host     attach to host devices without programs
    port     attach to ports of bridges, which by now have programs themselves
    remove   detach from devices that are no longer chosen

In this order, urgent and quick work does not wait for slow work. Pod devices come before host
devices, because a connection from outside enters by a host device and is masqueraded at egress of
its pod's device. If the pod device got its programs later, the pod would first see the client's
address and then the node's, and the connection would break.
"""

import logging
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Final

from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path.device_roles import (
    DeviceRole,
    Newcomers,
    RoleChoice,
    decide_roles,
    describe_limited,
    directions_of,
)
from kbpf.dataplane.bpf.programs.foreign import ForeignProgram, find_at_devices
from kbpf.dataplane.bpf.programs.hook_probe import HookProber
from kbpf.dataplane.bpf.programs.unpinned import open_attacher
from kbpf.errors import KernelError
from kbpf.kernel.bpf.clsact import DEFAULT_IDENTITY, Direction, FilterIdentity
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.bpf.tc import Attachment, AttachMethod, TcAttacher
from kbpf.kernel.net.devices import Device

log = logging.getLogger("kbpf.dataplane")

PickProgram = Callable[[Device, DeviceRole, Direction], Program | None]
"""Returns the program for this device and direction; None if no program belongs there."""

AttachPoint = tuple[int, Direction]
"""ifindex and direction."""

MAX_MOVES: Final = 3
MOVE_PERIOD_S: Final = 3600.0
"""If another program was attached before ours, ours is moved before it, but only MAX_MOVES times in
MOVE_PERIOD_S: that program may do the same, and each move costs time."""


class Stage(IntEnum):
    """The stages of a pass, in order."""

    SWAP = 0
    POD = 1
    HOST = 2
    PORT = 3
    REMOVE = 4
    COMPLETE = 5


STAGE_ROLES: Final = {
    Stage.POD: DeviceRole.POD,
    Stage.HOST: DeviceRole.HOST,
    Stage.PORT: DeviceRole.PORT,
}

ShouldContinue = Callable[[Stage, Collection[str]], bool]
"""Called before each device of a stage, and at the end with COMPLETE; False ends the pass. The
second argument names the devices whose swap failed: they still run older programs."""

DescribeDevices = Callable[[tuple[Device, ...], Mapping[int, RoleChoice], Collection[int]], None]
"""Called with the devices, their roles, and the ifindexes of those that have a role but not our
program at egress: before anything is attached, and again if the last changed."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one sync() did, and the resulting state.

    - `choices`: the role of each device, by ifindex.
    - `attachments`: all attachments of ours.
    - `failed`: device name → reason. Such a device keeps what it had and is retried by the next
      sync().
    - `complete`: whether the pass went through all stages.
    - `waiting`: whether new devices get their programs later (Newcomers).
    - `foreign`: programs of other load balancers on the same devices, as of the last full sync().
    - `outdated`: devices among `failed` on which a program is attached that does not belong there.
    - `limited`: pod devices without our program at egress, since an "ingress" qdisc has its place.
    """

    choices: Mapping[int, RoleChoice] = field(default_factory=dict)
    attachments: tuple[Attachment, ...] = ()
    added: int = 0
    replaced: int = 0
    removed: int = 0
    moved: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True
    waiting: bool = False
    foreign: tuple[ForeignProgram, ...] = ()
    outdated: frozenset[str] = frozenset()
    limited: tuple[str, ...] = ()

    @property
    def has_changes(self) -> bool:
        """Whether the sync() attached, replaced, moved or detached anything."""
        return bool(self.added or self.replaced or self.removed or self.moved)


class DeviceAttachments:
    """The attachments of one agent on the devices of the caller's network namespace. Called by one
    thread.

    Pins are in `<pin_dir>/devices/`: `<ifindex>-<direction>` for a TCX link, and an empty folder
    `<ifindex>-clsact` for a qdisc that we created. A full sync() reads all attachments from the
    kernel, so it finds those of an earlier agent and restores those that another program removed.
    """

    def __init__(
        self,
        pin_dir: Path,
        patterns: tuple[str, ...] = (),
        excluded: tuple[str, ...] = (),
        method: AttachMethod | None = None,
        mark: FilterIdentity = DEFAULT_IDENTITY,
    ) -> None:
        self._pins = Pins(pin_dir)
        self._folder = pin_dir / "devices"
        self._patterns = patterns
        self._excluded = excluded
        self._method = method
        self._mark = mark
        self._attachments: dict[AttachPoint, tuple[Attachment, ...]] | None = None
        self._moves: dict[AttachPoint, deque[float]] = {}  # the times of the last ones
        self._newcomers = Newcomers()
        self.prober: HookProber | None = None
        """Tries whether packets reach our programs; None: nothing is tried."""
        self._report = DeviceReport()

    def status(self) -> DeviceReport:
        """The report of the last sync(); empty before the first."""
        return self._report

    def decide_roles(self, devices: Iterable[Device]) -> Mapping[int, RoleChoice]:
        """The roles of these devices under the operator's patterns, by ifindex."""
        return decide_roles(devices, self._patterns, self._excluded)

    def sync(
        self,
        devices: Iterable[Device],
        pick: PickProgram,
        removed_devices: Collection[int] | None = None,
        should_continue: ShouldContinue = lambda *_: True,
        describe: DescribeDevices = lambda *_: None,
    ) -> DeviceReport:
        """Attaches, replaces and detaches until every device in this listing has the programs
        that `pick` returns for its role, and no others of ours.

        `removed_devices`: the ifindexes deleted since the last call. An ifindex may have been
        reused, so the listing alone does not show this. None: read all attachments from the kernel
        instead of relying on memory (a full sync). An error at one device is reported and does not
        stop the others. Raises KernelError if nothing can be read at all.
        """
        listing = tuple(devices)
        choices = self.decide_roles(listing)
        with open_attacher(self._pins, self._method, self._mark) as tc:
            attachments = self._read_attachments(tc, removed_devices, choices)
            self._moves = {point: self._moves[point] for point in self._moves if point in attachments}
            waiting = self._newcomers.find_waiting(listing, choices, tc.method)
            sync_pass = _SyncPass(tc, attachments, pick, choices, self._moves, waiting)
            self._attachments = None  # if this pass fails, the next one reads from the kernel
            no_egress = sync_pass.find_no_egress()
            describe(listing, choices, no_egress)
            complete = sync_pass.run(listing, should_continue)
            if no_egress != (no_egress := sync_pass.find_no_egress()):
                describe(listing, choices, no_egress)
            foreign = self._report.foreign
            if removed_devices is None:
                foreign = self._find_foreign(tc, listing, sync_pass)
        if not sync_pass.failed:
            self._attachments = sync_pass.attachments
        self._log_news(sync_pass)
        self._report = DeviceReport(
            choices,
            sync_pass.all_attachments,
            **sync_pass.counts,
            failed=sync_pass.failed,
            complete=complete,
            waiting=bool(waiting),
            foreign=foreign,
            outdated=frozenset(sync_pass.outdated),
            limited=tuple(sorted(sync_pass.limited)),
        )
        return self._report

    def _find_foreign(
        self, tc: TcAttacher, listing: Iterable[Device], sync_pass: "_SyncPass"
    ) -> tuple[ForeignProgram, ...]:
        """Others' programs on the devices that have ours."""
        ours = {attachment.ifindex for attachment in sync_pass.all_attachments}
        if self.prober is not None:
            self.prober.begin_pass(sync_pass.choices)
        at_devices = find_at_devices(tc, (device for device in listing if device.ifindex in ours), self.prober)
        # the filter of a limit is no program, and it is known what it does
        return tuple(runner for runner in at_devices if runner.program or runner.device not in sync_pass.limited)

    def _log_news(self, sync_pass: "_SyncPass") -> None:
        """Logs what the last report does not have."""
        for name in sorted(sync_pass.failed.keys() - self._report.failed.keys()):
            log.warning(
                "cannot update the packet programs device=%s error=%r",
                name,
                sync_pass.failed[name],
            )
        if sync_pass.limited and not self._report.limited:  # later ones of the node are not news
            log.warning("%s", describe_limited(tuple(sorted(sync_pass.limited))))
        if sync_pass.counts:
            log.info(
                "packet programs changed on devices %s",
                " ".join(f"{action}={count}" for action, count in sorted(sync_pass.counts.items())),
            )

    def _read_attachments(
        self, tc: TcAttacher, removed_devices: Collection[int] | None, present: Collection[int]
    ) -> dict[AttachPoint, tuple[Attachment, ...]]:
        """Our attachments: remembered ones except those on removed devices, or read from the
        kernel.
        """
        attachments = self._attachments
        if attachments is not None and removed_devices is not None:
            removed = {index for index, _ in attachments if index not in present} | set(removed_devices)
            if removed:
                tc.sweep(removed)
            return {point: at_point for point, at_point in attachments.items() if point[0] not in removed}
        tc.sweep()
        by_point: dict[AttachPoint, tuple[Attachment, ...]] = {}
        for attachment in tc.list_all():
            point = attachment.ifindex, attachment.direction
            by_point[point] = (*by_point.get(point, ()), attachment)
        return by_point

    def list_all(self) -> tuple[Attachment, ...]:
        """Everything of ours on all devices."""
        with open_attacher(self._pins, self._method, self._mark) as tc:
            return tc.list_all()

    def remove(self) -> tuple[Attachment, ...]:
        """Detaches everything of ours from all devices; returns what was attached. If one cannot
        be detached, detaches the others first and then raises KernelError.
        """
        self._attachments = None
        errors = []
        with open_attacher(self._pins, self._method, self._mark) as tc:
            attachments = tc.list_all()
            for attachment in attachments:
                try:
                    tc.detach(attachment)
                except KernelError as error:
                    errors.append(error)
            tc.sweep()
        if errors:
            raise errors[0]
        # Only markers of qdiscs that other programs use by now may be left.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._report = DeviceReport()
        return tuple(attachments)


class _SyncPass:
    """The state of one sync(): our attachments by attach point, and what was done so far."""

    def __init__(
        self,
        tc: TcAttacher,
        attachments: dict[AttachPoint, tuple[Attachment, ...]],
        pick: PickProgram,
        choices: Mapping[int, RoleChoice],
        moves: dict[AttachPoint, deque[float]],
        waiting: Collection[int],
    ) -> None:
        self._tc = tc
        self._pick = pick
        self._moves = moves
        self._waiting = waiting
        self.choices = choices
        self.attachments = attachments
        self.counts: Counter[str] = Counter()
        self.failed: dict[str, str] = {}
        self.not_swapped: set[str] = set()
        self.outdated: set[str] = set()
        self.limited: set[str] = set()
        self._vanished: set[int] = set()
        self._ids: dict[int, int] = {}  # by descriptor, since reading an id is a system call

    @property
    def all_attachments(self) -> tuple[Attachment, ...]:
        return tuple(attachment for point in sorted(self.attachments) for attachment in self.attachments[point])

    def find_no_egress(self) -> frozenset[int]:
        """The devices that our program at egress belongs to and is not attached to."""
        return frozenset(
            index
            for index, choice in self.choices.items()
            if Direction.EGRESS in directions_of(choice.role) and not self.attachments.get((index, Direction.EGRESS))
        )

    def run(self, listing: Collection[Device], should_continue: ShouldContinue) -> bool:
        """Runs the stages until `should_continue` returns False; returns whether all were run."""
        for stage in Stage:
            for device in listing:
                if device.name in self.failed or not self._has_work_in(device, stage):
                    continue
                if not should_continue(stage, self.not_swapped):
                    return False
                try:
                    for direction in Direction:
                        self._sync_device(device, direction)
                except KernelError as error:
                    self.failed[device.name] = str(error)
                    if self._runs_old_program(device):
                        self.outdated.add(device.name)
                        if stage is Stage.SWAP:
                            self.not_swapped.add(device.name)
        return should_continue(Stage.COMPLETE, self.not_swapped)

    def _has_work_in(self, device: Device, stage: Stage) -> bool:
        """Whether this stage concerns this device."""
        if device.ifindex in self._vanished:
            return False
        role = self.choices[device.ifindex].role
        current = {direction: self.attachments.get((device.ifindex, direction), ()) for direction in Direction}
        is_complete = all(current[direction] for direction in directions_of(role))
        match stage:
            case Stage.SWAP:
                return role is not DeviceRole.SKIPPED and any(current.values())
            case Stage.POD | Stage.HOST | Stage.PORT:
                is_due = device.ifindex not in self._waiting
                return role is STAGE_ROLES[stage] and not is_complete and is_due
            case Stage.REMOVE:
                return role is DeviceRole.SKIPPED and any(current.values())
            case _:
                return False

    def _runs_old_program(self, device: Device) -> bool:
        """Whether a program is attached there that `pick` would not choose now."""
        for direction in Direction:
            program = self._choose_program(device, direction)
            desired_id = None if program is None else self._program_id(program)
            if any(
                attachment.program_id != desired_id
                for attachment in self.attachments.get((device.ifindex, direction), ())
            ):
                return True
        return False

    def _choose_program(self, device: Device, direction: Direction) -> Program | None:
        role = self.choices[device.ifindex].role
        return self._pick(device, role, direction) if direction in directions_of(role) else None

    def _program_id(self, program: Program) -> int:
        if program.fd not in self._ids:
            self._ids[program.fd] = program.read_info().id
        return self._ids[program.fd]

    def _sync_device(self, device: Device, direction: Direction) -> None:
        """Attaches the program that belongs there, or none, and detaches all others of ours. It has
        to be attached by the current method, which a kernel upgrade may change from clsact to TCX.
        """
        program = self._choose_program(device, direction)
        point = device.ifindex, direction
        if (
            program is not None
            and self.choices[device.ifindex].role is DeviceRole.POD
            and not self._tc.has_place(device.ifindex, direction)
        ):
            self.limited.add(device.name)
            program = None
        current = self.attachments.get(point, ())
        same_method = [attachment for attachment in current if attachment.method is self._tc.method]
        if program is not None and [attachment.program_id for attachment in same_method] != [self._program_id(program)]:
            new_attachment = self._tc.attach(device.ifindex, direction, program)
            if new_attachment is None:  # the device was deleted, and its attachments with it
                self.attachments.pop(point, None)
                self._vanished.add(device.ifindex)
                return
            self.counts["replaced" if current else "added"] += 1
            misplaced = any(attachment.misplaced for attachment in same_method)
            new_attachment = replace(new_attachment, misplaced=misplaced)
            self.attachments[point] = current = (
                *(attachment for attachment in current if attachment not in same_method),
                new_attachment,
            )
        for attachment in current:  # detach after attaching, so that no packet meets no program
            if program is None or attachment.method is not self._tc.method:
                self._tc.detach(attachment)
                self.attachments[point] = tuple(
                    remaining for remaining in self.attachments[point] if remaining != attachment
                )
        if program is None and current:
            self.counts["removed"] += len(current)
        if program is not None:
            self._move_misplaced(point, program)

    def _move_misplaced(self, point: AttachPoint, program: Program) -> None:
        """Moves our program before others that were attached later, if that is not too often."""
        if not any(attachment.misplaced for attachment in self.attachments.get(point, ())):
            return
        times, now = self._moves.setdefault(point, deque(maxlen=MAX_MOVES)), time.monotonic()
        if len(times) == MAX_MOVES and now < times[0] + MOVE_PERIOD_S:
            return
        times.append(now)
        moved = self._tc.move(*point, program)
        if moved is None:
            self.attachments.pop(point, None)
            self._vanished.add(point[0])
            return
        self.attachments[point] = (moved,)
        self.counts["moved"] += 1

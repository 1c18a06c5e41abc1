"""Keeping the packet programs on the devices that are chosen, and on no others.

A pass goes through four stages, each over all devices:

    swap     what is attached gets the programs that belong there now: a tenth of a millisecond
    pod      devices of pods that have none yet: 25 ms each (tc.py says why)
    host     devices to other machines that have none yet
    remove   what is on devices that are no longer chosen

What is quick and urgent does not wait for what is slow. Host devices come after those of pods: a
connection that comes in by a host device is masqueraded where it goes out to its pod. Were that
device later, the pod would see the client's own address at first and the node's from then on, and
the connection would end there.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from kbpf.dataplane.bpf.packet_path.device_roles import Choice, Role, decide
from kbpf.dataplane.bpf.programs.foreign import Foreign, at_devices
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.bpf.tc import OURS, Attachment, Direction, How, Mark, Tc
from kbpf.kernel.net.devices import Device

log = logging.getLogger("kbpf.dataplane")

Pick = Callable[[Device, Role, Direction], Program | None]
"""Which program belongs there; None: none."""

Place = tuple[int, Direction]


class Stage(IntEnum):
    """Of a pass; see above."""

    SWAP = 0
    POD = 1
    HOST = 2
    REMOVE = 3
    DONE = 4


GoOn = Callable[[Stage, Collection[str]], bool]
"""Asked before each device of a stage, and at the end; False ends the pass. It is told the devices
that could not be swapped: they go on with older programs."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one sync() did, and what holds now.

    `choices`: by ifindex. `attached`: everything of ours. `foreign`: programs of other balancers on
    the same devices, as of the last time that everything was read. `failed`: device name → why; a
    device with an error keeps what it had and is tried again by the next sync(). `complete`:
    whether it went through all stages.
    """

    choices: Mapping[int, Choice] = field(default_factory=dict)
    attached: tuple[Attachment, ...] = ()
    added: int = 0
    replaced: int = 0
    removed: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True
    foreign: tuple[Foreign, ...] = ()


class Devices:
    """The attachments of one agent on the devices of the network namespace of the caller.

    Pins are in `<pin_dir>/devices/`: `<ifindex>-<direction>` for a TCX link, an empty folder
    `<ifindex>-clsact` for a qdisc that we made. What an earlier agent attached is read back, so
    there is nothing to adopt, and a sync() that reads repairs what somebody else removed. One
    thread calls.
    """

    def __init__(
        self,
        pin_dir: Path,
        patterns: tuple[str, ...] = (),
        excluded: tuple[str, ...] = (),
        how: How | None = None,
        mark: Mark = OURS,
    ) -> None:
        self._folder = pin_dir / "devices"
        self._patterns = patterns
        self._excluded = excluded
        self._how = how
        self._mark = mark
        self._held: dict[Place, tuple[Attachment, ...]] | None = None
        self._report = DeviceReport()

    def status(self) -> DeviceReport:
        """What the last sync() said."""
        return self._report

    def decide(self, devices: Iterable[Device]) -> Mapping[int, Choice]:
        """As the function of this name, with what the operator said."""
        return decide(devices, self._patterns, self._excluded)

    def sync(
        self,
        devices: Iterable[Device],
        pick: Pick,
        gone: Collection[int] | None = None,
        go_on: GoOn = lambda *_: True,
    ) -> DeviceReport:
        """Attaches, replaces and detaches until every device in this listing has the programs
        that `pick` gives for its role, and no others of ours.

        `gone`: devices that ended since the last call, by ifindex, and nothing else that it does
        not see in the listing; None: everything is read anew. An error of one device is reported
        and stops none of the others. KernelError if nothing can be read at all.
        """
        listed = tuple(devices)
        choices = self.decide(listed)
        with Tc(self._folder, self._how, self._mark) as tc:
            step = _Step(tc, self._look(tc, gone, choices), pick, choices)
            self._held = None  # until it is known that everything below went well
            complete = step.run(listed, go_on)
            foreign = self._report.foreign
            if gone is None:
                ours = {one.ifindex for one in step.attached}
                names = ((d.ifindex, d.name) for d in listed if d.ifindex in ours)
                foreign = at_devices(tc, names)
        if not step.failed:
            self._held = step.held
        for name in sorted(step.failed.keys() - self._report.failed.keys()):
            log.warning("device=%s %s", name, step.failed[name])
        if step.did:
            log.info("devices %s", " ".join(f"{k}={n}" for k, n in sorted(step.did.items())))
        self._report = DeviceReport(
            choices,
            step.attached,
            **step.did,
            failed=step.failed,
            complete=complete,
            foreign=foreign,
        )
        return self._report

    def _look(
        self, tc: Tc, gone: Collection[int] | None, there: Collection[int]
    ) -> dict[Place, tuple[Attachment, ...]]:
        """What we hold: read from the kernel, or remembered."""
        held = self._held
        if held is not None and gone is not None:
            lost = {index for index, _ in held if index not in there} | set(gone)
            if lost:
                tc.sweep(lost)
            return {place: ours for place, ours in held.items() if place[0] not in lost}
        tc.sweep()
        found: dict[Place, tuple[Attachment, ...]] = {}
        for one in tc.everything():
            place = one.ifindex, one.direction
            found[place] = (*found.get(place, ()), one)
        return found

    def remove(self) -> tuple[Attachment, ...]:
        """Takes everything of ours away, from all devices; what there was.

        KernelError, after all the others are gone, if one cannot be removed.
        """
        self._held = None
        errors = []
        with Tc(self._folder, self._how, self._mark) as tc:
            found = tc.everything()
            for one in found:
                try:
                    tc.detach(one)
                except KernelError as error:
                    errors.append(error)
            tc.sweep()
        if errors:
            raise errors[0]
        # What may be left are marks of qdiscs that others use by now.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._report = DeviceReport()
        return tuple(found)


class _Step:
    """One sync() under way: what we hold by place, and what was done."""

    def __init__(
        self,
        tc: Tc,
        held: dict[Place, tuple[Attachment, ...]],
        pick: Pick,
        choices: Mapping[int, Choice],
    ) -> None:
        self._tc = tc
        self._pick = pick
        self._choices = choices
        self.held = held
        self.did: Counter[str] = Counter()
        self.failed: dict[str, str] = {}
        self.behind: set[str] = set()
        self._vanished: set[int] = set()
        self._ids: dict[int, int] = {}  # by descriptor: asking costs a system call

    @property
    def attached(self) -> tuple[Attachment, ...]:
        """What we hold now."""
        return tuple(one for place in sorted(self.held) for one in self.held[place])

    def run(self, listed: Collection[Device], go_on: GoOn) -> bool:
        """All stages, as far as `go_on` lets it; whether it came to the end."""
        for stage in Stage:
            for device in listed:
                if device.name in self.failed or not self._belongs(device, stage):
                    continue
                if not go_on(stage, self.behind):
                    return False
                try:
                    for direction in Direction:
                        self._put(device, direction)
                except KernelError as error:
                    self.failed[device.name] = str(error)
                    if stage is Stage.SWAP and self._runs_older(device):
                        self.behind.add(device.name)
        return go_on(Stage.DONE, self.behind)

    def _belongs(self, device: Device, stage: Stage) -> bool:
        """Whether this device has something to be done in this stage."""
        if device.ifindex in self._vanished:
            return False
        role = self._choices[device.ifindex].role
        have = [self.held.get((device.ifindex, direction), ()) for direction in Direction]
        match stage:
            case Stage.SWAP:
                return role is not Role.SKIPPED and any(have)
            case Stage.HOST:
                return role is Role.HOST and not all(have)
            case Stage.REMOVE:
                return role is Role.SKIPPED and any(have)
            case Stage.POD:
                return role is Role.POD and not all(have)
            case _:
                return False

    def _runs_older(self, device: Device) -> bool:
        """Whether something is attached there that does not belong there now."""
        role = self._choices[device.ifindex].role
        for direction in Direction:
            program = self._pick(device, role, direction)
            wanted = None if program is None else self._id(program)
            if any(one.program != wanted for one in self.held.get((device.ifindex, direction), ())):
                return True
        return False

    def _id(self, program: Program) -> int:
        if program.fd not in self._ids:
            self._ids[program.fd] = program.info().id
        return self._ids[program.fd]

    def _put(self, device: Device, direction: Direction) -> None:
        """Makes this program, or none, what we have there; in one way only."""
        role = self._choices[device.ifindex].role
        program = None if role is Role.SKIPPED else self._pick(device, role, direction)
        place = device.ifindex, direction
        have = self.held.get(place, ())
        same = [one for one in have if one.how is self._tc.how]
        if program is not None and [one.program for one in same] != [self._id(program)]:
            made = self._tc.attach(device.ifindex, direction, program)
            if made is None:  # the device is gone, and with it all that was there
                self.held.pop(place, None)
                self._vanished.add(device.ifindex)
                return
            self.did["replaced" if have else "added"] += 1
            self.held[place] = have = (*(one for one in have if one not in same), made)
        for one in have:  # only now, so that no packet meets neither
            if program is None or one.how is not self._tc.how:
                self._tc.detach(one)
                self.held[place] = tuple(kept for kept in self.held[place] if kept != one)
        if program is None and have:
            self.did["removed"] += len(have)

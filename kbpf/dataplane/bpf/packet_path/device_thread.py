"""The thread that keeps the devices in step: it hears of a change and acts within milliseconds,
and looks at everything now and then in case nobody told.

Making a TCX link takes 25 ms per device, so the writer thread leaves it to this one, and waits only
where the order matters. When maps grow, new programs come over new maps:

1. The writer makes the new maps, copies into them, loads and pins the new programs.
2. publish() hands them over. The thread ends what it does with the device in hand, and begins a
   pass with them (attach.py): first what is attached is swapped. What is attached from now on gets
   them too.
3. Only when all are swapped publish() returns, and the writer writes. A device that refuses does
   not hold it up for ever: DevicesBehind says that the programs were taken all the same. What runs
   there reads a `services` of its own (tables.py), and is swapped as soon as that can be.
4. The old programs' pins, which keep their tail calls alive, go after a pass in which nothing
   failed: a device that kept its old program goes on with it, whole.

A generation of programs belongs to the writer until it is handed over, and then to the thread,
which closes it when it has the next one: no descriptor is closed that the other thread may use.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kbpf.dataplane.bpf.packet_path.attach import Devices, Pick, Stage
from kbpf.dataplane.bpf.packet_path.device_roles import Choice
from kbpf.dataplane.bpf.programs.foreign import Foreign
from kbpf.errors import DevicesBehind, KbpfError
from kbpf.kernel.net.devices import Device, Watch, list_devices
from kbpf.kernel.system import threads
from kbpf.model.status import MOST_FAILURES

log = logging.getLogger("kbpf.dataplane")

LOOK_SECONDS: Final = 30.0
"""Between two looks at everything, if nothing is told."""

RETRY_SECONDS: Final = 1.0
STUCK_SECONDS: Final = 10.0
"""So long nothing goes on: then the writer does not wait any longer."""


LIMIT_SECONDS: Final = 120.0
"""Without progress for this long the thread counts as stuck. It beats at each device."""


class Generation(Protocol):
    """Programs over one set of maps."""

    @property
    def pick(self) -> Pick:
        """Which program belongs where."""

    def close(self) -> None:
        """Closes the descriptors."""


@dataclass(frozen=True, slots=True)
class KeeperStatus:
    """How the thread is doing. `ready`: all devices had their turn once, since it began. `failed`:
    device → why. `problem`: why it cannot look at all, or is waited for no longer; "" when it can.
    `foreign`: programs of other balancers on the same devices.
    """

    ready: bool = False
    attached: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    foreign: tuple[Foreign, ...] = ()


class Keeper:
    """One thread, in the network namespace of who calls publish() first.

    `tell` is given each listing before programs run on what is new in it; `settled` is called when
    no device has programs of an earlier generation any more. Both in the thread.
    """

    def __init__(
        self,
        devices: Devices,
        tell: Callable[[tuple[Device, ...], Mapping[int, Choice]], None],
        settled: Callable[[], None],
    ) -> None:
        self._devices = devices
        self._tell = tell
        self._settled = settled
        self._changed = threading.Condition()
        self._wanted: Generation | None = None  # these are under the condition's lock
        self._swapped = False
        self._behind: frozenset[str] = frozenset()  # devices that could not be swapped
        self._status = KeeperStatus()
        self._stopping = False
        self._thread: threads.Supervised | None = None
        self._current: Generation | None = None  # of the thread
        self._wake = -1

    def status(self) -> KeeperStatus:
        """How it is doing."""
        with self._changed:
            return self._status

    @property
    def everywhere(self) -> bool:
        """Whether nothing that was attached runs older programs than the last ones published."""
        with self._changed:
            return self._swapped

    def publish(self, generation: Generation, enter: Callable[[], None] = lambda: None) -> None:
        """Hands over programs, and waits until nothing that was attached runs older ones. `enter`
        is called before, while nothing can settle; after that the programs are the thread's own.

        DevicesBehind if a device cannot be swapped, nothing goes on for STUCK_SECONDS, or the
        thread cannot look at devices. It goes on trying then.
        """
        with self._changed:
            enter()
            before, self._wanted = self._wanted, generation
            unused = before if before is not self._current else None
            self._swapped, self._behind = False, frozenset()
            self._status = replace(self._status, problem="")
            if self._thread is None:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread = threads.start("devices", self._run, LIMIT_SECONDS)
        if unused is not None:  # the thread never saw it
            unused.close()
        os.eventfd_write(self._wake, 1)
        self._wait()

    def _wait(self) -> None:
        with self._changed:
            while not (self._swapped or self._behind or self._status.problem):
                if not self._changed.wait(STUCK_SECONDS):
                    stuck = f"nothing was done for {STUCK_SECONDS:.0f} s"
                    self._status = replace(self._status, problem=stuck)
            if not self._swapped:
                names = ", ".join(sorted(self._behind)[:MOST_FAILURES])
                hint = f"{self._status.problem or 'they go on with older ones'}"
                raise DevicesBehind(
                    "not all devices have the new programs",
                    names,
                    f"{hint}; the agent goes on trying",
                )

    def close(self) -> None:
        """Ends the thread, after the device that it has in hand, and closes the programs. What is
        attached stays.
        """
        with self._changed:
            thread, self._thread = self._thread, None
            self._stopping = True
            self._changed.notify_all()
        if thread is None:
            return
        os.eventfd_write(self._wake, 1)
        if not thread.stop(STUCK_SECONDS):
            log.error("the thread of the devices is stuck in the kernel; it is left behind")
            return  # with its descriptors
        os.close(self._wake)
        for generation in {id(one): one for one in (self._current, self._wanted)}.values():
            if generation is not None:
                generation.close()
        self._current = self._wanted = None

    # ---- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stops():
            try:
                with Watch() as watch:
                    self._serve(watch)
            except KbpfError as error:
                self._failed(str(error))
            except Exception as error:  # it must not end without a word, nor for one bad look
                log.exception("the devices are not looked at")
                self._failed(f"{type(error).__name__}: {error}")

    def _serve(self, watch: Watch) -> None:
        """Looks, and again whenever something is told, until it is stopped."""
        full = time.monotonic() + LOOK_SECONDS
        good = self._look(None)
        while not self._stops():
            threads.beat()
            due = full if good else min(full, time.monotonic() + RETRY_SECONDS)
            change = watch.wait(max(0.0, due - time.monotonic()), self._wake)
            woken = self._wakes()
            now = time.monotonic()
            if now >= full or not good or change.gone is None:
                full = now + LOOK_SECONDS
                good = self._look(None)
            elif change.any or woken:
                good = self._look(change.gone)

    def _look(self, gone: Collection[int] | None) -> bool:
        """One pass; whether all is as it should be. A pass that newer programs cut short is
        followed by another one: publish() has woken us.
        """
        pick = self._take()
        there = list_devices()
        self._tell(there, self._devices.decide(there))
        report = self._devices.sync(there, pick, gone, self._go_on)
        with self._changed:
            if report.complete and not report.failed and self._wanted is self._current:
                self._settled()
            ready = report.complete or self._status.ready
            self._status = KeeperStatus(
                ready, len(report.attached), report.failed, foreign=report.foreign
            )
        return not report.failed

    def _take(self) -> Pick:
        """The newest programs; those before are closed."""
        with self._changed:
            old, self._current = self._current, self._wanted
        if old is not None and old is not self._current:
            old.close()
        assert self._current is not None
        return self._current.pick

    def _go_on(self, stage: Stage, behind: Collection[str]) -> bool:
        """Tells who waits how far we are; False if newer programs are wanted, or the end is."""
        threads.beat()
        with self._changed:
            if self._wanted is not self._current or self._stopping:
                return False
            if stage > Stage.SWAP:
                self._swapped = self._swapped or not behind
                self._behind = frozenset(behind)
            self._changed.notify_all()
            return True

    def _stops(self) -> bool:
        with self._changed:
            return self._stopping

    def _wakes(self) -> bool:
        try:
            return bool(os.eventfd_read(self._wake))
        except BlockingIOError:
            return False

    def _failed(self, problem: str) -> None:
        """Nothing can be looked at: said once, and tried again."""
        with self._changed:
            if problem != self._status.problem:
                log.error("devices are not looked at, trying again: %s", problem)
            self._status = replace(self._status, problem=problem)
            self._changed.notify_all()
            threads.beat()
            self._changed.wait_for(lambda: self._stopping, RETRY_SECONDS)

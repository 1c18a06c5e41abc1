# SPDX-License-Identifier: Apache-2.0
"""The device thread: keeps the attachments in line with the node's devices.

It receives rtnetlink notifications and acts within milliseconds. Every 30 s it reads everything
from the kernel, in case a notification is missing, and because there is none about TCX programs.

Creating a TCX link takes 25 ms per device, so the main thread, which writes the maps, leaves that
to this one and waits only where the order matters: where programs of an earlier agent are attached.

1. The main thread writes the maps, and loads and pins the new programs.
2. publish() hands the programs over. The device thread starts a pass (attach.py), which first swaps
   the attached programs. Devices that get programs for the first time get the new ones, too.
3. publish() returns when all are swapped. A device that refuses the new program does not block it
   for ever: publish() then raises OutdatedDevicesError, and the programs stay handed over. The old
   program on that device is swapped as soon as possible, and its maps are kept until then
   (lifecycle.py).
4. The pins of the old programs keep their tail calls alive. They are removed after a pass that
   leaves no old program on any device. A device that gets no program at all does not count.

A generation of programs belongs to the main thread until it is handed over, and then to the device
thread, which closes it once it has the next one. So neither closes a descriptor that the other may
still use.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kbpf.dataplane.bpf.packet_path.attach import DescribeDevices, DeviceAttachments, PickProgram, Stage
from kbpf.dataplane.bpf.programs.foreign import ForeignProgram
from kbpf.errors import KbpfError, OutdatedDevicesError, describe_unexpected_error
from kbpf.kernel.bpf import tc
from kbpf.kernel.bpf.clsact import DEFAULT_IDENTITY
from kbpf.kernel.net.devices import DeviceMonitor, list_devices
from kbpf.kernel.system import threads
from kbpf.kernel.system.polling import Backoff, wait_readable
from kbpf.model.status import MAX_FAILED_DEVICES

log = logging.getLogger("kbpf.dataplane")

RESYNC_INTERVAL_S: Final = 30.0
"""Interval between two full checks without events, in seconds."""

FILTER_DELAY_S: Final = 1.0
"""A full check follows a filter of another tool, which may run before ours, after this time: one
check for a burst."""

RETRY_DELAY_S: Final = 1.0
MAX_RETRY_DELAY_S: Final = 30.0
"""A device that fails is tried again after RETRY_DELAY_S, and each further time after twice as
long, up to this time."""

IDLE_SHARE: Final = 4
MAX_PAUSE_S: Final = 0.1
"""Passes that find nothing to do may take at most a fraction of the thread's time, unless a new
device would wait longer than this: a pod may change its own device all the time, and each change is
a notification here."""

PUBLISH_STALL_TIMEOUT_S: Final = 10.0
"""If no progress is made for this long, publish() stops waiting."""
STALL_WAITS: Final = 10
"""It waits this many times for a part of that time, so if the whole process is stopped for a while,
only one of these waits is lost."""

THREAD_STALL_TIMEOUT_S: Final = 120.0
"""The thread counts as stuck after this time without progress. Each device is progress."""


class ProgramGeneration(Protocol):
    """Programs over one set of maps."""

    @property
    def pick(self) -> PickProgram:
        """Chooses the program for a device and direction."""

    def close(self) -> None:
        """Closes the descriptors."""


@dataclass(frozen=True, slots=True)
class DeviceReconcilerStatus:
    """The state of the thread.

    - `ready`: all devices were processed once.
    - `failed`: device name → reason.
    - `problem`: why devices cannot be read, or why publish() stopped waiting; "" if neither.
    - `foreign`: programs of other load balancers on the same devices.
    - `limited`: see DeviceReport.
    """

    ready: bool = False
    attached_count: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    foreign: tuple[ForeignProgram, ...] = ()
    limited: tuple[str, ...] = ()


class DeviceRetries:
    """When to try again the devices that failed. A device that fails for good would else cost a
    full pass each second.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[Backoff, float]] = {}  # device name → delays, due time

    @property
    def due(self) -> float:
        """The next time (time.monotonic), infinity if no device failed."""
        return min((due for _, due in self._by_name.values()), default=float("inf"))

    def update(self, failed: Collection[str], now: float) -> None:
        """`failed`: those that failed in the pass that has just ended."""
        previous, self._by_name = self._by_name, {}
        for name in failed:
            backoff, due = previous.get(name, (Backoff(RETRY_DELAY_S, MAX_RETRY_DELAY_S), 0.0))
            if now >= due:
                due = now + backoff.next_delay()
            self._by_name[name] = backoff, due


class DeviceReconciler:
    """One thread, in the network namespace of the first caller of publish().

    `describe`: see DeviceAttachments.sync(). `on_all_swapped` is called when no device runs an
    earlier generation. Both are called in the thread.
    """

    def __init__(
        self,
        attachments: DeviceAttachments,
        describe: DescribeDevices,
        on_all_swapped: Callable[[], None],
    ) -> None:
        self._attachments = attachments
        self._describe = describe
        self._on_all_swapped = on_all_swapped
        self._condition = threading.Condition()
        # These are protected by the lock of the condition.
        self._published: ProgramGeneration | None = None
        self._swapped = False
        self._not_swapped: frozenset[str] = frozenset()  # devices that could not be swapped
        self._status = DeviceReconcilerStatus()
        self._stopping = False
        self._thread: threads.SupervisedThread | None = None
        # What the thread attaches in this pass. Written only by the thread, under the lock.
        self._current: ProgramGeneration | None = None
        self._retries = DeviceRetries()
        self._wake_fd = -1  # an eventfd that interrupts the wait for notifications

    def status(self) -> DeviceReconcilerStatus:
        with self._condition:
            return self._status

    @property
    def is_rolled_out(self) -> bool:
        """Whether no device runs older programs than the last published ones."""
        with self._condition:
            return self._swapped

    def publish(self, generation: ProgramGeneration, on_handover: Callable[[], None] = lambda: None) -> None:
        """Hands programs over to the thread, and waits until no attached device runs older ones.

        `on_handover` is called first, under the lock, so that on_all_swapped() cannot run at the
        same time. Afterwards the programs belong to the thread.

        Raises OutdatedDevicesError if a device cannot be swapped, no progress is made for
        PUBLISH_STALL_TIMEOUT_S, or the thread cannot read the devices. The thread keeps trying.
        """
        with self._condition:
            on_handover()
            previous, self._published = self._published, generation
            unused_generation = previous if previous is not self._current else None
            self._swapped, self._not_swapped = False, frozenset()
            self._status = replace(self._status, problem="")
            if self._thread is None:
                self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread = threads.start("devices", self._run, THREAD_STALL_TIMEOUT_S)
        if unused_generation is not None:  # the thread never saw it
            unused_generation.close()
        self.wake()
        self._wait_for_swap()

    def wake(self) -> None:
        """Starts a pass, which describes the devices again. The first publish() does the same."""
        if self._thread is not None:
            os.eventfd_write(self._wake_fd, 1)

    def _wait_for_swap(self) -> None:
        with self._condition:
            while not (self._swapped or self._not_swapped or self._status.problem):
                if not self._wait_for_progress():
                    problem = f"no progress for {PUBLISH_STALL_TIMEOUT_S:.0f} s"
                    self._status = replace(self._status, problem=problem)
            if not self._swapped:
                names = ", ".join(sorted(self._not_swapped)[:MAX_FAILED_DEVICES])
                hint = f"{self._status.problem or 'these keep older ones'}"
                raise OutdatedDevicesError(
                    "not all devices have the new programs",
                    names,
                    f"{hint}; the agent keeps trying",
                )

    def _wait_for_progress(self) -> bool:
        """Waits for the thread, which notifies at each device; False after
        PUBLISH_STALL_TIMEOUT_S.
        """
        seconds = PUBLISH_STALL_TIMEOUT_S / STALL_WAITS
        return any(self._condition.wait(seconds) for _ in range(STALL_WAITS))

    def close(self) -> None:
        """Stops the thread after its current device, and closes the programs. Attachments stay."""
        with self._condition:
            thread, self._thread = self._thread, None
            self._stopping = True
            self._condition.notify_all()
        if thread is None:
            return
        os.eventfd_write(self._wake_fd, 1)
        if not thread.stop(PUBLISH_STALL_TIMEOUT_S):
            log.error("the device thread is stuck in the kernel and is abandoned")
            return  # its descriptors stay open, since it may still use them
        os.close(self._wake_fd)
        for generation in {id(programs): programs for programs in (self._current, self._published)}.values():
            if generation is not None:
                generation.close()
        self._current = self._published = None

    # ---- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping():
            try:
                own_filters = None if tc.probe_tcx().works else DEFAULT_IDENTITY.handles
                with DeviceMonitor(own_filters) as watch:
                    self._watch_devices(watch)
            except KbpfError as error:
                self._report_failure(str(error))
            except OSError as error:
                self._report_failure(describe_unexpected_error(error))
            except Exception as error:  # one failed pass must not end the thread
                self._report_failure(f"{type(error).__name__}: {error}", is_fault=True)

    def _watch_devices(self, watch: DeviceMonitor) -> None:
        """Synchronizes the devices at each event, until stopped."""
        full_sync_due = time.monotonic() + RESYNC_INTERVAL_S
        is_waiting = self._sync(None)
        while not self._is_stopping():
            threads.heartbeat()
            due = min(full_sync_due, self._retries.due)
            if is_waiting:
                due = min(due, time.monotonic() + RETRY_DELAY_S)
            change = watch.wait(max(0.0, due - time.monotonic()), self._wake_fd)
            was_woken = self._read_wake()
            now = time.monotonic()
            if change.filters:
                full_sync_due = min(full_sync_due, now + FILTER_DELAY_S)
            if now >= min(full_sync_due, self._retries.due) or change.deleted is None:
                full_sync_due = now + RESYNC_INTERVAL_S
                is_waiting = self._sync(None)
            elif change.received or was_woken or is_waiting:
                is_waiting = self._sync(change.deleted)
            else:
                continue
            if not self._attachments.status().has_changes:
                self._pause(time.monotonic() - now)

    def _pause(self, duration: float) -> None:
        """Waits after a pass of this duration (seconds), or until there are new programs."""
        wait_readable([self._wake_fd], min((IDLE_SHARE - 1) * duration, MAX_PAUSE_S))

    def _sync(self, removed_devices: Collection[int] | None) -> bool:
        """Makes one pass; returns whether a device has to wait for its programs. If newer programs
        interrupt the pass, another one follows, since publish() has also written to the eventfd.
        """
        pick = self._switch_generation()
        report = self._attachments.sync(list_devices(), pick, removed_devices, self._should_continue, self._describe)
        with self._condition:
            # publish() may have brought newer programs since the pass ended
            if report.complete and not report.outdated and self._published is self._current:
                self._on_all_swapped()
            ready = report.complete or self._status.ready
            self._status = DeviceReconcilerStatus(
                ready,
                len(report.attachments),
                report.failed,
                foreign=report.foreign,
                limited=report.limited,
            )
        self._retries.update(report.failed, time.monotonic())
        return report.waiting

    def _switch_generation(self) -> PickProgram:
        """Switches to the newest programs and closes the previous ones."""
        with self._condition:
            old, self._current = self._current, self._published
        if old is not None and old is not self._current:
            old.close()
        assert self._current is not None
        return self._current.pick

    def _should_continue(self, stage: Stage, not_swapped: Collection[str]) -> bool:
        """Reports progress to publish(). False if newer programs were published or the thread
        stops.
        """
        threads.heartbeat()
        with self._condition:
            if self._published is not self._current or self._stopping:
                return False
            if stage > Stage.SWAP:  # the swaps are done, so publish() can return
                self._swapped = self._swapped or not not_swapped
                self._not_swapped = frozenset(not_swapped)
            self._condition.notify_all()
            return True

    def _is_stopping(self) -> bool:
        with self._condition:
            return self._stopping

    def _read_wake(self) -> bool:
        """Whether wake() or close() woke the thread. Resets the eventfd."""
        try:
            return bool(os.eventfd_read(self._wake_fd))
        except BlockingIOError:
            return False

    def _report_failure(self, problem: str, is_fault: bool = False) -> None:
        """Logs a new failure, with the traceback of a fault, and waits for the retry."""
        with self._condition:
            if problem != self._status.problem:
                log.error("cannot read the devices, retrying: %s", problem, exc_info=is_fault)
            self._status = replace(self._status, problem=problem)
            self._condition.notify_all()
            threads.heartbeat()
            self._condition.wait_for(lambda: self._stopping, RETRY_DELAY_S)

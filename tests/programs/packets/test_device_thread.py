# SPDX-License-Identifier: Apache-2.0
"""The device thread: in which order and how soon devices get programs, and what waits for it."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from kbpf.dataplane.bpf.packet_path import device_thread as module
from kbpf.dataplane.bpf.packet_path.attach import DeviceAttachments, PickProgram
from kbpf.dataplane.bpf.packet_path.device_thread import DeviceReconciler, DeviceReconcilerStatus
from kbpf.errors import KernelError, OutdatedDevicesError
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.bpf.tc import Attachment, AttachMethod, TcAttacher
from kbpf.kernel.probe_result import Probe
from tests.programs.packets.tc.net import Net, both_directions, idle, program_id, programs_on_devices, refused
from tests.support.lab.lab import PATIENCE, until
from tests.support.lab.namespace import Namespace

PODS = ("cali0", "cali1", "cali2")
ALL = frozenset(("up0", "here", "far", *PODS))


@dataclass
class Generation:
    """A generation of programs: one program for all devices, except those in `others` (by name)."""

    program: Program
    others: dict[str, Program] = field(default_factory=dict)
    closed: bool = False

    @property
    def pick(self) -> PickProgram:
        return lambda device, role, direction: self.others.get(device.name, self.program)

    @property
    def id(self) -> int:
        return program_id(self.program)

    def close(self) -> None:
        self.closed = True


@dataclass
class Gate:
    """Attaching to this device waits until the gate is open."""

    device: str = ""
    reached: threading.Event = field(default_factory=threading.Event)
    open: threading.Event = field(default_factory=threading.Event)


class Site:
    """A node with an uplink and pods, and the thread that attaches programs to its devices."""

    def __init__(self, net: Net, pods: str, how: AttachMethod | None = None) -> None:
        self.net, self.pods, self.how = net, pods, how
        self.settled = 0
        self.written_devices: list[set[str]] = []
        self.order: list[str] = []
        self.gate = Gate()
        self.reconciler = self.make()

    def make(self) -> DeviceReconciler:
        devices = DeviceAttachments(self.net.folder, method=self.how)
        tell = lambda there, *_: self.written_devices.append({d.name for d in there})  # noqa: E731
        return DeviceReconciler(devices, tell, self._settle)

    def close(self) -> None:
        self.gate.open.set()
        self.reconciler.close()

    def _settle(self) -> None:
        self.settled += 1

    def _unsettle(self) -> None:
        """A pass of the earlier programs may end at any time before this."""
        self.settled = 0

    def publish_up_to(self, device: str, generation: Generation) -> None:
        """Publishes; returns when the thread attaches to this device, where it waits for the gate."""
        self.gate = Gate(device)
        self.publish(generation)
        assert self.gate.reached.wait(PATIENCE)

    def publish(self, generation: Generation) -> None:
        self.net.do(lambda: self.reconciler.publish(generation, self._unsettle))

    def runs(self) -> dict[str, set[int]]:
        """The programs on each device, both directions together."""
        return self.net.do(lambda: programs_on_devices(self.net.folder / "devices"))

    def name(self, ifindex: int) -> str:
        return self.net.do(lambda: socket.if_indextoname(ifindex))

    def has(self, generation: Generation, names: frozenset[str] = ALL) -> bool:
        return self.runs() == {name: {generation.id} for name in names}

    def ready(self, generation: Generation) -> None:
        self.publish(generation)
        until("all devices were processed", lambda: self.reconciler.status().ready)


@pytest.fixture
def node(request, namespace: Namespace, monkeypatch) -> Iterator[Site]:
    """Such a node. Every attach is recorded, and waits if the gate is for its device."""
    name = f"kbkeep{os.getpid()}"
    how = getattr(request, "param", None)
    with ExitStack() as stack:
        net = Net(name)
        stack.callback(net.close)
        pods = namespace.name
        net.ip(
            f"link add up0 type veth peer name wire netns {pods}",
            "addr add 192.0.2.1/24 dev up0",
            *(f"link add {pod} type veth peer name {pod}x netns {pods}" for pod in PODS),
        )
        site = Site(net, pods, how)
        stack.callback(site.close)
        attach = TcAttacher.attach

        def slow(tc: TcAttacher, ifindex: int, to: Direction, program: Program) -> Attachment | None:
            device = site.name(ifindex)
            if device == site.gate.device:
                site.gate.reached.set()
                site.gate.open.wait(PATIENCE)
            site.order.append(device)
            return attach(tc, ifindex, to, program)

        monkeypatch.setattr(TcAttacher, "attach", slow)
        monkeypatch.setattr(module, "PUBLISH_STALL_TIMEOUT_S", 4 * PATIENCE)
        monkeypatch.setattr(module, "RETRY_DELAY_S", 0.1)
        yield site


@pytest.fixture
def first() -> Iterator[Generation]:
    with idle("first") as program:
        yield Generation(program)


@pytest.fixture
def second() -> Iterator[Generation]:
    with idle("second") as program:
        yield Generation(program)


def begin(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


# ---- time --------------------------------------------------------------------------------------


def test_passes_that_find_nothing_to_do_leave_the_processor_to_others(node: Site, first: Generation, monkeypatch):
    """A pod may cause notifications all the time. A pass that attaches is followed at once."""
    pauses: list[float] = []
    monkeypatch.setattr(module, "wait_readable", lambda _, timeout: pauses.append(timeout))
    node.ready(first)
    until("it waits", lambda: node.reconciler.status().ready)
    node.net.ip("link set up0 mtu 1401")
    until("it pauses", lambda: pauses)
    node.net.ip("link set up0 mtu 1402")
    until("again", lambda: len(pauses) > 1)
    assert all(0 < pause <= module.MAX_PAUSE_S for pause in pauses)
    assert module.IDLE_SHARE > 2


# ---- order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", list(AttachMethod), indirect=True)
def test_pod_devices_get_programs_before_host_devices(node: Site, first: Generation):
    node.ready(first)
    assert node.has(first)
    assert set(node.order[: 2 * len(PODS)]) == set(PODS)
    assert set(node.order) == ALL
    assert node.written_devices[0] >= ALL, "the maps have a device before programs run on it"
    status = node.reconciler.status()
    assert (status.attached_count, status.failed, status.problem) == (12, {}, "")
    assert node.settled >= 1


def test_ready_only_once_host_devices_have_programs(node: Site, first: Generation):
    node.publish_up_to("up0", first)  # nothing was attached, so there is nothing to wait for
    assert set(PODS) <= node.runs().keys()
    assert node.reconciler.status() == DeviceReconcilerStatus()
    node.gate.open.set()
    until("it is ready", lambda: node.reconciler.status().ready)
    assert node.has(first)


def test_device_being_attached_delays_newer_programs_and_gets_them(node: Site, first: Generation, second: Generation):
    node.publish_up_to("cali1", first)
    assert node.settled == 0
    done = threading.Event()
    thread = begin(lambda: (node.publish(second), done.set()))
    assert not done.wait(0.5), "one device is still getting the old programs"
    assert not first.closed, "the old programs are still needed"
    assert node.settled == 0
    node.gate.open.set()
    thread.join(PATIENCE)
    assert done.is_set()
    assert first.id not in set().union(*node.runs().values())
    until("the rest follows", lambda: node.has(second))
    assert first.closed


def test_unused_generation_is_closed(node: Site, first: Generation, second: Generation):
    node.publish_up_to("cali1", first)
    with idle("third") as program:
        third = Generation(program)
        waiting = [begin(lambda: node.publish(second))]
        until("they are published", lambda: node.reconciler._published is second)
        waiting.append(begin(lambda: node.publish(third)))
        until("they are superseded", lambda: second.closed)
        node.gate.open.set()
        for thread in waiting:
            thread.join(PATIENCE)
        until("the newest are on all devices", lambda: node.has(third))
        node.reconciler.close()
        assert third.closed


def test_devices_are_described_again_on_request(node: Site, first: Generation):
    """For example, when the addresses of the Node object change, but no device does."""
    node.reconciler.wake()
    node.ready(first)
    node.written_devices.clear()
    node.reconciler.wake()
    until("they are described", lambda: node.written_devices)
    node.reconciler.close()
    node.reconciler.wake()


# ---- changes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [AttachMethod.CLSACT], indirect=True)
@both_directions
def test_filter_that_is_added_before_ours_is_passed_soon(
    node: Site, first: Generation, direction: Direction, monkeypatch
):
    """The kernel notifies of filters, so no 30 s pass."""
    monkeypatch.setattr("kbpf.kernel.bpf.tc.probe_tcx", lambda: Probe(False, "as before Linux 6.6"))
    node.ready(first)
    net, path = node.net, node.net.folder / "theirs"
    with idle("theirs") as theirs:
        theirs.pin(path)
        for handle in (1, 2):
            net.tc(f"filter add dev here {direction} prio 1 handle {handle} bpf da object-pinned {path}")
            assert net.filters(direction)[0] != "kbpf"
            until("ours is first", lambda: net.filters(direction)[0] == "kbpf", PATIENCE)
        path.unlink()


# ---- errors ------------------------------------------------------------------------------------


def test_failed_device_is_reported_stops_no_other_and_is_retried(node: Site, first: Generation):
    with refused() as wrong:
        first.others["cali1"] = wrong
        node.ready(first)
        assert list(node.reconciler.status().failed) == ["cali1"]
        assert node.has(first, ALL - {"cali1"})
        assert node.settled, "no device runs an older program"
        first.others.clear()
        until("it has programs", lambda: node.has(first))
        until("its success is reported", lambda: not node.reconciler.status().failed and node.settled)


def test_device_without_any_programs_does_not_delay_publish(node: Site, first: Generation, second: Generation):
    with refused() as wrong:
        first.others["cali1"] = second.others["cali1"] = wrong
        node.ready(first)
        node.publish(second)
        assert node.reconciler.is_rolled_out
        assert node.has(second, ALL - {"cali1"})


@pytest.mark.parametrize(
    "error",
    [KernelError("no answer"), OSError(errno.EMFILE, "no descriptor"), RuntimeError("a slip")],
)
def test_thread_outlives_every_error(node: Site, first: Generation, error: Exception, monkeypatch, caplog):
    """It is logged once, with a traceback only if it is a fault of kbpf."""
    listing, tries = module.list_devices, []

    def broken() -> None:
        tries.append(1)
        raise error

    monkeypatch.setattr(module, "list_devices", broken)
    with pytest.raises(OutdatedDevicesError, match="not all devices have the new programs"):
        node.publish(first)
    words = error.strerror if isinstance(error, OSError) else str(error)
    assert words in node.reconciler.status().problem
    until("it was tried again", lambda: len(tries) > 3)
    (line,) = (record for record in caplog.records if "cannot read the devices" in record.msg)
    assert bool(line.exc_info) is isinstance(error, RuntimeError)
    monkeypatch.setattr(module, "list_devices", listing)
    until("it has recovered", lambda: node.reconciler.status().ready)
    assert node.reconciler.status().problem == ""
    assert node.has(first)


def test_publish_without_progress_times_out(node: Site, first: Generation, second: Generation, monkeypatch):
    node.ready(first)
    monkeypatch.setattr(module, "PUBLISH_STALL_TIMEOUT_S", 0.3)
    node.gate = Gate("up0")
    with pytest.raises(OutdatedDevicesError, match="no progress for"):
        node.publish(second)
    assert "no progress" in node.reconciler.status().problem
    node.gate.open.set()
    until("it has recovered", lambda: node.has(second) and not node.reconciler.status().problem)


def test_a_process_that_was_stopped_is_no_lack_of_progress(
    node: Site, first: Generation, second: Generation, monkeypatch
):
    """As if the process had been stopped in a wait: that returns at once then, though the thread
    had no time either.
    """
    node.ready(first)
    node.gate = Gate("up0")
    wait = node.reconciler._condition.wait

    def stopped(timeout: float | None = None) -> bool:
        is_caller = threading.current_thread().name != "devices"
        if is_caller and not node.gate.open.is_set():
            node.gate.open.set()
            return False
        return wait(timeout)

    monkeypatch.setattr(node.reconciler._condition, "wait", stopped)
    node.publish(second)
    assert node.gate.reached.is_set()
    assert node.has(second)


# ---- close() -----------------------------------------------------------------------------------


def device_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "devices"}


def test_close_finishes_the_current_device_and_detaches_nothing(node: Site, first: Generation):
    before = device_threads()  # data planes of other files may serve until the session ends
    node.publish_up_to("cali1", first)
    ended = threading.Event()
    thread = begin(lambda: (node.reconciler.close(), ended.set()))
    assert not ended.wait(0.3)
    assert not first.closed
    assert len(device_threads() - before) == 1
    node.gate.open.set()
    thread.join(PATIENCE)
    assert first.closed
    assert device_threads() == before
    assert 0 < len(node.runs()) < len(ALL), "no other device was begun"
    before = node.runs()
    node.reconciler.close()
    node.reconciler = node.make()
    with idle() as program:
        again = Generation(program)
        node.ready(again)
        assert before.keys() <= node.runs().keys()
        assert node.has(again)

"""The thread that keeps the devices: in which order, how soon, and who waits for whom."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.packet_path import device_thread as module
from kbpf.dataplane.bpf.packet_path.attach import DeviceAttachments, PickProgram
from kbpf.dataplane.bpf.packet_path.device_thread import DeviceReconciler, DeviceReconcilerStatus
from kbpf.errors import KernelError, OutdatedDevicesError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE, Attachment, AttachMethod, Direction, TcAttacher
from kbpf.kernel.system import netns
from tests.programs.packets.test_tc import Net, idle, insn, program_id
from tests.support.lab.lab import PATIENCE, ip, until

PODS = ("cali0", "cali1", "cali2")
ALL = frozenset(("up0", "here", "far", *PODS))


@dataclass
class Made:
    """A generation: one program for all, but for who gets another one by name."""

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
    """Attaching on this device waits here."""

    device: str = ""
    reached: threading.Event = field(default_factory=threading.Event)
    open: threading.Event = field(default_factory=threading.Event)


class Site:
    """A node with an uplink and pods, and the keeper of its devices."""

    def __init__(self, net: Net, pods: str, how: AttachMethod | None = None) -> None:
        self.net, self.pods, self.how = net, pods, how
        self.settled = 0
        self.told: list[set[str]] = []
        self.order: list[str] = []
        self.gate = Gate()
        self.keeper = self.make()

    def make(self) -> DeviceReconciler:
        devices = DeviceAttachments(self.net.folder, method=self.how)
        tell = lambda there, choices: self.told.append({d.name for d in there})  # noqa: E731
        return DeviceReconciler(devices, tell, self._settle)

    def close(self) -> None:
        self.gate.open.set()
        self.keeper.close()

    def _settle(self) -> None:
        self.settled += 1

    def publish(self, made: Made) -> None:
        self.net.inside(lambda: self.keeper.publish(made))

    def runs(self) -> dict[str, set[int]]:
        """The programs on each device, both directions together."""
        found: dict[str, set[int]] = {}

        def read() -> tuple[Attachment, ...]:
            with TcAttacher(self.net.folder / "devices") as tc:
                return tc.list_all()

        for one in self.net.inside(read):
            found.setdefault(self.name(one.ifindex), set()).add(one.program_id)
        return found

    def name(self, ifindex: int) -> str:
        return self.net.inside(lambda: socket.if_indextoname(ifindex))

    def has(self, made: Made, names: frozenset[str] = ALL) -> bool:
        return self.runs() == {name: {made.id} for name in names}

    def ready(self, made: Made) -> None:
        self.publish(made)
        until("all devices had their turn", lambda: self.keeper.status().ready)


@pytest.fixture
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Such a site; every attaching is written down, and waits where the gate is."""
    name = f"kbkeep{os.getpid()}"
    how = getattr(request, "param", None)
    with ExitStack() as stack:
        net = Net(name)
        stack.callback(net.close)
        pods = f"{name}p"
        ip(f"netns add {pods}")
        stack.callback(ip, f"netns del {pods}")
        net.ip(
            f"link add up0 type veth peer name wire netns {pods}",
            "addr add 192.0.2.1/24 dev up0",
            *(f"link add {pod} type veth peer name {pod}x netns {pods}" for pod in PODS),
        )
        site = Site(net, pods, how)
        stack.callback(site.close)
        attach = TcAttacher.attach

        def slow(
            tc: TcAttacher, ifindex: int, to: Direction, program: Program
        ) -> Attachment | None:
            device = site.name(ifindex)
            if device == site.gate.device:
                site.gate.reached.set()
                site.gate.open.wait(PATIENCE)
            site.order.append(device)
            return attach(tc, ifindex, to, program)

        monkeypatch.setattr(TcAttacher, "attach", slow)
        monkeypatch.setattr(module, "PUBLISH_STALL_TIMEOUT_S", 4 * PATIENCE)
        yield site


@pytest.fixture
def first() -> Iterator[Made]:
    with idle("first") as program:
        yield Made(program)


@pytest.fixture
def second() -> Iterator[Made]:
    with idle("second") as program:
        yield Made(program)


in_both_ways = pytest.mark.parametrize("node", list(AttachMethod), indirect=True)


def begin(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


# ---- order -------------------------------------------------------------------------------------


@in_both_ways
def test_all_devices_get_the_programs_pods_before_hosts(node: Site, first: Made):
    node.ready(first)
    assert node.has(first)
    assert set(node.order[: 2 * len(PODS)]) == set(PODS)
    assert set(node.order) == ALL
    assert node.told[0] >= ALL, "the programs know a device before they run on it"
    status = node.keeper.status()
    assert (status.attached_count, status.failed, status.problem) == (12, {}, "")
    assert node.settled >= 1


def test_it_is_ready_only_when_the_host_devices_have_them(node: Site, first: Made):
    node.gate = Gate("up0")
    node.publish(first)  # nothing was attached, so there is nothing to wait for
    assert node.gate.reached.wait(PATIENCE)
    assert set(PODS) <= node.runs().keys()
    assert node.keeper.status() == DeviceReconcilerStatus()
    node.gate.open.set()
    until("it is ready", lambda: node.keeper.status().ready)
    assert node.has(first)


@in_both_ways
def test_newer_programs_are_everywhere_when_publish_returns(node: Site, first: Made, second: Made):
    node.ready(first)
    node.order.clear()
    node.publish(second)
    assert node.has(second)
    assert len(node.order) == 12, "each place once"
    assert first.closed
    assert not second.closed


def test_a_device_in_hand_delays_newer_programs_and_gets_them_too(
    node: Site, first: Made, second: Made
):
    node.gate = Gate("cali1")
    node.publish(first)
    assert node.gate.reached.wait(PATIENCE)
    done = threading.Event()
    thread = begin(lambda: (node.publish(second), done.set()))
    assert not done.wait(0.5), "one device still gets the old programs"
    assert not first.closed, "which it needs"
    assert node.settled == 0
    node.gate.open.set()
    thread.join(PATIENCE)
    assert done.is_set()
    assert first.id not in set().union(*node.runs().values())
    until("the rest follows", lambda: node.has(second))
    assert first.closed


def test_publish_waits_for_the_last_device_that_has_older_programs(
    node: Site, first: Made, second: Made
):
    node.ready(first)
    node.gate = Gate("up0")
    done = threading.Event()
    thread = begin(lambda: (node.publish(second), done.set()))
    assert node.gate.reached.wait(PATIENCE)
    assert not done.wait(0.3)
    assert node.runs()["up0"] == {first.id}
    assert not done.is_set()
    node.gate.open.set()
    thread.join(PATIENCE)
    assert node.has(second)


def test_programs_that_were_never_used_are_closed(node: Site, first: Made, second: Made):
    node.gate = Gate("cali1")
    node.publish(first)
    assert node.gate.reached.wait(PATIENCE)
    with idle("third") as program:
        third = Made(program)
        waiting = [begin(lambda: node.publish(second))]
        until("they are wanted", lambda: node.keeper._published is second)
        waiting.append(begin(lambda: node.publish(third)))
        until("they are superseded", lambda: second.closed)
        node.gate.open.set()
        for thread in waiting:
            thread.join(PATIENCE)
        until("the newest are everywhere", lambda: node.has(third))
        node.keeper.close()
        assert third.closed


# ---- changes -----------------------------------------------------------------------------------


@in_both_ways
def test_devices_come_and_go_by_themselves(node: Site, first: Made):
    node.ready(first)
    node.net.ip(f"link add cali9 type veth peer name cali9x netns {node.pods}")
    until("the new device has them", lambda: node.has(first, ALL | {"cali9"}))
    node.net.ip("link del cali0")
    until("nothing is kept of what went", lambda: node.has(first, (ALL - {"cali0"}) | {"cali9"}))
    pins = node.net.folder / "devices"
    kept = {str(node.net.index(name)) for name in (ALL - {"cali0"}) | {"cali9"}}
    until("pins", lambda: {p.name.partition("-")[0] for p in pins.iterdir()} == kept)


def test_a_device_that_moves_away_does_not_take_our_programs_with_it(node: Site, first: Made):
    node.how = AttachMethod.TCX
    node.ready(first)
    index = node.net.index("far")
    node.net.ip(f"link set far netns {node.pods}")
    path = Path("/run/netns") / node.pods

    def there() -> list[int]:
        number = netns.run_in(path, lambda: socket.if_nametoindex("far"))
        return [
            one
            for kind in ATTACH_TYPE.values()
            for one in netns.run_in(path, lambda kind=kind: objects.list_attached(number, kind))
        ]

    until("it runs nothing of ours", lambda: there() == [])
    assert not (node.net.folder / "devices" / f"{index}-ingress").exists()


def test_what_nobody_tells_is_seen_by_the_next_full_look(
    node: Site, first: Made, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RESYNC_INTERVAL_S", 0.3)
    node.how = AttachMethod.TCX
    node.ready(first)
    pin = node.net.folder / "devices" / f"{node.net.index('up0')}-ingress"
    pin.unlink()
    until("it is back", lambda: pin.exists() and node.has(first))


# ---- errors ------------------------------------------------------------------------------------


def test_a_device_that_refuses_is_told_stops_no_other_and_is_tried_again(
    node: Site, first: Made, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RETRY_DELAY_S", 0.1)
    with Program.load("wrong", 8, 0, insn(0xB7, 0, 0, 1) + insn(0x95)) as wrong:  # CGROUP_SKB
        first.others["cali1"] = wrong
        node.ready(first)
        assert list(node.keeper.status().failed) == ["cali1"]
        assert node.has(first, ALL - {"cali1"})
        assert node.settled == 0
        first.others.clear()
        until("it has them", lambda: node.has(first))
        until("it is told", lambda: not node.keeper.status().failed and node.settled)


@in_both_ways
def test_a_device_that_keeps_older_programs_is_said_until_it_has_newer_ones(
    node: Site, first: Made, second: Made, monkeypatch: pytest.MonkeyPatch
):
    """The others have theirs by then, and who publishes waits no longer."""
    monkeypatch.setattr(module, "RETRY_DELAY_S", 0.1)
    node.ready(first)
    assert node.keeper.is_rolled_out
    with Program.load("wrong", 8, 0, insn(0xB7, 0, 0, 1) + insn(0x95)) as wrong:  # CGROUP_SKB
        second.others["cali1"] = wrong
        with pytest.raises(OutdatedDevicesError, match=r"not all devices .* \(cali1\)"):
            node.publish(second)
        assert node.runs() == {name: {first.id if name == "cali1" else second.id} for name in ALL}
        assert not node.keeper.is_rolled_out
        second.others.clear()
        until("it is swapped", lambda: node.keeper.is_rolled_out)
        assert node.has(second)


def test_a_device_that_never_had_any_holds_nobody_up(node: Site, first: Made, second: Made):
    with Program.load("wrong", 8, 0, insn(0xB7, 0, 0, 1) + insn(0x95)) as wrong:  # CGROUP_SKB
        first.others["cali1"] = second.others["cali1"] = wrong
        node.ready(first)
        node.publish(second)
        assert node.keeper.is_rolled_out
        assert node.has(second, ALL - {"cali1"})


@pytest.mark.parametrize("error", [KernelError("no answer"), RuntimeError("a slip")])
def test_the_thread_outlives_every_error(
    node: Site, first: Made, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "RETRY_DELAY_S", 0.1)
    listing = module.list_devices

    def broken() -> None:
        raise error

    monkeypatch.setattr(module, "list_devices", broken)
    with pytest.raises(OutdatedDevicesError, match="not all devices have the new programs"):
        node.publish(first)
    assert str(error) in node.keeper.status().problem
    monkeypatch.setattr(module, "list_devices", listing)
    until("all is well", lambda: node.keeper.status().ready)
    assert node.keeper.status().problem == ""
    assert node.has(first)


def test_nobody_waits_for_ever(
    node: Site, first: Made, second: Made, monkeypatch: pytest.MonkeyPatch
):
    node.ready(first)
    monkeypatch.setattr(module, "PUBLISH_STALL_TIMEOUT_S", 0.3)
    node.gate = Gate("up0")
    with pytest.raises(OutdatedDevicesError, match="no progress for"):
        node.publish(second)
    assert "no progress" in node.keeper.status().problem
    node.gate.open.set()
    until("it is made good", lambda: node.has(second) and not node.keeper.status().problem)


# ---- the end -----------------------------------------------------------------------------------


def test_the_end_waits_for_the_device_in_hand_and_leaves_all_attached(node: Site, first: Made):
    node.gate = Gate("cali1")
    node.publish(first)
    assert node.gate.reached.wait(PATIENCE)
    ended = threading.Event()
    thread = begin(lambda: (node.keeper.close(), ended.set()))
    assert not ended.wait(0.3)
    assert not first.closed
    node.gate.open.set()
    thread.join(PATIENCE)
    assert first.closed
    assert not any(t.name == "devices" for t in threading.enumerate())
    assert 0 < len(node.runs()) < len(ALL), "it began no other device"
    before = node.runs()
    node.keeper.close()
    node.keeper = node.make()
    with idle() as program:
        again = Made(program)
        node.ready(again)
        assert before.keys() <= node.runs().keys()
        assert node.has(again)

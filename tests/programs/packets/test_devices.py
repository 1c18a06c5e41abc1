# SPDX-License-Identifier: Apache-2.0
"""Listing and watching real devices, and attaching programs to the chosen ones."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.packet_path.attach import DeviceAttachments, DeviceReport, PickProgram
from kbpf.dataplane.bpf.packet_path.device_roles import DeviceRole
from kbpf.errors import KernelError
from kbpf.kernel.bpf.clsact import Direction, FilterIdentity
from kbpf.kernel.bpf.objects import Link, Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE, AttachMethod
from kbpf.kernel.net.devices import BRIDGE_NETFILTER, ZERO_MAC, Device, DeviceEvents, DeviceMonitor, list_devices
from kbpf.kernel.net.uapi import ARPHRD_ETHER, ARPHRD_NONE
from kbpf.kernel.system import netns, sysctl
from kbpf.model.address import format_addr
from tests.programs.packets.tc.net import Net, both_ways, idle, insn, program_id
from tests.support.features import lacking, needs
from tests.support.lab.lab import PATIENCE, ip, run, until

Places = dict[tuple[str, Direction], int]


@pytest.fixture
def net() -> Iterator[Net]:
    """A namespace with a veth pair whose ends are both in it."""
    with ExitStack() as stack:
        made = Net(f"kbdev{os.getpid()}")
        stack.callback(made.close)
        yield made


@pytest.fixture
def pods(net: Net) -> Iterator[str]:
    """Another namespace, for the far ends of veth pairs."""
    name = f"{net.name}p"
    ip(f"netns add {name}")
    yield name
    ip(f"netns del {name}")


def set_br_netfilter(value: str) -> None:
    for name in BRIDGE_NETFILTER:
        with suppress(KernelError):  # the module is not loaded
            sysctl.write(name, value)


def listed(net: Net) -> dict[str, Device]:
    """The devices by name."""
    return {device.name: device for device in net.inside(list_devices)}


# ---- listing -----------------------------------------------------------------------------------


def test_devices_are_listed_with_their_properties(net: Net, pods: str):
    net.inside(lambda: set_br_netfilter("0"))
    net.ip(
        "link set lo up",
        "link add br0 type bridge",
        "link set br0 up",
        f"link add port0 mtu 1400 type veth peer name eth0 netns {pods}",
        "link set port0 master br0 up",
        "link add vx0 type vxlan id 5 dstport 4789 local 127.0.0.1",
        "link add mv0 link br0 type macvlan",
        "tuntap add tun0 mode tun",
        "tuntap add tap0 mode tap",
        "addr add 192.0.2.1/24 dev br0",
        "addr add 192.0.2.2/24 dev br0",  # secondary: the kernel does not choose it
        "addr add 198.51.100.1/32 dev port0",
        "addr add fe80::5/64 dev port0 nodad",
        "addr add 2001:db8::1/128 dev vx0 nodad",
        "addr add 2001:db8:1::1/64 dev mv0 nodad",
    )
    found = listed(net)
    sources = {name: [format_addr(a) for a in d.sources] for name, d in found.items() if d.sources}
    assert sources["br0"] == ["192.0.2.1"]
    assert sources["port0"] == ["198.51.100.1"]
    found = {name: replace(device, sources=()) for name, device in found.items()}
    index = {name: device.ifindex for name, device in found.items()}
    shown = json.loads(run("ip", "-n", net.name, "-j", "link"))
    macs = {
        d["ifname"]: bytes.fromhex(d.get("address", "").replace(":", "")) for d in shown if d["link_type"] == "ether"
    }
    peer = netns.run_in(Path("/run/netns") / pods, list_devices)[-1]
    assert found["lo"] == Device(index["lo"], "lo", loopback=True, mtu=65536, link_type=772)
    assert found["br0"] == Device(index["br0"], "br0", "bridge", mtu=1400, has_subnet=True, mac=macs["br0"])
    assert found["port0"] == Device(
        index["port0"],
        "port0",
        "veth",
        mtu=1400,
        master=index["br0"],
        link=peer.ifindex,
        peer_netns=found["port0"].peer_netns,
        mac=macs["port0"],
    )
    assert found["port0"].peer_netns is not None
    assert found["here"] == Device(index["here"], "here", "veth", link=index["far"], mac=macs["here"])
    assert found["vx0"] == Device(index["vx0"], "vx0", "vxlan", up=False, mtu=found["vx0"].mtu, mac=macs["vx0"])
    assert found["mv0"] == Device(
        index["mv0"], "mv0", "macvlan", up=False, mtu=1400, link=index["br0"], has_subnet=True, mac=macs["mv0"]
    )
    assert found["tun0"].mac == ZERO_MAC
    assert found["tun0"] == Device(index["tun0"], "tun0", "tun", up=False, point_to_point=True, link_type=ARPHRD_NONE)
    assert found["tap0"] == Device(index["tap0"], "tap0", "tun", up=False, link_type=ARPHRD_ETHER, mac=macs["tap0"])
    assert {name for name, device in found.items() if not device.has_header} == {"lo", "tun0"}
    assert {name for name, device in found.items() if not device.carries_ip} == {"lo"}


@needs("br_netfilter")
def test_bridges_whose_packets_pass_netfilter_are_listed_as_such(net: Net, br_netfilter: None):
    net.ip("link add br0 type bridge", "link add br1 type bridge")

    def passing() -> set[str]:
        return {name for name, device in listed(net).items() if device.bridge_netfilter}

    net.inside(lambda: set_br_netfilter("0"))
    assert passing() == set()
    for setting in ("nf_call_iptables", "nf_call_ip6tables"):
        net.ip(f"link set br1 type bridge {setting} 1")
        assert passing() == {"br1"}, setting
        net.ip(f"link set br1 type bridge {setting} 0")
    for name in BRIDGE_NETFILTER:
        net.inside(lambda: sysctl.write(name, "1"))  # noqa: B023
        assert passing() == {"br0", "br1"}, name
        net.inside(lambda: sysctl.write(name, "0"))  # noqa: B023


def test_listing_returns_all_of_many_devices(net: Net):
    net.ip(*(f"link add a{i} type veth peer name b{i}" for i in range(150)))
    devices = net.inside(list_devices)
    theirs = json.loads(run("ip", "-n", net.name, "-j", "link"))
    assert [(d.ifindex, d.name, d.mtu) for d in devices] == sorted(
        (one["ifindex"], one["ifname"], one["mtu"]) for one in theirs
    )
    assert len(devices) > 300


# ---- watching ----------------------------------------------------------------------------------


@pytest.fixture
def wake() -> Iterator[int]:
    """An eventfd that ends a wait when it is written to."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def test_monitor_reports_each_change(net: Net, wake: int):
    with net.inside(DeviceMonitor) as watch:
        assert watch.wait(0, wake) == DeviceEvents(False)
        for change in (
            "link add one type bridge",
            "addr add 192.0.2.1/24 dev one",
            "addr add 2001:db8::1/64 dev one nodad",
            "link set here master one",
            "link set here down",
            "link set here name there",  # before Linux 6.2 only while it is down
            "link set there up",
            "link set there address 02:00:00:00:00:07",
            "link set there nomaster",
        ):
            net.ip(change)
            assert watch.wait(PATIENCE, wake) == DeviceEvents(True), change
            while watch.wait(0.05, wake).received:
                pass


def test_monitor_names_deleted_devices(net: Net, pods: str, wake: int):
    net.ip("link add one type bridge", "link add two type veth peer name three")
    index = {name: net.index(name) for name in ("one", "two", "three")}
    with net.inside(DeviceMonitor) as watch:
        net.ip("link del one")
        assert watch.wait(PATIENCE, wake) == DeviceEvents(True, {index["one"]})
        net.ip(f"link set three netns {pods}")
        gone: set[int] = set()
        until("it is reported", lambda: gone.update(watch.wait(0.1, wake).deleted or ()) or gone)
        assert gone == {index["three"]}


def test_monitor_reports_filters_of_others(net: Net, wake: int):
    ours = FilterIdentity()
    changes = (
        ("qdisc add dev here clsact", False),
        ("filter add dev here egress prio 1 handle 1 bpf da object-pinned {}", True),
        ("filter replace dev here egress prio 1 handle 1 bpf da object-pinned {}", True),
        (f"filter add dev here egress prio 1 handle {ours.handle} bpf da object-pinned {{}}", False),
        ("filter add dev here egress prio 2 u32 match u32 0 0 classid 1:1", False),
        ("filter del dev here egress prio 1 handle 1 bpf", False),
    )
    path = net.folder / "theirs"
    with idle("theirs") as program, net.inside(lambda: DeviceMonitor(ours.handles)) as watch:
        program.pin(path)
        for change, expected in changes:
            net.tc(*change.format(path).split())
            assert watch.wait(0.5, wake) == DeviceEvents(False, frozenset(), expected), change


def test_wait_ends_when_the_eventfd_is_written(net: Net, wake: int):
    with net.inside(DeviceMonitor) as watch:
        os.eventfd_write(wake, 1)
        assert watch.wait(60, wake) == DeviceEvents(False)


def test_lost_messages_count_as_a_change(net: Net, wake: int):
    """The socket is not read until the kernel has dropped messages; then it is read again."""

    def lost() -> int:
        lines = Path("/proc/thread-self/net/netlink").read_text().splitlines()[1:]
        return sum(int(line.split()[8]) for line in lines)  # Drops

    with net.inside(DeviceMonitor) as watch:
        for _ in range(20):
            if net.inside(lost):
                break
            net.ip(*(f"link set here mtu {1400 + i % 2}" for i in range(500)))
        assert net.inside(lost)
        assert watch.wait(PATIENCE, wake) == DeviceEvents(True, None)
        until("the socket is empty", lambda: watch.wait(0.05, wake) == DeviceEvents(False))
        net.ip("link add one type bridge")
        assert watch.wait(PATIENCE, wake).received


# ---- syncing programs --------------------------------------------------------------------------


@pytest.fixture
def node(net: Net, pods: str) -> Net:
    """A node: an uplink, a bridge with a pod, and a routed pod."""
    net.inside(lambda: set_br_netfilter("0"))
    net.ip(
        "link set lo up",
        f"link add up0 type veth peer name wire netns {pods}",
        "addr add 192.0.2.1/24 dev up0",
        "link add cni0 type bridge",
        f"link add port0 type veth peer name eth0 netns {pods}",
        "link set port0 master cni0",
        f"link add cali0 type veth peer name eth1 netns {pods}",
        *(f"link set {name} up" for name in ("up0", "cni0", "port0", "cali0")),
    )
    return net


@pytest.fixture
def kit() -> Iterator[dict[DeviceRole, Program]]:
    """A program for each role."""
    with idle("host") as host, idle("pod") as pod:
        yield {DeviceRole.HOST: host, DeviceRole.POD: pod}


def by_role(kit: dict[DeviceRole, Program]) -> PickProgram:
    """Picks the role's program in both directions."""
    return lambda device, role, direction: kit[role]


def sync(net: Net, devices: DeviceAttachments, pick: PickProgram) -> DeviceReport:
    """Syncs once with the devices that exist now."""
    return net.inside(lambda: devices.sync(list_devices(), pick))


def places(net: Net, report: DeviceReport) -> Places:
    """The attached programs: (device, direction) → program id; each place may occur once only."""
    names = {device.ifindex: name for name, device in listed(net).items()}
    found = {(names[a.ifindex], a.direction): a.program_id for a in report.attachments}
    assert len(found) == len(report.attachments)
    return found


def everywhere(roles: dict[str, DeviceRole], kit: dict[DeviceRole, Program]) -> Places:
    """The role's program in both directions of each device."""
    return {(n, d): program_id(kit[role]) for n, role in roles.items() for d in Direction}


ROLES = {
    "up0": DeviceRole.HOST,
    "here": DeviceRole.HOST,
    "far": DeviceRole.HOST,
    "cni0": DeviceRole.POD,
    "cali0": DeviceRole.POD,
}


@both_ways
def test_chosen_devices_get_their_programs_once(node: Net, kit: dict[DeviceRole, Program], how: AttachMethod):
    devices = DeviceAttachments(node.folder, method=how)
    first = sync(node, devices, by_role(kit))
    assert places(node, first) == everywhere(ROLES, kit)
    assert (first.added, first.replaced, first.removed, first.failed) == (10, 0, 0, {})
    assert {a.method for a in first.attachments} == {how}
    assert devices.status() == first
    again = sync(node, devices, by_role(kit))
    assert (again.added, again.replaced, again.removed) == (0, 0, 0)
    assert set(again.attachments) == set(first.attachments)
    for (name, direction), program in everywhere(ROLES, kit).items():
        assert node.tcx(direction, name) == ([program] if how is AttachMethod.TCX else [])
        assert node.filters(direction, name) == (["kbpf"] if how is AttachMethod.CLSACT else [])
    assert node.tcx(Direction.INGRESS, "port0") == node.filters(Direction.INGRESS, "port0") == []


@needs("br_netfilter")
@both_ways
def test_ports_of_a_bridge_get_the_program_for_ingress_while_br_netfilter_is_in_force(
    node: Net, pods: str, kit: dict[DeviceRole, Program], br_netfilter: None, how: AttachMethod
):
    kit[DeviceRole.PORT] = kit[DeviceRole.POD]
    devices = DeviceAttachments(node.folder, method=how)
    sync(node, devices, by_role(kit))
    node.inside(lambda: set_br_netfilter("1"))
    report = sync(node, devices, by_role(kit))
    port = {("port0", Direction.INGRESS): program_id(kit[DeviceRole.PORT])}
    assert places(node, report) == everywhere(ROLES, kit) | port
    assert (report.added, report.replaced, report.removed, report.failed) == (1, 0, 0, {})
    report = sync(node, devices, by_role(kit))
    assert (report.added, report.replaced, report.removed) == (0, 0, 0)
    node.ip(f"link add port1 type veth peer name eth2 netns {pods}", "link set port1 master cni0")
    report = sync(node, devices, by_role(kit))
    new_port = {("port1", Direction.INGRESS): program_id(kit[DeviceRole.PORT])}
    assert places(node, report) == everywhere(ROLES, kit) | port | new_port
    with idle() as newer:
        report = sync(node, devices, lambda *_: newer)
        assert (report.added, report.replaced, report.removed) == (0, 12, 0)
    node.ip("link set port1 nomaster")
    node.inside(lambda: set_br_netfilter("0"))
    report = sync(node, devices, by_role(kit))
    roles = ROLES | {"port1": DeviceRole.POD}
    assert places(node, report) == everywhere(roles, kit)
    assert (report.added, report.removed) == (1, 1)


@both_ways
def test_next_agent_adopts_and_replaces_programs(node: Net, kit: dict[DeviceRole, Program], how: AttachMethod):
    first = sync(node, DeviceAttachments(node.folder, method=how), by_role(kit))
    same = sync(node, DeviceAttachments(node.folder, method=how), by_role(kit))
    assert (same.added, same.replaced, same.removed) == (0, 0, 0)
    assert set(same.attachments) == set(first.attachments)
    with idle() as host, idle() as pod:
        newer = {DeviceRole.HOST: host, DeviceRole.POD: pod}
        upgraded = sync(node, DeviceAttachments(node.folder, method=how), by_role(newer))
        assert (upgraded.added, upgraded.replaced, upgraded.removed) == (0, 10, 0)
        assert places(node, upgraded) == everywhere(ROLES, newer)


@both_ways
def test_sync_follows_added_changed_and_deleted_devices(
    node: Net, pods: str, kit: dict[DeviceRole, Program], how: AttachMethod
):
    devices = DeviceAttachments(node.folder, excluded=("far",), method=how)
    roles = {name: role for name, role in ROLES.items() if name != "far"}
    sync(node, devices, by_role(kit))
    node.ip(f"link add cali1 type veth peer name eth2 netns {pods}", "link del cali0")
    report = sync(node, devices, by_role(kit))
    roles = {**roles, "cali1": DeviceRole.POD}
    del roles["cali0"]
    assert places(node, report) == everywhere(roles, kit)
    assert (report.added, report.replaced, report.removed) == (2, 0, 0)
    kept = {path.name.partition("-")[0] for path in (node.folder / "devices").iterdir()}
    assert kept == {str(node.index(name)) for name in roles}

    node.ip("link set here master cni0")
    # A veth pair with both ends in this namespace leads nowhere, so the bridge keeps its role.
    report = sync(node, devices, by_role(kit))
    del roles["here"]
    assert places(node, report) == everywhere(roles, kit)
    assert (report.added, report.replaced, report.removed) == (0, 0, 2)

    node.ip("tuntap add tap0 mode tap", "link set tap0 master cni0")
    report = sync(node, devices, by_role(kit))
    assert places(node, report) == everywhere({**roles, "cni0": DeviceRole.HOST}, kit)
    assert (report.added, report.replaced, report.removed) == (0, 2, 0)


def test_devices_that_no_pattern_matches_are_detached(node: Net, kit: dict[DeviceRole, Program]):
    sync(node, DeviceAttachments(node.folder), by_role(kit))
    report = sync(node, DeviceAttachments(node.folder, patterns=("up*",)), by_role(kit))
    roles = {"up0": DeviceRole.HOST, "cni0": DeviceRole.POD, "cali0": DeviceRole.POD}
    assert places(node, report) == everywhere(roles, kit)
    assert report.removed == 4


@both_ways
def test_direction_without_a_program_is_detached(node: Net, kit: dict[DeviceRole, Program], how: AttachMethod):
    devices = DeviceAttachments(node.folder, method=how)
    sync(node, devices, by_role(kit))
    report = sync(node, devices, lambda _, r, d: kit[r] if d is Direction.INGRESS else None)
    assert {one.direction for one in report.attachments} == {Direction.INGRESS}
    assert (report.added, report.replaced, report.removed) == (0, 0, 5)


@pytest.mark.parametrize(
    ("old", "new"), [(AttachMethod.TCX, AttachMethod.CLSACT), (AttachMethod.CLSACT, AttachMethod.TCX)]
)
@needs("tcx")
def test_other_attach_method_takes_over(
    node: Net, kit: dict[DeviceRole, Program], old: AttachMethod, new: AttachMethod
):
    sync(node, DeviceAttachments(node.folder, method=old), by_role(kit))
    report = sync(node, DeviceAttachments(node.folder, method=new), by_role(kit))
    assert places(node, report) == everywhere(ROLES, kit)
    assert {one.method for one in report.attachments} == {new}
    assert node.qdiscs("up0") == ("clsact" if new is AttachMethod.CLSACT else "")
    assert len(node.tcx(Direction.INGRESS, "up0")) == (new is AttachMethod.TCX)


@both_ways
def test_attachments_removed_by_others_come_back(node: Net, kit: dict[DeviceRole, Program], how: AttachMethod):
    devices = DeviceAttachments(node.folder, method=how)
    sync(node, devices, by_role(kit))
    if how is AttachMethod.CLSACT:
        node.tc("qdisc", "del", "dev", "up0", "clsact")
    else:
        for direction in Direction:
            (node.folder / "devices" / f"{node.index('up0')}-{direction}").unlink()
            until("it is detached", lambda to=direction: not node.tcx(to, "up0"))
    report = sync(node, devices, by_role(kit))
    assert report.added == 2
    assert places(node, report) == everywhere(ROLES, kit)


@both_ways
def test_device_deleted_after_the_listing_is_no_failure(node: Net, kit: dict[DeviceRole, Program], how: AttachMethod):
    devices = DeviceAttachments(node.folder, method=how)
    listing = node.inside(list_devices)
    node.ip("link del cali0")
    report = node.inside(lambda: devices.sync(listing, by_role(kit)))
    roles = {name: role for name, role in ROLES.items() if name != "cali0"}
    assert report.failed == {}
    assert places(node, report) == everywhere(roles, kit)


@both_ways
def test_device_deleted_during_the_sync_is_no_failure(node: Net, kit: dict[DeviceRole, Program], how: AttachMethod):
    devices = DeviceAttachments(node.folder, method=how)
    sync(node, devices, by_role(kit))

    def pick(device: Device, role: DeviceRole, direction: Direction) -> Program:
        if device.name == "cali0" and direction is Direction.INGRESS:
            node.ip("link del cali0")
        return kit[DeviceRole.HOST]

    report = sync(node, devices, pick)
    roles = {name: DeviceRole.HOST for name in ROLES if name != "cali0"}
    assert report.failed == {}
    assert places(node, report) == everywhere(roles, kit)


@both_ways
def test_clsact_qdisc_recreated_by_others_stays(node: Net, kit: dict[DeviceRole, Program], how: AttachMethod):
    devices = DeviceAttachments(node.folder, method=how)
    sync(node, devices, by_role(kit))
    with suppress(RuntimeError):
        node.tc("qdisc", "del", "dev", "up0", "clsact")
    node.tc("qdisc", "add", "dev", "up0", "clsact")
    assert places(node, sync(node, devices, by_role(kit))) == everywhere(ROLES, kit)
    node.inside(devices.remove)
    assert node.qdiscs("up0") == "clsact"


@both_ways
def test_failed_device_stops_no_other_and_is_retried(node: Net, kit: dict[DeviceRole, Program], how: AttachMethod):
    devices = DeviceAttachments(node.folder, method=how)
    with Program.load("wrong", 8, 0, insn(0xB7, 0, 0, 1) + insn(0x95)) as wrong:  # CGROUP_SKB
        report = sync(node, devices, lambda d, r, _: wrong if d.name == "here" else kit[r])
    assert list(report.failed) == ["here"]
    assert f"ingress of here, {how}" in report.failed["here"]
    roles = {name: role for name, role in ROLES.items() if name != "here"}
    assert places(node, report) == everywhere(roles, kit)
    report = sync(node, devices, by_role(kit))
    assert report.failed == {}
    assert places(node, report) == everywhere(ROLES, kit)


@both_ways
def test_remove_leaves_only_foreign_attachments(node: Net, kit: dict[DeviceRole, Program], how: AttachMethod):
    node.tc("qdisc", "add", "dev", "up0", "clsact")
    words = "filter add dev up0 egress prio 9 u32 match u32 0 0 classid 1:1"
    node.tc(*words.split())
    index, kind = node.index("up0"), ATTACH_TYPE[Direction.INGRESS]
    with ExitStack() as stack:
        foreign = stack.enter_context(idle())
        if not lacking("tcx"):
            stack.enter_context(node.inside(lambda: Link.attach(foreign, index, kind)))
        devices = DeviceAttachments(node.folder, method=how)
        sync(node, devices, by_role(kit))
        node.ip("link del cali0")
        assert len(node.inside(devices.remove)) == 8
        assert node.inside(devices.remove) == ()
        assert devices.status() == DeviceReport()
        assert list(node.folder.iterdir()) == []
        assert {d: node.qdiscs(d) for d in ("up0", "here", "far", "cni0")} == {
            "up0": "clsact",
            "here": "",
            "far": "",
            "cni0": "",
        }
        assert "u32" in node.tc("filter", "show", "dev", "up0", "egress")
        others = [] if lacking("tcx") else [program_id(foreign)]
        assert node.tcx(Direction.INGRESS, "up0") == others
        assert node.filters(Direction.INGRESS, "up0") == []


@needs("tcx")
def test_remove_detaches_both_methods_of_an_earlier_agent(node: Net, kit: dict[DeviceRole, Program]):
    sync(node, DeviceAttachments(node.folder, patterns=("up0",), method=AttachMethod.CLSACT), by_role(kit))
    (node.folder / "devices").rename(node.folder / "lost")  # as if the pin folder were lost
    with idle() as other:
        sync(node, DeviceAttachments(node.folder, method=AttachMethod.TCX), lambda *_: other)
        assert len(node.inside(DeviceAttachments(node.folder).remove)) == 10
    assert node.filters(Direction.INGRESS, "up0") == []
    assert node.tcx(Direction.INGRESS, "up0") == []

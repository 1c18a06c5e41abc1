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
from kbpf.kernel.system import sysctl
from kbpf.model.address import format_addr
from tests.programs.packets.tc.net import Net, idle, program_id
from tests.support.features import lacking, needs
from tests.support.lab.lab import PATIENCE, run, until
from tests.support.lab.namespace import Namespace


@pytest.fixture
def pods(namespace: Namespace) -> str:
    """Another namespace, for the far ends of veth pairs."""
    return namespace.name


def set_br_netfilter(value: str) -> None:
    for name in BRIDGE_NETFILTER:
        with suppress(KernelError):  # the module is not loaded
            sysctl.write(name, value)


def listed(net: Net) -> dict[str, Device]:
    """The devices by name."""
    return {device.name: device for device in net.do(list_devices)}


# ---- listing -----------------------------------------------------------------------------------


def test_devices_are_listed_with_their_properties(net: Net, pods: str):
    net.do(lambda: set_br_netfilter("0"))
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
    found = {name: replace(device, addresses=(), sources=(), subnets=()) for name, device in found.items()}
    index = {name: device.ifindex for name, device in found.items()}
    shown = json.loads(run("ip", "-n", net.name, "-j", "link"))
    macs = {
        d["ifname"]: bytes.fromhex(d.get("address", "").replace(":", "")) for d in shown if d["link_type"] == "ether"
    }
    peer = Namespace(pods).do(list_devices)[-1]
    assert found["port0"].peer_netns is not None

    def device(name: str, kind: str = "", **fields: object) -> Device:
        return Device(index[name], name, kind, mac=macs.get(name, ZERO_MAC), **fields)

    port = {"master": index["br0"], "link": peer.ifindex, "peer_netns": found["port0"].peer_netns}
    expected = {
        "lo": device("lo", loopback=True, mtu=65536, link_type=772),
        "br0": device("br0", "bridge", mtu=1400, has_subnet=True),
        "port0": device("port0", "veth", mtu=1400, **port),
        "here": device("here", "veth", link=index["far"]),
        "far": device("far", "veth", link=index["here"]),
        "vx0": device("vx0", "vxlan", up=False, mtu=found["vx0"].mtu),
        "mv0": device("mv0", "macvlan", up=False, mtu=1400, link=index["br0"], has_subnet=True),
        "tun0": device("tun0", "tun", up=False, point_to_point=True, link_type=ARPHRD_NONE),
        "tap0": device("tap0", "tun", up=False, link_type=ARPHRD_ETHER),
    }
    assert {name: found[name] for name in expected} == expected
    assert {name for name, device in found.items() if not device.has_header} == {"lo", "tun0"}
    assert {name for name, device in found.items() if not device.carries_ip} == {"lo"}


@needs("br_netfilter")
def test_bridges_whose_packets_pass_netfilter_are_listed_as_such(net: Net, br_netfilter: None):
    net.ip("link add br0 type bridge", "link add br1 type bridge")

    def passing() -> set[str]:
        return {name for name, device in listed(net).items() if device.bridge_netfilter}

    net.do(lambda: set_br_netfilter("0"))
    assert passing() == set()
    for setting in ("nf_call_iptables", "nf_call_ip6tables"):
        net.ip(f"link set br1 type bridge {setting} 1")
        assert passing() == {"br1"}, setting
        net.ip(f"link set br1 type bridge {setting} 0")
    for name in BRIDGE_NETFILTER:
        net.do(lambda: sysctl.write(name, "1"))  # noqa: B023
        assert passing() == {"br0", "br1"}, name
        net.do(lambda: sysctl.write(name, "0"))  # noqa: B023


def test_listing_returns_all_of_many_devices(net: Net):
    net.ip(*(f"link add a{i} type veth peer name b{i}" for i in range(150)))
    devices = net.do(list_devices)
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
    with net.do(DeviceMonitor) as watch:
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
    with net.do(DeviceMonitor) as watch:
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
    with idle("theirs") as program, net.do(lambda: DeviceMonitor(ours.handles)) as watch:
        program.pin(path)
        for change, expected in changes:
            net.tc(change.format(path))
            assert watch.wait(0.5, wake) == DeviceEvents(False, frozenset(), expected), change


def test_lost_messages_count_as_a_change(net: Net, wake: int):
    """The socket is not read until the kernel has dropped messages; then it is read again."""

    def lost() -> int:
        lines = Path("/proc/thread-self/net/netlink").read_text().splitlines()[1:]
        return sum(int(line.split()[8]) for line in lines)  # Drops

    with net.do(DeviceMonitor) as watch:
        for _ in range(20):
            if net.do(lost):
                break
            net.ip(*(f"link set here mtu {1400 + i % 2}" for i in range(500)))
        assert net.do(lost)
        assert watch.wait(PATIENCE, wake) == DeviceEvents(True, None)
        until("the socket is empty", lambda: watch.wait(0.05, wake) == DeviceEvents(False))
        net.ip("link add one type bridge")
        assert watch.wait(PATIENCE, wake).received


# ---- syncing programs --------------------------------------------------------------------------


@pytest.fixture
def node(net: Net, pods: str) -> Net:
    """A node: an uplink, a bridge with a pod, and a routed pod."""
    net.do(lambda: set_br_netfilter("0"))
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


Kit = dict[DeviceRole, Program]
HOST, POD, PORT = DeviceRole.HOST, DeviceRole.POD, DeviceRole.PORT


@pytest.fixture
def kit() -> Iterator[Kit]:
    """A program for each role."""
    with idle("host") as host, idle("pod") as pod:
        yield {HOST: host, POD: pod, PORT: pod}


@pytest.fixture(params=[pytest.param(AttachMethod.TCX, marks=needs("tcx")), AttachMethod.CLSACT])
def how(request) -> AttachMethod:
    return request.param


def roles(hosts: str, pods: str, ports: str = "") -> dict[str, DeviceRole]:
    return {name: role for role, names in ((HOST, hosts), (POD, pods), (PORT, ports)) for name in names.split()}


ROLES = roles("up0 here far", "cni0 cali0")


class Agent:
    """Attaches the program of each device's role, as an agent does after its start."""

    def __init__(self, net: Net, kit: Kit, how: AttachMethod | None, **settings: tuple[str, ...]) -> None:
        self.net, self.kit = net, kit
        self.devices = DeviceAttachments(net.folder, method=how, **settings)

    def sync(self, pick: PickProgram | None = None) -> DeviceReport:
        """Syncs once with the devices that exist now."""
        pick = pick or (lambda device, role, direction: self.kit[role])
        return self.net.do(lambda: self.devices.sync(list_devices(), pick))

    def expect(self, roles: dict[str, DeviceRole], added: int = 0, replaced: int = 0, removed: int = 0) -> DeviceReport:
        """Syncs. Then just these devices have the programs of their roles, after so many changes."""
        report = self.sync()
        self.expect_places(report, roles)
        assert (report.added, report.replaced, report.removed) == (added, replaced, removed)
        return report

    def expect_places(self, report: DeviceReport, roles: dict[str, DeviceRole]) -> None:
        """In both directions, on ports of a bridge at ingress only; nothing has failed."""
        names = {device.ifindex: name for name, device in listed(self.net).items()}
        found = sorted((names[a.ifindex], a.direction, a.program_id) for a in report.attachments)
        assert found == sorted(
            (name, direction, program_id(self.kit[role]))
            for name, role in roles.items()
            for direction in Direction
            if role is not PORT or direction is Direction.INGRESS
        )
        assert report.failed == {}


@pytest.fixture
def agent(node: Net, kit: Kit, how: AttachMethod) -> Agent:
    return Agent(node, kit, how)


def test_chosen_devices_get_their_programs_once_from_each_agent(node: Net, agent: Agent, how: AttachMethod):
    first = agent.expect(ROLES, added=10)
    assert {a.method for a in first.attachments} == {how}
    assert agent.devices.status() == first
    for same in (agent, Agent(node, agent.kit, how)):
        assert set(same.expect(ROLES).attachments) == set(first.attachments)
    for name, role in ROLES.items():
        for direction in Direction:
            assert node.tcx(direction, name) == [program_id(agent.kit[role])] * (how is AttachMethod.TCX)
            assert node.filters(direction, name) == ["kbpf"] * (how is AttachMethod.CLSACT)
    assert node.tcx(Direction.INGRESS, "port0") == node.filters(Direction.INGRESS, "port0") == []
    with idle() as host, idle() as pod:
        Agent(node, {HOST: host, POD: pod}, how).expect(ROLES, replaced=10)


@needs("br_netfilter")
def test_ports_of_a_bridge_get_the_program_for_ingress_while_br_netfilter_is_in_force(
    node: Net, pods: str, agent: Agent, br_netfilter: None
):
    agent.expect(ROLES, added=10)
    node.do(lambda: set_br_netfilter("1"))
    agent.expect(ROLES | {"port0": PORT}, added=1)
    agent.expect(ROLES | {"port0": PORT})
    node.ip(f"link add port1 type veth peer name eth2 netns {pods}", "link set port1 master cni0")
    agent.expect(ROLES | {"port0": PORT, "port1": PORT}, added=1)
    with idle() as newer:
        report = agent.sync(lambda *_: newer)
        assert (report.added, report.replaced, report.removed) == (0, 12, 0)
    node.ip("link set port1 nomaster")
    node.do(lambda: set_br_netfilter("0"))
    agent.expect(ROLES | {"port1": POD}, added=1, replaced=11, removed=1)


def test_sync_follows_added_changed_and_deleted_devices(node: Net, pods: str, kit: Kit, how: AttachMethod):
    agent = Agent(node, kit, how, excluded=("far",))
    agent.expect(roles("up0 here", "cni0 cali0"), added=8)
    node.ip(f"link add cali1 type veth peer name eth2 netns {pods}", "link del cali0")
    agent.expect(roles("up0 here", "cni0 cali1"), added=2)
    kept = {path.name.partition("-")[0] for path in (node.folder / "devices").iterdir()}
    assert kept == {str(node.index(name)) for name in ("up0", "here", "cni0", "cali1")}
    node.ip("link set here master cni0")
    # A veth pair with both ends in this namespace leads nowhere, so the bridge keeps its role.
    agent.expect(roles("up0", "cni0 cali1"), removed=2)
    node.ip("tuntap add tap0 mode tap", "link set tap0 master cni0")
    agent.expect(roles("up0 cni0", "cali1"), replaced=2)


def test_devices_that_no_pattern_matches_are_detached(node: Net, kit: Kit):
    Agent(node, kit, None).expect(ROLES, added=10)
    Agent(node, kit, None, patterns=("up*",)).expect(roles("up0", "cni0 cali0"), removed=4)


def test_direction_without_a_program_is_detached(agent: Agent):
    agent.sync()
    report = agent.sync(lambda _, role, to: agent.kit[role] if to is Direction.INGRESS else None)
    assert {one.direction for one in report.attachments} == {Direction.INGRESS}
    assert (report.added, report.replaced, report.removed) == (0, 0, 5)


@needs("tcx")
def test_other_attach_method_takes_over(node: Net, agent: Agent, how: AttachMethod):
    agent.sync()
    (new,) = set(AttachMethod) - {how}
    report = Agent(node, agent.kit, new).sync()
    agent.expect_places(report, ROLES)
    assert {one.method for one in report.attachments} == {new}
    assert node.qdiscs("up0") == ("clsact" if new is AttachMethod.CLSACT else "")
    assert len(node.tcx(Direction.INGRESS, "up0")) == (new is AttachMethod.TCX)


def test_attachments_removed_by_others_come_back(node: Net, agent: Agent, how: AttachMethod):
    agent.sync()
    if how is AttachMethod.CLSACT:
        node.tc("qdisc del dev up0 clsact")
    else:
        for direction in Direction:
            (node.folder / "devices" / f"{node.index('up0')}-{direction}").unlink()
            until("it is detached", lambda to=direction: not node.tcx(to, "up0"))
    agent.expect(ROLES, added=2)


def test_device_deleted_after_the_listing_is_no_failure(node: Net, agent: Agent):
    listing = node.do(list_devices)
    node.ip("link del cali0")
    report = node.do(lambda: agent.devices.sync(listing, lambda _, role, __: agent.kit[role]))
    agent.expect_places(report, roles("up0 here far", "cni0"))


def test_remove_leaves_only_foreign_attachments(node: Net, agent: Agent):
    node.tc("qdisc add dev up0 clsact")
    node.tc("filter add dev up0 egress prio 9 u32 match u32 0 0 classid 1:1")
    index, kind = node.index("up0"), ATTACH_TYPE[Direction.INGRESS]
    with ExitStack() as stack:
        foreign = stack.enter_context(idle())
        if not lacking("tcx"):
            stack.enter_context(node.do(lambda: Link.attach(foreign, index, kind)))
        agent.sync()
        node.ip("link del cali0")
        assert len(node.do(agent.devices.remove)) == 8
        assert node.do(agent.devices.remove) == ()
        assert agent.devices.status() == DeviceReport()
        assert list(node.folder.iterdir()) == []
        assert [node.qdiscs(name) for name in ("up0", "here", "far", "cni0")] == ["clsact", "", "", ""]
        assert "u32" in node.tc("filter show dev up0 egress")
        others = [] if lacking("tcx") else [program_id(foreign)]
        assert node.tcx(Direction.INGRESS, "up0") == others
        assert node.filters(Direction.INGRESS, "up0") == []

# SPDX-License-Identifier: Apache-2.0
"""Which cgroups are found for pods (kubelet's names: tests/values/kernel/test_pods.py) and which of them are in the map
(patterns: tests/values/dataplane/test_exemptions.py).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kbpf.dataplane.bpf import exemptions
from kbpf.dataplane.bpf.exemptions import Exemptions
from kbpf.dataplane.bpf.maps.layout import ConfigFlag, Reason
from kbpf.dataplane.bpf.packet_path.device_thread import DeviceReconcilerStatus
from kbpf.dataplane.bpf.packet_path.packet_path import PacketPath
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.errors import KernelError
from kbpf.model.config import SocketLb
from kbpf.model.objects import Protocol
from tests.support.lab.lab import Place, cgroup2, until
from tests.support.lab.namespace import Namespace
from tests.support.plane import HOOKS, LOCAL, Site, desired, picks, service
from tests.support.stub_programs import refuse_to_compile

ONE, TWO = "0f4b1c5e-7d2a-4a8e-9d3f-1a2b3c4d5e6f", "1f4b1c5e-7d2a-4a8e-9d3f-1a2b3c4d5e6f"


@pytest.fixture
def tree(site: Site) -> Callable[[str], Path]:
    """Creates cgroups below the site's, which is removed with them."""

    def make(path: str) -> Path:
        folder = site.cgroup / path
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    return make


# ---- over time -----------------------------------------------------------------------------------


class Run:
    """Exemptions that write to a plane's map, with a clock of the test."""

    def __init__(self, site: Site, plane: BpfPlane, *patterns: str) -> None:
        self.site = site
        self.notifications: list[bool] = []  # at each notification: whether any cgroup is exempt
        self.exemptions = Exemptions(cgroup2(), site.cgroup, patterns, plane._agent_maps, self._notify)
        self.exemptions.adopt()

    def _notify(self) -> None:
        self.notifications.append(not self.exemptions.is_empty)

    def ids(self) -> set[int]:
        return {int.from_bytes(key, "little") for key in self.site.entries("exempt_cgroups")}


def test_pod_is_polled_until_its_cgroup_exists(site: Site, plane: BpfPlane, tree: Callable[[str], Path]):
    run = Run(site, plane)
    run.exemptions.set_pods((), True, 100.0)
    assert run.exemptions.tick(100.0) is None, "no pod is exempt: nothing is due"
    run.exemptions.set_pods((ONE,), True, 100.0)
    assert run.exemptions.tick(100.0) == 100.0 + exemptions.NEW_POD_POLL_INTERVAL_S
    folder = tree(f"kubepods/pod{ONE}")
    tree(f"kubepods/pod{TWO}/pod{ONE}")
    assert run.ids() == set()
    assert run.exemptions.tick(100.1) == 100.0 + exemptions.NEW_POD_POLL_INTERVAL_S, "not due yet"
    assert run.ids() == set()
    assert run.exemptions.tick(100.3) == 100.3 + exemptions.VERIFY_INTERVAL_S
    assert (run.ids(), run.notifications) == ({folder.stat().st_ino}, [True])
    assert not run.exemptions.problems(1000.0)
    folder.rmdir()
    run.exemptions.tick(111.0)
    assert (run.ids(), run.notifications) == (set(), [True, False])
    run.exemptions.set_pods((), True, 112.0)
    assert run.exemptions.tick(112.0) is None


def test_missing_pod_is_polled_less_often_and_reported(site: Site, plane: BpfPlane):
    run = Run(site, plane)
    run.exemptions.set_pods((ONE,), True, 0.0)
    assert not run.exemptions.problems(1.0)
    late = exemptions.NEW_POD_WINDOW_S + 1
    assert run.exemptions.tick(late) == late + exemptions.MISSING_POD_POLL_INTERVAL_S
    (line,) = run.exemptions.problems(late)
    assert ONE in line
    assert str(site.cgroup) in line


def test_cgroups_that_appear_later_are_matched_by_patterns(site: Site, plane: BpfPlane, tree: Callable[[str], Path]):
    below = site.cgroup.relative_to(cgroup2())
    run = Run(site, plane, f"{below}/system.slice/istio*")
    tree("system.slice/sshd.service")
    first = tree("system.slice/istio-1.service").stat().st_ino
    run.exemptions.set_pods((), True, 0.0)
    assert run.ids() == {first}
    second = tree("system.slice/istio-2.service").stat().st_ino
    assert run.exemptions.tick(exemptions.PATTERN_POLL_INTERVAL_S) == 2 * exemptions.PATTERN_POLL_INTERVAL_S
    assert run.ids() == {first, second}


def test_entries_of_an_earlier_agent_stay_until_pods_are_known(
    site: Site, plane: BpfPlane, tree: Callable[[str], Path]
):
    run = Run(site, plane)
    folder, gone = tree(f"kubepods/pod{ONE}"), tree(f"kubepods/pod{TWO}")
    run.exemptions.set_pods((ONE, TWO), True, 0.0)
    gone.rmdir()
    after = Run(site, plane)
    after.exemptions.set_pods((), False, 0.0)
    assert after.ids() == {folder.stat().st_ino}, "only the removed cgroup's entry is deleted"
    after.exemptions.set_pods((), True, 1.0)
    assert after.ids() == set()
    assert after.notifications == [False]


def test_full_map_is_reported_and_retried(site: Site, plane: BpfPlane, tree: Callable[[str], Path], monkeypatch):
    folder = tree(f"kubepods/pod{ONE}")
    run = Run(site, plane)

    with monkeypatch.context() as patch:
        patch.setattr(plane._agent_maps, "put", Mock(side_effect=KernelError("the map is full")))
        run.exemptions.set_pods((ONE,), True, 0.0)
        (line,) = run.exemptions.problems(0.0)
        assert "some cgroups are not exempt yet" in line
        assert (run.ids(), run.notifications) == (set(), [])
    due = run.exemptions.tick(0.0)
    assert due is not None
    run.exemptions.tick(due)
    assert run.ids() == {folder.stat().st_ino}
    assert not run.exemptions.problems(due)


# ---- the programs --------------------------------------------------------------------------------


def flags(site: Site) -> ConfigFlag:
    """The flags that the hooks read."""
    return ConfigFlag(site.entries("config")[bytes(4)][8])


def set_flag(plane: BpfPlane) -> None:
    """The hooks read the map of exempt cgroups from now on."""
    settings = plane._attachments.settings
    settings.set_flags(settings.flags | ConfigFlag.EXEMPTIONS)


WORLD = desired(service("web", "10.96.0.1:80", f"{LOCAL[0]}:80", Protocol.UDP))


@pytest.fixture
def start(site: Site, client: Place, namespace: Namespace) -> Callable[..., BpfPlane]:
    """Starts an agent with the packet path on a node of its own, whose pod is the client; by default
    it programs WORLD.
    """
    namespace.ip(f"link add pod type veth peer name eth1 netns {client.netns}")

    def start(applies: bool = True, **settings: Any) -> BpfPlane:
        def act() -> BpfPlane:
            plane = site.open(packet_path=True, **settings)
            if applies:
                plane.apply(WORLD, None)
            return plane

        return namespace.do(act)

    return start


@pytest.mark.parametrize("level", ["its own", "above", "far above", "another"])
def test_process_below_an_exempt_cgroup_is_not_translated(
    site: Site, client: Place, tree: Callable[[str], Path], level: str
):
    plane = site.start(WORLD)
    deep = tree("a/b/c/d/e/f/g/h/i/j/k/l")
    chosen = {
        "its own": deep / "m",
        "above": deep.parents[4],
        "far above": site.cgroup / "a",
        "another": tree("other"),
    }[level]
    inside = Place("inside", client.netns, deep / "m")
    try:
        assert picks(inside, "10.96.0.1:80") == [LOCAL[0]]
        site.put("exempt_cgroups", chosen.stat().st_ino.to_bytes(8, "little"), bytes(4))
        assert picks(inside, "10.96.0.1:80") == [LOCAL[0]], "without the flag the map is not read"
        set_flag(plane)
        before = site.reasons()[Reason.LEFT_TO_PACKETS]
        answer = picks(inside, "10.96.0.1:80")
        assert answer == ([LOCAL[0]] if level == "another" else ["ENETUNREACH"])
        assert site.reasons()[Reason.LEFT_TO_PACKETS] - before == (level != "another")
    finally:
        inside.close()


def test_exemption_without_the_packet_path_is_reported(site: Site, tree: Callable[[str], Path]):
    below = site.cgroup.relative_to(cgroup2())
    tree("mesh")
    plane = site.start(WORLD, socket_lb_exempt=(f"{below}/mesh",))
    assert any("the packet path is off" in line for line in plane.status().problems)


@pytest.mark.parametrize("exempt_before", [False, True])
def test_exemption_with_a_packet_path_that_fails_to_load_is_reported(
    site: Site,
    start: Callable[..., BpfPlane],
    tree: Callable[[str], Path],
    monkeypatch,
    exempt_before: bool,
):
    """Sockets are exempt only if packet programs may serve them: those of an earlier agent."""
    exempt = (f"{site.cgroup.relative_to(cgroup2())}/mesh",)
    tree("mesh")

    if exempt_before:
        earlier = start(socket_lb_exempt=exempt)

        def flag_is_set() -> bool:
            earlier.tick(time.monotonic())
            return ConfigFlag.EXEMPTIONS in flags(site)

        until("the packet path serves exempt sockets", flag_is_set)
        site.close_planes()
    refuse_to_compile(monkeypatch, "tc")
    plane = start(socket_lb_exempt=exempt)

    def reported() -> list[str]:
        plane.tick(time.monotonic())
        return [line for line in plane.status().problems if "exempt" in line]

    until("the exemption is reported", reported)
    (line,) = reported()
    assert line.startswith(
        "exempt cgroups are served only by packet programs of an earlier agent"
        if exempt_before
        else "cgroups are not exempt yet"
    )


def test_exemption_outlasts_a_restart_until_the_first_apply(site: Site, start: Callable[..., BpfPlane], client: Place):
    """hostNamespaceOnly, then a start with `on`: nothing changes before everything is
    programmed.
    """
    plane = start(socket_lb=SocketLb.HOST_NAMESPACE_ONLY)

    def in_force() -> bool:
        plane.tick(time.monotonic())
        return ConfigFlag.HOST_ONLY in flags(site)

    until("the packet path serves", in_force)
    assert picks(client, "10.96.0.1:80") == ["ENETUNREACH"]
    start(applies=False, socket_lb=SocketLb.ON)
    assert picks(client, "10.96.0.1:80") == ["ENETUNREACH"]
    start(socket_lb=SocketLb.ON)
    assert picks(client, "10.96.0.1:80") == [LOCAL[0]]


@pytest.mark.parametrize("mode", [SocketLb.HOST_NAMESPACE_ONLY, SocketLb.OFF])
def test_sockets_are_translated_until_the_packet_path_serves(
    site: Site, start: Callable[..., BpfPlane], client: Place, monkeypatch, mode: SocketLb
):
    site.start(WORLD)
    with monkeypatch.context() as patch:
        patch.setattr(PacketPath, "status", lambda _: DeviceReconcilerStatus())
        plane = start(socket_lb=mode)
        plane.tick(time.monotonic())
        assert {pin.name for pin in (site.pins / "links").iterdir()} == HOOKS
        assert picks(client, "10.96.0.1:80") == [LOCAL[0]]

    def left_alone() -> bool:
        plane.tick(time.monotonic())
        return picks(client, "10.96.0.1:80") == ["ENETUNREACH"]

    until("the packet path serves", left_alone)


def test_first_start_waits_for_the_packet_path(start: Callable[..., BpfPlane], monkeypatch):
    """If no hook was ever attached, missing pins of hooks do not count as removed."""
    monkeypatch.setattr(PacketPath, "status", lambda _: DeviceReconcilerStatus())
    plane = start(socket_lb=SocketLb.OFF)
    plane.tick(time.monotonic())
    plane.write_status(b"{}")
    plane.apply(WORLD, None)

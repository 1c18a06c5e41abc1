# SPDX-License-Identifier: Apache-2.0
"""Hooks that were detached come back by themselves. Pins hidden by a mount are reported and never
lead to a second set of programs.

Tests that mount run in a process with its own mount namespace.
"""

import ctypes
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from kbpf.dataplane.bpf.hooks import HOOKS as ALL_HOOKS
from kbpf.dataplane.bpf.maps.layout import AFFINITY, AFFINITY_KEY, U64
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import attach
from kbpf.dataplane.bpf.programs import unpinned
from kbpf.dataplane.bpf.socket_hooks import HOOK_RETRY_INTERVAL_S, HOOK_VERIFY_INTERVAL_S
from kbpf.errors import KernelError, PinsRemovedError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Link, Map
from kbpf.kernel.bpf.tc import ATTACH_TYPE
from tests.support.alone import WEB, alone, make_uplink, serve
from tests.support.features import needs
from tests.support.lab.lab import remove_cgroup, until
from tests.support.plane import CGROUP_HOOKS, HOOKS, Site, desired, flush, service

pytestmark = pytest.mark.usefixtures("stub_programs")


def attached_hooks(cgroup: Path) -> dict[str, tuple[int, ...]]:
    """The ids of all programs at the socket hooks of this cgroup."""
    descriptor = os.open(cgroup, os.O_RDONLY)
    try:
        return {
            hook.name: unpinned.attached_program_ids(descriptor, hook.attach_type)
            for hook in ALL_HOOKS
            if not hook.only_counts
        }
    finally:
        os.close(descriptor)


def programs(cgroup: Path) -> tuple[int, ...]:
    """Ids of the programs attached to connect4."""
    return attached_hooks(cgroup)["connect4"]


def remove_pin(site: Site) -> None:
    (site.pins / "links/connect4").unlink()


def detach(site: Site) -> None:
    with Link.open(site.pins / "links/connect4") as link:
        link.detach()


def remove_all(site: Site) -> None:
    for pin in (site.pins / "links").iterdir():
        pin.unlink()


def make_cgroup_again(site: Site) -> None:
    remove_cgroup(site.cgroup)
    site.cgroup.mkdir()


@pytest.mark.parametrize("harm", [remove_pin, detach, remove_all, make_cgroup_again])
def test_lost_hooks_are_attached_again(site: Site, harm: Callable[[Site], None], caplog):
    plane = site.start(WEB)
    plane.tick(0.0)
    assert dict(plane.shared.read_metrics().hooks) == dict.fromkeys(HOOKS, True)
    before = programs(site.cgroup)
    harm(site)
    plane.tick(HOOK_VERIFY_INTERVAL_S - 1)
    assert "attached again" not in caplog.text, "hooks are verified at intervals"
    plane.tick(HOOK_VERIFY_INTERVAL_S)
    assert "hooks were missing and are attached again" in caplog.text
    assert "connect4" in caplog.text
    assert dict(plane.shared.read_metrics().hooks) == dict.fromkeys(HOOKS, True)
    assert plane.status().faults == ()
    assert set(before) <= set(programs(site.cgroup)), "the same program, in the cgroup of this name"


def test_hook_that_cannot_be_attached_is_reported(site: Site, caplog):
    plane = site.start(WEB)
    plane.tick(0.0)
    remove_cgroup(site.cgroup)
    for second in range(3):
        plane.tick(HOOK_VERIFY_INTERVAL_S + second * HOOK_RETRY_INTERVAL_S)
    attached = dict(plane.shared.read_metrics().hooks)
    assert {hook for hook, is_attached in attached.items() if is_attached} == HOOKS - CGROUP_HOOKS
    (fault,) = plane.status().faults
    assert fault.startswith("hooks not attached: ")
    assert "cannot open the cgroup" in fault
    assert fault in plane.status().problems
    assert caplog.text.count("hooks are not attached, retrying") == 1
    site.cgroup.mkdir()
    plane.tick(HOOK_VERIFY_INTERVAL_S + 10)
    assert plane.status().faults == ()
    assert len(programs(site.cgroup)) == 1


def test_removed_pins_end_the_agent(site: Site):
    plane = site.start(WEB)
    plane.write_status(b"{}")
    site.pins.rename(site.pins.with_name(f"{site.pins.name}-moved"))
    try:
        with pytest.raises(PinsRemovedError):
            plane.write_status(b"{}")
    finally:
        site.pins.with_name(f"{site.pins.name}-moved").rename(site.pins)


REFUSES = Mock(side_effect=KernelError("no room", errno=errno.EPERM))
LOST_PINS = {
    "affinity": "affinity",
    "an outer map": "backend_slots_outer",
    "a map and its outer map": "services services_outer",
    "maps that no program reads": "meta service_names agent_status",
    "all": "*",
}
"""Which pins of maps another program removes."""


@pytest.mark.parametrize("what", LOST_PINS)
def test_lost_pins_of_maps_are_restored_while_it_runs(site: Site, what: str, caplog, monkeypatch):
    plane = site.start(WEB, packet_path=True)
    before = {pin.name: site.pinned(pin.name).id for pin in site.maps.iterdir()}
    remove_pins(site, what)
    with monkeypatch.context() as broken:
        broken.setattr(Map, "pin", REFUSES)
        plane.write_status(b"{}")
        (fault,) = plane.status().faults
        assert "pins of maps cannot be checked or restored: no room" in fault
    plane.write_status(b"{}")
    assert {pin.name: site.pinned(pin.name).id for pin in site.maps.iterdir()} == before
    assert plane.status().faults == ()
    assert caplog.text.count("removed pins of maps were restored maps=") == 1


@pytest.mark.parametrize(
    ("what", "may_open_by_id"), [*((what, True) for what in LOST_PINS), ("affinity", False), ("all", False)]
)
def test_start_with_lost_pins_of_maps_serves_again(site: Site, what: str, may_open_by_id: bool, monkeypatch):
    site.start(WEB, packet_path=True)
    before, links = site.dump(), site.hook_programs()
    client, entry = bytes(AFFINITY_KEY.size), U64.pack(time.monotonic_ns()).ljust(AFFINITY.size)
    site.pinned("affinity").update(client, entry)
    site.close_planes()
    remove_pins(site, what)
    with monkeypatch.context() as limited:
        if not may_open_by_id:
            limited.setattr(objects, "open_map_by_id", REFUSES)
        plane = site.open(packet_path=True)
    plane.apply(WEB, None)
    flush(plane)
    assert site.dump() == before
    is_kept = may_open_by_id or what not in ("affinity", "all")
    assert (site.pinned("affinity").lookup(client) == entry) is is_kept
    assert site.hook_programs().keys() == links.keys()
    assert site.use_pinned_maps(site.hook_programs().values())
    assert list(site.pins.glob("maps-*")) == [site.maps]
    site.open(packet_path=True)
    assert site.dump() == before, "the next start finds them complete"


def remove_pins(site: Site, what: str) -> None:
    for pattern in LOST_PINS[what].split():
        for pin in site.maps.glob(pattern):
            pin.unlink()


def mount_bpffs_over(folder: Path) -> None:
    """Mounts a bpffs over it, in the mount namespace of this process only."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"bpf", os.fsencode(folder), b"bpf", 0, b"mode=0700") == 0, ctypes.get_errno()


@alone
def test_mount_over_the_pins_is_reported_and_changes_nothing(site: Site):
    """The agent continues through its descriptor of the folder: it programs, grows its maps and
    verifies its hooks. A second agent refuses to start. Without the mount everything is as before.
    """
    unpinned.DETACH_WAIT_S = 0.2
    plane = site.start(WEB)
    plane.tick(0.0)
    plane.write_status(b"{}")
    assert plane.status().faults == ()
    before = programs(site.cgroup)
    mount_bpffs_over(site.pins.parent)
    plane.write_status(b"{}")
    (fault,) = plane.status().faults
    assert "is hidden by a mount on top of it" in fault, fault
    plane.tick(1000.0)
    assert programs(site.cgroup) == before
    many = desired(*(service(f"s{n}", f"10.96.{1 + n // 200}.{n % 200}:80", "10.244.0.1:8080") for n in range(3000)))
    assert not plane.apply(many, None).refused
    assert len(programs(site.cgroup)) == 1
    second = Site(site.cache, cgroup=site.cgroup)
    second.pins = site.pins
    with pytest.raises(KernelError, match="not pinned in this folder") as refused:
        second.open()
    assert "findmnt" in refused.value.hint
    assert f"connect4 of {site.cgroup}" not in str(refused.value), "the first four are named"
    assert f"recvmsg4 of {site.cgroup}" in str(refused.value)
    assert f"and {len(CGROUP_HOOKS) - 4} more" in str(refused.value)
    assert len(programs(site.cgroup)) == 1
    assert ctypes.CDLL(None).umount2(os.fsencode(site.pins.parent), 2) == 0  # MNT_DETACH
    plane.write_status(b"{}")
    assert plane.status().faults == ()
    plane.close()
    third = site.open()
    third.apply(many, None)
    assert len(programs(site.cgroup)) == 1


@needs("tcx")
@alone
def test_mount_over_the_pins_attaches_nothing_twice_to_devices(site: Site):
    """The device thread syncs all devices again and attaches nothing twice; an agent that starts
    finds the attached programs.
    """

    def tcx_programs() -> list[int]:
        return [len(objects.list_attached(socket.if_nametoindex("up0"), kind)) for kind in ATTACH_TYPE.values()]

    make_uplink()
    plane = serve(site)
    assert tcx_programs() == [1, 1]
    mount_bpffs_over(site.pins.parent)
    turns = []
    sync = attach.DeviceAttachments.sync
    attach.DeviceAttachments.sync = lambda *given: turns.append(1) or sync(*given)
    until("all devices were synced twice", lambda: len(turns) > 2)
    assert tcx_programs() == [1, 1]
    assert not plane.status().packets.failed
    site.pins.mkdir(parents=True)
    programs = unpinned.find_unpinned(Pins(site.pins), site.cgroup)
    places = {program.place for program in programs}
    assert {"ingress of up0", "egress of up0"} <= places, places
    plane.close()

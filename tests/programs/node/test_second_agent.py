# SPDX-License-Identifier: Apache-2.0
"""A second kbpf with another pin folder: refused where it would serve the same cgroup or devices,
and reported where both run nevertheless. An agent that starts again is never taken for a second
one.

"clsact" is what kernels before 6.6 use; here TCX is switched off.
"""

import ctypes
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kbpf.checks import neighbours
from kbpf.cli import removal
from kbpf.cli.check import compute_verdict
from kbpf.cli.cleanup import RemovedItem
from kbpf.dataplane.bpf.inspect.attached import read_devices
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import attach
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.programs import unpinned
from kbpf.errors import KernelError
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.tc import AttachMethod, TcAttacher
from kbpf.model.config import SocketLb
from tests.programs.node.test_hooks_verified import attached_hooks, mount_bpffs_over
from tests.programs.packets.tc.net import both_ways
from tests.support.alone import WEB, alone, make_uplink, serve
from tests.support.lab.lab import ip, until
from tests.support.plane import Site, sites

pytestmark = pytest.mark.usefixtures("stub_programs")


@pytest.fixture(autouse=True)
def hurry(monkeypatch) -> None:
    """Agents wait less for programs that the kernel frees in the background."""
    monkeypatch.setattr(unpinned, "DETACH_WAIT_S", 0.5)


def attached() -> dict[Direction, list[int]]:
    """The ids of all programs on up0."""
    with TcAttacher(Path("/nowhere")) as kernel:
        index = socket.if_nametoindex("up0")
        return {
            direction: [runner.program_id for runner in kernel.list_programs(index, direction)]
            for direction in Direction
        }


@contextmanager
def second_site(first: Site, cgroup: Path | None = None) -> Iterator[Site]:
    with sites(first.cache) as make:
        yield make(cgroup=cgroup)


@both_ways
@pytest.mark.parametrize("same_cgroup", [True, False], ids=["no socket hooks", "another cgroup"])
@alone
def test_second_agent_on_the_same_devices_is_refused(site: Site, how: AttachMethod, same_cgroup: bool):
    make_uplink(how)
    settings = {"socket_lb": SocketLb.OFF} if same_cgroup else {}
    serve(site, **settings)
    before = attached()
    assert [len(ids) for ids in before.values()] == [1, 1]
    with second_site(site, site.cgroup if same_cgroup else None) as other:
        with pytest.raises(KernelError, match="not pinned in this folder") as refused:
            other.open(packet_path=True, devices=("up0",), **settings)
        text = str(refused.value)
        assert str(other.pins) in text
        for direction, (program_id,) in before.items():
            assert f"{direction} of up0 (id {program_id})" in text
        assert f"they belong to --pin-dir {site.pins}: stop it" in text
        assert "\n" not in text
        assert attached() == before
        row = neighbours.other_kbpf_row(other.pins, other.cgroup)
        assert (row.name, row.result, row.needed) == ("no other kbpf", "no", True)
        assert f"ingress of up0 (id {before[Direction.INGRESS][0]})" in row.detail
        assert f"they belong to --pin-dir {site.pins}" in row.advice
        assert compute_verdict([row]).mode == "none"
        row = neighbours.other_kbpf_row(site.pins, site.cgroup)
        assert (row.result, row.advice) == ("yes", ""), "of the first agent"
        row = neighbours.other_kbpf_row(other.pins, other.cgroup, packet_path=False)
        assert (row.result, row.detail) == ("yes", f"none at {other.cgroup}")
        # without a packet path there is nothing to fight about
        if not same_cgroup:
            other.open(packet_path=False).apply(WEB, None)
        assert attached() == before


@both_ways
@alone
def test_agent_that_started_at_the_same_moment_is_refused_at_the_first_apply(site: Site, how: AttachMethod):
    make_uplink(how)
    with second_site(site, site.cgroup) as other:
        second = other.open(packet_path=True, devices=("up0",))
        serve(site)
        before, hooks = attached(), attached_hooks(site.cgroup)
        assert set(map(len, hooks.values())) == {1}
        with pytest.raises(KernelError, match="not pinned in this folder"):
            second.apply(WEB, None)
        second.tick(time.monotonic() + 60)
        second.write_status(b"it runs on")
        assert attached() == before
        assert attached_hooks(site.cgroup) == hooks
        assert not (other.pins / "links").exists()
        site.remove()
        unpinned.DETACH_WAIT_S = 60.0  # the kernel frees in the background
        second.apply(WEB, None)
        until("it serves in its place", lambda: second.status().ready)
        until("on both sides", lambda: set(map(len, attached().values())) == {1})


def earlier_version(site: Site) -> None:
    """Killed, and upgraded: the programs of another version have a folder of another name."""
    rename_programs(site, "programs-tc-0123456789abcdef")


def killed_while_switching(site: Site) -> None:
    """Killed after the new programs were pinned, before the devices ran them."""
    rename_programs(site, "old-programs-tc-0123456789abcdef-0")


def rename_programs(site: Site, name: str) -> None:
    serve(site)
    (folder,) = site.pins.glob("programs-tc-*")
    folder.rename(site.pins / name)


def cleaned(site: Site) -> None:
    """Stopped, then `kbpf cleanup`."""
    serve(site)
    site.remove()
    assert attached() == {Direction.INGRESS: [], Direction.EGRESS: []}


def pins_deleted(site: Site) -> None:
    """Stopped, then somebody deleted the pin folder. Filters stay, links do not."""
    serve(site)
    site.close_planes()
    shutil.rmtree(site.pins)


def bpffs_unmounted(site: Site) -> None:
    """Stopped, and its bpffs is unmounted, as that of a container that has ended."""
    mount_bpffs_over(site.pins.parent)
    serve(site)
    site.close_planes()
    assert ctypes.CDLL(None).umount2(os.fsencode(site.pins.parent), 0) == 0


@both_ways
@pytest.mark.parametrize("lose_pins", [pins_deleted, bpffs_unmounted])
@alone
def test_cleanup_finds_filters_without_pins(site: Site, how: AttachMethod, lose_pins: Callable[[Site], None]):
    """They have lost their tail calls, so they would drop each SYN to a Service."""
    make_uplink(how)
    removed: list[RemovedItem] = []
    lose_pins(site)
    assert how is AttachMethod.TCX or [len(ids) for ids in attached().values()] == [1, 1]

    def are_removed() -> bool:  # the kernel frees the pinned programs in the background
        removed.extend(removal.remove_pins(site.pins, False, False))
        return not any(attached().values())

    until("no program is attached", are_removed)
    # In any order: each filter is found once the kernel has freed its programs.
    lines = sorted(item.path for item in removed if item.kind == "attachment")
    assert how is AttachMethod.TCX or lines == ["egress of up0", "ingress of up0"]


@alone
def test_cleanup_without_pins_leaves_another_agent_alone(site: Site):
    make_uplink(AttachMethod.CLSACT)
    serve(site)
    before = attached()
    with second_site(site) as other:
        assert not [item for item in removal.remove_pins(other.pins, False, False) if item.kind == "attachment"]
    assert attached() == before


@pytest.mark.parametrize("end", [earlier_version, killed_while_switching, cleaned, pins_deleted, bpffs_unmounted])
@alone
def test_agent_that_starts_again_is_not_refused(site: Site, end: Callable[[Site], None]):
    """With TCX all restarts of tests/lab show the same."""
    make_uplink(AttachMethod.CLSACT)
    end(site)
    # the kernel frees what was pinned in the background
    unpinned.DETACH_WAIT_S = 60.0
    plane = serve(site)
    until("one program is at each side", lambda: set(map(len, attached().values())) == {1})
    assert not [line for line in plane.status().problems if "another kbpf" in line]
    assert unpinned.find_unpinned(Pins(site.pins), site.cgroup) == []


@pytest.mark.parametrize("only_at", ["a device that ours has not reached", "the cgroup"])
@alone
def test_agent_that_serves_is_not_refused_for_a_place_where_only_another_serves(site: Site, only_at: str):
    """Its programs elsewhere would be left without updates."""
    make_uplink(AttachMethod.CLSACT)
    at_cgroup = only_at == "the cgroup"
    serve(site, **({"socket_lb": SocketLb.OFF} if at_cgroup else {}))
    site.close_planes()
    ip("link add later0 type veth peer name later1")
    with second_site(site, site.cgroup) as other:
        refuse, unpinned.refuse_unpinned = unpinned.refuse_unpinned, lambda *_: None
        serve(other, devices=("none",) if at_cgroup else ("later0",))
        unpinned.refuse_unpinned = refuse
        places = {each.place for each in unpinned.find_unpinned(Pins(site.pins), site.cgroup)}
        assert ("ingress of later0" in places) is not at_cgroup
        serve(site)
        row = neighbours.other_kbpf_row(site.pins, site.cgroup)
        assert (row.result, row.needed) == ("no", False)


@both_ways
@alone
def test_two_agents_that_both_started_are_reported(site: Site, how: AttachMethod, monkeypatch):
    """Both looked for the other before either was attached."""
    make_uplink(how)
    turns: Counter[attach.DeviceAttachments] = Counter()
    sync = attach.DeviceAttachments.sync
    attach.DeviceAttachments.sync = lambda self, *given: turns.update([self]) or sync(self, *given)
    unpinned.refuse_unpinned = lambda *_: None
    first = serve(site)
    ((own_ingress,), (own_egress,)) = attached().values()
    with second_site(site, site.cgroup) as other:
        second = serve(other)
        until("the first has seen it", lambda: "kbpf is attached" in str(first.status()))
        before = attached()
        turns.clear()
        assert set(map(len, before.values())) == {2}
        assert own_ingress in before[Direction.INGRESS]
        assert own_egress in before[Direction.EGRESS]
        until("both have synced", lambda: len(turns) == 2 and min(turns.values()) > 5)
        assert attached() == before, "neither has replaced or moved the other's"
        now = time.monotonic() + 60
        for plane, own, theirs in ((first, site, other), (second, other, site)):
            plane.tick(now)
            expect_reported(plane, "connect4", "connect6", "sendmsg4", "sendmsg6", "tc_egress", "tc_ingress")
            shown = {one.name: one for one in read_devices(Pins(own.pins), 0, None)}
            assert shown["up0"].ingress == f"tc_ingress ({how})"
            assert not plane.status().packets.failed
            row = neighbours.other_kbpf_row(own.pins, site.cgroup)
            assert (row.result, row.needed) == ("no", False), "each may start again"
            assert f"they belong to --pin-dir {theirs.pins}" in row.advice
        other.remove()
        # the first may be moving its program before one that has just been detached
        own_programs = {Direction.INGRESS: [own_ingress], Direction.EGRESS: [own_egress]}
        until("only the first's are left", lambda: attached() == own_programs)

        def is_alone() -> bool:
            first.tick(time.monotonic() + 600)
            return "another kbpf" not in str(first.status())

        until("it is alone", is_alone)


def expect_reported(plane: BpfPlane, *names: str) -> None:
    """Waits until these programs of another kbpf are reported, and no others: the device thread
    may have read the devices while the other was attaching its programs.
    """
    expected = [f"another kbpf is attached: {name}" for name in names]

    def reported() -> list[str]:
        lines = (line for line in plane.status().problems if "another kbpf" in line)
        return [line.partition(" (id")[0] for line in lines]

    until(f"{names} are reported", lambda: reported() == expected)
    assert plane.shared.read_metrics().foreign_programs == len(expected)

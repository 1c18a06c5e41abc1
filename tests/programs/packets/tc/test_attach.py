# SPDX-License-Identifier: Apache-2.0
"""Which packets programs on devices see, by both methods, TCX and clsact; what is read back, and
what remains when they are detached or their device is deleted.
"""

import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.bpf.tc import Attachment, AttachMethod, TcAttacher, probe_tcx
from tests.programs.packets.tc.net import (
    ETHERTYPE,
    Net,
    both_directions,
    both_ways,
    program_id,
    refused,
)
from tests.support.features import needs
from tests.support.lab.lab import until
from tests.support.lab.namespace import made

FRAME = bytes(6) + bytes(6) + ETHERTYPE.to_bytes(2, "big") + bytes(50)


def counts(seen: Map) -> list[int]:
    """The count of each program."""
    return [int.from_bytes(seen.lookup(struct.pack("=I", i)) or b"", "little") for i in range(4)]


# ---- seeing packets ----------------------------------------------------------------------------


@both_ways
@both_directions
def test_program_sees_each_packet_of_its_direction_once(
    net: Net, seen: Map, programs: list[Program], how: AttachMethod, direction: Direction
):
    made = net.attach(how, programs[0], direction)
    assert made == Attachment(net.index("here"), direction, how, program_id(programs[0]))
    for way in Direction:
        with net.wire(way) as wire:
            for _ in range(100 if way is direction else 7):
                wire.send(FRAME)
    until("100 frames are counted", lambda: counts(seen) == [100, 0, 0, 0])


class Sender:
    """Sends frames in one direction, a burst after the one before is counted."""

    def __init__(self, net: Net, seen: Map, direction: Direction, burst: int) -> None:
        self.net, self.seen, self.direction, self.burst = net, seen, direction, burst
        self.sent = 0
        self.lost = ""
        self._done = threading.Event()

    def _send(self) -> None:
        with self.net.wire(self.direction) as wire:
            while not self._done.is_set() and not self.lost:
                wanted = sum(counts(self.seen)) + self.burst
                for _ in range(self.burst):
                    wire.send(FRAME)
                self.sent += self.burst
                try:
                    until("they are counted", lambda wanted=wanted: sum(counts(self.seen)) >= wanted)
                except AssertionError as error:
                    self.lost = f"{error}: {counts(self.seen)} of {self.sent} frames"

    def run_beside(
        self, how: AttachMethod, times: int, frames: int, change: Callable[[TcAttacher, int], object]
    ) -> None:
        """Sends while the programs are changed so many times, and until so many frames are sent."""

        def work(tc: TcAttacher) -> None:
            number = 0
            while (number < times or self.sent < frames) and not self.lost:
                number += 1
                change(tc, number)

        thread = threading.Thread(target=self._send)
        thread.start()
        try:
            self.net.ours(how, work)
        finally:
            self._done.set()
            thread.join()
        assert not self.lost


@both_ways
@both_directions
def test_no_packet_is_lost_while_programs_are_swapped(
    net: Net, seen: Map, programs: list[Program], how: AttachMethod, direction: Direction
):
    net.attach(how, programs[0], direction)
    index = net.index("here")
    sender = Sender(net, seen, direction, 50)  # far less than a CPU's backlog holds
    sender.run_beside(how, 2_000, 50_000, lambda tc, number: tc.attach(index, direction, programs[number % 2]))
    assert sum(counts(seen)) == sender.sent
    assert min(counts(seen)[:2]) > 0


@both_ways
@both_directions
def test_no_packet_is_lost_while_a_program_is_moved(
    net: Net, seen: Map, programs: list[Program], how: AttachMethod, direction: Direction
):
    """While it is moved, a packet may meet the program twice, but never not at all."""
    net.attach(how, programs[0], direction)
    index = net.index("here")
    Sender(net, seen, direction, 1).run_beside(how, 30, 1_000, lambda tc, _: tc.move(index, direction, programs[0]))
    assert [each.program_id for each in net.attached()] == [program_id(programs[0])]


# ---- reading back ------------------------------------------------------------------------------


def test_a_pin_that_is_deleted_while_the_list_is_read_is_not_in_it(net: Net, programs: list[Program], monkeypatch):
    """The agent may detach a program while a command lists all."""
    net.attach(AttachMethod.TCX, programs[0], Direction.INGRESS)
    (pin,) = net.folder.iterdir()
    listed = TcAttacher._list_entries

    def late(tc: TcAttacher) -> list[Path]:
        return [*listed(tc), pin.with_name(pin.name.replace("ingress", "egress"))]

    monkeypatch.setattr(TcAttacher, "_list_entries", late)
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert net.ours(None, TcAttacher.list_all) == net.attached()


@needs("tcx")
def test_pin_under_another_devices_name_is_ignored(net: Net, programs: list[Program]):
    here, far = net.index("here"), net.index("far")
    net.attach(AttachMethod.TCX, programs[0])
    (net.folder / f"{here}-ingress").rename(net.folder / f"{far}-ingress")
    assert net.attached("far") == net.attached("here") == ()


@needs("tcx")
def test_unfinished_attachment_is_repeated(net: Net, programs: list[Program]):
    index = net.index("here")
    with net.do(lambda: Link.attach(programs[0], index, 46)) as link:
        link.pin(net.folder / f"new-{index}-ingress")
    net.attach(AttachMethod.TCX, programs[0])
    assert [path.name for path in net.folder.iterdir()] == [f"{index}-ingress"]
    assert net.tcx(Direction.INGRESS) == [program_id(programs[0])]


# ---- devices that are deleted ------------------------------------------------------------------


@needs("tcx")
def test_device_deleted_before_the_replacement_is_no_error(net: Net, programs: list[Program], monkeypatch):
    current = program_id(programs[0])

    def goes(*_: object) -> tuple[int, ...]:
        net.ip("link del here")
        return (current,)

    index = net.index("here")
    net.attach(AttachMethod.TCX, programs[0])
    monkeypatch.setattr("kbpf.kernel.bpf.tc._attached_ids", goes)
    assert net.ours(AttachMethod.TCX, lambda tc: tc.attach(index, Direction.INGRESS, programs[1])) is None


@both_ways
def test_new_device_with_the_same_index_has_no_attachments(net: Net, programs: list[Program], how: AttachMethod):
    net.ip("link add again index 77 type veth peer name other")
    net.attach(how, programs[0], device="again")
    net.ip("link del again", "link add again index 77 type veth peer name other")
    assert net.attached("again") == ()
    net.attach(how, programs[1], device="again")
    assert [one.program_id for one in net.attached("again")] == [program_id(programs[1])]


@needs("tcx")
def test_device_moved_to_another_namespace_is_detached(net: Net, programs: list[Program]):
    net.attach(AttachMethod.TCX, programs[0])
    index = net.index("here")
    with made() as elsewhere:
        net.ip(f"link set here netns {elsewhere.name}")

        def there() -> tuple[int, ...]:
            return elsewhere.do(lambda: objects.list_attached(index, 46))

        assert there() == (program_id(programs[0]),)
        assert net.ours(None, TcAttacher.list_all) == ()
        assert net.ours(None, TcAttacher.sweep) == 1
        assert there() == ()


# ---- results of the kernel ---------------------------------------------------------------------


def test_probe_without_privileges_is_unknown():
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        probe_tcx.cache_clear()
        os._exit(0 if probe_tcx().works is None else 1)
    assert os.waitpid(child, 0)[1] == 0


@needs("tcx")
def test_program_already_attached_by_another_link_is_an_error(net: Net, programs: list[Program]):
    index = net.index("here")
    with (
        net.do(lambda: Link.attach(programs[0], index, 46)),
        pytest.raises(KernelError, match=r"EEXIST; this program is attached by a link"),
    ):
        net.attach(AttachMethod.TCX, programs[0])
    assert list(net.folder.iterdir()) == []


@both_ways
def test_refused_program_error_names_the_device(net: Net, how: AttachMethod):
    with (
        refused() as wrong,
        pytest.raises(KernelError, match=rf"cannot attach the program \(ingress of here, {how}\)"),
    ):
        net.attach(how, wrong)
    assert net.qdiscs() == ""
    assert list(net.folder.iterdir()) == []


def test_shared_block_error_has_the_kernels_message(net: Net, programs: list[Program]):
    net.tc("qdisc add dev here ingress_block 7 clsact")
    with pytest.raises(KernelError, match="block is shared"):
        net.attach(AttachMethod.CLSACT, programs[0])
    assert net.qdiscs() == "clsact"

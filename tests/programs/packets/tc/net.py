# SPDX-License-Identifier: Apache-2.0
"""Programs on devices by both methods, TCX and clsact.

Hand-assembled programs count frames of an unused EtherType, each in its own element of a map, so a
frame that no program saw is missing from the sum.
"""

import contextlib
import itertools
import json
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.clsact import Direction, Filter, FilterIdentity
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE, Attachment, AttachMethod, TcAttacher
from kbpf.kernel.bpf.uapi import BPF_PROG_TYPE_SCHED_CLS
from kbpf.kernel.net.uapi import NLM_F_EXCL
from kbpf.kernel.system import sysctl
from tests.support.features import lacking, needs
from tests.support.lab.lab import ip, run, until
from tests.support.lab.namespace import Namespace

T = TypeVar("T")


ETHERTYPE = 0x88B5  # for local experiments: no other frame on the veth pair has it

NEXT = -1  # TC_ACT_UNSPEC and TCX_NEXT: continue with the next program
_numbers = itertools.count(1)

both_ways = pytest.mark.parametrize("how", [pytest.param(AttachMethod.TCX, marks=needs("tcx")), AttachMethod.CLSACT])
both_directions = pytest.mark.parametrize("direction", list(Direction))


def insn(code: int, regs: int = 0, off: int = 0, imm: int = 0) -> bytes:
    """One instruction; `regs`: source in the high half, destination in the low one."""
    return struct.pack("=BBhi", code, regs, off, imm)


def leave(result: int = NEXT) -> bytes:
    return insn(0xB7, 0, 0, result) + insn(0x95)


def idle(name: str = "idle", result: int = NEXT) -> Program:
    """A program that returns this; by default it lets everything pass."""
    return Program.load(name, BPF_PROG_TYPE_SCHED_CLS, 0, leave(result))


def refused() -> Program:
    """A program that no device accepts."""
    return Program.load("wrong", 8, 0, leave(1))  # CGROUP_SKB


def counting(seen: Map, place: int) -> Program:
    """A program that counts our frames in this element of an array."""
    count = (
        insn(0x62, 0x0A, -4, place)  # *(u32 *)(r10 - 4) = place
        + insn(0xBF, 0xA2)  # r2 = r10
        + insn(0x07, 0x02, 0, -4)  # r2 -= 4
        + insn(0x18, 0x11, 0, seen.fd)  # r1 = map
        + insn(0)
        + insn(0x85, 0, 0, 1)  # r0 = lookup
        + insn(0x15, 0x00, 2, 0)  # if r0 == 0 leave
        + insn(0xB7, 0x01, 0, 1)  # r1 = 1
        + insn(0xDB, 0x10)  # lock *(u64 *)r0 += r1
    )
    wanted = socket.htons(ETHERTYPE)
    check = insn(0x61, 0x12, 16) + insn(0x55, 0x02, len(count) // 8, wanted)  # skb->protocol
    return Program.load(f"count{place}", BPF_PROG_TYPE_SCHED_CLS, 0, check + count + leave())


@contextlib.contextmanager
def filter_of_others(ifindex: int, direction: Direction, program: Program, priority: int = 1) -> Iterator[None]:
    """A filter of another tool on the device's clsact, which exists already."""
    place = Filter("bpf", priority, socket.htons(3), 7, "theirs", 0)
    with TcAttacher(Path("/nowhere"), AttachMethod.CLSACT) as kernel:
        kernel._filters._write(ifindex, direction, program, place, NLM_F_EXCL)
        yield
        kernel._filters._delete(ifindex, direction, place)


PAIR = struct.Struct("=4s4s2s2s")
"""The key of a recorded packet: addresses and ports, source first, in network byte order."""


def recording(name: str, seen: Map, result: int) -> Program:
    """A program that writes the pair of each IPv4 packet with ports to a hash map, and returns
    `result`.
    """
    record = (
        insn(0xB7, 0x02, 0, 14 + 12)  # r2: offset of the addresses
        + insn(0xBF, 0xA3)  # r3 = r10
        + insn(0x07, 0x03, 0, -PAIR.size)  # r3 -= 12
        + insn(0xB7, 0x04, 0, PAIR.size)  # r4 = 12
        + insn(0x85, 0, 0, 26)  # bpf_skb_load_bytes
        + insn(0x55, 0x00, 9, 0)  # if r0 != 0 leave
        + insn(0x62, 0x0A, -16, 1)  # *(u32 *)(r10 - 16) = 1
        + insn(0x18, 0x11, 0, seen.fd)  # r1 = map
        + insn(0)
        + insn(0xBF, 0xA2)  # r2 = r10
        + insn(0x07, 0x02, 0, -PAIR.size)  # r2 -= 12
        + insn(0xBF, 0xA3)  # r3 = r10
        + insn(0x07, 0x03, 0, -16)  # r3 -= 16
        + insn(0xB7, 0x04)  # r4 = BPF_ANY
        + insn(0x85, 0, 0, 2)  # update
    )
    check = insn(0x61, 0x12, 16) + insn(0x55, 0x02, len(record) // 8, socket.htons(0x0800))
    return Program.load(name, BPF_PROG_TYPE_SCHED_CLS, 0, check + record + leave(result))


class Net(Namespace):
    """A network namespace with a veth pair, `here` and `far`, and a folder for pins."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.folder = Path("/sys/fs/bpf") / self.name
        self.folder.mkdir()
        ip(f"netns add {self.name}")
        # The kernel would add addresses of the link, and report them a second or two later.
        self.do(lambda: sysctl.write("net.ipv6.conf.default.addr_gen_mode", "1"))
        self.ip("link add here type veth peer name far", "link set here up", "link set far up")
        until("the pair is up", self._is_up)

    def _is_up(self) -> bool:
        shown = json.loads(run("ip", "-n", self.name, "-j", "link", "show", "type", "veth"))
        return {each["operstate"] for each in shown} == {"UP"}

    def tc(self, line: str) -> str:
        """Runs one tc command in the namespace, as another agent would."""
        return run("nsenter", f"--net=/run/netns/{self.name}", "tc", *line.split())  # -n hides the pins

    def index(self, device: str) -> int:
        """The index of a device."""
        return self.do(lambda: socket.if_nametoindex(device))

    def ours(
        self,
        how: AttachMethod | None,
        action: Callable[[TcAttacher], T],
        mark: FilterIdentity | None = None,
    ) -> T:
        """Runs `action` with a new TcAttacher in the namespace, as a start of the agent does."""

        def work() -> T:
            with TcAttacher(self.folder, how, mark or FilterIdentity()) as tc:
                return action(tc)

        return self.do(work)

    def attach(
        self,
        how: AttachMethod,
        program: Program,
        to: Direction = Direction.INGRESS,
        device: str = "here",
    ) -> Attachment | None:
        """Attaches with a new TcAttacher."""
        return self.ours(how, lambda tc: tc.attach(self.index(device), to, program))

    def attached(self, device: str = "here") -> tuple[Attachment, ...]:
        """What a new TcAttacher reads back."""
        return self.ours(None, lambda tc: tc.list_attached(self.index(device)))

    def misplaced(self) -> list[bool]:
        """Of each program on `here`, whether it is not in its place."""
        return [attachment.misplaced for attachment in self.attached()]

    def detach_all(self) -> None:
        """Detaches all of our programs."""
        self.ours(None, lambda tc: [tc.detach(one) for one in tc.list_all()])

    def qdiscs(self, device: str = "here") -> str:
        """The qdisc in clsact's place, as tc shows it."""
        return " ".join(
            line.split()[1] for line in self.tc(f"qdisc show dev {device}").splitlines() if "ffff:fff1" in line
        )

    def filters(self, direction: Direction, device: str = "here") -> list[str]:
        """Names of the clsact filters in the order in which they run, as tc shows them."""
        lines = self.tc(f"filter show dev {device} {direction}").splitlines()
        return [line.split(" handle ")[1].split()[1] for line in lines if "direct-action" in line]

    def tcx(self, direction: Direction, device: str = "here") -> list[int]:
        """Ids of the TCX programs in the order in which they run; empty if the kernel has
        no TCX.
        """
        if lacking("tcx"):
            return []
        index = self.index(device)
        return list(self.do(lambda: objects.list_attached(index, ATTACH_TYPE[direction])))

    def wire(self, direction: Direction) -> socket.socket:
        """A packet socket on the device from which frames pass `here` in this direction."""
        device = "far" if direction is Direction.INGRESS else "here"

        def work() -> socket.socket:
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            made.bind((device, ETHERTYPE))
            return made

        return self.do(work)

    def close(self) -> None:
        """Deletes the pins and the namespace."""
        shutil.rmtree(self.folder, ignore_errors=True)
        ip(f"netns del {self.name}")


def programs_on_devices(folder: Path) -> dict[str, set[int]]:
    """Ids of the attached programs by the names of their devices, in the calling thread's network namespace."""
    found: dict[str, set[int]] = {}
    with TcAttacher(folder) as tc:
        for one in tc.list_all():
            found.setdefault(socket.if_indextoname(one.ifindex), set()).add(one.program_id)
    return found


def program_id(program: Program) -> int:
    return program.read_info().id

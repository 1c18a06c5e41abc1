# SPDX-License-Identifier: Apache-2.0
"""BPF_PROG_TEST_RUN: what goes into a program, what comes out, and what the kernel does with it.

The programs are a few hand-written instructions, so these tests do not depend on kbpf's programs.
"""

import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.bpf.uapi import BPF_MAP_TYPE_HASH
from kbpf.kernel.system import netns
from tests.support.features import needs
from tests.support.lab.lab import ip
from tests.support.lab.lab import run as command
from tests.support.packets.judge import difference
from tests.support.packets.packets import arp, frame, tcp, udp
from tests.support.packets.test_run import TC_ACT_OK, TC_ACT_REDIRECT, TC_ACT_SHOT, SkbContext, run

SCHED_CLS = 3
LENGTH, PKT_TYPE, MARK, PROTOCOL, IFINDEX, CB, DATA, DATA_END, SK = 0, 4, 8, 16, 40, 48, 76, 80, 168
STORE_BYTES, REDIRECT, CHANGE_TAIL = 9, 23, 38
RECOMPUTE_CSUM = 1
TTL = 14 + 8
"""Offset of the TTL in a frame."""
LOOPBACK_MAC = "00:00:00:00:00:00"

SYN = tcp("198.51.100.7:4000", "192.0.2.1:80", flags="S", mss=1460)


def insn(op: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0) -> bytes:
    return struct.pack("=BBhi", op, src << 4 | dst, off, imm)


def put(dst: int, number: int) -> bytes:
    return insn(0xB7, dst, imm=number)


def copy(dst: int, src: int) -> bytes:
    return insn(0xBF, dst, src)


def load(dst: int, src: int, off: int, op: int = 0x61) -> bytes:
    return insn(op, dst, src, off)


def call(helper: int) -> bytes:
    return insn(0x85, imm=helper)


def store_byte(at: int, value: int, flags: int) -> bytes:
    """bpf_skb_store_bytes(skb, at, &value, 1, flags)."""
    return (
        insn(0x72, 10, off=-1, imm=value)
        + (put(2, at) + copy(3, 10) + insn(0x07, 3, imm=-1) + put(4, 1) + put(5, flags))
        + call(STORE_BYTES)
    )


EXIT = insn(0x95)
Loader = Callable[[bytes], Program]


@pytest.fixture
def program() -> Iterator[Loader]:
    """Loads a program of these instructions and an exit."""
    made: list[Program] = []

    def make(body: bytes) -> Program:
        made.append(Program.load("kbpf_test", SCHED_CLS, 0, body + EXIT))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("verdict", [TC_ACT_OK, TC_ACT_SHOT, 0x1234])
def test_run_returns_the_verdict_and_the_unchanged_packet(program: Loader, verdict: int) -> None:
    done = run(program(put(0, verdict)), frame(SYN))
    assert done.retval == verdict
    assert done.packet_out == frame(SYN)


def test_program_reads_and_writes_the_mark(program: Loader) -> None:
    body = load(0, 1, MARK) + insn(0x62, 1, off=MARK, imm=9)
    done = run(program(body), frame(SYN), context=SkbContext(mark=5).pack())
    assert done.retval == 5
    assert done.context.mark == 9


def test_context_goes_in_and_comes_out(program: Loader) -> None:
    given = SkbContext(
        mark=1,
        priority=2,
        ingress_ifindex=3,
        ifindex=1,
        cb=(4, 5, 6, 7, 8),
        tstamp=9 << 32,
        wire_len=1000,
        gso_segs=10,
        gso_size=11,
    )
    done = run(program(load(0, 1, CB + 16)), frame(SYN), context=given.pack())
    assert done.retval == 8
    assert done.context == given


def test_packet_without_a_context_is_on_loopback(program: Loader) -> None:
    done = run(program(load(0, 1, IFINDEX)), frame(SYN))
    assert done.retval == 1
    assert done.context == SkbContext(ifindex=1, wire_len=len(frame(SYN)))


def test_device_is_looked_up_in_the_callers_namespace(program: Loader) -> None:
    name = f"kbr{os.getpid()}"
    seen = program(load(0, 1, IFINDEX))

    def there() -> int:
        return run(seen, frame(SYN), context=SkbContext(ifindex=77).pack()).retval

    command("ip", "netns", "add", name)
    try:
        ip("link add kbr0 index 77 type veth peer name kbr1", netns=name)
        assert netns.run_in(Path("/run/netns") / name, there) == 77
    finally:
        command("ip", "netns", "del", name)


def test_missing_device_is_enodev(program: Loader) -> None:
    with pytest.raises(KernelError) as refused:
        run(program(put(0, 0)), frame(SYN), context=SkbContext(ifindex=2**30).pack())
    assert refused.value.errno == errno.ENODEV


@pytest.mark.parametrize("offset", [LENGTH, PKT_TYPE, PROTOCOL, DATA], ids=str)
def test_read_only_context_fields_are_einval(program: Loader, offset: int) -> None:
    context = bytearray(SkbContext().pack())
    context[offset] = 1
    with pytest.raises(KernelError) as refused:
        run(program(put(0, 0)), frame(SYN), context=bytes(context))
    assert refused.value.errno == errno.EINVAL


@pytest.mark.parametrize("packet", [b"", bytes(13)], ids=len)
def test_packet_shorter_than_an_ethernet_header_is_einval(program: Loader, packet: bytes) -> None:
    with pytest.raises(KernelError) as refused:
        run(program(put(0, 0)), packet)
    assert refused.value.errno == errno.EINVAL


def test_byte_written_by_the_program_is_in_the_packet(program: Loader) -> None:
    done = run(program(store_byte(TTL, 42, 0) + put(0, 0)), frame(SYN))
    assert difference(done.packet_out, frame(SYN)) == "ip ttl: 42, want 64"


def test_program_can_grow_the_packet(program: Loader) -> None:
    body = put(2, 1400) + put(3, 0) + call(CHANGE_TAIL)
    done = run(program(body), frame(SYN))
    assert done.retval == 0
    assert done.packet_out == frame(SYN).ljust(1400, b"\0")


def test_repeated_run_continues_with_the_last_packet(program: Loader) -> None:
    body = (
        (load(2, 1, DATA) + load(3, 1, DATA_END) + copy(4, 2) + insn(0x07, 4, imm=TTL + 1))
        + insn(0x2D, 4, 3, off=3)  # if there are fewer bytes, skip three
        + (load(5, 2, TTL, op=0x71) + insn(0x07, 5, imm=-1) + insn(0x73, 2, 5, off=TTL))
        + put(0, 0)
    )
    done = run(program(body), frame(SYN), repeat=5)
    assert difference(done.packet_out, frame(SYN)) == "ip ttl: 59, want 64"
    idle = program(put(0, 0))
    times = [run(idle, frame(SYN), repeat=10_000).nanoseconds for _ in range(5)]
    assert 0 < min(times) < 10_000, "time of one run, not the sum"


def test_redirect_returns_only_the_verdict(program: Loader) -> None:
    done = run(program(put(1, 2**20) + put(2, 0) + call(REDIRECT)), frame(SYN))
    assert done.retval == TC_ACT_REDIRECT
    assert done.context.ifindex == 1


@pytest.mark.parametrize(
    ("packet", "protocol"),
    [
        (frame(SYN), 0x0800),
        (frame(udp("[2001:db8::7]:53", "[2001:db8::1]:53")), 0x86DD),
        (frame(arp(1, "02:00:00:00:00:01", "192.0.2.7", LOOPBACK_MAC, "192.0.2.1")), 0x0806),
    ],
    ids=["IPv4", "IPv6", "ARP"],
)
def test_protocol_is_taken_from_the_ethernet_header(program: Loader, packet: bytes, protocol: int) -> None:
    assert run(program(load(0, 1, PROTOCOL)), packet).retval == int.from_bytes(protocol.to_bytes(2, "big"), "little")


@pytest.mark.parametrize(
    ("to", "pkt_type"),
    [(LOOPBACK_MAC, 0), ("33:33:ff:00:00:01", 2), ("02:00:00:00:00:0b", 3)],
    ids=["own: host", "multicast", "another: other host"],
)
def test_packet_type_follows_from_the_mac_address(program: Loader, to: str, pkt_type: int) -> None:
    assert run(program(load(0, 1, PKT_TYPE)), frame(SYN, to=to)).retval == pkt_type


def test_packet_has_a_socket_unlike_a_received_one(program: Loader) -> None:
    body = load(2, 1, SK, op=0x79) + put(0, 0) + insn(0x15, 2, off=1) + put(0, 1)
    assert run(program(body), frame(SYN)).retval == 1


@needs("checksum_complete")
def test_checksum_complete_is_verified_after_the_run(program: Loader) -> None:
    careless = program(store_byte(TTL, 42, 0) + put(0, 0))
    careful = program(store_byte(TTL, 42, RECOMPUTE_CSUM) + put(0, 0))
    run(careful, frame(SYN), checksum_complete=True)
    with pytest.raises(KernelError) as wrong:
        run(careless, frame(SYN), checksum_complete=True)
    assert wrong.value.errno == errno.EBADMSG
    assert "checksum wrong" in str(wrong.value)


@needs("parts")
def test_packet_can_have_a_non_linear_part(program: Loader) -> None:
    body = load(0, 1, DATA_END) + load(2, 1, DATA) + insn(0x1F, 0, 2)
    packet = frame(udp("198.51.100.7:53", "192.0.2.1:53", bytes(1000)))
    done = run(program(body), packet, context=SkbContext(linear=42).pack())
    assert done.retval == 42


# ---- what the kernel refuses -------------------------------------------------------------------

ADVICE = (
    "from kbpf.errors import KernelError\nfrom kbpf.kernel.bpf.objects import Program\n"
    "try: Program.load('cow', 3, 0, bytes.fromhex('9500000000000000'))\n"  # exit without r0
    "except KernelError as error: print(error.errno, error)\n"
)


@pytest.mark.parametrize(
    ("lacking", "says", "not_says"),
    [
        ("", "report it, with the output of `kbpf check`", "CAP_BPF"),
        ("-bpf,-perfmon", "report it", "CAP_BPF"),
        ("-bpf,-perfmon,-sys_admin,-net_admin", "CAP_BPF", "report it"),
    ],
)
def test_load_error_advice_depends_on_the_privileges(lacking: str, says: str, not_says: str):
    """The verifier fails with EACCES, too, which is then no lack of privileges."""
    drop = ["setpriv", f"--bounding-set={lacking}", f"--inh-caps={lacking}"] if lacking else []
    done = subprocess.run(
        [*drop, sys.executable, "-c", ADVICE], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.startswith(f"{errno.EACCES if not_says == 'CAP_BPF' else errno.EPERM} ")
    assert says in done.stdout
    assert not_says not in done.stdout
    assert done.stdout.count("\n") == 1


def test_full_map_error_names_the_map_only():
    with Map.create(BPF_MAP_TYPE_HASH, "cows", 4, 4, 1) as cows:
        cows.update(bytes(4), bytes(4))
        with pytest.raises(KernelError, match="the map is full") as full:
            cows.update(b"1234", bytes(4))
    assert str(full.value) == "the map is full (map cows, 1 entries): E2BIG"

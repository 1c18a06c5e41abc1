# SPDX-License-Identifier: Apache-2.0
"""Runs a program once on one packet with BPF_PROG_TEST_RUN, without a device or traffic.

For programs with an skb context: TC (SCHED_CLS) and cgroup skb. The skb that the kernel makes of
the bytes (net/bpf/test_run.c) differs from a device's:

- A packet begins with an Ethernet header. New kernels require IP's complete fixed header after it
  (EINVAL), so a shorter IP packet cannot be tried there, and packets of an L3 device cannot at all.
  The limit is one page minus the kernel's headroom and tailroom: about 3,700 bytes.
- The Ethernet header sets skb->protocol and, by its destination, pkt_type: loopback's MAC is
  00:00:00:00:00:00, so a packet to any other MAC is PACKET_OTHERHOST.
- The skb is linear, so a missing bpf_skb_pull_data() is not noticed.
- Its checksum is CHECKSUM_NONE. `checksum_complete` makes it COMPLETE, and the kernel checks that
  the program keeps skb->csum correct (Linux v6.11). Only real packets can be PARTIAL.
- Its device is the loopback of the calling thread's network namespace, or `ifindex`, which must
  exist there. skb->sk is a socket of the test run, not NULL as at ingress.
- Nothing is sent, whatever the program returns. After bpf_redirect*() only TC_ACT_REDIRECT is
  visible, not the target, nor the Ethernet header that redirect_neigh would write. But
  bpf_clone_redirect() does send.
- gso_size only affects helpers such as bpf_skb_change_*(); there is no gso_type.
- With `repeat` each run gets the packet as the previous run left it, not a fresh one.
"""

import ctypes
import errno
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple

from kbpf.kernel.bpf import syscalls
from kbpf.kernel.bpf.objects import Program


class TcAction(IntEnum):
    """Return codes of a TC program. UNSPEC (the next program decides) is -1 as an unsigned number,
    since retval is unsigned.
    """

    OK = 0
    SHOT = 2
    REDIRECT = 7
    UNSPEC = 0xFFFF_FFFF


_ACTIONS: Final = {int(action): action for action in TcAction}
TC_ACT_SHOT: Final = TcAction.SHOT
TC_ACT_REDIRECT: Final = TcAction.REDIRECT
TC_ACT_UNSPEC: Final = TcAction.UNSPEC

_BPF_F_TEST_SKB_CHECKSUM_COMPLETE: Final = 1 << 2
_PACKET_OUT_SIZE: Final = 1 << 17
"""The buffer for the resulting packet: larger than a linear skb can become."""


_CONTEXT: Final = struct.Struct("=8xI24xII")  # struct __sk_buff up to ifindex


class SkbContext(NamedTuple):
    """Fields of struct __sk_buff. `ifindex` 0 and 1 are loopback."""

    mark: int = 0
    ingress_ifindex: int = 0
    ifindex: int = 0

    def pack(self) -> bytes:
        """The struct in this machine's byte order."""
        return _CONTEXT.pack(*self)


@dataclass(frozen=True, slots=True)
class TestRun:
    """The program's return value, the packet and the context after the run, and the average
    duration of a run, which for a single run is mostly the cost of reading the clock.
    """

    __test__: ClassVar[bool] = False  # pytest would take it for a test class by its name

    retval: int
    packet_out: bytes
    context: SkbContext
    nanoseconds: int


def run(
    program: Program,
    packet: bytes,
    repeat: int = 1,
    context: bytes | None = None,
    *,
    checksum_complete: bool = False,
) -> TestRun:
    """Runs the program. Raises KernelError: EINVAL if the kernel does not accept the packet or
    context, ENODEV for an unknown ifindex, EBADMSG if skb->csum is wrong afterwards.
    """
    packet_out = ctypes.create_string_buffer(_PACKET_OUT_SIZE)
    context_out = ctypes.create_string_buffer(256)
    opts = syscalls.TestRunOpts(
        data_in=packet,
        data_out=ctypes.addressof(packet_out),
        data_size_in=len(packet),
        data_size_out=_PACKET_OUT_SIZE,
        ctx_in=context,
        ctx_out=ctypes.addressof(context_out),
        ctx_size_in=len(context or b""),
        ctx_size_out=len(context_out),
        repeat=repeat,
        flags=_BPF_F_TEST_SKB_CHECKSUM_COMPLETE if checksum_complete else 0,
    )
    result = syscalls.lib().bpf_prog_test_run_opts(program.fd, ctypes.byref(opts))
    checksum_hint = "checksum wrong: skb->csum is not that of the packet that the program has left"
    syscalls.check(
        result,
        f"cannot run the program {program.name}",
        f"packet of {len(packet)} bytes",
        checksum_hint if result == -errno.EBADMSG else "",
    )
    return TestRun(
        retval=_ACTIONS.get(opts.retval, opts.retval),
        packet_out=ctypes.string_at(packet_out, opts.data_size_out),
        context=SkbContext(*_CONTEXT.unpack_from(context_out)),
        nanoseconds=opts.duration,
    )

"""A program run once on one packet, by BPF_PROG_TEST_RUN: no device, no traffic.

For programs that are given an skb: TC (SCHED_CLS) and cgroup skb. What the kernel makes of the
bytes (net/bpf/test_run.c) is not always what a device would:

- A packet begins with an Ethernet header, and new kernels want IP's whole fixed header behind it
  (EINVAL): a shorter IP packet cannot be tried there. There is no packet of an L3 device.
  The limit is one page less the kernel's own room: about 3,700 bytes.
- The Ethernet header sets skb->protocol and, by its destination, pkt_type: loopback's MAC is
  00:00:00:00:00:00, so a packet to any other is PACKET_OTHERHOST.
- All of it is linear (`linear` changes that where the kernel can, behind v6.18): that
  bpf_skb_pull_data() is missing is not noticed.
- Its checksum is CHECKSUM_NONE. `checksum_complete` makes it COMPLETE, and the kernel sees
  whether the program has kept skb->csum right (Linux v6.11). PARTIAL only real packets are.
- It is on the loopback of the calling thread's network namespace, or on `ifindex`, which must
  exist there. skb->sk is not NULL as it is at ingress: it is a socket of the test's own.
- Nothing is sent, whatever is returned. bpf_redirect*() only leaves TC_ACT_REDIRECT: the target,
  and what redirect_neigh would write before the packet, is not to be seen here. But
  bpf_clone_redirect() does send.
- gso_size counts only for what bpf_skb_change_*() and the like do with it; there is no gso_type.
- `repeat` runs the program on the packet that the run before has left, not on a fresh one.
"""

import ctypes
import errno
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Final, Self

from kbpf.kernel.bpf import syscalls
from kbpf.kernel.bpf.objects import Program


class TcAction(IntEnum):
    """What a TC program returns. UNSPEC is -1, as retval has no sign: the next program decides."""

    OK = 0
    SHOT = 2
    PIPE = 3
    STOLEN = 4
    REDIRECT = 7
    UNSPEC = 0xFFFF_FFFF


_ACTIONS: Final = {int(action): action for action in TcAction}
TC_ACT_OK: Final = TcAction.OK
TC_ACT_SHOT: Final = TcAction.SHOT
TC_ACT_PIPE: Final = TcAction.PIPE
TC_ACT_STOLEN: Final = TcAction.STOLEN
TC_ACT_REDIRECT: Final = TcAction.REDIRECT
TC_ACT_UNSPEC: Final = TcAction.UNSPEC

_BPF_F_TEST_SKB_CHECKSUM_COMPLETE: Final = 1 << 2
_PACKET_OUT_SIZE: Final = 1 << 17
"""For the packet that comes out: more than an skb that was linear can become."""


class _TestRunOpts(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("data_in", ctypes.c_char_p),
        ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32),
        ("ctx_in", ctypes.c_char_p),
        ("ctx_out", ctypes.c_void_p),
        ("ctx_size_in", ctypes.c_uint32),
        ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_uint32),
        ("repeat", ctypes.c_int),
        ("duration", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("cpu", ctypes.c_uint32),
        ("batch_size", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class SkbContext:
    """What may be set of struct __sk_buff, and what is read back after the run.

    `ifindex` 0 and 1 are loopback. `wire_len` 0 is the packet's length, and must not be less.
    `cb` is what programs leave each other; `tstamp` has nanoseconds. `linear` is given only: how
    many bytes are in the linear part, 0 for all; Linux v6.18 and before refuse it.
    """

    mark: int = 0
    priority: int = 0
    ingress_ifindex: int = 0
    ifindex: int = 0
    cb: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    linear: int = 0
    tstamp: int = 0
    wire_len: int = 0
    gso_segs: int = 0
    gso_size: int = 0

    SIZE: ClassVar[int] = 184
    """Up to gso_size: later fields are zero for every kernel."""

    def pack(self) -> bytes:
        """struct __sk_buff in this machine's byte order."""
        raw = bytearray(self.SIZE)
        for offset, format_, name in _SKB_FIELDS:
            value = getattr(self, name)
            struct.pack_into(format_, raw, offset, *(value if name == "cb" else (value,)))
        return bytes(raw)

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """The same fields of what the kernel has written."""
        fields: dict[str, Any] = {}
        for offset, format_, name in _SKB_FIELDS:
            values = struct.unpack_from(format_, raw, offset)
            fields[name] = values if name == "cb" else values[0]
        return cls(**fields)


_SKB_FIELDS: Final = (
    (8, "=I", "mark"),
    (32, "=I", "priority"),
    (36, "=I", "ingress_ifindex"),
    (40, "=I", "ifindex"),
    (48, "=5I", "cb"),
    (80, "=I", "linear"),  # data_end
    (152, "=Q", "tstamp"),
    (160, "=I", "wire_len"),
    (164, "=I", "gso_segs"),
    (176, "=I", "gso_size"),
)


@dataclass(frozen=True, slots=True)
class TestRun:
    """What the program returned, the packet and the context as it left them, and how long one
    run took on average: of a single run that is mostly the clock.
    """

    __test__: ClassVar[bool] = False  # not a class of tests, whatever pytest thinks of its name

    retval: int
    packet_out: bytes
    context_out: bytes
    nanoseconds: int

    @property
    def context(self) -> SkbContext:
        """`context_out`, read."""
        return SkbContext.unpack(self.context_out)


def run(
    program: Program,
    packet: bytes,
    repeat: int = 1,
    context: bytes | None = None,
    *,
    checksum_complete: bool = False,
) -> TestRun:
    """Runs the program; KernelError with EINVAL for a packet or context that the kernel does not
    take, ENODEV for an ifindex that is not there, EBADMSG when skb->csum is wrong afterwards.
    """
    packet_out = ctypes.create_string_buffer(_PACKET_OUT_SIZE)
    context_out = ctypes.create_string_buffer(256)
    opts = _TestRunOpts(
        sz=ctypes.sizeof(_TestRunOpts),
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
        context_out=ctypes.string_at(context_out, opts.ctx_size_out),
        nanoseconds=opts.duration,
    )

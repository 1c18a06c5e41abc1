# SPDX-License-Identifier: Apache-2.0
"""What a program at a tracepoint (bpf/trace.h) has to know about the running kernel: the type of
the tracepoint, and where its structs have the members that the program reads. Both are in the
kernel's BTF.
"""

import struct
from functools import cache
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.bpf import probe
from kbpf.kernel.bpf.btf import BTF_KIND_TYPEDEF, Btf
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.bpf.uapi import (
    BPF_F_NO_PREALLOC,
    BPF_MAP_TYPE_SK_STORAGE,
    BPF_PROG_TYPE_TRACING,
    BPF_PSEUDO_MAP_FD,
    BPF_TRACE_RAW_TP,
    BPF_FUNC_sk_storage_get,
)
from kbpf.kernel.probe_result import Probe

MEMBERS: Final = {
    0x6B627101: ("sock_common", "skc_state"),
    0x6B627102: ("sock_common", "skc_v6_rcv_saddr"),
    0x6B627103: ("sock", "sk_err"),
    0x6B627104: ("sock", "sk_cgrp_data"),
    0x6B627105: ("cgroup", "kn"),
    0x6B627106: ("kernfs_node", "id"),
}
"""Number of the call of place_of_*() in lib/compat.h → struct and member. struct sock_common is the
start of struct sock.
"""


TRACEPOINTS: Final = ("tcp_receive_reset", "tcp_retransmit_skb", "inet_sk_error_report")


class _Types(NamedTuple):
    """`places`: see replacements(). `tracepoints`: name → id of its type, 0 if there is none."""

    places: dict[bytes, bytes]
    tracepoints: dict[str, int]


@cache
def _read_types() -> _Types:
    """Reads the kernel's BTF once, which takes 25 ms. Raises KernelError if it lacks a member."""
    with Btf.load() as kernel:
        places = {}
        for number, (struct_name, member) in MEMBERS.items():
            if not (bit := kernel.find_member_bit(struct_name, member)):
                raise KernelError(f"the kernel's BTF has no {struct_name}.{member}")
            places[probe.encode_call(number)] = probe.encode_r0(bit // 8)
        tracepoints = {n: kernel.find(f"btf_trace_{n}", BTF_KIND_TYPEDEF) for n in TRACEPOINTS}
    return _Types(places, tracepoints)


def replacements() -> dict[bytes, bytes]:
    """The call of each place_of_*() → the instruction that yields the place. Raises KernelError if
    the kernel's BTF lacks a member.
    """
    return _read_types().places


def find_tracepoint(name: str) -> int:
    """The id of the type of one of TRACEPOINTS in the kernel's BTF. Raises KernelError without
    it.
    """
    if not (type_id := _read_types().tracepoints[name]):
        raise KernelError(f"the kernel has no tracepoint {name}")
    return type_id


def probe_tracepoint(name: str) -> Probe:
    """Whether a program at this tracepoint can find what is stored with the socket that the
    tracepoint is about.
    """
    try:
        replacements()
        type_id = find_tracepoint(name)
        with Map.create(BPF_MAP_TYPE_SK_STORAGE, "kbpf_probe", 4, 8, 0, BPF_F_NO_PREALLOC) as storage:
            insns = (
                (0x79, 1 << 4 | 1, 0, 0),  # r1 = *(u64 *)(r1 + 0): the socket
                (0xBF, 1 << 4 | 2, 0, 0),  # r2 = r1
                (0x18, BPF_PSEUDO_MAP_FD << 4 | 1, 0, storage.fd),  # r1 = the map
                (0, 0, 0, 0),
                (0xB7, 3, 0, 0),  # r3 = 0
                (0xB7, 4, 0, 0),  # r4 = 0
            )
            body = b"".join(struct.pack("=BBhi", *insn) for insn in insns)
            return probe.probe_program(
                BPF_PROG_TYPE_TRACING, BPF_TRACE_RAW_TP, body + probe.encode_call(BPF_FUNC_sk_storage_get), type_id
            )
    except KernelError as error:
        return Probe(False, str(error))

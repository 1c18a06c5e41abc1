# SPDX-License-Identifier: Apache-2.0
"""Sockets that the kernel uses itself: those of NFS, SMB and Ceph mounts, for example.

Before Linux 6.6, a BPF program that replaces the destination of such a socket replaces it in the
mount as well (fixed by 0bdf399342c5, 86a7e0b69bd5 and cedc019b9f26): a mount of a ClusterIP becomes
one of a backend, and hangs for ever once that backend has gone. So on these kernels the packet path
serves them. Whether a kernel has the fixes cannot be tried, since no system call shows the address
that the kernel keeps. Stable kernels and distributions have backported them one by one; there, too,
the packet path serves, which is right with the fixes as well.

struct bpf_sock does not tell whose a socket is. The bit sk_kern_sock of struct sock does; its place
differs between kernels, which describe it in their BTF.
"""

import os
import re
import struct
from functools import cache
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.bpf import probe
from kbpf.kernel.bpf.btf import Btf
from kbpf.kernel.bpf.uapi import (
    BPF_CGROUP_INET4_CONNECT,
    BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
    BPF_FUNC_probe_read_kernel,
)
from kbpf.kernel.probe_result import Probe

FIRST_FIXED: Final = (6, 6)
NO_BTF: Final = "the kernel has no BTF"


def keeps_addresses(release: str) -> bool:
    """Whether a kernel of this release (`uname -r`) keeps the addresses that its own sockets dial,
    whatever a program replaces them by.
    """
    match = re.match(r"(\d+)\.(\d+)", release)
    return match is not None and (int(match[1]), int(match[2])) >= FIRST_FIXED


@cache
def find_bit() -> int:
    """Returns the place of sk_kern_sock in struct sock, in bits; 0 if programs must not look at it:
    this kernel needs no care, or does not allow it.
    """
    if keeps_addresses(os.uname().release) or not probe_read().works:
        return 0
    return find_member_bit("sock", "sk_kern_sock")


def probe_kernel_sockets() -> Probe:
    """Whether mounts keep the Service's address."""
    if keeps_addresses(os.uname().release):
        return Probe(True)
    read = probe_read()
    if not read.works:
        return read
    return Probe(True) if find_bit() else Probe(False, NO_BTF)


def probe_read() -> Probe:
    """Whether connect hooks may read the kernel's memory: not with lockdown=confidentiality."""
    insns = (
        (0xBF, 0xA1, 0, 0),  # r1 = r10
        (0x07, 0x01, 0, -8),  # r1 -= 8
        (0xB7, 0x02, 0, 8),  # r2 = 8
        (0xB7, 0x03, 0, 0),  # r3 = 0
    )
    body = b"".join(struct.pack("=BBhi", *insn) for insn in insns)
    return probe.probe_program(
        BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
        BPF_CGROUP_INET4_CONNECT,
        body + probe.encode_call(BPF_FUNC_probe_read_kernel),
    )


def find_member_bit(struct_name: str, member_name: str) -> int:
    """The place of a member in a struct of the running kernel, in bits; 0 if the kernel has no BTF,
    or no such member.
    """
    try:
        with Btf.load() as kernel:
            return kernel.find_member_bit(struct_name, member_name)
    except KernelError:
        return 0

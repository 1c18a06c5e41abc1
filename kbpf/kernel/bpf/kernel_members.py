# SPDX-License-Identifier: Apache-2.0
"""What programs that read the kernel's memory have to know about the running kernel: where its
structs have their members, whether a socket is the kernel's own and, for a program at a tracepoint
(bpf/trace.h), the type of the tracepoint. All of it is in the kernel's BTF.

The kernel uses some sockets itself: those of NFS, SMB and Ceph mounts, for example. Before Linux
6.6, a BPF program that replaces the destination of such a socket replaces it in the mount as well
(fixed by 0bdf399342c5, 86a7e0b69bd5 and cedc019b9f26): a mount of a ClusterIP becomes one of a
backend, and hangs for ever once that backend has gone. So on these kernels the packet path
serves them. Whether a kernel has the fixes cannot be tried, since no system call shows the address
that the kernel keeps. Stable kernels and distributions have backported them one by one; there, too,
the packet path serves, which is right with the fixes as well.

struct bpf_sock does not tell whose a socket is. The bit sk_kern_sock of struct sock does; its place
differs between kernels, which describe it in their BTF.
"""

import os
import re
from functools import cache
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.bpf import probe
from kbpf.kernel.bpf.btf import BTF_KIND_TYPEDEF, Btf
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.bpf.syscalls import encode_insns
from kbpf.kernel.bpf.uapi import (
    BPF_CGROUP_INET4_CONNECT,
    BPF_F_NO_PREALLOC,
    BPF_MAP_TYPE_SK_STORAGE,
    BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
    BPF_PROG_TYPE_TRACING,
    BPF_PSEUDO_MAP_FD,
    BPF_TRACE_RAW_TP,
    BPF_FUNC_probe_read_kernel,
    BPF_FUNC_sk_storage_get,
)
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import netns

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
    body = encode_insns(
        (0xBF, 0xA1, 0, 0),  # r1 = r10
        (0x07, 0x01, 0, -8),  # r1 -= 8
        (0xB7, 0x02, 0, 8),  # r2 = 8
        (0xB7, 0x03, 0, 0),  # r3 = 0
    )
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


# ---- members and tracepoints ---------------------------------------------------------------------

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
NETWORK_MEMBERS: Final = {
    0x6B627107: ("sock_common", "skc_net"),
    0x6B627108: ("net", "dev_base_head"),
    0x6B627109: ("net", "net_cookie"),
    0x6B62710A: ("net_device", "dev_list"),
    0x6B62710B: ("net_device", "nd_net"),
    0x6B62710C: ("net_device", "rtnl_link_ops"),
    0x6B62710D: ("net_device", "adj_list"),
    0x6B62710E: ("net_device", "priv"),
    0x6B62710F: ("rtnl_link_ops", "kind"),
    0x6B627110: ("netdev_adjacent", "list"),
}
"""The same for the hooks (bpf/cluster_netns.h), which work without them."""
SOCKET_MEMBERS: Final = {
    0x6B627111: ("inet_sock", "uc_index"),
    0x6B627112: ("inet_sock", "pinet6"),
    0x6B627113: ("ipv6_pinfo", "ucast_oif"),
}
"""The same. Kernels without IPv6 lack the second."""
NETDEV_ALIGN: Final = 32
"""Before net_device.priv (Linux v6.10), what a driver keeps follows the struct at a multiple of
this.
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


@cache
def network_replacements() -> dict[bytes, bytes]:
    """The same for the hooks. All places are 0 if the kernel's BTF lacks one, or if hooks may not
    read the kernel's memory.
    """
    places = _find_network_members() if probe_read().works else {}
    return {
        probe.encode_call(number): probe.encode_r0(places.get(number, 0))
        for number in (*NETWORK_MEMBERS, *SOCKET_MEMBERS)
    }


def _find_network_members() -> dict[int, int]:
    """Number of the call → the place in bytes; empty if the kernel's BTF lacks one of NETWORK_MEMBERS."""
    try:
        with Btf.load() as kernel:
            members = (NETWORK_MEMBERS | SOCKET_MEMBERS).items()
            places = {number: kernel.find_member_bit(*member) // 8 for number, member in members}
            private = next(number for number, (_, member) in NETWORK_MEMBERS.items() if member == "priv")
            places[private] = places[private] or -(-kernel.find_size("net_device") // NETDEV_ALIGN) * NETDEV_ALIGN
    except KernelError:
        return {}
    return places if all(places[number] for number in NETWORK_MEMBERS) else {}


def probe_networks() -> Probe:
    """Whether the hooks leave sockets of other networks alone."""
    if (read := probe_read()).works and _find_network_members():
        return Probe(True) if netns.read_cookie() else Probe(False, "the kernel has no SO_NETNS_COOKIE")
    return read if not read.works else Probe(False, "the kernel has no BTF, or it lacks what the hooks read")


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
            body = encode_insns(
                (0x79, 1 << 4 | 1, 0, 0),  # r1 = *(u64 *)(r1 + 0): the socket
                (0xBF, 1 << 4 | 2, 0, 0),  # r2 = r1
                (0x18, BPF_PSEUDO_MAP_FD << 4 | 1, 0, storage.fd),  # r1 = the map
                (0, 0, 0, 0),
                (0xB7, 3, 0, 0),  # r3 = 0
                (0xB7, 4, 0, 0),  # r4 = 0
            )
            return probe.probe_program(
                BPF_PROG_TYPE_TRACING, BPF_TRACE_RAW_TP, body + probe.encode_call(BPF_FUNC_sk_storage_get), type_id
            )
    except KernelError as error:
        return Probe(False, str(error))

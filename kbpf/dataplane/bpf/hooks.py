# SPDX-License-Identifier: Apache-2.0
"""The hooks: which program is attached where. A new hook is one row here and one function in C."""

import errno
from dataclasses import dataclass
from typing import Final

from kbpf.kernel.bpf import uapi
from kbpf.model.config import Accounting


@dataclass(frozen=True, slots=True)
class Hook:
    """A program of the unit `sock`: name, types as in linux/bpf.h, the kernel version that added
    them, and for what it is.

    `required`: without this hook some sockets cannot use Services, so the agent does not start.
    `accounting`: the hook only counts, and is attached with this --accounting or a higher one;
    None: it translates. `tracepoint`: where it is attached in the kernel; "": to a cgroup.
    """

    name: str
    attach_type: int
    since_kernel: str
    purpose: str
    required: bool = False
    prog_type: int = uapi.BPF_PROG_TYPE_CGROUP_SOCK_ADDR
    accounting: Accounting | None = None
    tracepoint: str = ""

    @property
    def only_counts(self) -> bool:
        """Whether Services work without it."""
        return self.accounting is not None

    def is_wanted(self, accounting: Accounting) -> bool:
        """Whether it is attached with this --accounting."""
        return self.accounting in (None, accounting) or (accounting is Accounting.FULL and self.only_counts)


TRACE_HOOKS: Final = frozenset(("trace_reset", "trace_retransmit"))
"""The hooks that together notice failures of sockets; `trace_error` adds rarer ones."""

HOOKS: Final = (
    # In the order of attaching: each works at once, and replies must be translated before requests.
    Hook("recvmsg4", uapi.BPF_CGROUP_UDP4_RECVMSG, "5.2", "recvfrom() on UDP, IPv4", True),
    Hook("recvmsg6", uapi.BPF_CGROUP_UDP6_RECVMSG, "5.2", "recvfrom() on UDP, IPv6", True),
    Hook("getpeername4", uapi.BPF_CGROUP_INET4_GETPEERNAME, "5.8", "getpeername(), IPv4"),
    Hook("getpeername6", uapi.BPF_CGROUP_INET6_GETPEERNAME, "5.8", "getpeername(), IPv6"),
    Hook(
        "sock_ops",
        uapi.BPF_CGROUP_SOCK_OPS,
        "5.7",
        "counting the ends of TCP connections",
        prog_type=uapi.BPF_PROG_TYPE_SOCK_OPS,
        accounting=Accounting.FULL,
    ),
    *(
        Hook(
            f"trace_{event}",
            uapi.BPF_TRACE_RAW_TP,
            since,
            f"counting {purpose}",
            prog_type=uapi.BPF_PROG_TYPE_TRACING,
            accounting=Accounting.CONNECTIONS,
            tracepoint=tracepoint,
        )
        for event, tracepoint, since, purpose in (
            ("reset", "tcp_receive_reset", "5.11", "connections that backends refuse or reset"),
            ("retransmit", "tcp_retransmit_skb", "5.11", "connections that backends do not answer"),
            ("error", "inet_sk_error_report", "5.14", "time-outs, and datagrams that are rejected"),
        )
    ),
    Hook("sendmsg4", uapi.BPF_CGROUP_UDP4_SENDMSG, "4.18", "sendto() on UDP, IPv4", True),
    Hook("sendmsg6", uapi.BPF_CGROUP_UDP6_SENDMSG, "4.18", "sendto() on UDP, IPv6", True),
    Hook("connect4", uapi.BPF_CGROUP_INET4_CONNECT, "4.17", "connect() on IPv4 sockets", True),
    Hook("connect6", uapi.BPF_CGROUP_INET6_CONNECT, "4.17", "connect() on IPv6 sockets", True),
)


@dataclass(frozen=True, slots=True)
class PacketProgram:
    """A program of the unit `tc`. `direction`: "ingress" or "egress", or "" if it is only reached
    by a tail call. `tail`: its index in the tail call map (enum tail in bpf/tc/tails.h), or -1.
    """

    name: str
    direction: str = ""
    tail: int = -1


CONNTRACK_PROGRAMS: Final = ("tc_conntrack", "tc_unconfirmed")
"""Loaded only with `--forwarding netfilter`: kernels before 6.1 refuse it."""
ENTRY_READERS: Final = (*CONNTRACK_PROGRAMS, "tc_egress")
"""Programs with places of the kernel's structs (kernel/bpf/kfuncs.py)."""

PACKET_PROGRAMS: Final = (
    PacketProgram("tc_ingress", direction="ingress", tail=6),
    PacketProgram("tc_egress", direction="egress", tail=19),
    PacketProgram("tc_choose", tail=0),
    PacketProgram("tc_icmp_in", tail=1),
    PacketProgram("tc_icmp_out", tail=2),
    PacketProgram("tc_refuse", tail=3),
    PacketProgram("tc_host", tail=4),
    PacketProgram("tc_host_choose", tail=5),
    PacketProgram("tc_route", tail=7),
    PacketProgram("tc_claim", tail=8),
    PacketProgram("tc_publish", tail=20),
    PacketProgram("tc_enqueue", tail=10),
    PacketProgram("tc_evict", tail=11),
    PacketProgram("tc_delete_flow", tail=12),
    PacketProgram("tc_coexist", tail=13),
    PacketProgram("tc_recheck", tail=14),
    PacketProgram("tc_judge", tail=15),
    PacketProgram("tc_sctp", tail=9),
    PacketProgram("tc_reroute", tail=16),
    PacketProgram("tc_conntrack", tail=17),
    PacketProgram("tc_unconfirmed", tail=21),
    PacketProgram("tc_end", tail=18),
)
TAIL_CALL_SLOTS: Final = 22

UNITS: Final = ("sock", "tc")


def program_type(program: str) -> tuple[int, int, bool]:
    """Program type, expected attach type, and whether its unit requires it."""
    for hook in HOOKS:
        if hook.name == program:
            return hook.prog_type, hook.attach_type, hook.required
    return uapi.BPF_PROG_TYPE_SCHED_CLS, 0, True


def tracepoint_of(program: str) -> str:
    """Where the program is attached in the kernel; "" if it is at no tracepoint."""
    return next((hook.tracepoint for hook in HOOKS if hook.name == program), "")


def loaded_packet_programs(uses_conntrack: bool) -> tuple[PacketProgram, ...]:
    """The packet programs that are loaded with or without `--forwarding netfilter`."""
    return tuple(program for program in PACKET_PROGRAMS if uses_conntrack or program.name not in CONNTRACK_PROGRAMS)


def program_names(unit: str) -> tuple[str, ...]:
    """The names of a unit's program functions."""
    if unit == "tc":
        return tuple(program.name for program in PACKET_PROGRAMS)
    return tuple(hook.name for hook in HOOKS)


OPTIONAL_HELPERS: Final = {
    uapi.BPF_FUNC_set_retval: ("bpf_set_retval", "5.18", -errno.ECONNREFUSED),
    uapi.BPF_FUNC_get_current_cgroup_id: ("bpf_get_current_cgroup_id", "5.7", 0),
    uapi.BPF_FUNC_get_current_ancestor_cgroup_id: ("bpf_get_current_ancestor_cgroup_id", "5.7", 1),
}
"""Number → name, the kernel that added it to these hooks, and an argument to test it with. If the
kernel lacks one, the loader replaces the calls by r0 = 0.
"""
OPTIONAL_PACKET_HELPERS: Final = (uapi.BPF_FUNC_ktime_get_coarse_ns,)
"""The same for the packet path, which then uses bpf_ktime_get_ns (lib/compat.h). Added in 5.11."""

# SPDX-License-Identifier: Apache-2.0
"""The checks of `kbpf check`, and a row: the result of one probe of the kernel or the node."""

from enum import StrEnum, unique

import msgspec

from kbpf.kernel.probe_result import Probe


@unique
class Check(StrEnum):
    """The checks. Code refers to the member; its text is only what users see. ``{}`` is the subject
    of the row.
    """

    # mode bpf (bpf.py)
    PRIVILEGES = "privileges"
    LIBBPF = "libbpf1"
    BPF_SYSCALL = "bpf(2)"
    BPFFS = "bpffs"
    SOURCES = "BPF sources"
    BCC = "BCC"
    LLVM = "LLVM"
    ARTIFACTS = "compiled programs"
    NO_PREALLOC = "hash maps without preallocation"
    LRU_HASH = "LRU hash maps"
    SOCKET_STORAGE = "socket storage"
    SOCKET_STORAGE_LIST = "reading socket storage"
    BATCH = "batch operations"
    HOOK = "hook {}"
    HELPER = "{}"
    CGROUP = "cgroup v2"
    CGROUP_LINK = "cgroup links"
    NETNS_COOKIE = "SO_NETNS_COOKIE"
    KERNEL_SOCKETS = "mounts of Services"
    UDP_DESTROY = "SOCK_DESTROY for UDP"
    SOFTIRQ_LOCK = "softirq lock"
    # the packet path (packet_path.py)
    TC_PROGRAMS = "TC programs"
    TCX = "TCX"
    SCTP = "SCTP sockets"
    SNAT_PORTS = "masquerade ports"
    IP_FORWARDING = "{} forwarding"
    FORWARDING_MODE = "--forwarding"
    FORWARD_CHAINS = "FORWARD"
    PRE_DNAT_RULES = "no bypassed rules before DNAT"
    RP_FILTER = "rp_filter"
    CONNTRACK = "connection tracking"
    CONNTRACK_NAT = "NAT by conntrack"
    # mode ipvs (ipvs.py)
    NET_ADMIN = "CAP_NET_ADMIN"
    IPVS = "IPVS"
    IPVS_CONNTRACK = "IPVS with conntrack"
    IPVS_SCHEDULER = "IPVS scheduler {}"
    DUMMY = "dummy devices"
    NF_TABLES = "nf_tables"
    NFT_RULES = "nftables rules"
    INPUT_CHAINS = "INPUT"
    BRIDGE_NETFILTER = "bridged replies"
    # attached hooks (connect.py)
    ATTACHED = "attached"
    DIAL_ANY = "dial"
    DIAL = "dial {}"
    DIAL_FROM_HOST = "dial {} from the host"
    NO_DIAL_FROM_POD = "leave {} from a pod"
    PACKETS = "packets"
    PACKETS_AT = "packets at {}"
    # others on the same node (neighbours.py)
    FOREIGN_PROGRAMS = "alone at its hooks"
    LEFT_TO_NODE = "left to the node"
    BALANCERS = "no other load balancer"
    OTHER_KBPF = "no other kbpf"
    KUBE_PROXY = "no kube-proxy"


class CheckRow(msgspec.Struct, frozen=True):
    """The result of one check.

    `result` is "yes", "no" or "unknown". `needed`: mode bpf does not work without it. `packets`:
    the packet path does not work without it. `ipvs`: mode ipvs does not work without it. `detail`
    is what was found and what it means; `advice` is what to do about it, "" if nothing. `subject`:
    which hook, address etc. was checked.
    """

    check: Check
    result: str
    needed: bool
    detail: str
    advice: str
    packets: bool = False
    ipvs: bool = False
    subject: str = ""

    @property
    def name(self) -> str:
        """What users see."""
        return self.check.format(self.subject)


def make_row(
    check: Check,
    probe: Probe,
    advice: str,
    needed: bool = True,
    detail: str = "",
    *,
    packets: bool = False,
    ipvs: bool = False,
    subject: str = "",
) -> CheckRow:
    """Makes a row from a probe. An unknown result shows the probe's reason and no advice."""
    result = {True: "yes", False: "no", None: "unknown"}[probe.works]
    shown_advice = advice if probe.works is False else ""
    return CheckRow(
        check, result, needed, probe.reason or detail, shown_advice, packets, ipvs, subject
    )

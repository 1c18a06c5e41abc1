# SPDX-License-Identifier: Apache-2.0
"""The checks of `kbpf check`, and a row: the result of one probe of the kernel or the node."""

from collections.abc import Iterator, Mapping
from enum import StrEnum, unique
from typing import Any, Final

import msgspec

from kbpf.kernel.probe_result import Probe


@unique
class Check(StrEnum):
    """The checks. Code refers to the member; its text is only what users see."""

    # mode bpf (bpf.py)
    PRIVILEGES = "privileges"
    LIBBPF = "libbpf1"
    BPF_SYSCALL = "bpf(2)"
    BPFFS = "bpffs"
    SOURCES = "BPF sources"
    COMPILER = "compiler or compiled programs"
    CGROUP = "cgroup v2"
    FEATURES = "features of Linux 5.10"
    HOOK = "hooks"
    OPTIONAL = "optional features"
    # the packet path (packet_path.py)
    TC_PROGRAMS = "TC programs"
    TCX = "TCX"
    CONNTRACK_NAT = "NAT by conntrack"
    SCTP = "SCTP sockets"
    SNAT_PORTS = "masquerade ports"
    IP_FORWARDING = "forwarding"
    FORWARDING_MODE = "--forwarding"
    FORWARD_CHAINS = "FORWARD"
    PRE_DNAT_RULES = "no bypassed rules before DNAT"
    RP_FILTER = "rp_filter"
    # mode ipvs (ipvs.py)
    IPVS = "IPVS"
    IPVS_CONNTRACK = "IPVS with conntrack"
    IPVS_SCHEDULER = "IPVS schedulers"
    DUMMY = "dummy devices"
    NF_TABLES = "nf_tables"
    INPUT_CHAINS = "INPUT"
    BRIDGE_NETFILTER = "bridged replies"
    # attached hooks (connect.py)
    ATTACHED = "attached"
    DIAL = "dial"
    NO_DIAL_FROM_POD = "leave to the packet path"
    PACKETS = "packets"
    # others on the same node (neighbours.py)
    FOREIGN_PROGRAMS = "alone at its hooks"
    BALANCERS = "no other load balancer"
    OTHER_KBPF = "no other kbpf"
    KUBE_PROXY = "no kube-proxy"

    def of(self, subject: str) -> str:
        """The name of a row about one hook, address etc."""
        return NAMES_WITH_SUBJECT[self].format(subject)


NAMES_WITH_SUBJECT: Final = {
    Check.HOOK: "hook {}",
    Check.IP_FORWARDING: "{} forwarding",
    Check.IPVS_SCHEDULER: "IPVS scheduler {}",
    Check.DIAL: "dial {}",
    Check.NO_DIAL_FROM_POD: "leave {} from a pod",
    Check.PACKETS: "packets at {}",
}


class CheckRow(msgspec.Struct, frozen=True):
    """The result of one check.

    `name`: what was checked. `result` is ``yes``, ``no`` or ``unknown``, `detail` what was found
    and what it means, and `advice` what to do about it, "" if nothing. Whether something does not
    work without it: `needed`: mode bpf; `packets`: the packet path; `ipvs`: mode ipvs.
    """

    name: str
    result: str
    detail: str
    advice: str = ""
    needed: bool = False
    packets: bool = False
    ipvs: bool = False


def make_row(name: str, probe: Probe, advice: str = "", detail: str = "", **fields: Any) -> CheckRow:
    """Makes a row from a probe, which shows its reason, or else `detail`, and `advice` only if it
    does not work. `fields`: the others of CheckRow.
    """
    result = {True: "yes", False: "no", None: "unknown"}[probe.works]
    return CheckRow(name, result, probe.reason or detail, advice if probe.works is False else "", **fields)


def sum_up(check: Check, rows: Mapping[str, CheckRow]) -> Iterator[CheckRow]:
    """One row for all subjects of a check that work, and one for each that does not."""
    working = {subject: row for subject, row in rows.items() if row.result == "yes"}
    if working:
        yield CheckRow(
            check,
            "yes",
            ", ".join(working),
            needed=any(row.needed for row in working.values()),
            ipvs=any(row.ipvs for row in working.values()),
        )
    yield from (row for row in rows.values() if row.result != "yes")

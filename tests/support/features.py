# SPDX-License-Identifier: Apache-2.0
"""The table of features that some kernels lack: the only reason for which a test may be skipped.

A test that needs a feature which not every kernel has is marked: `@needs("tcx")`. It is skipped on
kernels that lack the feature according to the table, with the table's text as the reason.
tests/programs/node/test_features.py tries each feature and fails if the table is wrong.
"""

import contextlib
import errno
import os
import re
import resource
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.bpf import kernel_members, kfuncs, probe, tc, uapi
from kbpf.kernel.bpf.objects import Map, Program
from kbpf.kernel.bpf.uapi import (
    BPF_MAP_TYPE_HASH,
    BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
    BPF_PROG_TYPE_SCHED_CLS,
    BPF_FUNC_ktime_get_coarse_ns,
    BPF_FUNC_set_retval,
)
from kbpf.kernel.net.ipvs import IpvsClient
from kbpf.kernel.system import modules
from tests.support.lab.lab import until
from tests.support.packets.packets import frame, udp
from tests.support.packets.test_run import SkbContext, run

CONNECT4 = 10
BPF_FUNC_CHECK_MTU = 163
IPPROTO_SCTP, IPPROTO_MPTCP = 132, 262
TUNNEL_MODULES = ("ipip", "sit", "ip_gre", "ip6_tunnel")
DEBIAN = "KBPF_TEST_DEBIAN_KERNEL"
"""The environment variable is set on Debian's kernels (tests/kernels), whose options are known."""
IN_GUEST = DEBIAN in os.environ


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of kernels. `since`: the first Linux with it, (0, 0) if that does not depend on the
    version. `unbuilt`: Debian's kernels that are built without it. `tried`: tries whether it works.
    `check`: the row of `kbpf check` about it, "" if there is none.
    """

    what: str
    tried: Callable[[], bool | None]
    since: tuple[int, int] = (0, 0)
    unbuilt: tuple[tuple[int, int], ...] = ()
    check: str = ""


def _socket(kind: int, protocol: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, kind, protocol):
        return True
    return False


def _ipvs() -> bool:
    modules.load(("ip_vs",))
    with contextlib.suppress(KernelError):
        IpvsClient().close()
        return True
    return False


def _coarse_clock() -> bool | None:
    return probe.probe_helper(uapi.BPF_PROG_TYPE_SCHED_CLS, 0, BPF_FUNC_ktime_get_coarse_ns).works


def _set_retval() -> bool | None:
    return probe.probe_helper(BPF_PROG_TYPE_CGROUP_SOCK_ADDR, CONNECT4, BPF_FUNC_set_retval, -111).works


def _tracing() -> bool | None:
    return kernel_members.probe_tracepoint("tcp_receive_reset").works


def _socket_iterator() -> bool:
    """Some builds of Linux 6.18 refuse the iterator with EPERM, whatever the capabilities."""
    return probe.probe_sk_storage(iterate=True).works is True


def _route_mtu() -> bool | None:
    """bpf_check_mtu() is of the same patch set as the MTU in the result of bpf_fib_lookup()."""
    arguments = (
        (0xB7, 2, 0, 0),  # r2 = 0
        (0x62, 10, -4, 0),  # *(u32 *)(r10 - 4) = 0
        (0xBF, 10 << 4 | 3, 0, 0),  # r3 = r10
        (0x07, 3, 0, -4),  # r3 -= 4
        (0xB7, 4, 0, 0),
        (0xB7, 5, 0, 0),
    )
    insns = b"".join(struct.pack("=BBhi", *one) for one in arguments)
    call = probe.encode_call(BPF_FUNC_CHECK_MTU)
    return probe.probe_program(BPF_PROG_TYPE_SCHED_CLS, 0, insns + call).works


def _conntrack_nat() -> bool | None:
    modules.load(kfuncs.MODULES)
    return kfuncs.probe_conntrack().works


def _tun() -> bool:
    modules.load(("tun",))
    with contextlib.suppress(OSError), open("/dev/net/tun", "rb"):
        return True
    return False


def _nfs() -> bool:
    modules.load(("nfsd", "nfsv4"))
    known = Path("/proc/filesystems").read_text().split()
    return {"nfsd", "nfs4"} <= set(known)


def _smb() -> bool:
    modules.load(("cifs",))
    return "cifs" in Path("/proc/filesystems").read_text().split()


def _tunnels() -> bool:
    # Not loaded: each of these modules adds a device to every network namespace.
    return all(modules.probe_module(name).works for name in TUNNEL_MODULES)


def _br_netfilter() -> bool:
    # Not loaded: packets of the bridges of every network namespace would pass netfilter.
    return Path("/proc/sys/net/bridge").exists() or bool(modules.probe_module("br_netfilter").works)


def _nothing() -> Program:
    """A program that returns 0."""
    insns = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
    return Program.load("kbpf_try", BPF_PROG_TYPE_SCHED_CLS, 0, insns)


def _run(context: bytes | None = None, checksum_complete: bool = False) -> bool:
    """Whether BPF_PROG_TEST_RUN accepts these arguments; the kernel returns EINVAL otherwise."""
    packet = frame(udp("198.51.100.7:53", "192.0.2.1:53", bytes(1000)))
    with _nothing() as program:
        try:
            run(program, packet, context=context, checksum_complete=checksum_complete)
        except KernelError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
    return True


def _counted_by_cgroup() -> bool:
    """Whether a map can be created with RLIMIT_MEMLOCK 0."""
    _nothing().close()  # at the first load libbpf raises the limit on kernels that need it
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
    try:
        return probe.probe_map(BPF_MAP_TYPE_HASH).works is True
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


FEATURES = {
    "tcx": Feature("TCX links", lambda: tc.probe_tcx().works, (6, 6), check="TCX"),
    "tracing": Feature("bpf_sk_storage_get at tracepoints", _tracing, (5, 11), check="hook trace_reset"),
    "retransmissions": Feature(
        "bpf_sk_storage_get at tracepoints",
        lambda: kernel_members.probe_tracepoint("tcp_retransmit_skb").works,
        (5, 11),
        check="hook trace_retransmit",
    ),
    "socket_errors": Feature(
        "the tracepoint inet_sk_error_report",
        lambda: kernel_members.probe_tracepoint("inet_sk_error_report").works,
        (5, 14),
        check="hook trace_error",
    ),
    "set_retval": Feature("bpf_set_retval", _set_retval, (5, 18), check="bpf_set_retval"),
    "netns_cookie": Feature(
        "SO_NETNS_COOKIE", lambda: probe.probe_netns_cookie().works, (5, 14), check="SO_NETNS_COOKIE"
    ),
    "networks": Feature(
        "the networks of other clusters",
        lambda: kernel_members.probe_networks().works,
        (5, 14),
        check="networks of other clusters",
    ),
    "coarse_clock": Feature("bpf_ktime_get_coarse_ns", _coarse_clock, (5, 11), check="bpf_ktime_get_coarse_ns"),
    "memory_by_cgroup": Feature("maps that count against the memory cgroup", _counted_by_cgroup, (5, 11)),
    "sock_destroy": Feature(
        "the kfunc bpf_sock_destroy", lambda: " bpf_sock_destroy\n" in Path("/proc/kallsyms").read_text(), (6, 5)
    ),
    "conntrack_nat": Feature("conntrack's functions for programs", _conntrack_nat, (6, 1), check="NAT by conntrack"),
    "socket_iterator": Feature("iterators of socket storage", _socket_iterator, check="reading socket storage"),
    "sctp": Feature("SCTP sockets", lambda: _socket(socket.SOCK_STREAM, IPPROTO_SCTP), check="SCTP sockets"),
    "ipvs": Feature("IPVS", _ipvs),
    "mptcp": Feature("MPTCP sockets", lambda: _socket(socket.SOCK_STREAM, IPPROTO_MPTCP), unbuilt=((5, 10),)),
    "apparmor": Feature("AppArmor", lambda: Path("/sys/kernel/security/apparmor/profiles").exists()),
    "nfs": Feature("NFS, client and server", _nfs),
    "smb": Feature("SMB mounts", _smb),
    "tun": Feature("tun devices", _tun),
    "br_netfilter": Feature("br_netfilter", _br_netfilter),
    "tunnels": Feature("tunnels of IP in IP", _tunnels),
    "route_mtu": Feature("the MTU in the result of bpf_fib_lookup", _route_mtu, (5, 12)),
    "checksum_complete": Feature(  # Linux 6.11, and later backported to stable kernels
        "a test run's CHECKSUM_COMPLETE", lambda: _run(checksum_complete=True), unbuilt=((5, 10),)
    ),
    "came_in_by": Feature("a test run's ingress_ifindex", lambda: _run(SkbContext(ingress_ifindex=1).pack()), (5, 15)),
}


def release() -> tuple[int, int]:
    """The running kernel's version: (6, 1) for 6.1.0-50-amd64."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return int(found[1]), int(found[2])


def lacking(name: str) -> str:
    """Why this kernel lacks a feature, "" if it has it."""
    feature = FEATURES[name]
    if feature.since > (0, 0):
        brought = ".".join(map(str, feature.since))
        return f"{feature.what}: Linux {brought} brought it" if release() < feature.since else ""
    built = release() not in feature.unbuilt if IN_GUEST else feature.tried()
    return "" if built else f"{feature.what}: this kernel was built without"


def needs(*names: str) -> pytest.MarkDecorator:
    """Marks a test, or a row of one, that needs these features."""
    assert FEATURES.keys() >= set(names)
    return pytest.mark.needs(*names)


def require(name: str) -> None:
    """Skips the running test if this kernel lacks the feature: for helpers that many tests use."""
    if why := lacking(name):
        pytest.skip(why)


def require_listing(map_: Map) -> None:
    """Skips the running test if this kernel does not list what this map holds."""
    if map_.type == uapi.BPF_MAP_TYPE_SK_STORAGE:
        require("socket_iterator")


def without(name: str) -> pytest.MarkDecorator:
    """Marks a test for kernels that lack a feature."""
    assert name in FEATURES
    return pytest.mark.without(name)


@contextlib.contextmanager
def tunnel_modules(*names: str) -> Iterator[None]:
    """Loads these of TUNNEL_MODULES, and removes them, since each adds a device to every network
    namespace.
    """

    def remove() -> bool:
        command = ("modprobe", "--remove", *names)
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    modules.load(names)
    try:
        yield
    finally:
        until(f"{names} are removed", remove)


@pytest.fixture(scope="module")
def br_netfilter() -> Iterator[None]:
    """Loads the module, and removes it again: it concerns all network namespaces."""
    was_loaded = Path("/proc/sys/net/bridge").exists()
    modules.load(("br_netfilter",))
    yield
    if not was_loaded:
        subprocess.run(("modprobe", "--remove", "br_netfilter"), check=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(feature, ...): of tests/support/features.py")
    config.addinivalue_line("markers", "without(feature): for kernels that lack it")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test if the kernel lacks a feature that it needs."""
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if why := lacking(name):
                pytest.skip(why)
    for mark in item.iter_markers("without"):
        if not lacking(mark.args[0]):
            pytest.skip(f"{FEATURES[mark.args[0]].what}: this kernel has them")

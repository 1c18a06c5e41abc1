# SPDX-License-Identifier: Apache-2.0
"""Checks what mode bpf needs of the kernel and the node, by trying each feature; each row says
what to do.

To check a new kernel feature, add a function to kernel/bpf/probe.py and a row here.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kbpf.checks.row import Check, CheckRow, make_row
from kbpf.dataplane.bpf.hooks import (
    HOOKS,
    OPTIONAL_HELPERS,
    UNITS,
)
from kbpf.dataplane.bpf.programs import artifact, compile
from kbpf.errors import CompileError, KernelError
from kbpf.kernel.bpf import kernel_members, kernel_sockets, probe, syscalls, uapi
from kbpf.kernel.bpf.uapi import (
    BPF_CGROUP_INET4_CONNECT,
    BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
    BPF_FUNC_get_current_ancestor_cgroup_id,
    BPF_FUNC_get_current_cgroup_id,
    BPF_FUNC_get_netns_cookie,
    BPF_FUNC_set_retval,
)
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import mounts

ROOT_HINT: Final = (
    "run as root, or give the container CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_ADMIN"
)


def rows(cgroup: Path | None, pin_dir: Path, cache: Path) -> Iterator[CheckRow]:
    """Yields all rows, in the order in which the agent would meet what they check."""
    yield _check_capabilities()
    library = _check_libbpf()
    yield library
    # Without libbpf no call of bpf(2) can be tried; its row then says all there is to say.
    if library.result == "yes":
        yield make_row(Check.BPF_SYSCALL, probe.probe_map(uapi.BPF_MAP_TYPE_ARRAY), ROOT_HINT)
    yield _check_bpffs(pin_dir)
    yield from _check_compiler(cache)
    if library.result == "yes":
        yield from _check_maps()
        yield from _check_hooks()
    yield from _check_cgroup(cgroup, library.result == "yes")
    yield make_row(
        Check.NETNS_COOKIE, probe.probe_netns_cookie(),
        "since Linux 5.14; without it NodePorts do not answer on the host's loopback",
        needed=False,
    )  # fmt: skip
    yield make_row(
        Check.KERNEL_SOCKETS, kernel_sockets.probe_kernel_sockets(),
        "kernels before 6.6 have to allow BPF programs to read the kernel's memory, and need "
        "CONFIG_DEBUG_INFO_BTF; without that an NFS or SMB mount of a Service hangs once the Pod "
        "that served it has gone: mount the Pod's address, or use --socket-lb off",
        needed=False,
    )  # fmt: skip
    yield make_row(
        Check.UDP_DESTROY, probe.probe_sock_destroy(),
        "the kernel needs CONFIG_INET_UDP_DIAG and CONFIG_INET_DIAG_DESTROY; without it UDP "
        "clients stay with a removed backend until they connect again",
        needed=False,
    )  # fmt: skip
    yield make_row(
        Check.SOFTIRQ_LOCK, probe.probe_softirq_lock(), probe.NO_SOFTIRQ_LOCK_HINT, needed=False
    )


def _check_capabilities() -> CheckRow:
    missing = probe.missing_capabilities()
    probe_result = Probe(not missing, f"missing {', '.join(missing)}" if missing else "")
    return make_row(Check.PRIVILEGES, probe_result, ROOT_HINT)


def _check_libbpf() -> CheckRow:
    try:
        probe_result, detail = Probe(True), syscalls.version()
    except KernelError as error:
        probe_result, detail = Probe(False, str(error)), ""
    return make_row(Check.LIBBPF, probe_result, "install libbpf1", detail=detail)


def _check_bpffs(pin_dir: Path) -> CheckRow:
    ancestor = pin_dir
    try:
        while not ancestor.exists():
            ancestor = ancestor.parent
        mounted = mounts.is_bpffs(ancestor)
    except OSError as error:
        return make_row(Check.BPFFS, Probe(None, f"{ancestor}: {error.strerror}"), ROOT_HINT)
    if mounted:
        return make_row(Check.BPFFS, Probe(True), "", detail=f"{pin_dir} is on a bpffs")
    supported = "bpf" in Path("/proc/filesystems").read_text().split()
    detail = "not mounted; the agent mounts it" if supported else "the kernel does not support it"
    return make_row(
        Check.BPFFS, Probe(supported), "the kernel needs CONFIG_BPF_SYSCALL", detail=detail
    )


def _check_compiler(cache: Path) -> Iterator[CheckRow]:
    """BCC with LLVM, or programs that were compiled ahead of time: one of the two is needed."""
    toolchain = compile.find_toolchain()
    try:
        compiled = all(artifact.find(unit, cache, toolchain) is not None for unit in UNITS)
    except CompileError as error:
        yield make_row(Check.SOURCES, Probe(False, str(error)), "reinstall kbpf")
        return
    # `toolchain` is the text of BCC's version.py and the names of its libraries.
    version = re.search(r"__version__ = '([^']+)'", toolchain or "")
    llvm = sorted(set(re.findall(r"libLLVM-(\d+)", toolchain or "")))
    advice = f"install python3-bpfcc, or put artifacts into {cache} with `kbpf compile`"
    missing = Probe(False, "not installed")
    yield make_row(
        Check.BCC, Probe(True) if toolchain else missing, advice, needed=not compiled,
        detail=version[1] if version else "",
    )  # fmt: skip
    yield make_row(
        Check.LLVM,
        Probe(True) if llvm else missing,
        advice,
        needed=not compiled,
        detail=", ".join(llvm),
    )
    yield make_row(
        Check.ARTIFACTS, Probe(compiled), "`kbpf compile` makes the first start faster",
        needed=not toolchain, detail=f"in {cache}" if compiled else f"not in {cache}",
    )  # fmt: skip


def _check_maps() -> Iterator[CheckRow]:
    no_prealloc = probe.probe_map(uapi.BPF_MAP_TYPE_HASH, uapi.BPF_F_NO_PREALLOC)
    yield make_row(Check.NO_PREALLOC, no_prealloc, "use Linux 5.7 or newer")
    yield make_row(
        Check.LRU_HASH, probe.probe_map(uapi.BPF_MAP_TYPE_LRU_HASH), "use Linux 5.7 or newer"
    )
    yield make_row(Check.SOCKET_STORAGE, probe.probe_sk_storage(), "use Linux 5.10 or newer")
    yield make_row(
        Check.SOCKET_STORAGE_LIST, probe.probe_sk_storage(iterate=True),
        "the kernel needs CONFIG_DEBUG_INFO_BTF, and some refuse it (EPERM); without it connected "
        "UDP sockets are not closed when their backend is removed, and connections of sockets are "
        "not listed",
        needed=False,
    )  # fmt: skip
    yield make_row(Check.BATCH, probe.probe_map_batch(), "since Linux 5.6: use 5.7 or newer")


def _check_hooks() -> Iterator[CheckRow]:
    for hook in HOOKS:
        if hook.tracepoint:
            probe_result = kernel_members.probe_tracepoint(hook.tracepoint)
        else:
            probe_result = probe.probe_program(hook.prog_type, hook.attach_type)
        advice = f"since Linux {hook.since_kernel}; used for {hook.purpose}"
        yield make_row(
            Check.HOOK, probe_result, advice, hook.required, hook.purpose, subject=hook.name
        )
    # Not probe_helper(), which overwrites r1: the argument is the context, which r1 holds at first.
    cookie = probe.probe_program(
        BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
        BPF_CGROUP_INET4_CONNECT,
        probe.encode_call(BPF_FUNC_get_netns_cookie),
    )
    yield make_row(Check.HELPER, cookie, "since Linux 5.7", subject="bpf_get_netns_cookie")
    yield make_row(
        Check.HELPER,
        probe.probe_helper(
            BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_CGROUP_INET4_CONNECT, BPF_FUNC_set_retval, -111
        ),
        "since Linux 5.18; without it clients of a Service without endpoints are not refused "
        "at once",
        needed=False,
        subject="bpf_set_retval",
    )
    for helper in (BPF_FUNC_get_current_cgroup_id, BPF_FUNC_get_current_ancestor_cgroup_id):
        name, since, argument = OPTIONAL_HELPERS[helper]
        advice = f"since Linux {since}; without it no pod or cgroup can be exempt"
        probe_result = probe.probe_helper(
            BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_CGROUP_INET4_CONNECT, helper, argument
        )
        yield make_row(Check.HELPER, probe_result, advice, needed=False, subject=name)


def _check_cgroup(cgroup: Path | None, can_load: bool) -> Iterator[CheckRow]:
    try:
        root = cgroup or mounts.find_cgroup_root()
    except KernelError as error:
        yield make_row(Check.CGROUP, Probe(False, error.what), error.hint)
        return
    probe_result = Probe(True) if mounts.is_cgroup2(root) else Probe(False, f"{root} is not on one")
    yield make_row(Check.CGROUP, probe_result, "set --cgroup to a folder on it", detail=str(root))
    if probe_result.works and can_load:
        attached = probe.probe_cgroup_link(
            root, BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_CGROUP_INET4_CONNECT
        )
        yield make_row(Check.CGROUP_LINK, attached, "since Linux 5.7")

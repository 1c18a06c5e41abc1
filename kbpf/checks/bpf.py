# SPDX-License-Identifier: Apache-2.0
"""Checks what mode bpf needs of the kernel and the node, by trying each feature; each row says
what to do.

To check a new kernel feature, add a function to kernel/bpf/probe.py and a row here.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from kbpf.checks.row import Check, CheckRow, make_row, sum_up
from kbpf.dataplane.bpf.hooks import HOOKS, OPTIONAL_HELPERS, UNITS, Hook
from kbpf.dataplane.bpf.programs import artifact, compile
from kbpf.errors import CompileError, KernelError
from kbpf.kernel.bpf import kernel_members, probe, syscalls, uapi
from kbpf.kernel.bpf.uapi import (
    BPF_CGROUP_INET4_CONNECT,
    BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
    BPF_PROG_TYPE_SCHED_CLS,
    BPF_FUNC_get_current_ancestor_cgroup_id,
    BPF_FUNC_get_current_cgroup_id,
    BPF_FUNC_get_netns_cookie,
    BPF_FUNC_ktime_get_coarse_ns,
    BPF_FUNC_redirect_peer,
    BPF_FUNC_set_retval,
)
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import mounts

_needed_row: Final = partial(make_row, needed=True)

ROOT_HINT: Final = "run as root, or give the container CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_ADMIN"


def rows(cgroup: Path | None, pin_dir: Path, cache: Path) -> Iterator[CheckRow]:
    """Yields all rows, in the order in which the agent would meet what they check."""
    yield _check_capabilities()
    library = _check_libbpf()
    yield library
    # Without libbpf no call of bpf(2) can be tried; its row then says all there is to say.
    can_load = library.result == "yes"
    if can_load:
        yield _needed_row(Check.BPF_SYSCALL, probe.probe_map(uapi.BPF_MAP_TYPE_ARRAY), ROOT_HINT)
    yield _check_bpffs(pin_dir)
    yield _check_compiler(cache)
    cgroup_row, root = _check_cgroup(cgroup)
    yield cgroup_row
    if can_load:
        yield _check_features(root)
        yield from sum_up(Check.HOOK, {hook.name: _check_hook(hook) for hook in HOOKS})
        optional = {name: make_row(name, result, advice) for name, result, advice in _try_optional_features()}
        yield from sum_up(Check.OPTIONAL, optional)


def _check_capabilities() -> CheckRow:
    missing = probe.missing_capabilities()
    probe_result = Probe(not missing, f"missing {', '.join(missing)}" if missing else "")
    return _needed_row(Check.PRIVILEGES, probe_result, ROOT_HINT)


def _check_libbpf() -> CheckRow:
    try:
        probe_result, detail = Probe(True), syscalls.version()
    except KernelError as error:
        probe_result, detail = Probe(False, str(error)), ""
    return _needed_row(Check.LIBBPF, probe_result, "install libbpf1", detail=detail)


def _check_bpffs(pin_dir: Path) -> CheckRow:
    ancestor = pin_dir
    try:
        while not ancestor.exists():
            ancestor = ancestor.parent
        mounted = mounts.is_bpffs(ancestor)
    except OSError as error:
        return _needed_row(Check.BPFFS, Probe(None, f"{ancestor}: {error.strerror}"), ROOT_HINT)
    if mounted:
        return _needed_row(Check.BPFFS, Probe(True), detail=f"{pin_dir} is on a bpffs")
    supported = "bpf" in Path("/proc/filesystems").read_text().split()
    detail = "not mounted; the agent mounts it" if supported else "the kernel does not support it"
    return _needed_row(Check.BPFFS, Probe(supported), "the kernel needs CONFIG_BPF_SYSCALL", detail=detail)


def _check_compiler(cache: Path) -> CheckRow:
    """BCC with LLVM, or programs that were compiled ahead of time: one of the two is needed."""
    toolchain = compile.find_toolchain()
    try:
        compiled = all(artifact.find(unit, cache, toolchain) is not None for unit in UNITS)
    except CompileError as error:
        return _needed_row(Check.SOURCES, Probe(False, str(error)), "reinstall kbpf")
    # `toolchain` is the text of BCC's version.py and the names of its libraries.
    version = re.search(r"__version__ = '([^']+)'", toolchain or "")
    llvm = sorted(set(re.findall(r"libLLVM-(\d+)", toolchain or "")))
    missing = "" if llvm else "no LLVM" if toolchain else "no BCC"
    compiler = missing or f"BCC {version[1] if version else ''}, LLVM {', '.join(llvm)}"
    found = f"programs in {cache}" if compiled else f"no programs in {cache}"
    return _needed_row(
        Check.COMPILER,
        Probe(compiled or not missing, f"{compiler}; {found}"),
        f"install python3-bpfcc, or put artifacts into {cache} with `kbpf compile`",
    )


def _check_cgroup(cgroup: Path | None) -> tuple[CheckRow, Path | None]:
    """Also returns the folder, if it is on a cgroup v2 hierarchy."""
    try:
        root = cgroup or mounts.find_cgroup_root()
    except KernelError as error:
        return _needed_row(Check.CGROUP, Probe(False, error.what), error.hint), None
    works = mounts.is_cgroup2(root)
    result = Probe(works, "" if works else f"{root} is not on one")
    row = _needed_row(Check.CGROUP, result, "set --cgroup to a folder on it", detail=str(root))
    return row, root if works else None


def _check_features(cgroup: Path | None) -> CheckRow:
    """What the oldest supported kernel has; the row names the first that is missing."""
    hash_type, lru_type = uapi.BPF_MAP_TYPE_HASH, uapi.BPF_MAP_TYPE_LRU_HASH
    connect = BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_CGROUP_INET4_CONNECT
    features: dict[str, Callable[[], Probe]] = {
        "hash maps without preallocation": lambda: probe.probe_map(hash_type, uapi.BPF_F_NO_PREALLOC),
        "LRU hash maps": lambda: probe.probe_map(lru_type),
        "socket storage": probe.probe_sk_storage,
        "batch operations": probe.probe_map_batch,
        # Not probe_helper(), which overwrites r1: the argument is the context, which r1 holds.
        "bpf_get_netns_cookie": lambda: probe.probe_program(*connect, probe.encode_call(BPF_FUNC_get_netns_cookie)),
    }
    if cgroup is not None:
        features["cgroup links"] = lambda: probe.probe_cgroup_link(cgroup, *connect)
    for name, try_feature in features.items():
        result = try_feature()
        if not result.works:
            missing = Probe(result.works, f"{name}: {result.reason}")
            return _needed_row(Check.FEATURES, missing, "use Linux 5.10 or newer")
    return _needed_row(Check.FEATURES, Probe(True), detail=", ".join(features))


def _check_hook(hook: Hook) -> CheckRow:
    if hook.tracepoint:
        result = kernel_members.probe_tracepoint(hook.tracepoint)
    else:
        result = probe.probe_program(hook.prog_type, hook.attach_type)
    advice = f"since Linux {hook.since_kernel}; used for {hook.purpose}"
    return make_row(Check.HOOK.of(hook.name), result, advice, hook.purpose, needed=hook.required)


def _try_optional_features() -> Iterator[tuple[str, Probe, str]]:
    """Yields name, result and what to do without it."""
    connect = BPF_PROG_TYPE_CGROUP_SOCK_ADDR, BPF_CGROUP_INET4_CONNECT
    yield (
        "reading socket storage",
        probe.probe_sk_storage(iterate=True),
        "the kernel needs CONFIG_DEBUG_INFO_BTF, and some refuse it (EPERM); without it connected "
        "UDP sockets are not closed when their backend is removed, and connections of sockets are "
        "not listed",
    )
    yield (
        "bpf_set_retval",
        probe.probe_helper(*connect, BPF_FUNC_set_retval, -111),
        "since Linux 5.18; without it clients of a Service without endpoints are not refused at once",
    )
    for helper in (BPF_FUNC_get_current_cgroup_id, BPF_FUNC_get_current_ancestor_cgroup_id):
        name, since, argument = OPTIONAL_HELPERS[helper]
        advice = f"since Linux {since}; without it no pod or cgroup can be exempt"
        yield name, probe.probe_helper(*connect, helper, argument), advice
    yield (
        "bpf_redirect_peer",
        probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, BPF_FUNC_redirect_peer, 1, 0),
        "since Linux 5.10; without it packets reach pods only through the host's stack",
    )
    yield (
        "bpf_ktime_get_coarse_ns",
        probe.probe_helper(BPF_PROG_TYPE_SCHED_CLS, 0, BPF_FUNC_ktime_get_coarse_ns),
        "since Linux 5.11; without it each packet reads the hardware clock",
    )
    yield (
        "SO_NETNS_COOKIE",
        probe.probe_netns_cookie(),
        "since Linux 5.14; without it NodePorts do not answer on the host's loopback",
    )
    yield (
        "mounts of Services",
        kernel_members.probe_kernel_sockets(),
        "kernels before 6.6 have to allow BPF programs to read the kernel's memory, and need "
        "CONFIG_DEBUG_INFO_BTF; without that an NFS or SMB mount of a Service hangs once the Pod "
        "that served it has gone: mount the Pod's address, or use --socket-lb off",
    )
    yield (
        "networks of other clusters",
        kernel_members.probe_networks(),
        "the kernel needs Linux 5.14, CONFIG_DEBUG_INFO_BTF, and to allow BPF programs to read its memory; "
        "without that a cluster inside a pod gets our Services instead of its own: exempt such pods",
    )
    yield (
        "SOCK_DESTROY for UDP",
        probe.probe_sock_destroy(),
        "the kernel needs CONFIG_INET_UDP_DIAG and CONFIG_INET_DIAG_DESTROY; without it UDP "
        "clients stay with a removed backend until they connect again",
    )
    yield "softirq lock", probe.probe_softirq_lock(), probe.NO_SOFTIRQ_LOCK_HINT

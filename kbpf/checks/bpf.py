"""What BPF needs of this kernel and machine: one row per thing, found out by trying it, with what
to do about it.

A new kernel feature is a function in kernel/bpf/probe.py and a row here.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kbpf.checks.row import CheckRow, row
from kbpf.dataplane.bpf.hooks import (
    HELPER_ANCESTOR_CGROUP,
    HELPER_CURRENT_CGROUP,
    HELPER_SET_RETVAL,
    HOOKS,
    OPTIONAL_HELPERS,
    PROG_CGROUP_SOCK_ADDR,
    UNITS,
)
from kbpf.dataplane.bpf.programs import artifact, compile
from kbpf.errors import CompileError, KernelError
from kbpf.kernel.bpf import objects, probe, syscalls
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import mounts

CONNECT4: Final = 10
HELPER_NETNS_COOKIE: Final = 122

ROOT: Final = (
    "run as root, or give the container CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_ADMIN"
)


def rows(cgroup: Path | None, pin_dir: Path, cache: Path) -> Iterator[CheckRow]:
    """Everything, in the order in which the agent would meet it."""
    yield _capabilities()
    library = _libbpf()
    yield library
    if library.result == "yes":
        yield row("bpf(2)", probe.map_works(objects.MAP_ARRAY), ROOT)
    yield _bpffs(pin_dir)
    yield from _compiler(cache)
    if library.result == "yes":
        yield from _maps()
        yield from _hooks()
    yield from _cgroup(cgroup, library.result == "yes")
    yield row(
        "SO_NETNS_COOKIE", probe.netns_cookie_option(),
        "Linux 5.14 brought it; without it NodePorts do not answer on the host's loopback",
        needed=False,
    )  # fmt: skip
    yield row(
        "SOCK_DESTROY for UDP", probe.udp_destroy(),
        "the kernel needs CONFIG_INET_UDP_DIAG and CONFIG_INET_DIAG_DESTROY; without it UDP "
        "clients stay with a backend that is gone until they connect anew",
        needed=False,
    )  # fmt: skip
    yield row("softirq lock", probe.softirq_lock(), probe.NO_SOFTIRQ_LOCK, needed=False)


def _capabilities() -> CheckRow:
    missing = probe.missing_capabilities()
    found = Probe(not missing, f"missing {', '.join(missing)}" if missing else "")
    return row("privileges", found, ROOT)


def _libbpf() -> CheckRow:
    try:
        found, detail = Probe(True), syscalls.version()
    except KernelError as error:
        found, detail = Probe(False, str(error)), ""
    return row("libbpf1", found, "install libbpf1", detail=detail)


def _bpffs(pin_dir: Path) -> CheckRow:
    ancestor = pin_dir
    try:
        while not ancestor.exists():
            ancestor = ancestor.parent
        mounted = mounts.is_bpffs(ancestor)
    except OSError as error:
        return row("bpffs", Probe(None, f"{ancestor}: {error.strerror}"), ROOT)
    if mounted:
        return row("bpffs", Probe(True), "", detail=f"{pin_dir} is in one")
    known = "bpf" in Path("/proc/filesystems").read_text().split()
    detail = "not mounted; the agent mounts it" if known else "the kernel has none"
    return row("bpffs", Probe(known), "the kernel needs CONFIG_BPF_SYSCALL", detail=detail)


def _compiler(cache: Path) -> Iterator[CheckRow]:
    """BCC and LLVM, or what was compiled ahead of time: one of the two is needed."""
    have = compile.tools()
    try:
        made = all(artifact.find(unit, cache, have) is not None for unit in UNITS)
    except CompileError as error:
        yield row("BPF sources", Probe(False, str(error)), "install kbpf anew")
        return
    version = re.search(r"__version__ = '([^']+)'", have or "")
    llvm = sorted(set(re.findall(r"libLLVM-(\d+)", have or "")))
    advice = f"install python3-bpfcc, or put artifacts into {cache} with `kbpf compile`"
    missing = Probe(False, "not installed")
    yield row(
        "BCC", Probe(True) if have else missing, advice, needed=not made,
        detail=version[1] if version else "",
    )  # fmt: skip
    yield row(
        "LLVM", Probe(True) if llvm else missing, advice, needed=not made, detail=", ".join(llvm)
    )
    yield row(
        "compiled programs", Probe(made), "`kbpf compile` makes the first start faster",
        needed=not have, detail=f"in {cache}" if made else f"not in {cache}",
    )  # fmt: skip


def _maps() -> Iterator[CheckRow]:
    no_prealloc = probe.map_works(objects.MAP_HASH, objects.F_NO_PREALLOC)
    yield row("hash maps without preallocation", no_prealloc, "use Linux 5.7 or newer")
    yield row("LRU hash maps", probe.map_works(objects.MAP_LRU_HASH), "use Linux 5.7 or newer")
    yield row("socket storage", probe.socket_storage(), "use Linux 5.10 or newer")
    yield row(
        "reading socket storage", probe.socket_storage(readable=True),
        "the kernel needs CONFIG_DEBUG_INFO_BTF; without it connected UDP sockets are not ended "
        "when their backend is gone, and connections of sockets are not shown",
        needed=False,
    )  # fmt: skip
    yield row("batch operations", probe.batches(), "Linux 5.6 brought them: use 5.7 or newer")


def _hooks() -> Iterator[CheckRow]:
    for hook in HOOKS:
        found = probe.loads(hook.kind, hook.attach_type)
        advice = f"Linux {hook.since} brought it; it is for {hook.what}"
        yield row(f"hook {hook.name}", found, advice, hook.required, hook.what)
    cookie = probe.loads(PROG_CGROUP_SOCK_ADDR, CONNECT4, probe.call(HELPER_NETNS_COOKIE))
    yield row("bpf_get_netns_cookie", cookie, "Linux 5.7 brought it")
    yield row(
        "bpf_set_retval", probe.helper(PROG_CGROUP_SOCK_ADDR, CONNECT4, HELPER_SET_RETVAL, -111),
        "Linux 5.18 brought it; without it clients of a Service without endpoints are not refused "
        "at once",
        needed=False,
    )  # fmt: skip
    for number in (HELPER_CURRENT_CGROUP, HELPER_ANCESTOR_CGROUP):
        name, since, argument = OPTIONAL_HELPERS[number]
        advice = f"Linux {since} brought it; without it no pod or cgroup can be exempt"
        found = probe.helper(PROG_CGROUP_SOCK_ADDR, CONNECT4, number, argument)
        yield row(name, found, advice, needed=False)


def _cgroup(cgroup: Path | None, can_load: bool) -> Iterator[CheckRow]:
    try:
        root = cgroup or mounts.cgroup_root()
    except KernelError as error:
        yield row("cgroup v2", Probe(False, error.what), error.hint)
        return
    found = Probe(True) if mounts.is_cgroup2(root) else Probe(False, f"{root} is in none")
    yield row("cgroup v2", found, "name a folder of it with --cgroup", detail=str(root))
    if found.works and can_load:
        attached = probe.cgroup_link(root, PROG_CGROUP_SOCK_ADDR, CONNECT4)
        yield row("cgroup links", attached, "Linux 5.7 brought them")

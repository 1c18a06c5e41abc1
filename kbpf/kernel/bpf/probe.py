# SPDX-License-Identifier: Apache-2.0
"""Probes for features of the running kernel: each is tried, none is derived from the version.

Each function returns a Probe: yes, no or unknown, with the errno or reason.
"""

import contextlib
import errno
import gzip
import os
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.bpf import syscalls, uapi
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.bpf.syscalls import encode_insns
from kbpf.kernel.net import sock_diag
from kbpf.kernel.net.uapi import SO_COOKIE
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import cgroups, netns

DIFFERENT_VALUE: Final = Probe(False, "the value read differs from the one written")
RETURN_1: Final = encode_insns((0xB7, 0, 0, 1), (0x95, 0, 0, 0))
"""r0 = 1; exit."""


CAPABILITIES: Final = {
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_ADMIN": 21,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}


MEMLOCK_CAPABILITIES: Final = {"CAP_SYS_RESOURCE": 24}
"""Needed on kernels where RLIMIT_MEMLOCK has to be raised."""


def encode_call(helper_id: int) -> bytes:
    """Encodes the instruction that calls a helper."""
    return encode_insns((0x85, 0, 0, helper_id))


def encode_r0(value: int) -> bytes:
    """Encodes the instruction `r0 = value`."""
    return encode_insns((0xB7, 0, 0, value))


def _probe_from_error(error: KernelError) -> Probe:
    name = errno.errorcode.get(error.errno, str(error.errno))
    if error.errno in (errno.EPERM, errno.EACCES) and os.geteuid() != 0:
        return Probe(None, f"{name}: not privileged enough to test it")
    return Probe(False, name)


def probe_program(program_type: int, attach_type: int, body: bytes = b"", attach_btf_id: int = 0) -> Probe:
    """Whether a program of these types loads, with `body` before `r0 = 1; exit`. `attach_btf_id`:
    see Program.load().
    """
    insns = body + RETURN_1
    try:
        Program.load("kbpf_probe", program_type, attach_type, insns, attach_btf_id=attach_btf_id).close()
    except KernelError as error:
        return _probe_from_error(error)
    return Probe(True)


@cache
def probe_helper(program_type: int, attach_type: int, helper_id: int, *arguments: int) -> Probe:
    """Whether programs of these types may call this helper with these integer arguments (default
    0).
    """
    # r1 holds a pointer at the start, and the verifier rejects arguments that were never written.
    set_arguments = encode_insns(
        *((0xB7, register, 0, argument) for register, argument in enumerate(arguments or (0,), start=1))
    )
    return probe_program(program_type, attach_type, set_arguments + encode_call(helper_id))


def missing_capabilities(status: str | None = None) -> tuple[str, ...]:
    """The names in CAPABILITIES that this process lacks. `status`: see read_capabilities()."""
    cap_eff = syscalls.read_capabilities(status)
    required = CAPABILITIES | (MEMLOCK_CAPABILITIES if syscalls.memlock_limit() is not None else {})
    return tuple(name for name, bit in required.items() if not cap_eff >> bit & 1)


def probe_map(map_type: int, flags: int = 0) -> Probe:
    """Whether a map of this type can be created, written and read."""
    try:
        with Map.create(map_type, "kbpf_probe", 4, 8, 4, flags) as map_:
            map_.update(bytes(4), bytes(8))
            value = map_.lookup(bytes(4))
    except KernelError as error:
        return _probe_from_error(error)
    return Probe(True) if value == bytes(8) else DIFFERENT_VALUE


def probe_sk_storage(iterate: bool = False) -> Probe:
    """Whether sockets can store values (Linux v5.2); with `iterate`, whether all of them can be
    read, which requires the kernel's BTF (v5.9).
    """
    try:
        with (
            Map.create(uapi.BPF_MAP_TYPE_SK_STORAGE, "kbpf_probe", 4, 8, 0, uapi.BPF_F_NO_PREALLOC) as map_,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
        ):
            key = sock.fileno().to_bytes(4, "little")
            map_.update(key, b"kept-8by")
            values = [value for _, value in map_.items()] if iterate else [map_.lookup(key)]
    except KernelError as error:
        return _probe_from_error(error)
    return Probe(True) if values == [b"kept-8by"] else DIFFERENT_VALUE


def probe_map_batch() -> Probe:
    """Whether one call can write and read many entries (Linux v5.6)."""
    try:
        with Map.create(uapi.BPF_MAP_TYPE_HASH, "kbpf_probe", 4, 8, 4, uapi.BPF_F_NO_PREALLOC) as map_:
            map_.update_batch(bytes(7) + b"\1", bytes(16))
            count = len(dict(map_.items()))
    except KernelError as error:
        return _probe_from_error(error)
    return Probe(True) if count == 2 else Probe(False, f"{count} of 2 entries read")


def probe_cgroup_link(parent: Path, program_type: int, attach_type: int) -> Probe:
    """Whether a program can be attached by a link.

    The test uses a new cgroup below `parent`; if that is mounted read-only, as in our pod, it
    briefly attaches to `parent` itself, with a program that lets everything pass.
    """
    try:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(_probe_cgroup(parent))
            program = stack.enter_context(Program.load("kbpf_probe", program_type, attach_type, RETURN_1))
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                Link.attach(program, fd, attach_type).close()
            finally:
                os.close(fd)
    except KernelError as error:
        return _probe_from_error(error)
    return Probe(True)


@contextlib.contextmanager
def _probe_cgroup(parent: Path) -> Iterator[Path]:
    try:
        cgroup = cgroups.create(parent / f"kbpf-check-{os.getpid()}")
    except KernelError as error:
        if error.errno != errno.EROFS:
            raise
        yield parent
        return
    try:
        yield cgroup
    finally:
        cgroups.remove(cgroup)


def probe_netns_cookie() -> Probe:
    """Whether getsockopt(SO_NETNS_COOKIE) returns the cookie of the network namespace (v5.14)."""
    try:
        return Probe(True) if netns.read_cookie() is not None else Probe(False, "ENOPROTOOPT")
    except KernelError as error:
        return _probe_from_error(error)


def probe_sock_destroy() -> Probe:
    """Whether a connected UDP socket can be destroyed; tried with one of our own on loopback."""
    try:
        with kernel_errors("cannot try to destroy a UDP socket"):
            return _probe_sock_destroy()
    except KernelError as error:
        return _probe_from_error(error)


def _probe_sock_destroy() -> Probe:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
    ):
        try:
            server.bind(("127.0.0.1", 0))
            client.connect(server.getsockname())
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "")
            return Probe(None, f"{name}: cannot use loopback for the test")
        cookie = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), "little")
        sock_diag.destroy_connected_udp(lambda sock: sock.cookie == cookie)
        error_code = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return Probe(True) if error_code == errno.ECONNABORTED else Probe(False, "the socket was not destroyed")


BH_LOCK_CONFIG: Final = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK"

NO_SOFTIRQ_LOCK_HINT: Final = (
    "two packets handled by one CPU may get each other's backend: use a kernel with "
    f"{BH_LOCK_CONFIG}, or --packet-path false"
)


def probe_softirq_lock() -> Probe:
    """Whether a TC program is never interrupted by another one on the same CPU.

    PREEMPT_RT does not guarantee this since 6.18, which removed the lock from local_bh_disable()
    unless CONFIG_PREEMPT_RT_NEEDS_BH_LOCK is set. Unlike all others this probe reads the
    configuration: the race lasts microseconds and cannot be provoked.
    """
    release = os.uname().release
    try:
        realtime = Path("/sys/kernel/realtime").read_text().strip() == "1"
    except OSError:
        realtime = "PREEMPT_RT" in os.uname().version
    return evaluate_softirq_lock(realtime, _read_kernel_config(release) if realtime else "")


def evaluate_softirq_lock(realtime: bool, configuration: str | None) -> Probe:
    """Decides from `realtime` and the text of the kernel's configuration, None if not available."""
    if not realtime:
        return Probe(True)
    if configuration is None:
        return Probe(None, "PREEMPT_RT, and its configuration cannot be read")
    if f"# {BH_LOCK_CONFIG} is not set" in configuration:
        return Probe(False, f"PREEMPT_RT without {BH_LOCK_CONFIG}")
    return Probe(True)  # set, or an older kernel that always has the lock


def _read_kernel_config(release: str) -> str | None:
    with contextlib.suppress(OSError, EOFError):
        return gzip.decompress(Path("/proc/config.gz").read_bytes()).decode()
    for path in (f"/boot/config-{release}", f"/lib/modules/{release}/config"):
        with contextlib.suppress(OSError):
            return Path(path).read_text()
    return None

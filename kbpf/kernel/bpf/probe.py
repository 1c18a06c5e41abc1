"""What this kernel can do, found out by trying it. Never by its version.

Each function answers yes, no, or *unknown because*: a Probe with the errno's words.
"""

import contextlib
import errno
import gzip
import os
import socket
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.bpf import syscalls, uapi
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.net import sock_diag
from kbpf.kernel.net.uapi import (
    SO_COOKIE,
)
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import cgroups, netns

RETURN_1: Final = struct.pack("=BBhi", 0xB7, 0, 0, 1) + struct.pack("=BBhi", 0x95, 0, 0, 0)
"""r0 = 1; exit."""


CAPABILITIES: Final = {
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_ADMIN": 21,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}


MEMLOCK_CAPABILITIES: Final = {"CAP_SYS_RESOURCE": 24}
"""For kernels whose limit of locked memory has to be raised."""


def encode_call(helper_id: int) -> bytes:
    """The instruction that calls a helper by its number."""
    return struct.pack("=BBhi", 0x85, 0, 0, helper_id)


def _probe_from_error(error: KernelError) -> Probe:
    name = errno.errorcode.get(error.errno, str(error.errno))
    if error.errno in (errno.EPERM, errno.EACCES) and os.geteuid() != 0:
        return Probe(None, f"{name}: not enough privileges to find out")
    return Probe(False, name)


def probe_program(program_type: int, attach_type: int, body: bytes = b"") -> Probe:
    """Whether a program of these types loads, with `body` before `r0 = 1; exit`."""
    try:
        Program.load("kbpf_probe", program_type, attach_type, body + RETURN_1).close()
    except KernelError as error:
        return _probe_from_error(error)
    return Probe(True)


@cache
def probe_helper(program_type: int, attach_type: int, helper_id: int, *arguments: int) -> Probe:
    """Whether programs of these types may call this helper with these numbers; with 0 if none."""
    set_arguments = b"".join(
        struct.pack("=BBhi", 0xB7, register, 0, argument)
        for register, argument in enumerate(arguments or (0,), start=1)
    )
    return probe_program(program_type, attach_type, set_arguments + encode_call(helper_id))


def missing_capabilities(status: str | None = None) -> tuple[str, ...]:
    """Those of CAPABILITIES that this process lacks; `status` is /proc/self/status."""
    text = Path("/proc/self/status").read_text() if status is None else status
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    cap_eff = int(fields.get("CapEff", "0"), 16)
    required = CAPABILITIES | (MEMLOCK_CAPABILITIES if syscalls.memlock_limit() is not None else {})
    return tuple(name for name, bit in required.items() if not cap_eff >> bit & 1)


def probe_map(map_type: int, flags: int = 0) -> Probe:
    """Whether a map of this type can be made, written and read."""
    try:
        with Map.create(map_type, "kbpf_probe", 4, 8, 4, flags) as map_:
            map_.update(bytes(4), bytes(8))
            value = map_.lookup(bytes(4))
    except KernelError as error:
        return _probe_from_error(error)
    return Probe(value == bytes(8), "" if value == bytes(8) else "what was written is not read")


def probe_sk_storage(iterate: bool = False) -> Probe:
    """Whether values can be kept with sockets (Linux v5.2); `readable`: and all of them read, for
    which the kernel must have BTF (v5.9).
    """
    try:
        with (
            Map.create(
                uapi.BPF_MAP_TYPE_SK_STORAGE, "kbpf_probe", 4, 8, 0, uapi.BPF_F_NO_PREALLOC
            ) as map_,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
        ):
            key = sock.fileno().to_bytes(4, "little")
            map_.update(key, b"kept-8by")
            values = [value for _, value in map_.items()] if iterate else [map_.lookup(key)]
    except KernelError as error:
        return _probe_from_error(error)
    return Probe(values == [b"kept-8by"], "" if values == [b"kept-8by"] else "it is not read")


def probe_map_batch() -> Probe:
    """Whether many entries are written and read by one call (Linux v5.6)."""
    try:
        with Map.create(
            uapi.BPF_MAP_TYPE_HASH, "kbpf_probe", 4, 8, 4, uapi.BPF_F_NO_PREALLOC
        ) as map_:
            map_.update_batch(bytes(7) + b"\1", bytes(16))
            count = len(dict(map_.items()))
    except KernelError as error:
        return _probe_from_error(error)
    return Probe(count == 2, "" if count == 2 else f"{count} of 2 entries read")


def probe_cgroup_link(parent: Path, program_type: int, attach_type: int) -> Probe:
    """Whether a program can be attached by a link: tried on a new cgroup below `parent`, or where
    that is mounted read-only, as in our pod, for a moment on `parent` itself: the program lets all
    pass.
    """
    try:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(_probe_cgroup(parent))
            program = stack.enter_context(
                Program.load("kbpf_probe", program_type, attach_type, RETURN_1)
            )
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
    """Whether getsockopt(SO_NETNS_COOKIE) tells which network namespace this is (v5.14)."""
    try:
        return Probe(True) if netns.read_cookie() is not None else Probe(False, "ENOPROTOOPT")
    except KernelError as error:
        return _probe_from_error(error)


def probe_sock_destroy() -> Probe:
    """Whether a connected UDP socket can be destroyed: one of our own, on loopback."""
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
            return Probe(None, f"{name}: no loopback to try it on")
        cookie = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), "little")
        sock_diag.destroy_connected_udp(lambda sock: sock.cookie == cookie)
        error_code = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return Probe(True) if error_code == errno.ECONNABORTED else Probe(False, "the socket lives on")


BH_LOCK_CONFIG: Final = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK"

NO_SOFTIRQ_LOCK_HINT: Final = (
    "two packets that one CPU handles may be given each other's backend: use a kernel with "
    f"{BH_LOCK_CONFIG}, or --packet-path false"
)


def probe_softirq_lock() -> Probe:
    """Whether no second program at TC runs on a CPU while one does. PREEMPT_RT does not guarantee
    it since 6.18, which dropped the lock of local_bh_disable() unless BH_LOCK is set. The one thing
    here that is read and not tried: the race is one of microseconds.
    """
    release = os.uname().release
    try:
        realtime = Path("/sys/kernel/realtime").read_text().strip() == "1"
    except OSError:
        realtime = "PREEMPT_RT" in os.uname().version
    return evaluate_softirq_lock(realtime, _read_kernel_config(release) if realtime else "")


def evaluate_softirq_lock(realtime: bool, configuration: str | None) -> Probe:
    """The same, by what is known. `configuration`: the kernel's own text, None if none is there."""
    if not realtime:
        return Probe(True)
    if configuration is None:
        return Probe(None, "PREEMPT_RT, and its configuration cannot be read")
    if f"# {BH_LOCK_CONFIG} is not set" in configuration:
        return Probe(False, f"PREEMPT_RT without {BH_LOCK_CONFIG}")
    return Probe(True)  # set, or of a kernel that always has the lock


def _read_kernel_config(release: str) -> str | None:
    with contextlib.suppress(OSError, EOFError):
        return gzip.decompress(Path("/proc/config.gz").read_bytes()).decode()
    for path in (f"/boot/config-{release}", f"/lib/modules/{release}/config"):
        with contextlib.suppress(OSError):
            return Path(path).read_text()
    return None

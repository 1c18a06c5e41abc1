# SPDX-License-Identifier: Apache-2.0
"""bpf(2) through libbpf1 and ctypes: the library, its structs, error handling and descriptors.

Only libbpf's low-level wrappers of single bpf(2) commands are used: no ELF, no skeletons. Each
failure is a KernelError that keeps the errno; only check() raises it.
"""

import ctypes
import errno
import os
import re
import resource
import struct
from ctypes import c_char, c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

from kbpf.errors import KernelError

_CAP_SYS_ADMIN: Final = 1 << 21
"""CAP_SYS_ADMIN implies the two below."""
_CAP_PERFMON_BPF: Final = 1 << 38 | 1 << 39


# The structs have only the first members of the C ones, up to those that are used. `sz`, or the
# size passed to the kernel, says how long they are; missing members count as 0.


class _Opts(ctypes.Structure):
    """Options of a function of libbpf, which begin with their size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"sz": ctypes.sizeof(self), **fields})


class MapCreateOpts(_Opts):
    _fields_ = (
        ("sz", c_size_t),
        ("btf_fd", c_uint32),
        ("btf_key_type_id", c_uint32),
        ("btf_value_type_id", c_uint32),
        ("btf_vmlinux_value_type_id", c_uint32),
        ("inner_map_fd", c_uint32),
        ("map_flags", c_uint32),
        ("map_extra", c_uint64),
        ("numa_node", c_uint32),
        ("map_ifindex", c_uint32),
    )


class ProgLoadOpts(_Opts):
    _fields_ = (
        ("sz", c_size_t),
        ("attempts", c_int),
        ("expected_attach_type", c_int),
        ("prog_btf_fd", c_uint32),
        ("prog_flags", c_uint32),
        ("prog_ifindex", c_uint32),
        ("kern_version", c_uint32),
        ("attach_btf_id", c_uint32),
        ("attach_prog_fd", c_uint32),
        ("attach_btf_obj_fd", c_uint32),
        ("fd_array", c_void_p),
        ("func_info", c_void_p),
        ("func_info_cnt", c_uint32),
        ("func_info_rec_size", c_uint32),
        ("line_info", c_void_p),
        ("line_info_cnt", c_uint32),
        ("line_info_rec_size", c_uint32),
        ("log_level", c_uint32),
        ("log_size", c_uint32),
        ("log_buf", c_void_p),
    )


class LinkCreateOpts(_Opts):
    _fields_ = (
        ("sz", c_size_t),
        ("flags", c_uint32),
        ("target_btf_id", c_uint32),
        ("iter_info", c_void_p),
        ("iter_info_len", c_uint32),
    )


class TestRunOpts(_Opts):
    _fields_ = (
        ("sz", c_size_t),
        ("data_in", c_char_p),
        ("data_out", c_void_p),
        ("data_size_in", c_uint32),
        ("data_size_out", c_uint32),
        ("ctx_in", c_char_p),
        ("ctx_out", c_void_p),
        ("ctx_size_in", c_uint32),
        ("ctx_size_out", c_uint32),
        ("retval", c_uint32),
        ("repeat", c_int),
        ("duration", c_uint32),
        ("flags", c_uint32),
        ("cpu", c_uint32),
        ("batch_size", c_uint32),
    )


class BatchOpts(_Opts):
    _fields_ = (
        ("sz", c_size_t),
        ("elem_flags", c_uint64),
        ("flags", c_uint64),
    )


class RawMapInfo(ctypes.Structure):
    _fields_ = (
        ("type", c_uint32),
        ("id", c_uint32),
        ("key_size", c_uint32),
        ("value_size", c_uint32),
        ("max_entries", c_uint32),
        ("map_flags", c_uint32),
        ("name", c_char * 16),
    )


class RawProgInfo(ctypes.Structure):
    _fields_ = (
        ("type", c_uint32),
        ("id", c_uint32),
        ("tag", c_uint8 * 8),
        ("jited_prog_len", c_uint32),
        ("xlated_prog_len", c_uint32),
        ("jited_prog_insns", c_uint64),
        ("xlated_prog_insns", c_uint64),
        ("load_time", c_uint64),
        ("created_by_uid", c_uint32),
        ("nr_map_ids", c_uint32),
        ("map_ids", c_uint64),
        ("name", c_char * 16),
    )


class RawLinkInfo(ctypes.Structure):
    _fields_ = (
        ("type", c_uint32),
        ("id", c_uint32),
        ("prog_id", c_uint32),
        ("pad", c_uint32),
        # A union by link type. For a cgroup link the two below; for TCX ifindex and attach type.
        ("cgroup_id", c_uint64),
        ("attach_type", c_uint32),
        ("rest", c_uint32 * 8),
    )


@lru_cache(maxsize=1)
def lib() -> Any:
    try:
        lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError as error:
        raise KernelError("cannot load libbpf.so.1", "", f"install libbpf1 ({error})") from error
    lib.libbpf_set_print(None)  # we request the verifier's log; libbpf must not print it
    return lib


def version() -> str:
    """Returns the version of libbpf. Raises KernelError if it is not installed."""
    text = lib().libbpf_version_string
    text.restype = c_char_p
    return str(text().decode()).removeprefix("v")


def check(result: int, what: str, where: str = "", hint: str = "") -> int:
    """Returns `result`, or raises KernelError if it is a negative errno, as
    libbpf 1.x returns it.
    """
    if result >= 0:
        return result
    code = -int(result)
    if not hint and code == errno.EPERM and (limit := memlock_limit()) is not None and is_privileged():
        hint = (
            f"before Linux 5.11 maps and programs count against RLIMIT_MEMLOCK, which is {limit} "
            "bytes here: grant CAP_SYS_RESOURCE, so that libbpf can raise it, or start without "
            "that limit (ulimit -l unlimited)"
        )
    if not hint and code in (errno.EPERM, errno.EACCES):
        hint = "it needs root or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
    if not hint and code == errno.ENOSYS:
        hint = "this kernel has no bpf(2)"
    raise KernelError(what, where, hint, errno=code)


def is_privileged() -> bool:
    """Whether this process may load programs with the verifier's privileged rules."""
    bits = read_capabilities()
    return bool(bits & _CAP_SYS_ADMIN) or bits & _CAP_PERFMON_BPF == _CAP_PERFMON_BPF


def may_open_by_id() -> bool:
    """Whether this process may open programs and maps of other processes by their ids."""
    return bool(read_capabilities() & _CAP_SYS_ADMIN)


def read_capabilities(status: str | None = None) -> int:
    """The effective capabilities of this process; `status` is the text of /proc/self/status."""
    text = Path("/proc/self/status").read_text() if status is None else status
    cap_eff = next((line.split()[1] for line in text.splitlines() if line.startswith("CapEff:")), "0")
    return int(cap_eff, 16)


def memlock_limit(release: str = "") -> int | None:
    """The limit for maps and programs in bytes, if they count against RLIMIT_MEMLOCK; None if they
    do not, or if there is no limit. libbpf raises it before it creates the first map, if it may.

    `release` is the kernel's release as in uname(2). This is decided by version and not by a
    probe, because it is needed when the kernel refuses everything that a probe could try. Since
    Linux 5.11 they count against the memory cgroup instead.
    """
    version_match = re.match(r"(\d+)\.(\d+)", release or os.uname().release)
    if version_match is None or (int(version_match[1]), int(version_match[2])) >= (5, 11):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def encode_insns(*insns: tuple[int, int, int, int]) -> bytes:
    """Encodes instructions: opcode, registers (source << 4 | destination), offset and immediate."""
    return b"".join(struct.pack("=BBhi", *insn) for insn in insns)


class Fd:
    """Owns a file descriptor."""

    def __init__(self, fd: int, name: str = "") -> None:
        self.fd = fd
        self.name = name

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens the object that is pinned there."""
        fd = check(lib().bpf_obj_get(os.fsencode(path)), "cannot open the pin", str(path))
        return cls(fd, path.name)

    def close(self) -> None:
        """Closes the descriptor; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pin(self, path: Path) -> None:
        """Pins the object to a path on a bpffs, which keeps it alive."""
        check(lib().bpf_obj_pin(self.fd, os.fsencode(path)), "cannot pin", str(path))


def read_info(fd: int, info: ctypes.Structure, where: str) -> None:
    size = c_uint32(ctypes.sizeof(info))
    check(
        lib().bpf_obj_get_info_by_fd(fd, ctypes.byref(info), ctypes.byref(size)),
        "cannot read the info",
        where,
    )

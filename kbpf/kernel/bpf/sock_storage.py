# SPDX-License-Identifier: Apache-2.0
"""BPF_MAP_TYPE_SK_STORAGE: values stored with sockets and freed with them.

Programs look a value up by its socket. To read all values, the kernel has an iterator (Linux v5.9,
5ce6e77c7edf), a program that it calls for each value; this requires the kernel's own BTF. The map
itself needs BTF only to declare the size of its value; it is written here by hand.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.bpf import syscalls
from kbpf.kernel.bpf.uapi import BPF_PROG_TYPE_TRACING, BPF_TRACE_ITER, BPF_FUNC_seq_write

ITERATOR_TARGET: Final = b"bpf_sk_storage_map"
READ_SIZE: Final = 1 << 16
"""Bytes for each read; the kernel returns 32 KiB at most."""

_LICENSE: Final = b"Dual BSD/GPL"

_BTF_MAGIC: Final = 0xEB9F
_BTF_KIND_INT, _BTF_KIND_STRUCT = 1 << 24, 4 << 24
_INT_TYPE_ID, _VALUE_TYPE_ID = 1, 2


def load_value_btf(size: int) -> tuple[int, int, int]:
    """Loads BTF for a map; returns its descriptor and the type ids of the key (int) and of a value
    of `size` bytes. The caller closes the descriptor.
    """
    # struct btf_type: offset of the name in `strings`, kind, size; for an int its encoding.
    strings = b"\0int\0value\0"
    types = struct.pack("=4I", 1, _BTF_KIND_INT, 4, 1 << 24 | 32)  # signed, 32 bits
    types += struct.pack("=3I", 5, _BTF_KIND_STRUCT, size)  # members are only for display
    # struct btf_header: magic, version, flags, its size, offset and length of types and strings.
    header = (_BTF_MAGIC, 1, 0, 24, 0, len(types), len(types), len(strings))
    raw = struct.pack("=HBBIIIII", *header) + types + strings
    fd = syscalls.lib().bpf_btf_load(raw, ctypes.c_size_t(len(raw)), None)
    return syscalls.check(fd, "cannot load the BTF of a map"), _INT_TYPE_ID, _VALUE_TYPE_ID


def iterate_values(map_fd: int, size: int) -> Iterator[bytes]:
    """Yields all values of the map, `size` bytes each, several concatenated at a time.

    A value may be missed if the socket before it is closed meanwhile. Raises KernelError if the
    kernel has no BTF.
    """
    iterator_fd = _open_iterator(map_fd, size)
    try:
        buffer = b""
        while chunk := _read_chunk(iterator_fd):
            buffer += chunk
            complete_bytes = len(buffer) // size * size
            yield buffer[:complete_bytes]
            buffer = buffer[complete_bytes:]
    finally:
        os.close(iterator_fd)


def _read_chunk(iterator_fd: int) -> bytes:
    while True:
        try:
            return os.read(iterator_fd, READ_SIZE)
        except OSError as error:  # EAGAIN: it stopped after a million sockets; read again
            if error.errno != errno.EAGAIN:
                raise KernelError("cannot read socket storage", "iterator", "", error.errno or 0) from error


def _open_iterator(map_fd: int, size: int) -> int:
    where = "iterator of a socket storage"
    with syscalls.Fd(_load_iterator(size)) as program:
        info = (ctypes.c_uint32 * 4)(map_fd)  # union bpf_iter_link_info
        opts = syscalls.LinkCreateOpts(iter_info=ctypes.addressof(info), iter_info_len=4)
        link_fd = syscalls.check(
            syscalls.lib().bpf_link_create(program.fd, 0, BPF_TRACE_ITER, ctypes.byref(opts)), "cannot link", where
        )
    with syscalls.Fd(link_fd) as link:
        return syscalls.check(syscalls.lib().bpf_iter_create(link.fd), "cannot open", where)


@lru_cache(maxsize=1)
def _iterator_btf_id() -> int:
    """The iterator's type id in the kernel's BTF; the search takes 25 ms."""
    return syscalls.check(
        syscalls.lib().libbpf_find_vmlinux_btf_id(ITERATOR_TARGET, BPF_TRACE_ITER),
        "cannot find the iterator of socket storages",
        "/sys/kernel/btf/vmlinux",
        "the kernel needs CONFIG_DEBUG_INFO_BTF",
    )


def _load_iterator(size: int) -> int:
    """Loads the program that the kernel calls for each value; it writes the value to the reader."""
    insns = syscalls.encode_insns(
        (0x79, 0x16, 24, 0),  # r6 = ctx->value
        (0x15, 0x06, 5, 0),  # NULL at the end of the iteration
        (0x79, 0x11, 0, 0),  # r1 = ctx->meta
        (0x79, 0x11, 0, 0),  # r1 = meta->seq
        (0xBF, 0x62, 0, 0),  # r2 = value
        (0xB7, 0x03, 0, size),
        (0x85, 0, 0, BPF_FUNC_seq_write),
        (0xB7, 0, 0, 0),
        (0x95, 0, 0, 0),
    )
    opts = syscalls.ProgLoadOpts(attempts=5, expected_attach_type=BPF_TRACE_ITER, attach_btf_id=_iterator_btf_id())
    fd = syscalls.lib().bpf_prog_load(
        BPF_PROG_TYPE_TRACING, b"kbpf_sockets", _LICENSE, insns, ctypes.c_size_t(len(insns) // 8), ctypes.byref(opts)
    )
    return syscalls.check(fd, "the kernel refuses the iterator of socket storages")

# SPDX-License-Identifier: Apache-2.0
"""A BPF ring buffer, into which programs write records for this process (Linux v5.8)."""

import ctypes
from typing import Final, Self

from kbpf.errors import KernelError
from kbpf.kernel.bpf import syscalls
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.bpf.uapi import BPF_MAP_TYPE_RINGBUF

_ON_RECORD: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class RingBuffer:
    """`size`: in bytes, a power of two times the size of a page."""

    def __init__(self, name: str, size: int) -> None:
        self.map = Map.create(BPF_MAP_TYPE_RINGBUF, name, 0, 0, size)
        self._records: list[bytes] = []
        self._on_record = _ON_RECORD(self._add)  # as long as libbpf may call it
        self._handle = _new_reader(self.map.fd, self._on_record)
        if not self._handle:
            self.map.close()
            raise KernelError("cannot read the ring buffer", name, errno=ctypes.get_errno())

    def _add(self, _: int | None, data: int, size: int) -> int:
        self._records.append(ctypes.string_at(data, size))
        return 0

    def fileno(self) -> int:
        """A descriptor that is readable when there are records."""
        return int(syscalls.lib().ring_buffer__epoll_fd(ctypes.c_void_p(self._handle)))

    def read(self) -> list[bytes]:
        """The records that were written since the last call, which may be none."""
        result = syscalls.lib().ring_buffer__consume(ctypes.c_void_p(self._handle))
        syscalls.check(result, "cannot read the ring buffer", self.map.name)
        records, self._records = self._records, []
        return records

    def close(self) -> None:
        """Frees it, unless a program still writes to it; a second call does nothing."""
        if self._handle:
            syscalls.lib().ring_buffer__free(ctypes.c_void_p(self._handle))
            self._handle = None
        self.map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _new_reader(fd: int, on_record: object) -> int | None:
    function = syscalls.lib().ring_buffer__new
    function.restype = ctypes.c_void_p
    handle = function(fd, on_record, None, None)
    return int(handle) if handle else None

# SPDX-License-Identifier: Apache-2.0
"""Types and functions of the running kernel and its modules, which they describe in their BTF."""

import ctypes
from collections.abc import Iterator
from ctypes import c_char_p, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, Final, Self

from kbpf.errors import KernelError
from kbpf.kernel.bpf import syscalls

BTF_KIND_STRUCT: Final = 4
BTF_KIND_TYPEDEF: Final = 8
BTF_KIND_FUNC: Final = 12
_VLEN_MASK: Final = 0xFFFF
_BIT_OFFSET_MASK: Final = 0xFFFFFF
_NAME_SIZE: Final = 64


class Btf:
    """The BTF of the kernel, or of a module together with the kernel's. The other methods may not
    be called after close().
    """

    def __init__(self, handle: int, base: Self | None = None) -> None:
        self._handle, self._base = handle, base

    @classmethod
    def load(cls) -> Self:
        """The kernel's. Raises KernelError if it has none."""
        if handle := _lib().btf__load_vmlinux_btf():
            return cls(handle)
        raise KernelError("the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)", "/sys/kernel/btf")

    def load_module(self, btf_id: int) -> Self | None:
        """That of the module whose BTF has this id; None if it cannot be read. Close it before this
        one.
        """
        handle = _lib().btf__load_from_kernel_by_id_split(btf_id, self._handle)
        return type(self)(handle, self) if handle else None

    def find(self, name: str, kind: int) -> int:
        """The id of a type or function; 0 if there is none."""
        return max(0, int(_lib().btf__find_by_name_kind(self._handle, name.encode(), kind)))

    def find_member_bit(self, struct_name: str, member_name: str) -> int:
        """The place of a member in a struct, in bits; 0 if there is no such member."""
        lib, type_id = _lib(), self.find(struct_name, BTF_KIND_STRUCT)
        if not type_id:
            return 0
        # struct btf_type (name, info, size), and for each member struct btf_member (name, type,
        # offset). The offset has the size of a bit field in its upper eight bits.
        words = ctypes.cast(lib.btf__type_by_id(self._handle, type_id), ctypes.POINTER(c_uint32))
        for index in range(3, 3 + 3 * (words[1] & _VLEN_MASK), 3):
            if lib.btf__name_by_offset(self._handle, words[index]) == member_name.encode():
                return int(words[index + 2]) & _BIT_OFFSET_MASK
        return 0

    def find_size(self, struct_name: str) -> int:
        """The size of a struct in bytes; 0 if there is none."""
        type_id = self.find(struct_name, BTF_KIND_STRUCT)
        return int(_lib().btf__resolve_size(self._handle, type_id)) if type_id else 0

    def close(self) -> None:
        _lib().btf__free(self._handle)
        self._handle = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _BtfInfo(ctypes.Structure):
    _fields_ = (
        ("btf", c_uint64),
        ("btf_size", c_uint32),
        ("id", c_uint32),
        ("name", c_uint64),
        ("name_len", c_uint32),
        ("kernel_btf", c_uint32),
    )


def open_modules() -> Iterator[tuple[str, int, syscalls.Fd]]:
    """Yields name, id and descriptor of the BTF of each loaded module; the caller closes the
    descriptors. Raises KernelError without CAP_SYS_ADMIN.
    """
    next_id = c_uint32(0)
    while _lib().bpf_btf_get_next_id(next_id.value, ctypes.byref(next_id)) == 0:
        number = _lib().bpf_btf_get_fd_by_id(next_id.value)
        fd = syscalls.Fd(syscalls.check(number, "cannot open the BTF of a module", "", "it needs CAP_SYS_ADMIN"))
        name = ctypes.create_string_buffer(_NAME_SIZE)
        info = _BtfInfo(name=ctypes.addressof(name), name_len=_NAME_SIZE)
        syscalls.read_info(fd.fd, info, "BTF of a module")
        yield name.value.decode(), next_id.value, fd


@cache
def _lib() -> Any:
    lib = syscalls.lib()
    lib.btf__load_vmlinux_btf.restype = c_void_p
    lib.btf__load_from_kernel_by_id_split.argtypes = (c_uint32, c_void_p)
    lib.btf__load_from_kernel_by_id_split.restype = c_void_p
    lib.btf__find_by_name_kind.argtypes = (c_void_p, c_char_p, c_uint32)
    lib.btf__type_by_id.argtypes = (c_void_p, c_uint32)
    lib.btf__type_by_id.restype = c_void_p
    lib.btf__name_by_offset.argtypes = (c_void_p, c_uint32)
    lib.btf__name_by_offset.restype = c_char_p
    lib.btf__resolve_size.argtypes = (c_void_p, c_uint32)
    lib.btf__resolve_size.restype = c_int64
    lib.btf__free.argtypes = (c_void_p,)
    lib.btf__free.restype = None
    return lib

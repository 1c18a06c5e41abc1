# SPDX-License-Identifier: Apache-2.0
"""Maps, programs and links, through the calls of syscalls.py.

Each object owns its descriptor; close() or a `with` block closes it.
"""

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from ctypes import c_int, c_size_t, c_uint32, c_uint64
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Self

from kbpf.errors import KernelError
from kbpf.kernel.bpf import sock_storage, syscalls
from kbpf.kernel.bpf.uapi import (
    BPF_ANY,
    BPF_EXIST,
    BPF_LINK_TYPE_RAW_TRACEPOINT,
    BPF_MAP_TYPE_PERCPU_ARRAY,
    BPF_MAP_TYPE_SK_STORAGE,
    BPF_NOEXIST,
)

ENOTSUPP: Final = 524
""""This map does not support the operation": an errno that the kernel does not export."""

BATCH_SIZE: Final = 16_384
"""Entries for each batch call: large enough to make calls cheap, small enough for the buffers."""

MAX_NAME_LENGTH: Final = 15
"""The kernel truncates longer names of maps and programs (BPF_OBJ_NAME_LEN)."""

LICENSE: Final = b"Dual BSD/GPL"
"""License passed to the kernel: GPL-2.0 or BSD-2-Clause, as the source files say."""
VERIFIER_HINT: Final = "report it, with the output of `kbpf check`; programs attached before stay attached"
"""Hint for a verifier refusal when privileges are not the cause."""
_LOG_SIZE: Final = 1 << 20


class Map(syscalls.Fd):
    """A BPF map. Keys and values are bytes, in the layout of the C structs."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(fd, name)
        info = syscalls.RawMapInfo()
        syscalls.read_info(fd, info, f"map {name}")
        self.type: int = info.type
        self.id: int = info.id
        self.key_size: int = info.key_size
        self.value_size: int = info.value_size
        self.max_entries: int = info.max_entries
        self.flags: int = info.map_flags
        self.short_name: str = info.name.decode()
        """The kernel's name for the map: 15 characters at most."""

    @classmethod
    def create(
        cls,
        map_type: int,
        name: str,
        key_size: int,
        value_size: int,
        max_entries: int,
        flags: int = 0,
        inner: "Map | None" = None,
    ) -> Self:
        """Creates a map. The name is truncated to 15 characters. `max_entries` is ignored for
        socket storage. `inner`: a map of the type and sizes that a map of maps holds.
        """
        opts = syscalls.MapCreateOpts(map_flags=flags)
        if inner is not None:
            opts.inner_map_fd = inner.fd
        if map_type == BPF_MAP_TYPE_SK_STORAGE:
            max_entries = 0
            btf_ids = sock_storage.load_value_btf(value_size)
            opts.btf_fd, opts.btf_key_type_id, opts.btf_value_type_id = btf_ids
        fd = syscalls.lib().bpf_map_create(
            map_type,
            name[:MAX_NAME_LENGTH].encode(),
            key_size,
            value_size,
            max_entries,
            ctypes.byref(opts),
        )
        if map_type == BPF_MAP_TYPE_SK_STORAGE:
            os.close(opts.btf_fd)
        return cls(syscalls.check(fd, "cannot create the map", f"{name}, {max_entries} entries"), name)

    def read_memory(self) -> int | None:
        """The bytes of memory that the kernel reports for it; None if unknown.

        Before Linux v6.4 this is an estimate for a full map.
        """
        memlock = self._read_fdinfo("memlock")
        return int(memlock) if memlock.isdigit() else None

    def is_frozen(self) -> bool:
        """Whether no process can write it any more (BPF_MAP_FREEZE)."""
        return self._read_fdinfo("frozen") == "1"

    def _read_fdinfo(self, field: str) -> str:
        """This field of the descriptor; "" if the kernel does not have it."""
        try:
            text = Path(f"/proc/self/fdinfo/{self.fd}").read_text()
        except OSError:
            return ""
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return fields.get(field, "").strip()

    def lookup(self, key: bytes) -> bytes | None:
        """Returns the value, or None. For a per-CPU map: the values of all CPUs, 8-byte aligned."""
        out = ctypes.create_string_buffer(self._lookup_size())
        result = syscalls.lib().bpf_map_lookup_elem(self.fd, key, out)
        if result == -errno.ENOENT:
            return None
        syscalls.check(result, "cannot read", f"map {self.name}")
        return out.raw

    def _lookup_size(self) -> int:
        # The kernel writes a value for every possible CPU, also for those that are offline.
        if self.type == BPF_MAP_TYPE_PERCPU_ARRAY:
            return (self.value_size + 7) // 8 * 8 * count_possible_cpus()
        return self.value_size

    def update(self, key: bytes, value: bytes, flags: int = BPF_ANY) -> None:
        """Writes one entry. Raises KernelError with E2BIG if the map is full; the caller knows
        which setting limits it.
        """
        self._write(key, value, flags)

    def add(self, key: bytes, value: bytes) -> bool:
        """Writes one entry unless its key exists; returns whether it was written."""
        return self._write(key, value, BPF_NOEXIST, expected_errno=errno.EEXIST)

    def replace(self, key: bytes, value: bytes) -> bool:
        """Writes one entry if its key exists; returns whether it did."""
        return self._write(key, value, BPF_EXIST, expected_errno=errno.ENOENT)

    def push(self, value: bytes) -> bool:
        """Appends a value to a queue; returns False if the queue is full."""
        return self._write(None, value, BPF_ANY, expected_errno=errno.E2BIG)

    def _write(self, key: bytes | None, value: bytes, flags: int, expected_errno: int | None = None) -> bool:
        """Returns False if the kernel refuses with the expected errno."""
        result = syscalls.lib().bpf_map_update_elem(self.fd, key, value, c_uint64(flags))
        if expected_errno is not None and result == -expected_errno:
            return False
        self._check_write(result)
        return True

    def _check_write(self, result: int) -> None:
        where = f"map {self.name}, {self.max_entries} entries"
        syscalls.check(result, "the map is full" if result == -errno.E2BIG else "cannot write", where)

    def delete(self, key: bytes) -> bool:
        """Deletes one entry; returns whether it existed."""
        result = syscalls.lib().bpf_map_delete_elem(self.fd, key)
        if result == -errno.ENOENT:
            return False
        syscalls.check(result, "cannot delete", f"map {self.name}")
        return True

    def lookup_and_delete(self, key: bytes) -> bytes | None:
        """Deletes an entry of a hash map and returns its value, or None if it did not exist.
        Atomic since Linux v5.14.
        """
        out = ctypes.create_string_buffer(self.value_size)
        result = syscalls.lib().bpf_map_lookup_and_delete_elem(self.fd, key, out)
        if result == -ENOTSUPP:
            value = self.lookup(key)
            return value if value is not None and self.delete(key) else None
        if result == -errno.ENOENT:
            return None
        syscalls.check(result, "cannot look up and delete", f"map {self.name}")
        return out.raw

    def update_batch(self, keys: bytes, values: bytes) -> None:
        """Writes all entries, concatenated in `keys` and `values`."""
        opts = syscalls.BatchOpts()
        for start in range(0, len(keys) // self.key_size, BATCH_SIZE):
            k = keys[start * self.key_size : (start + BATCH_SIZE) * self.key_size]
            v = values[start * self.value_size : (start + BATCH_SIZE) * self.value_size]
            count = c_uint32(len(k) // self.key_size)
            result = syscalls.lib().bpf_map_update_batch(self.fd, k, v, ctypes.byref(count), ctypes.byref(opts))
            if result == -ENOTSUPP:
                for key, value in self.split(k, v):
                    self.update(key, value)
            else:
                self._check_write(result)

    def delete_batch(self, keys: bytes) -> None:
        """Deletes all keys; absent keys are ignored."""
        total, start = len(keys) // self.key_size, 0
        opts = syscalls.BatchOpts()
        while start < total:
            count = c_uint32(min(BATCH_SIZE, total - start))
            k = keys[start * self.key_size : (start + count.value) * self.key_size]
            result = syscalls.lib().bpf_map_delete_batch(self.fd, k, ctypes.byref(count), ctypes.byref(opts))
            if result == -ENOTSUPP:
                for i in range(start, total):
                    self.delete(keys[i * self.key_size : (i + 1) * self.key_size])
                return
            start += count.value  # the kernel has set it to the number of deleted entries
            if result == -errno.ENOENT:
                start += 1  # the batch stops at an absent key: continue after it
            else:
                syscalls.check(result, "cannot delete", f"map {self.name}")

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields all entries, read in batches; an entry may occur twice if it is written
        meanwhile.
        """
        for keys, values in self.batches():
            yield from self.split(keys, values)

    def split(self, keys: bytes, values: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields the entries of a batch. For socket storage the key is the first eight bytes of the
        value, where programs write the socket's cookie.
        """
        ks, vs = self.key_size, self.value_size
        for i in range(len(values) // vs):
            value = values[i * vs : (i + 1) * vs]
            yield keys[i * ks : (i + 1) * ks] or value[:8], value

    def batches(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields (keys, values) of many entries at a time, concatenated; keys are b"" for socket
        storage.
        """
        if self.type == BPF_MAP_TYPE_SK_STORAGE:
            yield from ((b"", values) for values in sock_storage.iterate_values(self.fd, self.value_size))
            return
        cursor: bytes | None = None
        while True:
            try:
                keys, values, cursor = self.lookup_batch(cursor)
            except KernelError as error:
                if error.errno != ENOTSUPP or cursor is not None:
                    raise
                yield from self._iterate_keys()  # LPM tries before v5.14 have no batch lookup
                return
            yield keys, values
            if cursor is None:
                return

    def lookup_batch(self, cursor: bytes | None, entries: int | None = None) -> tuple[bytes, bytes, bytes | None]:
        """Reads one batch of about `entries` entries (default BATCH_SIZE). Returns keys, values
        and the cursor for the next batch, which is None after the last one; pass None to begin.
        """
        # Opaque: hash maps write the number of a bucket into it, other maps a key.
        next_cursor = ctypes.create_string_buffer(max(8, self.key_size))
        opts = syscalls.BatchOpts()
        capacity, result = entries or BATCH_SIZE, -errno.ENOSPC
        while result == -errno.ENOSPC:  # one bucket has more entries than fit into the buffers
            keys = ctypes.create_string_buffer(capacity * self.key_size)
            values = ctypes.create_string_buffer(capacity * self.value_size)
            count = c_uint32(capacity)
            result = syscalls.lib().bpf_map_lookup_batch(
                self.fd, cursor, next_cursor, keys, values, ctypes.byref(count), ctypes.byref(opts)
            )
            capacity *= 2
        if result != -errno.ENOENT:
            syscalls.check(result, "cannot read", f"map {self.name}")
        return (
            bytes(memoryview(keys)[: count.value * self.key_size]),
            bytes(memoryview(values)[: count.value * self.value_size]),
            None if result == -errno.ENOENT else next_cursor.raw,
        )

    def _iterate_keys(self) -> Iterator[tuple[bytes, bytes]]:
        key: bytes | None = None
        next_key = ctypes.create_string_buffer(self.key_size)
        while syscalls.lib().bpf_map_get_next_key(self.fd, key, next_key) == 0:
            key = next_key.raw
            value = self.lookup(key)
            if value is not None:
                yield key, value


@lru_cache(maxsize=1)
def count_possible_cpus() -> int:
    """How many values a per-CPU map has for each key, including those of CPUs that are offline."""
    return syscalls.check(syscalls.lib().libbpf_num_possible_cpus(), "cannot count the CPUs")


class Program(syscalls.Fd):
    @classmethod
    def load(
        cls,
        name: str,
        program_type: int,
        attach_type: int,
        insns: bytes,
        btf_fds: Sequence[int] = (),
        attach_btf_id: int = 0,
    ) -> Self:
        """Loads bytecode whose map references are already patched. If the verifier refuses it, the
        KernelError has the last lines of its log. `btf_fds`: see kfuncs.ConntrackCalls.
        `attach_btf_id`: the type of the tracepoint, of a program for one.
        """
        # A signal during verification ends it with EAGAIN: libbpf tries up to `attempts` times.
        opts = syscalls.ProgLoadOpts(attempts=5, expected_attach_type=attach_type, attach_btf_id=attach_btf_id)
        if btf_fds:
            fd_array = (c_int * len(btf_fds))(*btf_fds)
            opts.fd_array = ctypes.addressof(fd_array)

        def attempt() -> int:
            return int(
                syscalls.lib().bpf_prog_load(
                    program_type,
                    name[:MAX_NAME_LENGTH].encode(),
                    LICENSE,
                    insns,
                    c_size_t(len(insns) // 8),
                    ctypes.byref(opts),
                )
            )

        fd = attempt()
        if fd >= 0:
            return cls(fd, name)
        # Only now with the verifier's log, which slows verification down.
        log = ctypes.create_string_buffer(_LOG_SIZE)
        opts.log_level, opts.log_size, opts.log_buf = 1, _LOG_SIZE, ctypes.addressof(log)
        retry_fd = attempt()
        if retry_fd >= 0:
            return cls(retry_fd, name)
        lines = [line for line in log.value.decode("ascii", "replace").splitlines() if line]
        reason = " | ".join(line for line in lines[-3:] if not line.startswith("processed"))
        hint = VERIFIER_HINT if lines and syscalls.is_privileged() else ""
        syscalls.check(fd, f"the kernel refuses the program {name}", reason[-300:], hint)
        raise AssertionError("unreachable")

    def read_info(self) -> "ProgramInfo":
        ids = (c_uint32 * 64)()
        info = syscalls.RawProgInfo(nr_map_ids=64, map_ids=ctypes.addressof(ids))
        syscalls.read_info(self.fd, info, f"program {self.name}")
        return ProgramInfo(
            id=info.id,
            name=info.name.decode(),
            tag=bytes(info.tag).hex(),
            insns=info.xlated_prog_len // 8,
            map_ids=tuple(ids[: min(64, info.nr_map_ids)]),
        )


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """A program's id, name, tag (hex), number of instructions after verification and map ids."""

    id: int
    name: str
    tag: str
    insns: int
    map_ids: tuple[int, ...]


class Link(syscalls.Fd):
    """An attached program. It stays attached as long as this descriptor or a pin of it exists."""

    @classmethod
    def attach(cls, program: Program, target: int, attach_type: int, flags: int = 0) -> Self:
        """Attaches the program to a cgroup (descriptor; Linux v5.7) or device (ifindex), after the
        programs that are attached there; with BPF_F_BEFORE, which only devices know, before them.
        """
        opts = syscalls.LinkCreateOpts(flags=flags)
        fd = syscalls.lib().bpf_link_create(program.fd, target, attach_type, ctypes.byref(opts))
        return cls(syscalls.check(fd, f"cannot attach {program.name}", "link"), program.name)

    @classmethod
    def attach_to_tracepoint(cls, program: Program) -> Self:
        """Attaches the program to the tracepoint that it was loaded for."""
        fd = syscalls.lib().bpf_raw_tracepoint_open(None, program.fd)
        return cls(syscalls.check(fd, f"cannot attach {program.name}", "tracepoint"), program.name)

    def update(self, program: Program) -> None:
        """Replaces the program atomically: each call runs either the old or the new one."""
        syscalls.check(
            syscalls.lib().bpf_link_update(self.fd, program.fd, None),
            f"cannot replace {self.name}",
            "link",
        )

    def detach(self) -> None:
        """Detaches now. Unpinning also detaches, but a few milliseconds later."""
        syscalls.check(syscalls.lib().bpf_link_detach(self.fd), f"cannot detach {self.name}", "link")

    def read_info(self) -> "LinkInfo":
        """Reads what is attached where."""
        info = syscalls.RawLinkInfo()
        syscalls.read_info(self.fd, info, f"link {self.name}")
        if info.type == BPF_LINK_TYPE_RAW_TRACEPOINT:
            return LinkInfo(info.id, info.prog_id, None, 0)
        return LinkInfo(info.id, info.prog_id, info.cgroup_id, info.attach_type)


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """Information about a link. `cgroup_id`: 0 if the cgroup was removed; of a link to a device,
    its ifindex and attach type; None: at a tracepoint, and then `attach_type` is 0.
    """

    id: int
    program_id: int
    cgroup_id: int | None
    attach_type: int


def open_map_by_id(map_id: int) -> Map:
    fd = syscalls.check(syscalls.lib().bpf_map_get_fd_by_id(map_id), "cannot open the map with this id", str(map_id))
    return Map(fd, str(map_id))


def open_program_by_id(program_id: int) -> Program:
    fd = syscalls.check(
        syscalls.lib().bpf_prog_get_fd_by_id(program_id),
        "cannot open the program with this id",
        str(program_id),
    )
    return Program(fd, str(program_id))


def read_program_info(program_id: int) -> ProgramInfo:
    with open_program_by_id(program_id) as program:
        return program.read_info()


def list_attached(cgroup_fd: int, attach_type: int) -> tuple[int, ...]:
    """Ids of the programs attached to this cgroup itself, in the order in which they run."""
    ids = (c_uint32 * 64)()
    count = c_uint32(64)
    flags = c_uint32(0)
    syscalls.check(
        syscalls.lib().bpf_prog_query(cgroup_fd, attach_type, 0, ctypes.byref(flags), ids, ctypes.byref(count)),
        "cannot query the cgroup",
    )
    return tuple(ids[: count.value])

# SPDX-License-Identifier: Apache-2.0
"""Finds bpffs and cgroup v2 mounts, and mounts what is missing."""

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.system.private_folders import PRIVATE_MODE
from kbpf.kernel.system.process import call_libc

log = logging.getLogger("kbpf.kernel")

BPF_FS_MAGIC: Final = 0xCAFE4A11
BPF_FS: Final = Path("/sys/fs/bpf")
CGROUP_ROOT_INODE: Final = 1
"""The inode of the root of a cgroup v2 hierarchy, and of no other folder in it (kernfs numbers)."""
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
"""System call numbers, the same on all architectures (Linux 5.2)."""
_FSCONFIG_CMD_CREATE: Final = 6
_CLOEXEC: Final = 1
"""FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC."""
PIN_DIR_HINT: Final = "choose another folder with --pin-dir"
MAX_NAMED_FILES: Final = 3
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo: mount point, root inside the file system, file system
    type.
    """

    path: Path
    root: str
    fs_type: str


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Parses mountinfo, in the kernel's order; octal escapes are decoded."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        path = _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), os.fsencode(fields[4]))
        mounts.append(Mount(Path(os.fsdecode(path)), fields[3], after.split(" ")[0]))
    return tuple(mounts)


def list_mounts() -> tuple[Mount, ...]:
    """The mounts that this process sees."""
    return parse_mountinfo(os.fsdecode(Path("/proc/self/mountinfo").read_bytes()))


def read_inode(path: Path) -> int:
    """The inode, which is the id of a cgroup; -1 if there is no such path."""
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def find_cgroup_root(mounts: tuple[Mount, ...] | None = None, inode_of: Callable[[Path], int] = read_inode) -> Path:
    """Returns the root of the cgroup v2 hierarchy, also on machines with v1 and v2 (hybrid). Where
    only v1 is mounted, it is mounted for this process (mount_cgroup_root()).

    Raises KernelError if that is not possible, or if only a part of it is visible. The inode tells:
    in a cgroup namespace, as in a container, mountinfo shows a part as "/" and the root of the
    host's hierarchy as "/../..".
    """
    cgroup_mounts = [mount for mount in (list_mounts() if mounts is None else mounts) if mount.fs_type == "cgroup2"]
    root_mounts = [mount for mount in cgroup_mounts if inode_of(mount.path) == CGROUP_ROOT_INODE]
    if root_mounts:
        return min(root_mounts, key=lambda mount: len(mount.path.parts)).path
    if cgroup_mounts:
        part = "a part of it" if cgroup_mounts[0].root == "/" else cgroup_mounts[0].root
        shown = f"{cgroup_mounts[0].path} shows {part}"
    else:
        root = mount_cgroup_root()
        if inode_of(root) == CGROUP_ROOT_INODE:
            return root
        shown = "this process is in a cgroup namespace"
    raise KernelError(
        "only a part of the cgroup v2 hierarchy is mounted",
        shown,
        "mount the host's /sys/fs/cgroup, or name a folder with --cgroup",
    )


@functools.cache
def mount_cgroup_root() -> Path:
    """Mounts the cgroup v2 hierarchy without a mount point: it is visible to this process only, and
    ends with it. The kernel has this hierarchy even if the node uses cgroup v1 alone; all processes
    are in its root then.
    """
    with kernel_errors(
        "no cgroup v2 hierarchy is mounted, and it cannot be mounted",
        "/proc/self/mountinfo",
        "on the node: mount -t cgroup2 none DIR, and name it with --cgroup; or grant CAP_SYS_ADMIN",
    ):
        context = call_libc("syscall", _FSOPEN, b"cgroup2", _CLOEXEC)
        try:
            call_libc("syscall", _FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
            mount = call_libc("syscall", _FSMOUNT, context, _CLOEXEC, 0)
        finally:
            os.close(context)
    log.info("mounted the cgroup v2 hierarchy for this process: the node has cgroup v1 only")
    return Path(f"/proc/{os.getpid()}/fd/{mount}")


def is_cgroup2(path: Path) -> bool:
    """Whether this folder is in a cgroup v2 hierarchy."""
    with kernel_errors("cannot read the cgroup", str(path), "run as root"):
        return (path / "cgroup.controllers").exists()


class Cgroup(NamedTuple):
    """A cgroup v2: its folder, and its path below the root of the mount that shows it."""

    folder: Path
    path: str


def find_cgroups(ids: Iterable[int], mask: int = ~0) -> dict[int, Cgroup]:
    """The cgroups v2 with these ids; without those that are gone or not visible here. A cgroup's id
    is the inode of its folder. `mask`: the bits of an id that are known.
    """
    missing, cgroups = set(ids), dict[int, Cgroup]()
    for mount in list_mounts():
        if mount.fs_type != "cgroup2":
            continue
        for folder, _, _ in os.walk(mount.path):
            if not missing:
                return cgroups
            with contextlib.suppress(OSError):  # removed meanwhile
                if (number := os.stat(folder).st_ino & mask) in missing:
                    path = os.path.relpath(folder, mount.path)
                    cgroups[number] = Cgroup(Path(folder), "/" if path == "." else f"/{path}")
                    missing.remove(number)
    return cgroups


def file_system_magic(path: Path) -> int:
    """The magic number of the file system that contains this path, from statfs(2)."""
    buffer = ctypes.create_string_buffer(256)
    with kernel_errors("cannot read the file system's type", str(path), ""):
        call_libc("statfs", os.fsencode(path), buffer)
    # struct statfs begins with f_type, a long; 32-bit constants are sign-extended in it.
    return int.from_bytes(buffer.raw[:8], "little") & 0xFFFFFFFF


def is_bpffs(path: Path) -> bool:
    """Whether this path is on a bpffs."""
    return path.exists() and file_system_magic(path) == BPF_FS_MAGIC


def is_same(path: Path, fd: int) -> bool:
    """Whether `path` refers to the file that is open as `fd`."""
    fd_stat = os.fstat(fd)
    try:
        path_stat = path.stat()
    except OSError:
        return False
    return (path_stat.st_dev, path_stat.st_ino) == (fd_stat.st_dev, fd_stat.st_ino)


def is_removed(path: Path, fd: int) -> bool:
    """Whether the folder that is open as `fd` was removed or renamed from `path`. False if it
    still exists and another file system is mounted over it.
    """
    if is_same(path, fd):
        return False
    fd_stat = os.fstat(fd)
    while not path.exists():
        path = path.parent
    # With another file system mounted over it, the path is on another device.
    return not fd_stat.st_nlink or path.stat().st_dev == fd_stat.st_dev


def ensure_bpffs(pin_dir: Path) -> None:
    """Ensures that the folder exists on a bpffs, and mounts one if necessary.

    Below /sys/fs/bpf the bpffs is mounted at /sys/fs/bpf, as is usual; otherwise at the folder
    itself, which must be empty. If another file system is already mounted there, KernelError is
    raised: a container gets the node's /sys/fs/bpf this way, and a bpffs mounted over it would
    disappear with the container, and its pins too.
    """
    ancestor = pin_dir
    with kernel_errors("cannot read the pin folder", str(pin_dir), "run as root"):
        while not ancestor.exists():
            ancestor = ancestor.parent
    if not is_bpffs(ancestor):
        mount_point = BPF_FS if pin_dir.is_relative_to(BPF_FS) else pin_dir
        with kernel_errors("cannot create the mount point for a bpffs", str(mount_point), PIN_DIR_HINT):
            mount_point.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
        with kernel_errors("cannot read the pin folder", str(mount_point), "run as root"):
            folder = os.open(mount_point, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Of two agents that start at the same time, the second mount would hide the first one's pins.
            fcntl.flock(folder, fcntl.LOCK_EX)
            if not is_bpffs(mount_point):
                _mount_bpffs(mount_point)
        finally:
            os.close(folder)
    with kernel_errors("cannot create the pin folder", str(pin_dir), PIN_DIR_HINT):
        pin_dir.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)


def _mount_bpffs(path: Path) -> None:
    """Mounts a bpffs that only root can enter."""
    if any(mount.path == path for mount in list_mounts()):
        raise KernelError(
            "the file system mounted here is not a bpffs",
            str(path),
            f"on the node: mount -t bpf -o mode=700 bpf {path}",
        )
    with kernel_errors("cannot read the pin folder", str(path), "run as root"):
        files = sorted(os.listdir(path))
    if files:
        more = ", ..." if len(files) > MAX_NAMED_FILES else ""
        raise KernelError(
            f"will not mount a bpffs over a folder with files: {', '.join(files[:MAX_NAMED_FILES])}{more}",
            str(path),
            PIN_DIR_HINT,
        )
    hint = "on the host: mount -t bpf -o mode=700 bpf /sys/fs/bpf; or grant CAP_SYS_ADMIN"
    with kernel_errors("cannot mount a bpffs", str(path), hint):
        call_libc("mount", b"bpf", os.fsencode(path), b"bpf", 0, b"mode=0700")
    log.info("mounted a bpffs path=%s", path)


def is_own_bpffs(path: Path) -> bool:
    """Whether a bpffs is mounted at exactly this folder, as by mount_bpffs(); False for the
    machine's own at /sys/fs/bpf.
    """
    path_mounts = [mount for mount in list_mounts() if mount.path == path.resolve()]
    return bool(path_mounts) and path_mounts[-1].fs_type == "bpf" and path_mounts[-1].path != BPF_FS


def unmount(path: Path) -> None:
    with kernel_errors("cannot unmount the bpffs", str(path), f"umount {path}"):
        call_libc("umount2", os.fsencode(path), 0)

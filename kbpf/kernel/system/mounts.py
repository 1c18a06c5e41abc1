"""Where the bpffs and the cgroup v2 hierarchy are, and mounting a bpffs where there is none."""

import ctypes
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.system.private_folders import PRIVATE_MODE

log = logging.getLogger("kbpf.kernel")

BPF_FS_MAGIC: Final = 0xCAFE4A11
BPF_FS: Final = Path("/sys/fs/bpf")
CGROUP_ROOT_INODE: Final = 1
"""The root of each cgroup v2 hierarchy has it, and no other folder there (kernfs numbers them)."""
PIN_DIR_HINT: Final = "choose another folder with --pin-dir"
MAX_NAMED_FILES: Final = 3
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo: where, the root inside the file system, its type."""

    path: Path
    root: str
    fs_type: str


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """The mounts, in the kernel's order. Octal escapes are undone."""
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
    """What is mounted, as this process sees it."""
    return parse_mountinfo(os.fsdecode(Path("/proc/self/mountinfo").read_bytes()))


def _read_inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def find_cgroup_root(
    mounts: tuple[Mount, ...] | None = None, inode_of: Callable[[Path], int] = _read_inode
) -> Path:
    """The root of the cgroup v2 hierarchy, on machines that also have v1 (hybrid) too.

    Raises KernelError where there is none, or where only a part of it is visible. The inode tells
    which: in a cgroup namespace of our own, as a container has it, mountinfo calls a part "/" and
    the root of the host's hierarchy "/../..".
    """
    cgroup_mounts = [
        mount
        for mount in (list_mounts() if mounts is None else mounts)
        if mount.fs_type == "cgroup2"
    ]
    root_mounts = [mount for mount in cgroup_mounts if inode_of(mount.path) == CGROUP_ROOT_INODE]
    if root_mounts:
        return min(root_mounts, key=lambda mount: len(mount.path.parts)).path
    if cgroup_mounts:
        part = "a part of it" if cgroup_mounts[0].root == "/" else cgroup_mounts[0].root
        raise KernelError(
            "only a part of the cgroup v2 hierarchy is mounted",
            f"{cgroup_mounts[0].path} shows {part}",
            "mount the host's /sys/fs/cgroup, or name a folder with --cgroup",
        )
    raise KernelError(
        "no cgroup v2 hierarchy is mounted",
        "/proc/self/mountinfo",
        "mount one (mount -t cgroup2 none DIR) and name it with --cgroup",
    )


def is_cgroup2(path: Path) -> bool:
    """Whether this folder lies in a cgroup v2 hierarchy."""
    try:
        return (path / "cgroup.controllers").exists()
    except PermissionError as error:
        raise KernelError(
            "cannot look into the cgroup", str(path), "run as root", error.errno or 0
        ) from error


def find_cgroup_by_id(cgroup_id: int) -> Path | None:
    """The folder of the cgroup that the kernel knows by this number; None if none is visible."""
    for mount in list_mounts():
        if mount.fs_type != "cgroup2":
            continue
        for folder, _, _ in os.walk(mount.path):
            try:
                if os.stat(folder).st_ino == cgroup_id:
                    return Path(folder)
            except OSError:
                continue  # removed meanwhile
    return None


def file_system_magic(path: Path) -> int:
    """The type of the file system that holds this path, as statfs(2) tells it."""
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer):
        code = ctypes.get_errno()
        raise KernelError("cannot look at the file system", str(path), errno=code)
    return int.from_bytes(buffer.raw[:8], "little") & 0xFFFFFFFF


def is_bpffs(path: Path) -> bool:
    """Whether this path lies in a bpffs."""
    return path.exists() and file_system_magic(path) == BPF_FS_MAGIC


def is_same(path: Path, fd: int) -> bool:
    """Whether this name leads to what the descriptor holds."""
    fd_stat = os.fstat(fd)
    try:
        path_stat = path.stat()
    except OSError:
        return False
    return (path_stat.st_dev, path_stat.st_ino) == (fd_stat.st_dev, fd_stat.st_ino)


def is_removed(path: Path, fd: int) -> bool:
    """Whether the folder of this name, which the descriptor holds, was removed or renamed. False
    where it is there and another file system is mounted over it.
    """
    if is_same(path, fd):
        return False
    fd_stat = os.fstat(fd)
    while not path.exists():
        path = path.parent
    return not fd_stat.st_nlink or path.stat().st_dev == fd_stat.st_dev


def ensure_bpffs(pin_dir: Path) -> None:
    """Makes the folder exist in a bpffs, mounting one where it is missing, over an empty folder
    only.

    Below /sys/fs/bpf the mount goes to /sys/fs/bpf, as everywhere; else to the folder itself. Not
    where something else is mounted there: so a container is given the node's /sys/fs/bpf, and a
    bpffs over it would end with the container, and the pins with it.
    """
    ancestor = pin_dir
    try:
        while not ancestor.exists():
            ancestor = ancestor.parent
    except PermissionError as error:
        raise KernelError(
            "cannot look at the folder for pins", str(ancestor), "run as root", error.errno or 0
        ) from error
    if not is_bpffs(ancestor):
        mount_point = BPF_FS if pin_dir.is_relative_to(BPF_FS) else pin_dir
        if any(mount.path == mount_point for mount in list_mounts()):
            raise KernelError(
                "what is mounted here is no bpffs",
                str(mount_point),
                f"on the node: mount -t bpf -o mode=700 bpf {mount_point}",
            )
        mount_bpffs(mount_point)
    try:
        pin_dir.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise KernelError(
            "cannot make the folder for pins",
            str(pin_dir),
            PIN_DIR_HINT,
            errno=error.errno or 0,
        ) from error


def mount_bpffs(path: Path) -> None:
    """Mounts a bpffs, visible to root only."""
    try:
        path.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise KernelError(
            "cannot make the mount point for a bpffs", str(path), PIN_DIR_HINT, error.errno or 0
        ) from error
    if files := sorted(os.listdir(path)):
        more = ", ..." if len(files) > MAX_NAMED_FILES else ""
        raise KernelError(
            "no bpffs is mounted over a folder that holds files: "
            f"{', '.join(files[:MAX_NAMED_FILES])}"
            f"{more}",
            str(path),
            PIN_DIR_HINT,
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"bpf", os.fsencode(path), b"bpf", 0, b"mode=0700"):
        raise KernelError(
            "cannot mount a bpffs",
            str(path),
            "on the host: mount -t bpf -o mode=700 bpf /sys/fs/bpf; or grant CAP_SYS_ADMIN",
            errno=ctypes.get_errno(),
        )
    log.info("mounted a bpffs path=%s", path)


def is_own_bpffs(path: Path, mounts: tuple[Mount, ...] | None = None) -> bool:
    """Whether a bpffs is mounted right here, as mount_bpffs() does for one folder of pins; the
    machine's own, at /sys/fs/bpf, is not meant.
    """
    path_mounts = [
        mount
        for mount in (list_mounts() if mounts is None else mounts)
        if mount.path == path.resolve()
    ]
    return bool(path_mounts) and path_mounts[-1].fs_type == "bpf" and path_mounts[-1].path != BPF_FS


def unmount(path: Path) -> None:
    """Ends the mount that is there."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), 0):
        code = ctypes.get_errno()
        raise KernelError("cannot unmount the bpffs", str(path), f"umount {path}", errno=code)

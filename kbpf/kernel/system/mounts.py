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
from kbpf.kernel.system.private_folders import PRIVATE

log = logging.getLogger("kbpf.kernel")

BPF_FS_MAGIC: Final = 0xCAFE4A11
BPF_FS: Final = Path("/sys/fs/bpf")
CGROUP_ROOT_INODE: Final = 1
"""The root of each cgroup v2 hierarchy has it, and no other folder there (kernfs numbers them)."""
ANOTHER: Final = "choose another folder with --pin-dir"
MOST_NAMED: Final = 3
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo: where, the root inside the file system, its type."""

    path: Path
    root: str
    kind: str


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """The mounts, in the kernel's order. Octal escapes are undone."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        path = _OCTAL.sub(lambda found: bytes([int(found[1], 8)]), os.fsencode(fields[4]))
        mounts.append(Mount(Path(os.fsdecode(path)), fields[3], after.split(" ")[0]))
    return tuple(mounts)


def mounts() -> tuple[Mount, ...]:
    """What is mounted, as this process sees it."""
    return parse_mountinfo(os.fsdecode(Path("/proc/self/mountinfo").read_bytes()))


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def cgroup_root(
    seen: tuple[Mount, ...] | None = None, inode: Callable[[Path], int] = _inode
) -> Path:
    """The root of the cgroup v2 hierarchy, on machines that also have v1 (hybrid) too.

    Raises KernelError where there is none, or where only a part of it is visible. The inode tells
    which: in a cgroup namespace of our own, as a container has it, mountinfo calls a part "/" and
    the root of the host's hierarchy "/../..".
    """
    found = [m for m in (mounts() if seen is None else seen) if m.kind == "cgroup2"]
    whole = [m for m in found if inode(m.path) == CGROUP_ROOT_INODE]
    if whole:
        return min(whole, key=lambda m: len(m.path.parts)).path
    if found:
        part = "a part of it" if found[0].root == "/" else found[0].root
        raise KernelError(
            "only a part of the cgroup v2 hierarchy is mounted",
            f"{found[0].path} shows {part}",
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


def cgroup_by_id(cgroup_id: int) -> Path | None:
    """The folder of the cgroup that the kernel knows by this number; None if none is visible."""
    for mount in mounts():
        if mount.kind != "cgroup2":
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


def is_same(path: Path, descriptor: int) -> bool:
    """Whether this name leads to what the descriptor holds."""
    held = os.fstat(descriptor)
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def is_removed(path: Path, descriptor: int) -> bool:
    """Whether the folder of this name, which the descriptor holds, was removed or renamed. False
    where it is there and another file system is mounted over it.
    """
    if is_same(path, descriptor):
        return False
    held = os.fstat(descriptor)
    while not path.exists():
        path = path.parent
    return not held.st_nlink or path.stat().st_dev == held.st_dev


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
        place = BPF_FS if pin_dir.is_relative_to(BPF_FS) else pin_dir
        if any(m.path == place for m in mounts()):
            raise KernelError(
                "what is mounted here is no bpffs",
                str(place),
                f"on the node: mount -t bpf -o mode=700 bpf {place}",
            )
        mount_bpffs(place)
    try:
        pin_dir.mkdir(PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise KernelError(
            "cannot make the folder for pins",
            str(pin_dir),
            ANOTHER,
            errno=error.errno or 0,
        ) from error


def mount_bpffs(path: Path) -> None:
    """Mounts a bpffs, visible to root only."""
    try:
        path.mkdir(PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise KernelError(
            "cannot make the mount point for a bpffs", str(path), ANOTHER, error.errno or 0
        ) from error
    if held := sorted(os.listdir(path)):
        more = ", ..." if len(held) > MOST_NAMED else ""
        raise KernelError(
            f"no bpffs is mounted over a folder that holds files: {', '.join(held[:MOST_NAMED])}"
            f"{more}", str(path), ANOTHER,
        )  # fmt: skip
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"bpf", os.fsencode(path), b"bpf", 0, b"mode=0700"):
        raise KernelError(
            "cannot mount a bpffs",
            str(path),
            "on the host: mount -t bpf -o mode=700 bpf /sys/fs/bpf; or grant CAP_SYS_ADMIN",
            errno=ctypes.get_errno(),
        )
    log.info("mounted a bpffs path=%s", path)


def is_own_bpffs(path: Path, seen: tuple[Mount, ...] | None = None) -> bool:
    """Whether a bpffs is mounted right here, as mount_bpffs() does for one folder of pins; the
    machine's own, at /sys/fs/bpf, is not meant.
    """
    here = [m for m in (mounts() if seen is None else seen) if m.path == path.resolve()]
    return bool(here) and here[-1].kind == "bpf" and here[-1].path != BPF_FS


def unmount(path: Path) -> None:
    """Ends the mount that is there."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), 0):
        code = ctypes.get_errno()
        raise KernelError("cannot unmount the bpffs", str(path), f"umount {path}", errno=code)

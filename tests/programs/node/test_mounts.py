# SPDX-License-Identifier: Apache-2.0
"""Finding the bpffs and the cgroup v2 hierarchy, and mounting them where none is mounted."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.system.mounts import (
    find_cgroup_root,
    is_bpffs,
    is_cgroup2,
    parse_mountinfo,
)
from tests.support.lab.lab import V1_ONLY, cgroup2, inside, remove_cgroup, run
from tests.support.plane import BPFFS
from tests.support.table import each_row

PURE = "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = """\
33 25 0:29 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755
34 33 0:30 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw
35 33 0:31 / /sys/fs/cgroup/cpu rw,nosuid shared:11 - cgroup cgroup rw,cpu"""
POD = "99 1 0:26 /kubepods/pod1 /sys/fs/cgroup rw,relatime master:9 - cgroup2 cgroup rw"
HOST = "98 1 0:26 /../../.. /host/sys/fs/cgroup rw,relatime master:9 - cgroup2 cgroup rw"
PLACE = "40 25 0:26 / /mnt/my\\040cgroups rw - cgroup2 none rw"


PART = "only a part of the cgroup v2 hierarchy is mounted ("


class Row(NamedTuple):
    """The text of /proc/self/mountinfo, and the cgroup v2 root or the start of the error. `parts`:
    mount points that are not the root of the hierarchy, although mountinfo says so.
    """

    name: str
    mountinfo: str
    found: str
    parts: tuple[str, ...] = ()


ROWS = [
    Row("cgroup v2 only", PURE, "/sys/fs/cgroup"),
    Row("hybrid", HYBRID, "/sys/fs/cgroup/unified"),
    Row("several mounts: the shortest path", f"{PLACE}\n{HYBRID}\n{PURE}", "/mnt/my cgroups"),
    Row("a subtree and the whole", f"{POD}\n{PLACE}", "/mnt/my cgroups", ("/sys/fs/cgroup",)),
    Row("a container with the host's mounted", f"{PURE}\n{HOST}", "/host/sys/fs/cgroup", ("/sys/fs/cgroup",)),
    Row("only a subtree is visible", POD, PART + "/sys/fs/cgroup shows /kubepods/pod1); ", ("/sys/fs/cgroup",)),
    Row("a cgroup namespace", PURE, PART + "/sys/fs/cgroup shows a part of it); ", ("/sys/fs/cgroup",)),
    Row("a cgroup namespace and the whole", f"{PURE}\n{PLACE}", "/mnt/my cgroups", ("/sys/fs/cgroup",)),
    Row("broken lines are skipped", f"\n1 2 3\n- - -\n{PURE}\nx y z / /a b", "/sys/fs/cgroup"),
]


@each_row(ROWS)
def test_cgroup_root_of_a_mountinfo(row: Row):
    given = parse_mountinfo(row.mountinfo)

    def inode(path: Path) -> int:
        return 4711 if str(path) in row.parts else 1

    if row.found.startswith("/"):
        assert find_cgroup_root(given, inode) == Path(row.found)
        return
    with pytest.raises(KernelError) as error:
        find_cgroup_root(given, inode)
    assert str(error.value).startswith(row.found)
    assert "mount" in error.value.hint, "it says what to do"
    assert "ipvs" not in error.value.hint, "there is no such mode yet"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["größe", "日本", "tab\tand space", "back\\slash", "no\udcff text"])
def test_escaped_paths_in_mountinfo_are_decoded(name: str):
    """The kernel escapes blanks and backslashes, and leaves other bytes alone."""
    escaped = name.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    (found,) = parse_mountinfo(f"1 2 0:1 / /mnt/{escaped} rw - cgroup2 none rw")
    assert found.path == Path(f"/mnt/{name}")


def test_mounts_of_this_machine():
    assert is_cgroup2(find_cgroup_root())
    assert find_cgroup_root() == cgroup2()
    assert not is_cgroup2(Path("/tmp"))
    assert is_bpffs(BPFFS)
    assert not is_bpffs(Path("/tmp"))
    assert not is_bpffs(Path("/tmp/is/not/there"))


ROOT_OR_ERROR = (
    "from kbpf.kernel.system import mounts\n"
    "try: root = mounts.find_cgroup_root(); print(root.stat().st_ino, mounts.is_cgroup2(root))\n"
    "except Exception as error: print(error)\n"
)
V1_ROWS = {
    "with CAP_SYS_ADMIN": ("", "1 True"),
    "without CAP_SYS_ADMIN": (
        "setpriv --bounding-set -sys_admin --",
        "no cgroup v2 hierarchy is mounted, and it cannot be mounted (/proc/self/mountinfo): "
        "EPERM; on the node: mount -t cgroup2 none DIR, and name it with --cgroup; or grant "
        "CAP_SYS_ADMIN",
    ),
    "in a cgroup namespace": (
        "unshare --cgroup",
        "only a part of the cgroup v2 hierarchy is mounted (this process is in a cgroup "
        "namespace); mount the host's /sys/fs/cgroup, or name a folder with --cgroup",
    ),
}


def run_in_cgroup(*command: str) -> str:
    folder = cgroup2() / f"kbpf-test-{os.getpid()}"
    folder.mkdir()
    try:
        return run(*inside(None, folder, *command))
    finally:
        remove_cgroup(folder)


@pytest.mark.parametrize("name", V1_ROWS)
def test_hierarchy_of_a_node_with_cgroup_v1_only_is_mounted(name: str):
    wrapper, output = V1_ROWS[name]
    assert run_in_cgroup(*V1_ONLY, *wrapper.split(), sys.executable, "-c", ROOT_OR_ERROR).strip() == output


def test_root_of_a_cgroup_namespace_is_refused(tmp_path):
    """A container sees its own cgroup as "/" in a mount that was made inside of it."""
    code = (
        "from kbpf.kernel.system import mounts\n"
        "seen = [m for m in mounts.list_mounts() if m.path.name == 'cgroup']\n"
        "print([m.root for m in seen if m.fs_type == 'cgroup2'])\n"
        "try: print(mounts.find_cgroup_root(tuple(seen)))\n"
        "except mounts.KernelError as error: print(error)\n"
    )
    mount = 'mount -t cgroup2 none "$1"; exec "$2" -c "$3"'
    (tmp_path / "cgroup").mkdir()
    namespace = ("unshare", "-Cm", "--propagation", "private", "sh", "-ec", mount, "sh")
    root, error = run_in_cgroup(*namespace, str(tmp_path / "cgroup"), sys.executable, code).splitlines()
    assert "'/'" in root
    assert error.startswith("only a part of the cgroup v2 hierarchy is mounted (")


def python_without_bpffs(code: str, *more: str) -> str:
    """What this Python prints in a new mount namespace without any bpffs, after the commands
    `more`.
    """
    lines = ["mount --make-rprivate /", "while umount -l /sys/fs/bpf 2>/dev/null; do :; done", *more, 'exec "$@"']
    return run("unshare", "-m", "sh", "-ec", "; ".join(lines), "sh", sys.executable, "-c", code).strip()


MAKE = """
from pathlib import Path
from kbpf.kernel.system import mounts
pins = Path({pins!r})
assert not mounts.is_bpffs(Path("/sys/fs/bpf"))
mounts.ensure_bpffs(pins)
mounts.ensure_bpffs(pins)
where = [str(m.path) for m in mounts.list_mounts() if m.fs_type == "bpf"]
print(mounts.is_bpffs(pins), oct(pins.stat().st_mode & 0o777), where)
"""


def test_missing_bpffs_is_mounted_at_sys_fs_bpf():
    """It is mounted once, is accessible to root only, and pins can be created in it."""
    name = f"kbpf-test-{os.getpid()}"
    out = python_without_bpffs(MAKE.format(pins=f"/sys/fs/bpf/{name}"))
    assert out == "True 0o700 ['/sys/fs/bpf']"
    assert not (BPFFS / name).exists(), "and not on this machine"


def test_pin_folder_outside_sys_fs_bpf_becomes_a_mount(tmp_path):
    pins = tmp_path / "deep" / "pins"
    assert python_without_bpffs(MAKE.format(pins=str(pins))) == f"True 0o700 ['{pins}']"
    assert not is_bpffs(pins), "and not on this machine"


def test_container_on_a_node_without_bpffs_mounts_none():
    """Its pins would end with the container. A hostPath is a bind mount, here of sysfs'
    directory.
    """
    code = (
        "from pathlib import Path\n"
        "from kbpf.kernel.system import mounts\n"
        "try: mounts.ensure_bpffs(Path('/sys/fs/bpf/kbpf'))\n"
        "except mounts.KernelError as error: print(error)\n"
        "print([m.fs_type for m in mounts.list_mounts() if m.path == mounts.BPF_FS])\n"
    )
    said, kinds = python_without_bpffs(code, "mount --bind /sys/fs/bpf /sys/fs/bpf").splitlines()
    assert "the file system mounted here is not a bpffs (/sys/fs/bpf)" in said
    assert "on the node: mount -t bpf -o mode=700 bpf /sys/fs/bpf" in said
    assert kinds == "['sysfs']"

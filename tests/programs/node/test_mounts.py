# SPDX-License-Identifier: Apache-2.0
"""Finding the bpffs and the cgroup v2 hierarchy, and mounting them where none is mounted."""

import os
import sys
from pathlib import Path

import pytest

from kbpf.kernel.system.mounts import (
    find_cgroup_root,
    is_bpffs,
    is_cgroup2,
)
from tests.support.lab.lab import V1_ONLY, cgroup2, inside, remove_cgroup, run
from tests.support.plane import BPFFS


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


def test_agents_that_start_together_mount_one_bpffs():
    code = """
import multiprocessing
from pathlib import Path
from kbpf.kernel.system import mounts
together = multiprocessing.get_context("fork")
start = together.Barrier(8)
def make(pins):
    start.wait()
    mounts.ensure_bpffs(pins)
folders = [Path(f"/sys/fs/bpf/{number}") for number in range(8)]
agents = [together.Process(target=make, args=(pins,)) for pins in folders]
for agent in agents: agent.start()
for agent in agents: agent.join()
print([agent.exitcode for agent in agents] == [0] * 8, all(pins.is_dir() for pins in folders))
print([m.fs_type for m in mounts.list_mounts() if m.path == mounts.BPF_FS])
"""
    assert python_without_bpffs(code).splitlines() == ["True True", "['bpf']"]


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

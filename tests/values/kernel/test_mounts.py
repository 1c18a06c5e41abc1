# SPDX-License-Identifier: Apache-2.0
"""The root of the cgroup v2 hierarchy in texts of /proc/self/mountinfo."""

from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.system.mounts import find_cgroup_root, parse_mountinfo
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

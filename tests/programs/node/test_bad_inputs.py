# SPDX-License-Identifier: Apache-2.0
"""Mistakes of an operator that only show on a machine: the error line and the exit code of each.
tests/values/config/test_bad_inputs.py has the settings that need no machine.

No row mounts or attaches anything: each command ends before.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.dataplane.ipvs import ipvs_cleanup as cleanup
from kbpf.dataplane.ipvs import plane
from kbpf.errors import KernelError
from kbpf.model.config import Config
from tests.support.lab.lab import cgroup2
from tests.support.runtime.command import kbpf

USAGE = "kbpf run: "
AGENT = " ERROR kbpf "


class Place:
    """Folders for the rows: `{empty}`, `{data}` with files, `{file}`, and `{closed}`,
    root's only.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.chmod(0o755)
        for name in ("empty", "data", "closed/pins"):
            (root / name).mkdir(parents=True)
        for name in ("data/b", "data/a", "file"):
            (root / name).write_text("x")
        (root / "closed").chmod(0o700)

    def fill(self, text: str) -> str:
        names = {name: self.root / name for name in ("empty", "data", "file", "closed")}
        return text.format(**names, cgroups=cgroup2())

    def shown(self) -> list[str]:
        return sorted(str(path) for path in self.root.rglob("*"))


@pytest.fixture
def place() -> Iterator[Place]:
    root = Path("/tmp") / f"kbpf-bad-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    yield Place(root)
    shutil.rmtree(root)


class Input(NamedTuple):
    """A command, its exit code, and the last line on stderr after `before`. `nobody`: run as that
    user.
    """

    name: str
    command: str
    code: int
    line: str
    before: str = AGENT
    nobody: bool = False


RUN = "run --source {empty} --healthz-bind-address= --metrics-bind-address="
BPF = f"{RUN} --mode bpf"
EXIST = "name an existing folder, or leave it out for the root cgroup"
ROOT = "run as root"
FOLDER = "give a folder of YAML, such as objects/ in an unpacked `kbpf sysdump`"
OTHER = "choose another folder with --pin-dir"
BAD_INPUTS = [
    Input(
        "a cgroup that is misspelt",
        f"{RUN} --cgroup {{cgroups}}/typo",
        2,
        f"no such cgroup v2 folder: {{cgroups}}/typo (--cgroup); {EXIST}",
        USAGE,
    ),
    Input(
        "in mode bpf, too",
        f"{BPF} --cgroup /nowhere",
        2,
        f"no such cgroup v2 folder: /nowhere (--cgroup); {EXIST}",
        USAGE,
    ),
    Input(
        "a file as cgroup",
        f"{RUN} --cgroup {{cgroups}}/cgroup.procs",
        2,
        f"no such cgroup v2 folder: {{cgroups}}/cgroup.procs (--cgroup); {EXIST}",
        USAGE,
    ),
    Input(
        "a folder that is no cgroup",
        f"{RUN} --cgroup {{empty}}",
        2,
        "not a cgroup v2 folder: {empty} (--cgroup); name a folder of cgroup v2, or leave it out for the root cgroup",
        USAGE,
    ),
    Input(
        "pins over data",
        f"{BPF} --pin-dir {{data}}",
        1,
        f"will not mount a bpffs over a folder with files: a, b ({{data}}); {OTHER}",
    ),
    Input(
        "pins in a file",
        f"{BPF} --pin-dir {{file}}",
        1,
        f"cannot create the mount point for a bpffs ({{file}}): EEXIST; {OTHER}",
    ),
    Input(
        "pins in /proc",
        f"{BPF} --pin-dir /proc/no",
        1,
        f"cannot create the mount point for a bpffs (/proc/no): ENOENT; {OTHER}",
    ),
    Input("no folder of objects", "run --source /nowhere", 1, f"no such folder of objects (/nowhere); {FOLDER}"),
    Input("a file of objects", "run --source {file}", 1, f"a file, not a folder of objects ({{file}}); {FOLDER}"),
    Input(
        "neither a folder nor a server",
        "run --kubeconfig /nowhere",
        1,
        "cannot read the kubeconfig: No such file or directory (/nowhere); give the kubeconfig's path",
    ),
    Input(
        "cleanup of data",
        "cleanup --pin-dir {data}",
        1,
        "nothing was removed: the folder has entries that are not kbpf's (a, b) ({data})",
        "kbpf: ",
    ),
    *(
        Input(
            f"{words}: a file",
            f"{words} --pin-dir {{file}}",
            1,
            "not a folder ({file}); give the folder that `kbpf run` was given with --pin-dir",
            "kbpf: ",
        )
        for words in ("inspect status", "inspect services", "cleanup", "check --attached")
    ),
    *(
        Input(
            f"nobody: run {words}",
            f"{RUN} --pin-dir {{closed}}/pins {words}",
            1,
            f"cannot read the pin folder ({{closed}}/pins): EACCES; {ROOT}",
            AGENT,
            True,
        )
        for words in ("", "--mode bpf", "--mode ipvs")
    ),
    *(
        Input(
            f"nobody: {words} {where}",
            f"{words} --pin-dir {where}",
            1,
            f"cannot read the pin folder ({where}): EACCES; {ROOT}",
            "kbpf: ",
            True,
        )
        for where in ("{closed}", "{closed}/pins")
        for words in (
            "inspect status",
            "inspect services",
            "inspect connections",
            "inspect maps",
            "cleanup",
            "check --attached",
        )
    ),
    *(
        Input(
            f"nobody: {words} with a cgroup of others",
            f"{words} --cgroup {{closed}}",
            1,
            f"cannot read the cgroup ({{closed}}): EACCES; {ROOT}",
            "kbpf: ",
            True,
        )
        for words in (RUN, "check")
    ),
    Input(
        "nobody: a configuration of others",
        "cleanup --config {closed}",
        1,
        "cannot read the configuration: Permission denied ({closed}); give --config FILE",
        "kbpf: ",
        True,
    ),
    Input("nobody: demo", "demo --once", 1, "cannot create the network namespace (", "kbpf: ", True),
]


@pytest.mark.parametrize("row", BAD_INPUTS, ids=lambda row: row.name)
def test_error_is_one_line_and_nothing_changes(row: Input, place: Place) -> None:
    before = place.shown()
    done = kbpf(*place.fill(row.command).split(), nobody=row.nobody)
    assert row.before in done.last()
    said = done.last().partition(row.before)[2]
    assert said.startswith(place.fill(row.line)), done.err
    assert done.code == row.code
    assert place.shown() == before
    assert "bpf" not in [kind for path, kind in mounted() if path.startswith(str(place.root))]


READ_ONLY = 'mount --make-rprivate / && mount -t bpf -o ro bpf "$0" && exec "$@"'


def test_pin_folder_in_a_read_only_bpffs_is_an_error(place: Place) -> None:
    words = place.fill(f"{BPF} --pin-dir {{empty}}/pins").split()
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", READ_ONLY, str(place.root / "empty"), sys.executable, "-m", "kbpf", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    line = f"cannot create the pin folder ({{empty}}/pins): EROFS; {OTHER}"
    assert done.stderr.splitlines()[-1].partition(AGENT)[2] == place.fill(line)
    assert done.returncode == 1


def test_missing_bridge_is_a_warning() -> None:
    words = ("--detect-local-mode=BridgeInterface", "--pod-bridge-interface=nosuchbr")
    done = kbpf("run", "--source", "/nowhere", *words)
    assert (
        "--pod-bridge-interface: device nosuchbr does not exist yet; until it does, no traffic "
        "counts as traffic of this node's pods"
    ) in done.err
    assert done.code == 1


def test_error_of_a_too_large_map_names_its_flag() -> None:
    with pytest.raises(KernelError, match=r"lower --max-connections$"):
        pinning.make_map(MAPS["flows"], (1 << 32) - 1)


def mounted() -> list[tuple[str, str]]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [(line.split()[1], line.split()[2]) for line in lines]


def test_failed_start_without_ipvs_leaves_no_state(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    """Otherwise the next start of mode bpf would report remains of a mode ipvs that never
    served.
    """

    def refuse(*_: object) -> None:
        raise KernelError("this kernel has no IPVS")

    monkeypatch.setattr(plane, "KernelState", refuse)
    config = Config(state_dir=place.root / "state")
    with pytest.raises(KernelError, match="no IPVS"):
        plane.IpvsPlane(config).open()
    assert not cleanup.has_state(config)

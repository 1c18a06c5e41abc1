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
from unittest.mock import Mock

import msgspec
import pytest
import yaml

from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import MAPS
from kbpf.dataplane.ipvs import ipvs_cleanup as cleanup
from kbpf.dataplane.ipvs import plane
from kbpf.errors import KernelError
from kbpf.model.config import Config
from tests.support.lab.lab import cgroup2
from tests.support.runtime.command import kbpf

AGENT = " ERROR kbpf "


class Place:
    """Folders for the rows: `{empty}`, `{data}` with files, `{ours}` with the pins' names, `{file}`, and
    `{closed}`, root's only.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.chmod(0o755)
        for name in ("empty", "data", "closed/pins", "ours/links"):
            (root / name).mkdir(parents=True)
        for name in ("data/b", "data/a", "file"):
            (root / name).write_text("x")
        (root / "closed").chmod(0o700)

    def fill(self, text: str) -> str:
        names = {name: self.root / name for name in ("empty", "data", "file", "closed", "ours")}
        return text.replace("{run}", RUN).format(**names, cgroups=cgroup2())

    def shown(self) -> list[str]:
        return sorted(str(path) for path in self.root.rglob("*"))


@pytest.fixture
def place() -> Iterator[Place]:
    root = Path("/tmp") / f"kbpf-bad-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    yield Place(root)
    shutil.rmtree(root)


class Input(msgspec.Struct, forbid_unknown_fields=True):
    """A command, its exit code, and the last line on stderr after `before`. `nobody`: run as that
    user.
    """

    command: str
    line: str
    code: int = 1
    before: str = AGENT
    nobody: bool = False


RUN = "run --source {empty} --healthz-bind-address= --metrics-bind-address="
BPF = f"{RUN} --mode bpf"
OTHER = "choose another folder with --pin-dir"
TEXT = """
a cgroup that is misspelt:
  command: "{run} --cgroup {cgroups}/typo"
  line: "no such cgroup v2 folder: {cgroups}/typo (--cgroup); name an existing folder of cgroup v2"
  code: 2
  before: "kbpf run: "
in mode bpf, too:
  command: "{run} --mode bpf --cgroup /nowhere"
  line: "no such cgroup v2 folder: /nowhere (--cgroup); name an existing folder of cgroup v2"
  code: 2
  before: "kbpf run: "
a file as cgroup:
  command: "{run} --cgroup {cgroups}/cgroup.procs"
  line: "no such cgroup v2 folder: {cgroups}/cgroup.procs (--cgroup); name an existing folder of cgroup v2"
  code: 2
  before: "kbpf run: "
a folder that is no cgroup:
  command: "{run} --cgroup {empty}"
  line: "not a cgroup v2 folder: {empty} (--cgroup); name an existing folder of cgroup v2"
  code: 2
  before: "kbpf run: "
pins over data:
  command: "{run} --mode bpf --pin-dir {data}"
  line: "will not mount a bpffs over a folder with files: a, b ({data}); choose another folder with --pin-dir"
pins in a file:
  command: "{run} --mode bpf --pin-dir {file}"
  line: "cannot create the mount point for a bpffs ({file}): EEXIST; choose another folder with --pin-dir"
pins in /proc:
  command: "{run} --mode bpf --pin-dir /proc/no"
  line: "cannot create the mount point for a bpffs (/proc/no): ENOENT; choose another folder with --pin-dir"
no folder of objects:
  command: run --source /nowhere
  line: no such folder of objects (/nowhere); give a folder of YAML, such as objects/ in an unpacked `kbpf sysdump`
a file of objects:
  command: run --source {file}
  line: a file, not a folder of objects ({file}); give a folder of YAML, such as objects/ in an unpacked `kbpf sysdump`
neither a folder nor a server:
  command: run --kubeconfig /nowhere
  line: "cannot read the kubeconfig: No such file or directory (/nowhere); give the kubeconfig's path"
cleanup of data:
  command: cleanup --pin-dir {data}
  line: "nothing was removed: the folder has entries that are not kbpf's (a, b) ({data})"
  before: "kbpf: "
cleanup of a folder outside a bpffs:
  command: cleanup --pin-dir {ours}
  line: "nothing was removed: the folder is in no bpffs ({ours})"
  before: "kbpf: "
options of cleanup that contradict each other:
  command: cleanup --kube-proxy --keep-connections
  line: "--kube-proxy, --keep-connections and --cache cannot be combined; run `kbpf cleanup` once for each"
  before: "kbpf: "
demo in a folder that is no cgroup:
  command: demo --cgroup {empty}
  line: not a cgroup v2 folder ({empty}); give one with --cgroup
  before: "kbpf: "
"nobody: a configuration of others":
  command: cleanup --config {closed}
  line: "cannot read the configuration: Permission denied ({closed}); give --config FILE"
  before: "kbpf: "
  nobody: true
"nobody: demo":
  command: demo --once
  line: cannot create the network namespace (
  before: "kbpf: "
  nobody: true
"""
OF_FOLDERS = {
    "inspect status": "kbpf: ",
    "inspect services": "kbpf: ",
    "cleanup": "kbpf: ",
    "check --attached": "kbpf: ",
    f"{RUN} --mode ipvs": AGENT,
    BPF: AGENT,
    RUN: AGENT,
}
"""Commands that read the pin folder, and the beginning of their errors."""
FILE = "not a folder ({file}); give the folder that `kbpf run` was given with --pin-dir"
BAD_INPUTS = msgspec.convert(yaml.safe_load(TEXT), dict[str, Input])
for command, before in OF_FOLDERS.items():
    for where in ("{closed}/pins", "{closed}"):
        line = f"cannot read the pin folder ({where}): EACCES; run as root"
        BAD_INPUTS[f"nobody: {command} {where}"] = Input(f"{command} --pin-dir {where}", line, 1, before, True)
    if before != AGENT:
        BAD_INPUTS[f"{command}: a file"] = Input(f"{command} --pin-dir {{file}}", FILE, 1, before)
for command in (RUN, "check"):
    line = "cannot read the cgroup ({closed}): EACCES; run as root"
    BAD_INPUTS[f"nobody: {command} of others"] = Input(f"{command} --cgroup {{closed}}", line, 1, "kbpf: ", True)


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_error_is_one_line_and_nothing_changes(name: str, place: Place):
    row = BAD_INPUTS[name]
    before = place.shown()
    done = kbpf(*place.fill(row.command).split(), nobody=row.nobody)
    assert row.before in done.last()
    said = done.last().partition(row.before)[2]
    assert said.startswith(place.fill(row.line)), done.err
    assert done.code == row.code
    assert place.shown() == before
    assert "bpf" not in [kind for path, kind in mounted() if path.startswith(str(place.root))]


READ_ONLY = 'mount --make-rprivate / && mount -t bpf -o ro bpf "$0" && exec "$@"'


def test_pin_folder_in_a_read_only_bpffs_is_an_error(place: Place):
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


def test_missing_bridge_is_a_warning():
    words = ("--detect-local-mode=BridgeInterface", "--pod-bridge-interface=nosuchbr")
    done = kbpf("run", "--source", "/nowhere", *words)
    assert (
        "--pod-bridge-interface: device nosuchbr does not exist yet; until it does, no traffic "
        "counts as traffic of this node's pods"
    ) in done.err
    assert done.code == 1


def test_error_of_a_too_large_map_names_its_flag():
    with pytest.raises(KernelError, match=r"lower --max-connections$"):
        pinning.make_map(MAPS["flows"], (1 << 32) - 1)


def mounted() -> list[tuple[str, str]]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [(line.split()[1], line.split()[2]) for line in lines]


def test_failed_start_without_ipvs_leaves_no_state(monkeypatch, place: Place):
    """Otherwise the next start of mode bpf would report remains of a mode ipvs that never
    served.
    """

    monkeypatch.setattr(plane, "KernelState", Mock(side_effect=KernelError("this kernel has no IPVS")))
    config = Config(state_dir=place.root / "state")
    with pytest.raises(KernelError, match="no IPVS"):
        plane.IpvsPlane(config).open()
    assert not cleanup.has_state(config)

"""vagrant/ and the shell scripts of this project: they can be read by those who run them.

The machines themselves need boxes, which no test can fetch. What is not Vagrant's own runs
elsewhere: provision/kernel.sh in each guest of `make test-kernels`, kubeadm/provision/kbpf.sh in
tests/lab/test_manifests.py, provision/enter.sh below.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.lab import PATIENCE

ROOT = Path(__file__).parents[2]
VAGRANT = ROOT / "vagrant"
PROFILES = {
    VAGRANT: {"debian11", "debian12", "debian13", "debian-testing", "ubuntu2404", "fedora"},
    VAGRANT / "kubeadm": {"control-plane", "worker-1", "worker-2"},
}
OTHERS = (".ci/run", "tools/packages", "tests/kernels/guest.sh")
SCRIPTS = sorted([*(ROOT / name for name in OTHERS), *VAGRANT.rglob("*.sh")])


@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_vagrant_takes_it(folder: Path, tmp_path: Path):
    """With libvirt's settings too; those of VirtualBox need VirtualBox to be looked at."""
    environment = {
        "HOME": str(tmp_path),
        "VAGRANT_HOME": str(tmp_path / "vagrant"),
        "VAGRANT_DOTFILE_PATH": str(tmp_path / "dot"),
        "VAGRANT_DEFAULT_PROVIDER": "libvirt",
        "VAGRANT_CHECKPOINT_DISABLE": "1",
        "PATH": os.environ["PATH"],
    }
    said = [
        subprocess.run(
            ["vagrant", *command], cwd=folder, env=environment, capture_output=True, text=True,
            check=False, timeout=5 * PATIENCE,
        )
        for command in (("validate",), ("status", "--machine-readable"))
    ]  # fmt: skip
    assert said[0].returncode == 0, said[0].stderr
    assert "validated successfully" in said[0].stdout
    machines = re.findall(r"^\d+,([\w-]+),provider-name,libvirt$", said[1].stdout, re.M)
    assert set(machines) == PROFILES[folder], said[1].stderr


@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_what_it_provisions_with_is_there(folder: Path):
    names = re.findall(r'path: "([^"]+)"', (folder / "Vagrantfile").read_text())
    assert names
    assert [name for name in names if not (folder / name).is_file()] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck(script: Path):
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_command_enters_a_root_with_this_kernel_and_the_tree(tmp_path: Path):
    """A root of busybox alone. The mounts end with the command."""
    root, tree = tmp_path / "root", tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    (tree / "below").mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin")
    for name in ("sh", "ls", "cat", "echo"):
        (root / "bin" / name).symlink_to("busybox")
    command = (
        "sh",
        "-c",
        "ls; ls -d /sys/fs/bpf /dev/null; cat /proc/version; echo $0",
        "two words",
    )
    done = subprocess.run(
        ["sh", VAGRANT / "provision" / "enter.sh", root, tree, *command],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    version = Path("/proc/version").read_text().strip()
    assert done.stdout.splitlines() == ["below", "/dev/null", "/sys/fs/bpf", version, "two words"]
    assert str(root) not in Path("/proc/self/mountinfo").read_text()
    assert list((root / "proc").iterdir()) == []

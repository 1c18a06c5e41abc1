# SPDX-License-Identifier: Apache-2.0
"""vagrant/ and the project's shell scripts: Vagrant and the shells accept them.

The machines need boxes, which no test can download. The provisioning scripts run here, and in each
guest of `make test-kernels`, whose first command is provision/kernel.sh. The scripts that make a
kubeadm cluster run in tests/lab/cluster/test_vagrant.py.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.lab.lab import PATIENCE, run

ROOT = Path(__file__).parents[2]
VAGRANT = ROOT / "vagrant"
PROFILES = {
    VAGRANT: {"debian11", "debian12", "debian13", "debian-testing", "ubuntu2404", "fedora"},
    VAGRANT / "kubeadm": {"control-plane", "worker-1", "worker-2"},
}
OTHERS = (".ci/run", "tools/packages", "tests/kernels/guest.sh")
SCRIPTS = sorted([*(ROOT / name for name in OTHERS), *VAGRANT.rglob("*.sh")])


@pytest.mark.parametrize("folder", PROFILES, ids=lambda folder: folder.name)
def test_vagrant_accepts_the_vagrantfile(folder: Path, tmp_path):
    """With libvirt's settings too; those of VirtualBox can only be checked with VirtualBox."""
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
            ["vagrant", *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=5 * PATIENCE,
        )
        for command in (("validate",), ("status", "--machine-readable"))
    ]
    assert said[0].returncode == 0, said[0].stderr
    assert "validated successfully" in said[0].stdout
    machines = re.findall(r"^\d+,([\w-]+),provider-name,libvirt$", said[1].stdout, re.M)
    assert set(machines) == PROFILES[folder], said[1].stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck_accepts_the_script(script: Path):
    run("shellcheck", str(script))


TOOLS = "sh busybox mkdir mount mountpoint unshare chroot cp cat touch rm uname ln ip env chmod"
STUB = """#!TOOLS/sh
echo "${0##*/} $*" >>SAID
"""
BOOTSTRAP = """#!TOOLS/sh
echo "${0##*/} $*" >>SAID
for root; do case $root in /*) break ;; esac; done
mkdir -p "$root/etc" "$root/inside"
cp BUSYBOX "$root/inside/busybox"
for name in sh env; do ln -s busybox "$root/inside/$name"; done
printf '#!/inside/sh\\necho "in %s: make $*" >>said\\n' "$root" >"$root/inside/make"
chmod 755 "$root/inside/make"
"""
INSTALLS = {
    "apt-get": [
        "apt-get update -qq",
        "apt-get install -y -qq --no-install-recommends debootstrap debian-archive-keyring ca-certificates",
        "apt-get install -y -qq linux-modules",
    ],
    "dnf": ["dnf install -y -q debootstrap iproute", "dnf install -y -q kernel-modules-extra"],
}
"""A distribution's package manager, and the first words of its calls."""


@pytest.mark.parametrize("packager", INSTALLS)
def test_a_machine_is_provisioned(packager: str, tmp_path):
    """machine.sh and suite.sh with everything they call. Package managers and debootstrap are
    stand-ins; the changes to this kernel, the root and its mounts are real. /var/lib is separate.
    """
    provision_and_begin(packager, {name: shutil.which(name) for name in TOOLS.split()}, tmp_path)


def test_a_machine_of_busybox_is_provisioned(tmp_path):
    """The same with busybox, which has all tools but one: it takes seconds even where starting a
    program is slow, as in an emulated guest, since busybox stays in memory.
    """
    busybox = str(shutil.copy("/bin/busybox", tmp_path))
    own = run(busybox, "--list")
    tools = {name: busybox if name in own.split() else shutil.which(name) for name in TOOLS.split()}
    assert [name for name in TOOLS.split() if tools[name] != busybox] == ["mountpoint"]
    provision_and_begin("apt-get", tools, tmp_path)


def provision_and_begin(packager: str, programs: dict[str, str | None], tmp_path) -> None:
    """Provisions a new machine and runs the suite; then again on the same machine, with a part."""
    tree, tools, said = tmp_path / "tree", tmp_path / "tools", tmp_path / "tree" / "said"
    shutil.copytree(VAGRANT, tree / "vagrant")
    tools.mkdir()
    for name, found in programs.items():
        if found:
            (tools / name).symlink_to(found)
    places = {"SAID": said, "BUSYBOX": "/bin/busybox", "TOOLS": tools}
    for name, text in ((packager, STUB), ("debootstrap", BOOTSTRAP)):
        (tools / name).write_text(re.sub("|".join(places), lambda m: str(places[m[0]]), text))
        (tools / name).chmod(0o755)

    def provision(script: str, *arguments: str) -> list[str]:
        command = f"mount -t tmpfs none /var/lib && exec sh {script} " + '"$@"'
        done = subprocess.run(
            ["unshare", "--mount", "--net", "sh", "-c", f"{command}", "sh", *arguments],
            env={"PATH": f"{tools}:/inside", "KBPF_TREE": str(tree), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = said.read_text().splitlines()
        said.unlink()
        return lines

    machine = tree / "vagrant/provision/machine.sh"
    suite = machine.with_name("suite.sh")
    *installed, debian, made, begun = provision("-c", f"sh {machine} {tree} && exec sh {suite}")
    wanted = INSTALLS[packager]
    assert [line.startswith(w) for line, w in zip(installed, wanted, strict=True)] == [True for _ in wanted], installed
    assert debian.startswith("debootstrap --variant=minbase")
    assert debian.endswith("bookworm /var/lib/kbpf-tests http://deb.debian.org/debian")
    assert made == "in /var/lib/kbpf-tests: make venv"
    assert begun == "in /var/lib/kbpf-tests: make test PYTEST=tests"
    twice = f"sh {machine} {tree} && sh {machine} {tree} && exec sh {suite} -k hints"
    *lines, last = provision("-c", twice)
    assert len([line for line in lines if line.startswith("debootstrap")]) == 1
    assert last == "in /var/lib/kbpf-tests: make test PYTEST=-k hints"


def test_a_command_enters_a_root(tmp_path):
    """The root has only busybox and is a mount point, since `ip -n` and unshare change its
    propagation. All mounts are removed when the command ends.
    """
    root, tree = tmp_path / "root", tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    (tree / "below").mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin")
    for name in ("sh", "ls", "cat", "unshare"):
        (root / "bin" / name).symlink_to("busybox")
    command = ("sh", "-c", "ls; ls -d /sys/fs/bpf /dev/null; unshare --mount cat /proc/version; echo $0", "two words")
    lines = run("sh", str(VAGRANT / "provision" / "enter.sh"), str(root), str(tree), *command).splitlines()
    version = Path("/proc/version").read_text().strip()
    assert lines == ["below", "/dev/null", "/sys/fs/bpf", version, "two words"]
    assert str(root) not in Path("/proc/self/mountinfo").read_text()
    assert list((root / "proc").iterdir()) == []

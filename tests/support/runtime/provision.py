# SPDX-License-Identifier: Apache-2.0
"""A fake machine for vagrant/kubeadm/provision: this machine's files and kernel in a mount and a
network namespace, with separate /etc, /root, /home, /run and /var/lib, which persist from one
script to the next. Nothing of this machine is written to.

Programs that download packages or change the kernel are stand-ins that record their calls. kubectl
is real, and so is kubeadm, with --dry-run where it would start something. Of kubeadm's preflight
checks those in UNMET are ignored; the others must succeed.
"""

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.build import go_build
from tests.support.build.programs import PREVIOUS
from tests.support.lab.lab import PATIENCE

ROOT = Path(__file__).parents[3]
PROVISION = "vagrant/kubeadm/provision"
VERSION = go_build.kubernetes_version(PREVIOUS)
"""The previous minor version: Debian 12 and 13 have containerd 1, Kubernetes 1.37 requires 2."""
UNMET = (
    "CRI",
    "ContainerRuntimeVersion",
    "SystemVerification",
    "Mem",
    "NumCPU",
    "Swap",
    "FileContent--proc-sys-net-ipv4-ip_forward",
)
OWN = ("etc", "root", "home", "run", "var/lib")
"""The machine's separate folders, which contain only these at first:"""
FOLDERS = ("etc/apt/sources.list.d", "etc/modules-load.d", "etc/sysctl.d")
FILES = ("etc/group", "etc/hosts", "etc/nsswitch.conf", "etc/passwd")

STAND_IN = """#!/bin/sh
echo "NAME $*" >>"$SAID"
case "NAME $*" in
"$FAIL"*) echo "NAME: fails on request" >&2; exit 9 ;;
esac
"""
STAND_INS = {
    **dict.fromkeys(("swapoff", "modprobe", "sysctl", "apt-get", "systemctl"), ""),
    "containerd": 'cat "$FOLDER/containerd.toml"\n',
    "apt-mark": """\
case $1 in
showhold) if [ -e "$FOLDER/held" ]; then echo "$2"; fi ;;
hold) touch "$FOLDER/held" ;;
esac
""",
    "curl": """\
while [ "$1" != -o ]; do shift; done
cp "$FOLDER/${3##*/}" "$2"
""",
    "gpg": """\
while [ "$1" != -o ]; do shift; done
cp "$3" "$2"
""",
    "buildah": """\
case $1 in
push) archive=${4#docker-archive:}; touch "${archive%%:*}" ;;
esac
""",
    "ctr": 'for archive; do :; done; test -e "$archive"\n',
    "kubectl": """\
case "$*" in
*"rollout status"*) exit 0 ;; # there is no controller here
esac
exec nsenter --net="$API_NET" -- "$BIN/kubectl" "$@"
""",
}
"""Name → the shell code of the stand-in after it has recorded its call."""
KUBEADM = """\
set -e
case $1 in
version | reset) PATH=$QUIET:$PATH exec "$BIN/kubeadm" "$@" ;;
esac
for each; do
\tcase $each in
\t--config=*)
\t\tcp "${each#--config=}" "$FOLDER/$1.yaml"
\t\t"$BIN/kubeadm" config validate "$each" >&2 ;;
\tesac
done
PATH=$QUIET:$PATH "$BIN/kubeadm" "$@" --dry-run --ignore-preflight-errors="$UNMET" >"$FOLDER/$1.out"
mkdir -p /etc/kubernetes/pki /etc/kubernetes/manifests
touch /etc/kubernetes/pki/ca.crt /etc/kubernetes/kubelet.conf
case $1 in
init)
\ttouch /etc/kubernetes/manifests/kube-apiserver.yaml
\tcp "$ADMIN" /etc/kubernetes/admin.conf ;;
esac
if [ "$FAIL" = "after kubeadm $1" ]; then echo "kubeadm: fails on request" >&2; exit 9; fi
"""
"""Runs kubeadm with --dry-run, then creates the files of a real run that others look for."""
QUIET = ("systemctl", "modprobe")
"""Programs that kubeadm calls, whose calls are not recorded."""
ENTER = """
set -e
ip link set lo up
ip addr add "$ADDRESS/24" dev lo
# Real things first: they may be below a folder that is hidden then.
mount --bind "$TREE" "$KBPF_TREE"
mount --bind "$KUBEADM_AT" "$BIN/kubeadm"
mount --bind "$KUBECTL_AT" "$BIN/kubectl"
for each in OWN; do mount --bind "$FOLDER/$each" "/$each"; done
exec sh "$@"
""".replace("OWN", " ".join(OWN))


class Machine:
    """The fake machine. `said`: the calls of stand-ins by the last script; `out`, `yaml`: kubeadm's
    output and configuration.
    """

    def __init__(self, folder: Path, address: str, kubeadm: Path, kubectl: Path, admin: Path):
        self._folder, self._said = folder, folder / "said"
        for name in (*OWN, *FOLDERS, "tree", "bin"):
            (folder / name).mkdir(parents=True)
        for name in FILES:
            shutil.copy(Path("/", name), folder / name)
        self.file("/etc/fstab").touch()
        for name in ("kubeadm", "kubectl"):
            (folder / "bin" / name).touch()
        tools, quiet = folder / "tools", folder / "quiet"
        for where, programs in (
            (tools, {name: _stand_in(name) + does for name, does in STAND_INS.items()}),
            (tools, {"kubeadm": _stand_in("kubeadm") + KUBEADM}),
            (quiet, dict.fromkeys(QUIET, "#!/bin/sh\n")),
            (quiet, {"kubelet": f"#!/bin/sh\necho Kubernetes {VERSION}\n"}),
        ):
            where.mkdir(exist_ok=True)
            for name, text in programs.items():
                (where / name).write_text(text)
                (where / name).chmod(0o755)
        self._environment = {
            "PATH": f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "ADDRESS": address,
            "FOLDER": str(folder),
            "SAID": str(self._said),
            "QUIET": str(quiet),
            "KUBEADM_AT": str(kubeadm),
            "KUBECTL_AT": str(kubectl),
            "BIN": str(folder / "bin"),
            "ADMIN": str(admin),
            "API_NET": f"/proc/{os.getpid()}/ns/net",
            "UNMET": ",".join(UNMET),
            "TREE": str(ROOT),
            "KBPF_TREE": str(folder / "tree"),
        }

    def put(self, name: str, text: str) -> None:
        """Sets a file that a stand-in returns: containerd.toml, or one that curl downloads."""
        (self._folder / name).write_text(text)

    def run(self, script: str, *arguments: str, fail: str = "nothing") -> "subprocess.CompletedProcess[str]":
        """Runs one of the scripts. A call that begins with `fail` fails; "after kubeadm ..." fails
        once kubeadm has done everything.
        """
        self._said.write_text("")
        return subprocess.run(
            [
                "unshare",
                "--mount",
                "--net",
                "sh",
                "-c",
                ENTER,
                "sh",
                str(self._folder / "tree" / PROVISION / script),
                *arguments,
            ],
            env={**self._environment, "FAIL": fail},
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE,
        )

    @property
    def said(self) -> list[str]:
        return self._said.read_text().splitlines()

    def file(self, path: str) -> Path:
        """The path of a file of the machine, below a folder of OWN."""
        return self._folder / path.removeprefix("/")

    def out(self, command: str) -> str:
        return (self._folder / f"{command}.out").read_text()

    def yaml(self, command: str) -> str:
        return (self._folder / f"{command}.yaml").read_text()


def _stand_in(name: str) -> str:
    return STAND_IN.replace("NAME", name)

# SPDX-License-Identifier: Apache-2.0
"""Debian's kernels, fetched with apt and unpacked into a cache; nothing is installed.

Each family comes from one suite, with a private apt configuration that leaves the machine's lists
and sources alone. The current version is the one that the suite's metapackage depends on. A fetched
kernel stays in use until `fetch(..., refresh=True)`.
"""

import fcntl
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.build.go_build import cache

MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
SUITES = {"5.10": "bullseye", "6.1": "bookworm", "6.12": "trixie", "newest": "sid"}
METAPACKAGE = "linux-image-amd64"
QUICK = ("5.10", "newest")
"""Kernels that `make test` boots."""
PARTS = re.compile(r"linux-(?:image|binary|modules)-[0-9]\S*-amd64")
"""Packages that contain a kernel: one up to 6.12, three since 7.x."""
APT_SECONDS = 600


class FetchError(Exception):
    """A kernel is unavailable: what happened, and the last lines of the failed command."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel. `release` is the output of `uname -r`; `image` is booted, and its modules
    are found from there.
    """

    family: str
    release: str
    image: Path


def fetch(family: str, refresh: bool = False) -> Kernel:
    """The kernel of a family; downloads the suite's newest if none is cached, or with `refresh`."""
    folder = cache() / "kernels" / family
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".lock"):
        known = _unpacked(family, folder)
        if known is not None and not refresh:
            return known
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
            temporary = Path(name)
            release = _unpack(SUITES[family], temporary, temporary / "root")
            if not (folder / release).exists():
                (temporary / "root").rename(folder / release)
        for old in folder.iterdir():
            if old.is_dir() and old.name != release:
                shutil.rmtree(old)
        made = _unpacked(family, folder)
    assert made is not None
    return made


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unpacked(family: str, folder: Path) -> Kernel | None:
    for image in sorted(folder.glob("[0-9]*/boot/vmlinuz-*")):
        return Kernel(family, image.name.removeprefix("vmlinuz-"), image)
    return None


def _unpack(suite: str, work: Path, root: Path) -> str:
    """Downloads and unpacks the suite's kernel below `root`; returns its release."""
    apt = _Apt(suite, work / "apt")
    apt.run("apt-get", "update")
    names = _parts(apt)
    apt.run("apt-get", "download", *names, cwd=work)
    for package in sorted(work.glob("*.deb")):
        _run("dpkg", "-x", str(package), str(root))
    if not (root / "lib").exists():
        (root / "lib").symlink_to("usr/lib")
    (modules,) = (root / "lib/modules").iterdir()
    (root / "boot").mkdir(exist_ok=True)
    if (modules / "vmlinuz").exists():
        (modules / "vmlinuz").rename(root / "boot" / f"vmlinuz-{modules.name}")
    _run("depmod", "-b", str(root), modules.name)
    return modules.name


def _parts(apt: "_Apt") -> tuple[str, ...]:
    """The packages that the metapackage depends on and that contain a part of the kernel."""
    found: list[str] = []
    ask = [METAPACKAGE]
    while ask:
        shown = apt.run("apt-cache", "show", "--no-all-versions", ask.pop())
        (depends,) = re.findall(r"^Depends: (.*)$", shown, re.M)[:1] or [""]
        new = [name for name in dict.fromkeys(PARTS.findall(depends)) if name not in found]
        found += new
        ask += new
    if not found:
        raise FetchError(f"{METAPACKAGE} of {apt.suite} depends on no kernel")
    return tuple(found)


class _Apt:
    """apt with one suite and separate lists."""

    def __init__(self, suite: str, folder: Path) -> None:
        self.suite = suite
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        sources = folder / "sources.list"
        sources.write_text(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n")
        self._options = [
            f"Dir::Etc::SourceList={sources}",
            "Dir::Etc::SourceParts=/dev/null",
            f"Dir::State::Lists={folder}/lists",
            f"Dir::Cache={folder}/cache",
            "APT::Architecture=amd64",
            "APT::Sandbox::User=root",
            "Acquire::Languages=none",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
            "Acquire::Retries=3",
            "APT::Update::Post-Invoke-Success=",
        ]

    def run(self, command: str, *arguments: str, cwd: Path | None = None) -> str:
        """Runs an apt command for this suite; returns its output."""
        options = [word for option in self._options for word in ("-o", option)]
        return _run(command, *options, *arguments, cwd=cwd)


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=APT_SECONDS, check=False)
    if done.returncode:
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise FetchError(f"{command[0]} {command[-1]}: {last}")
    return done.stdout

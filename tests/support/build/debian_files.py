# SPDX-License-Identifier: Apache-2.0
"""Files of Debian's packages, unpacked into the cache.

For programs of a package that would bring others, start a service or change the machine if it were installed.
"""

import fcntl
import subprocess
import tempfile
from pathlib import Path

from tests.support.build.go_build import cache

APT = ("apt-get", "-qq", "-o", "APT::Sandbox::User=root")
FETCH_SECONDS = 600


def fetch(packages: str, *files: str) -> Path:
    """The folder with these files of the packages, downloaded if necessary; the first package names it. The files are
    patterns below the root, each of one file. CalledProcessError with apt's output if that fails.
    """
    folder = cache() / packages.split(maxsplit=1)[0]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(any(folder.glob(Path(file).name)) for file in files):
            _fetch(folder, packages.split(), files)
    return folder


def systemd_resolved() -> Path:
    """The folder with systemd-resolved and its library."""
    return fetch(
        "systemd-resolved libsystemd-shared",
        "*lib/systemd/systemd-resolved",
        "usr/lib/*/systemd/libsystemd-shared-*.so",
    )


def _fetch(folder: Path, packages: list[str], files: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
        new = Path(name)
        try:
            _run(*APT, "download", *packages, folder=new)
        except subprocess.CalledProcessError:  # old package lists name versions that no longer exist
            _run(*APT, "update", folder=new)
            _run(*APT, "download", *packages, folder=new)
        for package in new.glob("*.deb"):
            _run("dpkg-deb", "-x", str(package), "root", folder=new)
        for file in files:
            (found,) = new.glob(f"root/{file}")
            found.rename(folder / found.name)


def _run(*command: str, folder: Path) -> None:
    subprocess.run(command, cwd=folder, stdout=2, check=True, timeout=FETCH_SECONDS)

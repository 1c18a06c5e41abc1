# SPDX-License-Identifier: Apache-2.0
"""promtool, which tests the alerts and the scrape job, and prometheus, which reads the pages of
metrics: Debian's, unpacked into the cache.

They are two files of 160 MB in the package `prometheus` (37 MB to download), and need no other file
of it. Installing the package would add a dozen packages for its web pages and start a Prometheus on
port 9090 of the machine. Those in PATH are used instead if there are any.

`python -m tests.support.build.prometheus` downloads them and prints their paths.
"""

import fcntl
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.support.build.go_build import cache

PACKAGE = "prometheus"
PROGRAMS = ("promtool", "prometheus")
APT = ("apt-get", "-qq", "-o", "APT::Sandbox::User=root")
FETCH_SECONDS = 600


def promtool() -> Path:
    """The path of promtool, downloaded if necessary. CalledProcessError with apt's output if that
    fails.
    """
    return _program("promtool")


def prometheus() -> Path:
    """The same of prometheus."""
    return _program("prometheus")


def _program(name: str) -> Path:
    if path := shutil.which(name):
        return Path(path)
    folder = cache() / PACKAGE
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            _fetch(folder)
    return folder / name


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
        new = Path(name)
        try:
            _run(*APT, "download", PACKAGE, folder=new)
        except subprocess.CalledProcessError:  # old package lists name versions that no longer exist
            _run(*APT, "update", folder=new)
            _run(*APT, "download", PACKAGE, folder=new)
        (package,) = new.glob("*.deb")
        files = [f"./usr/bin/{program}" for program in PROGRAMS]
        extract = f"dpkg-deb --fsys-tarfile {package} | tar -x {' '.join(files)}"
        _run("sh", "-c", extract, folder=new)
        for program, file in zip(PROGRAMS, files, strict=True):
            (new / file).rename(folder / program)


def _run(*command: str, folder: Path) -> None:
    subprocess.run(command, cwd=folder, stdout=2, check=True, timeout=FETCH_SECONDS)


if __name__ == "__main__":
    print(promtool(), prometheus())

# SPDX-License-Identifier: Apache-2.0
"""promtool, which tests the alerts and the scrape job: Debian's, unpacked into the cache.

It is one file of 46 MB in the package `prometheus` (19 MB to download), and needs no other file of
it. Installing the package would add a dozen packages for its web pages and start a Prometheus on
port 9090 of the machine. A promtool in PATH is used instead if there is one.

`python -m tests.support.build.promtool` downloads it and prints its path.
"""

import fcntl
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.support.build.go_build import cache

PACKAGE = "prometheus"
FILE = "./usr/bin/promtool"
APT = ("apt-get", "-qq", "-o", "APT::Sandbox::User=root")
FETCH_SECONDS = 600


def promtool() -> Path:
    """The path of promtool, downloaded if necessary. CalledProcessError with apt's output if that
    fails.
    """
    if found := shutil.which("promtool"):
        return Path(found)
    folder = cache() / "promtool"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "promtool").exists():
            _fetch(folder)
    return folder / "promtool"


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
        new = Path(name)
        try:
            _run(*APT, "download", PACKAGE, folder=new)
        except (
            subprocess.CalledProcessError
        ):  # old package lists name versions that no longer exist
            _run(*APT, "update", folder=new)
            _run(*APT, "download", PACKAGE, folder=new)
        (package,) = new.glob("*.deb")
        _run("sh", "-c", f"dpkg-deb --fsys-tarfile {package} | tar -x {FILE}", folder=new)
        (new / FILE).rename(folder / "promtool")


def _run(*command: str, folder: Path) -> None:
    subprocess.run(command, cwd=folder, stdout=2, check=True, timeout=FETCH_SECONDS)


if __name__ == "__main__":
    print(promtool())

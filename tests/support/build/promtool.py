"""promtool, which tries the alerts and reads the scrape job: Debian's, unpacked into the cache.

It is one file of 46 MB in the package `prometheus` (19 MB to fetch), and needs nothing else of it.
Installing that would bring a dozen packages of a web page, and start a Prometheus on port 9090 of
whoever runs the tests. A promtool that is on the PATH is taken as it is.

`python -m tests.support.build.promtool` fetches it and prints where it is.
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
    """Where it is; fetched if it is nowhere. CalledProcessError, with apt's words, if it cannot."""
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
        except subprocess.CalledProcessError:  # an old list names versions that are gone
            _run(*APT, "update", folder=new)
            _run(*APT, "download", PACKAGE, folder=new)
        (package,) = new.glob("*.deb")
        _run("sh", "-c", f"dpkg-deb --fsys-tarfile {package} | tar -x {FILE}", folder=new)
        (new / FILE).rename(folder / "promtool")


def _run(*command: str, folder: Path) -> None:
    """To its end; what it says goes to stderr."""
    subprocess.run(command, cwd=folder, stdout=2, check=True, timeout=FETCH_SECONDS)


if __name__ == "__main__":
    print(promtool())

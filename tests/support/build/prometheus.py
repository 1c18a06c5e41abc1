# SPDX-License-Identifier: Apache-2.0
"""promtool, which tests the alerts and the scrape job, and prometheus, which reads the pages of
metrics: Debian's, unpacked into the cache.

They are two files of 160 MB in the package `prometheus` (37 MB to download), and need no other file
of it. Installing the package would add a dozen packages for its web pages and start a Prometheus on
port 9090 of the machine. Those in PATH are used instead if there are any.

`python -m tests.support.build.prometheus` downloads them and prints their paths.
"""

import shutil
from pathlib import Path

from tests.support.build import debian_files

PROGRAMS = ("promtool", "prometheus")


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
    return debian_files.fetch("prometheus", *(f"usr/bin/{program}" for program in PROGRAMS)) / name


if __name__ == "__main__":
    print(promtool(), prometheus())

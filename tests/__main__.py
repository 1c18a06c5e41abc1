# SPDX-License-Identifier: Apache-2.0
"""`python -m tests`: what `make test` runs once everything is built: all tests in three
processes, then the quick tests in other kernels, then the failures once more.

The emulated kernels need every processor, so they do not run beside tests that wait for something.
Arguments are passed to pytest; with any, only pytest runs, in one process. Exits with 1 if anything
failed.
"""

import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

PYTEST = (sys.executable, "-m", "pytest")
IN_PARALLEL = ("-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
"""Tests wait for a third of their time, so three processes keep two processors busy. A file's tests
share fixtures, so they run in one process. conftest.py has the order of files.
"""
REPORT = Path("build/tests.xml")
KERNELS = (sys.executable, "-m", "tests.kernels", "--quick")


def main() -> int:
    """Returns the exit code."""
    if sys.argv[1:]:
        return subprocess.call([*PYTEST, *sys.argv[1:]])
    REPORT.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the guests would outlive us
    code = run(*PYTEST, *IN_PARALLEL, f"--junit-xml={REPORT}")
    guests_code = run(*KERNELS)
    if code:
        print("pytest failed:", *failures(REPORT), sep="\n", flush=True)
    return int(bool(code or guests_code))


def run(*command: str) -> int:
    """Returns the exit code of a command, which ends when this process is asked to."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        finally:
            process.terminate()  # no effect if it has ended


def failures(report: Path) -> Iterator[str]:
    """The name and the message of each failed test in a JUnit report; none if pytest crashed."""
    if not report.exists():
        return
    for case in ET.parse(report).iter("testcase"):
        for failure in (*case.iter("failure"), *case.iter("error")):
            yield f"{case.get('classname')}::{case.get('name')}: {failure.get('message')}"


if __name__ == "__main__":
    sys.exit(main())

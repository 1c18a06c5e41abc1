# SPDX-License-Identifier: Apache-2.0
"""`python -m tests`: what `make test` runs once everything is built: all tests in three
processes, and beside them the quick tests in other kernels.

The guests' output is printed at the end. Arguments are passed to pytest; with any, only pytest
runs, in one process. Exits with 1 if anything failed.
"""

import signal
import subprocess
import sys
import tempfile

PYTEST = (sys.executable, "-m", "pytest")
IN_PARALLEL = ("-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
"""Tests wait for a third of their time, so three processes keep two processors busy. A file's tests
share fixtures, so they run in one process. conftest.py has the order of files.
"""
KERNELS = (sys.executable, "-m", "tests.kernels", "--quick")


def main() -> int:
    """Returns the exit code."""
    if sys.argv[1:]:
        return subprocess.call([*PYTEST, *sys.argv[1:]])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the guests would outlive us
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        subprocess.Popen(KERNELS, stdout=output, stderr=subprocess.STDOUT) as guests,
    ):
        try:
            code = subprocess.call([*PYTEST, *IN_PARALLEL])
            print("waiting for the other kernels", flush=True)
            guests_code = guests.wait()
        finally:
            guests.terminate()  # no effect if they have ended
        output.seek(0)
        print(output.read(), end="", flush=True)
    if code:
        print("pytest failed, see above", flush=True)
    return int(bool(code or guests_code))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""A few of Kubernetes' own tests, with kbpf as the DaemonSet of manifests/ on two nodes with a real
kubelet. `make conformance` runs all of them.
"""

import subprocess
import sys

import pytest

from tests.conformance import report

SECONDS = 1500


@pytest.mark.timeout(SECONDS + 60)
def test_the_short_list_passes():
    command = [sys.executable, "-m", "tests.conformance", "--short", "--procs=3"]
    done = subprocess.run(
        command, cwd=report.ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr

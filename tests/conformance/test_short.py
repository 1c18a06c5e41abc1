# SPDX-License-Identifier: Apache-2.0
"""A few of Kubernetes' own tests, with kbpf as the DaemonSet of manifests/ on two nodes with a real
kubelet. `make conformance` runs all of them.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import report
from tests.conformance.cluster.layout import CLUSTERS, PREFIX, folder_of
from tests.conformance.cluster.machines import cgroup_roots
from tests.support.lab.lab import until

SECONDS = 3600
COMMAND = [sys.executable, "-m", "tests.conformance", "--short", "--procs=3"]

pytestmark = pytest.mark.timeout(SECONDS)


def left_behind(pid: int) -> list[Path]:
    """What the whole machine can see of the cluster of a run."""
    seen = [*cgroup_roots(), Path("/run/netns")]
    found = [path for folder in seen for path in folder.glob(f"{PREFIX}{pid}-*")]
    return [*found, *CLUSTERS.glob(str(pid))]


def test_the_short_list_passes_and_nothing_is_left():
    with subprocess.Popen(COMMAND, cwd=report.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        output = run.stdout.read()
    print(output)
    assert run.returncode == 0, output[-3000:]
    assert left_behind(run.pid) == []


def test_an_interrupted_run_leaves_nothing():
    with subprocess.Popen([*COMMAND, "--proxy=kbpf-process"], cwd=report.ROOT) as run:
        node = folder_of(str(run.pid)) / "m" / "node1"
        until("a node exists", lambda: node.exists() or run.poll() is not None)
        run.send_signal(signal.SIGTERM)
    assert run.returncode == 130
    assert left_behind(run.pid) == []

# SPDX-License-Identifier: Apache-2.0
"""sandbox.run(): what its child does to others, and what happens if it does not end."""

import os
import threading
from pathlib import Path

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.system import sandbox


def test_a_child_that_does_not_end_is_killed(monkeypatch):
    children: list[int] = []
    fork = os.fork

    def noted() -> int:
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", noted)
    with pytest.raises(KernelError, match="has not finished within 1 s"):
        sandbox.run(threading.Event().wait, new_netns=False, seconds=1.0)
    (child,) = children
    assert not Path(f"/proc/{child}").exists()


def test_a_long_result_within_the_time():
    assert sandbox.run(lambda: "x" * (1 << 20), new_netns=False, seconds=60) == "x" * (1 << 20)


def test_the_kernel_kills_the_child_before_the_processes_of_its_cgroup():
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    assert sandbox.run(score.read_text, new_netns=False) == "1000\n"
    assert score.read_text() == before

# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo` as its users start it: its output, its exit status, and that nothing is left
behind.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from kbpf.kernel.system import mounts
from tests.support.lab.lab import cgroup2, until

START_SECONDS = 120.0
BACKENDS = ("backend-1", "backend-2", "backend-3")


def traces(pid: int) -> list[str]:
    """All files and processes with the name of the demo of this process id."""
    name = f"kbpf-demo-{pid}"
    places = (Path("/run/netns"), cgroup2(), mounts.BPF_FS, Path(tempfile.gettempdir()))
    found = [str(path) for place in places for path in place.glob(f"{name}*")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if name.encode() in (process / "cmdline").read_bytes():
                found.append(str(process))
        except OSError:
            continue
    return found


def demo(*arguments: str, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kbpf", "demo", "--cache-dir", str(cache), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KBPF_LOG_FORMAT": "json", "KBPF_PIN_DIR": "/not/used"},
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs are compiled by the first demo."""
    return tmp_path_factory.mktemp("demo-cache")


@pytest.fixture
def live(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A live demo, which runs until it is ended; ended after the test at the latest."""
    child = demo(cache=cache)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
        child.communicate(timeout=START_SECONDS)


def line_with(stream: IO[str], word: str) -> str:
    for line in stream:
        if word in line:
            return line
    raise AssertionError(f"it ended without {word!r}")


def test_once_reaches_every_backend_and_leaves_no_traces(cache: Path):
    child = demo("--once", "-o", "json", cache=cache)
    out, err = child.communicate(timeout=START_SECONDS)
    assert (child.returncode, err) == (0, "")
    seen = json.loads(out)
    assert (seen["service"], seen["requests"], seen["failed"]) == ("10.96.0.10:80", 300, 0)
    assert tuple(seen["backends"]) == BACKENDS
    assert sum(seen["backends"].values()) == 300
    assert all(count > 50 for count in seen["backends"].values())  # 300 uniform choices
    assert (seen["udp"]["requests"], seen["udp"]["failed"]) == (30, 0)
    assert 0 < seen["seconds"] < START_SECONDS
    assert seen["problems"] == []
    assert traces(child.pid) == []


def test_once_prints_the_distribution_as_text(cache: Path):
    child = demo("--once", "--requests", "60", cache=cache)
    out, err = child.communicate(timeout=START_SECONDS)
    assert (child.returncode, err) == (0, "")
    assert "60 requests to 10.96.0.10:80" in out
    assert all(name in out for name in BACKENDS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_live_demo_with_status_0(
    live: subprocess.Popen[str], number: signal.Signals
):
    line_with(live.stdout, "three backends serve")
    assert traces(live.pid)
    live.send_signal(number)
    _, err = live.communicate(timeout=START_SECONDS)
    assert (live.returncode, err) == (0, "")
    assert traces(live.pid) == []


def test_the_live_demo_prints_changes_of_backends(live: subprocess.Popen[str]):
    line_with(live.stdout, "backend-4 added")
    line = line_with(live.stdout, "backend-4 2")  # about a quarter
    assert " 0 failed" in line
    line_with(live.stdout, "backend-2 terminating")
    line = line_with(live.stdout, "answered")
    assert "backend-2 " not in line
    assert " 0 failed" in line


def test_interrupting_once_exits_with_130(cache: Path):
    child = demo("--once", "--requests", "100000000", cache=cache)
    until("the demo runs", lambda: traces(child.pid), START_SECONDS)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=START_SECONDS)
    assert (child.returncode, out) == (130, "")
    assert traces(child.pid) == []


def test_the_next_demo_removes_the_traces_of_a_killed_one(live: subprocess.Popen[str], cache: Path):
    line_with(live.stdout, "three backends serve")
    live.kill()
    os.waitid(
        os.P_PID, live.pid, os.WEXITED | os.WNOWAIT
    )  # a zombie keeps its id: nothing is removed yet
    processes = [trace for trace in traces(live.pid) if trace.startswith("/proc")]
    until("its children died with it", lambda: not any(map(os.path.exists, processes)))
    assert traces(live.pid)
    live.wait()
    child = demo("--once", cache=cache)
    assert child.communicate(timeout=START_SECONDS)[1] == ""
    assert child.returncode == 0
    assert traces(live.pid) == []


def test_two_demos_run_concurrently(live: subprocess.Popen[str], cache: Path):
    line_with(live.stdout, "three backends serve")
    child = demo("--once", "-o", "json", cache=cache)
    out, _ = child.communicate(timeout=START_SECONDS)
    assert child.returncode == 0
    assert json.loads(out)["failed"] == 0
    assert "0 failed" in line_with(live.stdout, "answered")
    assert traces(live.pid)


def test_an_agent_that_ends_fails_the_demo(cache: Path):
    child = demo("--once", "--requests", "100000000", cache=cache)
    began = time.monotonic()

    def agent() -> list[str]:
        return [
            trace
            for trace in traces(child.pid)
            if trace.startswith("/proc") and b"\0run\0" in Path(trace, "cmdline").read_bytes()
        ]

    until("the agent runs", lambda: agent() or child.poll() is not None, START_SECONDS)
    (found,) = agent()
    os.kill(int(Path(found).name), signal.SIGKILL)
    out, err = child.communicate(timeout=START_SECONDS)
    assert (child.returncode, out) == (1, "")
    assert "the agent exited with -9" in err
    assert time.monotonic() - began < START_SECONDS
    assert traces(child.pid) == []


def test_a_folder_that_is_not_a_cgroup_exits_with_1(tmp_path: Path, cache: Path):
    child = demo("--once", "--cgroup", str(tmp_path), cache=cache)
    _, err = child.communicate(timeout=START_SECONDS)
    assert child.returncode == 1
    assert "cgroup v2" in err
    assert list(tmp_path.iterdir()) == []
    assert traces(child.pid) == []

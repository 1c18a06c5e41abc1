# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo` as its users start it: its output, its exit status, and that nothing is left
behind.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from kbpf.kernel.system import mounts, pods
from tests.support.lab.lab import cgroup2, until

START_SECONDS = 500
BACKENDS = ("backend-1", "backend-2", "backend-3")


def traces(pid: int) -> list[str]:
    """All files and processes with the name of the demo of this process id."""
    name = f"kbpf-demo-{pid}"
    places = (Path("/run/netns"), cgroup2(), mounts.BPF_FS, Path(tempfile.gettempdir()))
    found = [str(path) for place in places for path in place.glob(f"{name}*")]
    found += map(str, pods.LOG_FOLDER.glob(f"*_{pid:032x}"))
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
    assert (seen["failed"], seen["problems"]) == (0, [])
    assert [load["client"] for load in seen["loads"]] == ["client", "outside"] * 3
    serves, _, killed, killed_outside, refuses, refuses_outside = seen["loads"]
    assert tuple(serves["backends"]) == BACKENDS
    assert (serves["service"], serves["requests"]) == ("10.96.0.10:80", 300)
    assert all(count > 50 for count in serves["backends"].values())  # 300 uniform choices
    assert all(load["without_agent"] >= 100 for load in (killed, killed_outside))
    assert refuses_outside["service"] == "192.0.2.1:30080"
    assert seen["expected"] == refuses["expected"] + refuses_outside["expected"] > 0
    assert all(0 < load["connect_p50"] <= load["connect_p99"] for load in seen["loads"])
    assert seen["udp"]["requests"] >= 90
    assert 0 < seen["seconds"] < START_SECONDS
    assert traces(child.pid) == []
    failures, trace = (each["output"] for each in seen["explanations"])
    refusals = (refuses["expected"], "default/client"), (refuses_outside["expected"], "192.0.2.100")
    for count, client in refusals:  # as many as the clients saw
        assert re.search(rf" {count} +{client} +.* 10.244.0.14:8080 .*backend refused", failures), (
            failures
        )
    assert "pod default/client to 10.96.0.10:80/TCP" in trace
    assert re.search(rf" {refuses['expected']} +default/client +10.244.0.14:8080", trace)


def test_once_prints_the_counts_as_text(cache: Path):
    child = demo("--once", "--requests", "60", cache=cache)
    out, err = child.communicate(timeout=START_SECONDS)
    assert (child.returncode, err) == (0, "")
    assert "backend-4 refuses" in out
    assert " 0 unexpected failures, " in out.splitlines()[-1]
    assert all(name in out for name in BACKENDS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_live_demo_with_status_0(
    live: subprocess.Popen[str], number: signal.Signals
):
    line_with(live.stdout, "three backends serve")
    assert traces(live.pid)
    live.send_signal(number)
    out, err = live.communicate(timeout=START_SECONDS)
    assert (live.returncode, err) == (0, "")
    assert " 0 unexpected failures" in out
    assert traces(live.pid) == []


def test_the_live_demo_prints_changes_of_backends(live: subprocess.Popen[str]):
    line_with(live.stdout, "backend-4 added")
    line = line_with(live.stdout, "backend-4 2")  # about a quarter
    assert " 0 failed" in line
    line_with(live.stdout, "agent killed with -9")
    assert " 0 failed" in line_with(live.stdout, "answered")
    line_with(live.stdout, "backend-2 terminating")
    line = line_with(live.stdout, "answered")
    assert " 0 failed" in line
    while "backend-2 " in line:  # the agent was late; the steps are repeated
        line_with(live.stdout, "backend-2 terminating")
        line = line_with(live.stdout, "answered")


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
    assert json.loads(out)["problems"] == []
    assert "0 failed" in line_with(live.stdout, "answered")
    assert traces(live.pid)


def test_an_agent_that_ends_fails_the_demo(cache: Path):
    child = demo("--once", "--requests", "100000000", cache=cache)

    def is_agent(process: Path) -> bool:
        try:
            return b"\0run\0" in (process / "cmdline").read_bytes()
        except OSError:
            return False  # it has ended

    def agent() -> list[str]:
        return [
            trace
            for trace in traces(child.pid)
            if trace.startswith("/proc") and is_agent(Path(trace))
        ]

    (found,) = until("the agent runs", agent, START_SECONDS, state=child.poll)
    os.kill(int(Path(found).name), signal.SIGKILL)
    out, err = child.communicate(timeout=START_SECONDS)
    assert (child.returncode, out) == (1, "")
    assert "the agent exited with -9" in err
    assert traces(child.pid) == []


def test_a_folder_that_is_not_a_cgroup_exits_with_1(tmp_path: Path, cache: Path):
    child = demo("--once", "--cgroup", str(tmp_path), cache=cache)
    _, err = child.communicate(timeout=START_SECONDS)
    assert child.returncode == 1
    assert "cgroup v2" in err
    assert list(tmp_path.iterdir()) == []
    assert traces(child.pid) == []

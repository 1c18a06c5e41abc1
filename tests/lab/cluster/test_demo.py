# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo` as its users start it: its output, its exit status, and that nothing is left
behind.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
def cache(tmp_path_factory) -> Path:
    """The programs are compiled by the first demo."""
    return tmp_path_factory.mktemp("demo-cache")


@contextlib.contextmanager
def endless(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo whose first phase does not end, with an agent; ended after the block at the latest."""
    child = demo("--requests", "100000000", cache=cache)
    try:
        until("its agent runs", lambda: agents(child.pid), START_SECONDS, state=child.poll)
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
        child.communicate(timeout=START_SECONDS)


def agents(pid: int) -> list[int]:
    """The process ids of the agents of this demo."""
    found = []
    for trace in traces(pid):
        try:
            if trace.startswith("/proc") and b"\0run\0" in Path(trace, "cmdline").read_bytes():
                found.append(int(Path(trace).name))
        except OSError:
            continue  # it has ended
    return found


def test_it_reaches_every_backend_and_leaves_no_traces(cache: Path):
    """Beside another demo, which then ends with status 130 at a signal. It also removes the traces of
    one that was killed.
    """
    with endless(cache) as killed, endless(cache) as beside:
        killed.kill()
        # A zombie keeps its id: nothing is removed yet.
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        until("its agent has died with it", lambda: not agents(killed.pid))
        assert traces(killed.pid)
        killed.wait()
        child = demo("-o", "json", cache=cache)
        out, err = child.communicate(timeout=START_SECONDS)
        assert (child.returncode, err) == (0, "")
        assert traces(child.pid) == traces(killed.pid) == []
        assert agents(beside.pid)
        beside.send_signal(signal.SIGTERM)
        assert (beside.communicate(timeout=START_SECONDS)[0], beside.returncode) == ("", 130)
        assert traces(beside.pid) == []
    seen = json.loads(out)
    assert (seen["failed"], seen["problems"]) == (0, [])
    assert [load["client"] for load in seen["loads"]] == ["client", "outside"] * 3
    serves, _, killed_inside, killed_outside, refuses, refuses_outside = seen["loads"]
    assert tuple(serves["backends"]) == BACKENDS
    assert (serves["service"], serves["requests"]) == ("10.96.0.10:80", 300)
    assert all(count > 50 for count in serves["backends"].values())  # 300 uniform choices
    assert all(load["without_agent"] >= 100 for load in (killed_inside, killed_outside))
    assert refuses_outside["service"] == "192.0.2.1:30080"
    assert seen["expected"] == refuses["expected"] + refuses_outside["expected"] > 0
    assert all(0 < load["connect_p50"] <= load["connect_p99"] for load in seen["loads"])
    assert seen["udp"]["requests"] >= 90
    assert 0 < seen["seconds"] < START_SECONDS
    failures, trace = (each["output"] for each in seen["explanations"])
    refusals = (refuses["expected"], "default/client"), (refuses_outside["expected"], "192.0.2.100")
    for count, client in refusals:  # as many as the clients saw
        assert re.search(rf" {count} +{client} +.* 10.244.0.14:8080 .*backend refused", failures), failures
    assert re.search(r"pod default/client( \(10\.244\.0\.100\))? to 10\.96\.0\.10:80/TCP", trace)
    assert re.search(rf" {refuses['expected']} +default/client +10.244.0.14:8080", trace)


def test_an_agent_that_ends_fails_the_demo(cache: Path):
    with endless(cache) as child:
        (agent,) = agents(child.pid)
        os.kill(agent, signal.SIGKILL)
        out, err = child.communicate(timeout=START_SECONDS)
    assert (child.returncode, out) == (1, "")
    assert "the agent exited with -9" in err
    assert traces(child.pid) == []

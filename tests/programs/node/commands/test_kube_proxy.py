# SPDX-License-Identifier: Apache-2.0
"""A kube-proxy on the same node is named by `kbpf check`, `kbpf inspect status` and two metrics: a
process of that name, and rules that one left. tests/values/agent/test_detect.py has its answers.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.checks import neighbours
from kbpf.dataplane import reader as inspect
from kbpf.dataplane.reader import Locations
from kbpf.model.inspection import Part
from kbpf.takeover import detect
from tests.support.alone import WEB, alone
from tests.support.lab.lab import run, until
from tests.support.plane import Site


@contextlib.contextmanager
def nothing(_: Path) -> Iterator[None]:
    yield


@contextlib.contextmanager
def rules(_: Path) -> Iterator[None]:
    run("nft", "add", "table", "ip", "kube-proxy")
    yield
    run("nft", "delete", "table", "ip", "kube-proxy")


@contextlib.contextmanager
def process(folder: Path) -> Iterator[None]:
    program = folder / "kube-proxy"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "infinity"]) as running:
        name = Path(f"/proc/{running.pid}/comm")
        try:
            # the kernel sets the name after Popen() has returned
            until("it has its name", lambda: name.read_text() == "kube-proxy\n")
            yield
        finally:
            running.kill()


class Row(NamedTuple):
    what: Callable[[Path], contextlib.AbstractContextManager[None]]
    line: str
    advice: str = ""
    running: bool = False
    rules: bool = False


ROWS = [
    Row(nothing, ""),
    Row(rules, "a kube-proxy has left rules on this node, which no process updates", detect.CLEANUP_HINT, rules=True),
    Row(process, "a kube-proxy runs on this node (pid ", detect.STOP_HINT, running=True),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what.__name__)
@alone
def test_kube_proxy_is_named(site: Site, row: Row, tmp_path):
    plane = site.start(WEB)
    plane.write_status(b"")
    with row.what(tmp_path):
        check = neighbours.kube_proxy_row()
        assert (check.name, check.needed) == ("no kube-proxy", False)
        assert check.result == ("no" if row.line else "yes")
        assert check.detail.startswith(row.line or "none runs here")
        assert check.advice == row.advice
        shown = inspect.read(Locations(site.pins, tmp_path / "none"), Part.KUBE_PROXY)
        assert shown.kube_proxy.startswith(row.line)
        assert bool(shown.kube_proxy) == bool(row.line)
        plane.shared.refresh_neighbours()
        traffic = plane.shared.count_traffic(lambda: None)
        assert (traffic.kube_proxy_running, traffic.kube_proxy_rules) == (row.running, row.rules)

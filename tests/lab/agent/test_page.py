# SPDX-License-Identifier: Apache-2.0
"""The page about a node in a real browser: headless Chromium, in the node's network namespace.

With KBPF_TEST_SCREENSHOT=FILE its picture is kept, as docs/screens/page.png.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import scenario
from tests.support.cluster.scenario import FolderNode
from tests.support.lab.dial import REFUSED, Dial, check
from tests.support.lab.lab import PATIENCE, Lab, run, until
from tests.support.lab.web import get

HEALTH = 10256
URL = f"http://127.0.0.1:{HEALTH}/"
BROWSER = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1280,1000", "--hide-scrollbars",
)  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderNode]:
    folder = tmp_path_factory.mktemp("page") / "objects"
    with Lab(1, "pg", apart=True) as lab, FolderNode(lab, folder, pods=3) as made:
        made.write(scenario.documents("shop"))
        made.agent.start(extra=("--status-page", "local"))
        check(made, Dial("an answer", "a2", "10.96.0.20:80", "a1:8080 a3:8081"))
        check(made, Dial("no endpoints", "a1", "10.96.0.23:80", REFUSED))
        netns = lab.nodes[0].netns
        until("the page is made", lambda: b"Failed" in get(netns, "127.0.0.1", HEALTH, "/").body)
        yield made


def browse(node: FolderNode, folder: Path, *options: str) -> str:
    """What Chromium prints. It runs with a new profile."""
    command = (
        *("nsenter", f"--net=/run/netns/{node.agent.node.netns}", "timeout", f"{PATIENCE:.0f}"),
        *(*BROWSER, f"--user-data-dir={folder}", *options, URL),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_page_shows_services_and_failures(node: FolderNode, tmp_path: Path):
    text = browse(node, tmp_path, "--dump-dom")
    for expected in (
        "kbpf on node-1", "healthy", "10.96.0.20:80/TCP", "no endpoints", "ECONNREFUSED",
    ):  # fmt: skip
        assert expected in text, expected


def test_page_has_no_errors_in_a_browser(node: FolderNode, tmp_path: Path):
    """Blocked styles and refused resources would be lines of Chromium's console."""
    command_log = browse(node, tmp_path, "--dump-dom", "--enable-logging=stderr", "--v=0")
    assert "Content Security Policy" not in command_log


def test_picture(node: FolderNode, tmp_path: Path):
    picture = tmp_path / "page.png"
    browse(node, tmp_path / "profile", f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000, "an empty page is smaller"
    if copy := os.environ.get("KBPF_TEST_SCREENSHOT"):
        shutil.copy(picture, copy)


def test_other_clients_get_no_page(node: FolderNode):
    netns, address = node.agent.node.netns, node.agent.node.ip
    assert get(netns, address, HEALTH, "/").status == 403
    assert get(netns, address, HEALTH, "/livez").status == 200


def test_command_prints_the_same_page(node: FolderNode):
    agent = node.agent
    text = run(sys.executable, "-m", "kbpf", "page", "--pin-dir", str(agent.pin_dir))
    assert "kbpf on node-1" in text

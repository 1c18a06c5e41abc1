# SPDX-License-Identifier: Apache-2.0
"""The page of `kbpf page` in a real browser: headless Chromium.

With KBPF_TEST_SCREENSHOT=FILE its picture is kept, as docs/screens/page.png.
"""

import os
import subprocess
from pathlib import Path

from tests.support.cluster.scenario import FolderNode
from tests.support.lab.dial import REFUSED, Dial, check
from tests.support.lab.lab import PATIENCE

BROWSER = (
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
    "--hide-scrollbars",
)


def browse(node: FolderNode, folder: Path, *options: str) -> str:
    """What Chromium prints of the page. It runs with a new profile."""
    page = folder / "page.html"
    page.write_text(node.agent.kbpf("page").stdout)
    profile = f"--user-data-dir={folder / 'profile'}"
    command = ("timeout", f"{PATIENCE:.0f}", *BROWSER, profile, *options, page.as_uri())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_page_shows_services_and_failures(node: FolderNode, tmp_path):
    check(node, Dial("an answer", "a2", "10.96.0.20:80", "a1:8080 a3:8081"))
    check(node, Dial("no endpoints", "a1", "10.96.0.23:80", REFUSED))
    text = browse(node, tmp_path, "--dump-dom")
    for expected in ("kbpf on node-1", "healthy", "10.96.0.20:80/TCP", "no endpoints", "ECONNREFUSED"):
        assert expected in text, expected
    if copy := os.environ.get("KBPF_TEST_SCREENSHOT"):
        browse(node, tmp_path, f"--screenshot={copy}")

# SPDX-License-Identifier: Apache-2.0
"""The page on the health port: who may read it, and what happens while it is made."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kbpf.model.config import Config, Serving, StatusPageAccess
from kbpf.serve import status_page
from kbpf.serve.message import HttpRequest
from kbpf.serve.server import AgentServer
from kbpf.serve.status_page import StatusPage
from tests.support.lab.lab import until

ACCESS_ROWS = [
    # --status-page, the client, its header Host, the status
    ("off", "127.0.0.1", "127.0.0.1:10256", 404),
    ("local", "127.0.0.1", "127.0.0.1:10256", 200),
    ("local", "127.0.0.1", "localhost:10256", 200),
    ("local", "127.0.0.1", "", 200),
    ("local", "::1", "[::1]:10256", 200),
    ("local", "::ffff:127.0.0.1", "127.0.0.1", 200),
    ("local", "127.0.0.1", "evil.example:10256", 403),
    ("local", "127.0.0.1", "192.0.2.1:10256", 403),
    ("local", "192.0.2.7", "127.0.0.1:10256", 403),
    ("local", "::ffff:192.0.2.7", "localhost", 403),
    ("local", "fe80::1%eth0", "localhost", 403),
    ("all", "192.0.2.7", "node-1:10256", 200),
]


def ask(client: str = "127.0.0.1", host: str = "localhost") -> HttpRequest:
    return HttpRequest("GET", "/", "", host=host, client=client)


def python(code: str) -> Sequence[str]:
    return (sys.executable, "-c", code)


@pytest.mark.parametrize(("access", "client", "host", "status"), ACCESS_ROWS)
def test_who_may_read_the_page(access: str, client: str, host: str, status: int):
    serving = Serving(healthz="", metrics="", status_page=StatusPageAccess(access))
    server = AgentServer(Config(serving=serving))
    assert server._handle_healthz(ask(client, host)).status == status


def test_page_is_made_when_it_is_requested(tmp_path: Path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    code = f"open({str(gate)!r}).read(); print('<p>made</p>')"
    page = StatusPage(StatusPageAccess.LOCAL, python(code))
    page.start()
    try:
        first = page.respond(ask())
        assert first is not None
        assert b"Reading the maps" in first.body
        assert ("Refresh", "1") in first.headers
        gate.write_text("")
        until("the page is made", lambda: page.respond(ask()).body == b"<p>made</p>\n")
        headers = dict(page.respond(ask()).headers)
        assert headers["Content-Security-Policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    finally:
        page.stop()


FAULT_ROWS = [
    # the command, what the page says
    (python("raise SystemExit('kbpf: no maps are pinned')"), "kbpf: no maps are pinned"),
    (python("import sys; sys.stderr.write('a\\x1b[31m'); sys.exit(3)"), "a\\x1b[31m"),
    (python("print('x' * (9 << 20))"), "it has 9437185 bytes"),
    (("/nonexistent/kbpf",), "No such file or directory"),
]


@pytest.mark.parametrize(("command", "text"), FAULT_ROWS, ids=[row[1] for row in FAULT_ROWS])
def test_a_page_that_cannot_be_made_says_why(command: Sequence[str], text: str):
    page = StatusPage(StatusPageAccess.LOCAL, command)
    page.start()
    try:
        until("the page has failed", lambda: page.respond(ask()).status == 503)
        assert text in page.respond(ask()).body.decode()
    finally:
        page.stop()


def test_a_page_is_made_at_most_once_in_an_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert status_page.MIN_INTERVAL_S > 1
    monkeypatch.setattr(status_page, "MIN_INTERVAL_S", 3600.0)
    log = tmp_path / "runs"
    page = StatusPage(StatusPageAccess.LOCAL, python(f"open({str(log)!r}, 'a').write('x')"))
    page.start()
    try:
        until("the first one is made", lambda: (page.respond(ask()), log.exists())[1])
        for _ in range(100):
            page.respond(ask())
        assert log.read_text() in ("x", "")
    finally:
        page.stop()

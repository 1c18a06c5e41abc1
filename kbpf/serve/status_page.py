# SPDX-License-Identifier: Apache-2.0
"""The page about this node on the health port (`--status-page`), for a person with a browser.

A child process makes it (`kbpf page`), since reading the maps of a large node takes a second and a
hundred megabytes, which a probe must not wait for and the agent must not keep. The child runs only
when the page is requested, at most once in MIN_INTERVAL_S.
"""

import logging
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Final

from kbpf.errors import LastError, ObjectError, escape_unprintable
from kbpf.kernel.system import children, threads
from kbpf.model.address import is_loopback, parse_addr
from kbpf.model.config import StatusPageAccess
from kbpf.serve.message import HttpRequest, HttpResponse

log = logging.getLogger("kbpf.serve")

PATH: Final = "/"
MIN_INTERVAL_S: Final = 5.0
REFRESH_S: Final = 15
CHILD_TIMEOUT_S: Final = 30.0
MAX_PAGE_BYTES: Final = 8 << 20
HTML: Final = "text/html; charset=utf-8"
HEADERS: Final = (
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"),
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
)
WAITING: Final = b"<!DOCTYPE html>\n<title>kbpf</title>\n<p>Reading the maps of this node ...</p>\n"
FORBIDDEN: Final = HttpResponse(
    403, b"the page is for clients on this node; --status-page all opens it to others\n"
)


class StatusPage:
    """Call start() and stop() once each. `command` prints the page."""

    def __init__(self, access: StatusPageAccess, command: Sequence[str]) -> None:
        self._access, self._command = access, tuple(command)
        self._page = b""
        self._made_at = float("-inf")
        self._error = LastError()
        self._requested, self._stopping = threading.Event(), threading.Event()
        self._thread: threads.SupervisedThread | None = None

    def start(self) -> None:
        if self._access is not StatusPageAccess.OFF:
            self._thread = threads.start("page", self._run)

    def stop(self) -> None:
        self._stopping.set()
        self._requested.set()
        if self._thread is not None:
            self._thread.stop()

    def respond(self, request: HttpRequest) -> HttpResponse | None:
        """The last page, or one that says to wait. None if the page is switched off. Never
        blocks.
        """
        if self._access is StatusPageAccess.OFF:
            return None
        if self._access is StatusPageAccess.LOCAL and not is_local(request):
            return FORBIDDEN
        if time.monotonic() - self._made_at >= MIN_INTERVAL_S:
            self._requested.set()
        if self._error.text:
            return HttpResponse(503, f"{self._error.text}\n".encode())
        refresh = ("Refresh", str(REFRESH_S if self._page else 1))
        return HttpResponse(200, self._page or WAITING, HTML, (*HEADERS, refresh))

    # ---- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._requested.wait()
            self._requested.clear()
            if self._stopping.is_set():
                return
            threads.heartbeat()
            self._make()
            self._stopping.wait(MIN_INTERVAL_S)

    def _make(self) -> None:
        error = ""
        try:
            result = subprocess.run(
                self._command,
                capture_output=True,
                timeout=CHILD_TIMEOUT_S,
                check=False,
                cwd=children.WORKING_DIRECTORY,
                env=children.child_environment(),
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            error = f"cannot make the page: {escape_unprintable(str(problem))}"
        else:
            if result.returncode:
                lines = result.stderr.decode(errors="replace").strip().splitlines() or ["no reason"]
                error = f"cannot make the page: {escape_unprintable(lines[-1])}"
            elif len(result.stdout) > MAX_PAGE_BYTES:
                error = f"cannot make the page: it has {len(result.stdout)} bytes"
            else:
                self._page = result.stdout
        self._made_at = time.monotonic()
        if self._error.replace(error) and error:
            log.warning("%s", error)


def is_local(request: HttpRequest) -> bool:
    """Whether the client is on this node, and has asked for it by an address or as localhost: a
    site elsewhere, whose name points to 127.0.0.1, must not read the page in a browser here.
    """
    host = request.host.lower()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return _is_loopback(request.client) and (host in ("", "localhost") or _is_loopback(host))


def _is_loopback(text: str) -> bool:
    try:
        return is_loopback(parse_addr(text))
    except ObjectError:
        return False

"""One HTTP/1.1 connection to an API server, and how its silence is understood.

http.client and ssl (6 MB) instead of the library's urllib3 and client (30 MB). Rules:
- A peer that is gone is found by TCP: keepalive after 15 s of silence, given up after 30 s, and
  data that is not acknowledged for 30 s (TCP_USER_TIMEOUT).
- A peer that is there and mute (a hung server, a proxy that lost its backend) is found by reading:
  `silence` seconds without a byte raise Silent.
- close() ends whatever another thread is doing with the connection at once, for ever. It shuts the
  socket down through a duplicate of its descriptor, so no TLS object is touched from two threads.
  Only name resolution cannot be interrupted.
"""

import contextlib
import http.client
import socket
import ssl
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Final, TypeVar

from kbpf.errors import ObjectError, SourceError
from kbpf.model.address import parse_addr
from kbpf.source.cluster import Cluster, Login

T = TypeVar("T")

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 30.0
SO_COOKIE: Final = 57
TCP_OPTIONS: Final = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 15),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 30_000),
)
LONGEST_RETRY_AFTER: Final = 600


class Silent(SourceError):
    """Nothing came for too long."""


class Response:
    """A response whose headers have come."""

    def __init__(self, connection: "Connection", raw: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._raw = raw
        self.status = raw.status
        self.reason = raw.reason

    @property
    def retry_after(self) -> float:
        """Seconds from Retry-After; 0 when there is none (or a date, which no API server sends)."""
        text = self._raw.getheader("Retry-After", "").strip()
        return float(min(int(text), LONGEST_RETRY_AFTER)) if text.isdecimal() else 0.0

    def chunk(self) -> bytes:
        """Some bytes as they come, b"" at the clean end. Raises SourceError when cut."""
        return self._connection.guarded(lambda: self._raw.read1(1 << 16))

    def read(self) -> bytes:
        """The whole body. Raises SourceError when cut."""
        return self._connection.guarded(self._raw.read)


class Connection:
    """A connection that opens itself when needed. One thread makes requests; any may close()."""

    def __init__(self, cluster: Cluster, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._cluster = cluster
        self._answer_seconds = answer_seconds
        url = urllib.parse.urlsplit(cluster.url)
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._base = url.path
        self._http: http.client.HTTPConnection | None = None
        self._sock: socket.socket | None = None
        self._raw: http.client.HTTPResponse | None = None
        self._lock = threading.Lock()
        self._switch: socket.socket | None = None
        self._closed = False
        self._login = Login()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def close(self) -> None:
        """End everything at once; from any thread. Nothing works afterwards."""
        with self._lock:
            self._closed = True
            if self._switch is not None:
                with contextlib.suppress(OSError):  # not connected (any more)
                    self._switch.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Forget the open socket; the next request opens a new one. By the requesting thread."""
        with self._lock:
            switch, self._switch = self._switch, None
        for each in (self._raw, self._http, self._sock, switch):
            if each is not None:
                each.close()
        self._http = self._sock = self._raw = None

    def request(
        self, path: str, *, method: str = "GET", silence: float = 0.0, body: bytes | None = None
    ) -> Response:
        """The answer's head, of whatever status. Raises SourceError.

        `silence`: seconds without a byte of the body that are too long. `body`: JSON.
        """
        if self._raw is not None and not self._raw.isclosed():
            self.drop()
        kept = self._http is not None and self._http.sock is not None
        try:
            raw = self._send(method, path, body)
        except ConnectionError as error:
            self.drop()
            if not kept:
                raise self._explained(error) from error
            # The server closed the idle connection: that is no failure yet.
            raw = self.guarded(lambda: self._send(method, path, body))
        except (OSError, http.client.HTTPException) as error:
            self.drop()
            raise self._explained(error) from error
        if raw.status == 401:
            self._cluster.refused(self._login)
        if self._sock is not None:
            self._sock.settimeout(silence or self._answer_seconds)
        self._raw = raw
        return Response(self, raw)

    def guarded(self, work: Callable[[], T]) -> T:
        """work(), with what goes wrong on the wire as SourceError, and the socket dropped."""
        try:
            return work()
        except (OSError, http.client.HTTPException) as error:
            self.drop()
            raise self._explained(error) from error

    def _send(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        """The answer's head; whoever counts is told, also when there is none."""
        start, code = time.monotonic(), "<error>"
        try:
            raw = self._exchange(method, path, body)
            code = str(raw.status)
            return raw
        finally:
            if not self._closed:
                host = f"{self._host}:{self._port}"
                self._cluster.asked(host, method, code, time.monotonic() - start)

    def _exchange(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        login = self._login = self._cluster.login(lambda: self._closed)
        if self._http is None or self._http.sock is None:
            self.drop()
            self._open(login)
        assert self._http is not None
        assert self._sock is not None
        self._sock.settimeout(self._answer_seconds)
        headers = {"Accept": "application/json", "User-Agent": "kbpf"}
        if login.authorization:
            headers["Authorization"] = login.authorization
        if body is not None:
            headers["Content-Type"] = "application/json"
        self._http.request(method, self._base + path, body, headers)
        return self._http.getresponse()

    def _open(self, login: Login) -> None:
        tls = self._cluster.tls(login)
        sock = self._connect()
        if tls is not None:
            name = self._cluster.access.server_name or self._host
            try:
                sock = tls.wrap_socket(sock, server_hostname=name)
            except BaseException:
                sock.close()
                raise
        self._sock = sock
        self._http = http.client.HTTPConnection(self._host, self._port)
        self._http.auto_open = 0  # or it would open one of its own, without TLS
        self._http.sock = sock

    def _connect(self) -> socket.socket:
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        for i, (family, kind, protocol, _, address) in enumerate(found):
            sock = socket.socket(family, kind, protocol)
            try:
                with self._lock:
                    if self._closed:
                        raise ConnectionAbortedError("stopped")
                    self._switch, old = sock.dup(), self._switch
                if old is not None:
                    old.close()
                sock.settimeout(CONNECT_SECONDS)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in TCP_OPTIONS:
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
                self._announce(sock, str(address[0]))
                sock.connect(address)
                return sock
            except OSError:
                sock.close()
                if self._closed or i == len(found) - 1:
                    raise
        raise OSError("the name has no address")

    def _announce(self, sock: socket.socket, host: str) -> None:
        cookie = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), sys.byteorder)
        with contextlib.suppress(ObjectError):  # fe80::1%eth0: no Service can have it
            self._cluster.connecting(cookie, parse_addr(host), self._port)

    def _explained(self, error: Exception) -> SourceError:
        if self._closed:
            return SourceError("stopped", self._cluster.url)
        return explained(error, self._cluster.url, self._cluster.access.where)


def explained(error: Exception, url: str, where: str) -> SourceError:
    """What went wrong between us and `url`, in words; credentials come from `where`."""
    hint = "see whether it runs and whether this node can reach it"
    if where == "in-cluster":
        # Only a Service proxy makes this address work: us.
        hint = "this address is a Service itself: give --master https://HOST:PORT of the server"
    match error:
        case SourceError():
            return error
        case ssl.SSLCertVerificationError():
            what = f"its certificate is not trusted: {error.verify_message}"
            hint = f"see certificate-authority in {where}"
        case ssl.SSLError():
            what, hint = f"TLS: {error.reason or error}", ""
        case TimeoutError() if not error.errno:
            return Silent("no answer in time", url, hint)
        case http.client.IncompleteRead() | http.client.RemoteDisconnected():
            what = "the server cut the connection"
        case http.client.HTTPException():
            what = f"not an HTTP answer: {error!r}"
        case _:
            what = (getattr(error, "strerror", None) or str(error)).lower()
    return SourceError(what, url, hint)

# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 connection to an API server, with its timeouts and limits.

It uses http.client and ssl (6 MB) instead of urllib3 and the Kubernetes client (30 MB).

- A peer that is gone is detected by TCP: keepalive after 15 s of silence, closed after 30 s, and
  TCP_USER_TIMEOUT of 30 s for unacknowledged data.
- A peer that is connected but silent (a hung server, a proxy that lost its backend) is detected by
  reading: `silence_timeout` seconds without a byte raise ReadTimeout.
- A peer that never stops sending, or sends a byte now and then, hits a limit: headers have
  MAX_HEADERS_BYTES and HEADERS_TIMEOUT (including all 1xx responses before them), and a body that
  is read whole has separate limits. Only the body of a watch has none; reflector.py limits its
  lines.
- Responses may be compressed with gzip, as API servers do with lists. They are decompressed
  READ_SIZE bytes at a time, and all limits apply to the decompressed data: a page, a line, an
  object.
- close() aborts what another thread is doing with the connection, permanently. It shuts the socket
  down through a duplicate of its descriptor, so no TLS object is used by two threads. Only name
  resolution cannot be interrupted.
"""

import contextlib
import http.client
import io
import logging
import socket
import ssl
import sys
import threading
import time
import urllib.parse
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar, cast

from kbpf.errors import ObjectError, SourceError
from kbpf.model.address import parse_addr
from kbpf.source.api.credentials import Cluster, Credentials

log = logging.getLogger("kbpf.source")

T = TypeVar("T")

CONNECT_TIMEOUT: Final = 10.0
RESPONSE_TIMEOUT: Final = 30.0
HEADERS_TIMEOUT: Final = 30.0
MAX_HEADERS_BYTES: Final = 256 << 10
SO_COOKIE: Final = 57
TCP_OPTIONS: Final = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 15),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 30_000),
)
MAX_RETRY_AFTER: Final = 60
"""In seconds. API servers send 1; an absurd value must not stop the agent for long."""
NAME_MISMATCH_CODES: Final = (62, 63, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH, ..._EMAIL_MISMATCH, ..._IP_ADDRESS_MISMATCH."""
ADDRESS_PLACEHOLDER: Final = "CONTROL-PLANE-ENDPOINT"
"""The placeholder for the API server's address in manifests/."""
MAX_ERROR_BYTES: Final = 64 << 10
ERROR_TIMEOUT: Final = 10.0
READ_SIZE: Final = 64 << 10
"""Bytes of a body to read at a time."""

ReserveMemory = Callable[[int], None]
"""Reserves this many bytes of memory; raises SourceError if there are too few left."""


class ReadTimeout(SourceError):
    """Nothing was received for too long."""


class ResponseLimitExceeded(SourceError):
    """The server sent more data, or sent for longer, than the limits allow."""


class _BoundedReader(io.RawIOBase):
    """Reads the bytes of one response. Raises ResponseLimitExceeded once `deadline`
    (time.monotonic()) has passed or `bytes_left` bytes have been read, and TimeoutError after
    `silence_timeout` seconds without a byte.
    """

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, silence_timeout: float) -> None:
        self._raw, self._sock = raw, sock
        self.silence_timeout = silence_timeout
        self.deadline, self.bytes_left, self.what = float("inf"), float("inf"), ""

    def set_bounds(self, seconds: float, size: float, what: str) -> None:
        """Sets new limits from now on; `what` names the data in errors."""
        self.deadline, self.bytes_left, self.what = time.monotonic() + seconds, size, what

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        seconds_left = self.deadline - time.monotonic()
        if seconds_left <= 0:
            raise ResponseLimitExceeded(f"{self.what} took too long")
        self._sock.settimeout(min(self.silence_timeout, seconds_left))
        try:
            count = self._raw.readinto(buffer)
        except TimeoutError:
            if self.silence_timeout < seconds_left:
                raise
            raise ResponseLimitExceeded(f"{self.what} took too long") from None
        self.bytes_left -= count or 0
        if self.bytes_left < 0:
            raise ResponseLimitExceeded(f"{self.what} is too long")
        return count

    def close(self) -> None:
        """Closes this reader; the socket stays open if others use it."""
        self._raw.close()
        super().close()


class _RawResponse(http.client.HTTPResponse):
    """A response whose headers, too, are read through limits."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.bounds = _BoundedReader(self.fp.detach(), sock, RESPONSE_TIMEOUT)
        self.bounds.set_bounds(HEADERS_TIMEOUT, MAX_HEADERS_BYTES, "the response header")
        self.fp = io.BufferedReader(self.bounds, READ_SIZE)


class _GzipReader:
    """Decompresses gzip members one after the other (an API server's stream has one for each
    flush). `read` returns some compressed bytes, b"" at the end. `timeout` returns the maximum
    number of seconds without output: a peer that sends empty members must not be waited for
    forever.
    """

    def __init__(self, read: Callable[[], bytes], timeout: Callable[[], float]) -> None:
        self._read, self._timeout = read, timeout
        self._member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        self._compressed = b""
        self._is_member_end = True  # the input may only end between members
        self._has_more = False

    def read1(self) -> bytes:
        """Returns up to READ_SIZE bytes, b"" at the end."""
        deadline = time.monotonic() + self._timeout()
        while True:
            if not self._compressed and not self._has_more:
                self._compressed = self._read()
                if not self._compressed:
                    if self._is_member_end:
                        return b""
                    raise http.client.IncompleteRead(b"")
            if data := self._decompress():
                return data
            if time.monotonic() > deadline:
                raise TimeoutError

    def _decompress(self) -> bytes:
        try:
            data = self._member.decompress(self._compressed, READ_SIZE)
        except zlib.error as error:
            raise http.client.HTTPException(f"not gzip: {error}") from error
        self._is_member_end, self._compressed = self._member.eof, self._member.unconsumed_tail
        # zlib may have consumed the input and still hold output
        self._has_more = len(data) == READ_SIZE
        if self._is_member_end:
            self._compressed, self._has_more = self._member.unused_data, False
            self._member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        return data


class Response:
    """A response whose headers have been read."""

    def __init__(self, connection: "ApiConnection", raw: _RawResponse) -> None:
        self._connection = connection
        self._raw = raw
        self.status = raw.status
        self.reason = raw.reason
        self._read1: Callable[[], bytes] = partial(raw.read1, READ_SIZE)
        if raw.getheader("Content-Encoding", "").strip().lower() == "gzip":
            self._read1 = _GzipReader(self._read1, lambda: raw.bounds.silence_timeout).read1

    @property
    def retry_after(self) -> float:
        """The seconds in Retry-After; 0 if there is none (or a date, which API servers do not
        send).
        """
        text = self._raw.getheader("Retry-After", "").strip()
        if not text.isdecimal():
            return 0.0
        return float(min(int(text[:10]), MAX_RETRY_AFTER))  # int() raises for 4300 digits

    def read_chunk(self) -> bytes:
        """Returns some bytes as they arrive, b"" at the clean end. Raises SourceError if
        truncated.
        """
        return self._connection.translate_errors(self._read1)

    def read(
        self,
        limit: int = MAX_ERROR_BYTES,
        seconds: float = ERROR_TIMEOUT,
        what: str = "the response",
        reserve: ReserveMemory = lambda _: None,  # bodies that are short anyway
    ) -> bytearray:
        """Returns the whole body. Raises SourceError if it is truncated, is longer than `limit`
        bytes, takes more than `seconds`, or if `reserve` has no memory for it. `what` names the
        data in errors.
        """
        self._raw.bounds.set_bounds(seconds, limit + READ_SIZE, what)
        body = bytearray()

        def read_body() -> bytearray:
            while data := self._read1():
                if len(body) + len(data) > limit:
                    raise ResponseLimitExceeded(f"{what} has more than {limit >> 10} KiB")
                reserve(len(data))
                body.extend(data)
            if self._raw.length:  # read1() ignores a truncated body
                raise http.client.IncompleteRead(b"", self._raw.length)
            self._finish()
            return body

        try:
            return self._connection.translate_errors(read_body)
        except SourceError:
            body.clear()  # the traceback would keep it, while its reserved memory is released
            raise

    def read_error_body(self) -> bytes:
        """Returns the start of the body, up to MAX_ERROR_BYTES within ERROR_TIMEOUT. Never
        raises.
        """
        body = bytearray()
        with contextlib.suppress(SourceError):
            self._raw.bounds.set_bounds(ERROR_TIMEOUT, float("inf"), "the body of an error")
            while len(body) < MAX_ERROR_BYTES and (data := self.read_chunk()):
                body.extend(data)
            self._finish()
        return bytes(body[:MAX_ERROR_BYTES])

    def _finish(self) -> None:
        """Frees the connection for the next request; read1() does that only for chunked bodies."""
        if self._raw.length == 0:
            self._raw.read()


class ApiConnection:
    """A connection that opens itself when needed. One thread makes requests; any may call
    close().
    """

    def __init__(self, cluster: Cluster, *, response_timeout: float = RESPONSE_TIMEOUT) -> None:
        self._cluster = cluster
        self._response_timeout = response_timeout
        self._select_server()
        self._http: http.client.HTTPConnection | None = None
        self._sock: socket.socket | None = None
        self._raw: _RawResponse | None = None
        self._lock = threading.Lock()
        self._shutdown_sock: socket.socket | None = None
        self.is_closed = False
        self._credentials = Credentials()

    def _select_server(self) -> None:
        """Selects the server to connect to next."""
        self._url = self._cluster.url
        url = urllib.parse.urlsplit(self._url)
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._base = url.path

    def close(self) -> None:
        """Aborts everything at once; all later requests fail. Thread-safe."""
        with self._lock:
            self.is_closed = True
            if self._shutdown_sock is not None:
                with contextlib.suppress(OSError):  # not connected (any more)
                    self._shutdown_sock.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Drops the open socket; the next request opens a new one. For the requesting thread
        only.
        """
        with self._lock:
            shutdown_sock, self._shutdown_sock = self._shutdown_sock, None
        for closable in (self._raw, self._http, self._sock, shutdown_sock):
            if closable is not None:
                closable.close()
        self._http = self._sock = self._raw = None

    def request(
        self,
        path: str,
        *,
        method: str = "GET",
        silence_timeout: float = 0.0,
        body: bytes | None = None,
        accept: str = "application/json",
    ) -> Response:
        """Returns the response with its headers read, whatever its status. Raises SourceError.

        `silence_timeout`: maximum seconds without a byte of the body. `body`: JSON. `accept`: the
        header.
        """
        if self._raw is not None and not self._raw.isclosed():
            self.drop()
        was_open = self._http is not None and self._http.sock is not None

        def send() -> _RawResponse:
            try:
                return self._send(method, path, body, accept)
            except ConnectionError:
                if not was_open:
                    raise
                # The server closed the idle connection: that is not a failure yet.
                self.drop()
                return self._send(method, path, body, accept)

        raw = self.translate_errors(send)
        if raw.status == 401:
            self._cluster.reject_credentials(self._credentials)
        raw.bounds.set_bounds(float("inf"), float("inf"), "")
        raw.bounds.silence_timeout = silence_timeout or self._response_timeout
        self._raw = raw
        return Response(self, raw)

    def translate_errors(self, work: Callable[[], T]) -> T:
        """Runs `work`; turns network errors into SourceError and drops the socket."""
        try:
            return work()
        except (OSError, http.client.HTTPException, ResponseLimitExceeded) as error:
            self.drop()
            raise self._explain_error(error) from error

    def _send(self, method: str, path: str, body: bytes | None, accept: str) -> _RawResponse:
        """Sends a request and reads the response header. Reports it to `on_request`, even if it
        failed.
        """
        start, code = time.monotonic(), "<error>"
        try:
            raw = self._exchange(method, path, body, accept)
            code = str(raw.status)
            return raw
        finally:
            if not self.is_closed:
                host, seconds = f"{self._host}:{self._port}", time.monotonic() - start
                log.debug("request %s %s host=%s code=%s ms=%.1f", method, path, host, code, seconds * 1000)
                self._cluster.on_request(host, method, code, seconds)

    def _exchange(self, method: str, path: str, body: bytes | None, accept: str) -> _RawResponse:
        credentials = self._credentials = self._cluster.get_credentials(lambda: self.is_closed)
        if self._http is None or self._http.sock is None:
            self.drop()
            self._select_server()
            try:
                self._open(credentials)
            except OSError:
                self._cluster.mark_unreachable(self._url)
                raise
        assert self._http is not None
        assert self._sock is not None
        self._sock.settimeout(self._response_timeout)
        headers = {"Accept": accept, "Accept-Encoding": "gzip", "User-Agent": "kbpf"}
        if credentials.authorization:
            headers["Authorization"] = credentials.authorization
        if body is not None:
            headers["Content-Type"] = "application/json"
        self._http.request(method, self._base + path, body, headers)
        return cast("_RawResponse", self._http.getresponse())

    def _open(self, credentials: Credentials) -> None:
        tls = self._cluster.get_tls_context(credentials)
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
        self._http.response_class = self._make_response  # type: ignore[assignment]
        self._http.auto_open = 0  # otherwise it would open another connection, without TLS
        self._http.sock = sock

    def _make_response(self, sock: socket.socket, *args: Any, **options: Any) -> _RawResponse:
        raw = _RawResponse(sock, *args, **options)
        raw.bounds.silence_timeout = self._response_timeout
        return raw

    def _connect(self) -> socket.socket:
        addresses = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        for i, (family, kind, protocol, _, address) in enumerate(addresses):
            sock = socket.socket(family, kind, protocol)
            try:
                with self._lock:
                    if self.is_closed:
                        raise ConnectionAbortedError("stopped")
                    self._shutdown_sock, old = sock.dup(), self._shutdown_sock
                if old is not None:
                    old.close()
                sock.settimeout(CONNECT_TIMEOUT)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in TCP_OPTIONS:
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
                self._report_connect(sock, str(address[0]))
                sock.connect(address)
                return sock
            except OSError:
                sock.close()
                if self.is_closed or i == len(addresses) - 1:
                    raise
        raise OSError("the host name has no address")

    def _report_connect(self, sock: socket.socket, host: str) -> None:
        cookie = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), sys.byteorder)
        # an address such as fe80::1%eth0, which no Service can have
        with contextlib.suppress(ObjectError):
            self._cluster.on_connect(cookie, parse_addr(host), self._port)

    def _explain_error(self, error: Exception) -> SourceError:
        if self.is_closed:
            return SourceError("stopped", self._url)
        return explain_error(error, self._url, self._cluster.access.where)


class EventSink:
    """Posts the agent's Events, on a connection that is opened on first use. One thread posts; any
    thread may call close().
    """

    def __init__(self, cluster: Cluster) -> None:
        self._connection = ApiConnection(cluster)

    def post(self, path: str, body: bytes) -> int:
        """Posts this JSON and returns the HTTP status. Raises SourceError."""
        response = self._connection.request(path, method="POST", body=body)
        response.read_error_body()
        return response.status

    def close(self) -> None:
        """Aborts the current request; post() fails from now on."""
        self._connection.close()


def explain_error(error: Exception, url: str, where: str) -> SourceError:
    """Explains an error between us and `url`; the credentials come from `where`."""
    hint = "check that it runs and that this node can reach it"
    if where == "in-cluster":
        # Only a Service proxy, that is kbpf itself, makes this address reachable.
        hint = "this address is itself a Service; give --master https://HOST:PORT of the server"
    match error:
        case ResponseLimitExceeded():
            return ResponseLimitExceeded(error.what, url, "is this a Kubernetes API server, and is it healthy?")
        case SourceError():
            return error
        case ssl.SSLError():
            what, hint = _explain_tls_error(error, where)
        case TimeoutError() if not error.errno:
            return ReadTimeout("no response in time", url, hint)
        case http.client.IncompleteRead() | http.client.RemoteDisconnected():
            what = "the server closed the connection"
        case http.client.HTTPException():
            what = f"not an HTTP response: {error!r}"
        case socket.gaierror() if ADDRESS_PLACEHOLDER in url.upper():
            what = "the placeholder of the manifests is still in place"
            hint = f"set the server in {where} to the API server's address"
        case ConnectionResetError() if url.startswith("http:"):
            what, hint = "connection reset by peer", "does it require https://?"
        case _:
            what = (getattr(error, "strerror", None) or str(error)).lower()
    return SourceError(what, url, hint)


def _explain_tls_error(error: ssl.SSLError, where: str) -> tuple[str, str]:
    """Returns what went wrong and what to do."""
    match error:
        case ssl.SSLCertVerificationError() if error.verify_code in NAME_MISMATCH_CODES:
            what = f"its certificate is for another name: {error.verify_message}"
            return what, f"set the server in {where} to a name or address of the certificate"
        case ssl.SSLCertVerificationError():
            what = f"its certificate is not trusted: {error.verify_message}"
            return what, f"check certificate-authority in {where}"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
            return "the server does not use TLS", "is the port wrong, or is http:// meant?"
        case _:
            return f"TLS: {error.reason or error}", ""

# SPDX-License-Identifier: Apache-2.0
"""An HTTP/1.1 server that follows a test's script: responses, closes, resets, silence.

Each request gets the next step of the script, in its connection's thread. After the last step a
request gets the headers of a watch and then silence, or `then`. It imports nothing of kbpf.
"""

import contextlib
import http.client
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

from tests.support.faults import fault_wire as wire


class Request(NamedTuple):
    """A request. `query` has the last value of each name, `peer` is the subject of the client's TLS
    certificate, `port` is the client's port.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer: str
    port: int


class Exchange:
    """One request and the methods to answer it."""

    def __init__(self, sock: socket.socket, request: Request, closing: threading.Event) -> None:
        self.sock = sock
        self.request = request
        self._closing = closing
        self.open = True

    def answer(self, status: int, body: Any, **headers: str) -> None:
        """Send a complete response; the connection stays open."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.sock.sendall(_head(status, {"Content-Length": str(len(data))} | headers) + data)

    def head(self, status: int, **headers: str) -> None:
        """Send the status line and headers only (``Retry_After`` is Retry-After)."""
        self.sock.sendall(_head(status, headers))

    def watch(self, *lines: Any) -> None:
        """Start a chunked response with these lines, sent at once, so that a client with a short
        time-out gets all of them.
        """
        head = _head(200, {"Transfer_Encoding": "chunked"})
        self.sock.sendall(head + b"".join(map(_chunk, lines)))

    def line(self, line: Any) -> None:
        """Send one line of a watch; bytes are sent unchanged, without a newline added."""
        self.sock.sendall(_chunk(line))

    def end(self) -> None:
        """End a chunked response regularly; the connection stays open."""
        self.sock.sendall(b"0\r\n\r\n")

    def cut(self) -> None:
        self.open = False
        self.sock.close()

    def reset(self) -> None:
        """Close the connection with a RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.cut()

    def closing(self, seconds: float) -> bool:
        """Wait up to this many seconds for the end of the test; returns whether it ends."""
        return self._closing.wait(seconds) if seconds else self._closing.is_set()

    def hang(self) -> None:
        """Send nothing more until the test ends."""
        self._closing.wait()
        self.open = False


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def _chunk(line: Any) -> bytes:
    return wire.chunk(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")


Step = Callable[[Exchange], None]


def quiet(exchange: Exchange) -> None:
    """A step: a watch without events."""
    exchange.watch()
    exchange.hang()


class ScriptedServer:
    """The server, a context manager. `script` may be changed while it runs."""

    def __init__(
        self,
        *script: Step,
        tls: ssl.SSLContext | None = None,
        then: Step = quiet,
        listener: socket.socket | None = None,
    ) -> None:
        self.script = list(script)
        self._then = then
        self.requests: list[Request] = []
        self.times: list[float] = []
        self.faults: list[BaseException] = []
        self._tls = tls
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.url = f"{'https' if tls else 'http'}://{host}:{port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        assert not self.faults, self.faults

    def wait(self, requests: int, seconds: float = 240.0) -> None:
        """Wait until this many requests have been received."""
        deadline = time.monotonic() + seconds
        while len(self.requests) < requests:
            assert time.monotonic() < deadline, (
                f"within {seconds:.0f} s {len(self.requests)} requests of {requests} have come: "
                + ", ".join(f"{one.path}?{one.query}" for one in self.requests[-3:])
            )
            time.sleep(0.005)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            peer, port = "", sock.getpeername()[1]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                peer = str((sock.getpeercert() or {}).get("subject", ""))
            with sock, sock.makefile("rb") as file:
                while (request := _read(file, peer, port)) is not None:
                    with self._lock:
                        self.times.append(time.monotonic())
                        self.requests.append(request)  # last: wait() looks at these
                        step = self.script.pop(0) if self.script else self._then
                    exchange = Exchange(sock, request, self._closing)
                    step(exchange)
                    if not exchange.open:
                        return
        except OSError:
            pass  # the client is gone
        except BaseException as fault:
            self.faults.append(fault)


def _read(file: Any, peer: str, port: int) -> Request | None:
    try:
        incoming = wire.read_request(file)
    except (ValueError, http.client.HTTPException):
        return None
    if incoming is None:
        return None
    target = urlsplit(incoming.target)
    query = {name: values[-1] for name, values in parse_qs(target.query).items()}
    return Request(incoming.method, target.path, query, incoming.headers, incoming.body, peer, port)

# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of the real API server that injects the faults of real clusters.

It terminates TLS with a certificate of the server's own CA, so that a client only needs another URL
(`kubeconfig`), and forwards every request unchanged. It speaks HTTP/1.1 and JSON only. Faults can be
switched from any thread at any time, and stay until their count is used up or until `heal`. While
the real server is down, clients' connections are reset.
"""

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Connection as ServerConnection
from tests.support.faults.fault_relay import Connection, Cut, Decision, HangUps, LineHook, Stream
from tests.support.faults.fault_wire import Answer, Incoming, Object
from tests.support.lab import sockets
from tests.support.lab.lab import PATIENCE

__all__ = ["Cut", "FaultProxy"]
HOST = "127.0.0.1"


@dataclass(slots=True)
class _Rule:
    """A fault of `left` more requests (None: of all), or only of requests for a streaming list."""

    decision: Decision
    left: int | None
    is_about_streaming: bool = False


class FaultProxy:
    """A context manager, or start() and stop()."""

    def __init__(self, server: ApiServer) -> None:
        self.port = 0
        self.flow = threading.Event()
        self.line_hook: LineHook | None = None
        self._changed = threading.Condition()  # guards all attributes below
        self._server = server
        self._rules: list[_Rule] = []
        self._streams: list[Stream] = []
        self._connections: set[Connection] = set()
        self._stop = threading.Event()
        self._hang_ups = HangUps()
        self._held: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._context: ssl.SSLContext | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen on a free port; once only."""
        self._held = sockets.bound(None, HOST, 0)
        self.port = self._held.getsockname()[1]
        certificate = self._server.authority.issue(f"proxy-{self.port}", {HOST})
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.crt, certificate.key)
        _thread("proxy-hang-ups", lambda: self._hang_ups.run(self._stop))
        self.flow.set()
        self._listen()

    def stop(self) -> None:
        self.refuse()
        self.flow.set()
        try:
            with self._changed:
                assert self._changed.wait_for(lambda: not self._connections, PATIENCE), "connections have not ended"
        finally:
            self._stop.set()
            if self._held is not None:
                self._held.close()

    def kubeconfig(self, path: Path, user: str = "kbpf") -> Path:
        """Write a kubeconfig that points here."""
        return self._server.kubeconfig(path, user, url=f"https://{HOST}:{self.port}")

    # Faults of the next requests.

    def answer(self, status: int, times: int) -> None:
        """Answer the next requests with an error."""
        self._add(_Rule(Decision(answer=Answer(status, "injected by a test")), times))

    def refuse_initial_events(self, status: int) -> None:
        """Behave like a server without streaming lists: refuse watches with sendInitialEvents."""
        message = "sendInitialEvents is forbidden for watch unless the WatchList gate is enabled"
        self._add(_Rule(Decision(answer=Answer(status, message)), None, is_about_streaming=True))

    def delay(self, seconds: float, times: int) -> None:
        self._add(_Rule(Decision(delay=seconds), times))

    def _add(self, rule: _Rule) -> None:
        with self._changed:
            self._rules.append(rule)

    # Faults of the whole connection.

    def refuse(self) -> None:
        """Outage: reset every connection, and refuse new ones."""
        with self._changed:
            listener, self._listener = self._listener, None
            connections = tuple(self._connections)
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            listener.close()
        for connection in connections:
            connection.abort()

    def hang(self) -> None:
        """Accept connections but send nothing, not even on open connections."""
        self.flow.clear()

    def heal(self) -> None:
        """Remove all faults; frozen watches continue."""
        self.line_hook = None
        with self._changed:
            self._rules.clear()
            streams, listening = tuple(self._streams), self._listener is not None
        if not listening:
            self._listen()
        self.flow.set()
        for stream in streams:
            stream.flow.set()

    # Faults of running watches.

    def cut_watches(self, how: Cut) -> None:
        """End running watches."""
        for stream in self._running():
            stream.cut(how)

    def freeze_watches(self) -> None:
        """Stop forwarding to running watches but leave them open; later watches are not
        affected.
        """
        for stream in self._running():
            stream.flow.clear()

    def send(self, line: bytes | Object) -> None:
        """Insert a line into running watches; bytes are sent unchanged."""
        data = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
        for stream in self._running():
            stream.send(data)

    def expire_watches(self) -> None:
        """Send the ERROR event 410 and end the watches, as the server does for an expired
        version.
        """
        self.send({"type": "ERROR", "object": Answer(410, "too old resource version: 1 (2)").status_object()})
        self.cut_watches(Cut.END)

    def rewrite_lines(self, hook: LineHook) -> None:
        """Pass each line of watches, with its line end, through the hook."""
        self.line_hook = hook

    # Called by connections, from their threads.

    def decide(self, request: Incoming) -> Decision:
        """Return the faults of a request."""
        delay = 0.0
        with self._changed:
            for rule in tuple(self._rules):
                if rule.is_about_streaming and "sendInitialEvents" not in request.query:
                    continue
                if rule.left is not None:
                    rule.left -= 1
                    if rule.left == 0:
                        self._rules.remove(rule)
                delay += rule.decision.delay
                if rule.decision.answer is not None:
                    return Decision(delay, rule.decision.answer)
        return Decision(delay)

    def dial(self) -> http.client.HTTPSConnection:
        """Return a connection to the real server."""
        return ServerConnection(self._server.kube().target, None)

    def opened(self, stream: Stream) -> None:
        """Register a watch."""
        with self._changed:
            self._streams.append(stream)
        self._hang_ups.add(stream)

    def closed(self, stream: Stream) -> None:
        """Unregister a watch."""
        self._hang_ups.remove(stream)
        with self._changed:
            self._streams.remove(stream)

    def ended(self, connection: Connection) -> None:
        """Unregister a connection."""
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    def _listen(self) -> None:
        listener = sockets.bound(None, HOST, self.port)
        listener.listen(64)
        with self._changed:
            self._listener = listener
        _thread("proxy-accept", lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return  # closed by refuse()
            with contextlib.suppress(OSError):  # the client is gone already
                connection = Connection(raw, self._context, self)
                with self._changed:
                    self._connections.add(connection)
                    if self._listener is not listener:  # refuse() was called in between
                        connection.abort()
                _thread("proxy-connection", connection.run)

    def _running(self) -> list[Stream]:
        """The watches without those that were cut, which their threads may not have ended yet."""
        with self._changed:
            return [stream for stream in self._streams if stream.how is None]


def _thread(name: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()

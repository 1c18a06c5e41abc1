# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of the real API server that injects the faults of real clusters.

It terminates TLS with a certificate of the server's own CA, so that a client only needs another URL
(`kubeconfig`), and forwards every request unchanged. It speaks HTTP/1.1 only; its hooks can rewrite
JSON only. Faults can be switched from any thread at any time, and stay until their count is used up
or until `heal`. Rules:

- A request is counted (`requests`, `count`) once it has been read, whether or not it is answered.
- While the real server is down, clients' connections are reset.

Script (fault_script.py) has the faults of single requests (answer, hold, delay,
refuse_initial_events) and the record of requests (requests, count, wait_for_requests, forget).
"""

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Connection as ServerConnection
from tests.support.cluster.kube import Kube
from tests.support.faults.fault_relay import Connection, Cut, HangUps, LineHook, ObjectHook, Stream
from tests.support.faults.fault_script import WAIT_SECONDS, Script
from tests.support.faults.fault_wire import Answer, Object, Request
from tests.support.lab import sockets

__all__ = ["Cut", "FaultProxy", "Request"]


class FaultProxy(Script):
    """A context manager, or start() and stop(). The parameters are those of ApiServer."""

    def __init__(
        self,
        server: ApiServer,
        *,
        bind: str = "127.0.0.1",
        addresses: Sequence[str] = (),
        netns: str | None = None,
    ) -> None:
        super().__init__()
        self.bind = bind
        self.addresses = tuple(addresses)
        self.netns = netns or server.netns
        self.port = 0
        self.flow = threading.Event()
        self.object_hook: ObjectHook | None = None
        self.line_hook: LineHook | None = None
        self._server = server
        self._streams: list[Stream] = []
        self._connections: set[Connection] = set()
        self._accepted = 0
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

    @property
    def url(self) -> str:
        """The URL that clients use instead of the server's."""
        host = self.addresses[0] if self.addresses else self.bind
        return f"https://[{host}]:{self.port}" if ":" in host else f"https://{host}:{self.port}"

    def start(self) -> None:
        """Listen on a free port; once only."""
        self._held = sockets.bound(self.netns, self.bind, 0)
        self.port = self._held.getsockname()[1]
        hosts = {"localhost", "127.0.0.1", "::1", self.bind, *self.addresses}
        certificate = self._server.authority.issue(f"proxy-{self.port}", hosts)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.crt, certificate.key)
        _thread("proxy-hang-ups", lambda: self._hang_ups.run(self._stop))
        self.flow.set()
        self._listen()

    def stop(self) -> None:
        self.refuse()
        self.flow.set()
        try:
            self._wait(lambda: not self._connections, "connections ended", WAIT_SECONDS)
        finally:
            self._stop.set()
            if self._held is not None:
                self._held.close()

    def kube(self, user: str = "admin") -> Kube:
        """Return a client that goes through the proxy."""
        crt = self._server.authority.crt
        return Kube(self.url, self._server.tokens[user], crt, netns=self.netns)

    def kubeconfig(self, path: Path, user: str = "kbpf") -> Path:
        """Write a kubeconfig that points here."""
        return self._server.kubeconfig(path, user, url=self.url)

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
        """Remove all faults; held requests and frozen watches continue."""
        self.object_hook = self.line_hook = None
        self.release()
        with self._changed:
            streams, listening = tuple(self._streams), self._listener is not None
        if not listening:
            self._listen()
        self.flow.set()
        for stream in streams:
            stream.flow.set()

    # Faults of running watches.

    def cut_watches(self, how: Cut = Cut.END, resource: str | None = None) -> int:
        """End running watches and return how many."""
        streams = self._running(resource)
        for stream in streams:
            stream.cut(how)
        return len(streams)

    def freeze_watches(self, resource: str | None = None) -> None:
        """Stop forwarding to running watches but leave them open; later watches are not
        affected.
        """
        for stream in self._running(resource):
            stream.flow.clear()

    def send(self, line: bytes | Object, resource: str | None = None) -> None:
        """Insert a line into running watches; bytes are sent unchanged."""
        data = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
        for stream in self._running(resource):
            stream.send(data)

    def expire_watches(self, resource: str | None = None) -> None:
        """Send the ERROR event 410 and end the watches, as the server does for an expired
        version.
        """
        status = Answer(410, "too old resource version: 1 (2)").status_object()
        self.send({"type": "ERROR", "object": status}, resource)
        self.cut_watches(Cut.END, resource)

    # Faults of contents.

    def rewrite_objects(self, hook: ObjectHook) -> None:
        """Pass each object of lists and watches through the hook; None leaves it out."""
        self.object_hook = hook

    def rewrite_lines(self, hook: LineHook) -> None:
        """Pass each line of watches, with its line end, through the hook; None leaves it out."""
        self.line_hook = hook

    # What clients have done.

    @property
    def accepted(self) -> int:
        """The number of connections that clients have made."""
        with self._changed:
            return self._accepted

    def watches(self, resource: str | None = None) -> int:
        return len(self._running(resource))

    def wait_for_watches(self, number: int, resource: str | None = None, seconds: float = WAIT_SECONDS) -> None:
        """Wait until exactly this many watches run; raises TimeoutError."""
        what = f"{number} watches of {resource or 'anything'}"
        self._wait(lambda: self.watches(resource) == number, what, seconds)

    # Called by connections, from their threads.

    def dial(self) -> http.client.HTTPSConnection:
        """Return a connection to the real server."""
        return ServerConnection(self._server.kube().target, None)

    def opened(self, stream: Stream) -> None:
        """Register a watch."""
        with self._changed:
            self._streams.append(stream)
            self._changed.notify_all()
        self._hang_ups.add(stream)

    def closed(self, stream: Stream) -> None:
        """Unregister a watch."""
        self._hang_ups.remove(stream)
        with self._changed:
            self._streams.remove(stream)
            self._changed.notify_all()

    def ended(self, connection: Connection) -> None:
        """Unregister a connection."""
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    def _listen(self) -> None:
        listener = sockets.bound(self.netns, self.bind, self.port)
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
            with self._changed:
                self._accepted += 1
                self._changed.notify_all()
            with contextlib.suppress(OSError):  # the client is gone already
                connection = Connection(raw, self._context, self)
                with self._changed:
                    self._connections.add(connection)
                    if self._listener is not listener:  # refuse() was called in between
                        connection.abort()
                _thread("proxy-connection", connection.run)

    def _running(self, resource: str | None) -> list[Stream]:
        """The watches without those that were cut, which their threads may not have ended yet."""
        with self._changed:
            running = [stream for stream in self._streams if stream.how is None]
        return [stream for stream in running if resource in {None, stream.request.resource}]


def _thread(name: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()

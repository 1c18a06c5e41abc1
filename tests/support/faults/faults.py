"""A proxy in front of the real API server that does to its clients what real clusters do.

It ends TLS with a certificate of the server's own CA, so a client needs nothing but another URL
(`kubeconfig`), and forwards every request as it came. It speaks HTTP/1.1 only, and what its hooks
rewrite must be JSON. Faults are switched at run time, from any thread, and stay until their count
is used up or `heal`. Rules:

- A request counts (`requests`, `count`) when it has been read, whatever becomes of it.
- While the real server is down, clients get their connection reset.

Script (fault_script.py) has the faults of single requests: answer, hold, delay,
refuse_initial_events; and the look back: requests, count, wait_for_requests, forget.
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
        """Where clients dial instead of the server."""
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
        """Close everything and free the port."""
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
        """Half-open: accept connections and never say a byte; what is open falls silent too."""
        self.flow.clear()

    def heal(self) -> None:
        """Take every fault away; what was held goes on from where it was."""
        self.object_hook = self.line_hook = None
        self.release()
        with self._changed:
            streams, listening = tuple(self._streams), self._listener is not None
        if not listening:
            self._listen()
        self.flow.set()
        for stream in streams:
            stream.flow.set()

    # Faults of the watches that run now.

    def cut_watches(self, how: Cut = Cut.END, resource: str | None = None) -> int:
        """End them and return how many."""
        streams = self._running(resource)
        for stream in streams:
            stream.cut(how)
        return len(streams)

    def freeze_watches(self, resource: str | None = None) -> None:
        """Let nothing more through and leave them open; others that start later are not held."""
        for stream in self._running(resource):
            stream.flow.clear()

    def send(self, line: bytes | Object, resource: str | None = None) -> None:
        """Put a line (bytes go as they are) between the real ones."""
        data = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
        for stream in self._running(resource):
            stream.send(data)

    def expire_watches(self, resource: str | None = None) -> None:
        """Send the ERROR event 410 and end them, as the server does for a version too old."""
        status = Answer(410, "too old resource version: 1 (2)").status_object()
        self.send({"type": "ERROR", "object": status}, resource)
        self.cut_watches(Cut.END, resource)

    # Faults of what is said.

    def rewrite_objects(self, hook: ObjectHook) -> None:
        """Hand each object of a list or watch to the test; None leaves it out."""
        self.object_hook = hook

    def rewrite_lines(self, hook: LineHook) -> None:
        """Hand each line of a watch, with its line end, to the test; None leaves it out."""
        self.line_hook = hook

    # What has been seen.

    @property
    def accepted(self) -> int:
        """How many connections clients have made."""
        with self._changed:
            return self._accepted

    def watches(self, resource: str | None = None) -> int:
        """Return how many watches run now."""
        return len(self._running(resource))

    def wait_for_watches(
        self, number: int, resource: str | None = None, seconds: float = WAIT_SECONDS
    ) -> None:
        """Return when exactly as many run; raise TimeoutError."""
        what = f"{number} watches of {resource or 'anything'}"
        self._wait(lambda: self.watches(resource) == number, what, seconds)

    # What the connections ask (fault_relay.Owner).

    def dial(self) -> http.client.HTTPSConnection:
        """Return a connection to the real server."""
        return ServerConnection(self._server.kube().target, None)

    def opened(self, stream: Stream) -> None:
        """Take note of a watch."""
        with self._changed:
            self._streams.append(stream)
            self._changed.notify_all()
        self._hang_ups.add(stream)

    def closed(self, stream: Stream) -> None:
        """Forget a watch."""
        self._hang_ups.remove(stream)
        with self._changed:
            self._streams.remove(stream)
            self._changed.notify_all()

    def ended(self, connection: Connection) -> None:
        """Forget a connection."""
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
        assert self._context is not None
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return  # refuse() has closed it
            with self._changed:
                self._accepted += 1
                self._changed.notify_all()
            with contextlib.suppress(OSError):  # the client has gone already
                connection = Connection(raw, self._context, self)
                with self._changed:
                    self._connections.add(connection)
                    if self._listener is not listener:  # refuse() came in between
                        connection.abort()
                _thread("proxy-connection", connection.run)

    def _running(self, resource: str | None) -> list[Stream]:
        with self._changed:
            return [s for s in self._streams if resource in {None, s.request.resource}]


def _thread(name: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=name, daemon=True).start()

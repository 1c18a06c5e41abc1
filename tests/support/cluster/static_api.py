# SPDX-License-Identifier: Apache-2.0
"""A minimal API server for kube-proxy, with objects that never change.

For kernels under emulation, where a real API server takes most of the time. kube-proxy is real (and
requests JSON, `--kube-api-content-type`); lists, watches and Events are as its client library
expects. Plain HTTP, in a network namespace.
"""

import json
import socket
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from kbpf.kernel.system import netns
from tests.support.cluster.kube import Object

LISTS = {
    "/api/v1/services": ("v1", "Service"),
    "/api/v1/nodes": ("v1", "Node"),
    "/apis/discovery.k8s.io/v1/endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "/apis/networking.k8s.io/v1/servicecidrs": ("networking.k8s.io/v1", "ServiceCIDR"),
}
VERSION = "1"
KUBECONFIG = """apiVersion: v1
kind: Config
clusters: [{{name: it, cluster: {{server: "{url}"}}}}]
users: [{{name: it, user: {{}}}}]
contexts: [{{name: it, context: {{cluster: it, user: it}}}}]
current-context: it
"""


class StaticApi:
    """A server of these objects at an address in a network namespace; a context manager."""

    def __init__(self, objects: Iterable[Object], address: str, where: str) -> None:
        self.objects = tuple(objects)
        held = netns.run_in(Path("/run/netns") / where, lambda: _listen(address))
        self.url = f"http://{address}:{held.getsockname()[1]}"
        self._server = ThreadingHTTPServer(held.getsockname(), _Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = held
        self._server.daemon_threads = True
        self._server.ended = threading.Event()  # type: ignore[attr-defined]
        self._server.objects = self.objects  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.ended.set()  # type: ignore[attr-defined]
        self._server.shutdown()
        self._server.server_close()

    def kubeconfig(self, path: Path) -> Path:
        """Writes a kubeconfig for this server."""
        path.write_text(KUBECONFIG.format(url=self.url))
        return path


def _listen(address: str) -> socket.socket:
    held = socket.socket()
    held.bind((address, 0))
    held.listen()
    return held


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        words = {key: values[0] for key, values in parse_qs(asked.query).items()}
        if (kind := LISTS.get(asked.path)) is not None:
            found = self._matching(kind[1], words.get("fieldSelector", ""))
            if "watch" in words:
                self._watch(kind, found, words)
            else:
                meta = {"resourceVersion": VERSION}
                made = {"kind": f"{kind[1]}List", "apiVersion": kind[0], "metadata": meta}
                self._say(200, {**made, "items": found})
            return
        folder, _, name = asked.path.rpartition("/")
        if folder in LISTS:
            found = self._matching(LISTS[folder][1], f"metadata.name={name}")
            if found:
                self._say(200, found[0])
                return
        self._say(404, {"kind": "Status", "apiVersion": "v1", "code": 404, "reason": "NotFound"})

    def do_POST(self) -> None:
        """Accepts an Event and returns it."""
        self._say(201, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    do_PATCH = do_POST

    def _matching(self, kind: str, selector: str) -> list[Object]:
        """The objects of a kind; the only selector that is applied is metadata.name."""
        there = [one for one in self.server.objects if one["kind"] == kind]  # type: ignore[attr-defined]
        field, _, name = selector.partition("metadata.name=")
        found = [one for one in there if not name or field or one["metadata"]["name"] == name]
        for one in found:
            one["metadata"]["resourceVersion"] = VERSION
            one["metadata"].setdefault("uid", one["metadata"]["name"])
        return found

    def _watch(self, kind: tuple[str, str], found: list[Object], words: dict[str, str]) -> None:
        """A watch without changes, until this server ends. A streaming list gets all
        objects first.
        """
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if words.get("sendInitialEvents") == "true":
            for one in found:
                self._event("ADDED", one)
            notes = {"k8s.io/initial-events-end": "true"}
            meta = {"resourceVersion": VERSION, "annotations": notes}
            self._event("BOOKMARK", {"kind": kind[1], "apiVersion": kind[0], "metadata": meta})
        self.server.ended.wait()  # type: ignore[attr-defined]

    def _event(self, what: str, obj: Object) -> None:
        line = json.dumps({"type": what, "object": obj}).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _say(self, code: int, body: Object) -> None:
        raw = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

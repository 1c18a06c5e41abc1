# SPDX-License-Identifier: Apache-2.0
"""A minimal API server for kube-proxy and `kbpf trace`, with objects that never change.

It serves at once, where a real API server takes seconds, and minutes under emulation. kube-proxy is
real (and requests JSON, `--kube-api-content-type`); lists, watches and Events are as its client
library expects. Plain HTTP, in a network namespace.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tests.support.cluster.kube import Object
from tests.support.faults.scripted import Exchange, ScriptedServer
from tests.support.lab import sockets

LISTS = {
    "/api/v1/services": ("v1", "Service"),
    "/api/v1/nodes": ("v1", "Node"),
    "/api/v1/pods": ("v1", "Pod"),
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


JSON = {"Content_Type": "application/json"}


class StaticApi(ScriptedServer):
    """A server of these objects at an address in a network namespace."""

    def __init__(self, objects: Iterable[Object], address: str, where: str) -> None:
        self._objects = [
            {**obj, "metadata": {"uid": meta["name"], **meta, "resourceVersion": VERSION}}
            for obj in objects
            for meta in (obj["metadata"],)
        ]
        listener = sockets.bound(where, address, 0)
        listener.listen()
        super().__init__(then=self._answer, listener=listener)

    def kubeconfig(self, path: Path) -> Path:
        path.write_text(KUBECONFIG.format(url=self.url))
        return path

    def _answer(self, exchange: Exchange) -> None:
        request = exchange.request
        path = re.sub("/namespaces/[^/]+", "", request.path)  # names are unique here
        folder, _, name = path.rpartition("/")
        if request.method != "GET":  # an Event
            exchange.answer(201, request.body, **JSON)
        elif (kind := LISTS.get(path)) is not None:
            field, _, name = request.query.get("fieldSelector", "").partition("metadata.name=")
            objects = self._find(kind[1], "" if field else name)
            label, _, owner = request.query.get("labelSelector", "").partition("service-name=")
            if owner:
                label = f"{label}service-name"
                objects = [obj for obj in objects if obj["metadata"]["labels"][label] == owner]
            if "watch" in request.query:
                _watch(exchange, kind, objects)
            else:
                meta = {"resourceVersion": VERSION}
                whole = {"kind": f"{kind[1]}List", "apiVersion": kind[0], "metadata": meta}
                exchange.answer(200, {**whole, "items": objects}, **JSON)
        elif folder in LISTS and (objects := self._find(LISTS[folder][1], name)):
            exchange.answer(200, objects[0], **JSON)
        else:
            status = {"kind": "Status", "apiVersion": "v1", "code": 404, "reason": "NotFound"}
            exchange.answer(404, status, **JSON)

    def _find(self, kind: str, name: str) -> list[Object]:
        """The objects of a kind, or the one of this name."""
        return [obj for obj in self._objects if obj["kind"] == kind and name in ("", obj["metadata"]["name"])]


def _watch(exchange: Exchange, kind: tuple[str, str], objects: list[Object]) -> None:
    """A watch without changes, until this server ends. A streaming list gets all objects first."""
    exchange.head(200, Transfer_Encoding="chunked", **JSON)
    if exchange.request.query.get("sendInitialEvents") == "true":
        for obj in objects:
            exchange.line({"type": "ADDED", "object": obj})
        notes = {"k8s.io/initial-events-end": "true"}
        meta = {"resourceVersion": VERSION, "annotations": notes}
        bookmark = {"kind": kind[1], "apiVersion": kind[0], "metadata": meta}
        exchange.line({"type": "BOOKMARK", "object": bookmark})
    exchange.hang()

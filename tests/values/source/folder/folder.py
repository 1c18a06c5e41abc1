# SPDX-License-Identifier: Apache-2.0
"""A folder of objects under test."""

import json
from pathlib import Path

from kbpf.model.events import Delete, Event, Rejected, Synced, Upsert
from kbpf.source.folder.folder import FolderSource

WEB = """\
apiVersion: v1
kind: Service
metadata:
  name: web
  creationTimestamp: 2024-01-01T00:00:00Z
spec:
  clusterIP: 10.96.0.1
  ports:
  - name: http
    port: 80
"""
SLICE = """\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
  labels: {kubernetes.io/service-name: web}
addressType: IPv4
endpoints:
- addresses: [10.1.0.1]
ports:
- port: 8080
"""
NODE = "{apiVersion: v1, kind: Node, metadata: {name: n1}}\n"
BOTH = f"{WEB}---\n{SLICE}"


def service(name: str, port: object = 80, **meta: str) -> str:
    obj = {
        "kind": "Service",
        "metadata": {"name": name} | meta,
        "spec": {"clusterIP": "10.96.0.9", "ports": [{"port": port}]},
    }
    return json.dumps(obj)


class Run:
    """A FolderSource without its thread: look() polls it once."""

    def __init__(self, path: Path, node_name: str = "n1") -> None:
        self.path = path
        self.events: list[Event] = []
        self.all: list[Event] = []
        self.folder = FolderSource(path, self.put, node_name, clock=lambda: 7.0)

    def put(self, event: Event) -> None:
        self.events.append(event)
        self.all.append(event)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def look(self) -> list[str]:
        """Polls once and returns the events in short."""
        del self.events[:]
        self.folder.poll()
        return self.said

    def settle(self) -> list[str]:
        """Polls twice and returns the events: a change is read at the second poll."""
        first = self.look()
        return first + self.look()

    def place(self, text: str, name: str = "a.yaml") -> list[str]:
        """Writes a file and polls once."""
        self.write(name, text)
        return self.look()

    def change(self, text: str, name: str = "a.yaml") -> list[str]:
        """Writes a file and polls twice, after which a change is read."""
        self.write(name, text)
        return self.settle()

    @property
    def said(self) -> list[str]:
        marks = {Upsert: "+", Delete: "-", Rejected: "!"}
        return [f"synced {e.kind}" if isinstance(e, Synced) else marks[type(e)] + e.key.name for e in self.events]

    @property
    def problems(self) -> tuple[str, ...]:
        return self.folder.status().problems


SYNCED = ["synced Service", "synced EndpointSlice", "synced Node", "synced Pod"]

# SPDX-License-Identifier: Apache-2.0
"""A reflector against a scripted server: responses, and the reflector under test."""

import threading
import time
from collections.abc import Callable
from typing import Any

from kbpf.model.events import Delete, Event, Rejected, Synced, Upsert
from kbpf.source.api.credentials import Cluster
from kbpf.source.api.kubeconfig import Access
from kbpf.source.api.reflector import Reflector
from kbpf.source.api.resource import SERVICES, Resource
from kbpf.source.base import SourceState, SourceStatus
from tests.support.faults.scripted import Exchange, ScriptedServer, Step

END = {"k8s.io/initial-events-end": "true"}


# --- responses of the server ---


def service(name: str, version: int, **spec: Any) -> dict[str, Any]:
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]} | spec
    return {
        "metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version)},
        "spec": spec,
    }


def added(name: str, version: int, **spec: Any) -> dict[str, Any]:
    return {"type": "ADDED", "object": service(name, version, **spec)}


def bookmark(version: int, end: bool = False) -> dict[str, Any]:
    meta = {"resourceVersion": str(version), "annotations": END if end else None}
    return {"type": "BOOKMARK", "object": {"kind": "Service", "metadata": meta}}


WORDS = {"rubbish": b"rubbish\n", "half": b'{"type":"ADDED","object":', "nameless": {"metadata": {}, "spec": {}}}


def lines(text: str) -> list[Any]:
    """Lines of a watch, or objects of a list.

    ``+a@5`` and ``-a@5``: Service a of version 5 was added or deleted; ``+a@5:10.96.0.2``: with this ClusterIP;
    ``a@5``: the object alone; ``nameless``: one without a name; ``@7``: a bookmark; ``synced@7``: the bookmark at the
    end of a streaming list; ``error=410``: an error with this code; ``rubbish``: not JSON; ``half``: of a line.
    """
    made: list[Any] = []
    for word in text.split():
        name, _, rest = word.lstrip("+-").partition("@")
        version, _, cluster_ip = rest.partition(":")
        spec = {"clusterIP": cluster_ip} if cluster_ip else {}
        if word.startswith("error="):
            code = int(word.removeprefix("error="))
            made.append({"type": "ERROR", "object": {"kind": "Status", "code": code, "message": f"is {code}"}})
        elif word in WORDS:
            made.append(WORDS[word])
        elif name in ("", "synced"):
            made.append(bookmark(int(version), end=name == "synced"))
        else:
            found = service(name, int(version), **spec)
            kind = {"+": "ADDED", "-": "DELETED"}.get(word[0])
            made.append({"type": kind, "object": found} if kind else found)
    return made


ENDS: dict[str, Callable[[Exchange], None]] = {
    "end": Exchange.end,
    "cut": Exchange.cut,
    "reset": Exchange.reset,
    "open": lambda exchange: None,
    "close": lambda exchange: (exchange.end(), exchange.cut()),
}


def step(text: str) -> Step:
    """A response: ``watch LINES``, then silence or ``end``, ``cut``, ``reset``, ``close`` (the end, and of
    the connection) or ``open`` (the next step follows);
    ``list@VERSION OBJECTS``, with ``continue=TOKEN``; or a status code and its message.
    """
    kind, _, rest = text.partition(" ")
    if kind == "watch":
        *_, last = rest.split() or [""]
        return streamed(*lines(rest.removesuffix(last) if last in ENDS else rest), then=ENDS.get(last, Exchange.hang))
    if kind.startswith("list@"):
        objects, _, token = rest.partition("continue=")
        return listed(*lines(objects), version=kind[5:], token=token)
    return status(int(kind), rest)


def streamed(*sent: Any, then: Callable[[Exchange], None] = Exchange.hang) -> Step:
    """A watch that sends these lines and then ends, hangs or breaks."""

    def respond(exchange: Exchange) -> None:
        exchange.watch(*sent)
        then(exchange)

    return respond


def listed(*objects: dict[str, Any], version: str = "100", token: str = "") -> Step:
    meta = {"resourceVersion": version, "continue": token}
    return lambda exchange: exchange.answer(200, {"metadata": meta, "items": list(objects)})


def status(code: int, message: str = "", **headers: str) -> Step:
    body = {"kind": "Status", "message": message, "code": code}
    return lambda exchange: exchange.answer(code, body, **headers)


LISTED_A = "watch +a@5 synced@10"
"""A streaming list of one Service, `a`, then silence."""


# --- the reflector under test ---


class Run:
    """A reflector in its thread, its events, its waits (recorded, not waited), and its error at each request."""

    def __init__(self, server: ScriptedServer, resource: Resource = SERVICES, **options: Any):
        self.server = server
        self.events: list[Event] = []
        self.waits: list[float] = []
        self.errors: list[str] = []
        self.now = 1000.0
        options = {"clock": lambda: self.now, "rng": lambda: 1.0, "wait": self._wait} | options
        cluster = Cluster(Access(server.url, "the test"))
        self.reflector = Reflector(cluster, resource, self.put, **options)

    def put(self, event: Event) -> None:
        self.events.append(event)

    def _wait(self, stop: threading.Event, seconds: float) -> None:
        self.waits.append(round(seconds, 3))
        stop.wait(0.001)

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s:\n{self}"
            time.sleep(0.002)

    def __str__(self) -> str:
        """Events, requests, waits and state, for the message of a failed test."""
        status = self.status
        return "\n".join(
            (
                f"  events: {' '.join(self.said)}",
                f"  asked:  {', '.join(self.all_asked)}",
                f"  waits:  {self.waits}",
                f"  state:  {status.state}, version {status.resource_version!r}, {status.error!r}",
            )
        )

    def until_watching(self, requests: int) -> None:
        self.server.wait(requests)
        self.until(lambda: self.state is SourceState.WATCHING)

    def until_said(self, event: str, times: int = 1) -> None:
        self.until(lambda: self.said.count(event) >= times)

    def until_version(self, version: str) -> None:
        self.until(lambda: self.status.resource_version == version)

    @property
    def status(self) -> SourceStatus:
        return self.reflector.status()

    @property
    def state(self) -> SourceState:
        return self.status.state

    @property
    def said(self) -> list[str]:
        """The events in short: +a, -a, !a (rejected), synced."""
        marks = {Upsert: "+", Delete: "-", Rejected: "!"}
        return ["synced" if isinstance(e, Synced) else marks[type(e)] + e.key.name for e in self.events]

    def asked(self, n: int) -> str:
        """The n-th request in short: stream, page, page after TOKEN, watch VERSION."""
        query = self.server.requests[n].query
        if "sendInitialEvents" in query:
            return "stream"
        if "watch" in query:
            return f"watch {query['resourceVersion']}"
        return f"page after {query['continue']}" if "continue" in query else "page"

    @property
    def all_asked(self) -> list[str]:
        return [self.asked(n) for n in range(len(self.server.requests))]


WATCH_THREADS = {"services", "endpointslices", "nodes", "pods"}


PAGES = "422 sendInitialEvents: Forbidden"
"""A server without streaming lists."""


LOGIN = b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html>\n<title>Sign in</title>\n</html>\n"

# SPDX-License-Identifier: Apache-2.0
"""Random histories of an API server with faults, and what must be known at their end.

A history is a simulation in one thread that only its seed decides: a model of an API server
(`Model`: objects, revisions, a log that is compacted, pages, streamed lists, watches, restores from
a backup), the real Reflector on it without sockets, and a simulated clock. What must hold:

- The Reflector deletes only what a complete list lacked, or a DELETED event named.
- If the server was not restored and every change was an event, the periodic re-list finds nothing
  that was missed.
- After the faults, the Reflector knows what the server has within the time of one re-list, and the
  policy computes the same from its events as from a fresh list, in whatever order events of
  Services and slices come.
"""

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kbpf.errors import SourceError
from kbpf.model.config import Config
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Synced, Upsert
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ObjectStore
from kbpf.source.api.credentials import Cluster
from kbpf.source.api.kubeconfig import Access
from kbpf.source.api.reflector import Reflector
from kbpf.source.api.resource import SERVICES, SLICES, Resource
from kbpf.source.api.transport import ReadTimeout
from kbpf.source.decode import decode
from tests.campaigns import deadline

HISTORIES = 10_000
OPERATIONS = 200
NAMES = [f"s{n}" for n in range(12)]
PAGE = 4
END = {"k8s.io/initial-events-end": "true"}

Object = dict[str, Any]


class Model:
    """The objects and the log of an API server and its etcd, for one kind."""

    def __init__(self, kind: Kind, chance: random.Random) -> None:
        self.kind, self.chance = kind, chance
        self.revision = 100
        self.objects: dict[str, Object] = {}
        self.log: list[tuple[int, str, Object]] = []
        self.compacted = 0
        self.backup = (self.revision, dict(self.objects))
        self.restores = self.outage = 0
        self.is_honest = chance.random() < 0.5  # no restores, and each change is an event
        self._uids = 0

    def operate(self) -> None:
        """One operation, in most cases a write."""
        what = self.chance.random()
        name = self.chance.choice(NAMES)
        if what < 0.70:
            self._write(name)
        elif what < 0.90 and name in self.objects:
            self._log("DELETED", self.objects.pop(name))
        elif what < 0.93:
            self.compacted = self.chance.randint(self.compacted, self.revision)
        elif what < 0.96:
            self.backup = (self.revision, dict(self.objects))
        elif self.is_honest:
            pass
        elif what < 0.98:
            self._restore()
        elif name in self.objects:  # a change without an event
            self.objects[name] = self._made(name, self.objects[name]["metadata"])

    def _write(self, name: str) -> None:
        before = self.objects.get(name)
        self._uids += 1
        meta = before["metadata"] if before else {"uid": f"u{self._uids}"}
        self._log("MODIFIED" if before else "ADDED", self._made(name, meta))

    def _log(self, event: str, obj: Object) -> None:
        self.revision += self.chance.randint(1, 3)
        obj = obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.revision)}}
        self.log.append((self.revision, event, obj))
        if event != "DELETED":
            self.objects[obj["metadata"]["name"]] = obj

    def _made(self, name: str, meta: Object) -> Object:
        meta = {"resourceVersion": "0"} | meta | {"name": name, "namespace": "ns"}
        host = self.chance.randint(1, 250)
        if self.kind is Kind.SERVICE:
            address = f"10.96.{NAMES.index(name)}.{host}"
            return {"metadata": meta, "spec": {"clusterIP": address, "ports": [{"port": 80}]}}
        meta["labels"] = {"kubernetes.io/service-name": name}
        return {
            "metadata": meta,
            "addressType": "IPv4",
            "ports": [{"name": "", "port": host}],
            "endpoints": [{"addresses": [f"10.1.0.{host}"]}],
        }

    def _restore(self) -> None:
        self.revision, self.objects = self.backup[0], dict(self.backup[1])
        self.log = [entry for entry in self.log if entry[0] <= self.revision]
        self.compacted = self.revision  # the new watch cache has no older events
        self.restores += 1
        self.outage = self.chance.choice((0, 3, 6))


class Answer:
    """Implements what a Reflector uses of a Response."""

    reason, retry_after = "", 0.0

    def __init__(self, status: int, chunks: Iterator[bytes]) -> None:
        self.status, self._chunks = status, chunks

    def read_chunk(self) -> bytes:
        return next(self._chunks, b"")

    def read(self, *_: object, **__: object) -> bytearray:
        return bytearray(b"".join(self._chunks))

    def read_error_body(self) -> bytes:
        return bytes(self.read())


class Server:
    """A Connection to the model, with faults as long as operations are left."""

    def __init__(self, model: Model, operations: int) -> None:
        self._model, self._chance = model, model.chance
        self._left = operations
        self.now = 1000.0
        self.stop = threading.Event()
        self.may_go: set[str] = set()
        self._jumped = self._verified = False
        self.requests = 0

    def request(self, path: str, **_: object) -> Answer:
        self.requests += 1
        assert self.requests < 5000, "the history does not end"
        self._step(3)
        query = {name: values[-1] for name, values in parse_qs(urlsplit(path).query).items()}
        if self._model.outage:
            self._model.outage -= 1
            raise SourceError("connection refused")
        if self._fault(0.05):
            raise SourceError("cut")
        if self._fault(0.08):
            code = self._chance.choice((500, 503, 429, 401, 410, 504))
            return _json(code, {"message": "injected", "code": code})
        if "sendInitialEvents" in query:
            if self._fault(0.3):
                return _json(422, {"message": "sendInitialEvents: Forbidden"})
            return Answer(200, self._cut(self._stream()))
        if "watch" in query:
            return self._watch(int(query["resourceVersion"]))
        return self._page(query)

    def close(self) -> None:
        self.stop.set()

    def drop(self) -> None:
        pass

    # --- lists ---

    def _page(self, query: dict[str, str]) -> Answer:
        if query["limit"] == "1":
            name = query.get("fieldSelector", "").rpartition("metadata.name=")[2]
            items = [obj] if (obj := self._model.objects.get(name)) else []
            meta = {"resourceVersion": str(self._model.revision)}
            return _json(200, {"metadata": meta, "items": items})
        if "continue" not in query:
            self._snapshot = (self._model.revision, list(self._model.objects.values()))
            self._restores = self._model.restores
        at = int(query.get("continue", "0"))
        revision, objects = self._snapshot
        is_over = revision < self._model.compacted or self._restores != self._model.restores
        if at and is_over:
            return _json(410, {"message": "the continue token is too old"})
        meta = {"resourceVersion": str(revision)}
        if at + PAGE < len(objects):
            meta["continue"] = str(at + PAGE)
        else:
            self._was_listed(objects)
        self.may_go -= {obj["metadata"]["name"] for obj in objects[at : at + PAGE]}
        return _json(200, {"metadata": meta, "items": objects[at : at + PAGE]})

    def _was_listed(self, objects: list[Object]) -> None:
        self.may_go |= set(NAMES) - {obj["metadata"]["name"] for obj in objects}
        self._verified = self._verified or self._jumped

    def _stream(self) -> Iterator[bytes]:
        revision, objects = self._model.revision, list(self._model.objects.values())
        restores = self._model.restores
        self._chance.shuffle(objects)
        for obj in objects:
            yield self._event("ADDED", obj)
        self._was_listed(objects)
        yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(revision), "annotations": END}})
        yield from self._events(revision, restores)

    # --- watches ---

    def _watch(self, revision: int) -> Answer:
        if revision < self._model.compacted:
            if self._chance.random() < 0.5:
                return _json(410, {"code": 410, "message": "too old"})
            return Answer(200, iter([_line("ERROR", {"code": 410, "message": "too old"})]))
        return Answer(200, self._cut(self._events(revision, self._model.restores)))

    def _events(self, revision: int, restores: int) -> Iterator[bytes]:
        """Events after a revision. After a future revision there are none, as with a real
        server.
        """
        asked = at = revision
        while restores == self._model.restores:
            for entry, event, obj in list(self._model.log):
                if entry > at:
                    at = entry
                    yield self._event(event, obj)
                    if self._fault(0.02):
                        yield self._event(event, obj)  # twice
            if not self._left and self._over():
                return
            shown = max(at, self._model.revision) if asked <= self._model.revision else 0
            version = shown or self._model.revision
            if self._fault(0.01):
                version = self._chance.randint(1, version)  # a cache that is behind
            if not self._left or self._chance.random() < 0.2:
                yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})
            if self._fault(0.01):
                yield b'{"type":"MODIFIED","object":{"metadata":\n'
            if self._fault(0.01):
                yield _line("ERROR", {"code": 500, "message": "injected"})
            if self._fault(0.02):
                return
            self._step(4)

    def _event(self, event: str, obj: Object) -> bytes:
        name = obj["metadata"]["name"]
        if event == "DELETED":
            self.may_go.add(name)
        else:
            self.may_go.discard(name)
        return _line(event, obj)

    def _over(self) -> bool:
        """Whether everything was listed once more after the last operation; if not, time
        advances.
        """
        if self._verified:
            self.stop.set()
            return True
        self._jumped = True
        self.now += 5000.0
        return False

    # --- faults ---

    def _fault(self, odds: float) -> bool:
        return self._left > 0 and self._chance.random() < odds

    def _step(self, most: int) -> None:
        self.now += self._chance.random() * 3
        for _ in range(min(self._left, self._chance.randint(0, most))):
            self._left -= 1
            self._model.operate()

    def _cut(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        """The same bytes in other pieces, some of them late, and sometimes not all."""
        for data in lines:
            rest = data
            while rest:
                if self._fault(0.02):
                    raise self._chance.choice((SourceError("cut"), ReadTimeout("mute")))
                size = len(rest) if not self._left else self._chance.choice((len(rest), 7, 40))
                piece, rest = rest[:size], rest[size:]
                self.now += self._chance.choice((0.0, 0.0, 5.0)) if self._left else 0.0
                yield piece


def _json(status: int, body: Object) -> Answer:
    return Answer(status, iter([json.dumps(body).encode()]))


def _line(event: str, obj: Object) -> bytes:
    return json.dumps({"type": event, "object": obj}).encode() + b"\n"


def play(kind: Kind, resource: Resource, seed: int, operations: int) -> tuple[Model, list[Event]]:
    """One kind's history; returns the final model and all events of the Reflector."""
    chance = random.Random(f"{seed} {kind}")
    model = Model(kind, chance)
    server = Server(model, operations)
    said: list[Event] = []
    known: dict[str, Any] = {}

    def put(event: Event) -> None:
        said.append(event)
        if isinstance(event, Delete):
            assert event.key.name in server.may_go, f"{event.key}: nothing showed that it is deleted"
            del known[event.key.name]
        elif isinstance(event, Upsert):
            known[event.key.name] = event.object

    def wait(_: threading.Event, seconds: float) -> None:
        server.now += seconds

    reflector = Reflector(
        Cluster(Access("http://model", "the model")),
        resource,
        put,
        clock=lambda: server.now,
        rng=chance.random,
        wait=wait,
    )
    reflector._connection = server  # type: ignore[assignment]
    reflector.run(server.stop)
    expected = {name: _object(kind, obj) for name, obj in model.objects.items()}
    drift = reflector.status().drift
    assert not (model.is_honest and drift), f"{drift} events were missed"
    assert known == expected, differing(known, expected)
    return model, said


def differing(known: dict[Any, Any], expected: dict[Any, Any]) -> str:
    other = [name for name in known.keys() & expected.keys() if known[name] != expected[name]]
    return f"more: {known.keys() - expected.keys()}, fewer: {expected.keys() - known.keys()}, other: {other}"


def _object(kind: Kind, obj: Object) -> Any:
    return decode.decode_object(kind, json.dumps(obj).encode()).object


def history(seed: int, operations: int = OPERATIONS) -> int:
    """Runs both kinds, and the policy on their events; returns the number of events. Raises
    AssertionError.
    """
    services, first = play(Kind.SERVICE, SERVICES, seed, operations)
    slices, second = play(Kind.SLICE, SLICES, seed, operations)
    objects = []
    for model in (services, slices):
        for name, obj in model.objects.items():
            made = _object(model.kind, obj)
            objects.append(Upsert(ObjectKey(model.kind, "ns", name), made, 0.0))
    same_policy(random.Random(seed), [first, second], objects)
    return len(first) + len(second)


def same_policy(chance: random.Random, said: Sequence[Sequence[Event]], whole: Sequence[Upsert]) -> None:
    """The events of all kinds, interleaved at random, must lead to the same desired state as the
    final objects. Raises AssertionError.
    """
    queues = [list(events[::-1]) for events in said]
    world, desired, config = ObjectStore("n"), DesiredStateBuilder(), Config()
    while any(queues):
        batch: list[Event] = []
        for _ in range(chance.randint(1, 20)):
            if left := [queue for queue in queues if queue]:
                batch.append(chance.choice(left).pop())
        desired.update(world, world.apply(batch), (), config)
    fresh, expected = ObjectStore("n"), DesiredStateBuilder()
    synced = [Synced(Kind.SERVICE), Synced(Kind.SLICE)]
    expected.update(fresh, fresh.apply([*synced, *whole]), (), config)
    assert desired.state.services == expected.state.services


def campaign(seed: int, minutes: float | None) -> None:
    """Runs HISTORIES of them, from this seed on."""
    until = deadline(minutes)
    events = done = 0
    for number in range(HISTORIES):
        if time.monotonic() > until:
            break
        try:
            events += history(seed + number)
        except AssertionError as error:
            raise AssertionError(f"history {seed + number}: {error}") from error
        done += 1
    print(f"{done} histories of 2 x {OPERATIONS} operations, {events} events", flush=True)

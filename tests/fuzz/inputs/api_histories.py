# SPDX-License-Identifier: Apache-2.0
"""Histories of a real kube-apiserver and etcd with faults, and what must be known at their end.

As histories.py without its model: objects are written to a real server, and real Reflectors read
them over sockets through a proxy that cuts, delays, refuses and garbles. WORKERS histories run at
once, each in its own namespace with its own proxy. One in ALONE_EVERY runs alone; there etcd is
restored from a snapshot, or the server is killed and restarted.

What must hold:

- The Reflectors report no deletion that did not happen. (A deleted name is never used again.)
- After the faults the Reflectors know what the server has. The periodic re-list does not help,
  because it comes later than a history lasts, except in histories that run alone: what changes
  after a restore and before a watch reconnects may have versions that the watch has passed, and
  then only a list finds it, unless the last change that the watch knows was lost as well.
- The policy computes the same from the events, in any order, as from a fresh list.
"""

import contextlib
import json
import math
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kbpf.model.events import Delete, Event, Kind, ObjectKey, Upsert
from kbpf.source.api import credentials as source
from kbpf.source.api.kubeconfig import find_access
from kbpf.source.api.reflector import RELIST_INTERVAL, Reflector
from kbpf.source.api.resource import SERVICES, SLICES
from kbpf.source.decode import decode
from tests.campaigns import deadline
from tests.fuzz.inputs.histories import OPERATIONS, differing, same_policy
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Kube, Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, namespace, port, service, slice_port
from tests.support.faults.faults import Cut, FaultProxy
from tests.support.lab.lab import PATIENCE, until

HISTORIES = 1_000
WORKERS = 6
ALONE_EVERY = 25
NAMES = 12
"""Objects of a kind that exist at the same time."""
FAULTS = 0.15
"""The share of operations that come with a fault."""
SILENCE_SECONDS = 2.0
"""The silence after which a watch counts as dead; some watches are frozen."""
RELIST_ALONE_SECONDS = 20.0
PAUSE_SECONDS = 0.05
"""The longest pause of a Reflector before a retry."""
CATCH_UP_SECONDS = PATIENCE
KINDS = {Kind.SERVICE: "Service", Kind.SLICE: "EndpointSlice"}
STATUSES = (500, 503, 429, 401, 410, 504)


def key_of(kind: Kind, obj: Object) -> ObjectKey:
    """The Reflector's key of the object."""
    return ObjectKey(kind, obj["metadata"]["namespace"], obj["metadata"]["name"])


class Observer:
    """What the Reflectors of one history have reported of its namespace."""

    def __init__(self, space: str) -> None:
        self._space = space
        self._lock = threading.Lock()
        self.known: dict[ObjectKey, Any] = {}
        self.events: list[Event] = []
        self.may_go: set[ObjectKey] = set()
        self.is_restored = False
        self.wrong: list[str] = []

    def put(self, event: Event) -> None:
        """The Reflectors' threads call this for each event."""
        if isinstance(event, Delete | Upsert) and event.key.namespace != self._space:
            return
        with self._lock:
            self.events.append(event)
            if isinstance(event, Upsert):
                self.known[event.key] = event.object
            elif isinstance(event, Delete):
                self.known.pop(event.key, None)
                if event.key not in self.may_go and not self.is_restored:
                    self.wrong.append(f"{event.key} was reported as deleted, but was not")

    def snapshot(self) -> dict[ObjectKey, Any]:
        with self._lock:
            return dict(self.known)


class History:
    """One history. `alone`: no other one runs, so the server itself may fail."""

    def __init__(self, server: ApiServer, proxy: FaultProxy, space: str, seed: int, alone: bool) -> None:
        self._server, self._proxy, self._space, self._alone = server, proxy, space, alone
        self._chance = random.Random(seed)
        self._observer = Observer(space)
        self._there: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
        self._made = 0
        self._backup: dict[Kind, list[str]] | None = None
        self.done: Counter[str] = Counter()

    def run(self, operations: int) -> None:
        """From an empty namespace to an empty one. Raises AssertionError."""
        with tempfile.TemporaryDirectory(prefix="kbpf-history-") as folder:
            access = find_access(self._proxy.kubeconfig(Path(folder) / "kubeconfig"))
            cluster = source.Cluster(access)
            reflectors = [
                Reflector(
                    cluster,
                    resource,
                    self._observer.put,
                    rng=random.Random(self._chance.random()).random,
                    wait=_wait_briefly,
                    silence_timeout=SILENCE_SECONDS,
                    relist_interval=RELIST_ALONE_SECONDS if self._alone else RELIST_INTERVAL,
                )
                for resource in (SERVICES, SLICES)
            ]
            for reflector in reflectors:
                reflector.start()
            try:
                self._play(operations)
            finally:
                self._proxy.heal()
                for reflector in reflectors:
                    reflector.stop()

    def _play(self, operations: int) -> None:
        with self._server.kube() as kube:
            for number in range(operations):
                if self._chance.random() < FAULTS:
                    self._fault()
                self._operate(kube)
                if self._alone and number in (operations // 3, 2 * operations // 3):
                    self._server_fault(is_second=number > operations // 2)
            self._proxy.heal()
            there = self._list(kube)
            _caught_up(self._observer, there)
            assert self._observer.wrong == []
            self._check_policy(there)
            for kind, names in self._there.items():
                for name in names:
                    kube.delete(KINDS[kind], name, self._space)

    def _list(self, kube: Kube) -> dict[ObjectKey, Any]:
        found = {}
        for kind, name in KINDS.items():
            for obj in kube.list(name, self._space)["items"]:
                text = json.dumps({"kind": name} | obj).encode()
                found[key_of(kind, obj)] = decode.decode_object(kind, text).object
        return found

    def _check_policy(self, there: dict[ObjectKey, Any]) -> None:
        queues = {kind: list[Event]() for kind in KINDS}
        for event in self._observer.events:
            queues[event.key.kind if isinstance(event, Delete | Upsert) else event.kind].append(event)
        whole = [Upsert(key, obj, 0.0) for key, obj in there.items()]
        same_policy(self._chance, list(queues.values()), whole)

    # ---- operations ----------------------------------------------------------------------------

    def _operate(self, kube: Kube) -> None:
        kind = self._chance.choice(list(KINDS))
        names, luck = self._there[kind], self._chance.random()
        if names and (luck < 0.25 or len(names) >= NAMES):
            name = names.pop(self._chance.randrange(len(names)))
            self._observer.may_go.add(ObjectKey(kind, self._space, name))
            kube.delete(KINDS[kind], name, self._space)
            self.done["deleted"] += 1
        elif names and luck < 0.6:
            kube.replace(self._object(kind, self._chance.choice(names)))
            self.done["changed"] += 1
        else:
            self._made += 1
            names.append(f"s{self._made}")
            kube.create(self._object(kind, names[-1]))
            self.done["created"] += 1

    def _object(self, kind: Kind, name: str) -> Object:
        number = self._chance.randint(1, 250)
        if kind is Kind.SERVICE:
            return service(name, port(80, target=number), namespace=self._space)
        owner = self._chance.choice(self._there[Kind.SERVICE] or ["none"])
        ends = [endpoint(f"10.1.0.{number}"), endpoint(f"10.1.1.{number}", ready=None)]
        ports = [slice_port(self._chance.randint(1, 250))]
        return endpoint_slice(owner, *ends, ports=ports, name=name, namespace=self._space)

    def _server_fault(self, is_second: bool) -> None:
        """Restarts the server; or makes a snapshot, and restores it the second time."""
        if self._chance.random() < 0.3 and self._backup is None:
            self._server.kill()
            self._server.restart()
            self.done["restarted"] += 1
        elif not is_second:
            self._server.back_up()
            self._backup = {kind: list(names) for kind, names in self._there.items()}
        elif self._backup is not None:
            self._observer.is_restored = True
            self._server.restore()
            self._there = self._backup
            self.done["restored"] += 1

    # ---- faults --------------------------------------------------------------------------------

    def _fault(self) -> None:
        faults: dict[str, Callable[[], object]] = {
            "cut": lambda: self._proxy.cut_watches(self._chance.choice(list(Cut))),
            "expired": self._proxy.expire_watches,
            "error": lambda: self._proxy.answer(self._chance.choice(STATUSES), self._chance.randint(1, 3)),
            "no stream": lambda: self._proxy.refuse_initial_events(self._chance.choice((400, 422))),
            "slow": lambda: self._proxy.delay(0.3 * self._chance.random(), 2),
            "frozen": self._proxy.freeze_watches,
            "outage": self._proxy.refuse,
            "rubbish": lambda: self._proxy.send(b'{"type":"MODIFIED","object":{"metadata":\n'),
            "doubles": lambda: self._proxy.rewrite_lines(lambda line: line * 2),
            "healed": self._proxy.heal,
        }
        name = self._chance.choice([*faults, "healed", "healed"])
        self.done[name] += 1
        with contextlib.suppress(OSError):  # the client has already disconnected
            faults[name]()


def _wait_briefly(stop: threading.Event, seconds: float) -> object:
    return stop.wait(min(seconds, PAUSE_SECONDS))


def _caught_up(observer: Observer, there: dict[ObjectKey, Any]) -> None:
    try:
        until("what is known is what the server has", lambda: observer.snapshot() == there, CATCH_UP_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}: {differing(observer.snapshot(), there)}") from None


def history(server: ApiServer, space: str, seed: int, operations: int, alone: bool) -> Counter[str]:
    """Runs one history; returns its operations and faults. AssertionErrors name the seed."""
    with FaultProxy(server) as proxy:
        made = History(server, proxy, space, seed, alone)
        try:
            made.run(operations)
        except AssertionError as error:
            raise AssertionError(f"history {seed}{' alone' * alone}: {error}") from error
    return made.done


def histories(server: ApiServer, seed: int, count: int, operations: int, until: float = math.inf) -> Counter[str]:
    """Runs `count` histories from this seed on, one in ALONE_EVERY alone; returns what they did."""
    done: Counter[str] = Counter()
    with server.kube() as kube:
        for worker in range(WORKERS):
            kube.create(namespace(f"h{worker}"))
    with ThreadPoolExecutor(WORKERS) as pool:
        for first in range(0, count, ALONE_EVERY):
            if time.monotonic() > until:
                break
            numbers = list(range(first + 1, min(first + ALONE_EVERY, count)))
            parts = [numbers[worker::WORKERS] for worker in range(WORKERS)]

            def work(worker: int, parts: list[list[int]] = parts) -> Counter[str]:
                total: Counter[str] = Counter()
                for number in parts[worker]:
                    total += history(server, f"h{worker}", seed + number, operations, False)
                    total["histories"] += 1
                return total

            for total in pool.map(work, range(WORKERS)):
                done += total
            done += history(server, "h0", seed + first, operations, True)
            done["histories"] += 1
            print(f"{done['histories']} histories", flush=True)
    return done


def campaign(seed: int, minutes: float | None) -> None:
    """Runs HISTORIES of OPERATIONS each, from this seed on."""
    until = deadline(minutes)
    with ApiServer() as server:
        print(dict(histories(server, seed, HISTORIES, OPERATIONS, until)))

"""What the maps count, for metrics.

Any thread may ask: the pinned maps are opened anew each time, so nothing is shared with the writer,
who replaces maps as they grow. read() is what is known at once. count() walks the maps where
connections stand: those of the packet path in `flows`, those of the socket hooks in `sock_peers`
and `udp_flows`; and `counts`, where the programs add up what connections came to. That
takes 120 ms for 100,000 connections, most of it in the kernel.

What a backend that is gone has had is kept with its Service, so that no sum ever falls: count()
moves it to the backend GONE now and then.
"""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from heapq import heapify, heappop, heappush, nlargest
from itertools import chain
from operator import add
from typing import Final

from kbpf.dataplane.bpf.changes.quotas import CONTESTED, RESERVED, SHARE
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.flow_entries import HOLDS, columns, is_needed, is_open
from kbpf.dataplane.bpf.maps.layout import (
    COUNTS,
    FORGETFUL,
    MAPS,
    PAIR,
    PEER,
    SERVICE_NAME,
    U32,
    UDP_FLOW,
    UDP_FLOWS,
    FlowPart,
    Reason,
    Target,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError
from kbpf.kernel.bpf import objects
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import format_endpoint
from kbpf.model.config import Accounting, Config, is_system
from kbpf.model.metrics import (
    BEGUN,
    FULL,
    Decision,
    Measures,
    Pair,
    Pause,
    PortName,
    Table,
    Totals,
    Tracked,
    Traffic,
)
from kbpf.model.objects import Protocol, ServiceName

VERDICTS: Final = {
    Reason.NOT_A_SERVICE: "pass",
    Reason.NEEDS_SOURCE: "pass",
    Reason.LEFT_TO_PACKETS: "pass",
    Reason.NO_ENDPOINTS: "refuse",
    Reason.SET_VANISHED: "refuse",
    Reason.UNKNOWN_PORT: "refuse",
    Reason.NO_LOCAL_ENDPOINTS: "drop",
    Reason.NO_SNAT_PORT: "drop",
    Reason.NOT_REWRITTEN: "drop",
    Reason.NOT_ALLOWED: "drop",
    Reason.NO_ROUTE: "drop",
    Reason.PAUSED: "drop",
    Reason.TABLE_FULL: "drop",
    Reason.RATE_LIMITED: "drop",
    Reason.NEW_FLOW: "note",
    Reason.EVICTED: "note",
    Reason.REDIRECTED: "note",
    Reason.NOT_RECORDED: "note",
}
"""Any other reason means that it was translated. A note counts what happened beside a verdict."""

SOCKETS: Final = ("sock_peers", "udp_flows")
"""What connected and unconnected sockets hold, of which the kernel must have BTF to show it."""

WALKED: Final = ("flows", *SOCKETS, "affinity")
"""Maps that programs write, whose entries are counted; the others are as full as one of these."""

SWEEP_SECONDS: Final = 300.0
"""So often what backends that are gone have had is moved to GONE."""

NO_BACKEND: Final = 0
GONE: Final = 0xFFFF_FFFF
ALL_BACKENDS: Final = 0xFFFF_FFFE
"""Of a Service port whose namespace has more than its share of `counts`: see account.h."""
MANY: Final = 256
"""More names than that are read all at once."""

_PROTOCOLS: Final = {int(protocol): protocol.name for protocol in Protocol}
_ZERO: Final = Totals()
KNOWN: Final = {
    Accounting.OFF: frozenset[str](), Accounting.CONNECTIONS: BEGUN, Accounting.FULL: FULL
}  # fmt: skip
Ids = tuple[int, int]
"""Of a Service port and of a backend."""


class Meter:
    """Reads the maps below one pin folder. One thread reads and one counts."""

    def __init__(
        self, pins: Pins, config: Config, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pins, self._config, self._clock = pins, config, clock
        self._ports: list[PortName] = []
        self._places: dict[PortName, int] = {}  # in that list
        self._place: dict[int, int] = {}  # the same by id, and these are never used twice
        self._entries: Mapping[str, int] = {}
        self._sweep_due = clock() + SWEEP_SECONDS
        self._special = {NO_BACKEND, GONE}  # the first sweep gives Service ports their pairs again

    # ---- what is known at once -------------------------------------------------------------

    def read(self, fill: Mapping[str, int]) -> Measures:
        """Tables and decisions. `fill`: entries of the maps that the agent writes. What cannot be
        read, since it is just being replaced or was removed, is left out.
        """
        tables: list[Table] = []
        decisions: tuple[Decision, ...] = ()
        entries = {**fill, **self._entries}
        for name, spec in MAPS.items():
            if spec.kind not in (objects.MAP_HASH, objects.MAP_LRU_HASH) and name != "reasons":
                continue
            try:
                with pinning.open_map(self._pins.maps / name, spec) as held:
                    if name == "reasons":
                        decisions = tuple(_decision(held, reason) for reason in Reason)
                        continue
                    room = held.max_entries
                    most = max(room, spec.limit(self._config.sizes))
                    limit = None if name in FORGETFUL else most
                    tables.append(Table(name, entries.get(name), room, limit, held.memory()))
            except KernelError:
                continue
        return Measures(tuple(tables), decisions)

    # ---- what takes long -------------------------------------------------------------------

    def count(self, pause: Pause) -> Traffic:
        """Connections and what they came to, by Service port."""
        wanted, now = self._config.serving.backend_series, Census()
        for name in WALKED:
            self._walk(name, lambda held: now.take(held, bool(wanted)), pause)
        had = _Sums(wanted)
        self._walk("counts", had.take, pause)
        self._entries = {**now.entries, "counts": had.entries}
        known = self._learn(now.services.keys() | had.services.keys())
        pause()
        if known and self._clock() >= self._sweep_due:
            self._sweep(had.services)
            self._sweep_due = self._clock() + SWEEP_SECONDS
        if known:
            self._sum_up(had.sizes)
        return Traffic(
            self._by_name(now.services),
            tuple(self._totals_by_name(had.services)),
            KNOWN[self._config.accounting],
            self._with_addresses(had.busiest, now.pairs),
            now.tracked if self._config.packet_path else None,
        )

    def _walk(self, name: str, take: Callable[[Map], Iterable[None]], pause: Pause) -> None:
        """Through a map, if it can be read."""
        try:
            with pinning.open_map(self._pins.maps / name, MAPS[name]) as held:
                for _ in take(held):
                    pause()
        except KernelError:
            return

    def _by_name(self, by_id: Mapping[int, int]) -> tuple[tuple[PortName, int], ...]:
        place, totals = self._place, [0] * len(self._ports)
        for service_id, count in by_id.items():
            if service_id in place:
                totals[place[service_id]] += count
        return tuple(pair for pair in zip(self._ports, totals, strict=True) if pair[1])

    def _totals_by_name(self, had: Mapping[int, Totals]) -> Iterator[tuple[PortName, Totals]]:
        sums: dict[int, Totals] = {}
        for service_id, more in had.items():
            if (at := self._place.get(service_id)) is not None:
                sums[at] = _sum(sums[at], more) if at in sums else more
        return ((self._ports[at], total) for at, total in sums.items())

    def _with_addresses(
        self, busiest: Iterable[tuple[Totals, Ids]], now: Mapping[Ids, int]
    ) -> tuple[Pair, ...]:
        """Those whose Service and backend are still there."""
        found: dict[tuple[PortName, str], Pair] = {}
        try:
            with pinning.open_map(self._pins.maps / "backends", MAPS["backends"]) as held:
                for total, ids in busiest:
                    raw = held.lookup(U32.pack(ids[1]))
                    if raw is None or ids[0] not in self._place:
                        continue
                    target = Target.unpack(raw)
                    name = self._ports[self._place[ids[0]]]
                    where = format_endpoint(target.address, target.port)
                    found[name, where] = Pair(name, where, now.get(ids, 0), total)
        except KernelError:
            return ()
        return tuple(found.values())

    def _sweep(self, asked: Container[int]) -> None:
        """Moves what backends that are gone have had, and drops what those of these Services have
        had that are gone. What a program adds between the two steps is lost: a byte count of
        somebody's last second.
        """
        try:
            with (
                pinning.open_map(self._pins.maps / "counts", MAPS["counts"]) as counts,
                pinning.open_map(self._pins.maps / "backends", MAPS["backends"]) as backends,
            ):
                living = {U32.unpack(key)[0] for key, _ in backends.items()}
                living |= self._special
                self._special = {NO_BACKEND, GONE, ALL_BACKENDS}
                over: list[bytes] = []
                gone: dict[int, Totals] = {}
                for key, raw in counts.items():
                    service, backend = PAIR.unpack(key)
                    if service not in self._place and service in asked:
                        over.append(key)
                    elif backend not in living and backends.lookup(U32.pack(backend)) is None:
                        over.append(key)
                        gone[service] = _sum(gone.get(service, _ZERO), Totals(*COUNTS.unpack(raw)))
                for service, total in gone.items():
                    key = PAIR.pack(service, GONE)
                    kept = Totals(*COUNTS.unpack(counts.lookup(key) or bytes(COUNTS.size)))
                    counts.update(key, COUNTS.pack(*_sum(kept, total)))
                for key in over:
                    counts.delete(key)
        except KernelError:
            return

    def _sum_up(self, sizes: Mapping[int, int]) -> None:
        """Leaves the largest Service ports of namespaces that have more than their share one entry
        each. What a program adds between the steps is lost, as in _sweep().
        """
        ports = {
            service: (name[0], size)
            for service, size in sizes.items()
            if (name := self._name_of(service))
            and not is_system(ServiceName(*name[:2]), self._config)
        }
        limit = MAPS["counts"].limit(self._config.sizes)
        chosen = beyond_share(ports, sum(sizes.values()), limit)
        if not chosen:
            return
        try:
            with pinning.open_map(self._pins.maps / "counts", MAPS["counts"]) as counts:
                entries: dict[int, list[tuple[bytes, bytes]]] = {service: [] for service in chosen}
                for key, raw in counts.items():
                    service, _ = PAIR.unpack(key)
                    if service in entries:
                        entries[service].append((key, raw))
                for service, held in entries.items():
                    total = _ZERO
                    for _, raw in held:
                        total = _sum(total, Totals(*COUNTS.unpack(raw)))
                    own = PAIR.pack(service, ALL_BACKENDS)
                    keys = [key for key, _ in held if key != own]
                    for key in keys[:1]:  # or there is no room for the new entry
                        counts.delete(key)
                    counts.update(own, COUNTS.pack(*total))
                    for key in keys[1:]:
                        counts.delete(key)
        except KernelError:
            return

    def _name_of(self, service_id: int) -> PortName | None:
        at = self._place.get(service_id)
        return None if at is None else self._ports[at]

    def _learn(self, wanted: Set[int]) -> bool:
        """The names of these ids; others are forgotten when they are many. Whether they could be
        read: an id without one is of a Service that is gone.
        """
        if len(self._place) > 2 * len(wanted):
            self._place, self._ports, self._places = {}, [], {}
        unknown = {U32.pack(i): i for i in wanted if i not in self._place}
        if not unknown:
            return True
        try:
            with pinning.open_map(
                self._pins.maps / "service_names", MAPS["service_names"]
            ) as names:
                found: Iterable[tuple[bytes, bytes | None]]
                if len(unknown) > MANY:
                    found = ((key, raw) for key, raw in names.items() if key in unknown)
                else:
                    found = ((key, names.lookup(key)) for key in unknown)
                for key, raw in found:
                    if raw is not None:
                        self._place[unknown[key]] = self._place_of(raw)
        except KernelError:
            return False
        return True

    def _place_of(self, raw: bytes) -> int:
        """Where the count of this struct service_name is kept; the same for both families."""
        namespace, service, port, protocol, _ = SERVICE_NAME.unpack(raw)
        texts = (text.rstrip(b"\0").decode(errors="replace") for text in (namespace, service, port))
        name: PortName = (*texts, _PROTOCOLS.get(protocol, str(protocol)))
        if name not in self._places:
            self._places[name] = len(self._ports)
            self._ports.append(name)
        return self._places[name]


class Census:
    """Open connections: by Service, by Service and backend where that is wanted, those
    that are tracked; and entries by map.
    """

    def __init__(self) -> None:
        self.services: Counter[int] = Counter()
        self.pairs: Counter[Ids] = Counter()
        self.entries: dict[str, int] = {}
        self.tracked: Tracked | None = None

    def take(self, held: Map, with_backends: bool) -> Iterator[None]:
        """Adds what is in this map, a piece at a time."""
        name, now = held.name, time.monotonic_ns()
        self.entries[name] = needed = 0
        for _, values in held.batches():
            self.entries[name] += len(values) // held.value_size
            if name != "affinity":
                if name == "flows":
                    services, backends, more = _live(values, now)
                    needed += more
                else:
                    services, backends = _peers(name, values)
                self.services.update(services)
                if with_backends:
                    self.pairs.update(zip(services, backends, strict=True))
            yield
        if name == "flows":
            self.tracked = Tracked(needed, int(held.max_entries / MAPS[name].per))


class _Sums:
    """What connections came to, by Service; and the busiest pairs of Service and backend, `most` of
    them. There may be 131,072 pairs, of which no more is kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.entries = 0
        self.services: dict[int, Totals] = {}
        self.sizes: Counter[int] = Counter()
        self.busiest: list[tuple[Totals, Ids]] = []

    def take(self, held: Map) -> Iterator[None]:
        """Adds what is in `counts`, a piece at a time."""
        services = self.services
        for keys, values in held.batches():
            for (service, _), total in _pairs(keys, values):
                services[service] = _sum(services.get(service, _ZERO), total)
                self.sizes[service] += 1
                self.entries += 1
            if self._most:
                pairs = (
                    (total, ids)
                    for ids, total in _pairs(keys, values)
                    if ids[1] not in (NO_BACKEND, GONE, ALL_BACKENDS)
                )
                self.busiest = nlargest(self._most, chain(self.busiest, pairs))
            yield


def beyond_share(ports: Mapping[int, tuple[str, int]], entries: int, limit: int) -> list[int]:
    """The Service ports that get one entry of `counts` each, so that no namespace has more than
    SHARE times the room that is left, as for the maps of Services (limits.py): the largest ones of
    the namespace that has most. `ports`: namespace and entries by id.
    """
    if entries <= CONTESTED * limit:
        return []
    by_namespace: dict[str, list[tuple[int, int]]] = {}
    for service, (namespace, size) in ports.items():
        by_namespace.setdefault(namespace, []).append((size, service))
    heap = []
    for namespace, own in by_namespace.items():
        own.sort()
        heap.append((-sum(size for size, _ in own), namespace))
    heapify(heap)
    chosen: list[int] = []
    while heap:
        used, namespace = heappop(heap)
        if -used <= SHARE * (limit * (1 - RESERVED) - entries):
            break
        size, service = by_namespace[namespace].pop()
        if size > 1:
            chosen.append(service)
            entries -= size - 1
            heappush(heap, (used + size - 1, namespace))
    return chosen


def _pairs(keys: bytes, values: bytes) -> Iterator[tuple[Ids, Totals]]:
    return zip(PAIR.iter_unpack(keys), map(Totals._make, COUNTS.iter_unpack(values)), strict=True)


def _peers(name: str, values: bytes) -> tuple[list[int], list[int]]:
    """The ids of Service and backend of what these sockets hold, values back to back."""
    if name == "sock_peers":
        words = memoryview(values).cast("I")
        return words[12 :: PEER.size // 4].tolist(), words[13 :: PEER.size // 4].tolist()
    flows = b"".join(values[at + 8 : at + UDP_FLOWS.size]
                     for at in range(0, len(values), UDP_FLOWS.size))  # fmt: skip
    words = memoryview(flows).cast("I")
    step = UDP_FLOW.size // 4
    ids = [pair for pair in zip(words[16::step], words[17::step], strict=True) if pair[0]]
    return [service for service, _ in ids], [backend for _, backend in ids]


def _live(values: bytes, now: int) -> tuple[list[int], list[int], int]:
    """The ids of Service and backend of the open connections among those struct nat, back to back:
    of each the entry that is the client's own. And how many of them would not make room by
    themselves.
    """
    found = [
        (service, backend, is_needed(state, last, now))
        for service, backend, last, protocol, state, part in columns(values)
        if part == FlowPart.QUESTION and is_open(state) and last + HOLDS[protocol, state] > now
    ]
    needed = sum(one for _, _, one in found)
    return [service for service, _, _ in found], [backend for _, backend, _ in found], needed


def totals_in(held: Map, had: dict[Ids, Totals]) -> Iterator[None]:
    """What is in `counts`, a piece at a time."""
    for keys, values in held.batches():
        had.update(_pairs(keys, values))
        yield


def _sum(a: Totals, b: Totals) -> Totals:
    return Totals._make(map(add, a, b))


def _decision(held: Map, reason: Reason) -> Decision:
    raw = held.lookup(U32.pack(reason)) or b""
    count = sum(memoryview(raw).cast("Q"))
    return Decision(reason.name.lower(), VERDICTS.get(reason, "translate"), count)

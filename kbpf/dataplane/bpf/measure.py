"""What the maps count, for metrics.

Any thread may ask: the pinned maps are opened anew each time, so nothing is shared with the writer,
who replaces maps as they grow. Connections of a Service are counted where they stand: those of the
packet path in `flows`, those of the socket hooks in `sock_peers`, `udp_peers` and `udp_flows`. That
costs nothing per packet or per connection; counting 100,000 of them takes 120 ms, most of it in the
kernel, so it is done the less often the longer it takes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kbpf.dataplane.bpf import load
from kbpf.dataplane.bpf.flows import HOLDS, columns
from kbpf.dataplane.bpf.layout import (
    FLOW,
    MAPS,
    PEER,
    SERVICE_NAME,
    U32,
    FlowPart,
    Reason,
)
from kbpf.dataplane.bpf.load import Pins
from kbpf.errors import KernelError
from kbpf.kernel import libbpf
from kbpf.kernel.libbpf import Map
from kbpf.model.config import MapSizes
from kbpf.model.measures import Decision, Measures, PortName, Table
from kbpf.model.objects import Protocol

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
    Reason.NEW_FLOW: "note",
    Reason.EVICTED: "note",
    Reason.NOT_RECORDED: "note",
}
"""Any other reason means that it was translated. A note counts what happened beside a verdict."""

SOCKETS: Final = {"sock_peers": (PEER.size, 40), "udp_peers": (PEER.size, 40),
                  "udp_flows": (FLOW.size, 52)}  # fmt: skip
"""Of the value: its length, and where the Service's id stands."""

COUNTED: Final = frozenset(("flows", *SOCKETS, "affinity"))
"""Maps that programs write, whose entries are counted; the others are as full as one of these."""

SHARE: Final = 0.005
"""Of a processor's time: connections are not counted again before they have cost no more."""


MANY: Final = 256
"""More names than that are read all at once."""

_PROTOCOLS: Final = {int(protocol): protocol.name for protocol in Protocol}


class Meter:
    """Reads the maps below one pin folder. One thread at a time."""

    def __init__(
        self, pins: Pins, sizes: MapSizes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pins, self._sizes, self._clock = pins, sizes, clock
        self._ports: list[PortName] = []
        self._places: dict[PortName, int] = {}  # in that list
        self._place: dict[int, int] = {}  # the same by id, and these are never used twice
        self._counted: dict[str, int] = {}
        self._connections: tuple[tuple[PortName, int], ...] = ()
        self._due = 0.0

    def read(self, fill: Mapping[str, int]) -> Measures:
        """All of it. `fill`: entries of the maps that the agent writes. What cannot be read, since
        it is just being replaced or was removed, is left out. Connections are as they were counted
        last, if it is too early to count again.
        """
        tables: list[Table] = []
        decisions: tuple[Decision, ...] = ()
        by_id: Counter[int] | None = Counter() if self._clock() >= self._due else None
        start = time.thread_time()
        for name, spec in MAPS.items():
            try:
                with load.open_map(self._pins.maps / name, spec) as held:
                    if by_id is not None and name in COUNTED:
                        self._counted[name] = _count(name, held, by_id)
                    if name == "reasons":
                        decisions = tuple(_decision(held, reason) for reason in Reason)
                    if spec.kind in (libbpf.MAP_HASH, libbpf.MAP_LRU_HASH):
                        entries = self._counted.get(name, fill.get(name))
                        room = held.max_entries
                        limit = max(room, spec.limit(self._sizes))
                        tables.append(Table(name, entries, room, limit, held.memory()))
            except KernelError:
                continue
        if by_id is not None:
            self._connections = self._by_name(by_id)
            self._due = self._clock() + (time.thread_time() - start) / SHARE
        return Measures(tuple(tables), decisions, self._connections)

    def _by_name(self, by_id: Mapping[int, int]) -> tuple[tuple[PortName, int], ...]:
        self._learn(by_id)
        place, totals = self._place, [0] * len(self._ports)
        for service_id, count in by_id.items():
            if service_id in place:
                totals[place[service_id]] += count
        return tuple(pair for pair in zip(self._ports, totals, strict=True) if pair[1])

    def _learn(self, wanted: Mapping[int, object]) -> None:
        """The names of these ids; others are forgotten when they are many."""
        if len(self._place) > 2 * len(wanted):
            self._place, self._ports, self._places = {}, [], {}
        unknown = {U32.pack(i): i for i in wanted if i not in self._place}
        if not unknown:
            return
        try:
            with load.open_map(self._pins.maps / "service_names", MAPS["service_names"]) as names:
                found: Iterable[tuple[bytes, bytes | None]]
                if len(unknown) > MANY:
                    found = ((key, raw) for key, raw in names.items() if key in unknown)
                else:
                    found = ((key, names.lookup(key)) for key in unknown)
                for key, raw in found:
                    if raw is not None:
                        self._place[unknown[key]] = self._place_of(raw)
        except KernelError:
            return

    def _place_of(self, raw: bytes) -> int:
        """Where the count of this struct service_name is kept; the same for both families."""
        namespace, service, port, protocol, _ = SERVICE_NAME.unpack(raw)
        texts = (text.rstrip(b"\0").decode(errors="replace") for text in (namespace, service, port))
        name: PortName = (*texts, _PROTOCOLS.get(protocol, str(protocol)))
        if name not in self._places:
            self._places[name] = len(self._ports)
            self._ports.append(name)
        return self._places[name]


def _count(name: str, held: Map, by_id: Counter[int]) -> int:
    """Adds the connections in it by their Service's id; how many entries it has."""
    entries = 0
    now = time.monotonic_ns()
    for keys, values in held.batches():
        entries += len(keys) // held.key_size
        if name == "flows":
            by_id.update(_live(values, now))
        elif name in SOCKETS:
            size, at = SOCKETS[name]
            by_id.update(memoryview(values).cast("I")[at // 4 :: size // 4])
    return entries


def _live(values: bytes, now: int) -> list[int]:
    """The Services of the connections among those struct nat, back to back, whose time is not
    over: of each the entry that is the client's own.
    """
    return [
        service
        for service, last, protocol, state, part in columns(values)
        if part == FlowPart.QUESTION and last + HOLDS[protocol, state] > now
    ]


def _decision(held: Map, reason: Reason) -> Decision:
    raw = held.lookup(U32.pack(reason)) or b""
    count = sum(memoryview(raw).cast("Q"))
    return Decision(reason.name.lower(), VERDICTS.get(reason, "translate"), count)

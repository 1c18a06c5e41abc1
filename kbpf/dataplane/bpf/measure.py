"""What the maps count, for metrics.

Any thread may ask: the pinned maps are opened anew each time, so nothing is shared with the writer,
who replaces maps as they grow. Connections of a Service are counted where they stand: those of the
packet path in `flows`, those of the socket hooks in `sock_peers`, `udp_peers` and `udp_flows`. That
costs nothing per packet or per connection; a walk over 100,000 of them takes some 30 ms, most of it
in the kernel.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from kbpf.dataplane.bpf import load
from kbpf.dataplane.bpf.layout import (
    FLOW,
    MAPS,
    NAT,
    PEER,
    U32,
    Reason,
    TcpState,
    idle_seconds,
    unpack_name,
)
from kbpf.dataplane.bpf.load import Pins
from kbpf.errors import KernelError
from kbpf.kernel import libbpf
from kbpf.kernel.libbpf import Map
from kbpf.model.config import MapSizes
from kbpf.model.desired import ServicePortKey
from kbpf.model.measures import Decision, Measures, Table, Traffic
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
    Reason.MENDED: "note",
    Reason.NOT_RECORDED: "note",
}
"""Any other reason means that it was translated. A note counts what happened beside a verdict."""

SOCKETS: Final = {"sock_peers": (PEER.size, 40), "udp_peers": (PEER.size, 40),
                  "udp_flows": (FLOW.size, 52)}  # fmt: skip
"""Of the value: its length, and where the Service's id stands."""

COUNTED: Final = frozenset(("flows", *SOCKETS, "affinity"))
"""LRU maps whose entries are counted; the others are as full as one of these."""

NANO: Final = 1_000_000_000


class Meter:
    """Reads the maps below one pin folder. One thread at a time."""

    def __init__(self, pins: Pins, sizes: MapSizes) -> None:
        self._pins, self._sizes = pins, sizes
        self._names: dict[int, ServicePortKey] = {}  # ids are never used twice

    def read(self, fill: Mapping[str, int], repairs: Mapping[str, int]) -> Measures:
        """All of it. `fill`: entries of the maps that the agent writes. What cannot be read, since
        it is just being replaced or was removed, is left out.
        """
        connections: Counter[int] = Counter()
        tables, decisions = [], []
        for name, spec in MAPS.items():
            try:
                with load.open_map(self._pins.maps / name, spec) as held:
                    entries = fill.get(name)
                    if name in COUNTED:
                        entries = _count(name, held, connections)
                    if name == "reasons":
                        decisions = [_decision(held, reason) for reason in Reason]
                    if spec.kind in (libbpf.MAP_HASH, libbpf.MAP_LRU_HASH):
                        room = held.max_entries
                        limit = max(room, spec.limit(self._sizes))
                        tables.append(Table(name, entries, room, limit, held.memory()))
            except KernelError:
                continue
        return Measures(
            tuple(tables), tuple(decisions), tuple(self._traffic(connections)), (*repairs.items(),)
        )

    def _traffic(self, connections: Counter[int]) -> Iterator[Traffic]:
        self._learn(connections)
        total: Counter[tuple[str, str, str, str]] = Counter()
        for service_id, count in connections.items():
            key = self._names.get(service_id)
            if key is not None:
                total[key.namespace, key.name, key.port, key.protocol.name] += count
        return (Traffic(*key, count) for key, count in total.items())

    def _learn(self, wanted: Mapping[int, object]) -> None:
        """The names of these ids; others are forgotten."""
        self._names = {i: key for i, key in self._names.items() if i in wanted}
        unknown = [i for i in wanted if i not in self._names]
        if not unknown:
            return
        try:
            with load.open_map(self._pins.maps / "service_names", MAPS["service_names"]) as names:
                for i in unknown:
                    raw = names.lookup(U32.pack(i))
                    if raw is not None:
                        self._names[i] = unpack_name(raw)
        except KernelError:
            return


def _count(name: str, held: Map, connections: Counter[int]) -> int:
    """Adds the connections in it by their Service's id; how many entries it has."""
    entries = 0
    now = time.monotonic_ns()
    for keys, values in held.batches():
        entries += len(keys) // held.key_size
        if name == "flows":
            connections.update(_live(values, now))
        elif name in SOCKETS:
            size, at = SOCKETS[name]
            connections.update(memoryview(values).cast("I")[at // 4 :: size // 4])
    return entries


def _live(values: bytes, now: int) -> list[int]:
    """The Services of those struct nat, back to back, whose time is not over."""
    size = NAT.size
    columns = zip(
        memoryview(values).cast("I")[88 // 4 :: size // 4],
        memoryview(values).cast("Q")[0 :: size // 8],
        values[26::size],
        values[96::size],
        strict=True,
    )
    return [
        service for service, last, protocol, state in columns if last + _HOLD[protocol, state] > now
    ]


class _Holds(dict[tuple[int, int], int]):
    """Protocol and state → ns that a connection holds without a packet."""

    def __missing__(self, key: tuple[int, int]) -> int:
        self[key] = idle_seconds(*key) * NANO
        return self[key]


_HOLD: Final = _Holds(
    {(Protocol.TCP, state): idle_seconds(Protocol.TCP, state) * NANO for state in TcpState}
)


def _decision(held: Map, reason: Reason) -> Decision:
    raw = held.lookup(U32.pack(reason)) or b""
    count = sum(memoryview(raw).cast("Q"))
    return Decision(reason.name.lower(), VERDICTS.get(reason, "translate"), count)

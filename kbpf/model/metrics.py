# SPDX-License-Identifier: Apache-2.0
"""What a data plane measures, read at one moment; the exported metrics are computed from it."""

from collections.abc import Callable, Mapping
from operator import add, sub
from typing import Final, NamedTuple

import msgspec


class TableUsage(NamedTuple):
    """The fill level of a map or table.

    `entries` is None if they are not counted, `bytes` if the kernel does not report its memory.
    `capacity` is its current size; `limit` is how far it may grow, None for a map that evicts
    entries (being full is normal there).
    """

    name: str
    entries: int | None
    capacity: int
    limit: int | None
    bytes: int | None


class ReasonCount(NamedTuple):
    """How often this reason decided about a connection or packet. `verdict`: what its sender
    sees.
    """

    reason: str
    verdict: str
    total: int


PortName = tuple[str, str, str, str]
"""A Service port of both families: namespace, Service, port, protocol."""


class ConnectionStats(NamedTuple):
    """Counters since counting began.

    `opened`: connections and datagram flows. `no_endpoint`: refused or dropped, since no backend
    was available. `not_allowed`: dropped, since the source ranges do not admit the client.
    `refused`: the backend reset the SYN, or rejected a datagram. `unanswered`: the backend did not
    answer the first SYN. `reset`: accepted by the backend, and ended by a reset or a time-out.
    `ended`: all that ended, in whatever way. `bytes_in` is from clients, `bytes_out` to them; for
    TCP sockets both are known when the connection ends. `retransmits`: segments that the client's
    side sent again. `rtt_us`: sum of the round-trip times to the backend, in microseconds, of
    `rtts` connections.
    """

    opened: int = 0
    no_endpoint: int = 0
    not_allowed: int = 0
    refused: int = 0
    unanswered: int = 0
    reset: int = 0
    ended: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    retransmits: int = 0
    rtt_us: int = 0
    rtts: int = 0

    def plus(self, other: "ConnectionStats") -> "ConnectionStats":
        """The counters of both."""
        return ConnectionStats._make(map(add, self, other))

    @property
    def failed(self) -> int:
        """The connections that failed, for whatever reason."""
        return self.no_endpoint + self.not_allowed + self.refused + self.unanswered + self.reset

    def rank(self, open_connections: int = 0) -> tuple[bool, int]:
        """A sort key for short lists: those with failures come first, then the busiest."""
        return not self.failed, -self.opened - open_connections

    def has_bytes(self, protocol: str) -> bool:
        """Whether the bytes are measured. Those of UDP sockets are not, only those of packets."""
        return protocol != "UDP" or self.bytes_in + self.bytes_out > 0


LATENCY_EXPONENT: Final = 16
LATENCY_BOUNDS: Final = tuple(2.0 ** (index - LATENCY_EXPONENT) for index in range(23))
"""The upper bounds of the buckets of a latency, in seconds."""


class Latency(NamedTuple):
    """A histogram of times. `counts`: values up to each of LATENCY_BOUNDS and above the one before,
    and last those above all of them. `sum_seconds`: their sum.
    """

    counts: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS) + 1)
    sum_seconds: float = 0.0

    def plus(self, other: "Latency") -> "Latency":
        """The histogram of the values of both."""
        counts = tuple(map(add, self.counts, other.counts))
        return Latency(counts, self.sum_seconds + other.sum_seconds)

    def since(self, earlier: "Latency") -> "Latency":
        """The histogram of the values that came after `earlier`; without values if it has more in
        any bucket, so that it is of another Service or another agent.
        """
        counts = tuple(map(sub, self.counts, earlier.counts))
        if min(counts) < 0:
            return Latency()
        return Latency(counts, self.sum_seconds - earlier.sum_seconds)

    def quantile(self, share: float) -> float | None:
        """The bound below which this share of the values is, in seconds: at most twice the exact
        quantile. None without values; infinity above all bounds.
        """
        rank, below = share * sum(self.counts), 0
        for bound, count in zip((*LATENCY_BOUNDS, float("inf")), self.counts, strict=True):
            below += count
            if below and below >= rank:
                return bound
        return None


class ServiceLatencies(NamedTuple):
    """Of TCP sockets of this node, of one Service port: from the first SYN until the handshake
    ended, and the smoothed round-trip time when the connection ended.
    """

    connect: Latency = Latency()
    round_trip: Latency = Latency()

    def plus(self, other: "ServiceLatencies") -> "ServiceLatencies":
        return ServiceLatencies(self.connect.plus(other.connect), self.round_trip.plus(other.round_trip))

    def since(self, earlier: "ServiceLatencies") -> "ServiceLatencies":
        return ServiceLatencies(self.connect.since(earlier.connect), self.round_trip.since(earlier.round_trip))


CHOICE_COUNTERS: Final = frozenset(("opened", "no_endpoint", "not_allowed"))
FAILURE_COUNTERS: Final = frozenset(("refused", "unanswered", "reset"))
ALL_COUNTERS: Final = frozenset(ConnectionStats._fields)
IPVS_COUNTERS: Final = frozenset(("opened", "bytes_in", "bytes_out"))
"""Fields of ConnectionStats: what `--accounting connections` counts; what it counts as well if the
kernel tells about the failures of sockets (bpf/trace.h); all, which `--accounting full` counts; and
those of mode ipvs.
"""


class BackendStats(NamedTuple):
    """The open connections and the counters of one backend (``address:port``) of a Service port.
    `open_connections`: None if not counted.
    """

    name: PortName
    backend: str
    open_connections: int | None
    stats: ConnectionStats


class FlowCount(NamedTuple):
    """Connections of the packet path. `live`: those that must not be evicted for a new one;
    half-open and closed ones may be, and do not count. `capacity`: the limit.
    """

    live: int
    capacity: int


class UdpCuts(NamedTuple):
    """One pass over UDP flows to backends that no longer serve: its duration, and the number of
    flows and connected sockets that it ended, by family (4, 6), for the families that it covered.
    """

    seconds: float
    flows: Mapping[int, int]


class FailingBackend(NamedTuple):
    """A backend (``address:port``) that keeps failing: `failed` of the `opened` connections to it
    were refused or not answered within `seconds`.
    """

    name: PortName
    backend: str
    failed: int
    opened: int
    seconds: float


class ConnectionProbe(NamedTuple):
    """Connections that the agent has made to Services, without a packet: how many were `tried`, and
    a line for each that was not translated as programmed.
    """

    tried: int
    failures: tuple[str, ...]


class DataPlaneMetrics(msgspec.Struct, frozen=True):
    """The counters that are cheap to read.

    `tables`: if BPF programs write the entries of a map, their number is as of the last
    connection count. `hooks`: (name, attached) for each required hook. `foreign_programs`: number
    of programs of other load balancers at these hooks and on devices; None if the data plane does
    not look for them. `bypassed_chains`: number of chains of the host that may refuse packets but
    do not guard NodePorts; None without a packet path.
    """

    tables: tuple[TableUsage, ...] = ()
    reason_counts: tuple[ReasonCount, ...] = ()
    hooks: tuple[tuple[str, bool], ...] = ()
    foreign_programs: int | None = None
    bypassed_chains: int | None = None


class TrafficStats(msgspec.Struct, frozen=True):
    """The counters that are expensive to read.

    `connections`: the number of open connections of each Service port that has any, which may be
    tens of thousands; None if not counted, as on a kernel that does not list sockets. `totals`:
    counters of each Service port, if counted; `counted_fields`: which fields of these are counted.
    `backends`, `latencies`: as many as configured, shared among namespaces. `flow_count`: None
    without a packet path. `kube_proxy_running`, `kube_proxy_rules`: whether a kube-proxy runs on
    this node, and whether rules of one are there; None if unknown.
    """

    connections: tuple[tuple[PortName, int], ...] | None = None
    totals: tuple[tuple[PortName, ConnectionStats], ...] = ()
    counted_fields: frozenset[str] = frozenset()
    backends: tuple[BackendStats, ...] = ()
    latencies: tuple[tuple[PortName, ServiceLatencies], ...] = ()
    flow_count: FlowCount | None = None
    kube_proxy_running: bool | None = None
    kube_proxy_rules: bool | None = None


Pause = Callable[[], None]
"""Called between two batches of a long count, so that it can pause."""

"""What a data plane counts, read at one moment: the metrics are made of it."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec


class TableUsage(NamedTuple):
    """A map or table. `entries` is None where they are not counted, `bytes` where the kernel does
    not say. `room` is what it has now, `limit` how far it may grow; None where an entry stays until
    its room is needed, so that being full is no sign of anything.
    """

    name: str
    entries: int | None
    capacity: int
    limit: int | None
    bytes: int | None


class ReasonCount(NamedTuple):
    """How often a connection or a packet was decided so. `verdict`: what its sender sees."""

    reason: str
    verdict: str
    total: int


PortName = tuple[str, str, str, str]
"""A Service port, both families together: namespace, Service, port, protocol."""


class ConnectionStats(NamedTuple):
    """Since counting began. `begun`: connections and flows of datagrams. `bytes_in` is from
    clients, `bytes_out` to them; of a TCP socket they are known at its end.

    `refused`: dialled in vain, since no backend would do. `unanswered`: the backend never took the
    connection; `broken`: it ended by a reset or a time-out; `ended`: those two included.
    `retransmits`: segments that the client's side sent again. `rtt_us`: the round trips to the
    backend, in microseconds, the sum of `rtts` connections.
    """

    begun: int = 0
    refused: int = 0
    unanswered: int = 0
    broken: int = 0
    ended: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    retransmits: int = 0
    rtt_us: int = 0
    rtts: int = 0


CONNECTION_COUNTERS: Final = frozenset(("begun", "refused"))
ALL_COUNTERS: Final = frozenset(ConnectionStats._fields)
IPVS_COUNTERS: Final = frozenset(("begun", "bytes_in", "bytes_out"))
"""Which numbers of Totals there are: by the setting of --accounting, and by IPVS."""


class BackendStats(NamedTuple):
    """A Service port and one of its backends (``address:port``): `now`, connections that there are,
    and what it has had.
    """

    name: PortName
    backend: str
    open_connections: int
    stats: ConnectionStats


class FlowCount(NamedTuple):
    """Connections of the packet path: `now`, those that live and would have to be driven out to
    make room (half open and closed ones make it by themselves); `most`, as many as there may be.
    """

    live: int
    capacity: int


class UdpCuts(NamedTuple):
    """One look for UDP that goes on to a backend that serves no more: the seconds that it took, and
    how many flows and connected sockets it has ended, by family (4, 6), of those that it was for.
    """

    seconds: float
    flows: Mapping[int, int]


class DataPlaneMetrics(msgspec.Struct, frozen=True):
    """What is known at once. `tables`: `entries` of those that programs write is what it was when
    connections were counted last. `hooks`: those that are wanted, and whether each is attached.
    `foreign`: programs of other load balancers at these hooks and on devices, None where nobody
    looks for them.
    """

    tables: tuple[TableUsage, ...] = ()
    reason_counts: tuple[ReasonCount, ...] = ()
    hooks: tuple[tuple[str, bool], ...] = ()
    foreign_programs: int | None = None


class TrafficStats(msgspec.Struct, frozen=True):
    """What takes long to count. `connections`: how many each Service port has now, if it has any;
    there may be tens of thousands. None where that is not counted. `totals`: what each has had,
    where that is; `known`: which of its numbers are counted. `backends`: the busiest, as many as
    are wanted. `tracked`: None where there is no packet path.
    """

    connections: tuple[tuple[PortName, int], ...] | None = None
    totals: tuple[tuple[PortName, ConnectionStats], ...] = ()
    counted_fields: frozenset[str] = frozenset()
    backends: tuple[BackendStats, ...] = ()
    flow_count: FlowCount | None = None


Pause = Callable[[], None]
"""Called by who counts, between two pieces of the work."""

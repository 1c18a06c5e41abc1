"""What a data plane counts, read at one moment: the metrics are made of it."""

from typing import NamedTuple

import msgspec


class Table(NamedTuple):
    """A map or table. `entries` is None where they are not counted, `bytes` where the kernel does
    not say. `room` is what it has now, `limit` how far it may grow.
    """

    name: str
    entries: int | None
    room: int
    limit: int
    bytes: int | None


class Decision(NamedTuple):
    """How often a connection or a packet was decided so. `verdict`: what its sender sees."""

    reason: str
    verdict: str
    times: int


class Traffic(NamedTuple):
    """A Service port, both families together, and how many connections it has now."""

    namespace: str
    service: str
    port: str
    protocol: str
    connections: int


class Measures(msgspec.Struct, frozen=True):
    """`traffic` has only Service ports with connections. `repairs`: how often the kernel was found
    otherwise than it should be, or could be, and was put right; by what.
    """

    tables: tuple[Table, ...] = ()
    decisions: tuple[Decision, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    repairs: tuple[tuple[str, int], ...] = ()

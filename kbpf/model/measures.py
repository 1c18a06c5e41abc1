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


PortName = tuple[str, str, str, str]
"""A Service port, both families together: namespace, Service, port, protocol."""


class Totals(NamedTuple):
    """Since counting began: connections, and bytes from and to clients."""

    connections: int
    bytes_in: int
    bytes_out: int


class Measures(msgspec.Struct, frozen=True):
    """`connections`: how many each Service port has now, if it has any; there may be tens of
    thousands. None where that is not counted. `totals`: what each has had, where that is.
    """

    tables: tuple[Table, ...] = ()
    decisions: tuple[Decision, ...] = ()
    connections: tuple[tuple[PortName, int], ...] | None = ()
    totals: tuple[tuple[PortName, Totals], ...] = ()

"""What serves on this node, whichever mode it is in.

Two agents' traces may be there while one mode follows the other: then the one that spoke last is
shown.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.errors import KbpfError, NotFoundError
from kbpf.views import ipvs
from kbpf.views.packet_path import availability, connections
from kbpf.views.packet_path.connections import ConnectionRow, Wanted


@dataclass(frozen=True, slots=True)
class Where:
    """The folders of the agent: of pins in mode bpf, of its state in mode ipvs."""

    pins: Path
    state: Path


def by_ipvs(where: Where) -> bool:
    """Whether the agent that spoke last is one of mode ipvs."""
    said = ipvs.status(where.state)
    if said is None:
        return False
    try:
        other = snapshot.read(where.pins, Part.STATUS).status
    except KbpfError:  # nothing is pinned, or nothing that this version understands
        return True
    return other is None or said.heartbeat >= other.heartbeat


def read(where: Where, parts: Part) -> Snapshot:
    """What is programmed. NotFoundError when no agent has been here."""
    if by_ipvs(where):
        return ipvs.read(where.state)
    return snapshot.read(where.pins, parts)


def read_pins(where: Where, parts: Part) -> Snapshot:
    """For what there is in mode bpf only: NotFoundError says so in the other one."""
    if by_ipvs(where):
        raise NotFoundError(
            "the agent of this node is in mode ipvs, which has nothing of that kind",
            str(where.state), "`kbpf inspect services` and `connections` show what it has",
        )  # fmt: skip
    return snapshot.read(where.pins, parts)


class Found(NamedTuple):
    """Connections: at most `limit` of `total` rows; `over`: how many more there are whose time is
    over; `words`: why there may be none, "" if nothing is wrong.
    """

    rows: Iterable[ConnectionRow]
    total: int
    over: int
    words: str


def find_connections(where: Where, wanted: Wanted, limit: int = 0) -> Found:
    """Those that are wanted; limit 0: all."""
    if by_ipvs(where):
        rows = ipvs.connection_rows(where.state, wanted)
        return Found(rows[: limit or None], len(rows), 0, "")
    held = snapshot.read(where.pins, connections.NEEDS)
    found, over = connections.select(held, wanted)
    shown = connections.rows(held, islice(found, limit or None))
    return Found(shown, len(found), over, availability.words(held))

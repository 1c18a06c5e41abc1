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
from kbpf.views.packet_path.connections import ConnectionQuery, ConnectionRow


@dataclass(frozen=True, slots=True)
class Locations:
    """The folders of the agent: of pins in mode bpf, of its state in mode ipvs."""

    pin_dir: Path
    state_dir: Path


def is_ipvs(locations: Locations) -> bool:
    """Whether the agent that spoke last is one of mode ipvs."""
    ipvs_status = ipvs.read_status(locations.state_dir)
    if ipvs_status is None:
        return False
    try:
        bpf_status = snapshot.read(locations.pin_dir, Part.STATUS).status
    except KbpfError:  # nothing is pinned, or nothing that this version understands
        return True
    return bpf_status is None or ipvs_status.heartbeat >= bpf_status.heartbeat


def read(locations: Locations, parts: Part) -> Snapshot:
    """What is programmed. NotFoundError when no agent has been here."""
    if is_ipvs(locations):
        return ipvs.read(locations.state_dir)
    return snapshot.read(locations.pin_dir, parts)


def read_pins(locations: Locations, parts: Part) -> Snapshot:
    """For what there is in mode bpf only: NotFoundError says so in the other one."""
    if is_ipvs(locations):
        raise NotFoundError(
            "the agent of this node is in mode ipvs, which has nothing of that kind",
            str(locations.state_dir), "`kbpf inspect services` and `connections` show what it has",
        )  # fmt: skip
    return snapshot.read(locations.pin_dir, parts)


class ConnectionPage(NamedTuple):
    """Connections: at most `limit` of `total` rows; `over`: how many more there are whose time is
    over; `words`: why there may be none, "" if nothing is wrong.
    """

    rows: Iterable[ConnectionRow]
    total: int
    expired_count: int
    notice: str


def find_connections(
    locations: Locations, query: ConnectionQuery, limit: int = 0
) -> ConnectionPage:
    """Those that are wanted; limit 0: all."""
    if is_ipvs(locations):
        rows = ipvs.connection_rows(locations.state_dir, query)
        return ConnectionPage(rows[: limit or None], len(rows), 0, "")
    bpf_snapshot = snapshot.read(locations.pin_dir, connections.NEEDS)
    selected, expired_count = connections.select(bpf_snapshot, query)
    page_rows = connections.build_rows(bpf_snapshot, islice(selected, limit or None))
    return ConnectionPage(
        page_rows, len(selected), expired_count, availability.unavailable_notice(bpf_snapshot)
    )

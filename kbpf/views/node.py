# SPDX-License-Identifier: Apache-2.0
"""The data plane of this node, in whichever mode.

While one mode replaces the other, both may have left state behind. The one whose agent wrote its
status last is shown.
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
    """The agent's folders: `pin_dir` in mode bpf, `state_dir` in mode ipvs."""

    pin_dir: Path
    state_dir: Path


def is_ipvs(locations: Locations) -> bool:
    """Whether the agent that wrote its status last is in mode ipvs."""
    ipvs_status = ipvs.read_status(locations.state_dir)
    if ipvs_status is None:
        return False
    try:
        bpf_status = snapshot.read(locations.pin_dir, Part.STATUS).status
    except KbpfError:  # nothing is pinned, or another version pinned it
        return True
    return bpf_status is None or ipvs_status.heartbeat >= bpf_status.heartbeat


def read(locations: Locations, parts: Part) -> Snapshot:
    """Reads what is programmed, in either mode. Raises NotFoundError if no agent has run on this
    node.
    """
    if is_ipvs(locations):
        return ipvs.read(locations.state_dir)
    return snapshot.read(locations.pin_dir, parts)


def read_pins(locations: Locations, parts: Part) -> Snapshot:
    """Reads what exists in mode bpf only. Raises NotFoundError if the node is in mode ipvs."""
    if is_ipvs(locations):
        raise NotFoundError(
            "the agent of this node is in mode ipvs, which does not have this",
            str(locations.state_dir), "use `kbpf inspect services`, `connections` or `status`",
        )  # fmt: skip
    return snapshot.read(locations.pin_dir, parts)


class ConnectionPage(NamedTuple):
    """The first rows of `total` matching connections. `expired_count`: how many expired ones were
    left out. `notice`: why there may be none, or "".
    """

    rows: Iterable[ConnectionRow]
    total: int
    expired_count: int
    notice: str


def find_connections(
    locations: Locations, query: ConnectionQuery, limit: int = 0
) -> ConnectionPage:
    """The connections that match the query, at most `limit` of them; 0: all."""
    if is_ipvs(locations):
        rows = ipvs.connection_rows(locations.state_dir, query)
        return ConnectionPage(rows[: limit or None], len(rows), 0, "")
    bpf_snapshot = snapshot.read(locations.pin_dir, connections.NEEDS)
    selected, expired_count = connections.select(bpf_snapshot, query)
    page_rows = connections.build_rows(bpf_snapshot, islice(selected, limit or None))
    return ConnectionPage(
        page_rows, len(selected), expired_count, availability.unavailable_notice(bpf_snapshot)
    )

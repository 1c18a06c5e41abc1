# SPDX-License-Identifier: Apache-2.0
"""The maps: entries, capacity, memory and purpose of each."""

from typing import Final

import msgspec

from kbpf.model.inspection import Inspection, MapEntry, Part
from kbpf.views.page import Column, Kind, Page, format_size, same_fields

NEEDS: Final = Part.MAPS

ALARM_PERCENT: Final = 80.0


class MapRow(msgspec.Struct, frozen=True):
    """A map, and how full it is.

    `entries` is None if the number of used entries is unknown (the entries of arrays and queues
    exist from the start), and `fill_percent` is None if it would be meaningless. `bytes` is None if
    the kernel does not report it.

    `alarm`: 80 % or more are used. An LRU map may stay full: it then evicts the least recently used
    entries early. `flows` never has this alarm, because its expired entries stay until their space
    is needed; `inspect status` has the alarm for it.
    """

    name: str
    type: str
    entries: int | None
    max_entries: int
    fill_percent: float | None
    alarm: bool
    bytes: int | None
    purpose: str


def build_rows(inspection: Inspection) -> tuple[MapRow, ...]:
    """All maps, in the order in which a connection uses them."""
    return tuple(map(_build_row, inspection.maps))


def _build_row(entry: MapEntry) -> MapRow:
    fill = None
    if entry.has_fill and entry.entries is not None and entry.max_entries:
        fill = round(100 * entry.entries / entry.max_entries, 1)
    return MapRow(
        **same_fields(MapRow, entry),
        fill_percent=fill,
        alarm=fill is not None and fill >= ALARM_PERCENT and entry.name != "flows",
    )


def _format_fill(row: MapRow) -> str:
    if row.fill_percent is None:
        return "-"
    return f"{row.fill_percent:.1f}%" + (" !" if row.alarm else "  ")


COLUMNS: Final = (
    Column("NAME", "name"),
    Column("TYPE", "type"),
    Column("ENTRIES", "entries", right=True),
    Column("MAX-ENTRIES", "max_entries", right=True),
    Column("FILL", _format_fill, right=True),
    Column("BYTES", "bytes", format_size, right=True),
    Column("PURPOSE", "purpose"),
)


KIND: Final = Kind("MapList", MapRow, item_name=lambda row: row.name)


def build_page(inspection: Inspection) -> Page:
    return Page(KIND, build_rows(inspection), COLUMNS)

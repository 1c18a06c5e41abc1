# SPDX-License-Identifier: Apache-2.0
"""The endpoints of a Service as the API server has them: the Pod, node, zone and state of each,
whether clients of this node reach it, and why.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from kbpf.views.page import Column, Kind, Page, format_host_port, list_page


class EndpointRow(msgspec.Struct, frozen=True):
    """An endpoint of one Service port. `cluster` and `local`: whether it is in these sets. `state`:
    its conditions: ``ready``, ``terminating, serving``, ``terminating``, ``not ready``, ...
    """

    port: str
    address: str
    number: int
    pod: str
    node: str
    zone: str
    state: str
    cluster: bool
    local: bool
    reason: str
    why: str
    slice: str

    @property
    def place(self) -> str:
        """``10.244.0.7:8080``; without the port if it has none of this name."""
        return format_host_port(self.address, self.number) if self.number else self.address


COLUMNS: Final = (
    Column("PORT", "port"),
    Column("ENDPOINT", "place"),
    Column("POD", "pod"),
    Column("NODE", "node"),
    Column("ZONE", "zone"),
    Column("STATE", "state"),
    Column("CLUSTER", "cluster"),
    Column("LOCAL", "local"),
    Column("WHY", "why"),
    Column("SLICE", "slice", wide=True),
)


KIND: Final = Kind("EndpointList", EndpointRow, item_name=lambda row: row.place)


def build_page(rows: Sequence[EndpointRow], errors: Sequence[str]) -> Page:
    return list_page(KIND, rows, COLUMNS, errors)

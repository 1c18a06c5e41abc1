# SPDX-License-Identifier: Apache-2.0
"""The endpoints of a Service as the API server has them: the Pod, node, zone and state of each,
whether clients of this node reach it, and why.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from kbpf.model.address import format_addr
from kbpf.model.objects import Endpoint
from kbpf.views.page import Column, Kind, Page, format_host_port, list_page


class EndpointRow(msgspec.Struct, frozen=True):
    """An endpoint of one Service port. `cluster` and `local`: whether it is in these sets. `state`:
    ``ready``, ``serving, terminating``, ``terminating`` or ``not ready``.
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


def state_of(endpoint: Endpoint) -> str:
    if endpoint.ready:
        return "ready"
    if endpoint.terminating:
        return "serving, terminating" if endpoint.serving else "terminating"
    return "not ready"


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


def make_row(
    port: str,
    number: int,
    endpoint: Endpoint,
    pod: str,
    membership: tuple[bool, bool],
    reason: str,
    why: str,
    slice_name: str,
) -> EndpointRow:
    return EndpointRow(
        port,
        format_addr(endpoint.address),
        number,
        pod,
        endpoint.node,
        endpoint.zone,
        state_of(endpoint),
        *membership,
        reason,
        why,
        slice_name,
    )


KIND: Final = Kind("EndpointList", EndpointRow, item_name=lambda row: row.place)


def build_page(rows: Sequence[EndpointRow], errors: Sequence[str]) -> Page:
    return list_page(KIND, rows, COLUMNS).with_notes(tuple(errors))

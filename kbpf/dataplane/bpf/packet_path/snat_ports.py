# SPDX-License-Identifier: Apache-2.0
"""Keeps conntrack and our programs from using the same SNAT port for the same backend.

Towards a backend, an address and port of the node represent one client. conntrack allocates ports
for kube-proxy's clients, our programs for theirs, and neither knows the ports of the other. During
a take-over both are active, so both could allocate the same port, and replies for one client would
reach the other. Each side therefore reserves the ports of the other:

    reserve_conntrack_ports   adds an entry to `flows` for each port that conntrack has allocated
    publish_our_ports         adds an entry to conntrack for each port that our programs have

A reservation in `flows` has the node as its client, the backend as its frontend and backend, and no
Service (flow_entries.is_port_reservation), so it translates no packet. It expires and is evicted
like an established connection.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from kbpf.dataplane.bpf.maps import flow_entries, pinning
from kbpf.dataplane.bpf.maps.flow_entries import flow_key
from kbpf.dataplane.bpf.maps.layout import FLOW, FlowDirection, FlowPath, Target, TcpState
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.netfilter import conntrack
from kbpf.kernel.netfilter.conntrack import ConntrackFlow
from kbpf.model.address import Addr

CONNTRACK_ENTRY_TIMEOUT_S: Final = 24 * 3600
"""The timeout of an idle established TCP connection, both of kube-proxy and of our programs."""
_NO_ADDRESS: Final = bytes(16)
RESERVATION_MAPS: Final = ("flows", "flow_queue", "flow_marks", "flow_generations")
"""The maps that reserve_conntrack_ports() reads and writes."""


def reservation_entry(connection: ConntrackFlow, now: int) -> tuple[bytes, bytes]:
    """Key and value of the entry in `flows` that reserves the port of a connection in conntrack.
    `now`: ns, CLOCK_MONOTONIC.
    """
    node = Target(connection.source, connection.source_port, connection.protocol)
    backend = Target(connection.destination, connection.destination_port, connection.protocol).pack()
    port = connection.source_port.to_bytes(2, "big")  # network byte order, as on the wire
    value = FLOW.pack(
        now,
        node.pack(),
        backend,
        backend,
        _NO_ADDRESS,
        bytes(2),
        port,
        0,
        0,
        TcpState.ESTABLISHED,
        0,
        FlowPath.STACK,
        FlowDirection.ORIGINAL,
        0,
        bytes(32),
        0,
        0,
        bytes(48),
    )
    return flow_key(backend, node.pack()), value


def reserve_conntrack_ports(maps: Mapping[str, Map], ports: tuple[int, int]) -> int:
    """Reserves the ports that conntrack has allocated for masqueraded clients, so that our programs
    do not use them. `ports`: only those in this range (both ends included), which is that of our
    programs. Returns how many are new. Raises KernelError if conntrack cannot be read.
    """
    low, high = ports
    now = time.monotonic_ns()
    entries = (
        reservation_entry(connection, now)
        for connection in conntrack.list_masqueraded()
        if low <= connection.source_port <= high
    )
    return sum(_add_reservation(maps, key, value) for key, value in entries)


def _add_reservation(maps: Mapping[str, Map], key: bytes, value: bytes) -> bool:
    """Adds an entry to `flows` and its key to the queue. An entry that is not in the queue would
    never be evicted, so it is removed again if the queue is full.
    """
    flow_entries.mark_ends(maps, [value])
    if not maps["flows"].add(key, value):
        return False
    if maps["flow_queue"].push(key):
        return True
    maps["flows"].delete(key)
    return False


def masqueraded_connections(entries: Iterable[bytes]) -> Iterator[ConntrackFlow]:
    """The connections between the node and a backend that these entries (struct flow) use after
    SNAT. Each is returned once, although a flow has several entries. Flows without SNAT are
    skipped.
    """
    yielded = set()
    for raw in entries:
        _, _, _, raw_backend, snat, snat_port, *_ = FLOW.unpack(raw)
        if snat == _NO_ADDRESS:
            continue
        target = Target.unpack(raw_backend)
        port = int.from_bytes(snat_port, "big")
        connection = ConntrackFlow(target.protocol, Addr(snat), port, target.address, target.port)
        if connection not in yielded:
            yielded.add(connection)
            yield connection


def is_closed(raw: bytes) -> bool:
    """Whether the connection of this struct flow has ended."""
    return bool(FLOW.unpack(raw)[9] == TcpState.CLOSED)


def publish_our_ports(flows: Map) -> int:
    """Reserves the ports of our open connections in conntrack; returns how many are new."""
    open_flows = (raw for _, raw in flows.items() if not is_closed(raw))
    return conntrack.reserve(masqueraded_connections(open_flows), CONNTRACK_ENTRY_TIMEOUT_S)


def hand_over_new_connections(pins: Pins) -> int:
    """Leaves new connections to another proxy, with the ports of our connections reserved in
    conntrack. Returns how many frontends were deleted.
    """
    if not (pins.maps / "flows").exists():
        return pinning.delete_frontends(pins)
    with Map.open(pins.maps / "flows") as flows:
        publish_our_ports(flows)
        frontends_deleted = pinning.delete_frontends(pins)
        delete_ended(flows)
        publish_our_ports(flows)  # of connections that started since the first call
    return frontends_deleted


def withdraw_our_ports(pins: Pins) -> None:
    """Deletes the entries that publish_our_ports() added to conntrack."""
    if not (pins.maps / "flows").exists():
        return
    with (
        Map.open(pins.maps / "flows") as flows,
        contextlib.suppress(KernelError),  # a leftover entry only keeps a port until it expires
    ):
        conntrack.release(masqueraded_connections(raw for _, raw in flows.items()))


def delete_ended(flows: Map) -> int:
    """Deletes the entries of connections that have ended, so that no later packet matches them;
    returns their number.
    """
    return sum(flows.delete(key) for key, raw in list(flows.items()) if is_closed(raw))

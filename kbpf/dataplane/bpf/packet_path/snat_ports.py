"""Keeps conntrack and our programs from using the same SNAT port for the same backend.

Towards a backend, an address and port of the node represent one client. conntrack allocates ports
for kube-proxy's clients, our programs for theirs, and neither knows the other's. During a take-over
both are active, and replies for one client could be sent to the other. So each is told the other's
ports:

    reserve_conntrack_ports   adds entries to `flows`, which change no packet, for conntrack's
    publish_our_ports         entries in conntrack for connections masqueraded by our programs

An entry of the first kind has the node as its client, the backend as its frontend, and no Service
(flow_entries.is_port_reservation). It expires and is evicted like an established connection.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Final

from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.flow_entries import flow_key
from kbpf.dataplane.bpf.maps.layout import FLOW, FlowDirection, FlowPath, Target, TcpState
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.netfilter import conntrack
from kbpf.kernel.netfilter.conntrack import ConntrackFlow
from kbpf.model.address import Addr

CONNTRACK_ENTRY_TIMEOUT_S: Final = 24 * 3600
"""As long as a connection that nobody uses is kept, by kube-proxy and by us."""
_NO_ADDRESS: Final = bytes(16)


def reservation_entry(connection: ConntrackFlow, now: int) -> tuple[bytes, bytes]:
    """Key and value of an entry for a connection of somebody else's; `now`: ns, CLOCK_MONOTONIC."""
    node = Target(connection.source, connection.source_port, connection.protocol)
    backend = Target(
        connection.destination, connection.destination_port, connection.protocol
    ).pack()
    port = connection.source_port.to_bytes(2, "big")
    value = FLOW.pack(
        now, node.pack(), backend, backend, _NO_ADDRESS, bytes(2), port,
        0, 0, TcpState.ESTABLISHED, 0, FlowPath.STACK, FlowDirection.ORIGINAL, 0, 0, bytes(48),
    )  # fmt: skip
    return flow_key(backend, node.pack()), value


def reserve_conntrack_ports(flows: Map, flow_queue: Map, ports: tuple[int, int]) -> int:
    """Makes our programs keep away from those ports, of `ports`, that conntrack has given to
    masqueraded clients; how many are new. KernelError if conntrack cannot be read.
    """
    low, high = ports
    now = time.monotonic_ns()
    entries = (
        reservation_entry(connection, now)
        for connection in conntrack.list_masqueraded()
        if low <= connection.source_port <= high
    )
    return sum(_add_reservation(flows, flow_queue, key, value) for key, value in entries)


def _add_reservation(flows: Map, flow_queue: Map, key: bytes, value: bytes) -> bool:
    """What has no place in the queue would stay for ever."""
    if not flows.add(key, value):
        return False
    if flow_queue.push(key):
        return True
    flows.delete(key)
    return False


def masqueraded_connections(entries: Iterable[bytes]) -> Iterator[ConntrackFlow]:
    """What our flows look like behind the node, out of structs nat; each once, if it is there."""
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
    """Whether the connection of a struct flow has ended."""
    return bool(FLOW.unpack(raw)[9] == TcpState.CLOSED)


def publish_our_ports(flows: Map) -> int:
    """Makes conntrack keep away from the ports of our connections; how many are new."""
    open_flows = (raw for _, raw in flows.items() if not is_closed(raw))
    return conntrack.reserve(masqueraded_connections(open_flows), CONNTRACK_ENTRY_TIMEOUT_S)


def hand_over_new_connections(pins: Pins) -> int:
    """New connections are somebody else's from now on, and find the ports of ours taken; how many
    frontends there were. Twice, since some began in between.
    """
    if not (pins.maps / "flows").exists():
        return pinning.delete_frontends(pins)
    with Map.open(pins.maps / "flows") as flows:
        publish_our_ports(flows)
        frontends_deleted = pinning.delete_frontends(pins)
        delete_ended(flows)
        publish_our_ports(flows)
    return frontends_deleted


def withdraw_our_ports(pins: Pins) -> None:
    """Takes out of conntrack what leave() has made."""
    if not (pins.maps / "flows").exists():
        return
    with (
        Map.open(pins.maps / "flows") as flows,
        contextlib.suppress(KernelError),  # nothing of it is of harm
    ):
        conntrack.release(masqueraded_connections(raw for _, raw in flows.items()))


def delete_ended(flows: Map) -> int:
    """Deletes the entries of connections that have ended, so that nothing is taken for one of them;
    how many there were.
    """
    return sum(flows.delete(key) for key, raw in list(flows.items()) if is_closed(raw))

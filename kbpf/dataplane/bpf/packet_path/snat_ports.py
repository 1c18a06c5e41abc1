"""Ports of the node that somebody else's translation and ours could both take for one backend.

Before a backend, an address and port of the node stand for one client. conntrack sees to it for
whom it translates (kube-proxy's clients), our programs for whom they translate, and neither knows
of the other. Where one of the two comes after the other, both are at work for a while: answers to
the one's client would be taken for the other's. So each is told of the other's connections:

    hold_theirs   entries in `flows` that change no packet, for what conntrack has masqueraded
    hold_ours     entries in conntrack for what our programs have masqueraded

An entry of the first kind has the node itself as its client, the backend as its frontend, and no
Service (`flows.is_held`). It holds as long as an established connection does, from the last packet
that was seen of it, and makes room as one.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Final

from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.flow_entries import ends
from kbpf.dataplane.bpf.maps.layout import NAT, FlowPart, Target, TcpState, Way
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.netfilter import conntrack
from kbpf.kernel.netfilter.conntrack import Connection
from kbpf.model.address import Addr

HOLD_SECONDS: Final = 24 * 3600
"""As long as a connection that nobody uses is kept, by kube-proxy and by us."""
_NOBODY: Final = bytes(16)


def held(connection: Connection, now: int) -> tuple[bytes, bytes]:
    """Key and value of an entry for a connection of somebody else's; `now`: ns, CLOCK_MONOTONIC."""
    node = Target(connection.source, connection.source_port, connection.protocol)
    backend = Target(connection.to, connection.to_port, connection.protocol).pack()
    port = connection.source_port.to_bytes(2, "big")
    value = NAT.pack(
        now, node.pack(), backend, backend, _NOBODY, bytes(2), port,
        0, 0, TcpState.ESTABLISHED, 0, Way.STACK, FlowPart.QUESTION, 0, 0, bytes(48),
    )  # fmt: skip
    return ends(backend, node.pack()), value


def hold_theirs(flows: Map, order: Map, ports: tuple[int, int]) -> int:
    """Makes our programs keep away from those ports, of `ports`, that conntrack has given to
    masqueraded clients; how many are new. KernelError if conntrack cannot be read.
    """
    low, high = ports
    now = time.monotonic_ns()
    found = (held(one, now) for one in conntrack.masqueraded() if low <= one.source_port <= high)
    return sum(_hold(flows, order, key, value) for key, value in found)


def _hold(flows: Map, order: Map, key: bytes, value: bytes) -> bool:
    """What has no place in the queue would stay for ever."""
    if not flows.add(key, value):
        return False
    if order.push(key):
        return True
    flows.delete(key)
    return False


def masqueraded(entries: Iterable[bytes]) -> Iterator[Connection]:
    """What our flows look like behind the node, out of structs nat; each once, if it is there."""
    seen = set()
    for raw in entries:
        _, _, _, backend, snat, snat_port, *_ = NAT.unpack(raw)
        if snat == _NOBODY:
            continue
        to = Target.unpack(backend)
        port = int.from_bytes(snat_port, "big")
        one = Connection(to.protocol, Addr(snat), port, to.address, to.port)
        if one not in seen:
            seen.add(one)
            yield one


def is_over(raw: bytes) -> bool:
    """Whether the connection of a struct nat has ended."""
    return bool(NAT.unpack(raw)[9] == TcpState.CLOSED)


def hold_ours(flows: Map) -> int:
    """Makes conntrack keep away from the ports of our connections; how many are new."""
    live = (raw for _, raw in flows.items() if not is_over(raw))
    return conntrack.hold(masqueraded(live), HOLD_SECONDS)


def leave(pins: Pins) -> int:
    """New connections are somebody else's from now on, and find the ports of ours taken; how many
    frontends there were. Twice, since some began in between.
    """
    if not (pins.maps / "flows").exists():
        return pinning.forget_frontends(pins)
    with Map.open(pins.maps / "flows") as flows:
        hold_ours(flows)
        gone = pinning.forget_frontends(pins)
        forget_ended(flows)
        hold_ours(flows)
    return gone


def end(pins: Pins) -> None:
    """Takes out of conntrack what leave() has made."""
    if not (pins.maps / "flows").exists():
        return
    with (
        Map.open(pins.maps / "flows") as flows,
        contextlib.suppress(KernelError),  # nothing of it is of harm
    ):
        conntrack.release(masqueraded(raw for _, raw in flows.items()))


def forget_ended(flows: Map) -> int:
    """Deletes the entries of connections that have ended, so that nothing is taken for one of them;
    how many there were.
    """
    return sum(flows.delete(key) for key, raw in list(flows.items()) if is_over(raw))

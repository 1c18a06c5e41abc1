"""What the packet path tracks: one row per connection, however many entries it has.

Not here: connections that the socket hooks translated. Their packets carry the backend's address
from the start, cost nothing per packet, and are the kernel's own (`ss` shows them).
"""

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import msgspec

from kbpf.dataplane.bpf.inspect import tracked_connections
from kbpf.dataplane.bpf.inspect.snapshot import Part, Snapshot
from kbpf.dataplane.bpf.inspect.tracked_connections import (
    FLOW,
    PARTS,
    REPLY,
    SNAT,
    Tracked,
    endpoint,
    shared_endpoint,
)
from kbpf.dataplane.bpf.maps.flow_entries import IDENTITY, NANO
from kbpf.dataplane.bpf.maps.layout import NAT, TcpState, Way
from kbpf.errors import NotFoundError
from kbpf.model.address import Addr
from kbpf.model.desired import ServicePortKey
from kbpf.model.objects import Protocol
from kbpf.views.backends import service_text
from kbpf.views.columns import Column, span

NEEDS: Final = Part.NAMES | Part.CONNECTIONS | Part.PACKETS | Part.STATUS

STATES: Final = tuple(state.name.lower() for state in TcpState)


class ConnectionRow(msgspec.Struct, frozen=True, gc=False):
    """One connection. Addresses are ``address:port``.

    `seen_as`: the source that the backend sees: the node's (`masqueraded`) or the client's, whose
    port may be another one when two connections would look the same to the backend.
    `state`: new (no answer yet), answered (by the backend
    only), established, closing (one side has said that it is done) or
    closed; what is not TCP is new or established. `expires_seconds` is negative when its time is
    over (`expired`): its packets are no longer translated, and the entry goes when room is needed.
    `lost`: parts that went to other connections, ``flow``, ``reply`` or ``source``. `replaced`: the
    client has begun anew from the same port; this is what is left of the connection before.
    `way`: up the node's ``stack``, or ``redirect``: from device to device; ``ipvs``: by IPVS, which
    knows neither for how long nothing has come (`idle_seconds` None) nor what source the backend
    sees (`seen_as` "").
    `device`: the client is this node itself, and sends by that device; else "".
    """

    service: str
    protocol: str
    client: str
    frontend: str
    backend: str
    seen_as: str
    masqueraded: bool
    state: str
    idle_seconds: float | None
    expires_seconds: float
    expired: bool
    lost: tuple[str, ...]
    replaced: bool
    way: str
    device: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which connections to show: of a Service (NAME or NAMESPACE/NAME), of a client, to a backend
    (addresses), in a state (one of STATES); those whose time is over only if asked for.
    """

    service: str = ""
    client: Addr | None = None
    backend: Addr | None = None
    state: str = ""
    expired: bool = False


class Selected(NamedTuple):
    """What is to be shown, in order: by Service, then client. `over`: how many more there are
    whose time is over.
    """

    connections: tuple[Tracked, ...]
    over: int


def select(snapshot: Snapshot, wanted: Wanted = Wanted()) -> Selected:
    """Those that are wanted. NotFoundError for a Service that is not programmed."""
    tests = tuple(_tests(snapshot, wanted))
    now = int(snapshot.monotonic * NANO)
    found, over = [], 0
    for one in snapshot.connections.values():
        if tests and not all(test(one) for test in tests):
            continue
        if one.over < now and not wanted.expired:
            over += 1
        else:
            found.append(one)
    name = cache(lambda i: service_text(snapshot.names.get(i), i))
    found.sort(key=lambda one: (name(one.service), one.raw[IDENTITY]))
    return Selected(tuple(found), over)


def _tests(snapshot: Snapshot, wanted: Wanted) -> Iterator[Callable[[Tracked], bool]]:
    if wanted.service:
        ids = of_service(snapshot, wanted.service)
        yield lambda one: one.service in ids
    if wanted.client is not None:
        client = bytes(wanted.client)
        yield lambda one: one.client == client
    if wanted.backend is not None:
        backend = bytes(wanted.backend)
        yield lambda one: one.backend[:16] == backend
    if wanted.state:
        state = TcpState[wanted.state.upper()]
        yield lambda one: one.state == state


def of_service(snapshot: Snapshot, wanted: str) -> frozenset[int]:
    """The ids of a Service, NAME or NAMESPACE/NAME. NotFoundError if it is not programmed."""
    namespace, _, name = wanted.rpartition("/")

    def same(key: ServicePortKey) -> bool:
        return key.name == name and namespace in ("", key.namespace)

    ids = frozenset(i for i, key in snapshot.names.items() if same(key))
    if not ids:
        raise NotFoundError(
            f"no Service {wanted} is programmed", str(snapshot.pin_dir),
            "`kbpf inspect services` lists all",
        )  # fmt: skip
    return ids


def rows(snapshot: Snapshot, connections: Iterable[Tracked]) -> Iterator[ConnectionRow]:
    """One at a time: there may be a hundred thousand."""
    current: frozenset[bytes] | None = None
    name = cache(lambda i: service_text(snapshot.names.get(i), i))
    device = cache(device_name)
    now = int(snapshot.monotonic * NANO)
    began = int(snapshot.began * NANO)
    for one in connections:
        raw = one.raw
        last, client, frontend, backend, snat, snat_port, port, service, *rest = NAT.unpack(raw)
        _, state, _, way, _, index, *_ = rest
        masqueraded = snat != tracked_connections.NOWHERE
        replaced = False
        if not one.parts & FLOW:
            if current is None:
                current = _keys(snapshot)
            replaced = one.key in current
        dialled = endpoint(client)
        yield ConnectionRow(
            service=name(service),
            protocol=protocol_name(client[18]),
            client=dialled,
            frontend=shared_endpoint(frontend),
            backend=shared_endpoint(backend),
            seen_as=endpoint(snat + snat_port)
            if masqueraded
            else (dialled if port == client[16:18] else endpoint(client[:16] + port)),
            masqueraded=masqueraded,
            state=state_name(state),
            idle_seconds=max(0, now - last) // tracked_connections.MILLI / 1000,
            expires_seconds=(one.over - now) // tracked_connections.MILLI / 1000,
            expired=one.over < now,
            lost=() if replaced or last >= began else _lost(one.parts, masqueraded, way),
            replaced=replaced,
            way=_WAYS.get(way, str(way)),
            device=device(index) if index else "",
        )


def _keys(snapshot: Snapshot) -> frozenset[bytes]:
    """Client and frontend of all that is in `flows`."""
    return frozenset(one.key for one in snapshot.connections.values() if one.parts & FLOW)


def _lost(parts: int, masqueraded: bool, way: int) -> tuple[str, ...]:
    """What should be there and is not. A connection that bypasses the stack has no entry for
    replies to the client's own address. (Not asked of a connection that a packet has met since
    reading began: it may have begun in between.)
    """
    wanted = FLOW | (SNAT if masqueraded else 0) | (REPLY if way != Way.PAST else 0)
    missing = wanted & ~parts
    return tuple(name for part, name in PARTS.items() if missing & part) if missing else ()


def protocol_name(number: int) -> str:
    """``TCP``, or the number of one that Services do not know."""
    return _PROTOCOLS.get(number, str(number))


def state_name(number: int) -> str:
    """One of STATES, or a number that this version does not know."""
    return STATES[number] if number < len(STATES) else str(number)


def device_name(ifindex: int) -> str:
    """Its name, or its number where it is gone or elsewhere."""
    try:
        return socket.if_indextoname(ifindex)
    except OSError:
        return f"#{ifindex}"


_PROTOCOLS: Final = {int(protocol): protocol.name for protocol in Protocol}
_WAYS: Final = {int(Way.STACK): "stack", int(Way.REDIRECT): "redirect", int(Way.PAST): "redirect"}


# ---- columns -----------------------------------------------------------------------------------


def _expires(row: ConnectionRow) -> str:
    return "expired" if row.expired else span(row.expires_seconds)


def _seen(row: ConnectionRow) -> str:
    if not row.seen_as:
        return "-"
    if row.masqueraded:
        return f"{row.seen_as} (node)"
    return "the client" if row.seen_as == row.client else row.seen_as


def _note(row: ConnectionRow) -> str:
    if not (row.lost or row.replaced or row.device):
        return ""
    notes = [f"lost: {', '.join(row.lost)}"] if row.lost else []
    notes += ["replaced by a newer one"] if row.replaced else []
    notes += [f"this node's own, by {row.device}"] if row.device else []
    return "; ".join(notes)


COLUMNS: Final = (
    Column("SERVICE", lambda r: r.service),
    Column("PROTOCOL", lambda r: r.protocol),
    Column("CLIENT", lambda r: r.client),
    Column("FRONTEND", lambda r: r.frontend),
    Column("BACKEND", lambda r: r.backend),
    Column("BACKEND-SEES", _seen),
    Column("STATE", lambda r: r.state),
    Column("IDLE", lambda r: "-" if r.idle_seconds is None else span(r.idle_seconds), right=True),
    Column("EXPIRES-IN", _expires, right=True),
    Column("WAY", lambda r: r.way, wide=True),
    Column("NOTE", _note),
)

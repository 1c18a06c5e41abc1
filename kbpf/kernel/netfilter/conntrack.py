"""The kernel's table of connections (conntrack): which of them are translated, and entries that
keep a port from being given to others.

About the network namespace of the calling thread. Where the kernel has no conntrack, there is
nothing in it.
"""

import errno
import socket
import struct
from collections.abc import Iterable, Iterator
from enum import IntFlag
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Netlink, Request, attribute, attributes
from kbpf.model.address import V4_PREFIX, Addr, family_of

NETLINK_NETFILTER: Final = 12
FAMILIES: Final = {"ip": socket.AF_INET, "ip6": socket.AF_INET6}

_NEW: Final = 1 << 8  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_NEW
_GET: Final = _NEW | 1
_DELETE: Final = _NEW | 2
_CREATE: Final = 0x600  # NLM_F_CREATE | NLM_F_EXCL
_NESTED: Final = 0x8000
_ORIGINAL, _REPLY, _STATUS, _PROTOINFO, _TIMEOUT = 1, 2, 3, 4, 7
_STATUS_MASK: Final = 26  # kernels before 5.17 ignore it, and tell everything
_ESTABLISHED: Final = 3
_ABSENT: Final = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT))


class Status(IntFlag):
    """Some of enum ip_conntrack_status."""

    SEEN_REPLY = 1 << 1
    ASSURED = 1 << 2
    CONFIRMED = 1 << 3
    SOURCE = 1 << 4
    DESTINATION = 1 << 5


class Connection(NamedTuple):
    """A connection as its packets leave the node: behind all translation."""

    protocol: int
    source: Addr
    source_port: int
    to: Addr
    to_port: int


def translated(family: str) -> bool:
    """Whether there is a connection of this family, "ip" or "ip6", whose destination is changed."""
    return bool(_dump(FAMILIES[family], Status.DESTINATION))


def masqueraded() -> list[Connection]:
    """Those of which both ends are changed, as kube-proxy does it for clients from outside. Where
    IPVS has led them to a backend only the tuples say so.
    """
    found = (one for family in FAMILIES.values() for one in _dump(family, Status.SOURCE))
    led = (told for told in found if _asked(told) != _answering(told))
    return [connection for told in led if (connection := _behind(told)) is not None]


def hold(connections: Iterable[Connection], seconds: int) -> int:
    """Makes entries for connections that somebody else looks after: so their ports are taken when
    the kernel translates others. How many are new.
    """
    requests = [_request(_NEW, one, seconds, _CREATE) for one in connections]
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        codes = netlink.many(requests)
    if bad := set(codes) - {0, errno.EEXIST} - _ABSENT:
        raise KernelError("cannot hold ports in conntrack", "", "run as root", min(bad))
    return codes.count(0)


def release(connections: Iterable[Connection]) -> int:
    """Removes such entries; how many there were."""
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        return netlink.many([_request(_DELETE, one) for one in connections]).count(0)


def _dump(family: int, status: Status) -> list[dict[int, bytes]]:
    """The attributes of connections that have all of this status."""
    wanted = struct.pack(">I", status)
    asked = struct.pack("=BBH", family, 0, 0)
    asked += attribute(_STATUS, wanted) + attribute(_STATUS_MASK, wanted)
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        try:
            messages = netlink.dump(_GET, asked)
        except KernelError as error:
            if error.errno in _ABSENT:
                return []
            raise
    found = (attributes(message.body[4:]) for message in messages)
    return [one for one in found if int.from_bytes(one.get(_STATUS, b""), "big") & status == status]


def _behind(told: dict[int, bytes]) -> Connection | None:
    """From the tuple of its answers, which are to whom its packets seem to come from."""
    answers = attributes(told.get(_REPLY, b""))
    where, what = attributes(answers.get(1, b"")), attributes(answers.get(2, b""))
    source, to = where.get(1, where.get(3, b"")), where.get(2, where.get(4, b""))
    if not source or not to or 2 not in what or 3 not in what:
        return None
    ports = (int.from_bytes(what[kind], "big") for kind in (3, 2))
    return Connection(what[1][0], _address(to), next(ports), _address(source), next(ports))


def _asked(told: dict[int, bytes]) -> tuple[bytes, bytes]:
    """Address and port of whom the client has asked."""
    return _end(told.get(_ORIGINAL, b""), (2, 4), 3)


def _answering(told: dict[int, bytes]) -> tuple[bytes, bytes]:
    """Address and port of who answers."""
    return _end(told.get(_REPLY, b""), (1, 3), 2)


def _end(tuple_: bytes, kinds: tuple[int, int], port: int) -> tuple[bytes, bytes]:
    """One end of a connection's tuple: its address, as of either family, and its port."""
    found = attributes(tuple_)
    where, what = attributes(found.get(1, b"")), attributes(found.get(2, b""))
    return where.get(kinds[0], where.get(kinds[1], b"")), what.get(port, b"")


def _address(raw: bytes) -> Addr:
    return Addr(V4_PREFIX + raw) if len(raw) == 4 else Addr(raw)


def _request(kind: int, one: Connection, seconds: int = 0, flags: int = 0) -> Request:
    v4 = family_of(one.to) == 4
    body = struct.pack("=BBH", socket.AF_INET if v4 else socket.AF_INET6, 0, 0)
    ends = (one.source, one.source_port), (one.to, one.to_port)
    for which, (source, to) in ((_ORIGINAL, ends), (_REPLY, ends[::-1])):
        body += _nest(which, *_tuple(one.protocol, source, to, v4))
    if kind == _NEW:
        status = Status.CONFIRMED | Status.ASSURED | Status.SEEN_REPLY
        body += attribute(_STATUS, struct.pack(">I", status))
        body += attribute(_TIMEOUT, struct.pack(">I", seconds))
        if one.protocol == socket.IPPROTO_TCP:
            state = attribute(1, bytes((_ESTABLISHED,)))
            body += _nest(_PROTOINFO, _nest(1, state))
    return Request(kind, body, flags)


def _tuple(
    protocol: int, source: tuple[Addr, int], to: tuple[Addr, int], v4: bool
) -> Iterator[bytes]:
    kinds, start = ((1, 2), 12) if v4 else ((3, 4), 0)
    yield _nest(
        1, *(attribute(k, a[start:]) for k, (a, _) in zip(kinds, (source, to), strict=True))
    )
    ports = (struct.pack(">H", port) for _, port in (source, to))
    yield _nest(
        2,
        attribute(1, bytes((protocol,))),
        *(attribute(kind, port) for kind, port in zip((2, 3), ports, strict=True)),
    )


def _nest(kind: int, *inner: bytes) -> bytes:
    return attribute(kind | _NESTED, b"".join(inner))

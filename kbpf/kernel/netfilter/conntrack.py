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
from kbpf.kernel.net.netlink import Netlink, NetlinkRequest, pack_attribute, parse_attributes
from kbpf.model.address import V4_PREFIX, Addr, family_of

NETLINK_NETFILTER: Final = 12
FAMILIES: Final = {"ip": socket.AF_INET, "ip6": socket.AF_INET6}

_IPCTNL_MSG_CT_NEW: Final = 1 << 8  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_NEW
_IPCTNL_MSG_CT_GET: Final = _IPCTNL_MSG_CT_NEW | 1
_IPCTNL_MSG_CT_DELETE: Final = _IPCTNL_MSG_CT_NEW | 2
_NLM_F_CREATE_EXCL: Final = 0x600  # NLM_F_CREATE | NLM_F_EXCL
_NLA_F_NESTED: Final = 0x8000
_CTA_TUPLE_ORIG, _CTA_TUPLE_REPLY, _CTA_STATUS, _CTA_PROTOINFO, _CTA_TIMEOUT = 1, 2, 3, 4, 7
_CTA_STATUS_MASK: Final = 26  # kernels before 5.17 ignore it, and tell everything
_TCP_CONNTRACK_ESTABLISHED: Final = 3
_UNSUPPORTED_ERRNOS: Final = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT))


class ConntrackStatus(IntFlag):
    """Some of enum ip_conntrack_status."""

    IPS_SEEN_REPLY = 1 << 1
    IPS_ASSURED = 1 << 2
    IPS_CONFIRMED = 1 << 3
    IPS_SRC_NAT = 1 << 4
    IPS_DST_NAT = 1 << 5


class ConntrackFlow(NamedTuple):
    """A connection as its packets leave the node: behind all translation."""

    protocol: int
    source: Addr
    source_port: int
    destination: Addr
    destination_port: int


def has_dnat_connections(family: str) -> bool:
    """Whether there is a connection of this family, "ip" or "ip6", whose destination is changed."""
    return bool(_dump(FAMILIES[family], ConntrackStatus.IPS_DST_NAT))


def list_masqueraded() -> list[ConntrackFlow]:
    """Those of which both ends are changed, as kube-proxy does it for clients from outside. Where
    IPVS has led them to a backend only the tuples say so.
    """
    entries = (
        entry
        for family in FAMILIES.values()
        for entry in _dump(family, ConntrackStatus.IPS_SRC_NAT)
    )
    translated = (
        attrs for attrs in entries if _original_destination(attrs) != _reply_source(attrs)
    )
    return [flow for attrs in translated if (flow := _flow_behind_nat(attrs)) is not None]


def reserve(flows: Iterable[ConntrackFlow], timeout: int) -> int:
    """Makes entries for connections that somebody else looks after: so their ports are taken when
    the kernel translates others. How many are new.
    """
    requests = [
        _encode_request(_IPCTNL_MSG_CT_NEW, flow, timeout, _NLM_F_CREATE_EXCL) for flow in flows
    ]
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        codes = netlink.request_many(requests)
    if unexpected := set(codes) - {0, errno.EEXIST} - _UNSUPPORTED_ERRNOS:
        raise KernelError("cannot hold ports in conntrack", "", "run as root", min(unexpected))
    return codes.count(0)


def release(flows: Iterable[ConntrackFlow]) -> int:
    """Removes such entries; how many there were."""
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        return netlink.request_many(
            [_encode_request(_IPCTNL_MSG_CT_DELETE, flow) for flow in flows]
        ).count(0)


def _dump(family: int, status: ConntrackStatus) -> list[dict[int, bytes]]:
    """The attributes of connections that have all of this status."""
    status_bytes = struct.pack(">I", status)
    body = struct.pack("=BBH", family, 0, 0)
    body += pack_attribute(_CTA_STATUS, status_bytes) + pack_attribute(
        _CTA_STATUS_MASK, status_bytes
    )
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        try:
            messages = netlink.dump(_IPCTNL_MSG_CT_GET, body)
        except KernelError as error:
            if error.errno in _UNSUPPORTED_ERRNOS:
                return []
            raise
    entries = (parse_attributes(message.body[4:]) for message in messages)
    return [
        entry
        for entry in entries
        if int.from_bytes(entry.get(_CTA_STATUS, b""), "big") & status == status
    ]


def _flow_behind_nat(attrs: dict[int, bytes]) -> ConntrackFlow | None:
    """From the tuple of its answers, which are to whom its packets seem to come from."""
    reply = parse_attributes(attrs.get(_CTA_TUPLE_REPLY, b""))
    ip, proto = parse_attributes(reply.get(1, b"")), parse_attributes(reply.get(2, b""))
    source, destination = ip.get(1, ip.get(3, b"")), ip.get(2, ip.get(4, b""))
    if not source or not destination or 2 not in proto or 3 not in proto:
        return None
    ports = (int.from_bytes(proto[attr_type], "big") for attr_type in (3, 2))
    return ConntrackFlow(
        proto[1][0], _parse_address(destination), next(ports), _parse_address(source), next(ports)
    )


def _original_destination(attrs: dict[int, bytes]) -> tuple[bytes, bytes]:
    """Address and port of whom the client has asked."""
    return _parse_endpoint(attrs.get(_CTA_TUPLE_ORIG, b""), (2, 4), 3)


def _reply_source(attrs: dict[int, bytes]) -> tuple[bytes, bytes]:
    """Address and port of who answers."""
    return _parse_endpoint(attrs.get(_CTA_TUPLE_REPLY, b""), (1, 3), 2)


def _parse_endpoint(
    tuple_: bytes, address_types: tuple[int, int], port_type: int
) -> tuple[bytes, bytes]:
    """One end of a connection's tuple: its address, as of either family, and its port."""
    attrs = parse_attributes(tuple_)
    ip, proto = parse_attributes(attrs.get(1, b"")), parse_attributes(attrs.get(2, b""))
    return ip.get(address_types[0], ip.get(address_types[1], b"")), proto.get(port_type, b"")


def _parse_address(raw: bytes) -> Addr:
    return Addr(V4_PREFIX + raw) if len(raw) == 4 else Addr(raw)


def _encode_request(
    msg_type: int, flow: ConntrackFlow, timeout: int = 0, flags: int = 0
) -> NetlinkRequest:
    v4 = family_of(flow.destination) == 4
    body = struct.pack("=BBH", socket.AF_INET if v4 else socket.AF_INET6, 0, 0)
    endpoints = (flow.source, flow.source_port), (flow.destination, flow.destination_port)
    for tuple_type, (source, destination) in (
        (_CTA_TUPLE_ORIG, endpoints),
        (_CTA_TUPLE_REPLY, endpoints[::-1]),
    ):
        body += _nest(tuple_type, *_encode_tuple(flow.protocol, source, destination, v4))
    if msg_type == _IPCTNL_MSG_CT_NEW:
        status = (
            ConntrackStatus.IPS_CONFIRMED
            | ConntrackStatus.IPS_ASSURED
            | ConntrackStatus.IPS_SEEN_REPLY
        )
        body += pack_attribute(_CTA_STATUS, struct.pack(">I", status))
        body += pack_attribute(_CTA_TIMEOUT, struct.pack(">I", timeout))
        if flow.protocol == socket.IPPROTO_TCP:
            state = pack_attribute(1, bytes((_TCP_CONNTRACK_ESTABLISHED,)))
            body += _nest(_CTA_PROTOINFO, _nest(1, state))
    return NetlinkRequest(msg_type, body, flags)


def _encode_tuple(
    protocol: int, source: tuple[Addr, int], destination: tuple[Addr, int], v4: bool
) -> Iterator[bytes]:
    address_types, start = ((1, 2), 12) if v4 else ((3, 4), 0)
    yield _nest(
        1,
        *(
            pack_attribute(k, a[start:])
            for k, (a, _) in zip(address_types, (source, destination), strict=True)
        ),
    )
    ports = (struct.pack(">H", port) for _, port in (source, destination))
    yield _nest(
        2,
        pack_attribute(1, bytes((protocol,))),
        *(pack_attribute(attr_type, port) for attr_type, port in zip((2, 3), ports, strict=True)),
    )


def _nest(attr_type: int, *inner: bytes) -> bytes:
    return pack_attribute(attr_type | _NLA_F_NESTED, b"".join(inner))

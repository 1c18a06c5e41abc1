# SPDX-License-Identifier: Apache-2.0
"""The kernel's connection tracking table: finding translated connections, and adding entries that
reserve their ports.

All functions act on the network namespace of the calling thread. If the kernel has no conntrack,
the table counts as empty.
"""

import errno
import socket
import struct
from collections.abc import Iterable, Iterator
from enum import IntFlag
from typing import Final, NamedTuple

from kbpf.errors import IgnoredErrnos, KernelError
from kbpf.kernel.net.netlink import (
    AF,
    Netlink,
    NetlinkRequest,
    pack_attribute,
    pack_nested,
    parse_attributes,
)
from kbpf.kernel.net.uapi import NETLINK_NETFILTER, NLM_F_CREATE, NLM_F_EXCL
from kbpf.kernel.netfilter import uapi
from kbpf.model.address import V4_PREFIX, Addr, family_of, to_wire

FAMILIES: Final = {"ip": socket.AF_INET, "ip6": socket.AF_INET6}

_CT_NEW: Final = uapi.NFNL_SUBSYS_CTNETLINK << 8 | uapi.IPCTNL_MSG_CT_NEW
_CT_GET: Final = uapi.NFNL_SUBSYS_CTNETLINK << 8 | uapi.IPCTNL_MSG_CT_GET
_CT_DELETE: Final = uapi.NFNL_SUBSYS_CTNETLINK << 8 | uapi.IPCTNL_MSG_CT_DELETE
_SRC_TYPES: Final = (uapi.CTA_IP_V4_SRC, uapi.CTA_IP_V6_SRC)
_DST_TYPES: Final = (uapi.CTA_IP_V4_DST, uapi.CTA_IP_V6_DST)
_UNSUPPORTED_ERRNOS: Final = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT))


class ConntrackStatus(IntFlag):
    """Some values of enum ip_conntrack_status."""

    IPS_SEEN_REPLY = 1 << 1
    IPS_ASSURED = 1 << 2
    IPS_CONFIRMED = 1 << 3
    IPS_SRC_NAT = 1 << 4
    IPS_DST_NAT = 1 << 5


class ConntrackFlow(NamedTuple):
    """A connection as its packets leave the node, after all translation."""

    protocol: int
    source: Addr
    source_port: int
    destination: Addr
    destination_port: int


class TranslatedFlow(NamedTuple):
    """A flow whose destination is translated: address, port and protocol of both destinations.
    `deletion`: the request that deletes its entry.
    """

    frontend: tuple[Addr, int, int]
    backend: tuple[Addr, int, int]
    deletion: NetlinkRequest


def has_dnat_connections(family: str) -> bool:
    """Whether a connection of this family ("ip" or "ip6") has a translated destination."""
    return bool(_dump(FAMILIES[family], ConntrackStatus.IPS_DST_NAT))


def list_masqueraded() -> list[ConntrackFlow]:
    """Lists connections with both source and destination translated, as by kube-proxy for clients
    from outside. If IPVS chose the backend, the status has no IPS_DST_NAT; only the tuples show
    it.
    """
    entries = (entry for family in FAMILIES.values() for entry in _dump(family, ConntrackStatus.IPS_SRC_NAT))
    translated = (attrs for attrs in entries if _original_destination(attrs) != _reply_source(attrs))
    return [flow for attrs in translated if (flow := _flow_behind_nat(attrs)) is not None]


def reserve(flows: Iterable[ConntrackFlow], timeout: int) -> int:
    """Adds entries for connections that another program translates, so that the kernel does not
    assign their ports to others. `timeout` is in seconds. Returns how many entries are new.
    """
    requests = [_encode_request(_CT_NEW, flow, timeout, NLM_F_CREATE | NLM_F_EXCL) for flow in flows]
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        codes = netlink.request_many(requests)
    if unexpected := set(codes) - {0, errno.EEXIST} - _UNSUPPORTED_ERRNOS:
        raise KernelError("cannot reserve ports in conntrack", "", "run as root", min(unexpected))
    return codes.count(0)


def release(flows: Iterable[ConntrackFlow]) -> int:
    """Deletes such entries; returns how many existed."""
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        return netlink.request_many([_encode_request(_CT_DELETE, flow) for flow in flows]).count(0)


def iterate_translated_udp(family: str) -> Iterator[TranslatedFlow]:
    """Yields the UDP flows of this family ("ip" or "ip6") whose destination is translated. The
    kernel selects them: before Linux 5.17 it would return all flows.
    """
    header = struct.pack("=BBH", FAMILIES[family], 0, 0)
    protocol = pack_attribute(uapi.CTA_PROTO_NUM, bytes((socket.IPPROTO_UDP,)))
    flags = pack_attribute(uapi.CTA_FILTER_ORIG_FLAGS, struct.pack("=I", uapi.CTA_FILTER_F_CTA_PROTO_NUM))
    status = struct.pack(">I", ConntrackStatus.IPS_DST_NAT)
    body = header + pack_nested(uapi.CTA_TUPLE_ORIG, pack_nested(uapi.CTA_TUPLE_PROTO, protocol))
    body += pack_nested(uapi.CTA_FILTER, flags)
    body += pack_attribute(uapi.CTA_STATUS, status) + pack_attribute(uapi.CTA_STATUS_MASK, status)
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        for message in netlink.dump_lazily(_CT_GET, body):
            attrs = parse_attributes(message.body[4:])
            key = pack_nested(uapi.CTA_TUPLE_ORIG, attrs[uapi.CTA_TUPLE_ORIG])
            key += pack_attribute(uapi.CTA_ID, attrs[uapi.CTA_ID])
            yield TranslatedFlow(
                _unpack_udp_endpoint(_original_destination(attrs)),
                _unpack_udp_endpoint(_reply_source(attrs)),
                NetlinkRequest(_CT_DELETE, header + key),
            )


def delete(flows: Iterable[TranslatedFlow]) -> int:
    """Deletes the entries of these flows; returns how many still existed."""
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        return netlink.request_many([flow.deletion for flow in flows]).count(0)


def _unpack_udp_endpoint(raw: tuple[bytes, bytes]) -> tuple[Addr, int, int]:
    return _parse_address(raw[0]), int.from_bytes(raw[1], "big"), socket.IPPROTO_UDP


def _dump(family: int, status: ConntrackStatus) -> list[dict[int, bytes]]:
    """Returns the attributes of entries that have all of these status bits."""
    status_bytes = struct.pack(">I", status)  # ctnetlink's numbers are in network order
    body = struct.pack("=BBH", family, 0, 0)  # struct nfgenmsg: family, version, resource id
    body += pack_attribute(uapi.CTA_STATUS, status_bytes) + pack_attribute(uapi.CTA_STATUS_MASK, status_bytes)
    with IgnoredErrnos(*_UNSUPPORTED_ERRNOS), Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        entries = (parse_attributes(message.body[4:]) for message in netlink.dump(_CT_GET, body))
        # Older kernels ignore the filter in the request and return all entries.
        return [entry for entry in entries if int.from_bytes(entry.get(uapi.CTA_STATUS, b""), "big") & status == status]
    return []


def _flow_behind_nat(attrs: dict[int, bytes]) -> ConntrackFlow | None:
    """Returns the connection after translation, which is the reverse of its reply tuple."""
    reply = attrs.get(uapi.CTA_TUPLE_REPLY, b"")
    source, source_port = _parse_endpoint(reply, _DST_TYPES, uapi.CTA_PROTO_DST_PORT)
    destination, destination_port = _reply_source(attrs)
    if not (source and source_port and destination and destination_port):
        return None
    protocol = parse_attributes(parse_attributes(reply)[uapi.CTA_TUPLE_PROTO])[uapi.CTA_PROTO_NUM][0]
    return ConntrackFlow(
        protocol,
        _parse_address(source),
        int.from_bytes(source_port, "big"),
        _parse_address(destination),
        int.from_bytes(destination_port, "big"),
    )


def _original_destination(attrs: dict[int, bytes]) -> tuple[bytes, bytes]:
    """The address and port that the client connected to."""
    return _parse_endpoint(attrs.get(uapi.CTA_TUPLE_ORIG, b""), _DST_TYPES, uapi.CTA_PROTO_DST_PORT)


def _reply_source(attrs: dict[int, bytes]) -> tuple[bytes, bytes]:
    """The address and port that reply."""
    return _parse_endpoint(attrs.get(uapi.CTA_TUPLE_REPLY, b""), _SRC_TYPES, uapi.CTA_PROTO_SRC_PORT)


def _parse_endpoint(tuple_: bytes, address_types: tuple[int, int], port_type: int) -> tuple[bytes, bytes]:
    """One end of a conntrack tuple: the raw address, of either family, and the raw port."""
    attrs = parse_attributes(tuple_)
    ip = parse_attributes(attrs.get(uapi.CTA_TUPLE_IP, b""))
    proto = parse_attributes(attrs.get(uapi.CTA_TUPLE_PROTO, b""))
    return ip.get(address_types[0], ip.get(address_types[1], b"")), proto.get(port_type, b"")


def _parse_address(raw: bytes) -> Addr:
    return Addr(V4_PREFIX + raw) if len(raw) == 4 else Addr(raw)


def _encode_request(msg_type: int, flow: ConntrackFlow, timeout: int = 0, flags: int = 0) -> NetlinkRequest:
    family = family_of(flow.destination)
    body = struct.pack("=BBH", AF[family], 0, 0)
    endpoints = (flow.source, flow.source_port), (flow.destination, flow.destination_port)
    for tuple_type, (source, destination) in (
        (uapi.CTA_TUPLE_ORIG, endpoints),
        (uapi.CTA_TUPLE_REPLY, endpoints[::-1]),
    ):
        body += pack_nested(tuple_type, *_encode_tuple(flow.protocol, source, destination, family))
    if msg_type == _CT_NEW:
        # ASSURED entries are not evicted when the table is full. CONFIRMED must be repeated: the
        # kernel sets it itself and refuses a request that would clear it (EBUSY).
        status = ConntrackStatus.IPS_CONFIRMED | ConntrackStatus.IPS_ASSURED | ConntrackStatus.IPS_SEEN_REPLY
        body += pack_attribute(uapi.CTA_STATUS, struct.pack(">I", status))
        body += pack_attribute(uapi.CTA_TIMEOUT, struct.pack(">I", timeout))
        if flow.protocol == socket.IPPROTO_TCP:
            state = pack_attribute(uapi.CTA_PROTOINFO_TCP_STATE, bytes((uapi.TCP_CONNTRACK_ESTABLISHED,)))
            body += pack_nested(uapi.CTA_PROTOINFO, pack_nested(uapi.CTA_PROTOINFO_TCP, state))
    return NetlinkRequest(msg_type, body, flags)


def _encode_tuple(
    protocol: int, source: tuple[Addr, int], destination: tuple[Addr, int], family: int
) -> Iterator[bytes]:
    is_v6 = family == 6
    yield pack_nested(
        uapi.CTA_TUPLE_IP,
        pack_attribute(_SRC_TYPES[is_v6], to_wire(source[0])),
        pack_attribute(_DST_TYPES[is_v6], to_wire(destination[0])),
    )
    yield pack_nested(
        uapi.CTA_TUPLE_PROTO,
        pack_attribute(uapi.CTA_PROTO_NUM, bytes((protocol,))),
        pack_attribute(uapi.CTA_PROTO_SRC_PORT, struct.pack(">H", source[1])),
        pack_attribute(uapi.CTA_PROTO_DST_PORT, struct.pack(">H", destination[1])),
    )

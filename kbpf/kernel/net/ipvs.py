# SPDX-License-Identifier: Apache-2.0
"""IPVS: virtual services and their real servers in the calling thread's network namespace.

Messages are encoded here rather than by pyroute2, whose encoder takes a millisecond for each (a
node with 10,000 Services has 100,000 servers) and encodes IPv6 prefixes incorrectly; a test
decodes our messages with pyroute2. IpvsClient.apply() sends many changes in one datagram.
"""

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import IgnoredErrnos, KernelError, kernel_errors
from kbpf.kernel.net import uapi
from kbpf.kernel.net.netlink import (
    AF,
    Message,
    Netlink,
    NetlinkRequest,
    pack_attribute,
    pack_nested,
    pack_string,
    parse_attributes,
    parse_int32,
    parse_string,
)
from kbpf.kernel.system import sysctl
from kbpf.model.address import ANY4, ANY6, V4_PREFIX, Addr, family_of, parse_addr, to_wire
from kbpf.model.desired import RealServer, VirtualService
from kbpf.model.metrics import ConnectionStats
from kbpf.model.objects import Protocol

CONNECTIONS_PATH: Final = Path("/proc/thread-self/net/ip_vs_conn")
CONNTRACK_SYSCTL: Final = "net.ipv4.vs.conntrack"
"""Whether IPVS also keeps its connections in conntrack, which masquerading requires."""
EXPIRE_NODEST_CONN_SYSCTL: Final = "net.ipv4.vs.expire_nodest_conn"
"""A setting that every IPVS has."""
HINT: Final = "load the kernel module ip_vs (modprobe ip_vs)"

_VERBS: Final = {"NEW": "create", "SET": "change", "DEL": "delete", "GET": "read"}
_NOUNS: Final = {"SERVICE": "virtual service", "DEST": "real server"}
_STATS_ATTRS: Final = (
    uapi.IPVS_STATS_ATTR_CONNS,
    uapi.IPVS_STATS_ATTR_INBYTES,
    uapi.IPVS_STATS_ATTR_OUTBYTES,
)
_NO_SERVICE: Final = IgnoredErrnos(errno.ESRCH, errno.ENOENT)
_GENLMSGHDR: Final = struct.Struct("=BBH")  # command, version, reserved
_IP_VS_FLAGS: Final = struct.Struct("=II")  # the flags, and the mask of those that are set
_U16: Final = struct.Struct("=H")
_U32: Final = struct.Struct("=I")
_BE16: Final = struct.Struct(">H")
_TIMEOUT_ATTRS: Final = (
    uapi.IPVS_CMD_ATTR_TIMEOUT_TCP,
    uapi.IPVS_CMD_ATTR_TIMEOUT_TCP_FIN,
    uapi.IPVS_CMD_ATTR_TIMEOUT_UDP,
)


def supports_conntrack() -> bool | None:
    """Whether this kernel's IPVS supports conntrack (CONFIG_IP_VS_NFCT); None if its settings are
    not visible.
    """
    for name, supported in ((CONNTRACK_SYSCTL, True), (EXPIRE_NODEST_CONN_SYSCTL, False)):
        try:
            sysctl.read(name)
        except KernelError as error:
            if error.errno != errno.ENOENT:
                return None
        else:
            return supported
    return None


class IpvsCommand(IntEnum):
    """Commands of linux/ip_vs.h. A DEST is a real server."""

    IPVS_CMD_NEW_SERVICE = 1
    IPVS_CMD_SET_SERVICE = 2
    IPVS_CMD_DEL_SERVICE = 3
    IPVS_CMD_GET_SERVICE = 4
    IPVS_CMD_NEW_DEST = 5
    IPVS_CMD_SET_DEST = 6
    IPVS_CMD_DEL_DEST = 7
    IPVS_CMD_GET_DEST = 8
    IPVS_CMD_SET_CONFIG = 12


class IpvsServiceFlag(IntFlag):
    """The flags IP_VS_SVC_F_* that we set. The last two are for the schedulers `sh` and `mh`:
    choose another server if the chosen one has weight 0, and hash the client's port too.
    """

    IP_VS_SVC_F_PERSISTENT = 0x01
    IP_VS_SVC_F_SCHED_SH_FALLBACK = 0x08
    IP_VS_SVC_F_SCHED_SH_PORT = 0x10


class VirtualServiceSettings(NamedTuple):
    """How a virtual service chooses servers. `persistence` is in seconds, 0 for none."""

    scheduler: str
    persistence: int = 0
    flags: IpvsServiceFlag = IpvsServiceFlag(0)


class ConnectionTimeouts(NamedTuple):
    """Timeouts for idle connections, in seconds. `tcp_fin`: after a FIN."""

    tcp: int = 0
    tcp_fin: int = 0
    udp: int = 0


class RealServerStatus(NamedTuple):
    """A real server as reported by the kernel, with its connections. `stats`: IPVS_COUNTERS of it
    since it was created.
    """

    server: RealServer
    weight: int
    active_conns: int
    inactive_conns: int
    stats: ConnectionStats = ConnectionStats()

    @property
    def connections(self) -> int:
        """All, including closed ones that have not expired."""
        return self.active_conns + self.inactive_conns


class IpvsRequest(NamedTuple):
    """One change. `weight` applies only with `server`, `settings` only without."""

    command: IpvsCommand
    service: VirtualService
    server: RealServer | None = None
    weight: int = 0
    settings: VirtualServiceSettings | None = None

    def __str__(self) -> str:
        verb, _, noun = self.command.name.removeprefix("IPVS_CMD_").partition("_")
        description = f"{_VERBS[verb]} {_NOUNS[noun]}"
        return f"{description} {self.service}" + (f" -> {self.server}" if self.server else "")


class IpvsConnection(NamedTuple):
    """A connection tracked by IPVS: addresses with ports, IPVS's name for its state, and the
    seconds until it expires if no packet arrives.
    """

    protocol: Protocol
    client: tuple[Addr, int]
    frontend: tuple[Addr, int]
    server: tuple[Addr, int]
    state: str
    expires_in: int


def list_connections() -> tuple[IpvsConnection, ...]:
    """Lists all connections in this network namespace. Raises KernelError if
    they cannot be read.
    """
    with kernel_errors("cannot read the connections of IPVS", str(CONNECTIONS_PATH), HINT):
        return tuple(parse_connections(CONNECTIONS_PATH.read_text()))


def parse_connections(listing: str) -> Iterator[IpvsConnection]:
    """Parses /proc/net/ip_vs_conn. Persistence templates (client port 0) and protocols that
    Services do not use are skipped.
    """
    # Fields: protocol, client address and port, frontend, server, state, seconds; more may follow.
    for line in listing.splitlines()[1:]:
        protocol_name, *fields = line.split()
        if protocol_name not in Protocol.__members__ or len(fields) < 8 or int(fields[1], 16) == 0:
            continue
        client, frontend, server = ((_parse_proc_address(fields[i]), int(fields[i + 1], 16)) for i in (0, 2, 4))
        yield IpvsConnection(Protocol[protocol_name], client, frontend, server, fields[6], int(fields[7]))


def _parse_proc_address(field: str) -> Addr:
    if ":" in field:
        return parse_addr(field)
    # An IPv4 address is printed as one hexadecimal number, most significant byte first.
    return Addr(V4_PREFIX + bytes.fromhex(field))


# ---- bytes ---------------------------------------------------------------------------------------


def encode_request(request: IpvsRequest) -> bytes:
    """Encodes the message body: genetlink header and attributes."""
    parts = [
        _GENLMSGHDR.pack(request.command, uapi.IPVS_GENL_VERSION, 0),
        pack_nested(uapi.IPVS_CMD_ATTR_SERVICE, _encode_service(request)),
    ]
    if request.server is not None:
        parts.append(pack_nested(uapi.IPVS_CMD_ATTR_DEST, _encode_server(request.server, request.weight)))
    return b"".join(parts)


def encode_timeouts(timeouts: ConnectionTimeouts) -> bytes:
    """Encodes the body that sets the timeouts; those that are 0 are omitted."""
    attrs = (
        pack_attribute(attr_type, _U32.pack(seconds))
        for attr_type, seconds in zip(_TIMEOUT_ATTRS, timeouts, strict=True)
        if seconds
    )
    return _GENLMSGHDR.pack(IpvsCommand.IPVS_CMD_SET_CONFIG, uapi.IPVS_GENL_VERSION, 0) + b"".join(attrs)


def _encode_service(request: IpvsRequest) -> bytes:
    service, settings = request.service, request.settings
    # Family, protocol and mark are in host order, port and address in network order.
    parts = [pack_attribute(uapi.IPVS_SVC_ATTR_AF, _U16.pack(AF[service.family]))]
    if service.fwmark:
        parts += [pack_attribute(uapi.IPVS_SVC_ATTR_FWMARK, _U32.pack(service.fwmark))]
    else:
        parts += [
            pack_attribute(uapi.IPVS_SVC_ATTR_PROTOCOL, _U16.pack(service.protocol)),
            pack_attribute(uapi.IPVS_SVC_ATTR_ADDR, to_wire(service.address)),
            pack_attribute(uapi.IPVS_SVC_ATTR_PORT, _BE16.pack(service.port)),
        ]
    if settings is not None:
        flags = settings.flags | (IpvsServiceFlag.IP_VS_SVC_F_PERSISTENT if settings.persistence else 0)
        # Persistence is per client address: a mask in network order, or an IPv6 prefix length.
        netmask = b"\xff\xff\xff\xff" if service.family == 4 else _U32.pack(128)
        parts += [
            pack_string(uapi.IPVS_SVC_ATTR_SCHED_NAME, settings.scheduler),
            pack_attribute(uapi.IPVS_SVC_ATTR_FLAGS, _IP_VS_FLAGS.pack(flags, sum(IpvsServiceFlag))),
            pack_attribute(uapi.IPVS_SVC_ATTR_TIMEOUT, _U32.pack(settings.persistence)),
            pack_attribute(uapi.IPVS_SVC_ATTR_NETMASK, netmask),
        ]
    return b"".join(parts)


def _encode_server(server: RealServer, weight: int) -> bytes:
    return b"".join(
        (
            pack_attribute(uapi.IPVS_DEST_ATTR_ADDR_FAMILY, _U16.pack(AF[family_of(server.address)])),
            pack_attribute(uapi.IPVS_DEST_ATTR_ADDR, to_wire(server.address)),
            pack_attribute(uapi.IPVS_DEST_ATTR_PORT, _BE16.pack(server.port)),
            pack_attribute(uapi.IPVS_DEST_ATTR_FWD_METHOD, _U32.pack(uapi.IP_VS_CONN_F_MASQ)),
            pack_attribute(uapi.IPVS_DEST_ATTR_WEIGHT, _U32.pack(weight)),
            # 0 is no limit. The kernel rejects a new server without thresholds (EINVAL).
            pack_attribute(uapi.IPVS_DEST_ATTR_U_THRESH, _U32.pack(0)),
            pack_attribute(uapi.IPVS_DEST_ATTR_L_THRESH, _U32.pack(0)),
        )
    )


def _decode_address(raw: bytes, family: int) -> Addr:
    # The kernel writes 16 bytes for either family.
    return Addr(V4_PREFIX + raw[:4]) if family == socket.AF_INET else Addr(raw[:16])


def _decode_object(body: bytes, attr_type: int) -> dict[int, bytes]:
    return parse_attributes(parse_attributes(body[_GENLMSGHDR.size :])[attr_type])


def decode_service(body: bytes) -> tuple[VirtualService, VirtualServiceSettings]:
    """Decodes a reply to IPVS_CMD_GET_SERVICE."""
    attrs = _decode_object(body, uapi.IPVS_CMD_ATTR_SERVICE)
    family = _U16.unpack(attrs[uapi.IPVS_SVC_ATTR_AF])[0]
    fwmark = parse_int32(attrs.get(uapi.IPVS_SVC_ATTR_FWMARK)) & 0xFFFFFFFF  # it is unsigned
    flags = _IP_VS_FLAGS.unpack(attrs[uapi.IPVS_SVC_ATTR_FLAGS])[0]
    settings = VirtualServiceSettings(
        parse_string(attrs[uapi.IPVS_SVC_ATTR_SCHED_NAME]),
        parse_int32(attrs.get(uapi.IPVS_SVC_ATTR_TIMEOUT)) if flags & IpvsServiceFlag.IP_VS_SVC_F_PERSISTENT else 0,
        IpvsServiceFlag(
            flags & (IpvsServiceFlag.IP_VS_SVC_F_SCHED_SH_FALLBACK | IpvsServiceFlag.IP_VS_SVC_F_SCHED_SH_PORT)
        ),
    )
    if fwmark:
        return VirtualService(socket.IPPROTO_TCP, ANY4 if family == socket.AF_INET else ANY6, 0, fwmark), settings
    address = _decode_address(attrs[uapi.IPVS_SVC_ATTR_ADDR], family)
    port = _BE16.unpack(attrs[uapi.IPVS_SVC_ATTR_PORT])[0]
    protocol = _U16.unpack(attrs[uapi.IPVS_SVC_ATTR_PROTOCOL])[0]
    return VirtualService(protocol, address, port), settings


def decode_stats(body: bytes) -> tuple[VirtualService, ConnectionStats]:
    """Decodes the counters in the same reply: IPVS_COUNTERS since the service was created."""
    attrs = _decode_object(body, uapi.IPVS_CMD_ATTR_SERVICE)
    return decode_service(body)[0], _decode_counters(attrs.get(uapi.IPVS_SVC_ATTR_STATS64, b""))


def _decode_counters(raw: bytes) -> ConnectionStats:
    """All are 0 before Linux v4.1, which has only 32-bit ones."""
    stats = parse_attributes(raw)
    opened, bytes_in, bytes_out = (
        int.from_bytes(stats.get(attr_type, b""), sys.byteorder) for attr_type in _STATS_ATTRS
    )
    return ConnectionStats(opened=opened, bytes_in=bytes_in, bytes_out=bytes_out)


def decode_server(body: bytes, family: int) -> RealServerStatus:
    """Decodes a reply to IPVS_CMD_GET_DEST. `family` is that of the service, 4 or 6."""
    attrs = _decode_object(body, uapi.IPVS_CMD_ATTR_DEST)
    # Servers may have another family than their service (tunnels); old kernels do not report it.
    server_family = attrs.get(uapi.IPVS_DEST_ATTR_ADDR_FAMILY) or _U16.pack(AF[family])
    address = _decode_address(attrs[uapi.IPVS_DEST_ATTR_ADDR], _U16.unpack(server_family)[0])
    return RealServerStatus(
        RealServer(address, _BE16.unpack(attrs[uapi.IPVS_DEST_ATTR_PORT])[0]),
        parse_int32(attrs[uapi.IPVS_DEST_ATTR_WEIGHT]),
        parse_int32(attrs.get(uapi.IPVS_DEST_ATTR_ACTIVE_CONNS)),
        parse_int32(attrs.get(uapi.IPVS_DEST_ATTR_INACT_CONNS)),
        _decode_counters(attrs.get(uapi.IPVS_DEST_ATTR_STATS64, b"")),
    )


# ---- the client ----------------------------------------------------------------------------------


class IpvsClient:
    """A netlink connection to IPVS. Raises KernelError with ENOENT if the kernel has no IPVS."""

    def __init__(self) -> None:
        self._netlink = Netlink(uapi.NETLINK_GENERIC, "IPVS")
        try:
            self._family_id = self._resolve_family()
        except KernelError:
            self.close()
            raise

    def _resolve_family(self) -> int:
        body = _GENLMSGHDR.pack(uapi.CTRL_CMD_GETFAMILY, 1, 0) + pack_string(
            uapi.CTRL_ATTR_FAMILY_NAME, uapi.IPVS_GENL_NAME
        )
        try:
            reply = self._netlink.request(uapi.GENL_ID_CTRL, body)
        except KernelError as error:
            raise KernelError("this kernel has no IPVS", "", HINT, error.errno) from error
        attrs = parse_attributes(reply[0].body[_GENLMSGHDR.size :])
        return int(_U16.unpack(attrs[uapi.CTRL_ATTR_FAMILY_ID])[0])

    def close(self) -> None:
        self._netlink.close()

    def set_timeouts(self, timeouts: ConnectionTimeouts) -> None:
        """Sets the timeouts that are not 0."""
        self._netlink.request(self._family_id, encode_timeouts(timeouts))

    def list_services(self) -> list[tuple[VirtualService, VirtualServiceSettings]]:
        """Lists all virtual services, including those of other programs."""
        return [decode_service(message.body) for message in self._dump_services()]

    def _dump_services(self) -> list[Message]:
        body = _GENLMSGHDR.pack(IpvsCommand.IPVS_CMD_GET_SERVICE, uapi.IPVS_GENL_VERSION, 0)
        return self._netlink.dump(self._family_id, body)

    def read_settings(self, service: VirtualService) -> VirtualServiceSettings | None:
        """Reads the settings of one virtual service; None if it does not exist."""
        body = encode_request(IpvsRequest(IpvsCommand.IPVS_CMD_GET_SERVICE, service))
        with _NO_SERVICE:
            return decode_service(self._netlink.request(self._family_id, body)[0].body)[1]
        return None

    def read_stats(self) -> list[tuple[VirtualService, ConnectionStats]]:
        """Reads the counters of all virtual services, including those of other programs."""
        return [decode_stats(message.body) for message in self._dump_services()]

    def list_servers(self, service: VirtualService) -> list[RealServerStatus]:
        """Lists the real servers of a virtual service; empty if it does not exist."""
        body = encode_request(IpvsRequest(IpvsCommand.IPVS_CMD_GET_DEST, service))
        with _NO_SERVICE:
            return [decode_server(each.body, service.family) for each in self._netlink.dump(self._family_id, body)]
        return []

    def count_connections(self, service: VirtualService) -> int:
        """Counts the connections of a virtual service."""
        return sum(status.connections for status in self.list_servers(service))

    def try_apply(self, requests: Sequence[IpvsRequest]) -> list[int]:
        """Applies the requests; returns an errno for each, in order, 0 for success."""
        creates = (IpvsCommand.IPVS_CMD_NEW_SERVICE, IpvsCommand.IPVS_CMD_NEW_DEST)
        return self._netlink.request_many(
            [
                NetlinkRequest(
                    self._family_id,
                    encode_request(request),
                    uapi.NLM_F_CREATE | uapi.NLM_F_EXCL if request.command in creates else 0,
                )
                for request in requests
            ]
        )

    def apply(self, requests: Sequence[IpvsRequest], ignored_errnos: Iterable[int] = ()) -> None:
        """Applies all requests. Raises KernelError for the first that failed with an errno other
        than `ignored_errnos`; those after it were applied nevertheless.
        """
        accepted_errnos = {0, *ignored_errnos}
        for request, code in zip(requests, self.try_apply(requests), strict=True):
            if code not in accepted_errnos:
                raise KernelError(f"cannot {request}", "IPVS", os.strerror(code), code)

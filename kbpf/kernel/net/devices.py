# SPDX-License-Identifier: Apache-2.0
"""Devices in this network namespace: listing them, and following their changes."""

import socket
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import KernelError, kernel_errors
from kbpf.kernel.net import uapi
from kbpf.kernel.net.addresses import IFADDRMSG, address_of, source_address_of, subnet_of
from kbpf.kernel.net.netlink import (
    Message,
    Rtnetlink,
    pack_attribute,
    parse_attributes,
    parse_int32,
    parse_string,
)
from kbpf.kernel.system import sysctl
from kbpf.kernel.system.polling import wait_readable
from kbpf.model.address import Addr
from kbpf.model.objects import Cidr

HEADERLESS_LINK_TYPES: Final = frozenset(
    (
        uapi.ARPHRD_PPP,
        uapi.ARPHRD_RAWIP,
        uapi.ARPHRD_TUNNEL,  # ipip
        uapi.ARPHRD_TUNNEL6,
        uapi.ARPHRD_SIT,
        uapi.ARPHRD_IPGRE,
        uapi.ARPHRD_IP6GRE,
        uapi.ARPHRD_NONE,  # WireGuard and tun
    )
)
"""Link types whose packets have no link-layer header."""
IP_TUNNEL_LINK_TYPES: Final = frozenset(
    (
        uapi.ARPHRD_TUNNEL,
        uapi.ARPHRD_TUNNEL6,
        uapi.ARPHRD_SIT,
        uapi.ARPHRD_IPGRE,
        uapi.ARPHRD_IP6GRE,
    )
)
"""Link types of tunnels that encapsulate IP packets in IP: ipip, ip6tnl, sit, gre, ip6gre, vti."""

ZERO_MAC: Final = bytes(6)
RP_FILTER: Final = "net.ipv4.conf.all.rp_filter"
BRIDGE_NETFILTER: Final = (
    "net.bridge.bridge-nf-call-iptables",
    "net.bridge.bridge-nf-call-ip6tables",
)
"""Sysctls of the module br_netfilter: for all bridges of the network namespace."""


_TCMSG: Final = struct.Struct("=BxxxiIII")
_IFINFOMSG: Final = struct.Struct("=BxHiII")
_EXT_MASK_ATTR: Final = pack_attribute(uapi.IFLA_EXT_MASK, struct.pack("=I", uapi.RTEXT_FILTER_SKIP_STATS))


@dataclass(frozen=True, slots=True)
class Device:
    """A network device.

    `kind`: veth, bridge, vxlan, ... as shown by `ip -d link`; empty for hardware. `link_type`:
    ARPHRD_*. `master`: ifindex of the bridge, bond or VRF that it is a port of, or 0. `link`:
    ifindex of the device below it, or of a veth's peer, which may be in another namespace; or 0.
    `peer_netns`: the netns id of the *other* namespace that `link` is in; None if it is in this
    one. `has_subnet`: it has an address with neighbours: not link-local, prefix shorter than /32
    or /128. `mac`: its own address, 6 bytes; zeros if its link type has none of this length.
    `addresses`: its IP addresses but link-local ones, in the kernel's order; `sources`: the ones that the kernel would
    use as source addresses; `subnets`: the network of each. `bridge_netfilter`: a bridge whose packets pass netfilter
    as they enter a port, in one family at least (br_netfilter). `strict_filter`: the kernel drops
    IPv4 packets whose source has no route by this device (rp_filter).
    """

    ifindex: int
    name: str
    kind: str = ""
    up: bool = True
    loopback: bool = False
    point_to_point: bool = False
    mtu: int = 1500
    link_type: int = uapi.ARPHRD_ETHER
    master: int = 0
    link: int = 0
    peer_netns: int | None = None
    has_subnet: bool = False
    mac: bytes = ZERO_MAC
    addresses: tuple[Addr, ...] = ()
    sources: tuple[Addr, ...] = ()
    subnets: tuple[Cidr, ...] = ()
    bridge_netfilter: bool = False
    strict_filter: bool = False

    @property
    def has_header(self) -> bool:
        """Whether its packets begin with an Ethernet header."""
        return self.link_type == uapi.ARPHRD_ETHER

    @property
    def is_ip_tunnel(self) -> bool:
        """Whether it encapsulates IP packets in IP, with or without a fixed remote address."""
        return self.link_type in IP_TUNNEL_LINK_TYPES

    @property
    def carries_ip(self) -> bool:
        """Whether IP packets can be parsed on this link type."""
        return self.has_header or self.link_type in HEADERLESS_LINK_TYPES


def list_devices() -> tuple[Device, ...]:
    """Lists all devices, by ifindex."""
    with Rtnetlink() as netlink:
        links = netlink.dump(uapi.RTM_GETLINK, _IFINFOMSG.pack(0, 0, 0, 0, 0) + _EXT_MASK_ATTR)
        addresses = netlink.dump(uapi.RTM_GETADDR, IFADDRMSG.pack(0, 0, 0, 0, 0))
    by_ifindex: dict[int, list[bytes]] = {}
    for message in addresses:
        if message.msg_type == uapi.RTM_NEWADDR:
            by_ifindex.setdefault(IFADDRMSG.unpack_from(message.body)[4], []).append(message.body)
    links = [message for message in links if message.msg_type == uapi.RTM_NEWLINK]
    settings, rp_filter = _read_bridge_netfilter(), int(sysctl.read(RP_FILTER))
    devices = {
        device.ifindex: device
        for message in links
        for device in [_parse_device(message, by_ifindex, settings, rp_filter)]
    }
    return tuple(devices[ifindex] for ifindex in sorted(devices))


def has_way_to(namespace: Path) -> bool:
    """Whether a device of this thread's network namespace leads to another one:
    is_netns_of_cluster() of bpf/cluster_netns.h, seen from inside.
    """
    devices = [device for device in list_devices() if not device.loopback]
    opening = kernel_errors("cannot open the network namespace", str(namespace))
    with opening, namespace.open("rb") as file, Rtnetlink() as netlink:
        # struct rtgenmsg, padded
        fd = pack_attribute(uapi.NETNSA_FD, file.fileno().to_bytes(4, sys.byteorder))
        reply = netlink.request(uapi.RTM_GETNSID, bytes(4) + fd)
    number = parse_int32(parse_attributes(reply[0].body[4:]).get(uapi.NETNSA_NSID, b""))
    return any(device.kind in ("", "openvswitch") or device.peer_netns == number for device in devices)


def _address_of_node(body: bytes) -> Addr | None:
    return None if IFADDRMSG.unpack_from(body)[3] == uapi.RT_SCOPE_LINK else address_of(body)


def _has_neighbours(body: bytes) -> bool:
    """Whether this is an address in a subnet with others."""
    family, prefix, _, scope, _ = IFADDRMSG.unpack_from(body)
    return bool(prefix < (32 if family == socket.AF_INET else 128) and scope < uapi.RT_SCOPE_LINK)


def _read_bridge_netfilter() -> tuple[bool, ...]:
    """The values of BRIDGE_NETFILTER; none if the module is not loaded."""
    try:
        return tuple(sysctl.read(name) != "0" for name in BRIDGE_NETFILTER)
    except KernelError:
        return ()


def _parse_device(
    message: Message,
    addresses: Mapping[int, Sequence[bytes]],
    bridge_netfilter: tuple[bool, ...],
    rp_filter: int,
) -> Device:
    _, link_type, ifindex, flags, _ = _IFINFOMSG.unpack_from(message.body)
    attrs = parse_attributes(message.body[_IFINFOMSG.size :])
    info = parse_attributes(attrs.get(uapi.IFLA_LINKINFO, b""))
    peer_netns = attrs.get(uapi.IFLA_LINK_NETNSID)
    bodies = addresses.get(ifindex, ())
    sources = {address: body for body in bodies if (address := source_address_of(body)) is not None}
    kind = parse_string(info.get(uapi.IFLA_INFO_KIND, b""))
    return Device(
        ifindex=ifindex,
        name=parse_string(attrs.get(uapi.IFLA_IFNAME, b"")),
        kind=kind,
        up=bool(flags & uapi.IFF_UP),
        loopback=bool(flags & uapi.IFF_LOOPBACK),
        point_to_point=bool(flags & uapi.IFF_POINTOPOINT),
        mtu=parse_int32(attrs.get(uapi.IFLA_MTU)),
        link_type=link_type,
        master=parse_int32(attrs.get(uapi.IFLA_MASTER)),
        link=parse_int32(attrs.get(uapi.IFLA_LINK)),
        peer_netns=None if peer_netns is None else parse_int32(peer_netns),
        has_subnet=any(map(_has_neighbours, bodies)),
        mac=_parse_mac(attrs.get(uapi.IFLA_ADDRESS, b"")),
        addresses=tuple(address for body in bodies if (address := _address_of_node(body)) is not None),
        sources=tuple(sources),
        subnets=tuple(map(subnet_of, sources.values())),
        bridge_netfilter=kind == "bridge"
        and bool(bridge_netfilter)
        and (any(bridge_netfilter) or _calls_netfilter(info.get(uapi.IFLA_INFO_DATA, b""))),
        strict_filter=max(rp_filter, _own_rp_filter(attrs.get(uapi.IFLA_AF_SPEC, b""))) == 1,
    )


def _own_rp_filter(raw: bytes) -> int:
    """A device's own setting. The kernel applies it or `all`, whichever is larger."""
    settings = parse_attributes(parse_attributes(raw).get(socket.AF_INET, b""))
    numbers = memoryview(settings.get(uapi.IFLA_INET_CONF, b"")).cast("I")
    return numbers[uapi.IPV4_DEVCONF_RP_FILTER - 1] if len(numbers) >= uapi.IPV4_DEVCONF_RP_FILTER else 0


def _calls_netfilter(raw: bytes) -> bool:
    """Whether a bridge's own settings make its packets pass netfilter."""
    data = parse_attributes(raw)
    return any(any(data.get(key, b"")) for key in (uapi.IFLA_BR_NF_CALL_IPTABLES, uapi.IFLA_BR_NF_CALL_IP6TABLES))


def _parse_mac(raw: bytes) -> bytes:
    # For a tunnel this is the IP address of its end; for InfiniBand it has 20 bytes.
    return raw if len(raw) == len(ZERO_MAC) else ZERO_MAC


class DeviceEvents(NamedTuple):
    """Changes of devices. `received`: whether there was any. `deleted`: ifindexes of devices that
    were deleted or moved to another namespace; None if notifications were lost, so that this is
    unknown. `filters`: whether another tool has added or replaced a cls_bpf filter.
    """

    received: bool
    deleted: Collection[int] | None = frozenset()
    filters: bool = False


class DeviceMonitor(Rtnetlink):
    """Receives notifications about devices and their addresses (what we do on a device depends on
    both). Earlier changes are not reported: list the devices after opening it.

    `own_filters`: also about cls_bpf filters that have none of these handles.
    """

    def __init__(self, own_filters: Collection[int] | None = None) -> None:
        groups = uapi.RTMGRP_LINK | uapi.RTMGRP_IPV4_IFADDR | uapi.RTMGRP_IPV6_IFADDR
        super().__init__(groups if own_filters is None else groups | uapi.RTMGRP_TC)
        self._own_filters = own_filters or ()

    def wait(self, timeout: float, wake_fd: int) -> DeviceEvents:
        """Waits up to `timeout` seconds for notifications, or until `wake_fd` is readable. Returns
        those that arrived; a burst is one event.
        """
        wait_readable([self.socket.fileno(), wake_fd], timeout)
        messages, lost = self.receive_notifications()
        deleted = {_IFINFOMSG.unpack_from(message.body)[2] for message in messages if _is_deletion(message)}
        received = lost or any(message.msg_type in _DEVICE_MESSAGES for message in messages)
        return DeviceEvents(received, None if lost else deleted, any(map(self._is_foreign_filter, messages)))

    def _is_foreign_filter(self, message: Message) -> bool:
        if message.msg_type != uapi.RTM_NEWTFILTER:
            return False
        handle: int = _TCMSG.unpack_from(message.body)[2]
        kind = parse_attributes(message.body[_TCMSG.size :]).get(uapi.TCA_KIND, b"")
        return parse_string(kind) == "bpf" and handle not in self._own_filters


_DEVICE_MESSAGES: Final = frozenset((uapi.RTM_NEWLINK, uapi.RTM_DELLINK, uapi.RTM_NEWADDR, uapi.RTM_DELADDR))


def _is_deletion(message: Message) -> bool:
    # A bridge reports a port that left it with the same message type, in family AF_BRIDGE.
    if message.msg_type != uapi.RTM_DELLINK:
        return False
    family: int = _IFINFOMSG.unpack_from(message.body)[0]
    return family == socket.AF_UNSPEC

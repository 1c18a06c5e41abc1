"""The devices of this network namespace: listing them, and hearing of changes."""

import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kbpf.kernel.net.addresses import (
    IFADDRMSG,
    RT_SCOPE_LINK,
    RTM_GETADDR,
    RTM_NEWADDR,
    source_address_of,
)
from kbpf.kernel.net.netlink import (
    RTMGRP_IFADDR,
    RTMGRP_LINK,
    Message,
    Rtnetlink,
    parse_attributes,
    parse_int32,
    parse_string,
)
from kbpf.kernel.system.polling import wait_readable
from kbpf.model.address import Addr

ARPHRD_ETHER: Final = 1
ARPHRD_NONE: Final = 0xFFFE

HEADERLESS_LINK_TYPES: Final = frozenset((512, 519, 768, 769, 776, 778, 823, ARPHRD_NONE))
"""Link types (linux/if_arp.h) whose packets have no link header: PPP, RAWIP, TUNNEL (ipip),
TUNNEL6, SIT, IPGRE, IP6GRE; NONE is WireGuard and tun."""

ZERO_MAC: Final = bytes(6)

RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
RTM_GETLINK: Final = 18

IFF_UP: Final = 0x1
IFF_LOOPBACK: Final = 0x8
IFF_POINTOPOINT: Final = 0x10
RTEXT_FILTER_SKIP_STATS: Final = 8

_IFINFOMSG: Final = struct.Struct("=BxHiII")
_EXT_MASK_ATTR: Final = struct.pack("=HHI", 8, 29, RTEXT_FILTER_SKIP_STATS)  # IFLA_EXT_MASK


@dataclass(frozen=True, slots=True)
class Device:
    """A network device.

    `kind`: veth, bridge, vxlan, ... as `ip -d link` shows it; empty for hardware.
    `link_type`: ARPHRD_* of linux/if_arp.h.
    `master`: ifindex of the bridge, bond or VRF that it is a port of; 0 if of none.
    `link`: ifindex of the device below it, or of a veth's peer, which may be elsewhere; 0 if none.
    `peer_netns`: the kernel's number for the *other* network namespace that `link` is in; None
    when it is in this one.
    `has_subnet`: it has an address with neighbours: no link-local one, and shorter than a /32
    or /128.
    `mac`: its own address, 6 bytes; zeros if its link type has none of that length.
    `sources`: addresses that the kernel would send from by it, its first choice of each family
    first.
    """

    ifindex: int
    name: str
    kind: str = ""
    up: bool = True
    loopback: bool = False
    point_to_point: bool = False
    mtu: int = 1500
    link_type: int = ARPHRD_ETHER
    master: int = 0
    link: int = 0
    peer_netns: int | None = None
    has_subnet: bool = False
    mac: bytes = ZERO_MAC
    sources: tuple[Addr, ...] = ()

    @property
    def has_header(self) -> bool:
        """Whether its packets begin with an Ethernet header."""
        return self.link_type == ARPHRD_ETHER

    @property
    def carries_ip(self) -> bool:
        """Whether it is of a link type that we know how to read IP packets from."""
        return self.has_header or self.link_type in HEADERLESS_LINK_TYPES


def list_devices() -> tuple[Device, ...]:
    """All devices, by ifindex."""
    with Rtnetlink() as netlink:
        links = netlink.dump(RTM_GETLINK, _IFINFOMSG.pack(0, 0, 0, 0, 0) + _EXT_MASK_ATTR)
        addresses = netlink.dump(RTM_GETADDR, IFADDRMSG.pack(0, 0, 0, 0, 0))
    subnets = {ifindex for message in addresses for ifindex in _subnet_ifindex(message)}
    sources = _sources_by_ifindex(addresses)
    links = [message for message in links if message.msg_type == RTM_NEWLINK]
    devices = {
        device.ifindex: device
        for message in links
        for device in [_parse_device(message, subnets, sources)]
    }
    return tuple(devices[ifindex] for ifindex in sorted(devices))


def _subnet_ifindex(message: Message) -> tuple[int, ...]:
    """The ifindex, if this address has neighbours."""
    family, prefix, _, scope, ifindex = IFADDRMSG.unpack_from(message.body)
    host_prefix = 32 if family == socket.AF_INET else 128
    has_subnet = message.msg_type == RTM_NEWADDR and prefix < host_prefix and scope < RT_SCOPE_LINK
    return (ifindex,) if has_subnet else ()


def _sources_by_ifindex(messages: Iterable[Message]) -> Mapping[int, tuple[Addr, ...]]:
    """By ifindex, in the kernel's order."""
    sources: dict[int, tuple[Addr, ...]] = {}
    for message in messages:
        address = source_address_of(message.body) if message.msg_type == RTM_NEWADDR else None
        if address is not None:
            ifindex = IFADDRMSG.unpack_from(message.body)[4]
            sources[ifindex] = (*sources.get(ifindex, ()), address)
    return sources


def _parse_device(
    message: Message, subnets: set[int], sources: Mapping[int, tuple[Addr, ...]]
) -> Device:
    _, link_type, ifindex, flags, _ = _IFINFOMSG.unpack_from(message.body)
    attrs = parse_attributes(message.body[_IFINFOMSG.size :])
    info = parse_attributes(attrs.get(18, b""))  # IFLA_LINKINFO
    peer_netns = attrs.get(37)  # IFLA_LINK_NETNSID
    return Device(
        ifindex=ifindex,
        name=parse_string(attrs.get(3, b"")),  # IFLA_IFNAME
        kind=parse_string(info.get(1, b"")),  # IFLA_INFO_KIND
        up=bool(flags & IFF_UP),
        loopback=bool(flags & IFF_LOOPBACK),
        point_to_point=bool(flags & IFF_POINTOPOINT),
        mtu=parse_int32(attrs.get(4)),  # IFLA_MTU
        link_type=link_type,
        master=parse_int32(attrs.get(10)),  # IFLA_MASTER
        link=parse_int32(attrs.get(5)),  # IFLA_LINK
        peer_netns=None if peer_netns is None else parse_int32(peer_netns),
        has_subnet=ifindex in subnets,
        mac=_parse_mac(attrs.get(1, b"")),  # IFLA_ADDRESS
        sources=sources.get(ifindex, ()),
    )


def _parse_mac(raw: bytes) -> bytes:
    """A tunnel's "address" is the IP address of its end, that of InfiniBand has 20 bytes."""
    return raw if len(raw) == len(ZERO_MAC) else ZERO_MAC


class DeviceEvents(NamedTuple):
    """What happened to the devices. `gone`: those that ended, or went to another namespace, by
    ifindex; None: nobody knows, since news was lost. `any`: whether anything was told.
    """

    received: bool
    deleted: Collection[int] | None = frozenset()


class DeviceMonitor(Rtnetlink):
    """Hears of each change of a device and of a device's addresses (a device's part depends on
    both). What happened before it was opened is not told: look after opening.
    """

    def __init__(self) -> None:
        super().__init__(RTMGRP_LINK | RTMGRP_IFADDR)

    def wait(self, timeout: float, wake_fd: int) -> DeviceEvents:
        """What was told, after waiting at most so long for it, or until the descriptor `wake` is
        readable. A burst of news is one change.
        """
        wait_readable([self.socket.fileno(), wake_fd], timeout)
        messages, lost = self.receive_notifications()
        deleted = {
            _IFINFOMSG.unpack_from(message.body)[2] for message in messages if _is_deletion(message)
        }
        return DeviceEvents(lost or bool(messages), None if lost else deleted)


def _is_deletion(message: Message) -> bool:
    """A bridge tells of a port that left it in the same words, but for the family."""
    if message.msg_type != RTM_DELLINK:
        return False
    family: int = _IFINFOMSG.unpack_from(message.body)[0]
    return family == socket.AF_UNSPEC

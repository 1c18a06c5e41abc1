"""The devices of this network namespace: listing them, and hearing of changes."""

import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kbpf.kernel.net.addresses import IFADDR, RTM_GETADDR, RTM_NEWADDR, SCOPE_LINK, source_of
from kbpf.kernel.net.netlink import (
    GROUP_ADDRESSES,
    GROUP_LINK,
    Message,
    Rtnetlink,
    attributes,
    number,
    text,
)
from kbpf.kernel.system.polling import readable
from kbpf.model.address import Addr

ARPHRD_ETHER: Final = 1
ARPHRD_NONE: Final = 0xFFFE

WITHOUT_HEADER: Final = frozenset((512, 519, 768, 769, 776, 778, 823, ARPHRD_NONE))
"""Link types (linux/if_arp.h) whose packets have no link header: PPP, RAWIP, TUNNEL (ipip),
TUNNEL6, SIT, IPGRE, IP6GRE; NONE is WireGuard and tun."""

NO_MAC: Final = bytes(6)

RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
RTM_GETLINK: Final = 18

IFF_UP: Final = 0x1
IFF_LOOPBACK: Final = 0x8
IFF_POINTOPOINT: Final = 0x10
RTEXT_FILTER_SKIP_STATS: Final = 8

_IFINFO: Final = struct.Struct("=BxHiII")
_EXTENDED: Final = struct.pack("=HHI", 8, 29, RTEXT_FILTER_SKIP_STATS)  # IFLA_EXT_MASK


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
    mac: bytes = NO_MAC
    sources: tuple[Addr, ...] = ()

    @property
    def has_header(self) -> bool:
        """Whether its packets begin with an Ethernet header."""
        return self.link_type == ARPHRD_ETHER

    @property
    def carries_ip(self) -> bool:
        """Whether it is of a link type that we know how to read IP packets from."""
        return self.has_header or self.link_type in WITHOUT_HEADER


def list_devices() -> tuple[Device, ...]:
    """All devices, by ifindex."""
    with Rtnetlink() as netlink:
        links = netlink.dump(RTM_GETLINK, _IFINFO.pack(0, 0, 0, 0, 0) + _EXTENDED)
        addresses = netlink.dump(RTM_GETADDR, IFADDR.pack(0, 0, 0, 0, 0))
    subnets = {index for m in addresses for index in _subnet(m)}
    sources = _sources(addresses)
    links = [m for m in links if m.kind == RTM_NEWLINK]
    found = {d.ifindex: d for m in links for d in [_device(m, subnets, sources)]}
    return tuple(found[index] for index in sorted(found))


def _subnet(message: Message) -> tuple[int, ...]:
    """The ifindex, if this address has neighbours."""
    family, prefix, _, scope, index = IFADDR.unpack_from(message.body)
    whole = 32 if family == socket.AF_INET else 128
    good = message.kind == RTM_NEWADDR and prefix < whole and scope < SCOPE_LINK
    return (index,) if good else ()


def _sources(messages: Iterable[Message]) -> Mapping[int, tuple[Addr, ...]]:
    """By ifindex, in the kernel's order."""
    found: dict[int, tuple[Addr, ...]] = {}
    for message in messages:
        address = source_of(message.body) if message.kind == RTM_NEWADDR else None
        if address is not None:
            index = IFADDR.unpack_from(message.body)[4]
            found[index] = (*found.get(index, ()), address)
    return found


def _device(message: Message, subnets: set[int], sources: Mapping[int, tuple[Addr, ...]]) -> Device:
    _, link_type, index, flags, _ = _IFINFO.unpack_from(message.body)
    found = attributes(message.body[_IFINFO.size :])
    info = attributes(found.get(18, b""))  # IFLA_LINKINFO
    elsewhere = found.get(37)  # IFLA_LINK_NETNSID
    return Device(
        ifindex=index,
        name=text(found.get(3, b"")),  # IFLA_IFNAME
        kind=text(info.get(1, b"")),  # IFLA_INFO_KIND
        up=bool(flags & IFF_UP),
        loopback=bool(flags & IFF_LOOPBACK),
        point_to_point=bool(flags & IFF_POINTOPOINT),
        mtu=number(found.get(4)),  # IFLA_MTU
        link_type=link_type,
        master=number(found.get(10)),  # IFLA_MASTER
        link=number(found.get(5)),  # IFLA_LINK
        peer_netns=None if elsewhere is None else number(elsewhere),
        has_subnet=index in subnets,
        mac=_mac(found.get(1, b"")),  # IFLA_ADDRESS
        sources=sources.get(index, ()),
    )


def _mac(raw: bytes) -> bytes:
    """A tunnel's "address" is the IP address of its end, that of InfiniBand has 20 bytes."""
    return raw if len(raw) == len(NO_MAC) else NO_MAC


class Change(NamedTuple):
    """What happened to the devices. `gone`: those that ended, or went to another namespace, by
    ifindex; None: nobody knows, since news was lost. `any`: whether anything was told.
    """

    any: bool
    gone: Collection[int] | None = frozenset()


class Watch(Rtnetlink):
    """Hears of each change of a device and of a device's addresses (a device's part depends on
    both). What happened before it was opened is not told: look after opening.
    """

    def __init__(self) -> None:
        super().__init__(GROUP_LINK | GROUP_ADDRESSES)

    def wait(self, seconds: float, wake: int) -> Change:
        """What was told, after waiting at most so long for it, or until the descriptor `wake` is
        readable. A burst of news is one change.
        """
        readable([self.socket.fileno(), wake], seconds)
        told, lost = self.news()
        gone = {_IFINFO.unpack_from(m.body)[2] for m in told if _is_end(m)}
        return Change(lost or bool(told), None if lost else gone)


def _is_end(message: Message) -> bool:
    """A bridge tells of a port that left it in the same words, but for the family."""
    if message.kind != RTM_DELLINK:
        return False
    family: int = _IFINFO.unpack_from(message.body)[0]
    return family == socket.AF_UNSPEC

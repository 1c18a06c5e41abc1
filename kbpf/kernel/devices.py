"""The devices of this network namespace: listing them, and hearing of changes.

Rtnetlink is the conversation beneath; tc.py has it about queueing disciplines and filters. By hand
instead of pyroute2, whose import costs the agent 19 MB.
"""

import contextlib
import errno
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from kbpf.errors import KernelError

ARPHRD_ETHER: Final = 1
ARPHRD_NONE: Final = 0xFFFE

WITHOUT_HEADER: Final = frozenset((512, 519, 768, 769, 776, 778, 823, ARPHRD_NONE))
"""Link types (linux/if_arp.h) whose packets have no link header: PPP, RAWIP, TUNNEL (ipip),
TUNNEL6, SIT, IPGRE, IP6GRE; NONE is WireGuard and tun."""

NO_MAC: Final = bytes(6)

RTM_NEWLINK: Final = 16
RTM_GETLINK: Final = 18
RTM_NEWADDR: Final = 20
RTM_GETADDR: Final = 22
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
REQUEST_ACK: Final = 0x5  # NLM_F_REQUEST | NLM_F_ACK
REQUEST_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
INTERRUPTED: Final = 0x10  # NLM_F_DUMP_INTR
GROUPS: Final = 0x1 | 0x10 | 0x100  # RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
SOL_NETLINK: Final = 270
NETLINK_CAP_ACK: Final = 10
NETLINK_EXT_ACK: Final = 11

IFF_UP: Final = 0x1
IFF_LOOPBACK: Final = 0x8
IFF_POINTOPOINT: Final = 0x10
RTEXT_FILTER_SKIP_STATS: Final = 8
SCOPE_LINK: Final = 253

DUMP_TRIES: Final = 5
"""A dump that a change ran into is asked for again; in a storm the last one has to do, because
whoever watches is told of the change anyway."""

_HEADER: Final = struct.Struct("=IHHII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_IFINFO: Final = struct.Struct("=BxHiII")
_IFADDR: Final = struct.Struct("=BBBBI")
_EXTENDED: Final = struct.pack("=HHI", 8, 29, RTEXT_FILTER_SKIP_STATS)  # IFLA_EXT_MASK


class Message(NamedTuple):
    """One netlink message without its header."""

    kind: int
    flags: int
    body: bytes


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded."""
    return _ATTRIBUTE.pack(4 + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(raw: bytes) -> dict[int, bytes]:
    """The attributes by type, without the flags for nesting and byte order."""
    found = {}
    while len(raw) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(raw)
        if length < _ATTRIBUTE.size:
            break
        found[kind & 0x3FFF] = raw[_ATTRIBUTE.size : length]
        raw = raw[(length + 3) & ~3 :]
    return found


def text(raw: bytes) -> str:
    """A string as the kernel writes it: it ends with a zero byte."""
    return raw.partition(b"\0")[0].decode("utf-8", "backslashreplace")


class Rtnetlink:
    """A conversation with the network namespace that this thread is in when it begins."""

    def __init__(self, groups: int = 0) -> None:
        try:
            self.socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
            )
            self.socket.bind((0, groups))
            # Errors come with the kernel's own words instead of our request.
            self.socket.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
            self.socket.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
        except OSError as error:
            raise KernelError(
                "cannot open a netlink socket", "rtnetlink", errno=error.errno or 0
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it."""
        self.socket.close()

    def ask(self, kind: int, body: bytes, flags: int = 0) -> list[Message]:
        """What the kernel says before it acknowledges. A refusal's hint is the kernel's words."""
        return self._talk(kind, flags | REQUEST_ACK, body)

    def dump(self, kind: int, body: bytes) -> list[Message]:
        """Everything of one kind."""
        found: list[Message] = []
        for _ in range(DUMP_TRIES):
            found = self._talk(kind, REQUEST_DUMP, body)
            if not any(message.flags & INTERRUPTED for message in found):
                break
        return found

    def _talk(self, kind: int, flags: int, body: bytes) -> list[Message]:
        self.socket.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body)
        found: list[Message] = []
        while True:
            data = self.socket.recv(1 << 16)
            while len(data) >= _HEADER.size:
                length, told, marks, *_ = _HEADER.unpack_from(data)
                message = Message(told, marks, data[_HEADER.size : length])
                if told in (NLMSG_ERROR, NLMSG_DONE):
                    _refusal(message)
                    return found
                found.append(message)
                data = data[(length + 3) & ~3 :]


def _refusal(message: Message) -> None:
    """Raises what the end of an answer says: 0 or -errno; our header and the words behind it."""
    code = -_number(message.body[:4])
    if not code:
        return
    words = attributes(message.body[4 + _HEADER.size :]) if message.kind == NLMSG_ERROR else {}
    hint = text(words.get(1, b"")) or ("it needs CAP_NET_ADMIN" if code == errno.EPERM else "")
    raise KernelError("rtnetlink refuses", hint=hint, errno=code)


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
        addresses = netlink.dump(RTM_GETADDR, _IFADDR.pack(0, 0, 0, 0, 0))
    subnets = {index for m in addresses for index in _subnet(m)}
    found = {d.ifindex: d for m in links if m.kind == RTM_NEWLINK for d in [_device(m, subnets)]}
    return tuple(found[index] for index in sorted(found))


def _subnet(message: Message) -> tuple[int, ...]:
    """The ifindex, if this address has neighbours."""
    family, prefix, _, scope, index = _IFADDR.unpack_from(message.body)
    whole = 32 if family == socket.AF_INET else 128
    good = message.kind == RTM_NEWADDR and prefix < whole and scope < SCOPE_LINK
    return (index,) if good else ()


def _device(message: Message, subnets: set[int]) -> Device:
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
        mtu=_number(found.get(4)),  # IFLA_MTU
        link_type=link_type,
        master=_number(found.get(10)),  # IFLA_MASTER
        link=_number(found.get(5)),  # IFLA_LINK
        peer_netns=None if elsewhere is None else _number(elsewhere),
        has_subnet=index in subnets,
        mac=_mac(found.get(1, b"")),  # IFLA_ADDRESS
    )


def _mac(raw: bytes) -> bytes:
    """A tunnel's "address" is the IP address of its end, that of InfiniBand has 20 bytes."""
    return raw if len(raw) == len(NO_MAC) else NO_MAC


def _number(raw: bytes | None) -> int:
    return struct.unpack("=i", raw)[0] if raw else 0


def watch_devices(changed: Callable[[], None], stop: threading.Event) -> None:
    """Calls `changed` at once, and then after each change of a device or of a device's addresses
    (a device's part depends on both), until `stop` is set. Runs in its thread.

    The call at once is for what happened between the listing before and the listening. A burst
    of news is one call, and so is news that was lost (ENOBUFS).
    """
    with Rtnetlink(GROUPS) as netlink:
        changed()
        while not stop.is_set():
            ready, _, _ = select.select([netlink.socket], [], [], 0.5)
            if ready:
                _drain(netlink.socket)
                changed()


def _drain(netlink: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(1024):  # a storm must not keep us from telling of it
            try:
                netlink.recv(1 << 16, socket.MSG_DONTWAIT)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise

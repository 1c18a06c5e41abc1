"""The addresses of this network namespace: listing them, and hearing of changes.

Thirty lines of rtnetlink instead of pyroute2, whose import costs the agent 19 MB.
"""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from kbpf.errors import KernelError
from kbpf.model.address import V4_PREFIX, Addr

RTM_GETADDR: Final = 22
RTM_NEWADDR: Final = 20
NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
GROUPS: Final = 0x10 | 0x100  # RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR
IFA_ADDRESS: Final = 1
IFA_LOCAL: Final = 2
SCOPE_LINK: Final = 253
SCOPE_HOST: Final = 254

_HEADER: Final = struct.Struct("=IHHII")
_IFADDR: Final = struct.Struct("=BBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")


def _open(groups: int = 0) -> socket.socket:
    try:
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        netlink.bind((0, groups))
    except OSError as error:
        raise KernelError(
            "cannot open a netlink socket", "rtnetlink", errno=error.errno or 0
        ) from error
    return netlink


def _address(message: bytes) -> Addr | None:
    """The address of one RTM_NEWADDR; None for loopback and link-local ones."""
    _, _, _, scope, _ = _IFADDR.unpack_from(message)
    if scope in (SCOPE_HOST, SCOPE_LINK):
        return None
    found: dict[int, bytes] = {}
    rest = message[_IFADDR.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[(length + 3) & ~3 :]
    raw = found.get(IFA_LOCAL, found.get(IFA_ADDRESS, b""))
    if len(raw) == 4:
        return Addr(V4_PREFIX + raw)
    return Addr(raw) if len(raw) == 16 else None


def local_addresses() -> tuple[Addr, ...]:
    """All addresses that others can reach this namespace by, sorted; no loopback, no link-local."""
    found: set[Addr] = set()
    with _open() as netlink:
        body = _IFADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        netlink.send(_HEADER.pack(_HEADER.size + len(body), RTM_GETADDR, DUMP, 1, 0) + body)
        while True:
            data = netlink.recv(1 << 16)
            while len(data) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in (NLMSG_DONE, NLMSG_ERROR):
                    return tuple(sorted(found))
                address = _address(data[_HEADER.size : length])
                if kind == RTM_NEWADDR and address is not None:
                    found.add(address)
                data = data[(length + 3) & ~3 :]


def watch_addresses(changed: Callable[[], None], stop: threading.Event) -> None:
    """Calls `changed` at once, for what happened before there was somebody to hear it, and after
    each change of an address, until `stop` is set. Runs in its thread.
    """
    with _open(GROUPS) as netlink:
        changed()
        while not stop.is_set():
            ready, _, _ = select.select([netlink], [], [], 0.5)
            if ready:
                with contextlib.suppress(OSError):  # ENOBUFS: news was lost, so there is news
                    netlink.recv(1 << 16)
                changed()

"""IP sets: those of a name are removed, and the ports of one are read.

About the network namespace of the calling thread.
"""

import errno
import socket
import struct
from collections.abc import Iterable
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Netlink, attribute, attributes, text

NETLINK_NETFILTER: Final = 12
PROTOCOL: Final = 6

_SUBSYSTEM: Final = 6 << 8  # NFNL_SUBSYS_IPSET
_DESTROY: Final = _SUBSYSTEM | 3
_LIST: Final = _SUBSYSTEM | 7
_HEAD: Final = struct.pack("=BBH", socket.AF_INET, 0, 0)
_PROTOCOL: Final = attribute(1, bytes((PROTOCOL,)))
_NAME: Final = 2
_ENTRIES: Final = 8
_PORT: Final = 4  # IPSET_ATTR_PORT, __be16
_ABSENT: Final = frozenset((errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT))
"""No such set, or a kernel without sets."""


def names() -> tuple[str, ...]:
    """All sets; none where the kernel has none."""
    return tuple(sorted({text(found[_NAME]) for found in _listed(b"") if _NAME in found}))


def ports(name: str) -> frozenset[int]:
    """The ports of a set of ports; none if it is not there."""
    found: set[int] = set()
    for one in _listed(attribute(_NAME, name.encode() + b"\0")):
        for entry in _nested(one.get(_ENTRIES, b"")):
            found.add(int.from_bytes(attributes(entry).get(_PORT, b""), "big"))
    return frozenset(found - {0})


def destroy(which: Iterable[str]) -> tuple[str, ...]:
    """Those that were there; KernelError with EBUSY if a rule still asks one of them."""
    gone = []
    with Netlink(NETLINK_NETFILTER, "ip sets") as netlink:
        for name in which:
            body = _HEAD + _PROTOCOL + attribute(_NAME, name.encode() + b"\0")
            try:
                netlink.ask(_DESTROY, body)
            except KernelError as error:
                if error.errno not in _ABSENT:
                    raise KernelError(
                        "cannot remove the ip set", name, "does a rule still use it?", error.errno
                    ) from error
                continue
            gone.append(name)
    return tuple(gone)


def _listed(which: bytes) -> list[dict[int, bytes]]:
    with Netlink(NETLINK_NETFILTER, "ip sets") as netlink:
        try:
            told = netlink.dump(_LIST, _HEAD + _PROTOCOL + which)
        except KernelError as error:
            if error.errno in _ABSENT:
                return []
            raise
    return [attributes(message.body[len(_HEAD) :]) for message in told]


def _nested(raw: bytes) -> list[bytes]:
    """The values of attributes that stand one after the other, of whatever type."""
    found = []
    while len(raw) >= 4:
        (length,) = struct.unpack_from("=H", raw)
        found.append(raw[4:length])
        raw = raw[max(4, (length + 3) & ~3) :]
    return found

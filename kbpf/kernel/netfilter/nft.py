"""What nf_tables says of its tables without their contents.

libnftables reads every element of every set before it answers even `list tables`: seconds, where a
node has 10,000 Services. Here the kernel is asked for one thing, and answers in less than a
millisecond. All of it is about the network namespace of the calling thread.
"""

import errno
import struct
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Message, Netlink, attribute, attributes, text

NETLINK_NETFILTER: Final = 12
FAMILIES: Final = {"inet": 1, "ip": 2, "ip6": 10}  # NFPROTO_*

_GET_TABLE: Final = 10 << 8 | 1  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETTABLE and so on
_GET_RULE: Final = 10 << 8 | 7
_GET_SET: Final = 10 << 8 | 10
_TABLE_NAME: Final = 1
_TABLE_USE: Final = 3
_TABLE_HANDLE: Final = 4
_RULE_TABLE: Final = 1
_RULE_HANDLE: Final = 3
_SET_TABLE: Final = 1
_SET_NAME: Final = 2
_HEADER: Final = struct.Struct("=BBH")


class Sight(NamedTuple):
    """A table from outside. A handle never means another table or rule than it did once; `parts`
    is how many chains, sets and maps there are.
    """

    handle: int
    parts: int
    rules: tuple[int, ...]


def look(family: str, table: str) -> Sight | None:
    """One table, None if it is not there. KernelError if the kernel does not let us look."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        found = _one(netlink, _GET_TABLE, family, attribute(_TABLE_NAME, _name(table)))
        if found is None:
            return None
        said = attributes(found.body[_HEADER.size :])
        asked = _header(family) + attribute(_RULE_TABLE, _name(table))
        rules = (
            attributes(message.body[_HEADER.size :]) for message in netlink.dump(_GET_RULE, asked)
        )
        handles = (_big(r[_RULE_HANDLE]) for r in rules if text(r[_RULE_TABLE]) == table)
        return Sight(_big(said[_TABLE_HANDLE]), _big(said[_TABLE_USE]), tuple(handles))


def has_table(family: str, table: str) -> bool:
    """Whether it is there."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        asked = attribute(_TABLE_NAME, _name(table))
        return _one(netlink, _GET_TABLE, family, asked) is not None


def has_set(family: str, table: str, name: str) -> bool:
    """Whether the table is there and has a set, or a map, of this name."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        asked = attribute(_SET_TABLE, _name(table)) + attribute(_SET_NAME, _name(name))
        return _one(netlink, _GET_SET, family, asked) is not None


def _one(netlink: Netlink, kind: int, family: str, asked: bytes) -> Message | None:
    try:
        return netlink.ask(kind, _header(family) + asked)[0]
    except KernelError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


def _header(family: str) -> bytes:
    return _HEADER.pack(FAMILIES[family], 0, 0)


def _name(word: str) -> bytes:
    return word.encode() + b"\0"


def _big(raw: bytes) -> int:
    """Numbers here are in network order."""
    return int.from_bytes(raw, "big")

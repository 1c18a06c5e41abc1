"""What nf_tables says of its tables without their contents.

libnftables reads every element of every set before it answers even `list tables`: seconds, where a
node has 10,000 Services. Here the kernel is asked for one thing, and answers in less than a
millisecond. All of it is about the network namespace of the calling thread.
"""

import errno
import struct
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Message, Netlink, pack_attribute, parse_attributes, parse_string

NETLINK_NETFILTER: Final = 12
NFPROTO: Final = {"inet": 1, "ip": 2, "ip6": 10}  # NFPROTO_*

_NFT_MSG_GETTABLE: Final = 10 << 8 | 1  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETTABLE and so on
_NFT_MSG_GETRULE: Final = 10 << 8 | 7
_NFT_MSG_GETSET: Final = 10 << 8 | 10
_NFTA_TABLE_NAME: Final = 1
_NFTA_TABLE_USE: Final = 3
_NFTA_TABLE_HANDLE: Final = 4
_NFTA_RULE_TABLE: Final = 1
_NFTA_RULE_HANDLE: Final = 3
_NFTA_SET_TABLE: Final = 1
_NFTA_SET_NAME: Final = 2
_NFGENMSG: Final = struct.Struct("=BBH")


class TableSummary(NamedTuple):
    """A table from outside. A handle never means another table or rule than it did once; `parts`
    is how many chains, sets and maps there are.
    """

    handle: int
    use_count: int
    rules: tuple[int, ...]


def read_table(family: str, table: str) -> TableSummary | None:
    """One table, None if it is not there. KernelError if the kernel does not let us look."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        reply = _request_or_none(
            netlink,
            _NFT_MSG_GETTABLE,
            family,
            pack_attribute(_NFTA_TABLE_NAME, _encode_name(table)),
        )
        if reply is None:
            return None
        attrs = parse_attributes(reply.body[_NFGENMSG.size :])
        body = _pack_header(family) + pack_attribute(_NFTA_RULE_TABLE, _encode_name(table))
        rules = (
            parse_attributes(message.body[_NFGENMSG.size :])
            for message in netlink.dump(_NFT_MSG_GETRULE, body)
        )
        handles = (
            _parse_be(rule[_NFTA_RULE_HANDLE])
            for rule in rules
            if parse_string(rule[_NFTA_RULE_TABLE]) == table
        )
        return TableSummary(
            _parse_be(attrs[_NFTA_TABLE_HANDLE]), _parse_be(attrs[_NFTA_TABLE_USE]), tuple(handles)
        )


def has_table(family: str, table: str) -> bool:
    """Whether it is there."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        attrs = pack_attribute(_NFTA_TABLE_NAME, _encode_name(table))
        return _request_or_none(netlink, _NFT_MSG_GETTABLE, family, attrs) is not None


def has_set(family: str, table: str, name: str) -> bool:
    """Whether the table is there and has a set, or a map, of this name."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        attrs = pack_attribute(_NFTA_SET_TABLE, _encode_name(table)) + pack_attribute(
            _NFTA_SET_NAME, _encode_name(name)
        )
        return _request_or_none(netlink, _NFT_MSG_GETSET, family, attrs) is not None


def _request_or_none(netlink: Netlink, msg_type: int, family: str, attrs: bytes) -> Message | None:
    try:
        return netlink.request(msg_type, _pack_header(family) + attrs)[0]
    except KernelError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


def _pack_header(family: str) -> bytes:
    return _NFGENMSG.pack(NFPROTO[family], 0, 0)


def _encode_name(name: str) -> bytes:
    return name.encode() + b"\0"


def _parse_be(raw: bytes) -> int:
    """Numbers here are in network order."""
    return int.from_bytes(raw, "big")

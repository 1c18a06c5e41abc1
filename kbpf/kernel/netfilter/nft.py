# SPDX-License-Identifier: Apache-2.0
"""Queries about tables of nf_tables that do not read the contents of sets.

libnftables reads every element of every set before it answers even `list tables`, which takes
seconds on a node with 10,000 Services. Here the kernel is asked for one object and answers in less
than a millisecond. All functions act on the network namespace of the calling thread.
"""

import errno
import struct
from itertools import islice
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Message, Netlink, pack_attribute, parse_attributes, parse_string
from kbpf.kernel.net.uapi import (
    NETLINK_NETFILTER,
)
from kbpf.kernel.netfilter.uapi import (
    NFNL_SUBSYS_NFTABLES,
    NFPROTO_INET,
    NFPROTO_IPV4,
    NFPROTO_IPV6,
    NFPROTO_NETDEV,
    NFT_MSG_GETRULE,
    NFT_MSG_GETSET,
    NFT_MSG_GETTABLE,
    NFTA_RULE_HANDLE,
    NFTA_RULE_TABLE,
    NFTA_SET_NAME,
    NFTA_SET_TABLE,
    NFTA_TABLE_HANDLE,
    NFTA_TABLE_NAME,
    NFTA_TABLE_USE,
)

NFPROTO: Final = {
    "inet": NFPROTO_INET, "ip": NFPROTO_IPV4, "ip6": NFPROTO_IPV6, "netdev": NFPROTO_NETDEV
}  # fmt: skip

_GET_TABLE: Final = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETTABLE
_GET_RULE: Final = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETRULE
_GET_SET: Final = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETSET
_NFGENMSG: Final = struct.Struct("=BBH")


class TableSummary(NamedTuple):
    """A table without the contents of its sets. Handles are never reused. `use_count`: number of
    chains, sets and maps. `rules`: the handles of its rules.
    """

    handle: int
    use_count: int
    rules: tuple[int, ...]


def read_table(family: str, table: str) -> TableSummary | None:
    """Reads one table; None if it does not exist. Raises KernelError if not permitted."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        reply = _request_or_none(
            netlink,
            _GET_TABLE,
            family,
            pack_attribute(NFTA_TABLE_NAME, _encode_name(table)),
        )
        if reply is None:
            return None
        attrs = parse_attributes(reply.body[_NFGENMSG.size :])
        rules = (
            parse_attributes(message.body[_NFGENMSG.size :])
            for message in netlink.dump(_GET_RULE, _pack_table_filter(family, table))
        )
        handles = (
            _parse_be(rule[NFTA_RULE_HANDLE])
            for rule in rules
            if parse_string(rule[NFTA_RULE_TABLE]) == table
        )
        return TableSummary(
            _parse_be(attrs[NFTA_TABLE_HANDLE]), _parse_be(attrs[NFTA_TABLE_USE]), tuple(handles)
        )


def has_more_rules(family: str, table: str, count: int) -> bool:
    """Whether the table has more than `count` rules. Stops reading once it has."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        rules = netlink.dump_lazily(_GET_RULE, _pack_table_filter(family, table))
        return next(islice(rules, count, None), None) is not None


def has_table(family: str, table: str) -> bool:
    """Whether the table exists."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        attrs = pack_attribute(NFTA_TABLE_NAME, _encode_name(table))
        return _request_or_none(netlink, _GET_TABLE, family, attrs) is not None


def list_tables(family: str) -> tuple[str, ...]:
    """Lists the names of all tables of a family."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        messages = netlink.dump(_GET_TABLE, _pack_header(family))
    tables = (parse_attributes(message.body[_NFGENMSG.size :]) for message in messages)
    return tuple(parse_string(attrs[NFTA_TABLE_NAME]) for attrs in tables)


def has_set(family: str, table: str, name: str) -> bool:
    """Whether the table exists and has a set or map of this name."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        attrs = pack_attribute(NFTA_SET_TABLE, _encode_name(table)) + pack_attribute(
            NFTA_SET_NAME, _encode_name(name)
        )
        return _request_or_none(netlink, _GET_SET, family, attrs) is not None


def _request_or_none(netlink: Netlink, msg_type: int, family: str, attrs: bytes) -> Message | None:
    try:
        return netlink.request(msg_type, _pack_header(family) + attrs)[0]
    except KernelError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


def _pack_table_filter(family: str, table: str) -> bytes:
    """Restricts a dump of rules to those of one table."""
    return _pack_header(family) + pack_attribute(NFTA_RULE_TABLE, _encode_name(table))


def _pack_header(family: str) -> bytes:
    return _NFGENMSG.pack(NFPROTO[family], 0, 0)


def _encode_name(name: str) -> bytes:
    return name.encode() + b"\0"


def _parse_be(raw: bytes) -> int:
    return int.from_bytes(raw, "big")

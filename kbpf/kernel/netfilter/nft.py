# SPDX-License-Identifier: Apache-2.0
"""Queries about tables of nf_tables that do not read the contents of sets.

libnftables reads every element of every set before it answers even `list tables`, which takes
seconds on a node with 10,000 Services. Here the kernel is asked for one object and answers in less
than a millisecond. All functions act on the network namespace of the calling thread.
"""

import errno
import struct
from itertools import islice
from typing import Any, Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Message, Netlink, pack_attribute, parse_attributes, parse_string
from kbpf.kernel.net.uapi import (
    NETLINK_NETFILTER,
)
from kbpf.kernel.netfilter.uapi import (
    NF_ACCEPT,
    NFNL_SUBSYS_NFTABLES,
    NFPROTO_ARP,
    NFPROTO_BRIDGE,
    NFPROTO_INET,
    NFPROTO_IPV4,
    NFPROTO_IPV6,
    NFPROTO_NETDEV,
    NFT_MSG_GETCHAIN,
    NFT_MSG_GETRULE,
    NFT_MSG_GETSET,
    NFT_MSG_GETTABLE,
    NFTA_CHAIN_HOOK,
    NFTA_CHAIN_NAME,
    NFTA_CHAIN_POLICY,
    NFTA_CHAIN_TABLE,
    NFTA_CHAIN_TYPE,
    NFTA_HOOK_HOOKNUM,
    NFTA_HOOK_PRIORITY,
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

_FAMILIES: Final = {number: name for name, number in NFPROTO.items()} | {
    NFPROTO_ARP: "arp", NFPROTO_BRIDGE: "bridge"
}  # fmt: skip
_HOOKS: Final = ("prerouting", "input", "forward", "output", "postrouting", "ingress")
"""Of the families inet, ip, ip6 and bridge, by NF_INET_* and NF_BR_*."""
_FAMILY_HOOKS: Final = {"netdev": ("ingress", "egress"), "arp": ("input", "output", "forward")}

_GET_TABLE: Final = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETTABLE
_GET_CHAIN: Final = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETCHAIN
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


def count_rules(family: str, table: str, limit: int) -> int:
    """The number of rules of a table, at most `limit`: reading stops there."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        rules = netlink.dump_lazily(_GET_RULE, _pack_table_filter(family, table))
        return sum(1 for _ in islice(rules, limit))


def list_chains() -> list[dict[str, Any]]:
    """Lists all chains of all tables as libnftables does in JSON: `family`, `table` and `name`, of
    base chains `type`, `hook`, `prio` and `policy` too. Bytes of a name that are not UTF-8 are
    escaped (``\\xfc``), where libnftables ends the process.
    """
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        messages = netlink.dump(_GET_CHAIN, _NFGENMSG.pack(0, 0, 0))
    return [_parse_chain(message.body) for message in messages]


def _parse_chain(body: bytes) -> dict[str, Any]:
    number = _NFGENMSG.unpack_from(body)[0]
    attrs = parse_attributes(body[_NFGENMSG.size :])
    family = _FAMILIES.get(number, str(number))
    chain: dict[str, Any] = {
        "family": family,
        "table": parse_string(attrs[NFTA_CHAIN_TABLE]),
        "name": parse_string(attrs[NFTA_CHAIN_NAME]),
    }
    if NFTA_CHAIN_HOOK in attrs:
        hook = parse_attributes(attrs[NFTA_CHAIN_HOOK])
        hooks = _FAMILY_HOOKS.get(family, _HOOKS)
        hook_number = _parse_be(hook[NFTA_HOOK_HOOKNUM])
        chain |= {
            "type": parse_string(attrs.get(NFTA_CHAIN_TYPE, b"")),
            "hook": hooks[hook_number] if hook_number < len(hooks) else str(hook_number),
            "prio": int.from_bytes(hook[NFTA_HOOK_PRIORITY], "big", signed=True),
            "policy": "accept" if _parse_be(attrs[NFTA_CHAIN_POLICY]) == NF_ACCEPT else "drop",
        }
    return chain


def has_table(family: str, table: str) -> bool:
    """Whether the table exists."""
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        attrs = pack_attribute(NFTA_TABLE_NAME, _encode_name(table))
        return _request_or_none(netlink, _GET_TABLE, family, attrs) is not None


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

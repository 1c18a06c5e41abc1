# SPDX-License-Identifier: Apache-2.0
"""Queries about tables of nf_tables that do not read the contents of sets.

libnftables reads every element of every set before it answers even `list tables`, which takes
seconds on a node with 10,000 Services. Here the kernel is asked for one object and answers in less
than a millisecond. Rules are not shown as nft shows them, but say what they refuse and where they
jump. All functions act on the network namespace of the calling thread.
"""

import errno
import struct
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from kbpf.errors import IgnoredErrnos
from kbpf.kernel.net.netlink import (
    Message,
    Netlink,
    iterate_attributes,
    pack_string,
    parse_attributes,
    parse_string,
)
from kbpf.kernel.net.uapi import NETLINK_NETFILTER
from kbpf.kernel.netfilter import uapi

NFPROTO: Final = {
    "inet": uapi.NFPROTO_INET,
    "ip": uapi.NFPROTO_IPV4,
    "ip6": uapi.NFPROTO_IPV6,
    "netdev": uapi.NFPROTO_NETDEV,
}

_FAMILY_NUMBERS: Final = {**NFPROTO, "arp": uapi.NFPROTO_ARP, "bridge": uapi.NFPROTO_BRIDGE}
_FAMILIES: Final = {number: name for name, number in _FAMILY_NUMBERS.items()}
_HOOKS: Final = ("prerouting", "input", "forward", "output", "postrouting", "ingress")
"""Of the families inet, ip, ip6 and bridge, by NF_INET_* and NF_BR_*."""
_FAMILY_HOOKS: Final = {"netdev": ("ingress", "egress"), "arp": ("input", "output", "forward")}

_GET_TABLE: Final = uapi.NFNL_SUBSYS_NFTABLES << 8 | uapi.NFT_MSG_GETTABLE
_GET_CHAIN: Final = uapi.NFNL_SUBSYS_NFTABLES << 8 | uapi.NFT_MSG_GETCHAIN
_GET_RULE: Final = uapi.NFNL_SUBSYS_NFTABLES << 8 | uapi.NFT_MSG_GETRULE
_GET_SET: Final = uapi.NFNL_SUBSYS_NFTABLES << 8 | uapi.NFT_MSG_GETSET
_NFGENMSG: Final = struct.Struct("=BBH")
_RULES_PER_PAUSE: Final = 32
_PAUSE_S: Final = 0.0005
"""Rules are parsed in Python, so other threads wait meanwhile: every half millisecond they may
run."""


class NfTables(Netlink):
    def __init__(self) -> None:
        super().__init__(NETLINK_NETFILTER, "nf_tables")


class TableSummary(NamedTuple):
    """A table without the contents of its sets. Handles are never reused. `use_count`: number of
    chains, sets and maps. `rules`: the handles of its rules.
    """

    handle: int
    use_count: int
    rules: tuple[int, ...]


def read_table(family: str, table: str) -> TableSummary | None:
    """Reads one table; None if it does not exist. Raises KernelError if not permitted."""
    with NfTables() as netlink:
        reply = _request_or_none(
            netlink,
            _GET_TABLE,
            family,
            pack_string(uapi.NFTA_TABLE_NAME, table),
        )
        if reply is None:
            return None
        attrs = _parse_body(reply.body)
        rules = (_parse_body(message.body) for message in netlink.dump(_GET_RULE, _pack_table_filter(family, table)))
        handles = (
            _parse_be(rule[uapi.NFTA_RULE_HANDLE])
            for rule in rules
            if parse_string(rule[uapi.NFTA_RULE_TABLE]) == table
        )
        return TableSummary(
            _parse_be(attrs[uapi.NFTA_TABLE_HANDLE]),
            _parse_be(attrs[uapi.NFTA_TABLE_USE]),
            tuple(handles),
        )


def count_rules(family: str, table: str, limit: int) -> int:
    """The number of rules of a table, at most `limit`: reading stops there."""
    with NfTables() as netlink:
        rules = netlink.dump_lazily(_GET_RULE, _pack_table_filter(family, table))
        return sum(1 for _ in islice(rules, limit))


class Expression(NamedTuple):
    """A part of a rule. `name`: of the instruction ("counter", "cmp"), or of iptables' match or
    target with "match " or "target " before it. `refuses`: it drops or rejects. `jumps_to`: a
    chain, or "". `comment`: the text of iptables' match of this name.
    """

    name: str
    refuses: bool = False
    jumps_to: str = ""
    comment: str = ""

    @property
    def is_neutral(self) -> bool:
        """Whether it neither selects packets nor decides about them."""
        return self.name in ("counter", "log", "match comment")


class Rule(NamedTuple):
    """A rule of a chain."""

    chain: str
    handle: int
    comment: str
    expressions: tuple[Expression, ...]


def list_rules(family: str, table: str, chain: str = "") -> Iterator[Rule]:
    """Lists the rules of a table, or of one of its chains, in order; none if it does not exist."""
    request = _pack_table_filter(family, table)
    if chain:
        request += pack_string(uapi.NFTA_RULE_CHAIN, chain)
    with NfTables() as netlink:
        messages = netlink.dump(_GET_RULE, request)
    for number, message in enumerate(messages, 1):
        if number % _RULES_PER_PAUSE == 0:
            time.sleep(_PAUSE_S)
        attrs = _parse_body(message.body)
        rule = _parse_rule(attrs)
        # An old kernel may not know the filter.
        if parse_string(attrs[uapi.NFTA_RULE_TABLE]) == table and chain in ("", rule.chain):
            yield rule


def _parse_rule(attrs: dict[int, bytes]) -> Rule:
    expressions = iterate_attributes(attrs.get(uapi.NFTA_RULE_EXPRESSIONS, b""))
    return Rule(
        parse_string(attrs[uapi.NFTA_RULE_CHAIN]),
        _parse_be(attrs[uapi.NFTA_RULE_HANDLE]),
        _parse_comment(attrs.get(uapi.NFTA_RULE_USERDATA, b"")),
        tuple(_parse_expression(parse_attributes(expression)) for _, expression in expressions),
    )


def _parse_comment(user_data: bytes) -> str:
    """User data is a sequence of a type, a length and a value, the first two of a byte each."""
    while len(user_data) > 2:
        kind, length = user_data[:2]
        if kind == uapi.NFTNL_UDATA_RULE_COMMENT:
            return parse_string(user_data[2 : 2 + length])
        user_data = user_data[2 + length :]
    return ""


def _parse_expression(attrs: dict[int, bytes]) -> Expression:
    name = parse_string(attrs[uapi.NFTA_EXPR_NAME])
    data = parse_attributes(attrs.get(uapi.NFTA_EXPR_DATA, b""))
    refuses, jumps_to, comment = name == "reject", "", ""
    match name:
        case "immediate":
            value = parse_attributes(data.get(uapi.NFTA_IMMEDIATE_DATA, b""))
            verdict = parse_attributes(value.get(uapi.NFTA_DATA_VERDICT, b""))
            code = verdict.get(uapi.NFTA_VERDICT_CODE)  # None if it loads a value
            refuses = code is not None and _parse_be(code) == uapi.NF_DROP
            jumps_to = parse_string(verdict.get(uapi.NFTA_VERDICT_CHAIN, b""))
        case "match":
            name = f"match {parse_string(data[uapi.NFTA_MATCH_NAME])}"
            if name == "match comment":
                comment = parse_string(data.get(uapi.NFTA_MATCH_INFO, b""))
        case "target":
            name = f"target {parse_string(data[uapi.NFTA_TARGET_NAME])}"
            refuses = name == "target REJECT"
        case "lookup":
            register = data.get(uapi.NFTA_LOOKUP_DREG)  # None if it is only a match
            if register is not None and _parse_be(register) == uapi.NFT_REG_VERDICT:
                name = "lookup verdict"
        case "fib":
            if _parse_be(data.get(uapi.NFTA_FIB_FLAGS, b"")) & uapi.NFTA_FIB_F_SADDR:
                name = "fib saddr"
        case "ct":
            if _parse_be(data[uapi.NFTA_CT_KEY]) in range(uapi.NFT_CT_LABELS, uapi.NFT_CT_AVGPKT + 1):
                name = "ct extension"
        case "objref":
            if _parse_be(data.get(uapi.NFTA_OBJREF_IMM_TYPE, b"")) == uapi.NFT_OBJECT_COUNTER:
                name = "counter"
    return Expression(name, refuses, jumps_to, comment)


def list_chains() -> list[dict[str, Any]]:
    """Lists all chains of all tables as libnftables does in JSON: `family`, `table` and `name`, of
    base chains `type`, `hook`, `prio` and `policy` too. Bytes of a name that are not UTF-8 are
    escaped (``\\xfc``), where libnftables ends the process.
    """
    with NfTables() as netlink:
        messages = netlink.dump(_GET_CHAIN, _NFGENMSG.pack(0, 0, 0))
    return [_parse_chain(message.body) for message in messages]


def _parse_chain(body: bytes) -> dict[str, Any]:
    number = _NFGENMSG.unpack_from(body)[0]
    attrs = _parse_body(body)
    family = _FAMILIES.get(number, str(number))
    chain: dict[str, Any] = {
        "family": family,
        "table": parse_string(attrs[uapi.NFTA_CHAIN_TABLE]),
        "name": parse_string(attrs[uapi.NFTA_CHAIN_NAME]),
    }
    if uapi.NFTA_CHAIN_HOOK in attrs:
        hook = parse_attributes(attrs[uapi.NFTA_CHAIN_HOOK])
        hooks = _FAMILY_HOOKS.get(family, _HOOKS)
        hook_number = _parse_be(hook[uapi.NFTA_HOOK_HOOKNUM])
        chain |= {
            "type": parse_string(attrs.get(uapi.NFTA_CHAIN_TYPE, b"")),
            "hook": hooks[hook_number] if hook_number < len(hooks) else str(hook_number),
            "prio": int.from_bytes(hook[uapi.NFTA_HOOK_PRIORITY], "big", signed=True),
            "policy": "accept" if _parse_be(attrs[uapi.NFTA_CHAIN_POLICY]) == uapi.NF_ACCEPT else "drop",
        }
    return chain


def has_table(family: str, table: str) -> bool:
    """Whether the table exists."""
    with NfTables() as netlink:
        attrs = pack_string(uapi.NFTA_TABLE_NAME, table)
        return _request_or_none(netlink, _GET_TABLE, family, attrs) is not None


def has_set(family: str, table: str, name: str) -> bool:
    """Whether the table exists and has a set or map of this name."""
    with NfTables() as netlink:
        attrs = pack_string(uapi.NFTA_SET_TABLE, table) + pack_string(uapi.NFTA_SET_NAME, name)
        return _request_or_none(netlink, _GET_SET, family, attrs) is not None


def _request_or_none(netlink: Netlink, msg_type: int, family: str, attrs: bytes) -> Message | None:
    with IgnoredErrnos(errno.ENOENT):
        return netlink.request(msg_type, _pack_header(family) + attrs)[0]
    return None


def _pack_table_filter(family: str, table: str) -> bytes:
    """Restricts a dump of rules to those of one table."""
    return _pack_header(family) + pack_string(uapi.NFTA_RULE_TABLE, table)


def _pack_header(family: str) -> bytes:
    return _NFGENMSG.pack(_FAMILY_NUMBERS[family], 0, 0)


def _parse_body(body: bytes) -> dict[int, bytes]:
    return parse_attributes(body[_NFGENMSG.size :])


def _parse_be(raw: bytes) -> int:
    return int.from_bytes(raw, "big")

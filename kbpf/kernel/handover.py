"""Connections that somebody's rules have translated live on when those rules go.

The kernel translates by its table of connections (conntrack), where each has what was once decided
for it; rules are asked for the first packet only. But it looks into that table only while some rule
in the network namespace needs it. When the last such rule goes, packets of a connection that is
half an hour old arrive with the wrong addresses, and it is reset.

So whoever takes such rules away puts a table of this name in their place, in the same transaction:
a chain for translation and a rule that asks conntrack, which change nothing. It has to stay until
the last of these connections is over. All of it is about the namespace of the calling thread.
"""

import socket
import struct
from typing import Any, Final

from kbpf.kernel import netfilter
from kbpf.kernel.netlink import Netlink, attribute, attributes

TABLE: Final = "kbpf-handover"
FAMILIES: Final = {"ip": socket.AF_INET, "ip6": socket.AF_INET6}
NETLINK_NETFILTER: Final = 12

_GET_CONNECTIONS: Final = 1 << 8 | 1  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_GET
_STATUS: Final = 3  # CTA_STATUS, __be32
_STATUS_MASK: Final = 26  # CTA_STATUS_MASK: kernels before 5.17 ignore it, and tell everything
_DESTINATION: Final = 1 << 5  # IPS_DST_NAT
_WHAT: Final = struct.pack(">I", _DESTINATION)


def translated(family: str) -> bool:
    """Whether conntrack has a connection of this family, "ip" or "ip6", whose destination is
    translated.
    """
    asked = struct.pack("=BBH", FAMILIES[family], 0, 0)
    asked += attribute(_STATUS, _WHAT) + attribute(_STATUS_MASK, _WHAT)
    with Netlink(NETLINK_NETFILTER, "conntrack") as netlink:
        told = netlink.dump(_GET_CONNECTIONS, asked)
    return any(_status(message.body) & _DESTINATION for message in told)


def _status(body: bytes) -> int:
    return int.from_bytes(attributes(body[4:]).get(_STATUS, b""), "big")


def begin(family: str) -> list[netfilter.Json]:
    """The commands that make the table; nothing changes where it is already."""
    chain = {"family": family, "table": TABLE, "name": "keep"}
    state: dict[str, Any] = {
        "match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established"]}
    }
    return [
        {"add": {"table": {"family": family, "name": TABLE}}},
        {"add": {"chain": {**chain, "type": "nat", "hook": "postrouting", "prio": 100}}},
        {"flush": {"chain": chain}},
        {"add": {"rule": {"family": family, "table": TABLE, "chain": "keep", "expr": [state]}}},
    ]


def there() -> tuple[str, ...]:
    """The families that have the table."""
    listed = [one.get("table", {}) for one in netfilter.transaction({"list": {"tables": None}})]
    ours = {table["family"] for table in listed if table.get("name") == TABLE}
    return tuple(family for family in FAMILIES if family in ours)


def end(force: bool = False) -> tuple[str, ...]:
    """Removes the tables that nobody needs any more; with `force` all. The families."""
    gone = tuple(family for family in there() if force or not translated(family))
    if gone:
        netfilter.transaction(
            *({"delete": {"table": {"family": family, "name": TABLE}}} for family in gone)
        )
    return gone

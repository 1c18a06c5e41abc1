# SPDX-License-Identifier: Apache-2.0
"""Objects of netfilter with names, which rules refer to: sets (ipset), and counters (nfnetlink_acct).

All functions act on the network namespace of the calling thread.
"""

import errno
import socket
import struct
from collections.abc import Iterable
from typing import Final

from kbpf.errors import IgnoredErrnos, KernelError
from kbpf.kernel.net.netlink import (
    Netlink,
    iterate_attributes,
    pack_attribute,
    pack_string,
    parse_attributes,
    parse_string,
)
from kbpf.kernel.net.uapi import NETLINK_NETFILTER
from kbpf.kernel.netfilter import uapi
from kbpf.kernel.netfilter.uapi import (
    NFACCT_NAME,
    NFNL_MSG_ACCT_DEL,
    NFNL_MSG_ACCT_GET,
    NFNL_SUBSYS_ACCT,
)

_DESTROY: Final = uapi.NFNL_SUBSYS_IPSET << 8 | uapi.IPSET_CMD_DESTROY
_LIST: Final = uapi.NFNL_SUBSYS_IPSET << 8 | uapi.IPSET_CMD_LIST
_NFGENMSG: Final = struct.pack("=BBH", socket.AF_INET, 0, 0)
_PROTOCOL_ATTR: Final = pack_attribute(uapi.IPSET_ATTR_PROTOCOL, bytes((uapi.IPSET_PROTOCOL,)))
_ABSENT_ERRNOS: Final = frozenset((errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT))
"""No such set, or the kernel has no ipset."""


def list_sets() -> tuple[str, ...]:
    """The names of all sets; empty if the kernel has no ipset."""
    return tuple(
        sorted(
            {
                parse_string(attrs[uapi.IPSET_ATTR_SETNAME])
                for attrs in _dump_sets(b"")
                if uapi.IPSET_ATTR_SETNAME in attrs
            }
        )
    )


def list_set_ports(name: str) -> frozenset[int]:
    """The ports in a set of ports; empty if the set does not exist."""
    ports: set[int] = set()
    for attrs in _dump_sets(pack_string(uapi.IPSET_ATTR_SETNAME, name)):
        for _, entry in iterate_attributes(attrs.get(uapi.IPSET_ATTR_ADT, b"")):
            ports.add(int.from_bytes(parse_attributes(entry).get(uapi.IPSET_ATTR_PORT, b""), "big"))
    return frozenset(ports - {0})


def destroy_sets(names: Iterable[str]) -> tuple[str, ...]:
    """Deletes sets; returns those that existed. Raises KernelError with EBUSY if a rule refers to
    one.
    """
    destroyed = []
    with Netlink(NETLINK_NETFILTER, "ipset") as netlink:
        for name in names:
            body = _NFGENMSG + _PROTOCOL_ATTR + pack_string(uapi.IPSET_ATTR_SETNAME, name)
            try:
                netlink.request(_DESTROY, body)
            except KernelError as error:
                if error.errno not in _ABSENT_ERRNOS:
                    raise KernelError(
                        "cannot remove the ip set",
                        name,
                        "remove the rule that uses it",
                        error.errno,
                    ) from error
                continue
            destroyed.append(name)
    return tuple(destroyed)


def _dump_sets(name_attr: bytes) -> list[dict[int, bytes]]:
    with IgnoredErrnos(*_ABSENT_ERRNOS), Netlink(NETLINK_NETFILTER, "ipset") as netlink:
        messages = netlink.dump(_LIST, _NFGENMSG + _PROTOCOL_ATTR + name_attr)
        return [parse_attributes(message.body[len(_NFGENMSG) :]) for message in messages]
    return []


# ---- counters ------------------------------------------------------------------------------------

_GET_COUNTER: Final = NFNL_SUBSYS_ACCT << 8 | NFNL_MSG_ACCT_GET
_DELETE_COUNTER: Final = NFNL_SUBSYS_ACCT << 8 | NFNL_MSG_ACCT_DEL


def delete_counters(names: Iterable[str]) -> tuple[str, ...]:
    """Deletes counters; returns those that existed and that no rule uses."""
    return _request_counters(_DELETE_COUNTER, names)


def find_counters(names: Iterable[str]) -> tuple[str, ...]:
    """Those of these counters that exist."""
    return _request_counters(_GET_COUNTER, names)


def _request_counters(message: int, names: Iterable[str]) -> tuple[str, ...]:
    """Sends this message for each counter; returns the names for which it succeeded."""
    succeeded = []
    with Netlink(NETLINK_NETFILTER, "nfacct") as netlink:
        for name in names:
            body = struct.pack("=BBH", 0, 0, 0) + pack_string(NFACCT_NAME, name)
            with IgnoredErrnos(*_ABSENT_ERRNOS, errno.EBUSY):
                netlink.request(message, body)
                succeeded.append(name)
    return tuple(succeeded)

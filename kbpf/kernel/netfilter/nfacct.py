# SPDX-License-Identifier: Apache-2.0
"""Named counters of netfilter (nfnetlink_acct), used by iptables rules.

Acts on the network namespace of the calling thread.
"""

import errno
import struct
from collections.abc import Iterable
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Netlink, pack_string
from kbpf.kernel.net.uapi import NETLINK_NETFILTER
from kbpf.kernel.netfilter.uapi import (
    NFACCT_NAME,
    NFNL_MSG_ACCT_DEL,
    NFNL_MSG_ACCT_GET,
    NFNL_SUBSYS_ACCT,
)

_GET: Final = NFNL_SUBSYS_ACCT << 8 | NFNL_MSG_ACCT_GET
_DELETE: Final = NFNL_SUBSYS_ACCT << 8 | NFNL_MSG_ACCT_DEL
_ABSENT_ERRNOS: Final = frozenset((errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT))


def delete(names: Iterable[str]) -> tuple[str, ...]:
    """Deletes counters; returns those that existed and that no rule uses."""
    return _request(_DELETE, names)


def find(names: Iterable[str]) -> tuple[str, ...]:
    """Those of these counters that exist."""
    return _request(_GET, names)


def _request(message: int, names: Iterable[str]) -> tuple[str, ...]:
    """Sends this message for each counter; returns the names for which it succeeded."""
    succeeded = []
    with Netlink(NETLINK_NETFILTER, "nfacct") as netlink:
        for name in names:
            body = struct.pack("=BBH", 0, 0, 0) + pack_string(NFACCT_NAME, name)
            try:
                netlink.request(message, body)
            except KernelError as error:
                if error.errno not in _ABSENT_ERRNOS | {errno.EBUSY}:
                    raise
                continue
            succeeded.append(name)
    return tuple(succeeded)

# SPDX-License-Identifier: Apache-2.0
"""Named counters of netfilter (nfnetlink_acct), used by iptables rules.

Acts on the network namespace of the calling thread.
"""

import errno
import struct
from collections.abc import Iterable
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Netlink, pack_attribute
from kbpf.kernel.net.uapi import (
    NETLINK_NETFILTER,
)
from kbpf.kernel.netfilter.uapi import (
    NFACCT_NAME,
    NFNL_MSG_ACCT_DEL,
    NFNL_SUBSYS_ACCT,
)

_DELETE: Final = NFNL_SUBSYS_ACCT << 8 | NFNL_MSG_ACCT_DEL
_ABSENT_ERRNOS: Final = frozenset(
    (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)
)


def delete(names: Iterable[str]) -> tuple[str, ...]:
    """Deletes counters; returns those that existed and that no rule uses."""
    deleted = []
    with Netlink(NETLINK_NETFILTER, "nfacct") as netlink:
        for name in names:
            body = struct.pack("=BBH", 0, 0, 0) + pack_attribute(NFACCT_NAME, name.encode() + b"\0")
            try:
                netlink.request(_DELETE, body)
            except KernelError as error:
                if error.errno not in _ABSENT_ERRNOS | {errno.EBUSY}:
                    raise
                continue
            deleted.append(name)
    return tuple(deleted)

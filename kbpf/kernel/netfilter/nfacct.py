"""Named counters of netfilter (nfnetlink_acct), which rules of iptables count in.

About the network namespace of the calling thread.
"""

import errno
import struct
from collections.abc import Iterable
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Netlink, attribute

NETLINK_NETFILTER: Final = 12

_DELETE: Final = 7 << 8 | 3  # NFNL_SUBSYS_ACCT, NFNL_MSG_ACCT_DEL
_NAME: Final = 1
_ABSENT: Final = frozenset((errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT))


def delete(names: Iterable[str]) -> tuple[str, ...]:
    """Those that were there and that no rule counts in."""
    gone = []
    with Netlink(NETLINK_NETFILTER, "nfacct") as netlink:
        for name in names:
            body = struct.pack("=BBH", 0, 0, 0) + attribute(_NAME, name.encode() + b"\0")
            try:
                netlink.ask(_DELETE, body)
            except KernelError as error:
                if error.errno not in _ABSENT | {errno.EBUSY}:
                    raise
                continue
            gone.append(name)
    return tuple(gone)

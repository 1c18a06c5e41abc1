# SPDX-License-Identifier: Apache-2.0
"""The node ports that a masqueraded client may get, as docs/design/packets.md describes them.

Imports nothing of kbpf.
"""

import struct
from functools import cache
from ipaddress import ip_address

from tests.support.packets.murmur import murmur3

SHARE, SHARED = 4, 1024
"""In a range of at least SHARED ports, a client may get one port of each group of SHARE."""
SEED = 0x6B627066


@cache
def ports_of(host: str, low: int, high: int) -> tuple[int, ...]:
    """All ports of LOW-HIGH that flows of this client to one backend may get."""
    step = SHARE if high - low + 1 >= SHARED else 1
    groups = range((high - low + 1) // step)
    return tuple(low + step * group + _chosen(host, group) % step for group in groups)


def has_port(host: str, port: int, low: int, high: int) -> bool:
    """Whether the port is one of ports_of()."""
    step = SHARE if high - low + 1 >= SHARED else 1
    group, place = divmod(port - low, step)
    return low <= port <= high and place == _chosen(host, group) % step


def _chosen(host: str, group: int) -> int:
    address = ip_address(host)
    who = address.packed[:8] if address.version == 6 else bytes(4) + address.packed
    return murmur3(who + struct.pack("=I", group), SEED)

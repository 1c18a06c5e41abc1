"""How many entries of the map `affinity` each client has, counted again.

Programs count up, and give no more entries to a client that has its share (lookup.h,
takes_share()). They see nothing go: neither what the LRU drives out, nor what the agent deletes
with a Service. So the agent counts what is there, a part of the map at a time.
"""

from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Final

from kbpf.dataplane.bpf.layout import AFFINITY, AFFINITY_KEY, U32
from kbpf.kernel.libbpf import Map
from kbpf.model.address import V4_PREFIX

LOOK_SECONDS: Final = 10.0
"""So often a part of the map is read (libbpf.BATCH entries), which takes some milliseconds."""

_NETWORK: Final = bytes(8)
_SOCKETS: Final = bytes(8) + b"\xff" * 4
"""What follows the network of an IPv6 address, and the number of a cgroup."""


class Shares:
    """Goes through the map for ever, a part at a time."""

    def __init__(self) -> None:
        self._due = 0.0
        self._cursor: bytes | None = None
        self._before: dict[bytes, int] = {}
        self._seen: Counter[bytes] = Counter()

    def look(self, maps: Mapping[str, Map], now: float) -> None:
        """Reads the next part, if it is time to; writes the counts when that was the last one."""
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        shares = maps["affinity_shares"]
        if self._cursor is None:
            self._before = {key: U32.unpack(raw)[0] for key, raw in shares.items()}
            self._seen.clear()
        keys, values, self._cursor = maps["affinity"].batch(self._cursor)
        self._seen.update(sharers(keys, values))
        if self._cursor is None:
            self._write(shares)

    def _write(self, shares: Map) -> None:
        """What programs have counted meanwhile is added, and perhaps counted twice this time."""
        for key, before in self._before.items():
            raw = shares.lookup(key)
            if raw is None:
                continue
            now = U32.unpack(raw)[0]
            count = self._seen[key] + max(0, now - before)
            if not count:
                shares.delete(key)
            elif count != now:
                shares.replace(key, U32.pack(count))


def sharers(keys: bytes, values: bytes) -> list[bytes]:
    """Whose each of these entries of `affinity` is, back to back: sharer_of() in lookup.h."""
    cgroups = array("I", values)[3 :: AFFINITY.size // 4]
    clients = (keys[at : at + 16] for at in range(0, len(keys), AFFINITY_KEY.size))
    return [_sharer(client, cgroup) for client, cgroup in zip(clients, cgroups, strict=True)]


def _sharer(client: bytes, cgroup: int) -> bytes:
    if cgroup:
        return U32.pack(cgroup) + _SOCKETS
    return client if client.startswith(V4_PREFIX) else client[:8] + _NETWORK

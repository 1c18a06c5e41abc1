"""How many entries of the map `affinity` each client has, counted again.

Programs count up, and give no more entries to a client that has its share (lookup.h,
takes_share()). They do not see entries that go: what the LRU evicts, what the agent deletes with a
Service, and what has expired. So the agent deletes expired entries and counts the others, a part of
the map at a time.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kbpf.dataplane.bpf.maps.layout import AFFINITY, AFFINITY_KEY, U32
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import V4_PREFIX

LOOK_SECONDS: Final = 10.0
"""How often a part of the map (libbpf.BATCH entries) is read."""

PIECE: Final = 512
"""Entries of either map that are processed in one step: some half a millisecond."""

LONGEST_SECONDS: Final = 86_400
"""The API server allows no longer affinity. Nobody knows that of entries without a Service."""

_NETWORK: Final = bytes(8)
_SOCKETS: Final = bytes(8) + b"\xff" * 4
"""What follows the network of an IPv6 address, and the number of a cgroup."""

Timeouts = Callable[[], Mapping[int, int]]
"""Service id → seconds that its affinity lasts."""


class Shares:
    """Goes through the map for ever, a part at a time."""

    def __init__(self, maps: Callable[[], Mapping[str, Map]], timeouts: Timeouts) -> None:
        self._maps, self._timeouts = maps, timeouts
        self._due = 0.0
        self._steps: Iterator[None] | None = None
        self._cursor: bytes | None = None
        self._before: dict[bytes, int] = {}
        self._seen: Counter[bytes] = Counter()

    @property
    def is_busy(self) -> bool:
        """Whether it is in the middle of a part."""
        return self._steps is not None

    def advance(self, now: float, seconds: float) -> None:
        """Processes the next part if it is due (time.monotonic), for so long at most but for the
        last step; writes the counts after the last part.
        """
        if seconds < 0:
            return
        if self._steps is None:
            if now < self._due:
                return
            self._due = now + LOOK_SECONDS
            self._steps = self._process_part()
        end = time.perf_counter() + seconds
        while next(self._steps, self) is not self:
            if time.perf_counter() >= end:
                return
        self._steps = None

    def _process_part(self) -> Iterator[None]:
        affinity, shares = (self._maps()[name] for name in ("affinity", "affinity_shares"))
        if self._cursor is None:
            self._before.clear()
            self._seen.clear()
            for at, (key, raw) in enumerate(shares.items(), 1):
                self._before[key] = U32.unpack(raw)[0]
                if at % PIECE == 0:
                    yield
        keys, values, self._cursor = affinity.batch(self._cursor)
        timeouts, now = self._timeouts(), time.monotonic_ns()
        for at in range(0, len(values) // AFFINITY.size, PIECE):
            yield
            some_keys = keys[at * AFFINITY_KEY.size : (at + PIECE) * AFFINITY_KEY.size]
            some_values = values[at * AFFINITY.size : (at + PIECE) * AFFINITY.size]
            expired = _expired(some_keys, some_values, timeouts, now)
            self._seen.update(sharers(some_keys, some_values))
            for key, value in expired:
                if affinity.lookup(key) == value:  # else it was used again meanwhile
                    affinity.delete(key)
                    self._seen.subtract(sharers(key, value))
        if self._cursor is None:
            yield from self._write(shares)

    def _write(self, shares: Map) -> Iterator[None]:
        """What programs have counted meanwhile is added, and perhaps counted twice this time."""
        for at, (key, before) in enumerate(self._before.items(), 1):
            if at % PIECE == 0:
                yield
            raw = shares.lookup(key)
            if raw is None:
                continue
            now = U32.unpack(raw)[0]
            count = self._seen[key] + max(0, now - before)
            if not count:
                shares.delete(key)
            elif count != now:
                shares.replace(key, U32.pack(count))


def _expired(
    keys: bytes, values: bytes, timeouts: Mapping[int, int], now: int
) -> list[tuple[bytes, bytes]]:
    """Entries of `affinity` that no client can use any more: affinity_find() in lookup.h."""
    used = array("Q", values)[:: AFFINITY.size // 8]
    services = array("I", keys)[4 :: AFFINITY_KEY.size // 4]
    return [
        (
            keys[at * AFFINITY_KEY.size : (at + 1) * AFFINITY_KEY.size],
            values[at * AFFINITY.size : (at + 1) * AFFINITY.size],
        )
        for at, (last, service) in enumerate(zip(used, services, strict=True))
        if now - last > timeouts.get(service, LONGEST_SECONDS) * 1_000_000_000
    ]


def sharers(keys: bytes, values: bytes) -> list[bytes]:
    """Whose each of these entries of `affinity` is, back to back: sharer_of() in lookup.h."""
    cgroups = array("I", values)[3 :: AFFINITY.size // 4]
    clients = (keys[at : at + 16] for at in range(0, len(keys), AFFINITY_KEY.size))
    return [_sharer(client, cgroup) for client, cgroup in zip(clients, cgroups, strict=True)]


def _sharer(client: bytes, cgroup: int) -> bytes:
    if cgroup:
        return U32.pack(cgroup) + _SOCKETS
    return client if client.startswith(V4_PREFIX) else client[:8] + _NETWORK

# SPDX-License-Identifier: Apache-2.0
"""Counts each owner's entries in the map `affinity`.

The programs count entries up and add no entry for an owner that has used its share (lookup.h,
take_share()). They do not see deletions: by LRU eviction, by the agent when a Service is removed,
or by expiry. So the agent deletes expired entries and counts the others, one part of the map at a
time.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kbpf.dataplane.bpf.maps.layout import (
    AFFINITY,
    AFFINITY_KEY,
    OWNER_ADDRESS,
    OWNER_NETWORK,
    U32,
)
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import V4_PREFIX

RECOUNT_INTERVAL_S: Final = 10.0
"""Interval at which the next part of the map (BATCH_SIZE entries) is read, in seconds."""

STEP_ENTRIES: Final = 512
"""Entries processed in one step: about half a millisecond."""

MAX_AFFINITY_TIMEOUT_S: Final = 86_400
"""The longest affinity that the API server allows. Used for entries whose Service is unknown."""

_NETWORK_SUFFIX: Final = bytes(8)
_OWNER_PREFIX: Final = b"\xff" * 4 + bytes(8)
"""What follows the network of an IPv6 address, and precedes the number of a device or cgroup."""

Timeouts = Callable[[], Mapping[int, int]]
"""Service id → affinity timeout in seconds."""


class AffinityShares:
    """Walks through the map in an endless loop, one part at a time."""

    def __init__(self, maps: Callable[[], Mapping[str, Map]], timeouts: Timeouts) -> None:
        self._maps, self._timeouts = maps, timeouts
        self._due = 0.0
        self._steps: Iterator[None] | None = None
        self._cursor: bytes | None = None
        self._previous: dict[bytes, int] = {}
        self._counted: Counter[bytes] = Counter()

    @property
    def is_busy(self) -> bool:
        """Whether a part is being processed."""
        return self._steps is not None

    def advance(self, now: float, seconds: float) -> None:
        """Processes the next part if it is due at `now` (time.monotonic), for up to `seconds`; the
        last step may take longer. Writes the counts after the last part.
        """
        if seconds < 0:
            return
        if self._steps is None:
            if now < self._due:
                return
            self._due = now + RECOUNT_INTERVAL_S
            self._steps = self._process_part()
        end = time.perf_counter() + seconds
        while next(self._steps, self) is not self:
            if time.perf_counter() >= end:
                return
        self._steps = None

    def _process_part(self) -> Iterator[None]:
        affinity, shares = (self._maps()[name] for name in ("affinity", "affinity_shares"))
        if self._cursor is None:
            self._previous.clear()
            self._counted.clear()
            for start, (key, raw) in enumerate(shares.items(), 1):
                self._previous[key] = U32.unpack(raw)[0]
                if start % STEP_ENTRIES == 0:
                    yield
        keys, values, self._cursor = affinity.lookup_batch(self._cursor)
        timeouts, now = self._timeouts(), time.monotonic_ns()
        for start in range(0, len(values) // AFFINITY.size, STEP_ENTRIES):
            yield
            step_keys = keys[start * AFFINITY_KEY.size : (start + STEP_ENTRIES) * AFFINITY_KEY.size]
            step_values = values[start * AFFINITY.size : (start + STEP_ENTRIES) * AFFINITY.size]
            expired = _select_expired(step_keys, step_values, timeouts, now)
            self._counted.update(unpack_sharers(step_keys, step_values))
            for key, value in expired:
                if affinity.lookup(key) == value:  # otherwise it was used again meanwhile
                    affinity.delete(key)
                    self._counted.subtract(unpack_sharers(key, value))
        if self._cursor is None:
            yield from self._write(shares)

    def _write(self, shares: Map) -> Iterator[None]:
        """Writes the counts. What programs have counted meanwhile is added, so an entry may be
        counted twice in this round.
        """
        for number, (key, previous) in enumerate(self._previous.items(), 1):
            if number % STEP_ENTRIES == 0:
                yield
            raw = shares.lookup(key)
            if raw is None:
                continue
            current = U32.unpack(raw)[0]
            count = self._counted[key] + max(0, current - previous)
            if not count:
                shares.delete(key)
            elif count != current:
                shares.replace(key, U32.pack(count))


def _select_expired(keys: bytes, values: bytes, timeouts: Mapping[int, int], now: int) -> list[tuple[bytes, bytes]]:
    """Expired entries of `affinity`, by the rule of find_affinity() in lookup.h."""
    # columns of struct affinity (u64 last_used first) and struct affinity_key (u32 service after
    # the address, which is four words)
    last_used = array("Q", values)[:: AFFINITY.size // 8]
    services = array("I", keys)[4 :: AFFINITY_KEY.size // 4]
    return [
        (
            keys[index * AFFINITY_KEY.size : (index + 1) * AFFINITY_KEY.size],
            values[index * AFFINITY.size : (index + 1) * AFFINITY.size],
        )
        for index, (last_use, service) in enumerate(zip(last_used, services, strict=True))
        if now - last_use > timeouts.get(service, MAX_AFFINITY_TIMEOUT_S) * 1_000_000_000
    ]


def unpack_sharers(keys: bytes, values: bytes) -> list[bytes]:
    """The key of the owner to whom each of these entries (back to back) is charged: key_of_owner()
    in lib/addr.h.
    """
    owners = array("I", values)[3 :: AFFINITY.size // 4]  # the last word of struct affinity
    clients = (keys[offset : offset + 16] for offset in range(0, len(keys), AFFINITY_KEY.size))
    return [_sharer(client, owner) for client, owner in zip(clients, owners, strict=True)]


def _sharer(client: bytes, owner: int) -> bytes:
    if owner == OWNER_ADDRESS:
        return client
    if owner != OWNER_NETWORK:
        return _OWNER_PREFIX + U32.pack(owner)
    return client if client.startswith(V4_PREFIX) else client[:8] + _NETWORK_SUFFIX

# SPDX-License-Identifier: Apache-2.0
"""Writes the map `endpoint_names`: Pod, node, zone and conditions of each endpoint of each
programmed Service port, for `kbpf inspect`.

It has all endpoints, not only those in backend sets, so it also shows why a set is small. Entries
belong to one Service port, since two Services may say different things of one address: the slices
of the one may call a Pod ready that is not ready for the other.

No program reads the map, so all of it is deferred work: update() only takes notes, and advance()
reads and writes in slices between other changes. Nothing waits for it. An error, or a full map,
costs names and nothing else.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Generator, Mapping
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.agent_maps import GROWTH_POLL_INTERVAL_S, AgentMaps, MapGrowth
from kbpf.dataplane.bpf.maps.layout import EndpointCondition, pack_endpoint_key, pack_endpoint_name
from kbpf.dataplane.bpf.state.plan import ProgrammedPort
from kbpf.dataplane.bpf.state.quotas import CONTESTED_FILL, fair_max_fill
from kbpf.errors import KernelError, LastError
from kbpf.model.address import Addr
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.objects import EndpointSlice, SlicePort
from kbpf.policy.endpoints import EndpointCopies, add_copies

log = logging.getLogger("kbpf.dataplane")

MAP_NAME: Final = "endpoint_names"
BATCH_ENTRIES: Final = 256
"""Entries read or written in one piece: about half a millisecond."""
RETRY_DELAY_S: Final = 10.0
"""Delay before names are written again that could not be written."""
MAX_UNPACKED_SLICES: Final = 16

_READY, _SERVING, _TERMINATING, _NODE_ADDRESS = map(int, EndpointCondition)


class NamedPort(NamedTuple):
    """What the names of one Service port are made of."""

    id: int
    slices: tuple[EndpointSlice, ...]


NOT_NAMED: Final = NamedPort(0, ())
Steps = Generator[float | None]
"""Work in pieces. A piece yields when to continue (of the plane's clock); None: at once."""


class EndpointNames:
    """The names of all programmed Service ports. Use it from the agent's thread only."""

    def __init__(self, agent_maps: AgentMaps, growth: MapGrowth, clock: Callable[[], float]) -> None:
        self._agent_maps, self._growth, self._clock = agent_maps, growth, clock
        self._error = LastError()
        self._node_addresses: Container[Addr] = ()
        self._due = float("inf")
        self._not_before = 0.0  # after an error
        self._begin_with({})

    def _begin_with(self, ports: dict[ServicePortKey, NamedPort]) -> None:
        """Begins again with what the map holds: names these Service ports."""
        self._steps: Steps | None = None
        self._named: dict[ServicePortKey, NamedPort] = {}
        self._queue = ports
        self._incomplete: dict[ServicePortKey, NamedPort] = {}  # those that found no room
        self._retry_due = float("inf")  # of `_incomplete`
        self._is_full = False  # whether some were incomplete when the last work ended
        self._used: Counter[str] = Counter()  # entries by namespace
        # Key → hash of the value, of entries that no Service port has claimed. None: not read yet.
        self._unclaimed: dict[bytes, int] | None = None
        self._is_complete = False

    def update(
        self, changes: Mapping[ServicePortKey, ProgrammedPort | None], desired: DesiredState, is_complete: bool
    ) -> None:
        """Takes note of these changed Service ports (None: removed). `is_complete`: every entry of
        an earlier agent that is still wanted belongs to a Service port that was given by now.
        """
        self._is_complete = is_complete
        self._node_addresses = desired.other_node_addresses
        for key, programmed in changes.items():
            new = NOT_NAMED
            if programmed is not None:
                state = desired.services.get(key)
                new = NamedPort(programmed.id, state.slices if state is not None else ())
            if key in self._queue or self._named.get(key, NOT_NAMED) != new:
                self._queue[key] = new
        if self._queue or self._unclaimed is None or (is_complete and self._unclaimed):
            self._due = min(self._due, max(self._clock(), self._not_before))

    def due(self) -> float | None:
        """When to call advance() (of the plane's clock); None: there is nothing to do."""
        return None if self._due == float("inf") else self._due

    def advance(self, now: float, seconds: float) -> None:
        """Works for this many seconds."""
        if seconds <= 0 or now < self._due:
            return
        end = time.perf_counter() + seconds
        try:
            while self._step() and time.perf_counter() < end:
                pass
        except KernelError as error:
            self._begin_again(now, error)

    def _step(self) -> bool:
        """Does one piece of work. Returns whether there is more to do now."""
        if self._steps is None:
            self._steps = self._run()
        try:
            continue_at = next(self._steps)
        except StopIteration:
            self._steps, self._due = None, self._retry_due
            self._is_full = bool(self._incomplete)
            self._error.replace(None)
            return False
        self._due = continue_at or self._clock()
        return continue_at is None

    def _begin_again(self, now: float, error: KernelError) -> None:
        """The map may hold a part of what was written: reads it again, after a while."""
        if self._error.replace(error):
            log.error("names of endpoints are missing, retrying map=%s: %s", MAP_NAME, error)
        is_complete = self._is_complete
        self._begin_with({**self._named, **self._queue})
        self._is_complete = is_complete
        self._due = self._not_before = now + RETRY_DELAY_S

    def _run(self) -> Steps:
        if self._unclaimed is None:
            yield from self._read()
        if self._clock() >= self._retry_due:
            self._queue, self._retry_due = self._incomplete | self._queue, float("inf")
        while self._queue:
            # It stays in the queue until it is written: see update() and _begin_again().
            key, port = next(iter(self._queue.items()))
            yield from self._write_port(key, port)
            if self._queue[key] is port:
                del self._queue[key]
        if self._is_complete and self._unclaimed:
            unclaimed, self._unclaimed = list(self._unclaimed), {}
            yield from self._delete(unclaimed)

    def _read(self) -> Steps:
        unclaimed: dict[bytes, int] = {}
        map_, cursor = self._agent_maps.maps[MAP_NAME], None
        while True:
            keys, values, cursor = map_.lookup_batch(cursor, BATCH_ENTRIES)
            unclaimed.update((raw_key, hash(value)) for raw_key, value in map_.split(keys, values))
            if cursor is None:
                break
            yield None
        self._unclaimed = unclaimed
        self._agent_maps.fill[MAP_NAME] = len(unclaimed)

    # ---- one Service port --------------------------------------------------------------------

    def _write_port(self, key: ServicePortKey, new: NamedPort) -> Steps:
        old = self._named.get(key, NOT_NAMED)
        if old.id not in (0, new.id):
            yield from self._change(key, old, NOT_NAMED)
            old = NOT_NAMED
        yield from self._change(key, old, new)
        if new.id:
            self._named[key] = new
        else:
            self._named.pop(key, None)

    def _change(self, key: ServicePortKey, old: NamedPort, new: NamedPort) -> Steps:
        """Writes what differs between two versions. Slices that are in both cost little."""
        # If its former names found no room, it is not known which of them the map holds.
        is_known = self._incomplete.pop(key, None) is None
        old_copies: EndpointCopies = {}
        new_copies: EndpointCopies = {}
        only = _changed_addresses(old.slices, new.slices) if is_known and old.slices else None
        port = SlicePort(key.port, key.protocol, 0)
        for copies, slices in ((old_copies, old.slices), (new_copies, new.slices)):
            for slice_ in slices:
                add_copies(copies, slice_, port, key.family, only)
                yield None

        def pack_key(service_id: int, place: tuple[Addr, int]) -> bytes:
            return pack_endpoint_key(service_id, *place, key.protocol)

        gone = [pack_key(old.id, place) for place in old_copies if place not in new_copies]
        if not is_known:
            gone = [raw_key for raw_key in gone if self._lookup(raw_key) is not None]
        yield from self._delete(gone, key.namespace)
        reader = _EndpointReader(self._node_addresses)
        entries, added = list[tuple[bytes, bytes]](), 0
        for place, copy in new_copies.items():
            old_copy = old_copies.get(place) if is_known else None
            texts = reader.read(copy)
            if old_copy is None or reader.read(old_copy) != texts:
                entries.append((pack_key(new.id, place), pack_endpoint_name(*texts)))
                added += old_copy is None
            if len(entries) >= BATCH_ENTRIES:
                yield from self._put(key, new, entries, added, is_known)
                entries, added = [], 0
                yield None
        if entries:
            yield from self._put(key, new, entries, added, is_known)

    # ---- the map -----------------------------------------------------------------------------

    def _put(
        self, key: ServicePortKey, port: NamedPort, entries: list[tuple[bytes, bytes]], added: int, is_known: bool
    ) -> Steps:
        """Writes entries, of which `added` should be new. If these find no room, the Service port
        is incomplete, and is tried again later.
        """
        if self._unclaimed or not is_known:
            entries, added = self._compare(key.namespace, entries, is_known)
        if not self._has_room(key.namespace, added):
            if not self._is_full:
                self._is_full = True
                log.warning(
                    "names of endpoints find no room, and are not shown map=%s service=%s; raise --max-backends",
                    MAP_NAME,
                    key,
                )
            self._incomplete[key] = port
            self._retry_due = self._clock() + RETRY_DELAY_S
            return
        while not self._agent_maps.fits({MAP_NAME: added}):
            sizes = self._agent_maps.compute_new_sizes({MAP_NAME: added})
            self._growth.begin(sizes, time.monotonic(), for_display=True)
            # It is not busy if it has just failed.
            delay = GROWTH_POLL_INTERVAL_S if self._growth.is_busy else RETRY_DELAY_S
            yield self._clock() + delay
        self._agent_maps.put(MAP_NAME, entries, new=added)
        self._used[key.namespace] += added

    def _compare(
        self, namespace: str, entries: list[tuple[bytes, bytes]], is_known: bool
    ) -> tuple[list[tuple[bytes, bytes]], int]:
        """Those of these entries that the map does not hold, and how many of them have new keys."""
        changed, added = [], 0
        unclaimed = self._unclaimed or {}
        for raw_key, value in entries:
            current = unclaimed.pop(raw_key, None)
            if current is not None:
                self._used[namespace] += 1
            elif not is_known and (raw := self._lookup(raw_key)) is not None:
                current = hash(raw)
            else:
                added += 1
            if current != hash(value):
                changed.append((raw_key, value))
        return changed, added

    def _lookup(self, raw_key: bytes) -> bytes | None:
        return self._agent_maps.maps[MAP_NAME].lookup(raw_key)

    def _has_room(self, namespace: str, added: int) -> bool:
        limit = self._agent_maps.max_entries(MAP_NAME)
        fill = self._agent_maps.fill[MAP_NAME] + added
        if not added or fill <= CONTESTED_FILL * limit:
            return True
        return fill <= min(limit, fair_max_fill(self._used[namespace] + added, limit))

    def _delete(self, keys: list[bytes], namespace: str = "") -> Steps:
        """Deletes entries, of this namespace or of none."""
        for start in range(0, len(keys), BATCH_ENTRIES):
            batch = keys[start : start + BATCH_ENTRIES]
            self._agent_maps.delete(MAP_NAME, batch)
            self._used[namespace] -= len(batch)
            yield None


def _changed_addresses(old: tuple[EndpointSlice, ...], new: tuple[EndpointSlice, ...]) -> set[Addr]:
    """The addresses in slices that are in one of the two versions only."""
    kept = {id(slice_) for slice_ in old} & {id(slice_) for slice_ in new}
    return {endpoint.address for slice_ in (*old, *new) if id(slice_) not in kept for endpoint in slice_.endpoints}


class _EndpointReader:
    """Reads what slices say of an endpoint. Unpacking the names of the Pods of a slice is as
    expensive as all else, so those of the last slices are kept.
    """

    def __init__(self, node_addresses: Container[Addr]) -> None:
        self._node_addresses = node_addresses
        self._pods: dict[int, tuple[str, ...]] = {}

    def read(self, copy: tuple[EndpointSlice, int]) -> tuple[str, str, str, int]:
        """Pod, node, zone and conditions (EndpointCondition)."""
        slice_, index = copy
        pods = self._pods.get(id(slice_))
        if pods is None:
            if len(self._pods) >= MAX_UNPACKED_SLICES:
                self._pods.clear()
            pods = self._pods[id(slice_)] = slice_.pods
        endpoint = slice_.endpoints[index]
        conditions = (
            (_READY if endpoint.ready else 0)
            | (_SERVING if endpoint.serving else 0)
            | (_TERMINATING if endpoint.terminating else 0)
            | (_NODE_ADDRESS if endpoint.address in self._node_addresses else 0)
        )
        return pods[index], endpoint.node, endpoint.zone, conditions

# SPDX-License-Identifier: Apache-2.0
"""Executes the writes of a plan in the order given in plan.py: write() until the flip and the
removals, delete_retired() after a grace period much longer than a reader needs, TableBuilder large
tables ahead of their use.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.ids import IdAllocator, TableKey
from kbpf.dataplane.bpf.maps.layout import (
    AFFINITY_KEY,
    META,
    U32,
    U32_PAIR,
    pack_service_name,
    pack_slots,
    pack_source_range,
    pack_target,
)
from kbpf.dataplane.bpf.state.plan import (
    Retired,
    Writes,
    remember_fingerprint,
    table_key,
    table_size,
)
from kbpf.errors import KernelError
from kbpf.model.address import Addr
from kbpf.model.desired import Backend, BackendSet, FrontendAddress, ServiceState, Spread
from kbpf.model.objects import Algorithm
from kbpf.policy.spread import compute_maglev_table_in_steps, compute_slots

ZERO = U32.pack(0)
ONE = U32.pack(1)
BATCH_ENTRIES: Final = 1_024
"""Entries deleted in one batch: about one millisecond."""
AddressChange = tuple[Collection[Addr], Collection[Addr]]
"""Added and removed addresses."""
DeletionSteps = Iterator[KernelError | None]
"""Work in steps. A step that yields an error has failed; the next one tries it again."""


def write(
    agent_maps: AgentMaps,
    ids: IdAllocator,
    writes: Writes,
    nodes: AddressChange,
    cluster_ips: AddressChange,
) -> None:
    """Writes everything up to the flip, the flip itself, and the removals. A ClusterIP in
    `cluster_ips` refuses all ports without a frontend, so it is written after its frontends.
    """
    put, delete = agent_maps.put, agent_maps.delete
    save_ids(agent_maps, ids)
    put("source_ranges", ((pack_source_range(id_, cidr), ONE) for id_, cidr in writes.new_ranges))
    put("service_names", ((U32.pack(id_), pack_service_name(key)) for id_, key in writes.names))
    put("backends", ((U32.pack(id_), pack_endpoint(backend)) for id_, backend in writes.backends))
    # All slots of a set are one item: keys and values back to back.
    put(
        "backend_slots",
        ((pack_slots(set_id, len(ids)), array("I", ids).tobytes()) for set_id, ids in writes.slots),
    )
    put(
        "set_members",
        ((U32_PAIR.pack(set_id, id_), ONE) for set_id, ids in writes.members for id_ in ids),
    )
    put("node_addresses", ((address, ONE) for address in nodes[0]))
    # The flip. Each value replaces an old one at once; what it points to is written above.
    put(
        "services",
        ((key := pack_endpoint(frontend_address), value.pack(key)) for frontend_address, value in writes.flips.items()),
        writes.new_frontends,
    )
    put("cluster_ips", ((address, ONE) for address in cluster_ips[0]))
    delete("services", map(pack_endpoint, writes.removed))
    delete("cluster_ips", cluster_ips[1])
    delete("source_ranges", (pack_source_range(id_, cidr) for id_, cidr in writes.old_ranges))
    delete("node_addresses", nodes[1])


def save_ids(agent_maps: AgentMaps, ids: IdAllocator) -> None:
    """Saves the next ids, so that no id is ever allocated twice, whatever happens next."""
    meta = ids.unsaved_meta()
    if meta is not None:
        agent_maps.put("meta", [(ZERO, META.pack(*meta))], new=0)
        ids.mark_saved(meta)


def delete_retired(agent_maps: AgentMaps, ids: IdAllocator, retired: Retired) -> DeletionSteps:
    """Deletes retired entries after their grace period, BATCH_ENTRIES at a time."""
    lists = (*(old_set.backends for old_set in retired.sets), *retired.released_backends)
    # Backends are released after the members, whose keys contain the ids of the backends.
    yield from _delete(agent_maps, "backend_slots", _slot_keys(ids, retired))
    yield from _delete(agent_maps, "set_members", _member_keys(ids, retired))
    released_ids = (
        ids.backends.release(backends[start : start + BATCH_ENTRIES])
        for backends in lists
        for start in range(0, len(backends), BATCH_ENTRIES)
    )
    yield from _delete(agent_maps, "backends", _pack_ids(released_ids, retired.backend_ids))
    yield from _delete(agent_maps, "service_names", _pack_ids((), retired.names))
    if retired.forget_affinity:
        yield from _retry(lambda: _delete_affinity(agent_maps, retired.forget_affinity))


def _delete(agent_maps: AgentMaps, name: str, batches: Iterable[tuple[int, Iterable[bytes]]]) -> DeletionSteps:
    """Deletes keys that come in batches, each with its cost in entries. Reading `batches` releases
    ids, so keys that could not be deleted are kept for the next step.
    """
    keys: list[bytes] = []
    cost = 0

    def delete_keys() -> Iterable[None]:
        agent_maps.delete(name, keys)
        return ()

    for batch_cost, batch in batches:
        keys += batch
        cost += batch_cost
        if cost >= BATCH_ENTRIES:
            yield from _retry(delete_keys)
            yield None
            keys, cost = [], 0
    yield from _retry(delete_keys)


def _retry(begin: Callable[[], Iterable[None]]) -> DeletionSteps:
    """Runs the steps of `begin()`, and begins again after a KernelError, which it yields."""
    while True:
        try:
            yield from begin()
        except KernelError as error:
            yield error
        else:
            return


def _slot_keys(ids: IdAllocator, retired: Retired) -> Iterator[tuple[int, Iterable[bytes]]]:
    for keys in retired.slot_keys:
        for start in range(0, len(keys), BATCH_ENTRIES * U32_PAIR.size):
            batch = keys[start : start + BATCH_ENTRIES * U32_PAIR.size]
            yield len(batch) // U32_PAIR.size, (batch,)
    for old_set in retired.sets:
        table_unused = old_set.table and ids.tables.release(old_set.table)
        for set_id, size in (
            (old_set.id, len(old_set.backends)),
            (old_set.table, old_set.size if table_unused else 0),
        ):
            for start in range(0, size, BATCH_ENTRIES):
                end = min(start + BATCH_ENTRIES, size)
                yield end - start, (pack_slots(set_id, end, start),)


def _member_keys(ids: IdAllocator, retired: Retired) -> Iterator[tuple[int, Iterable[bytes]]]:
    for key in retired.member_keys:
        yield 1, (key,)
    for old_set in retired.sets:
        if old_set.in_set_members:
            for backend in old_set.backends:
                yield 1, (U32_PAIR.pack(old_set.id, ids.backends.id_of(backend)),)


def _pack_ids(released: Iterable[list[int]], extra_ids: Sequence[int]) -> Iterator[tuple[int, Iterable[bytes]]]:
    """Keys of the ids released in each step, and of `extra_ids`."""
    for ids in released:
        # Releasing BATCH_ENTRIES references is a piece of work, even if no id becomes free.
        yield BATCH_ENTRIES, map(U32.pack, ids)
    for id_ in extra_ids:
        yield 1, (U32.pack(id_),)


def _delete_affinity(agent_maps: AgentMaps, service_ids: Collection[int]) -> Iterator[None]:
    """Deletes the affinity entries of these Services."""
    entries = agent_maps.maps["affinity"].items()
    while batch := list(islice(entries, BATCH_ENTRIES)):
        keys = [key for key, _ in batch if AFFINITY_KEY.unpack(key)[1] in service_ids]
        agent_maps.delete("affinity", keys)
        yield


def pack_endpoint(endpoint: Backend | FrontendAddress) -> bytes:
    """Packs a struct target."""
    return pack_target(endpoint.address, endpoint.port, endpoint.protocol)


# ---- large tables --------------------------------------------------------------------------------


BATCH_SLOTS: Final = 1_024
"""Slots written in one piece: about one millisecond. The planner builds smaller tables itself."""


class TableBuilder:
    """Computes and writes large tables one piece at a time, before a Service port is flipped to
    them. No program reads them until then, and other Service ports are programmed meanwhile. Builds
    one table after the other, and holds a reference to each until release().
    """

    def __init__(self, agent_maps: AgentMaps, ids: IdAllocator) -> None:
        self._agent_maps, self._ids = agent_maps, ids
        self._steps: Generator[None] | None = None
        # Table ids, and how many slots of each are written.
        self._written_slots: list[tuple[int, int]] = []
        self._built: list[int] = []

    def _find_missing(self, state: ServiceState) -> tuple[BackendSet, Spread] | None:
        """A set of this Service port that needs a large table which is not built yet."""
        for backends, spread in state.sets:
            if table_size(backends, spread) > BATCH_SLOTS and not self._ids.tables.find(table_key(backends, spread)):
                return backends, spread
        return None

    def is_incomplete(self, state: ServiceState, deadline: float) -> bool:
        """Builds the tables that this Service port needs, at least one piece, until `deadline`
        (time.perf_counter). Returns whether a table is still incomplete.
        """
        while (missing_table := self._find_missing(state)) is not None:
            self._step(*missing_table)
            if time.perf_counter() >= deadline:
                return self._find_missing(state) is not None
        return False

    def _step(self, backends: BackendSet, spread: Spread) -> None:
        """Builds one piece of the current table, or begins this one: computes a part of it, or
        writes BATCH_SLOTS slots.
        """
        if self._steps is None:
            self._steps = self._build(table_key(backends, spread), backends, spread)
        if next(self._steps, self) is self:
            self._steps = None

    def release(self) -> list[bytes]:
        """Drops all references, and abandons an unfinished table. Returns the keys of slots that no
        set uses.
        """
        released = [table_id for table_id in self._built if self._ids.tables.release(table_id)]
        unfinished = {table_id for table_id, _ in self._written_slots} - set(self._built)
        keys = [
            pack_slots(table_id, size)
            for table_id, size in self._written_slots
            if table_id in unfinished or table_id in released
        ]
        self._steps, self._written_slots, self._built = None, [], []
        return [key for key in keys if key]

    def _build(self, key: TableKey, backends: BackendSet, spread: Spread) -> Generator[None]:
        size = table_size(backends, spread)
        if spread.algorithm is Algorithm.MAGLEV:
            table = array("I", (yield from compute_maglev_table_in_steps(backends, spread.weights, size)))
        else:
            table = array("I", compute_slots(backends, spread))
        table_id = self._ids.allocate_set()
        save_ids(self._agent_maps, self._ids)  # before a slot with this id is written
        for start in range(0, size, BATCH_SLOTS):
            batch = table[start : start + BATCH_SLOTS]
            keys = pack_slots(table_id, start + len(batch), start)
            self._agent_maps.put("backend_slots", [(keys, batch.tobytes())])
            if start:
                self._written_slots.pop()
            self._written_slots.append((table_id, start + len(batch)))
            yield
        remember_fingerprint(key, table)
        self._ids.tables.add_built(table_id, key)
        self._built.append(table_id)


# ---- the grace period ----------------------------------------------------------------------------

GRACE_PERIOD_S: Final = 1.0
"""Time between the flip and the deletion of the old set, in seconds. A reader needs microseconds;
lookup.h says what happens to one that was delayed for longer.
"""

SHORT_GRACE_PERIOD_S: Final = 0.1
"""The same when a map is three quarters full: apply() then deletes sets itself (quotas.py)."""


class GraceQueue:
    """A queue of retired entries in the order of their flips (time.monotonic). `cut_udp` is called
    when all entries of a flip are deleted.
    """

    def __init__(self, agent_maps: AgentMaps, ids: IdAllocator, cut_udp: Callable[[Retired], None]) -> None:
        self._agent_maps, self._ids, self._cut_udp = agent_maps, ids, cut_udp
        self._queue: deque[tuple[float, Retired]] = deque()
        self._steps: DeletionSteps | None = None  # of the deletion in progress
        self._deleting: Retired | None = None  # what these steps delete

    def add(self, flipped: float, retired: Retired) -> None:
        """Queues retired entries, if any."""
        if retired:
            self._queue.append((flipped, retired))

    @property
    def pending(self) -> list[Retired]:
        """Retired entries that have not been deleted."""
        return [retired for _, retired in self._queue]

    @property
    def uncut(self) -> list[Retired]:
        """Retired entries for which `cut_udp` has not been called."""
        return self.pending if self._deleting is None else [self._deleting, *self.pending]

    @property
    def due(self) -> float | None:
        """When the next deletion is due; None if the queue is empty."""
        if self._steps is not None:
            return float("-inf")
        return self._queue[0][0] + GRACE_PERIOD_S if self._queue else None

    def delete_until(self, flipped: float, seconds: float = float("inf")) -> None:
        """Deletes what was retired by flips up to `flipped`, for this many seconds, but at least
        one piece. Does nothing if `seconds` is 0 or less. After a KernelError the next call
        continues with the piece that failed.
        """
        deadline = time.perf_counter() + seconds
        while seconds > 0 and (self._steps is not None or (self._queue and self._queue[0][0] <= flipped)):
            if self._steps is None:
                _, self._deleting = self._queue.popleft()
                self._steps = self._retire(self._deleting)
            result = next(self._steps, self)
            if result is self:
                self._steps = self._deleting = None
            elif isinstance(result, KernelError):
                raise result
            if time.perf_counter() >= deadline:
                return

    def _retire(self, retired: Retired) -> DeletionSteps:
        yield from delete_retired(self._agent_maps, self._ids, retired)
        self._cut_udp(retired)

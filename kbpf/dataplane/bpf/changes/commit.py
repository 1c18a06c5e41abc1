"""The writes of a plan, carried out in the order of plan.py: in one change, and at its end."""

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from kbpf.dataplane.bpf.changes.plan import Retired, Writes
from kbpf.dataplane.bpf.maps.agent_maps import Tables
from kbpf.dataplane.bpf.maps.ids import BackendTable, Ids, SharedTables
from kbpf.dataplane.bpf.maps.layout import (
    AFFINITY_KEY,
    META,
    PAIR,
    U32,
    pack_name,
    pack_range,
    pack_slots,
    pack_target,
)
from kbpf.model.address import Addr
from kbpf.model.desired import Backend, FrontendAddress

ZERO = U32.pack(0)
ONE = U32.pack(1)
AT_ONCE: Final = 1_024
"""Entries that are deleted at a time: about one millisecond."""
Change = tuple[Collection[Addr], Collection[Addr]]
"""Addresses that come, and those that go."""


def write(tables: Tables, ids: Ids, writes: Writes, nodes: Change, cluster_ips: Change) -> None:
    """Everything up to the flip, the flip, and what is gone with it. ClusterIPs refuse their other
    ports only after those that they have are there.
    """
    put, drop = tables.put, tables.drop
    save_ids(tables, ids)
    put("source_ranges", ((pack_range(i, cidr), ONE) for i, cidr in writes.new_ranges))
    put("service_names", ((U32.pack(i), pack_name(key)) for i, key in writes.names))
    put("backends", ((U32.pack(i), target(b)) for i, b in writes.backends))
    put("backend_slots", _slots(writes))
    put("set_members", _members(writes))
    put("node_addresses", ((a, ONE) for a in nodes[0]))
    put(
        "services",
        ((key := target(at), value.pack(key)) for at, value in writes.flips.items()),
        writes.new_frontends,
    )
    put("cluster_ips", ((a, ONE) for a in cluster_ips[0]))
    drop("services", map(target, writes.removed))
    drop("cluster_ips", cluster_ips[1])
    drop("source_ranges", (pack_range(i, cidr) for i, cidr in writes.old_ranges))
    drop("node_addresses", nodes[1])


def save_ids(tables: Tables, ids: Ids) -> None:
    """What was given out is never given out again, whatever happens next."""
    meta = ids.unsaved()
    if meta is not None:
        tables.put("meta", [(ZERO, META.pack(*meta))], new=0)
        ids.saved(meta)


def retire(
    tables: Tables, table: BackendTable, shared: SharedTables, retired: Retired
) -> Iterator[None]:
    """What nobody reads any more, when its grace period is over: AT_ONCE entries at a time."""
    lists = (*(old.backends for old in retired.sets), *retired.release)
    yield from _delete(tables, "backend_slots", _slot_keys(shared, retired))
    yield from _delete(tables, "set_members", _member_keys(table, retired))
    released = (
        table.release(backends[start : start + AT_ONCE])
        for backends in lists
        for start in range(0, len(backends), AT_ONCE)
    )
    yield from _delete(tables, "backends", _ids(released, retired.backend_ids))
    yield from _delete(tables, "service_names", _ids((), retired.names))
    if retired.forget_affinity:
        yield from _forget_affinity(tables, retired.forget_affinity)


def _delete(
    tables: Tables, name: str, parts: Iterable[tuple[int, Iterable[bytes]]]
) -> Iterator[None]:
    """Deletes keys that come in parts, each with its cost in entries."""
    keys: list[bytes] = []
    cost = 0
    for part_cost, part in parts:
        keys += part
        cost += part_cost
        if cost >= AT_ONCE:
            tables.drop(name, keys)
            yield
            keys, cost = [], 0
    tables.drop(name, keys)


def _slot_keys(shared: SharedTables, retired: Retired) -> Iterator[tuple[int, Iterable[bytes]]]:
    for keys in retired.slot_keys:
        for part in _cut_up(keys, PAIR.size):
            yield len(part) // PAIR.size, (part,)
    for old in retired.sets:
        gone = old.table and shared.release(old.table)
        for number, size in ((old.id, len(old.backends)), (old.table, old.size if gone else 0)):
            for start in range(0, size, AT_ONCE):
                end = min(start + AT_ONCE, size)
                yield end - start, (pack_slots(number, end, start),)


def _member_keys(table: BackendTable, retired: Retired) -> Iterator[tuple[int, Iterable[bytes]]]:
    for key in retired.member_keys:
        yield 1, (key,)
    for old in retired.sets:
        if old.members:
            for backend in old.backends:
                yield 1, (PAIR.pack(old.id, table.id_of(backend)),)


def _ids(
    released: Iterable[list[int]], more: Sequence[int]
) -> Iterator[tuple[int, Iterable[bytes]]]:
    """The numbers that each step releases, and more of them."""
    for numbers in released:
        yield AT_ONCE, map(U32.pack, numbers)
    for number in more:
        yield 1, (U32.pack(number),)


def _cut_up(keys: bytes, size: int) -> Iterator[bytes]:
    """AT_ONCE keys of this size at a time."""
    for start in range(0, len(keys), AT_ONCE * size):
        yield keys[start : start + AT_ONCE * size]


def _forget_affinity(tables: Tables, services: Collection[int]) -> Iterator[None]:
    """Which backends the clients of these Services had."""
    entries = tables.maps["affinity"].items()
    while part := list(islice(entries, AT_ONCE)):
        gone = [key for key, _ in part if AFFINITY_KEY.unpack(key)[1] in services]
        tables.drop("affinity", gone)
        yield


def target(end: Backend | FrontendAddress) -> bytes:
    """struct target."""
    return pack_target(end.address, end.port, end.protocol)


def _slots(writes: Writes) -> Iterable[tuple[bytes, bytes]]:
    """All slots of a set at once: keys and values back to back."""
    for set_id, ids in writes.slots:
        yield pack_slots(set_id, len(ids)), array("I", ids).tobytes()


def _members(writes: Writes) -> Iterable[tuple[bytes, bytes]]:
    for set_id, ids in writes.members:
        for backend_id in ids:
            yield PAIR.pack(set_id, backend_id), ONE

"""The writes of a plan, carried out in the order of plan.py: in one change, and at its end."""

from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from kbpf.dataplane.bpf.ids import BackendTable, Ids, SharedTables
from kbpf.dataplane.bpf.layout import (
    AFFINITY_KEY,
    META,
    PAIR,
    U32,
    pack_name,
    pack_range,
    pack_slots,
    pack_target,
)
from kbpf.dataplane.bpf.plan import Retired, Writes
from kbpf.dataplane.bpf.tables import Tables
from kbpf.model.address import Addr
from kbpf.model.desired import Backend, FrontendAddress

ZERO = U32.pack(0)
ONE = U32.pack(1)
AT_ONCE: Final = 2_048
"""Entries that are deleted at a time: some two milliseconds."""
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
        ((target(at), value.pack()) for at, value in writes.flips.items()),
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
    slots = list(retired.slot_keys)
    for old in retired.sets:
        slots.append(pack_slots(old.id, len(old.backends)))
        if old.table and shared.release(old.table):
            slots.append(pack_slots(old.table, old.size))
        if old.members:
            ids = map(table.id_of, old.backends)
            retired.member_keys += [PAIR.pack(old.id, i) for i in ids]
    for backends in (*(s.backends for s in retired.sets), *retired.release):
        retired.backend_ids += table.release(backends)
    for name, keys in (
        ("backend_slots", b"".join(slots)),
        ("set_members", b"".join(retired.member_keys)),
        ("backends", b"".join(map(U32.pack, retired.backend_ids))),
        ("service_names", b"".join(map(U32.pack, retired.names))),
    ):
        size = AT_ONCE * tables.maps[name].key_size
        for start in range(0, len(keys), size):
            tables.drop(name, [keys[start : start + size]])
            yield


def forget_affinity(tables: Tables, services: Collection[int]) -> None:
    """Which backends the clients of these Services had."""
    entries = tables.maps["affinity"].items()
    tables.drop("affinity", [key for key, _ in entries if AFFINITY_KEY.unpack(key)[1] in services])


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

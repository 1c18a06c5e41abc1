# SPDX-License-Identifier: Apache-2.0
"""Decodes what the maps hold of Service ports: for an agent that starts and adopts it (adopt.py),
for `kbpf inspect`, and for `kbpf verify`.

Other processes and killed agents write maps too. So an entry that no agent can have written is
damage and in no other field, and a set says why programs or an agent cannot use it.
"""

from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.ids import ID_LIMIT
from kbpf.dataplane.bpf.maps.layout import (
    KIND_FLAGS,
    META,
    U32,
    U32_PAIR,
    Meta,
    ServiceFlag,
    ServiceValue,
    Target,
    unpack_ports,
    unpack_service_name,
    unpack_source_range,
)
from kbpf.dataplane.bpf.state.plan import fingerprint
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import Addr
from kbpf.model.desired import Backend, BackendSet, Frontend, FrontendAddress, ServicePortKey
from kbpf.model.objects import Cidr, Protocol

MAPS_READ: Final = (
    "services",
    "backend_slots",
    "backends",
    "set_members",
    "source_ranges",
    "service_names",
    "node_addresses",
    "cluster_ips",
    "frontend_ports",
    "meta",
)
"""In the order of reading, the reverse of the order of writing (plan.py): frontends before their
sets and backends, which stay for a grace period. So each frontend has a complete set, even while an
agent writes.
"""
ARRAYS: Final = ("frontend_ports", "meta")
NODE_PORTS_ID: Final = 0
"""The id in `source_ranges` of the ranges that may connect to NodePorts. No Service has it."""

_KIND_BY_FLAG = {int(flag): kind for kind, flag in KIND_FLAGS.items()}
KIND_BITS: Final = ServiceFlag(sum(KIND_FLAGS.values()))
_PROTOCOLS: Final = frozenset(map(int, Protocol))
_NAME_PROTOCOL_OFFSET: Final = 3 * 64
"""Offset in a struct service_name. In a struct target the protocol is byte 18."""


def is_valid_entry(name: str, key: bytes, raw: bytes) -> bool:
    """Whether an agent can have written this entry of the map `name`."""
    match name:
        case "services":
            return key[18] in _PROTOCOLS and not key[19]
        case "backends":
            return raw[18] in _PROTOCOLS and int.from_bytes(key, "little") < ID_LIMIT
        case "endpoint_names":
            return key[22] in _PROTOCOLS
        case "service_names":
            return raw[_NAME_PROTOCOL_OFFSET] in _PROTOCOLS and int.from_bytes(key, "little") < ID_LIMIT
    return True


def unpack_address(raw: bytes) -> FrontendAddress:
    """From a struct target that is a frontend, such as a key of `services`."""
    target = Target.unpack(raw)
    return FrontendAddress(target.address, target.port, Protocol(target.protocol))


def unpack_backend(raw: bytes) -> Backend:
    """From a struct target that is a backend."""
    target = Target.unpack(raw)
    return Backend(Addr(target.address), target.port, Protocol(target.protocol))


def frontend_of(address: FrontendAddress, value: ServiceValue) -> Frontend | None:
    """The frontend of this entry; None if its flags are inconsistent."""
    kind = _KIND_BY_FLAG.get(value.flags & KIND_BITS)
    if kind is None:
        return None
    return Frontend(address, kind, bool(value.flags & ServiceFlag.RESTRICTED))


class SetContents(NamedTuple):
    """A set as frontends lead to it. `backends`: those that programs choose from. `table`: the
    fingerprint of its table, b"" if it has none. `problem`: why no agent writes such a set, and
    `where`, the map; otherwise "". Without backends, programs cannot use it either.
    """

    backends: BackendSet = ()
    table: bytes = b""
    where: str = ""
    problem: str = ""


@dataclass(slots=True)
class Contents:
    """What the maps hold, without those that were not given to read().

    - `frontends`: in the order of the map, with those of `corrupt`, whose check word is wrong or an
      id out of range.
    - `slots`: set or table id → slots, each packed as index and value in one number, since there
      may be millions. The value is a backend id, or in a table an index into the set.
    - `ids`: the first id of each backend.
    - `members`: set id → backend ids.
    - `damaged`: map → keys of entries that no agent can have written.
    - `counts`: the number of entries of each map that is a hash, with damaged ones.
    """

    frontends: dict[FrontendAddress, ServiceValue] = field(default_factory=dict)
    corrupt: set[FrontendAddress] = field(default_factory=set)
    slots: "dict[int, array[int]]" = field(default_factory=dict)
    backends: dict[int, Backend] = field(default_factory=dict)
    ids: dict[Backend, int] = field(default_factory=dict)
    members: dict[int, set[int]] = field(default_factory=dict)
    ranges: dict[int, tuple[Cidr, ...]] = field(default_factory=dict)
    names: dict[int, ServicePortKey] = field(default_factory=dict)
    node_addresses: set[Addr] = field(default_factory=set)
    cluster_ips: set[Addr] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    next_ids: Meta = field(default_factory=lambda: Meta(0, 0, 0))
    damaged: dict[str, list[bytes]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def slots_of(self, set_id: int) -> dict[int, int]:
        """Index → value of the slots of a set or table."""
        return {slot >> 32: slot & 0xFFFF_FFFF for slot in self.slots.get(set_id, ())}

    def read_set(self, set_id: int, size: int, table: int) -> SetContents:
        """The set to which a frontend leads with these numbers."""
        if not set_id:
            return SetContents(where="services", problem="slots of no set" if size else "")
        slots = self.slots_of(set_id)
        count = len(slots) if table else size
        if problem := _find_gap(slots, count):
            return SetContents(where="backend_slots", problem=problem)
        ids = [slots[index] for index in range(count)]
        if unknown := [number for number in ids if number not in self.backends]:
            return SetContents(where="backends", problem=f"there is no backend {unknown[0]}")
        backends = tuple(self.backends[number] for number in ids)
        content, choices = b"", self.slots_of(table) if table else {}
        if table:
            problem = _find_gap(choices, size)
            used = set(choices.values())
            if not problem and max(used) >= count:
                problem = "it chooses slots that the set does not have"
            if problem:
                return SetContents((), b"", "backend_slots", f"table {table}: {problem}")
            content = fingerprint([choices[index] for index in range(size)])
            if len(used) < count or len(choices) > size:
                problem = f"table {table} has other slots"
        elif len(slots) > size:
            problem = f"it has slot {max(slots)}, and its frontends use {size}"
        # An agent writes sets sorted, without duplicates, and with the first id of each backend.
        if any(lower >= higher for lower, higher in pairwise(backends)):
            problem = "its backends are not in order"
        elif any(self.ids[backend] != number for backend, number in zip(backends, ids, strict=True)):
            problem = "it has a second id of a backend"
        return SetContents(backends, content, "backend_slots", problem)


def _find_gap(slots: Mapping[int, int], size: int) -> str:
    missing = next((index for index in range(size) if index not in slots), None)
    if missing is not None:
        return f"slot {missing} of {size} is missing"
    return "" if slots else "it has no slots"


def read(maps: Mapping[str, Map]) -> Contents:
    """Reads those of MAPS_READ that are given."""
    contents = Contents()
    raw = {name: _read_valid(maps, name, contents) for name in MAPS_READ}
    for key, value in raw["services"].items():
        address, service = unpack_address(key), ServiceValue.unpack(value)
        contents.frontends[address] = service
        _, _, _, cluster, _, local, _, *tables = service
        # pack() computes the check word again
        if service.pack(key) != value or max(service.id, cluster, local, *tables) >= ID_LIMIT:
            contents.corrupt.add(address)
    for key, value in raw["backends"].items():
        number, backend = int.from_bytes(key, "little"), unpack_backend(value)
        contents.backends[number] = backend
        contents.ids.setdefault(backend, number)
    for set_id, number in map(U32_PAIR.unpack, raw["set_members"]):
        contents.members.setdefault(set_id, set()).add(number)
    ranges = sorted(map(unpack_source_range, raw["source_ranges"]))
    for number, entries in groupby(ranges, itemgetter(0)):
        contents.ranges[number] = tuple(cidr for _, cidr in entries)
    contents.names = {
        int.from_bytes(key, "little"): unpack_service_name(value) for key, value in raw["service_names"].items()
    }
    contents.node_addresses = set(map(Addr, raw["node_addresses"]))
    contents.cluster_ips = set(map(Addr, raw["cluster_ips"]))
    contents.ports = set(unpack_ports(raw["frontend_ports"].items()))
    contents.next_ids = Meta(*META.unpack(raw["meta"].get(U32.pack(0)) or bytes(META.size)))
    return contents


def _read_valid(maps: Mapping[str, Map], name: str, contents: Contents) -> dict[bytes, bytes]:
    """The entries of a map without damaged ones. Slots are not raw: there may be millions."""
    if name not in maps:
        return {}
    if name == "backend_slots":
        _read_slots(maps[name], contents)
        return {}
    entries = dict(maps[name].items())
    if name not in ARRAYS:
        contents.counts[name] = len(entries)
    if damaged := [key for key, raw in entries.items() if not is_valid_entry(name, key, raw)]:
        contents.damaged[name] = damaged
        for key in damaged:
            del entries[key]
    return entries


def _read_slots(map_: Map, contents: Contents) -> None:
    sets: dict[int, array[int]] = defaultdict(lambda: array("Q"))
    for keys, values in map_.batches():
        pairs, ids = array("I", keys), array("I", values)
        for set_id, index, value in zip(pairs[0::2], pairs[1::2], ids, strict=True):
            sets[set_id].append(index << 32 | value)
    contents.slots = dict(sets)
    contents.counts["backend_slots"] = sum(map(len, sets.values()))

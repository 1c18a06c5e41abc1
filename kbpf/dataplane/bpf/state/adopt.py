# SPDX-License-Identifier: Apache-2.0
"""Reads what an earlier agent left in the maps, as values to plan from.

Only consistent entries are trusted: a set only if all its slots point to backends, a frontend only
if its value matches its Service port. The rest is unclaimed: it is served until the first
authoritative apply() replaces or removes it. An entry that no agent can have written is corrupt: it
is logged, ignored, and removed together with the unclaimed ones.
"""

import logging
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from msgspec.structs import replace

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
    unpack_service_name,
    unpack_source_range,
)
from kbpf.dataplane.bpf.state.plan import EMPTY, ProgrammedPort, ProgrammedSet, fingerprint
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import Addr
from kbpf.model.desired import Backend, Frontend, FrontendAddress, ServicePortKey
from kbpf.model.objects import Cidr, Protocol

log = logging.getLogger("kbpf.dataplane")

_KIND_BY_FLAG = {int(flag): kind for kind, flag in KIND_FLAGS.items()}
Contents = Mapping[str, Mapping[bytes, bytes]]
Sets = Mapping[int, "array[int]"]
"""Set id → its slots, each packed as index and backend id in one number, since there may be
millions.
"""
MAPS_READ = ("services", "service_names", "backends", "set_members", "source_ranges")
_KIND_BITS = ServiceFlag(sum(KIND_FLAGS.values()))
_PROTOCOLS: Final = frozenset(map(int, Protocol))
_NAME_PROTOCOL_OFFSET: Final = 3 * 64
"""Offset in a struct service_name. In a struct target the protocol is byte 18."""
MAX_LOGGED_KEYS: Final = 3
"""Keys of corrupt entries in one log line."""


@dataclass(slots=True)
class Adopted:
    """The adopted state. Unclaimed entries belong to no adopted Service port."""

    programmed: dict[ServicePortKey, ProgrammedPort] = field(default_factory=dict)
    backends: dict[Backend, int] = field(default_factory=dict)
    unclaimed_backends: list[int] = field(default_factory=list)
    corrupt_frontends: list[bytes] = field(default_factory=list)
    unclaimed_frontends: set[FrontendAddress] = field(default_factory=set)
    unclaimed_names: set[int] = field(default_factory=set)
    unused_names: dict[ServicePortKey, int] = field(default_factory=dict)
    unclaimed_ranges: list[tuple[int, Cidr]] = field(default_factory=list)
    unclaimed_slots: list[bytes] = field(default_factory=list)
    unclaimed_members: list[bytes] = field(default_factory=list)
    fill: dict[str, int] = field(default_factory=dict)
    highest_service: int = 0
    highest_backend: int = 0
    highest_set: int = 0


def address_of(raw: bytes) -> FrontendAddress:
    """Unpacks a key of `services`."""
    target = Target.unpack(raw)
    return FrontendAddress(target.address, target.port, Protocol(target.protocol))


def frontend_of(address: FrontendAddress, value: ServiceValue) -> Frontend | None:
    """The frontend of this entry; None if its flags are inconsistent."""
    kind = _KIND_BY_FLAG.get(value.flags & _KIND_BITS)
    if kind is None:
        return None
    return Frontend(address, kind, bool(value.flags & ServiceFlag.RESTRICTED))


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
            return (
                raw[_NAME_PROTOCOL_OFFSET] in _PROTOCOLS
                and int.from_bytes(key, "little") < ID_LIMIT
            )
    return True


def read_maps(maps: Mapping[str, Map]) -> Adopted:
    """Reads the maps of an earlier agent. Corrupt entries are logged, and recorded for removal."""
    adopted = Adopted()
    contents = {name: _read_valid(name, maps[name], adopted) for name in MAPS_READ}
    by_id = _adopt_backends(contents, adopted)
    sets = _read_sets(maps["backend_slots"], adopted)
    members = defaultdict(set)
    for raw, _ in contents["set_members"].items():
        set_id, backend = U32_PAIR.unpack(raw)
        members[set_id].add(backend)
    entries = defaultdict(list)
    corrupt = []
    for key, raw in contents["services"].items():
        value, address = ServiceValue.unpack(raw), address_of(key)
        # pack() computes the check word again
        if max(value.id, *_set_ids(value)) < ID_LIMIT and value.pack(key) == raw:
            entries[value.id].append((address, value))
        else:
            corrupt.append(key)
            adopted.unclaimed_frontends.add(address)
    _log_corrupt("services", corrupt)
    members_by_set = _adopt_services(
        contents, entries, _SetAssembler(sets, members, by_id, adopted.backends), adopted
    )
    _adopt_ranges(contents, adopted)
    _collect_unclaimed(contents, sets, members_by_set, adopted)
    return adopted


def _set_ids(value: ServiceValue) -> tuple[int, ...]:
    return value.cluster_set, value.local_set, value.cluster_table, value.local_table


def read_next_ids(meta: Map) -> Meta:
    """The next ids to allocate, as stored in the map; 0 for an id that is out of range."""
    key = U32.pack(0)
    ids = META.unpack(meta.lookup(key) or bytes(META.size))
    if max(ids) >= ID_LIMIT:
        _log_corrupt("meta", [key])
    return Meta(*(id_ if id_ < ID_LIMIT else 0 for id_ in ids))


def _read_valid(name: str, map_: Map, adopted: Adopted) -> dict[bytes, bytes]:
    """The valid entries of a map. Corrupt ones are logged and recorded for removal."""
    contents = dict(map_.items())
    adopted.fill[name] = len(contents)
    corrupt = [key for key, raw in contents.items() if not is_valid_entry(name, key, raw)]
    for key in corrupt:
        del contents[key]
    _log_corrupt(name, corrupt)
    match name:
        case "services":
            adopted.corrupt_frontends = corrupt
        case "backends":
            adopted.unclaimed_backends = [int.from_bytes(key, "little") for key in corrupt]
        case "service_names":
            adopted.unclaimed_names = {int.from_bytes(key, "little") for key in corrupt}
    return contents


def _log_corrupt(name: str, corrupt: Sequence[bytes]) -> None:
    if corrupt:
        log.error(
            "corrupt entries are ignored, and removed or rewritten map=%s entries=%d keys=%s",
            name, len(corrupt), ",".join(key.hex() for key in corrupt[:MAX_LOGGED_KEYS]),
        )  # fmt: skip


def _adopt_ranges(contents: Contents, adopted: Adopted) -> None:
    ranges_by_id: dict[int, list[Cidr]] = defaultdict(list)
    for key in contents["source_ranges"]:
        service_id, cidr = unpack_source_range(key)
        ranges_by_id[service_id].append(cidr)
    for service_port, programmed in adopted.programmed.items():
        ranges = tuple(sorted(ranges_by_id.pop(programmed.id, ())))
        if ranges:
            adopted.programmed[service_port] = replace(programmed, source_ranges=ranges)
    adopted.unclaimed_ranges += [
        (service_id, cidr) for service_id in ranges_by_id for cidr in ranges_by_id[service_id]
    ]


def _adopt_backends(contents: Contents, adopted: Adopted) -> dict[int, Backend]:
    by_id: dict[int, Backend] = {}
    for key, raw in contents["backends"].items():
        target = Target.unpack(raw)
        backend = Backend(Addr(target.address), target.port, Protocol(target.protocol))
        backend_id = int.from_bytes(key, "little")
        by_id[backend_id] = backend
        adopted.highest_backend = max(adopted.highest_backend, backend_id)
        if backend in adopted.backends:
            adopted.unclaimed_backends.append(backend_id)
        else:
            adopted.backends[backend] = backend_id
    return by_id


def _read_sets(slots: Map, adopted: Adopted) -> Sets:
    sets: dict[int, array[int]] = defaultdict(lambda: array("Q"))
    count = 0
    for keys, values in slots.batches():
        pairs, ids = array("I", keys), array("I", values)
        for set_id, index, backend_id in zip(pairs[0::2], pairs[1::2], ids, strict=True):
            sets[set_id].append(index << 32 | backend_id)
        count += len(ids)
    adopted.fill["backend_slots"] = count
    adopted.highest_set = max((id_ for id_ in sets if id_ < ID_LIMIT), default=0)
    return sets


@dataclass(frozen=True, slots=True)
class _SetAssembler:
    """The inputs of a set: slots, members by set id, backends by id, ids by backend."""

    slots: Sets
    members: Mapping[int, set[int]]
    backends_by_id: Mapping[int, Backend]
    ids_by_backend: Mapping[Backend, int]

    def assemble(self, set_id: int, size: int, table: int = 0) -> ProgrammedSet:
        """Assembles a set. Unless all its slots point to different backends by their first ids, and
        its table uses exactly these slots, returns EMPTY: the agent then writes a new set.
        """
        ids = self._read_slots(set_id)
        if not set_id or not ids or len(set(ids)) != len(ids):
            return EMPTY
        # A slot may point to no backend, or to the second id of one.
        if any(
            self.ids_by_backend.get(self.backends_by_id[backend_id]) != backend_id
            if backend_id in self.backends_by_id
            else True
            for backend_id in ids
        ):
            return EMPTY
        backends = tuple(self.backends_by_id[backend_id] for backend_id in ids)
        # The agent writes sets sorted and without duplicates.
        if any(lower >= higher for lower, higher in pairwise(backends)):
            return EMPTY
        choices = self._read_slots(table) if table else range(len(ids))
        if len(choices) != size or set(choices) != set(range(len(ids))):
            return EMPTY
        content = fingerprint(choices) if table else b""
        members = self.members.get(set_id, set()) == set(ids)
        return ProgrammedSet(set_id, backends, members, size, None, content, table)

    def _read_slots(self, set_id: int) -> list[int]:
        """The values of a set or table in the order of their indexes; empty if one is missing."""
        slots = sorted(self.slots.get(set_id, ()))
        if [slot >> 32 for slot in slots] != list(range(len(slots))):
            return []
        return [slot & 0xFFFF_FFFF for slot in slots]


def _adopt_services(
    contents: Contents,
    entries: Mapping[int, list[tuple[FrontendAddress, ServiceValue]]],
    sets: _SetAssembler,
    adopted: Adopted,
) -> dict[int, bool]:
    members_by_set: dict[int, bool] = {}
    named_ids: set[int] = set()
    names = [(int.from_bytes(k, "little"), raw) for k, raw in contents["service_names"].items()]
    # A Service port that was just created again may have two ids; the one in use counts.
    for service_id, raw in sorted(names, key=lambda item: (item[0] not in entries, -item[0])):
        adopted.highest_service = max(adopted.highest_service, service_id)
        name = unpack_service_name(raw)
        if name in adopted.programmed or name in adopted.unused_names:
            adopted.unclaimed_names.add(service_id)
            continue
        if service_id not in entries:
            adopted.unused_names[name] = service_id
            continue
        named_ids.add(service_id)
        programmed = _adopt_service_port(service_id, entries[service_id], sets, adopted)
        adopted.programmed[name] = programmed
        members_by_set |= {
            set_.id: set_.in_set_members for set_ in (programmed.cluster, programmed.local)
        }
        members_by_set |= dict.fromkeys((programmed.cluster.table, programmed.local.table), False)
    for service_id, values in entries.items():
        adopted.highest_service = max(adopted.highest_service, service_id)
        if service_id not in named_ids:
            adopted.unclaimed_frontends.update(address for address, _ in values)
    return members_by_set


def _adopt_service_port(
    service_id: int,
    values: list[tuple[FrontendAddress, ServiceValue]],
    sets: _SetAssembler,
    adopted: Adopted,
) -> ProgrammedPort:
    """Adopts a Service port as its frontend with the newest sets describes it. An agent that was
    killed during a flip leaves frontends with older sets; these are unclaimed.
    """
    # Ids count up, so the newest sets have the highest ones.
    _, reference = max(values, key=lambda v: (v[1].cluster_set, v[1].local_set))
    programmed = ProgrammedPort(
        service_id,
        ServiceFlag(reference.flags & ~int(_KIND_BITS | ServiceFlag.RESTRICTED)),
        reference.affinity_timeout,
        (),
        sets.assemble(reference.cluster_set, reference.cluster_size, reference.cluster_table),
        sets.assemble(reference.local_set, reference.local_size, reference.local_table),
    )
    frontends = []
    for address, value in sorted(values):
        frontend = frontend_of(address, value)
        if frontend is not None and programmed.service_value(frontend) == value:
            frontends.append(frontend)
        else:
            adopted.unclaimed_frontends.add(address)
    # `serving` stays (): no map holds it. The first authoritative apply() finds stale UDP flows
    # without it (UdpCutter.cut_unserved()).
    return ProgrammedPort(
        programmed.id,
        programmed.flags,
        programmed.affinity_timeout,
        tuple(frontends),
        programmed.cluster,
        programmed.local,
    )


def _collect_unclaimed(
    contents: Contents, sets: Sets, members_by_set: Mapping[int, bool], adopted: Adopted
) -> None:
    for set_id in sets.keys() - members_by_set.keys():
        adopted.unclaimed_slots += [U32_PAIR.pack(set_id, slot >> 32) for slot in sets[set_id]]
    for key, _ in contents["set_members"].items():
        if not members_by_set.get(U32_PAIR.unpack(key)[0], False):
            adopted.unclaimed_members.append(key)

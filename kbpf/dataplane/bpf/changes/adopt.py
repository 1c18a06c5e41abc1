"""What an earlier agent left in the maps, as values to plan from.

Nothing is trusted that does not hold together: a set counts only when all its slots lead to
backends, a frontend only when its value is what its Service port says. The rest is stray: served
until the first complete apply(), which replaces or removes it. What no agent can have written is
damaged: it is told, counts as if it were not there, and goes with the strays.
"""

import logging
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from msgspec.structs import replace

from kbpf.dataplane.bpf.changes.plan import EMPTY, Programmed, ProgrammedSet, fingerprint
from kbpf.dataplane.bpf.maps.ids import LIMIT
from kbpf.dataplane.bpf.maps.layout import (
    KIND_FLAGS,
    META,
    PAIR,
    U32,
    Meta,
    ServiceFlag,
    ServiceValue,
    Target,
    unpack_name,
    unpack_range,
)
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import Addr
from kbpf.model.desired import Backend, Frontend, FrontendAddress, ServicePortKey
from kbpf.model.objects import Cidr, Protocol

log = logging.getLogger("kbpf.dataplane")

_KINDS = {int(flag): kind for kind, flag in KIND_FLAGS.items()}
Contents = Mapping[str, Mapping[bytes, bytes]]
Sets = Mapping[int, "array[int]"]
"""Set id → its slots, each as index and backend id in one number: there may be millions."""
READ = ("services", "service_names", "backends", "set_members", "source_ranges")
_KIND_BITS = ServiceFlag(sum(KIND_FLAGS.values()))
_PROTOCOLS: Final = frozenset(map(int, Protocol))
_NAMED_PROTOCOL: Final = 3 * 64
"""Where it stands in a struct service_name; in a struct target it is byte 18."""
TOO_HIGH: Final = LIMIT
"""No id is as high."""
MOST_TOLD: Final = 3
"""Keys of damaged entries in one line of the log."""


@dataclass(slots=True)
class Adopted:
    """What was found. `sets` are all sets with slots; strays are what no Service port owns."""

    programmed: dict[ServicePortKey, Programmed] = field(default_factory=dict)
    backends: dict[Backend, int] = field(default_factory=dict)
    stray_backends: list[int] = field(default_factory=list)
    damaged_frontends: list[bytes] = field(default_factory=list)
    stray_frontends: set[FrontendAddress] = field(default_factory=set)
    stray_names: set[int] = field(default_factory=set)
    unused_names: dict[ServicePortKey, int] = field(default_factory=dict)
    stray_ranges: list[tuple[int, Cidr]] = field(default_factory=list)
    stray_slots: list[bytes] = field(default_factory=list)
    stray_members: list[bytes] = field(default_factory=list)
    fill: dict[str, int] = field(default_factory=dict)
    highest_service: int = 0
    highest_backend: int = 0
    highest_set: int = 0


def address_of(raw: bytes) -> FrontendAddress:
    """A key of `services`."""
    target = Target.unpack(raw)
    return FrontendAddress(target.address, target.port, Protocol(target.protocol))


def frontend_of(at: FrontendAddress, value: ServiceValue) -> Frontend | None:
    """The frontend that this entry programs; None if its flags make no sense."""
    kind = _KINDS.get(value.flags & _KIND_BITS)
    if kind is None:
        return None
    return Frontend(at, kind, bool(value.flags & ServiceFlag.RESTRICTED))


def is_sound(name: str, key: bytes, raw: bytes) -> bool:
    """Whether an agent can have written this entry of the map of that name."""
    match name:
        case "services":
            return key[18] in _PROTOCOLS and not key[19]
        case "backends":
            return raw[18] in _PROTOCOLS and int.from_bytes(key, "little") < TOO_HIGH
        case "service_names":
            return raw[_NAMED_PROTOCOL] in _PROTOCOLS and int.from_bytes(key, "little") < TOO_HIGH
    return True


def read(maps: Mapping[str, Map]) -> Adopted:
    """Everything that the maps hold."""
    found = Adopted()
    contents = {name: _sound(name, maps[name], found) for name in READ}
    by_id = _backends(contents, found)
    sets = _sets(maps["backend_slots"], found)
    members = defaultdict(set)
    for raw, _ in contents["set_members"].items():
        set_id, backend = PAIR.unpack(raw)
        members[set_id].add(backend)
    entries = defaultdict(list)
    damaged = []
    for key, raw in contents["services"].items():
        value, at = ServiceValue.unpack(raw), address_of(key)
        if max(value.id, *_set_ids(value)) < TOO_HIGH and value.pack(key) == raw:
            entries[value.id].append((at, value))
        else:
            damaged.append(key)
            found.stray_frontends.add(at)
    _tell("services", damaged)
    owned = _services(contents, entries, _Found(sets, members, by_id, found.backends), found)
    _ranges(contents, found)
    _strays(contents, sets, owned, found)
    return found


def _set_ids(value: ServiceValue) -> tuple[int, ...]:
    return value.cluster_set, value.local_set, value.cluster_table, value.local_table


def next_ids(meta: Map) -> Meta:
    """The ids to give out next, as the map has them; 0 for one that is not to be believed."""
    key = U32.pack(0)
    numbers = META.unpack(meta.lookup(key) or bytes(META.size))
    if max(numbers) >= TOO_HIGH:
        _tell("meta", [key])
    return Meta(*(number if number < TOO_HIGH else 0 for number in numbers))


def _sound(name: str, held: Map, found: Adopted) -> dict[bytes, bytes]:
    """The entries that are to be believed; the others are told, and to be removed."""
    contents = dict(held.items())
    found.fill[name] = len(contents)
    damaged = [key for key, raw in contents.items() if not is_sound(name, key, raw)]
    for key in damaged:
        del contents[key]
    _tell(name, damaged)
    match name:
        case "services":
            found.damaged_frontends = damaged
        case "backends":
            found.stray_backends = [int.from_bytes(key, "little") for key in damaged]
        case "service_names":
            found.stray_names = {int.from_bytes(key, "little") for key in damaged}
    return contents


def _tell(name: str, damaged: Sequence[bytes]) -> None:
    if damaged:
        log.error(
            "damaged entries are left out, and removed or written anew map=%s entries=%d keys=%s",
            name, len(damaged), ",".join(key.hex() for key in damaged[:MOST_TOLD]),
        )  # fmt: skip


def _ranges(contents: Contents, found: Adopted) -> None:
    by_id: dict[int, list[Cidr]] = defaultdict(list)
    for key in contents["source_ranges"]:
        service_id, cidr = unpack_range(key)
        by_id[service_id].append(cidr)
    for name, owner in found.programmed.items():
        ranges = tuple(sorted(by_id.pop(owner.id, ())))
        if ranges:
            found.programmed[name] = replace(owner, source_ranges=ranges)
    found.stray_ranges += [(service_id, cidr) for service_id in by_id for cidr in by_id[service_id]]


def _backends(contents: Contents, found: Adopted) -> dict[int, Backend]:
    by_id: dict[int, Backend] = {}
    for key, raw in contents["backends"].items():
        target = Target.unpack(raw)
        backend = Backend(Addr(target.address), target.port, Protocol(target.protocol))
        backend_id = int.from_bytes(key, "little")
        by_id[backend_id] = backend
        found.highest_backend = max(found.highest_backend, backend_id)
        if backend in found.backends:
            found.stray_backends.append(backend_id)
        else:
            found.backends[backend] = backend_id
    return by_id


def _sets(slots: Map, found: Adopted) -> Sets:
    sets: dict[int, array[int]] = defaultdict(lambda: array("Q"))
    count = 0
    for keys, values in slots.batches():
        pairs, ids = array("I", keys), array("I", values)
        for set_id, index, backend_id in zip(pairs[0::2], pairs[1::2], ids, strict=True):
            sets[set_id].append(index << 32 | backend_id)
        count += len(ids)
    found.fill["backend_slots"] = count
    found.highest_set = max((number for number in sets if number < TOO_HIGH), default=0)
    return sets


@dataclass(frozen=True, slots=True)
class _Found:
    """What sets are put together from: slots, members by set id, backends by id and the reverse."""

    slots: Sets
    members: Mapping[int, set[int]]
    by_id: Mapping[int, Backend]
    ids: Mapping[Backend, int]

    def whole(self, set_id: int, size: int, table: int = 0) -> ProgrammedSet:
        """The set, or EMPTY unless all its slots lead to backends, and its table to all its slots.
        One that names the second id of a backend is not taken over: it is written again.
        """
        ids = self._places(set_id)
        if not set_id or not ids or len(set(ids)) != len(ids):
            return EMPTY
        if any(self.ids.get(self.by_id[i]) != i if i in self.by_id else True for i in ids):
            return EMPTY
        backends = tuple(self.by_id[i] for i in ids)
        if any(one >= other for one, other in pairwise(backends)):
            return EMPTY
        choices = self._places(table) if table else range(len(ids))
        if len(choices) != size or set(choices) != set(range(len(ids))):
            return EMPTY
        content = fingerprint(choices) if table else b""
        members = self.members.get(set_id, set()) == set(ids)
        return ProgrammedSet(set_id, backends, members, size, None, content, table)

    def _places(self, number: int) -> list[int]:
        """What the places of a set or a table hold, in their order; nothing if one is missing."""
        places = sorted(self.slots.get(number, ()))
        if [place >> 32 for place in places] != list(range(len(places))):
            return []
        return [place & 0xFFFF_FFFF for place in places]


def _services(
    contents: Contents,
    entries: Mapping[int, list[tuple[FrontendAddress, ServiceValue]]],
    sets: _Found,
    found: Adopted,
) -> dict[int, bool]:
    owned: dict[int, bool] = {}
    named: set[int] = set()
    names = [(int.from_bytes(k, "little"), raw) for k, raw in contents["service_names"].items()]
    # One that was made anew just before has two ids here: the one that serves counts.
    for service_id, raw in sorted(names, key=lambda one: (one[0] not in entries, -one[0])):
        found.highest_service = max(found.highest_service, service_id)
        name = unpack_name(raw)
        if name in found.programmed or name in found.unused_names:
            found.stray_names.add(service_id)
            continue
        if service_id not in entries:
            found.unused_names[name] = service_id
            continue
        named.add(service_id)
        owner = _one(service_id, entries[service_id], sets, found)
        found.programmed[name] = owner
        owned |= {s.id: s.members for s in (owner.cluster, owner.local)}
        owned |= dict.fromkeys((owner.cluster.table, owner.local.table), False)
    for service_id, values in entries.items():
        found.highest_service = max(found.highest_service, service_id)
        if service_id not in named:
            found.stray_frontends.update(at for at, _ in values)
    return owned


def _one(
    service_id: int,
    values: list[tuple[FrontendAddress, ServiceValue]],
    sets: _Found,
    found: Adopted,
) -> Programmed:
    """The Service port as most of its frontends tell it."""
    _, first = max(values, key=lambda v: (v[1].cluster_set, v[1].local_set))
    owner = Programmed(
        service_id,
        ServiceFlag(first.flags & ~int(_KIND_BITS | ServiceFlag.RESTRICTED)),
        first.affinity_timeout,
        (),
        sets.whole(first.cluster_set, first.cluster_size, first.cluster_table),
        sets.whole(first.local_set, first.local_size, first.local_table),
    )
    good = []
    for at, value in sorted(values):
        frontend = frontend_of(at, value)
        if frontend is not None and owner.value(frontend) == value:
            good.append(frontend)
        else:
            found.stray_frontends.add(at)
    return Programmed(
        owner.id, owner.flags, owner.affinity_timeout, tuple(good), owner.cluster, owner.local
    )


def _strays(contents: Contents, sets: Sets, owned: Mapping[int, bool], found: Adopted) -> None:
    for set_id in sets.keys() - owned.keys():
        found.stray_slots += [PAIR.pack(set_id, place >> 32) for place in sets[set_id]]
    for key, _ in contents["set_members"].items():
        if not owned.get(PAIR.unpack(key)[0], False):
            found.stray_members.append(key)

# SPDX-License-Identifier: Apache-2.0
"""What of the maps' contents an agent continues with, as values to plan from.

Only consistent entries are trusted: a set only if an agent writes it like this, a frontend only if
its value matches its Service port. The rest is unclaimed: it is served until the first
authoritative apply() replaces or removes it. An entry that no agent can have written is ignored,
and removed together with the unclaimed ones.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from kbpf.dataplane.bpf.maps.ids import ID_LIMIT
from kbpf.dataplane.bpf.maps.layout import U32, U32_PAIR, Meta, ServiceFlag, ServiceValue, pack_target
from kbpf.dataplane.bpf.state.contents import KIND_BITS, Contents, frontend_of
from kbpf.dataplane.bpf.state.plan import EMPTY, ProgrammedPort, ProgrammedSet
from kbpf.model.desired import Backend, FrontendAddress, ServicePortKey
from kbpf.model.objects import Cidr

log = logging.getLogger("kbpf.dataplane")

MAX_LOGGED_KEYS: Final = 3
"""Keys of corrupt entries in one log line."""
Entries = Mapping[int, list[tuple[FrontendAddress, ServiceValue]]]


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
    highest_service: int = 0
    highest_backend: int = 0
    highest_set: int = 0


def adopt(contents: Contents) -> Adopted:
    """What a new agent continues with."""
    damaged = {
        name: [int.from_bytes(key, "little") for key in contents.damaged.get(name, ())]
        for name in ("backends", "service_names")
    }
    first_ids = set(contents.ids.values())
    adopted = Adopted(
        backends=contents.ids,
        unclaimed_backends=damaged["backends"] + [number for number in contents.backends if number not in first_ids],
        corrupt_frontends=contents.damaged.get("services", []),
        unclaimed_frontends=set(contents.corrupt),
        unclaimed_names=set(damaged["service_names"]),
        highest_backend=max(contents.backends, default=0),
        highest_set=max((id_ for id_ in contents.slots if id_ < ID_LIMIT), default=0),
    )
    entries = defaultdict(list)
    for address, value in contents.frontends.items():
        if address not in contents.corrupt:
            entries[value.id].append((address, value))
    members_by_set = _adopt_services(contents, entries, adopted)
    for set_id in contents.slots.keys() - members_by_set.keys():
        slots = contents.slots[set_id]
        adopted.unclaimed_slots += [U32_PAIR.pack(set_id, slot >> 32) for slot in slots]
    for set_id, numbers in contents.members.items():
        if not members_by_set.get(set_id, False):
            adopted.unclaimed_members += [U32_PAIR.pack(set_id, number) for number in numbers]
    used_ids = {programmed.id for programmed in adopted.programmed.values()}
    adopted.unclaimed_ranges = [
        (service_id, cidr)
        for service_id, cidrs in contents.ranges.items()
        if service_id not in used_ids
        for cidr in cidrs
    ]
    return adopted


def usable_ids(meta: Meta) -> Meta:
    """The next ids to allocate; 0 for an id that is out of range."""
    return Meta(*(id_ if id_ < ID_LIMIT else 0 for id_ in meta))


def log_corrupt(contents: Contents) -> None:
    """Logs the entries that adopt() ignores."""
    found: dict[str, Collection[bytes]] = {**contents.damaged}
    corrupt = [pack_target(*address) for address in sorted(contents.corrupt)]
    found["services"] = [*contents.damaged.get("services", ()), *corrupt]
    found["meta"] = [U32.pack(0)] if max(contents.next_ids) >= ID_LIMIT else []
    for name, keys in found.items():
        if keys:
            log.error(
                "corrupt entries are ignored, and removed or rewritten map=%s entries=%d keys=%s",
                name,
                len(keys),
                ",".join(key.hex() for key in [*keys][:MAX_LOGGED_KEYS]),
            )


def _adopt_services(contents: Contents, entries: Entries, adopted: Adopted) -> dict[int, bool]:
    """Adopts the Service ports. Returns their sets and tables, and whether they have members."""
    members_by_set: dict[int, bool] = {}
    named_ids: set[int] = set()
    # A Service port that was just created again may have two ids; the one in use counts.
    for service_id, name in sorted(contents.names.items(), key=lambda item: (item[0] not in entries, -item[0])):
        if name in adopted.programmed or name in adopted.unused_names:
            adopted.unclaimed_names.add(service_id)
            continue
        if service_id not in entries:
            adopted.unused_names[name] = service_id
            continue
        named_ids.add(service_id)
        programmed = _adopt_service_port(contents, service_id, entries[service_id], adopted)
        adopted.programmed[name] = programmed
        for set_ in programmed.sets:
            members_by_set |= {set_.id: set_.in_set_members, set_.table: False}
    adopted.highest_service = max((*contents.names, *entries), default=0)
    for service_id, values in entries.items():
        if service_id not in named_ids:
            adopted.unclaimed_frontends.update(address for address, _ in values)
    return members_by_set


def _adopt_service_port(
    contents: Contents, service_id: int, values: list[tuple[FrontendAddress, ServiceValue]], adopted: Adopted
) -> ProgrammedPort:
    """Adopts a Service port as its frontend with the newest sets describes it. An agent that was
    killed during a flip leaves frontends with older sets; these are unclaimed.
    """
    # Ids count up, so the newest sets have the highest ones.
    _, reference = max(values, key=lambda v: (v[1].cluster_set, v[1].local_set))
    cluster, local = (_adopt_set(contents, *numbers) for numbers in reference.sets)
    # `serving` stays (): no map holds it. The first authoritative apply() finds stale UDP flows
    # without it (UdpCutter.cut_unserved()).
    programmed = ProgrammedPort(
        service_id,
        ServiceFlag(reference.flags & ~int(KIND_BITS | ServiceFlag.RESTRICTED)),
        reference.affinity_timeout,
        (),
        cluster,
        local,
        source_ranges=contents.ranges.get(service_id, ()),
    )
    frontends = []
    for address, value in sorted(values):
        frontend = frontend_of(address, value)
        if frontend is not None and programmed.service_value(frontend) == value:
            frontends.append(frontend)
        else:
            adopted.unclaimed_frontends.add(address)
    return replace(programmed, frontends=tuple(frontends))


def _adopt_set(contents: Contents, set_id: int, size: int, table: int) -> ProgrammedSet:
    """EMPTY unless an agent writes it like this: the agent then writes a new set."""
    found = contents.read_set(set_id, size, table)
    if found.problem or not found.backends:
        return EMPTY
    ids = {contents.ids[backend] for backend in found.backends}
    in_set_members = contents.members.get(set_id, set()) == ids
    return ProgrammedSet(set_id, found.backends, in_set_members, size, None, found.table, table)

# SPDX-License-Identifier: Apache-2.0
"""What `kbpf verify` says of maps that another process has changed: a row damages one map, and
names each difference that must be found. Nothing else may be, and nothing at all before the damage.
"""

import contextlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.inspect import differences, node_differences
from kbpf.dataplane.bpf.maps.layout import (
    MAPS,
    SERVICE_NAME,
    U32,
    U32_PAIR,
    U64,
    ServiceValue,
    pack_source_range,
    pack_target,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.state import contents
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState
from kbpf.model.objects import Cidr
from tests.support.plane import Site, desired, flush, services, sites, split
from tests.support.table import each_cells

WORLD = desired(
    *services(
        """
        web      10.96.0.1:80 NodePort=0.0.0.0:30080 -> A B
        kept     10.96.0.2:80 -> A C affinity=60
        dns:UDP  10.96.0.3:53 -> A serving=A,B
        guarded  LoadBalancer=192.0.2.1:80 -> A ranges=10.0.0.0/8,192.0.2.0/24
        maglev   10.96.0.4:80 -> A B algorithm=MAGLEV
        weighted 10.96.0.5:80 -> A B C cluster_weights=1,2,3
        near     10.96.0.6:80 -> A B local=A internal=Local
        empty    10.96.0.7:80
        """,
        {name: f"10.244.0.{i}:8080" for i, name in enumerate("ABC", 1)},
    ),
    nodes="192.0.2.9",
)


@pytest.fixture(scope="module")
def world(artifact_cache: Path) -> Iterator[tuple[Site, Config]]:
    with sites(artifact_cache) as make:
        site = make()
        plane = site.start(WORLD)
        yield site, plane._config


def compare(site: Site, config: Config, state: DesiredState = WORLD) -> list[str]:
    """A line for each difference of the maps that the agent fills: kind, map and subject."""
    pins = Pins(site.pins)
    with contextlib.ExitStack() as stack:
        maps, damaged = node_differences.open_maps(pins, stack)
        assert not damaged
        findings = differences.compare(contents.read(maps), state, config)
    return [f"{found.kind} {found.where} {found.subject}: {found.desired} / {found.actual}" for _, found in findings]


# ---- damages -------------------------------------------------------------------------------------


def target(text: str, protocol: str = "6") -> bytes:
    return pack_target(*split(text), int(protocol))


def value_of(site: Site, text: str) -> ServiceValue:
    return ServiceValue.unpack(site.entries("services")[target(text)])


def read_part(site: Site, words: str, key: bytes = b"") -> bytes:
    """A key or a value. The maps say which ids the Service of a frontend and its sets have. `key`: of the value."""
    kind, *given = words.split()
    match kind:
        case "number":
            raw = b"".join(U32.pack(int(word)) for word in given)
        case "address":
            raw = parse_addr(*given)
        case "at":
            raw = target(*given)
        case "name":
            raw = SERVICE_NAME.pack(b"default", given[0].encode(), b"", int(given[1]), 4)
        case "backend":
            found = target(*given)
            raw = next(held for held, value in site.entries("backends").items() if value == found)
        case "range":
            owner = int(given[0]) if given[0].isdigit() else value_of(site, given[0]).id
            raw = pack_source_range(owner, Cidr.parse(given[1]))
        case "with" | "without":
            (word,) = U64.unpack(site.entries("frontend_ports")[key])
            raw = U64.pack(word ^ 1 << int(given[0]) % 64)
        case _:
            raw = read_service_part(site, kind, value_of(site, given[0]), given[1:], key)
    return raw


def read_service_part(site: Site, kind: str, value: ServiceValue, given: list[str], key: bytes) -> bytes:
    """The same for parts that a frontend's value leads to."""
    match kind:
        case "id":
            return U32.pack(value.id)
        case "like":
            return value._replace(**{name: int(number) for name, _, number in (w.partition("=") for w in given)}).pack(
                key
            )
        case "misread":
            return value.pack(key)[:-1] + b"?"
        case "member":
            return U32.pack(value.cluster_set) + read_part(site, f"backend {given[0]}")
    return U32_PAIR.pack(value.cluster_set if kind == "slot" else value.cluster_table, int(given[0]))


def write(site: Site, name: str, key: bytes, value: bytes | None) -> None:
    """Without a value the entry is deleted."""
    with site.pinned(name) as map_:
        if value is None:
            assert map_.delete(key), "the damage must hit an entry"
        else:
            map_.update(key, value)


@each_cells(
    "map, key, value, found",
    """
frontend removed | services | at 10.96.0.1:80 | - | missing services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP /
only frontend removed | services | at 10.96.0.2:80 | - | \
    missing services default/kept TCP IPv4: ClusterIP 10.96.0.2:80/TCP / ; \
    stale backend_slots set; stale set_members set; stale set_members set
frontend added to a Service | services | at 10.96.0.99:99 | like 10.96.0.1:80 | \
    stale services default/web TCP IPv4:  / 10.96.0.99:99/TCP
frontend of no Service | services | at 10.96.0.99:99 | like 10.96.0.7:80 id=4000 | \
    foreign services id 4000, not named:  / 10.96.0.99:99/TCP
frontend with a wrong check word | services | at 10.96.0.1:80 | misread 10.96.0.1:80 | \
    damaged services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / 10.96.0.1:80/TCP with a wrong check word
frontend of an unknown protocol | services | at 10.96.0.9:80 99 | misread 10.96.0.1:80 | damaged services :
frontend leads to another Service | services | at 10.96.0.1:80 | like 10.96.0.4:80 | \
    changed services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / 10.96.0.1:80/TCP \
leads to default/maglev TCP IPv4
flags changed | services | at 10.96.0.1:80 | like 10.96.0.1:80 flags=257 | \
    changed services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP with any_endpoints, cluster_ip / \
10.96.0.1:80/TCP has internal_local, cluster_ip
restriction lifted | services | at 192.0.2.1:80 | like 192.0.2.1:80 flags=4 | changed services default/guarded TCP IPv4:
affinity switched off | services | at 10.96.0.2:80 | like 10.96.0.2:80 affinity_timeout=0 | \
    changed services default/kept TCP IPv4: affinity of 60 s /
frontend with an empty set | services | at 10.96.0.1:80 | like 10.96.0.1:80 cluster_set=0 cluster_size=0 | \
    missing backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080
frontend with fewer slots | services | at 10.96.0.1:80 | like 10.96.0.1:80 cluster_size=1 | \
    missing backend_slots default/web TCP IPv4: cluster set: 10.244.0.2:8080
frontend with too many slots | services | at 10.96.0.1:80 | like 10.96.0.1:80 cluster_size=3 | \
    damaged backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080, 10.244.0.2:8080 / set
local set lost | services | at 10.96.0.6:80 | like 10.96.0.6:80 local_set=0 local_size=0 | \
    missing backend_slots default/near TCP IPv4: local set: 10.244.0.1:8080; stale backend_slots set
name removed | service_names | id 10.96.0.1:80 | - | missing service_names default/web TCP IPv4: a name for id
name changed | service_names | id 10.96.0.1:80 | name old 6 | \
    changed services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / 10.96.0.1:80/TCP leads to default/old TCP; \
    changed services default/web TCP IPv4: NodePort 0.0.0.0:30080/TCP /
name added | service_names | number 4000 | name old 6 | \
    stale service_names id 4000:  / default/old TCP IPv4; changed meta
name of an unknown protocol | service_names | number 4000 | name old 99 | damaged service_names :
slot removed | backend_slots | slot 10.96.0.1:80 0 | - | \
    damaged backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080
slot leads to another backend | backend_slots | slot 10.96.0.1:80 0 | backend 10.244.0.3:8080 | \
    changed backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080 / cluster set: 10.244.0.3:8080
slot leads to no backend | backend_slots | slot 10.96.0.1:80 0 | number 4000 | \
    damaged backends default/web TCP IPv4: cluster set: 10.244.0.1:8080, 10.244.0.2:8080 / \
set %: there is no backend 4000
slot added | backend_slots | slot 10.96.0.1:80 7 | backend 10.244.0.3:8080 | \
    damaged backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080, 10.244.0.2:8080 / \
set %: it has slot 7, and its frontends use 2
set added | backend_slots | number 4000 0 | backend 10.244.0.1:8080 | \
    stale backend_slots set 4000:  / 1 slot; changed meta
entry of a table removed | backend_slots | entry 10.96.0.4:80 5 | - | \
    damaged backend_slots default/maglev TCP IPv4: cluster set:
entry of a table leads to no slot | backend_slots | entry 10.96.0.4:80 5 | number 77 | \
    damaged backend_slots default/maglev TCP IPv4: cluster set:
shares changed | backend_slots | entry 10.96.0.5:80 5 | number 0 | \
    changed backend_slots default/weighted TCP IPv4: cluster set: random, weights 1, 2, 3 / \
cluster set: 6 slots of other shares
backend removed | backends | backend 10.244.0.1:8080 17 | - | \
    damaged backends default/dns UDP IPv4: cluster set: 10.244.0.1:8080 / set %: there is no backend
backend removed that only keeps its flows | backends | backend 10.244.0.2:8080 17 | - | \
    missing backends : 10.244.0.2:8080 /
backend changed | backends | backend 10.244.0.1:8080 17 | at 10.9.9.9:53 17 | \
    changed backend_slots default/dns UDP IPv4: cluster set: 10.244.0.1:8080 / cluster set: 10.9.9.9:53
backend added | backends | number 4000 | at 10.9.9.9:53 17 | \
    stale backends backend 4000:  / 10.9.9.9:53; changed meta
member removed | set_members | member 10.96.0.2:80 10.244.0.3:8080 | - | \
    missing set_members default/kept TCP IPv4: cluster set: 10.244.0.3:8080
member added | set_members | slot 10.96.0.2:80 4000 | number 1 | \
    stale set_members default/kept TCP IPv4:  / cluster set: backend 4000
range removed | source_ranges | range 192.0.2.1:80 10.0.0.0/8 | - | \
    missing source_ranges default/guarded TCP IPv4: 10.0.0.0/8 /
range added | source_ranges | range 192.0.2.1:80 0.0.0.0/0 | number 1 | \
    stale source_ranges default/guarded TCP IPv4:  / 0.0.0.0/0
range of no Service | source_ranges | range 4000 10.0.0.0/8 | number 1 | stale source_ranges id 4000:  / 10.0.0.0/8
range of NodePorts | source_ranges | range 0 10.0.0.0/8 | number 1 | stale source_ranges NodePorts:  / 10.0.0.0/8
node address removed | node_addresses | address 192.0.2.9 | - | missing node_addresses : 192.0.2.9 /
node address added | node_addresses | address 192.0.2.77 | number 1 | stale node_addresses :  / 192.0.2.77
ClusterIP removed | cluster_ips | address 10.96.0.1 | - | missing cluster_ips : 10.96.0.1 /
ClusterIP added | cluster_ips | address 10.9.9.9 | number 1 | stale cluster_ips :  / 10.9.9.9
port cleared | frontend_ports | number 0 | without 53 | \
    missing frontend_ports : port 53: without it no frontend of this port is served /
port set | frontend_ports | number 6 | with 443 | stale frontend_ports :  / 1 port: 443
next ids too low | meta | number 0 | number 1 1 1 | changed meta; changed meta; changed meta
next ids out of range | meta | number 0 | number 2147483648 2147483648 2147483648 | \
    damaged meta; damaged meta; damaged meta
""",
)
def test_each_damage_is_named(world: tuple[Site, Config], map, key, value, found):
    """A map, the key of an entry, and the value that it gets (-: it is deleted), both in the words of read_part(); and
    the beginnings of the lines that must be found, % for a number.
    """
    site, config = world
    assert compare(site, config) == []
    with site.restored(*contents.MAPS_READ):
        key = read_part(site, key)
        write(site, map, key, None if value == "-" else read_part(site, value, key))
        lines = compare(site, config)
    wanted = [re.escape(line.strip()).replace("%", r"\d+") for line in found.split(";")]
    assert not [line for line in lines if not any(re.match(each, line) for each in wanted)]
    assert len(lines) == len(wanted), "\n".join(lines)
    assert all(any(re.match(each, line) for line in lines) for each in wanted), "\n".join(lines)


DAMAGED = ("services", "service_names", "backend_slots", "backends", "set_members", "source_ranges")


def damage_anything(site: Site, rng: random.Random) -> None:
    """Removes, changes, copies or swaps some entries."""
    for name in DAMAGED:
        for _ in range(rng.randint(0, 2)):
            entries = sorted(site.entries(name).items())
            (key, value), (_, other) = rng.choice(entries), rng.choice(entries)
            # The kernel refuses or masks most other keys of a trie.
            if name == "source_ranges" or rng.random() < 0.3:
                write(site, name, key, None)
            elif rng.random() < 0.3:
                write(site, name, key, other)
            elif rng.random() < 0.5:
                write(site, name, key, flip_bit(value, rng))
            else:
                write(site, name, flip_bit(key, rng), value)


def flip_bit(raw: bytes, rng: random.Random) -> bytes:
    number = int.from_bytes(raw, "big") ^ 1 << rng.randrange(8 * len(raw))
    return number.to_bytes(len(raw), "big")


@pytest.mark.parametrize("seed", range(20))
def test_a_difference_is_what_an_agent_writes(world: tuple[Site, Config], seed: int):
    """There are differences exactly if an agent that reads the maps again changes them, and none is
    left then.
    """
    site, config = world
    (plane,) = site._planes
    names = [name for name in contents.MAPS_READ if name != "meta"]
    with site.restored(*contents.MAPS_READ):
        damage_anything(site, random.Random(seed))
        lines, before = compare(site, config), {name: site.entries(name) for name in names}
        plane.invalidate()
        plane.apply(WORLD, None)
        flush(plane)
        after = {name: site.entries(name) for name in names}
        assert bool(lines) == (before != after), "\n".join(lines)
        assert compare(site, config) == []


def test_unusable_maps_are_named(artifact_cache: Path):
    """A pin that is gone, and one of a map with other values."""
    with sites(artifact_cache) as make:
        site = make()
        site.open()
        (site.maps / "backends").unlink()
        (site.maps / "services").unlink()
        spec = MAPS["services"]
        with Map.create(spec.map_type, "services", spec.key_size, spec.value_size + 8, 16, spec.flags) as other:
            other.pin(site.maps / "services")
        with contextlib.ExitStack() as stack:
            maps, found = node_differences.open_maps(Pins(site.pins), stack)
        assert {"services", "backends"}.isdisjoint(maps)
        assert {(one.kind, one.where) for one in found} == {("damaged", "services"), ("missing", "backends")}
        assert any("value size 48" in one.actual for one in found)

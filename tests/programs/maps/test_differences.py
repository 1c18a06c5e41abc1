# SPDX-License-Identifier: Apache-2.0
"""What `kbpf verify` says of maps that another process has changed: a row damages one map, and
names each difference that must be found. Nothing else may be, and nothing at all before the damage.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.inspect import differences, node_differences
from kbpf.dataplane.bpf.maps.ids import ID_LIMIT
from kbpf.dataplane.bpf.maps.layout import (
    MAPS,
    META,
    SERVICE_NAME,
    U32,
    U32_PAIR,
    U64,
    ServiceValue,
    pack_service_name,
    pack_source_range,
    pack_target,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.state import contents
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.objects import Algorithm, Cidr, Protocol
from tests.support.plane import Site, at, backends, desired, flush, service, sites

A, B, C = (f"10.244.0.{i}:8080" for i in range(1, 4))
WEB, KEPT, UDP, VIP, TABLE, OTHER = (
    "10.96.0.1:80",
    "10.96.0.2:80",
    "10.96.0.3:53",
    "192.0.2.1:80",
    "10.96.0.4:80",
    "10.96.0.5:80",
)
NODE = "192.0.2.9"
WORLD = desired(
    service("web", f"{WEB} NodePort=0.0.0.0:30080", f"{A} {B}"),
    service("kept", KEPT, f"{A} {C}", affinity_timeout=60),
    service("dns", UDP, A, Protocol.UDP, serving=f"{A} {B}"),
    service("guarded", f"LoadBalancer={VIP}", A, ranges="10.0.0.0/8 192.0.2.0/24"),
    service("maglev", TABLE, f"{A} {B}", algorithm=Algorithm.MAGLEV),
    service("weighted", OTHER, f"{A} {B} {C}", cluster_weights=(1, 2, 3)),
    service("near", "10.96.0.6:80", f"{A} {B}", local=A, internal_local=True),
    service("empty", "10.96.0.7:80"),
    nodes=NODE,
)
LOST = "10.96.0.99:99"
FAR_ID = 4_000


@pytest.fixture(scope="module")
def world(artifact_cache: Path) -> Iterator[tuple[Site, Config]]:
    with sites(artifact_cache) as make:
        site = make()
        plane = site.open()
        plane.apply(WORLD, None)
        flush(plane)
        yield site, plane._config


def compare(site: Site, config: Config, state: DesiredState = WORLD) -> list[str]:
    """A line for each difference of the maps that the agent fills: kind, map and subject."""
    pins = Pins(site.pins)
    with contextlib.ExitStack() as stack:
        maps, damaged = node_differences.open_maps(pins, stack)
        assert not damaged
        findings = differences.compare(contents.read(maps), state, config)
    return [f"{found.kind} {found.where} {found.subject}: {found.desired} / {found.actual}" for _, found in findings]


def key_of(text: str, protocol: Protocol = Protocol.TCP) -> bytes:
    address = at(text, protocol)
    return pack_target(address.address, address.port, address.protocol)


def value_of(site: Site, text: str) -> ServiceValue:
    return ServiceValue.unpack(site.entries("services")[key_of(text)])


def put(site: Site, name: str, key: bytes, value: bytes) -> None:
    with site.pinned(name) as map_:
        map_.update(key, value)


def delete(site: Site, name: str, key: bytes) -> None:
    with site.pinned(name) as map_:
        assert map_.delete(key), "the damage must hit an entry"


def put_frontend(site: Site, text: str, value: ServiceValue) -> None:
    put(site, "services", key_of(text), value.pack(key_of(text)))


def change(text: str, **fields: int) -> Callable[[Site], None]:
    return lambda site: put_frontend(site, text, value_of(site, text)._replace(**fields))


def backend_id(site: Site, text: str, protocol: Protocol = Protocol.TCP) -> bytes:
    (wanted,) = backends(text, protocol)
    raw = pack_target(wanted.address, wanted.port, wanted.protocol)
    return next(key for key, value in site.entries("backends").items() if value == raw)


def slot(site: Site, text: str, index: int) -> bytes:
    return U32_PAIR.pack(value_of(site, text).cluster_set, index)


def table_slot(site: Site, text: str, index: int) -> bytes:
    return U32_PAIR.pack(value_of(site, text).cluster_table, index)


def range_key(site: Site, text: str, cidr: str) -> bytes:
    return pack_source_range(value_of(site, text).id, Cidr.parse(cidr))


def spoil_check_word(site: Site) -> None:
    raw = site.entries("services")[key_of(WEB)]
    put(site, "services", key_of(WEB), raw[:-1] + bytes([raw[-1] ^ 1]))


def flip_port(port: int) -> Callable[[Site], None]:
    def act(site: Site) -> None:
        key = U32.pack(port // 64)
        (word,) = U64.unpack(site.entries("frontend_ports")[key])
        put(site, "frontend_ports", key, U64.pack(word ^ 1 << port % 64))

    return act


def name_of(text: str) -> ServicePortKey:
    return ServicePortKey("default", text, "", Protocol.TCP, 4)


class Row(NamedTuple):
    """A damage, and the beginnings of the lines that must be found."""

    name: str
    damage: Callable[[Site], object]
    found: tuple[str, ...]


ROWS = (
    # services
    Row(
        "frontend removed",
        lambda s: delete(s, "services", key_of(WEB)),
        ("missing services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / ",),
    ),
    Row(
        "only frontend removed",
        lambda s: delete(s, "services", key_of(KEPT)),
        (
            "missing services default/kept TCP IPv4: ClusterIP 10.96.0.2:80/TCP / ",
            "stale backend_slots set",
            "stale set_members set",
            "stale set_members set",
        ),
    ),
    Row(
        "frontend added to a Service",
        lambda s: put_frontend(s, LOST, value_of(s, WEB)),
        ("stale services default/web TCP IPv4:  / 10.96.0.99:99/TCP",),
    ),
    Row(
        "frontend of no Service",
        lambda s: put_frontend(s, LOST, ServiceValue(FAR_ID, 1 << 8, 0, 0, 0, 0, 0)),
        (f"foreign services id {FAR_ID}, not named:  / 10.96.0.99:99/TCP",),
    ),
    Row(
        "frontend with a wrong check word",
        spoil_check_word,
        (
            "damaged services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / 10.96.0.1:80/TCP "
            "with a wrong check word",
        ),
    ),
    Row(
        "frontend of an unknown protocol",
        lambda s: put(s, "services", pack_target(parse_addr("10.96.0.9"), 80, 99), bytes(40)),
        ("damaged services : ",),
    ),
    Row(
        "frontend leads to another Service",
        lambda s: put_frontend(s, WEB, value_of(s, TABLE)),
        (
            "changed services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / 10.96.0.1:80/TCP "
            "leads to default/maglev TCP IPv4",
        ),
    ),
    Row(
        "flags changed",
        change(WEB, flags=1 << 8 | 1),
        (
            "changed services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP with any_endpoints, "
            "cluster_ip / 10.96.0.1:80/TCP has internal_local, cluster_ip",
        ),
    ),
    Row(
        "restriction lifted",
        lambda s: put_frontend(s, VIP, value_of(s, VIP)._replace(flags=value_of(s, VIP).flags & ~8)),
        ("changed services default/guarded TCP IPv4: ",),
    ),
    Row(
        "affinity switched off",
        change(KEPT, affinity_timeout=0),
        ("changed services default/kept TCP IPv4: affinity of 60 s / ",),
    ),
    Row(
        "frontend with an empty set",
        change(WEB, cluster_set=0, cluster_size=0),
        ("missing backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080",),
    ),
    Row(
        "frontend with fewer slots",
        change(WEB, cluster_size=1),
        ("missing backend_slots default/web TCP IPv4: cluster set: 10.244.0.2:8080",),
    ),
    Row(
        "frontend with too many slots",
        change(WEB, cluster_size=3),
        ("damaged backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080, 10.244.0.2:8080 / set",),
    ),
    Row(
        "local set lost",
        change("10.96.0.6:80", local_set=0, local_size=0),
        ("missing backend_slots default/near TCP IPv4: local set: 10.244.0.1:8080", "stale backend_slots set"),
    ),
    # service_names
    Row(
        "name removed",
        lambda s: delete(s, "service_names", U32.pack(value_of(s, WEB).id)),
        ("missing service_names default/web TCP IPv4: a name for id",),
    ),
    Row(
        "name changed",
        lambda s: put(s, "service_names", U32.pack(value_of(s, WEB).id), pack_service_name(name_of("old"))),
        (
            "changed services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / 10.96.0.1:80/TCP "
            "leads to default/old TCP IPv4",
            "changed services default/web TCP IPv4: NodePort 0.0.0.0:30080/TCP / ",
        ),
    ),
    Row(
        "name and frontends removed",
        lambda s: [
            delete(s, "service_names", U32.pack(value_of(s, WEB).id)),
            delete(s, "services", key_of(WEB)),
            delete(s, "services", key_of("0.0.0.0:30080")),
        ],
        (
            "missing services default/web TCP IPv4: NodePort 0.0.0.0:30080/TCP, ClusterIP 10.96.0.1:80/TCP / ",
            "stale backend_slots set",
        ),
    ),
    Row(
        "name added",
        lambda s: put(s, "service_names", U32.pack(FAR_ID), pack_service_name(name_of("old"))),
        (f"stale service_names id {FAR_ID}:  / default/old TCP IPv4", "changed meta"),
    ),
    Row(
        "name of an unknown protocol",
        lambda s: put(s, "service_names", U32.pack(FAR_ID), SERVICE_NAME.pack(b"a", b"b", b"", 99, 4)),
        ("damaged service_names : ",),
    ),
    # backend_slots
    Row(
        "slot removed",
        lambda s: delete(s, "backend_slots", slot(s, WEB, 0)),
        ("damaged backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080",),
    ),
    Row(
        "slot leads to another backend",
        lambda s: put(s, "backend_slots", slot(s, WEB, 0), backend_id(s, C)),
        ("changed backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080 / cluster set: 10.244.0.3:8080",),
    ),
    Row(
        "slot leads to no backend",
        lambda s: put(s, "backend_slots", slot(s, WEB, 0), U32.pack(FAR_ID)),
        (
            f"damaged backends default/web TCP IPv4: cluster set: 10.244.0.1:8080, 10.244.0.2:8080 / "
            f"set %: there is no backend {FAR_ID}",
        ),
    ),
    Row(
        "slot added",
        lambda s: put(s, "backend_slots", slot(s, WEB, 7), backend_id(s, C)),
        (
            "damaged backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080, "
            "10.244.0.2:8080 / set %: it has slot 7, and its frontends use 2",
        ),
    ),
    Row(
        "set added",
        lambda s: put(s, "backend_slots", U32_PAIR.pack(FAR_ID, 0), backend_id(s, A)),
        (f"stale backend_slots set {FAR_ID}:  / 1 slot", "changed meta"),
    ),
    Row(
        "entry of a table removed",
        lambda s: delete(s, "backend_slots", table_slot(s, TABLE, 5)),
        ("damaged backend_slots default/maglev TCP IPv4: cluster set: ",),
    ),
    Row(
        "entry of a table leads to no slot",
        lambda s: put(s, "backend_slots", table_slot(s, TABLE, 5), U32.pack(77)),
        ("damaged backend_slots default/maglev TCP IPv4: cluster set: ",),
    ),
    Row(
        "shares changed",
        lambda s: put(s, "backend_slots", table_slot(s, OTHER, 5), U32.pack(0)),
        (
            "changed backend_slots default/weighted TCP IPv4: cluster set: random, weights 1, 2, 3 / "
            "cluster set: 6 slots of other shares",
        ),
    ),
    # backends
    Row(
        "backend removed",
        lambda s: delete(s, "backends", backend_id(s, A, Protocol.UDP)),
        ("damaged backends default/dns UDP IPv4: cluster set: 10.244.0.1:8080 / set %: there is no backend",),
    ),
    Row(
        "backend removed that only keeps its flows",
        lambda s: delete(s, "backends", backend_id(s, B, Protocol.UDP)),
        ("missing backends : 10.244.0.2:8080 / ",),
    ),
    Row(
        "backend changed",
        lambda s: put(
            s, "backends", backend_id(s, A, Protocol.UDP), pack_target(parse_addr("10.9.9.9"), 53, Protocol.UDP)
        ),
        ("changed backend_slots default/dns UDP IPv4: cluster set: 10.244.0.1:8080 / cluster set: 10.9.9.9:53",),
    ),
    Row(
        "backend added",
        lambda s: put(s, "backends", U32.pack(FAR_ID), pack_target(parse_addr("10.9.9.9"), 53, Protocol.UDP)),
        (f"stale backends backend {FAR_ID}:  / 10.9.9.9:53", "changed meta"),
    ),
    Row(
        "backend of an unknown protocol",
        lambda s: put(s, "backends", U32.pack(FAR_ID), pack_target(parse_addr("10.9.9.9"), 53, 99)),
        ("damaged backends : ",),
    ),
    # set_members
    Row(
        "member removed",
        lambda s: delete(
            s, "set_members", U32_PAIR.pack(value_of(s, KEPT).cluster_set, U32.unpack(backend_id(s, C))[0])
        ),
        ("missing set_members default/kept TCP IPv4: cluster set: 10.244.0.3:8080",),
    ),
    Row(
        "member added",
        lambda s: put(s, "set_members", U32_PAIR.pack(value_of(s, KEPT).cluster_set, FAR_ID), U32.pack(1)),
        (f"stale set_members default/kept TCP IPv4:  / cluster set: backend {FAR_ID}",),
    ),
    # source_ranges
    Row(
        "range removed",
        lambda s: delete(s, "source_ranges", range_key(s, VIP, "10.0.0.0/8")),
        ("missing source_ranges default/guarded TCP IPv4: 10.0.0.0/8 / ",),
    ),
    Row(
        "range added",
        lambda s: put(s, "source_ranges", range_key(s, VIP, "0.0.0.0/0"), U32.pack(1)),
        ("stale source_ranges default/guarded TCP IPv4:  / 0.0.0.0/0",),
    ),
    Row(
        "range of no Service",
        lambda s: put(s, "source_ranges", pack_source_range(FAR_ID, Cidr.parse("10.0.0.0/8")), U32.pack(1)),
        (f"stale source_ranges id {FAR_ID}:  / 10.0.0.0/8",),
    ),
    Row(
        "range of NodePorts",
        lambda s: put(s, "source_ranges", pack_source_range(0, Cidr.parse("10.0.0.0/8")), U32.pack(1)),
        ("stale source_ranges NodePorts:  / 10.0.0.0/8",),
    ),
    Row(
        "member of a set without affinity",
        lambda s: put(s, "set_members", U32_PAIR.pack(value_of(s, WEB).cluster_set, FAR_ID), U32.pack(1)),
        (f"stale set_members set %:  / backend {FAR_ID}",),
    ),
    # values that Service ports share
    Row(
        "node address removed",
        lambda s: delete(s, "node_addresses", parse_addr(NODE)),
        (f"missing node_addresses : {NODE} / ",),
    ),
    Row(
        "node address added",
        lambda s: put(s, "node_addresses", parse_addr("192.0.2.77"), U32.pack(1)),
        ("stale node_addresses :  / 192.0.2.77",),
    ),
    Row(
        "ClusterIP removed",
        lambda s: delete(s, "cluster_ips", parse_addr("10.96.0.1")),
        ("missing cluster_ips : 10.96.0.1 / ",),
    ),
    Row(
        "ClusterIP added",
        lambda s: put(s, "cluster_ips", parse_addr("10.9.9.9"), U32.pack(1)),
        ("stale cluster_ips :  / 10.9.9.9",),
    ),
    Row(
        "port cleared",
        flip_port(53),
        ("missing frontend_ports : port 53: without it no frontend of this port is served / ",),
    ),
    Row("port set", flip_port(443), ("stale frontend_ports :  / 1 port: 443",)),
    # meta
    Row(
        "next ids too low",
        lambda s: put(s, "meta", U32.pack(0), META.pack(1, 1, 1)),
        ("changed meta", "changed meta", "changed meta"),
    ),
    Row(
        "next ids out of range",
        lambda s: put(s, "meta", U32.pack(0), META.pack(ID_LIMIT, ID_LIMIT, ID_LIMIT)),
        ("damaged meta", "damaged meta", "damaged meta"),
    ),
)


def matches(line: str, beginning: str) -> bool:
    """% stands for a number."""
    rest = line
    for piece in beginning.split("%"):
        rest = rest.lstrip("0123456789") if rest is not line else rest
        if not rest.startswith(piece):
            return False
        rest = rest[len(piece) :]
    return True


@contextlib.contextmanager
def restored(site: Site) -> Iterator[None]:
    """Puts all entries back."""
    names = contents.MAPS_READ
    before = {name: site.entries(name) for name in names}
    yield
    for name in names:
        with site.pinned(name) as map_:
            for key in dict(map_.items()).keys() - before[name].keys():
                map_.delete(key)
            for key, value in before[name].items():
                map_.update(key, value)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_damage_is_named(world: tuple[Site, Config], row: Row) -> None:
    site, config = world
    assert compare(site, config) == []
    with restored(site):
        row.damage(site)
        lines = compare(site, config)
    wanted = list(row.found)
    left = [line for line in lines if not any(matches(line, w) for w in wanted)]
    assert not left
    assert len(lines) == len(wanted), "\n".join(lines)
    assert all(any(matches(line, w) for line in lines) for w in wanted), "\n".join(lines)


DAMAGED = ("services", "service_names", "backend_slots", "backends", "set_members", "source_ranges")


def damage_anything(site: Site, rng: random.Random) -> None:
    """Removes, changes, copies or swaps some entries."""
    for name in DAMAGED:
        for _ in range(rng.randint(0, 2)):
            entries = sorted(site.entries(name).items())
            (key, value), (_, other) = rng.choice(entries), rng.choice(entries)
            # The kernel refuses or masks most other keys of a trie.
            if name == "source_ranges" or rng.random() < 0.3:
                delete(site, name, key)
            elif rng.random() < 0.3:
                put(site, name, key, other)
            elif rng.random() < 0.5:
                put(site, name, key, flip_bit(value, rng))
            else:
                put(site, name, flip_bit(key, rng), value)


def flip_bit(raw: bytes, rng: random.Random) -> bytes:
    number = int.from_bytes(raw, "big") ^ 1 << rng.randrange(8 * len(raw))
    return number.to_bytes(len(raw), "big")


@pytest.mark.parametrize("seed", range(20))
def test_a_difference_is_what_an_agent_writes(world: tuple[Site, Config], seed: int) -> None:
    """There are differences exactly if an agent that reads the maps again changes them, and none is
    left then.
    """
    site, config = world
    (plane,) = site._planes
    names = [name for name in contents.MAPS_READ if name != "meta"]
    with restored(site):
        damage_anything(site, random.Random(seed))
        lines, before = compare(site, config), {name: site.entries(name) for name in names}
        plane.invalidate()
        plane.apply(WORLD, None)
        flush(plane)
        after = {name: site.entries(name) for name in names}
        assert bool(lines) == (before != after), "\n".join(lines)
        assert compare(site, config) == []


def test_the_table_damages_every_map() -> None:
    named = {word for row in ROWS for line in row.found for word in line.split()}
    assert named >= {*contents.MAPS_READ}


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(range(3), 2)])
def test_no_difference_after_any_change(artifact_cache: Path, before: int, after: int) -> None:
    states = (desired(), WORLD, desired(service("web", WEB, C), service("new", KEPT, f"{B} {C}", affinity_timeout=5)))
    with sites(artifact_cache) as make:
        site = make()
        plane: BpfPlane = site.open()
        plane.apply(states[before], None)
        plane.apply(states[after], None)
        flush(plane)
        assert compare(site, plane._config, states[after]) == []
        assert bool(compare(site, plane._config, states[before]))


def test_unusable_maps_are_named(artifact_cache: Path) -> None:
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

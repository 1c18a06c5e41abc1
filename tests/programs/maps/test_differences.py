# SPDX-License-Identifier: Apache-2.0
"""What `kbpf verify` says of maps that another process has changed: a row damages one map, and
names each difference that must be found. Nothing else may be, and nothing at all before the damage.
"""

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

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
from kbpf.dataplane.bpf.state import contents
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.objects import Cidr, Protocol
from tests.support.plane import Site, desired, flush, services, sites, split

A, B, C = (f"10.244.0.{i}:8080" for i in range(1, 4))
WEB, KEPT, TABLE, OTHER = (f"10.96.0.{i}:80" for i in (1, 2, 4, 5))
VIP = "192.0.2.1:80"
NODE = "192.0.2.9"
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
        {"A": A, "B": B, "C": C},
    ),
    nodes=NODE,
)
LOST = "10.96.0.99:99"


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


# ---- damages: each is done to a site, whose maps say which ids there are ------------------------

Part = bytes | Callable[[Site], bytes]
Damage = Callable[[Site], object]


def resolve(site: Site, part: Part) -> bytes:
    return part if isinstance(part, bytes) else part(site)


def put(name: str, key: Part, value: Part) -> Damage:
    def damage(site: Site) -> None:
        with site.pinned(name) as map_:
            map_.update(resolve(site, key), resolve(site, value))

    return damage


def delete(name: str, key: Part) -> Damage:
    def damage(site: Site) -> None:
        with site.pinned(name) as map_:
            assert map_.delete(resolve(site, key)), "the damage must hit an entry"

    return damage


def target(text: str, protocol: int = Protocol.TCP) -> bytes:
    return pack_target(*split(text), protocol)


def value_of(site: Site, text: str) -> ServiceValue:
    return ServiceValue.unpack(site.entries("services")[target(text)])


def change(text: str, at: str = "", **fields: int) -> Damage:
    """The frontend, or another one `at` that address, has its value with these fields."""
    key = target(at or text)
    return put("services", key, lambda site: value_of(site, text)._replace(**fields).pack(key))


def service_id(text: str) -> Part:
    return lambda site: U32.pack(value_of(site, text).id)


def backend_id(text: str, protocol: Protocol = Protocol.TCP) -> Callable[[Site], bytes]:
    raw = target(text, protocol)
    return lambda site: next(key for key, value in site.entries("backends").items() if value == raw)


def slot(text: str, index: int) -> Part:
    return lambda site: U32_PAIR.pack(value_of(site, text).cluster_set, index)


def table_slot(text: str, index: int) -> Part:
    return lambda site: U32_PAIR.pack(value_of(site, text).cluster_table, index)


def member(text: str, backend: Part) -> Part:
    return lambda site: U32.pack(value_of(site, text).cluster_set) + resolve(site, backend)


def range_key(cidr: str) -> Part:
    return lambda site: pack_source_range(value_of(site, VIP).id, Cidr.parse(cidr))


def spoil_check_word(site: Site) -> None:
    raw = site.entries("services")[target(WEB)]
    put("services", target(WEB), raw[:-1] + bytes([raw[-1] ^ 1]))(site)


def flip_port(port: int) -> Damage:
    def damage(site: Site) -> None:
        key = U32.pack(port // 64)
        (word,) = U64.unpack(site.entries("frontend_ports")[key])
        put("frontend_ports", key, U64.pack(word ^ 1 << port % 64))(site)

    return damage


FAR, ONE = U32.pack(4_000), U32.pack(1)
OLD = pack_service_name(ServicePortKey("default", "old", "", Protocol.TCP, 4))
ELSEWHERE = target("10.9.9.9:53", Protocol.UDP)

DAMAGES: dict[str, tuple[Damage, str]] = {
    # services
    "frontend removed": (
        delete("services", target(WEB)),
        "missing services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / ",
    ),
    "only frontend removed": (
        delete("services", target(KEPT)),
        """missing services default/kept TCP IPv4: ClusterIP 10.96.0.2:80/TCP /
        stale backend_slots set
        stale set_members set
        stale set_members set""",
    ),
    "frontend added to a Service": (
        change(WEB, at=LOST),
        "stale services default/web TCP IPv4:  / 10.96.0.99:99/TCP",
    ),
    "frontend of no Service": (
        put("services", target(LOST), ServiceValue(4_000, 1 << 8, 0, 0, 0, 0, 0).pack(target(LOST))),
        "foreign services id 4000, not named:  / 10.96.0.99:99/TCP",
    ),
    "frontend with a wrong check word": (
        spoil_check_word,
        "damaged services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / 10.96.0.1:80/TCP with a wrong check word",
    ),
    "frontend of an unknown protocol": (put("services", target("10.96.0.9:80", 99), bytes(40)), "damaged services : "),
    "frontend leads to another Service": (
        change(TABLE, at=WEB),
        "changed services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / 10.96.0.1:80/TCP "
        "leads to default/maglev TCP IPv4",
    ),
    "flags changed": (
        change(WEB, flags=1 << 8 | 1),
        "changed services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP with any_endpoints, cluster_ip / "
        "10.96.0.1:80/TCP has internal_local, cluster_ip",
    ),
    "restriction lifted": (
        lambda site: change(VIP, flags=value_of(site, VIP).flags & ~8)(site),
        "changed services default/guarded TCP IPv4: ",
    ),
    "affinity switched off": (
        change(KEPT, affinity_timeout=0),
        "changed services default/kept TCP IPv4: affinity of 60 s / ",
    ),
    "frontend with an empty set": (
        change(WEB, cluster_set=0, cluster_size=0),
        "missing backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080",
    ),
    "frontend with fewer slots": (
        change(WEB, cluster_size=1),
        "missing backend_slots default/web TCP IPv4: cluster set: 10.244.0.2:8080",
    ),
    "frontend with too many slots": (
        change(WEB, cluster_size=3),
        "damaged backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080, 10.244.0.2:8080 / set",
    ),
    "local set lost": (
        change("10.96.0.6:80", local_set=0, local_size=0),
        """missing backend_slots default/near TCP IPv4: local set: 10.244.0.1:8080
        stale backend_slots set""",
    ),
    # service_names
    "name removed": (
        delete("service_names", service_id(WEB)),
        "missing service_names default/web TCP IPv4: a name for id",
    ),
    "name changed": (
        put("service_names", service_id(WEB), OLD),
        """changed services default/web TCP IPv4: ClusterIP 10.96.0.1:80/TCP / 10.96.0.1:80/TCP leads to default/old TCP
        changed services default/web TCP IPv4: NodePort 0.0.0.0:30080/TCP / """,
    ),
    "name added": (
        put("service_names", FAR, OLD),
        """stale service_names id 4000:  / default/old TCP IPv4
        changed meta""",
    ),
    "name of an unknown protocol": (
        put("service_names", FAR, SERVICE_NAME.pack(b"a", b"b", b"", 99, 4)),
        "damaged service_names : ",
    ),
    # backend_slots
    "slot removed": (
        delete("backend_slots", slot(WEB, 0)),
        "damaged backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080",
    ),
    "slot leads to another backend": (
        put("backend_slots", slot(WEB, 0), backend_id(C)),
        "changed backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080 / cluster set: 10.244.0.3:8080",
    ),
    "slot leads to no backend": (
        put("backend_slots", slot(WEB, 0), FAR),
        "damaged backends default/web TCP IPv4: cluster set: 10.244.0.1:8080, 10.244.0.2:8080 / "
        "set %: there is no backend 4000",
    ),
    "slot added": (
        put("backend_slots", slot(WEB, 7), backend_id(C)),
        "damaged backend_slots default/web TCP IPv4: cluster set: 10.244.0.1:8080, 10.244.0.2:8080 / "
        "set %: it has slot 7, and its frontends use 2",
    ),
    "set added": (
        put("backend_slots", FAR + bytes(4), backend_id(A)),
        """stale backend_slots set 4000:  / 1 slot
        changed meta""",
    ),
    "entry of a table removed": (
        delete("backend_slots", table_slot(TABLE, 5)),
        "damaged backend_slots default/maglev TCP IPv4: cluster set: ",
    ),
    "entry of a table leads to no slot": (
        put("backend_slots", table_slot(TABLE, 5), U32.pack(77)),
        "damaged backend_slots default/maglev TCP IPv4: cluster set: ",
    ),
    "shares changed": (
        put("backend_slots", table_slot(OTHER, 5), bytes(4)),
        "changed backend_slots default/weighted TCP IPv4: cluster set: random, weights 1, 2, 3 / "
        "cluster set: 6 slots of other shares",
    ),
    # backends
    "backend removed": (
        delete("backends", backend_id(A, Protocol.UDP)),
        "damaged backends default/dns UDP IPv4: cluster set: 10.244.0.1:8080 / set %: there is no backend",
    ),
    "backend removed that only keeps its flows": (
        delete("backends", backend_id(B, Protocol.UDP)),
        "missing backends : 10.244.0.2:8080 / ",
    ),
    "backend changed": (
        put("backends", backend_id(A, Protocol.UDP), ELSEWHERE),
        "changed backend_slots default/dns UDP IPv4: cluster set: 10.244.0.1:8080 / cluster set: 10.9.9.9:53",
    ),
    "backend added": (
        put("backends", FAR, ELSEWHERE),
        """stale backends backend 4000:  / 10.9.9.9:53
        changed meta""",
    ),
    # set_members
    "member removed": (
        delete("set_members", member(KEPT, backend_id(C))),
        "missing set_members default/kept TCP IPv4: cluster set: 10.244.0.3:8080",
    ),
    "member added": (
        put("set_members", member(KEPT, FAR), ONE),
        "stale set_members default/kept TCP IPv4:  / cluster set: backend 4000",
    ),
    # source_ranges
    "range removed": (
        delete("source_ranges", range_key("10.0.0.0/8")),
        "missing source_ranges default/guarded TCP IPv4: 10.0.0.0/8 / ",
    ),
    "range added": (
        put("source_ranges", range_key("0.0.0.0/0"), ONE),
        "stale source_ranges default/guarded TCP IPv4:  / 0.0.0.0/0",
    ),
    "range of no Service": (
        put("source_ranges", pack_source_range(4_000, Cidr.parse("10.0.0.0/8")), ONE),
        "stale source_ranges id 4000:  / 10.0.0.0/8",
    ),
    "range of NodePorts": (
        put("source_ranges", pack_source_range(0, Cidr.parse("10.0.0.0/8")), ONE),
        "stale source_ranges NodePorts:  / 10.0.0.0/8",
    ),
    # values that Service ports share
    "node address removed": (delete("node_addresses", parse_addr(NODE)), f"missing node_addresses : {NODE} / "),
    "node address added": (
        put("node_addresses", parse_addr("192.0.2.77"), ONE),
        "stale node_addresses :  / 192.0.2.77",
    ),
    "ClusterIP removed": (delete("cluster_ips", parse_addr("10.96.0.1")), "missing cluster_ips : 10.96.0.1 / "),
    "ClusterIP added": (put("cluster_ips", parse_addr("10.9.9.9"), ONE), "stale cluster_ips :  / 10.9.9.9"),
    "port cleared": (
        flip_port(53),
        "missing frontend_ports : port 53: without it no frontend of this port is served / ",
    ),
    "port set": (flip_port(443), "stale frontend_ports :  / 1 port: 443"),
    # meta
    "next ids too low": (put("meta", bytes(4), META.pack(1, 1, 1)), "changed meta\nchanged meta\nchanged meta"),
    "next ids out of range": (
        put("meta", bytes(4), META.pack(ID_LIMIT, ID_LIMIT, ID_LIMIT)),
        "damaged meta\ndamaged meta\ndamaged meta",
    ),
}
"""A damage, and the beginnings of the lines that must be found; % stands for a number."""


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


@pytest.mark.parametrize(("damage", "found"), DAMAGES.values(), ids=DAMAGES)
def test_each_damage_is_named(world: tuple[Site, Config], damage: Damage, found: str):
    site, config = world
    assert compare(site, config) == []
    with restored(site):
        damage(site)
        lines = compare(site, config)
    wanted = [re.escape(line.strip()).replace("%", r"\d+") for line in found.splitlines()]
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
                delete(name, key)(site)
            elif rng.random() < 0.3:
                put(name, key, other)(site)
            elif rng.random() < 0.5:
                put(name, key, flip_bit(value, rng))(site)
            else:
                put(name, flip_bit(key, rng), value)(site)


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
    with restored(site):
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

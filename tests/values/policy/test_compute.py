# SPDX-License-Identifier: Apache-2.0
"""The desired state of Services, and which keys an event changes; what clients get: test_dials.py."""

import pytest
from msgspec.structs import replace

from kbpf.model.address import Addr, parse_addr
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import ServiceState
from kbpf.model.events import Event
from kbpf.model.objects import (
    Algorithm,
    Endpoint,
    EndpointSlice,
    Node,
    Protocol,
    Service,
    ServiceName,
    ServicePort,
    SlicePort,
    Weights,
)
from kbpf.policy.compute import DesiredStateBuilder, compute_desired_state, compute_service_states
from kbpf.policy.store import ObjectStore
from tests.values.policy.services import LOCAL, RANGE, addrs, cidrs, end, gone, piece, service, up

ME = Node("me", addrs("10.0.0.1"), "a")
WEB = service("web external=1.1.1.1 vip=9.9.9.9 node-port=30080")
PLAIN = service("plain ClusterIP ip=10.96.0.9")
(PORT,) = WEB.ports


def test_source_ranges_restrict_only_vips():
    (state,) = compute_service_states(replace(WEB, source_ranges=RANGE), (), ME)
    assert [str(f.at) for f in state.frontends if f.restricted] == ["9.9.9.9:80/TCP"]


def test_one_state_per_port_and_family():
    ports = (PORT, ServicePort("dns", Protocol.UDP, 53))
    dual = replace(WEB, cluster_ips=addrs("10.96.0.1", "fd00::1"), ports=ports)
    states = tuple(compute_service_states(dual, [piece("1@me")], ME))
    assert [str(state.key) for state in states] == [
        "ns/web:http TCP IPv4",
        "ns/web:dns UDP IPv4",
        "ns/web:http TCP IPv6",
        "ns/web:dns UDP IPv6",
    ]
    assert [len(state.cluster) for state in states] == [1, 0, 0, 0]


def test_state_carries_the_policies_and_affinity_of_its_service():
    web = service("web node-port=30080 internal-local external-local affinity=60")
    (state,) = compute_service_states(web, [piece("1@me 4/draining@you")], ME)
    assert (state.internal_local, state.external_local, state.affinity_timeout) == (True, True, 60)
    assert [b.address[-1] for b in state.serving] == [1, 4]
    assert state.any_endpoints


def test_annotations_are_used_in_a_full_computation_and_in_an_update():
    web = replace(WEB, algorithm=Algorithm.MAGLEV, weights=Weights(((end(1).address, 3),)))
    whole = compute_desired_state([web], [piece("1 2")], ME, LOCAL, Config())
    kept = Harness(up(ME), up(web), up(piece("1 2")))
    for state in (*whole.services.values(), kept.state("web")):
        assert (state.algorithm, state.cluster_weights) == (Algorithm.MAGLEV, (3, 1))
        assert len(state.cluster) == 2


def test_of_two_ports_of_one_name_the_last_is_used():
    twins = replace(PLAIN, ports=(PORT, replace(PORT, port=81)))
    (state,) = compute_service_states(twins, (), ME)
    assert state.frontends[0].at.port == 81


class Harness:
    """An ObjectStore and a DesiredStateBuilder; feed() returns the changed keys as text."""

    def __init__(self, *events: Event, config: Config | None = None) -> None:
        self.world, self.desired = ObjectStore("me"), DesiredStateBuilder()
        self.config = config or Config()
        self.local: tuple[Addr, ...] = LOCAL
        self.feed(*events)

    def feed(self, *events: Event) -> set[str]:
        touched = self.world.apply(events)
        changed = self.desired.update(self.world, touched, self.local, self.config)
        return {str(key) for key in changed}

    def state(self, name: str) -> ServiceState:
        (found,) = (s for key, s in self.desired.state.services.items() if key.name == name)
        return found


WEB_KEY, PLAIN_KEY = "ns/web:http TCP IPv4", "ns/plain:http TCP IPv4"


def test_only_what_changed_is_reported():
    kept = Harness(up(ME), up(WEB), up(PLAIN), up(piece("1@me")))
    before = kept.state("plain")
    assert kept.feed() == set()
    assert kept.feed(up(piece("1@me 2@you"))) == {WEB_KEY}
    assert kept.feed(up(replace(piece("1@me 2@you"), name="copy"))) == {WEB_KEY}, "a slice more"
    assert kept.feed(up(replace(piece("1@me"), service="plain"))) == {WEB_KEY, PLAIN_KEY}
    assert before.cluster == ()


def test_equal_state_is_not_a_change_and_keeps_the_old_object():
    kept = Harness(up(WEB), up(piece("1@me")))
    before = kept.state("web")
    assert kept.feed(up(replace(ME, zone="elsewhere"))) == set(), "it is computed again"
    assert kept.state("web") is before


def test_what_slices_say_of_endpoints_is_a_change_of_their_service():
    """It decides nothing here, but `kbpf inspect` shows it."""
    kept = Harness(up(WEB), up(piece("1@me")))
    before = kept.state("web")
    moved = piece("1@me,elsewhere")
    assert kept.feed(up(moved)) == {WEB_KEY}
    after = kept.state("web")
    assert (before.slices, after.slices) == ((piece("1@me"),), (moved,))
    assert replace(after, slices=before.slices) == before


THIEF = service("evil/thief ClusterIP ip=10.96.0.66 node-port=30080 external=10.96.0.9 created=old")
THIEF_KEY = "evil/thief:http TCP IPv4"


def test_conflict_over_an_address_changes_winner_and_loser():
    kept = Harness(up(THIEF))
    asked = kept.state("thief")
    assert kept.feed(up(PLAIN)) == {PLAIN_KEY, THIEF_KEY}
    assert kept.state("thief") != asked
    assert kept.feed(gone(PLAIN)) == {PLAIN_KEY, THIEF_KEY}
    assert kept.state("thief") == asked
    assert kept.feed(up(PLAIN), gone(THIEF)) == {PLAIN_KEY, THIEF_KEY}
    assert kept.feed(up(replace(PLAIN, affinity_timeout=5))) == {PLAIN_KEY}


def test_recreated_service_loses_to_an_older_one():
    one = service("plain ip=10.96.0.9 vip=9.9.9.9 created=old")
    two = service("web vip=9.9.9.9 created=new")
    kept = Harness(up(one), up(two))
    assert kept.state("plain").lost == ()
    assert kept.feed(gone(one), up(replace(one, creation_timestamp=""))) == {PLAIN_KEY, WEB_KEY}
    assert [str(who) for _, who in kept.state("plain").lost] == ["ns/web"]
    assert kept.state("web").lost == ()


def test_zone_change_recomputes_services_with_hints():
    kept = Harness(up(ME), up(WEB), up(PLAIN), up(piece("1>a 2>b")), up(piece("3", service="plain")))
    assert [b.address[-1] for b in kept.state("web").cluster] == [1]
    assert kept.feed(up(replace(ME, zone="b"))) == {WEB_KEY}
    assert [b.address[-1] for b in kept.state("web").cluster] == [2]
    assert kept.feed(gone(ME)) == set()
    assert kept.feed(up(replace(ME, zone=""))) == {WEB_KEY}
    assert [b.address[-1] for b in kept.state("web").cluster] == [1, 2]


def test_new_node_addresses_change_no_service():
    kept = Harness(up(ME), up(WEB))
    assert kept.desired.state.node_addresses == addrs("10.0.0.1")
    assert kept.feed(up(replace(ME, addresses=addrs("10.0.0.2")))) == set()
    assert kept.desired.state.node_addresses == addrs("10.0.0.2")


def test_new_pod_networks_of_the_node_change_no_service():
    pod_networks = cidrs("10.1.0.0/24")
    kept = Harness(up(ME), up(WEB), config=Config(detect_local_mode=LocalMode.NODE_CIDR))
    assert kept.desired.state.local_networks == ()
    before = kept.desired.node_state
    assert kept.feed(up(replace(ME, pod_cidrs=pod_networks))) == set()
    assert kept.desired.state.local_networks == pod_networks
    assert kept.desired.node_state != before


def test_local_addresses_are_read_at_every_update():
    kept = Harness(up(WEB))
    assert kept.desired.state.node_addresses == addrs("10.0.0.1", "10.0.0.2", "fd00::2")
    kept.local = addrs("10.0.0.7")
    assert kept.feed() == set()
    assert kept.desired.state.node_addresses == addrs("10.0.0.7")


class CountingStore(ObjectStore):
    """Counts the Services that are looked up, and fails if all names are listed."""

    asked = 0

    def service_names(self):
        raise AssertionError("an update must cost what was touched")

    def service(self, name: ServiceName) -> Service | None:
        self.asked += 1
        return super().service(name)


def test_update_looks_up_only_touched_services():
    world, desired = CountingStore("me"), DesiredStateBuilder()
    many = [replace(PLAIN, name=f"s{n}", cluster_ips=addrs(f"10.96.1.{n}")) for n in range(100)]
    desired.update(world, world.apply(map(up, many)), LOCAL, Config())
    world.asked = 0
    touched = world.apply([up(piece("1@me", service="s7"))])
    (changed,) = desired.update(world, touched, LOCAL, Config())
    assert (changed.name, world.asked) == ("s7", 1)


@pytest.mark.parametrize(
    ("addresses", "endpoints", "served"),
    [(1_024, 0, 262_144 // 1_026), (0, 1_000, 1_048_576 // 1_000), (0, 10, 1_100)],
    ids=["ports times addresses", "ports times endpoints", "many ports alone"],
)
def test_one_service_is_limited_to_what_the_maps_hold(addresses: int, endpoints: int, served: int):
    """The product of ports times addresses, or times endpoints, is limited.

    Ports beyond the limit are refused with a reason and have neither frontends nor backends.
    """
    listed = tuple(parse_addr(f"192.0.{i >> 8}.{i & 255}") for i in range(addresses))
    ends = tuple(Endpoint(parse_addr(f"10.1.{i >> 8}.{i & 255}")) for i in range(endpoints))
    names = [f"p{i}" for i in range(1_100)]
    ports = tuple(ServicePort(name, Protocol.TCP, i + 1) for i, name in enumerate(names))
    at = tuple(SlicePort(name, Protocol.TCP, 8080) for name in names)
    large = Service("ns", "big", "ClusterIP", addrs("10.96.0.9"), ports, external_ips=listed)
    states = list(compute_service_states(large, [EndpointSlice("ns", "s", "big", 4, ends, at)], ME))
    assert [state.key.port for state in states] == names
    for number, state in enumerate(states):
        if number < served:
            assert (len(state.frontends), len(state.cluster)) == (1 + addresses, endpoints)
            assert state.refused == ()
            continue
        assert (state.frontends, state.cluster, state.serving) == ((), (), ())
        ((front, why),) = state.refused
        assert str(front) == f"10.96.0.9:{number + 1}/TCP"
        assert "ports times endpoints or addresses exceed the limits of the maps" in why

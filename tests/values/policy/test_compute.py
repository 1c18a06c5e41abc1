# SPDX-License-Identifier: Apache-2.0
"""The desired state of Services, where test_any_order.py has no row for it: there any events in any order end in the
state of the final objects, and exactly what differs is reported as changed.
"""

import pytest
from msgspec.structs import replace

from kbpf.model.address import Addr, parse_addr
from kbpf.model.config import Config, LocalMode, MapSizes
from kbpf.model.desired import ServiceState
from kbpf.model.events import Event
from kbpf.model.objects import (
    Endpoint,
    EndpointSlice,
    Node,
    Protocol,
    Service,
    ServiceName,
    ServicePort,
    SlicePort,
)
from kbpf.policy import compute
from kbpf.policy.compute import DesiredStateBuilder, compute_service_states
from kbpf.policy.store import ObjectStore
from tests.values.policy.services import LOCAL, addrs, cidrs, piece, service, up

ME = Node("me", addrs("10.0.0.1"), "a")
WEB = service("web external=1.1.1.1 vip=9.9.9.9 node-port=30080")
PLAIN = service("plain ClusterIP ip=10.96.0.9")
(PORT,) = WEB.ports


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


WEB_KEY = "ns/web:http TCP IPv4"


def test_what_slices_say_of_endpoints_is_a_change_of_their_service():
    """It decides nothing here, but `kbpf inspect` shows it."""
    kept = Harness(up(WEB), up(piece("1@me")))
    before = kept.state("web")
    moved = piece("1@me,elsewhere")
    assert kept.feed(up(moved)) == {WEB_KEY}
    after = kept.state("web")
    assert (before.slices, after.slices) == ((piece("1@me"),), (moved,))
    assert replace(after, slices=before.slices) == before


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
    [(30, 0, 10_000 // 32), (0, 100, 20_000 // 100), (0, 10, 1_100)],
    ids=["ports times addresses", "ports times endpoints", "many ports alone"],
)
def test_one_service_is_limited_to_what_the_maps_hold(addresses, endpoints, served, monkeypatch):
    """The product of ports times addresses, or times endpoints, is limited.

    Ports beyond the limit are refused with a reason and have neither frontends nor backends.
    """
    monkeypatch.setattr(compute, "_service_limits", lambda _: MapSizes(frontends=10_000, backends=20_000))
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


def test_a_service_may_fill_the_maps_but_smaller_ones_than_by_default_show_in_the_maps():
    limits = compute._service_limits(MapSizes(frontends=1, backends=2_000_000))
    assert (limits.frontends, limits.backends) == (262_144, 2_000_000)

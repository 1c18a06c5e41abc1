# SPDX-License-Identifier: Apache-2.0
"""The desired state: the outcome of each dial, and which keys an event changes."""

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from kbpf.model.address import Addr, parse_addr
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import DesiredState, ServiceState
from kbpf.model.events import Event
from kbpf.model.objects import (
    Algorithm,
    Cidr,
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
from tests.values.policy.services import LOCAL, NEW, OLD, RANGE, addrs, end, gone, piece, up

ME = Node("me", addrs("10.0.0.1"), "a")

PORT = ServicePort("http", Protocol.TCP, 80, 30080)

POD_NETWORK = Cidr(parse_addr("10.1.0.0"), 120)


WEB = Service(
    "ns", "web", "LoadBalancer", addrs("10.96.0.1"), (PORT,), external_ips=addrs("1.1.1.1"), lb_vips=addrs("9.9.9.9")
)
INTERNAL = replace(WEB, internal_local=True)
EXTERNAL = replace(WEB, external_local=True)
PLAIN = Service("ns", "plain", "ClusterIP", addrs("10.96.0.9"), (replace(PORT, node_port=0),))


READY_HERE, READY_THERE = end(1, node="me"), end(2, node="you")
DRAINING_HERE = end(3, node="me", ready=False, terminating=True)
DRAINING_THERE = end(4, node="you", ready=False, terminating=True)
DOWN = end(5, ready=False, serving=False)


class Dial(NamedTuple):
    """A client ("pod", "host" or "outside") that dials `to`, and the answer.

    The answer is the last bytes of the backends' addresses, or "refuse", "drop" or "pass".
    """

    name: str
    service: Service
    ends: tuple[Endpoint, ...]
    client: str
    to: str
    answer: tuple[int, ...] | str


OUTSIDE = ("9.9.9.9:80/TCP", "1.1.1.1:80/TCP", "0.0.0.0:30080/TCP")
OWN = "10.96.0.1:80/TCP"


def dials_outside(name: str, *rest) -> list[Dial]:
    """One row each for the LB VIP, the ExternalIP and the NodePort of the Service."""
    service, ends, client, answer = rest
    kinds = ("LB VIP", "ExternalIP", "NodePort")
    return [Dial(f"{kind}, {name}", service, ends, client, to, answer) for kind, to in zip(kinds, OUTSIDE, strict=True)]


DIALS = [
    Dial("ClusterIP, no endpoints: refuse", WEB, (), "pod", OWN, "refuse"),
    Dial("ClusterIP, none usable: refuse", WEB, (DOWN,), "pod", OWN, "refuse"),
    Dial("ClusterIP, usable ones: any of them", WEB, (READY_HERE, READY_THERE), "pod", OWN, (1, 2)),
    Dial("ClusterIP, only draining ones", WEB, (DRAINING_THERE,), "pod", OWN, (4,)),
    Dial("ClusterIP, internal Local: the local ones", INTERNAL, (READY_HERE, READY_THERE), "pod", OWN, (1,)),
    Dial("ClusterIP, internal Local, none local, some elsewhere: drop", INTERNAL, (READY_THERE,), "pod", OWN, "drop"),
    Dial(
        "ClusterIP, internal Local, none local, draining elsewhere: drop",
        INTERNAL,
        (DRAINING_THERE,),
        "pod",
        OWN,
        "drop",
    ),
    Dial("ClusterIP, internal Local, none usable anywhere: refuse", INTERNAL, (DOWN,), "pod", OWN, "refuse"),
    Dial("ClusterIP, internal Local, a draining one here", INTERNAL, (DRAINING_HERE, READY_THERE), "pod", OWN, (3,)),
    Dial("ClusterIP, external Local does not apply", EXTERNAL, (READY_HERE, READY_THERE), "pod", OWN, (1, 2)),
    Dial("ClusterIP, unknown port: not ours", WEB, (READY_HERE,), "pod", "10.96.0.1:81/TCP", "pass"),
    Dial("ClusterIP, other protocol: not ours", WEB, (READY_HERE,), "pod", "10.96.0.1:80/UDP", "pass"),
    Dial(
        "an LB address with ipMode Proxy is not a VIP: not ours",
        replace(WEB, lb_vips=()),
        (READY_HERE,),
        "pod",
        OUTSIDE[0],
        "pass",
    ),
    *dials_outside("no endpoints: refuse", WEB, (), "outside", "refuse"),
    *dials_outside("none usable: refuse", EXTERNAL, (DOWN,), "outside", "refuse"),
    *dials_outside("usable ones", WEB, (READY_HERE, READY_THERE), "outside", (1, 2)),
    *dials_outside("internal Local does not apply", INTERNAL, (READY_HERE, READY_THERE), "outside", (1, 2)),
    *dials_outside("external Local: local ones", EXTERNAL, (READY_HERE, READY_THERE), "outside", (1,)),
    *dials_outside("external Local, a draining one here", EXTERNAL, (DRAINING_HERE, READY_THERE), "outside", (3,)),
    *dials_outside("external Local, none local, client outside: drop", EXTERNAL, (READY_THERE,), "outside", "drop"),
    *dials_outside(
        "external Local, none local, draining elsewhere: drop", EXTERNAL, (DRAINING_THERE,), "outside", "drop"
    ),
    *dials_outside(
        "external Local, pod on this node: short circuit", EXTERNAL, (READY_HERE, READY_THERE), "pod", (1, 2)
    ),
    *dials_outside("external Local, none local, this host: short circuit", EXTERNAL, (READY_THERE,), "host", (2,)),
]


def answer(state: DesiredState, client: str, to: str) -> tuple[int, ...] | str:
    """What a data plane does with a dial, given this state: a model in a few lines."""
    for service in state.services.values():
        kinds = {str(f.at): f.kind for f in service.frontends}
        if to in kinds:
            internal = kinds[to] == "ClusterIP"
            outside = client == "outside" and not internal and service.external_local
            local = service.internal_local if internal else outside
            backends = service.local if local else service.cluster
            empty = "drop" if service.any_endpoints else "refuse"
            return tuple(b.address[-1] for b in backends) or empty
    return "pass"


@pytest.mark.parametrize("dial", DIALS, ids=lambda dial: dial.name)
def test_the_answer_to_a_dial(dial: Dial):
    state = compute_desired_state([dial.service], [piece(*dial.ends)], ME, LOCAL, Config())
    assert answer(state, dial.client, dial.to) == dial.answer


def test_source_ranges_restrict_only_vips():
    (state,) = compute_service_states(replace(WEB, source_ranges=RANGE), (), ME)
    assert [str(f.at) for f in state.frontends if f.restricted] == ["9.9.9.9:80/TCP"]


def test_one_state_per_port_and_family():
    ports = (PORT, ServicePort("dns", Protocol.UDP, 53))
    dual = replace(WEB, cluster_ips=addrs("10.96.0.1", "fd00::1"), ports=ports)
    states = tuple(compute_service_states(dual, [piece(READY_HERE)], ME))
    assert [str(state.key) for state in states] == [
        "ns/web:http TCP IPv4",
        "ns/web:dns UDP IPv4",
        "ns/web:http TCP IPv6",
        "ns/web:dns UDP IPv6",
    ]
    assert [len(state.cluster) for state in states] == [1, 0, 0, 0]


def test_state_carries_the_policies_and_affinity_of_its_service():
    service = replace(EXTERNAL, internal_local=True, affinity_timeout=60)
    (state,) = compute_service_states(service, [piece(READY_HERE, DRAINING_THERE)], ME)
    assert (state.internal_local, state.external_local, state.affinity_timeout) == (True, True, 60)
    assert [b.address[-1] for b in state.serving] == [1, 4]
    assert state.any_endpoints


def test_annotations_are_used_in_a_full_computation_and_in_an_update():
    first, second = end(1), end(2)
    service = replace(WEB, algorithm=Algorithm.MAGLEV, weights=Weights(((first.address, 3),)))
    config = Config("me")
    whole = compute_desired_state([service], [piece(first, second)], ME, (), config)
    world, kept = ObjectStore("me"), DesiredStateBuilder()
    kept.update(world, world.apply([up(ME), up(service), up(piece(first, second))]), (), config)
    for state in (*whole.services.values(), *kept.state.services.values()):
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
    kept = Harness(up(ME), up(WEB), up(PLAIN), up(piece(READY_HERE)))
    before = kept.state("plain")
    assert kept.feed() == set()
    assert kept.feed(up(piece(READY_HERE, READY_THERE))) == {WEB_KEY}
    assert kept.feed(up(replace(piece(READY_HERE, READY_THERE), name="copy"))) == {WEB_KEY}, "a slice more"
    assert kept.feed(up(replace(piece(READY_HERE), service="plain"))) == {WEB_KEY, PLAIN_KEY}
    assert before.cluster == ()


def test_equal_state_is_not_a_change_and_keeps_the_old_object():
    kept = Harness(up(WEB), up(piece(READY_HERE)))
    before = kept.state("web")
    assert kept.feed(up(replace(ME, zone="elsewhere"))) == set(), "it is computed again"
    assert kept.state("web") is before


def test_what_slices_say_of_endpoints_is_a_change_of_their_service():
    """It decides nothing here, but `kbpf inspect` shows it."""
    kept = Harness(up(WEB), up(piece(READY_HERE)))
    before = kept.state("web")
    moved = piece(replace(READY_HERE, zone="elsewhere"))
    assert kept.feed(up(moved)) == {WEB_KEY}
    after = kept.state("web")
    assert (before.slices, after.slices) == ((piece(READY_HERE),), (moved,))
    assert replace(after, slices=before.slices) == before


def test_deleted_service_removes_its_keys():
    kept = Harness(up(WEB), up(PLAIN), up(piece(READY_HERE)))
    assert kept.feed(gone(WEB)) == {WEB_KEY}
    assert {key.name for key in kept.desired.state.services} == {"plain"}
    assert kept.feed(gone(WEB)) == set()
    assert kept.feed(gone(PLAIN)) == {PLAIN_KEY}
    assert kept.desired.state.services == {}


def test_recreated_service_has_its_slices_again():
    kept = Harness(up(WEB), up(piece(READY_HERE)))
    before = kept.state("web")
    kept.feed(gone(WEB))
    assert kept.feed(up(WEB)) == {WEB_KEY}
    assert kept.state("web") == before


def test_removed_port_removes_its_key():
    kept = Harness(up(replace(PLAIN, ports=(*PLAIN.ports, ServicePort("b", Protocol.TCP, 81)))))
    assert kept.feed(up(PLAIN)) == {"ns/plain:b TCP IPv4"}


THIEF = Service(
    "evil", "thief", "ClusterIP", addrs("10.96.0.66"), (PORT,), external_ips=addrs("10.96.0.9"), creation_timestamp=OLD
)
THIEF_KEY = "evil/thief:http TCP IPv4"


def test_external_ip_never_wins_over_a_cluster_ip():
    for events in ((up(THIEF), up(PLAIN)), (up(PLAIN), up(THIEF))):
        kept = Harness(*events)
        assert kept.state("plain").lost == ()
        assert [(str(at), why) for at, why in kept.state("thief").refused] == [
            ("10.96.0.9:80/TCP", "it is the ClusterIP of another Service")
        ]
        assert "10.96.0.9:80/TCP" not in {str(f.at) for f in kept.state("thief").frontends}


def test_conflict_over_an_address_changes_winner_and_loser():
    kept = Harness(up(THIEF))
    asked = kept.state("thief")
    assert kept.feed(up(PLAIN)) == {PLAIN_KEY, THIEF_KEY}
    assert kept.state("thief") != asked
    assert kept.feed(gone(PLAIN)) == {PLAIN_KEY, THIEF_KEY}
    assert kept.state("thief") == asked
    assert kept.feed(up(PLAIN), gone(THIEF)) == {PLAIN_KEY, THIEF_KEY}
    assert kept.feed(up(replace(PLAIN, affinity_timeout=5))) == {PLAIN_KEY}


def test_loser_of_a_conflict_that_changes_stays_the_loser():
    kept = Harness(up(THIEF), up(PLAIN))
    assert kept.feed(up(replace(THIEF, affinity_timeout=5))) == {THIEF_KEY}
    assert [str(at) for at, _ in kept.state("thief").refused] == ["10.96.0.9:80/TCP"]
    assert kept.feed(up(replace(THIEF, external_ips=()))) == {THIEF_KEY}
    assert kept.state("thief").refused == ()


def test_withdrawn_claim_leaves_no_conflict():
    kept = Harness(up(THIEF), up(PLAIN))
    kept.feed(up(replace(THIEF, external_ips=())))
    alone = kept.state("thief")
    rival = replace(PLAIN, name="rival", cluster_ips=addrs("10.96.0.77"), ports=(PORT,))
    kept.feed(up(rival))
    assert kept.state("thief") == alone
    assert [str(at) for at, _ in kept.state("rival").lost] == ["0.0.0.0:30080/TCP"]


def test_recreated_service_loses_to_an_older_one():
    vip = addrs("9.9.9.9")
    one = replace(PLAIN, lb_vips=vip, creation_timestamp=OLD)
    two = replace(WEB, creation_timestamp=NEW, external_ips=())
    kept = Harness(up(one), up(two))
    assert kept.state("plain").lost == ()
    assert kept.feed(gone(one), up(replace(one, creation_timestamp=""))) == {PLAIN_KEY, WEB_KEY}
    assert [str(who) for _, who in kept.state("plain").lost] == ["ns/web"]
    assert kept.state("web").lost == ()


def test_of_three_services_with_one_node_port_the_oldest_wins():
    rivals = [
        Service("ns", name, "NodePort", addrs(f"10.96.1.{n}"), (PORT,), creation_timestamp=created)
        for n, (name, created) in enumerate([("a", OLD), ("b", NEW), ("c", "")])
    ]
    kept = Harness(*map(up, reversed(rivals)))
    assert [len(kept.state(name).lost) for name in "abc"] == [0, 1, 1]
    keys = {f"ns/{name}:http TCP IPv4" for name in "abc"}
    assert kept.feed(gone(rivals[0])) == keys, "one goes, one wins, one loses to another"
    assert kept.state("b").lost == ()
    assert [str(who) for _, who in kept.state("c").lost] == ["ns/b"]


def test_zone_change_recomputes_services_with_hints():
    hinted = piece(end(1, zone_hints=("a",)), end(2, zone_hints=("b",)))
    kept = Harness(up(ME), up(WEB), up(PLAIN), up(hinted), up(piece(end(3), service="plain")))
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
    kept = Harness(up(ME), up(WEB), config=Config(detect_local_mode=LocalMode.NODE_CIDR))
    assert kept.desired.state.local_networks == ()
    before = kept.desired.node_state
    assert kept.feed(up(replace(ME, pod_cidrs=(POD_NETWORK,)))) == set()
    assert kept.desired.state.local_networks == (POD_NETWORK,)
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
    touched = world.apply([up(piece(READY_HERE, service="s7"))])
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

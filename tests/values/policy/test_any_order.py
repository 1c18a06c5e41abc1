# SPDX-License-Identifier: Apache-2.0
"""Any order and batching of events ends in the same desired state. tests/fuzz/test_judge.py compares
that of single Services with kube-proxy's own functions.
"""

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kbpf.model.config import Config
from kbpf.model.desired import FrontendAddress, ServicePortKey, ServiceState
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.objects import (
    Algorithm,
    Endpoint,
    EndpointSlice,
    Node,
    Pod,
    Protocol,
    Service,
    ServicePort,
    SlicePort,
    Weights,
    pack_names,
)
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ObjectStore
from tests.support import oracle
from tests.values.policy.services import HTTP, LOCAL, NEW, OLD, RANGE, addrs, end, gone, state_of_all, up

ADDRESSES = st.sampled_from(addrs("10.96.0.1", "10.96.0.2", "9.9.9.9"))
ADDRESSES6 = st.sampled_from(addrs("fd00::1", "fd00::9", "::"))
OTHERS = st.lists(ADDRESSES | ADDRESSES6, max_size=2).map(tuple)
NAMES, NODE_NAMES = st.sampled_from(["web", "dns"]), st.sampled_from(["me", "you", ""])
SPACES = st.sampled_from(["ns", "ns", "ns", "other"])
PORTS = st.builds(
    ServicePort,
    st.sampled_from(["http", "http", "http", "x"]),
    st.sampled_from([Protocol.TCP, Protocol.TCP, Protocol.TCP, Protocol.UDP]),
    st.sampled_from([80, 81]),
    st.sampled_from([0, 30080, 30081]),
)
CLUSTER_IPS = st.sampled_from([(4,), (4,), (4, 6), (6, 4), (6,)]).flatmap(
    lambda order: st.tuples(*[ADDRESSES if family == 4 else ADDRESSES6 for family in order])
)
WEIGHTS = st.sampled_from(
    [
        None,
        None,
        None,
        Weights(((end(1).address, 0),), (("p1", 4),)),
        Weights(pods=(("p1", 0), ("p2", 2)), nodes=(("me", 6),), default=4),
    ]
)
SERVICES = st.builds(
    Service,
    SPACES,
    NAMES,
    st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]),
    CLUSTER_IPS,
    st.lists(PORTS, min_size=1, max_size=2, unique_by=lambda p: (p.name, p.protocol)).map(tuple),
    OTHERS,
    OTHERS,
    st.sampled_from([(), RANGE]),
    external_local=st.booleans(),
    internal_local=st.booleans(),
    affinity_timeout=st.sampled_from([0, 60]),
    creation_timestamp=st.sampled_from(["", OLD, NEW]),
    algorithm=st.sampled_from([None, *Algorithm]),
    weights=WEIGHTS,
)
HINTS = st.sampled_from([None, ("a",), ("b",), ("a", "b")])
ENDS = st.builds(
    Endpoint,
    st.sampled_from([end(n).address for n in (1, 2, 3)]),
    st.sampled_from([True, True, False]),
    st.sampled_from([True, True, False]),
    st.booleans(),
    NODE_NAMES,
    st.just(""),
    HINTS,
    st.sampled_from([None, None, ("me",)]),
)


def an_slice(
    namespace: str, name: str, service: str, family: int, ends: list[tuple[Endpoint, str]], ports: tuple[SlicePort, ...]
) -> EndpointSlice:
    return EndpointSlice(
        namespace,
        name,
        service,
        family,
        tuple(e for e, _ in ends),
        ports,
        packed_pods=pack_names([pod for _, pod in ends]),
    )


PODS = st.sampled_from(["p1", "p2", "p3", ""])
SLICES = st.builds(
    an_slice,
    SPACES,
    st.sampled_from(["s1", "s2", "s3"]),
    NAMES,
    st.sampled_from([4, 4, 4, 4, 6]),
    st.lists(st.tuples(ENDS, PODS), min_size=1, max_size=3),
    st.sampled_from([HTTP, HTTP, HTTP, HTTP, ()]),
)
NODES = st.builds(
    Node, st.sampled_from(["me", "me", "you"]), st.sampled_from([(), LOCAL[1:]]), st.sampled_from(["", "a", "b"])
)
PODS = st.builds(Pod, SPACES, st.sampled_from(["p1", "p2"]), st.sampled_from(["u1", "u2", "u3"]), NODE_NAMES)
OBJECTS = st.sampled_from([SERVICES, SERVICES, SLICES, SLICES, SLICES, NODES, PODS]).flatmap(lambda x: x)
UPSERTS = OBJECTS.map(up)
WORDS = [
    OBJECTS.map(gone),
    OBJECTS.map(lambda said: Rejected(up(said).key, "bad")),
    st.sampled_from(list(Kind)).map(Synced),
]
EVENTS = st.lists(st.sampled_from([*[UPSERTS] * 7, *WORDS]).flatmap(lambda x: x), min_size=6, max_size=20)
CONFIGS = st.sampled_from([Config(), Config(node_port_addresses=RANGE), Config(algorithm=Algorithm.MAGLEV)])


def last_words(events: Iterable[Event]) -> dict[ObjectKey, Service | EndpointSlice | Node | Pod]:
    """The objects after all events, computed without an ObjectStore. A deleted Node stays."""
    found: dict[ObjectKey, Service | EndpointSlice | Node | Pod] = {}
    for event in events:
        if isinstance(event, Upsert):
            found[event.key] = event.object
        elif isinstance(event, Delete) and event.key.kind is not Kind.NODE:
            found.pop(event.key, None)
    return found


def as_oracle(state: ServiceState) -> tuple[set, set]:
    """Frontends, and those that were lost, in the form of the naive model."""

    def plain(at: FrontendAddress) -> tuple:
        return (oracle.text(at.address), at.port, int(at.protocol))

    return (
        {(plain(f.at), str(f.kind), f.restricted) for f in state.frontends},
        {(plain(at), tuple(who)) for at, who in state.lost},
    )


def as_tuple(key: ServicePortKey) -> tuple:
    return (key.namespace, key.name, key.port, int(key.protocol), key.family)


@settings(max_examples=300)
@given(EVENTS, st.lists(st.integers(1, 4), max_size=6), CONFIGS)
def test_any_events_in_any_batches_end_in_the_state_of_the_final_objects(events, cuts, config):
    world, desired = ObjectStore("me"), DesiredStateBuilder()
    rest = list(events)
    for size in [*cuts, len(rest)]:
        batch, rest = rest[:size], rest[size:]
        before = dict(desired.state.services)
        changed = desired.update(world, world.apply(batch), LOCAL, config)
        after = desired.state.services
        keys = before.keys() | after.keys()
        assert changed == {key for key in keys if before.get(key) != after.get(key)}

    objects = last_words(events)
    services = [said for said in objects.values() if isinstance(said, Service)]
    pods = [said for said in objects.values() if isinstance(said, Pod) and said.node != "you"]
    whole = state_of_all(objects.values(), LOCAL, config)
    assert desired.state == replace(whole, exempt_pods_known=Synced(Kind.POD) in events)
    assert whole.exempt_pods == tuple(sorted(pod.uid for pod in pods))
    assert whole == state_of_all(reversed(objects.values()), LOCAL, config)
    assert {as_tuple(key): as_oracle(state) for key, state in whole.services.items()} == oracle.frontends(services)

# SPDX-License-Identifier: Apache-2.0
"""Services and EndpointSlices that the API server accepts, as JSON: all small ones, and random
ones.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

from tests.support.cluster.kube_objects import endpoint, endpoint_slice
from tests.support.cluster.upstream import Json, Judge, Question, differences

BATCH = 1_000
WORLDS = 20
"""The largest number of worlds in one example of Hypothesis. They are compared in one question,
which takes time whatever its size."""


class World(NamedTuple):
    service: Json
    slices: Sequence[Json]


ADDRESSES = ("10.1.0.1", "10.1.0.2", "10.1.0.3")
POLICIES: Sequence[Json] = yaml.safe_load("""
- {}
- {internalTrafficPolicy: Local}
- {type: NodePort, externalTrafficPolicy: Local}
- {type: NodePort, externalTrafficPolicy: Local, internalTrafficPolicy: Local}
- {type: NodePort, internalTrafficPolicy: Local}
- {externalIPs: [192.0.2.1], externalTrafficPolicy: Local}
- {type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 31000, internalTrafficPolicy: Local}
""")
BOOLS, MAYBE = (True, False), (None, True, False)


def end(
    address: str,
    conditions: Sequence[bool | None],
    node: str | None = None,
    zones: Sequence[str] = (),
    nodes: Sequence[str] = (),
) -> Json:
    """`conditions`: ready, serving, terminating; None leaves one out."""
    ready, serving, terminating = conditions
    given = {"ready": ready, "serving": serving, "terminating": terminating}
    return endpoint(address, **given, node=node, for_zones=zones, for_nodes=nodes)


def world(name: str, policy: Json, *slices: Sequence[Json]) -> World:
    """A Service with one TCP port, and slices with these endpoints."""
    exposed = policy.get("type", "ClusterIP") != "ClusterIP"
    port = {"name": "p", "port": 80, "protocol": "TCP", **({"nodePort": 30080} if exposed else {})}
    ports = [{"name": "p", "port": 8080, "protocol": "TCP"}]
    return World(
        service(name, {"ports": [port], "clusterIPs": ["10.96.0.1"], **policy}),
        [piece(name, i, "IPv4", ports, ends) for i, ends in enumerate(slices)],
    )


def service(name: str, spec: Json, **more: Any) -> Json:
    ips = spec["clusterIPs"]
    families = ["IPv6" if ":" in ip else "IPv4" for ip in ips]
    own = {"type": "ClusterIP", "clusterIP": ips[0], "ipFamilies": families}
    return {"metadata": {"namespace": "ns", "name": name}, "spec": {**own, **spec}, **more}


def piece(name: str, number: int, family: str, ports: Sequence[Json], ends: Sequence[Json]) -> Json:
    return endpoint_slice(name, *ends, ports=ports, family=family, name=f"{name}-{number}", namespace="ns")


def compare(judges: Sequence[Judge], worlds: Iterator[World], node: str = "me", zone: str = "a") -> int:
    """Compares all worlds, many of them in one question; returns how many there were."""
    count = 0
    while some := list(itertools.islice(worlds, BATCH)):
        slices = [one for world in some for one in world.slices]
        found = differences(judges, Question(node, zone, [one.service for one in some], slices))
        assert not found, "\n".join(found[:10])
        count += len(some)
    return count


HINTS = tuple(itertools.product(((), ("a",), ("b",)), ((), ("me",), ("you",))))


def one_endpoint() -> Iterator[World]:
    """Each possible endpoint, with every policy."""
    all_ = itertools.product(POLICIES, itertools.product(MAYBE, repeat=3), (None, "me", "you"), HINTS)
    for i, (policy, conditions, node, hints) in enumerate(all_):
        yield world(f"s{i}", policy, [end(ADDRESSES[0], conditions, node, *hints)])


def two_endpoints(policies: Sequence[Json], hints: Sequence[tuple]) -> Iterator[World]:
    """Two endpoints, in one slice or in two, with the same address or with two."""
    kinds = list(itertools.product(itertools.product(BOOLS, repeat=3), ("me", "you"), hints))
    all_ = itertools.product(policies, kinds, kinds, ADDRESSES[:2], BOOLS)
    for i, (policy, first, second, other, apart) in enumerate(all_):
        ends = [
            end(at, conditions, node, *hinted)
            for at, (conditions, node, hinted) in ((ADDRESSES[0], first), (other, second))
        ]
        yield world(f"s{i}", policy, *([[ends[0]], [ends[1]]] if apart else [ends]))


CUTS = (3, 1, 2)
"""After how many of three endpoints the first slice ends."""
SAME = ((0, 1, 2), (0, 0, 1), (0, 1, 0), (0, 1, 1))
"""Which of three endpoints share an address."""
SERVES = ((True, True, False), (False, True, True))
"""Conditions: ready, and terminating but still serving."""


def three_endpoints() -> Iterator[World]:
    """Three endpoints, in one slice or in two, with all conditions and no hints; then in one slice,
    ready or terminating, with all hints. Permutations of equal kinds of endpoints are left out.
    """
    places = ("me", "you")
    kinds = itertools.product(itertools.product(BOOLS, repeat=3), places, [((), ())])
    hinted = itertools.product(SERVES, places, HINTS)
    shapes = tuple(itertools.product(CUTS, SAME))
    all_ = itertools.chain(
        itertools.product(POLICIES, itertools.combinations_with_replacement(kinds, 3), shapes),
        itertools.product(POLICIES, itertools.combinations_with_replacement(hinted, 3), shapes[:1]),
    )
    for i, (policy, chosen, (cut, same)) in enumerate(all_):
        ends = [
            end(ADDRESSES[at], conditions, node, *hints)
            for at, (conditions, node, hints) in zip(same, chosen, strict=True)
        ]
        yield world(f"s{i}", policy, *filter(None, (ends[:cut], ends[cut:])))


# ---- random worlds -----------------------------------------------------------------------------

PORTS = {"a": (80, "TCP"), "b": (81, "TCP"), "": (82, "UDP"), "c": (80, "UDP")}
OUTER4, OUTER6 = ("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")
RANGES = ("10.0.0.0/8", " 192.0.2.0/24 ", "0.0.0.0/0", "fd00::/8", "::/0", "2001:db8::/32")
CLUSTER_IPS = (["10.96.0.1"], ["fd00:96::1"], ["10.96.0.1", "fd00:96::1"], ["None"])

# Strategies are module constants, because making one costs more than drawing from it.


def some(options: Sequence[Any], most: int = 2) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(options), max_size=most, unique_by=str)


BOOLEAN = st.booleans()
TYPE = st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"])
POLICY = st.sampled_from(["Cluster", "Local"])
AFFINITY = st.sampled_from(["None", "ClientIP"])
ANY_CLUSTER_IPS, NOT_HEADLESS = st.sampled_from(CLUSTER_IPS), st.sampled_from(CLUSTER_IPS[:3])
PORT_NAMES = st.lists(st.sampled_from(list(PORTS)), min_size=1, unique=True)
OUTER, SOURCES = some(OUTER4 + OUTER6), some(RANGES)
INGRESS = some(list(itertools.product(OUTER4 + OUTER6, ("VIP", "Proxy", None))))
SLICE_PORTS = st.one_of(st.just(list(PORTS)), some(list(PORTS), 4))
TARGET_PORT = st.sampled_from([8080, 8081])
FAMILY = st.sampled_from(["IPv4", "IPv6"])
ENDPOINTS = {
    family: st.lists(
        st.builds(
            end,
            st.sampled_from(addresses),
            st.sampled_from(list(itertools.product(MAYBE, repeat=3))),
            st.sampled_from([None, "me", "you"]),
            some("ab"),
            some(("me", "you")),
        ),
        max_size=4,
    )
    for family, addresses in (("IPv4", ADDRESSES), ("IPv6", ("fd00:10::1", "fd00:10::2")))
}
COUNT = st.integers(1, WORLDS)
SLICES = st.integers(0, 3)
NODE, ZONE = st.sampled_from(["me", ""]), st.sampled_from(["a", ""])


def any_service(draw: st.DrawFn, name: str) -> Json:
    kind = draw(TYPE)
    ports = []
    for port_name in draw(PORT_NAMES):
        number, protocol = PORTS[port_name]
        port = {"name": port_name, "port": number, "protocol": protocol}
        if kind != "ClusterIP" and (kind == "NodePort" or draw(BOOLEAN)):
            port["nodePort"] = 30000 + number
        ports.append(port)
    spec: Json = {
        "type": kind,
        "clusterIPs": draw(ANY_CLUSTER_IPS if kind == "ClusterIP" else NOT_HEADLESS),
        "ports": ports,
        "externalIPs": draw(OUTER),
        "internalTrafficPolicy": draw(POLICY),
        "sessionAffinity": draw(AFFINITY),
    }
    if spec["sessionAffinity"] == "ClientIP":
        spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": 600}}
    if kind != "ClusterIP" or spec["externalIPs"]:
        spec["externalTrafficPolicy"] = draw(POLICY)
    if kind != "LoadBalancer":
        return service(name, spec)
    spec["loadBalancerSourceRanges"] = draw(SOURCES)
    if spec["externalTrafficPolicy"] == "Local":
        spec["healthCheckNodePort"] = 31000
    ingress = [{"ip": ip, **({"ipMode": mode} if mode else {})} for ip, mode in draw(INGRESS)]
    return service(name, spec, status={"loadBalancer": {"ingress": ingress}})


def any_slice(draw: st.DrawFn, name: str, number: int) -> Json:
    """A random slice, which need not fit the Service."""
    family = draw(FAMILY)
    ports = [{"name": port, "port": draw(TARGET_PORT), "protocol": PORTS[port][1]} for port in draw(SLICE_PORTS)]
    return piece(name, number, family, ports, draw(ENDPOINTS[family]))


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[World], str, str]:
    """Some random worlds, and the name and the zone of the node."""
    worlds = [
        World(any_service(draw, name := f"s{i}"), [any_slice(draw, name, number) for number in range(draw(SLICES))])
        for i in range(draw(COUNT))
    ]
    return worlds, draw(NODE), draw(ZONE)

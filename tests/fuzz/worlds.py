"""Services and EndpointSlices as the API server lets them be, as JSON: all small ones, and any."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.support.upstream import Json, Judge, Question, differences

BATCH = 1_000
WORLDS = 20
"""Of one example of Hypothesis, at most: asked for together, since each question takes its time."""


class World(NamedTuple):
    """A Service and its slices, as JSON."""

    service: Json
    slices: Sequence[Json]


ADDRESSES = ("10.1.0.1", "10.1.0.2", "10.1.0.3")
POLICIES: Sequence[Json] = (
    {},
    {"internalTrafficPolicy": "Local"},
    {"type": "NodePort", "externalTrafficPolicy": "Local"},
    {"type": "NodePort", "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local"},
    {"type": "NodePort", "internalTrafficPolicy": "Local"},
    {"externalIPs": ["192.0.2.1"], "externalTrafficPolicy": "Local"},
    {
        "type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 31000,
        "internalTrafficPolicy": "Local",
    },
)  # fmt: skip
BOOLS, MAYBE = (True, False), (None, True, False)


def endpoint(
    address: str,
    conditions: Sequence[bool | None],
    node: str | None = None,
    zones: Sequence[str] = (),
    nodes: Sequence[str] = (),
) -> Json:
    """`conditions`: ready, serving, terminating; None is not said."""
    names = ("ready", "serving", "terminating")
    said = {key: one for key, one in zip(names, conditions, strict=True) if one is not None}
    hints = {"forZones": zones, "forNodes": nodes}
    return {
        "addresses": [address],
        "conditions": said,
        **({"nodeName": node} if node is not None else {}),
        "hints": {key: [{"name": name} for name in some] for key, some in hints.items() if some},
    }


def world(name: str, policy: Json, *slices: Sequence[Json]) -> World:
    """A Service with one TCP port, and slices of these endpoints."""
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


def piece(name: str, number: int, kind: str, ports: Sequence[Json], ends: Sequence[Json]) -> Json:
    labels = {"kubernetes.io/service-name": name}
    return {
        "metadata": {"namespace": "ns", "name": f"{name}-{number}", "labels": labels},
        "addressType": kind,
        "ports": list(ports),
        "endpoints": list(ends),
    }


def compare(
    judges: Sequence[Judge], worlds: Iterator[World], node: str = "me", zone: str = "a"
) -> int:
    """Compares them all, many beside each other in one question; how many there were."""
    count = 0
    while some := list(itertools.islice(worlds, BATCH)):
        slices = [one for world in some for one in world.slices]
        found = differences(judges, Question(node, zone, [one.service for one in some], slices))
        assert not found, "\n".join(found[:10])
        count += len(some)
    return count


HINTS = tuple(itertools.product(((), ("a",), ("b",)), ((), ("me",), ("you",))))


def one_endpoint() -> Iterator[World]:
    """Each that there can be, with every policy."""
    all_ = itertools.product(
        POLICIES, itertools.product(MAYBE, repeat=3), (None, "me", "you"), HINTS
    )
    for i, (policy, conditions, node, hints) in enumerate(all_):
        yield world(f"s{i}", policy, [endpoint(ADDRESSES[0], conditions, node, *hints)])


def two_endpoints(policies: Sequence[Json], hints: Sequence[tuple]) -> Iterator[World]:
    """Two, in one slice or in two, with one address or with two."""
    kinds = list(itertools.product(itertools.product(BOOLS, repeat=3), ("me", "you"), hints))
    all_ = itertools.product(policies, kinds, kinds, ADDRESSES[:2], BOOLS)
    for i, (policy, first, second, other, apart) in enumerate(all_):
        ends = [
            endpoint(at, conditions, node, *hinted)
            for at, (conditions, node, hinted) in ((ADDRESSES[0], first), (other, second))
        ]
        yield world(f"s{i}", policy, *([[ends[0]], [ends[1]]] if apart else [ends]))


# ---- any world ---------------------------------------------------------------------------------

PORTS = {"a": (80, "TCP"), "b": (81, "TCP"), "": (82, "UDP"), "c": (80, "UDP")}
OUTER4, OUTER6 = ("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")
RANGES = ("10.0.0.0/8", " 192.0.2.0/24 ", "0.0.0.0/0", "fd00::/8", "::/0", "2001:db8::/32")
CLUSTER_IPS = (["10.96.0.1"], ["fd00:96::1"], ["10.96.0.1", "fd00:96::1"], ["None"])


def some(options: Sequence[Any], most: int = 2) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(options), max_size=most, unique_by=str)


@st.composite
def services(draw: st.DrawFn, name: str) -> Json:
    """A Service as the API server lets it be."""
    kind = draw(st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]))
    cluster_ips = draw(st.sampled_from(CLUSTER_IPS if kind == "ClusterIP" else CLUSTER_IPS[:3]))
    ports = []
    for port_name in draw(st.lists(st.sampled_from(list(PORTS)), min_size=1, unique=True)):
        number, protocol = PORTS[port_name]
        port = {"name": port_name, "port": number, "protocol": protocol}
        if kind != "ClusterIP" and (kind == "NodePort" or draw(st.booleans())):
            port["nodePort"] = 30000 + number
        ports.append(port)
    external = draw(some(OUTER4 + OUTER6))
    spec: Json = {
        "type": kind,
        "clusterIPs": cluster_ips,
        "ports": ports,
        "externalIPs": external,
        "internalTrafficPolicy": draw(st.sampled_from(["Cluster", "Local"])),
        "sessionAffinity": draw(st.sampled_from(["None", "ClientIP"])),
    }
    if spec["sessionAffinity"] == "ClientIP":
        spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": draw(st.just(600))}}
    if kind != "ClusterIP" or external:
        spec["externalTrafficPolicy"] = draw(st.sampled_from(["Cluster", "Local"]))
    if kind != "LoadBalancer":
        return service(name, spec)
    spec["loadBalancerSourceRanges"] = draw(some(RANGES))
    if spec["externalTrafficPolicy"] == "Local":
        spec["healthCheckNodePort"] = 31000
    ingress = [
        {"ip": ip, **({"ipMode": mode} if mode else {})}
        for ip, mode in draw(some(list(itertools.product(OUTER4 + OUTER6, ("VIP", "Proxy", None)))))
    ]
    return service(name, spec, status={"loadBalancer": {"ingress": ingress}})


@st.composite
def any_world(draw: st.DrawFn, name: str) -> World:
    """A Service, and slices that need not fit it."""
    slices = []
    for i in range(draw(st.integers(0, 3))):
        kind, addresses = draw(st.sampled_from(
            [("IPv4", ADDRESSES), ("IPv6", tuple(f"fd00:10::{n}" for n in (1, 2, 3)))]
        ))  # fmt: skip
        ports = [
            {"name": port, "port": draw(st.sampled_from([8080, 8081])), "protocol": PORTS[port][1]}
            for port in draw(st.just(list(PORTS)) if draw(st.booleans()) else some(list(PORTS), 4))
        ]
        ends = [
            endpoint(
                draw(st.sampled_from(addresses)),
                draw(st.tuples(*[st.sampled_from(MAYBE)] * 3)),
                draw(st.sampled_from([None, "me", "you"])),
                draw(some("ab")),
                draw(some(("me", "you"))),
            )
            for _ in range(draw(st.integers(0, 4)))
        ]
        slices.append(piece(name, i, kind, ports, ends))
    return World(draw(services(name)), slices)


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[World], str, str]:
    """Some worlds, and the name and the zone of the node."""
    count = draw(st.integers(1, WORLDS))
    worlds = [draw(any_world(f"s{i}")) for i in range(count)]
    return worlds, draw(st.sampled_from(["me", ""])), draw(st.sampled_from(["a", ""]))

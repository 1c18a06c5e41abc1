# SPDX-License-Identifier: Apache-2.0
"""Which backends answer clients outside the cluster, and pods whose sockets are not hooked.

The nodes, the pods and the client are those of tests/support/lab/field.py, with the packet path on.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from tests.support.cluster.kube_objects import Object, slice_port
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.field import DROPPED, KINDS, NODES4, NODES6, OUT4, OUT6, at
from tests.support.lab.placed import HOST_PORT, Placed

SETS = {1: "a1", 2: "b1", 3: "a1 b1"}
"""Local, remote, both: TCP Services at 10 + number, UDP at 20 + number."""


def objects(placed: Placed) -> list[Object]:
    every, made = placed.all_ways, []
    local = {"external_policy": "Local"}
    for base, protocol in ((10, "TCP"), (20, "UDP")):
        for number, who in SETS.items():
            made += every(base + number, who, protocol)
        made += every(base + 4, "a1 b1", protocol, **local)
        made += every(base + 5, "b1", protocol, **local)
        made += every(base + 6, "", protocol)
        for number, who in ((7, "a-net"), (8, "b-net")):
            service = every(base + number, "", protocol)[0]
            port = slice_port(HOST_PORT, protocol=protocol)
            name = service["metadata"]["name"]
            made += [service, *(placed.slice(name, who, port, v6=v6) for v6 in (False, True))]
    made += every(31, "a1 a2 a3 b1 b2", affinity_seconds=3600)
    made += every(32, "a1 b1", source_ranges=["198.18.0.0/24", "fd00:198:18::/64"])
    made += every(33, "a1 b1", source_ranges=["198.51.100.0/24", "2001:db8:9::/64"])
    made += every(34, "a1", "UDP", source_ranges=["198.51.100.0/24", "2001:db8:9::/64"])
    made += every(35, "a1", source_ranges=["10.244.1.0/24", "fd00:10:244:1::/64"])
    return made


def rows() -> Iterator[Dial]:
    for protocol, v6 in product(("tcp", "udp"), (False, True)):
        base = 10 if protocol == "tcp" else 20
        own = (NODES6 if v6 else NODES4)[0]
        client = OUT6 if v6 else OUT4
        say = f"{protocol} {'v6' if v6 else 'v4'}"

        def row(
            what: str, kind: str, number: int, outcome: str, sees: str = "", **more: Any
        ) -> Dial:
            to = at(kind, base + number, v6, **more)  # noqa: B023
            return Dial(f"{say} {kind}: {what}", "outside", to, outcome, protocol, sees)  # noqa: B023

        for kind in KINDS[:3]:
            for number, who in SETS.items():
                yield row(f"Cluster, {who}: masqueraded", kind, number, who, own)
            yield row("Local: the client's own address", kind, 4, "a1", client)
            yield row("no endpoints", kind, 6, REFUSED)
            yield row("a backend in the node's network", kind, 7, "a-net", client)
            yield row("a backend in the other node's network", kind, 8, "b-net", own)
        yield row(
            "at the other node", "NodePort", 1, "a1", (NODES6 if v6 else NODES4)[1], node_number=2
        )
        yield row("Local, at the other node", "NodePort", 4, "b1", client, node_number=2)
        for kind in ("NodePort", "VIP"):
            yield row("Local, no local endpoint", kind, 5, DROPPED)
        yield row("a local backend: the client's own address", "ClusterIP", 1, "a1", client)
        yield row("no endpoints", "ClusterIP", 6, REFUSED)


RANGES = (
    # the client, what it dials, the answer, and whether the backend sees its node's address
    ("admitted", "outside", "VIP", 32, "a1 b1", True),
    ("not admitted", "outside", "VIP", 33, DROPPED, False),
    ("not admitted, UDP", "outside", "VIP", 34, DROPPED, False),
    ("not for NodePorts", "outside", "NodePort", 33, "a1 b1", True),
    ("not for external IPs", "outside", "ExternalIP", 33, "a1 b1", True),
    ("a pod, not admitted", "a2!", "VIP", 33, DROPPED, False),
    ("a pod, admitted", "a2!", "VIP", 35, "a1", True),
    ("a hooked pod, admitted", "a2", "VIP", 35, "a1", True),
    ("a hooked pod, not admitted", "a2", "VIP", 33, DROPPED, False),
)


def ranges() -> Iterator[Dial]:
    for v6, (what, client, kind, number, outcome, masqueraded) in product((False, True), RANGES):
        own = (NODES6 if v6 else NODES4)[0] if masqueraded else ""
        protocol = "udp" if number == 34 else "tcp"
        name = f"{'v6' if v6 else 'v4'} source ranges, {what}"
        yield Dial(name, client, at(kind, number, v6), outcome, protocol, own)


def unhooked() -> Iterator[Dial]:
    """a2 is 10.244.1.3. Its node masquerades it for all addresses but ClusterIPs, as kube-proxy
    does.
    """
    for protocol, v6 in product(("tcp", "udp"), (False, True)):
        base = 10 if protocol == "tcp" else 20
        say = f"{protocol} {'v6' if v6 else 'v4'}"
        pod = "fd00:10:244:1::3" if v6 else "10.244.1.3"
        own, other = NODES6 if v6 else NODES4

        for kind in KINDS:
            to = at(kind, base + 3, v6)
            sees = pod if kind == "ClusterIP" else own
            yield Dial(f"{say} {kind}", "a2!", to, "a1 b1", protocol, sees)
            to = at(kind, base + 1, v6)
            yield Dial(f"{say} {kind} hairpin", "a1!", to, "a1", protocol, own)
            yield Dial(
                f"{say} {kind} no endpoints", "a2!", at(kind, base + 6, v6), REFUSED, protocol
            )
        to = at("NodePort", base + 5, v6)
        yield Dial(f"{say} Local, no local endpoint: short circuit", "a2!", to, "b1", protocol, pod)
        to = at("NodePort", base + 1, v6, 2)
        yield Dial(f"{say} the other node's NodePort", "a2!", to, "a1", protocol, other)
        to = at("NodePort", base + 7, v6)
        yield Dial(f"{say} a backend in the node's network", "a2!", to, "a-net", protocol, pod)


def unknown_ports() -> Iterator[Dial]:
    """ClusterIPs at a port that no Service has."""
    for protocol, v6, who in product(("tcp", "udp"), (False, True), ("outside", "a2!")):
        to = at("ClusterIP", 11, v6).removesuffix(":80") + ":81"
        say = f"{protocol} {'v6' if v6 else 'v4'}"
        yield Dial(f"{say} ClusterIP: unknown port, {who}", who, to, REFUSED, protocol)


ROWS = (*rows(), *ranges(), *unhooked(), *unknown_ports())

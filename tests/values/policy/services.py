# SPDX-License-Identifier: Apache-2.0
"""Services, slices and nodes to compute with, most of them from short texts."""

import ipaddress
from collections.abc import Collection, Iterable

from kbpf.model.address import Addr, parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import Backend, DesiredState
from kbpf.model.events import Delete, Kind, ObjectKey, Upsert
from kbpf.model.objects import (
    Cidr,
    Endpoint,
    EndpointSlice,
    Node,
    Pod,
    Protocol,
    Service,
    ServicePort,
    SlicePort,
    pack_names,
)
from kbpf.policy.admission import NOT_IN_USE, InUse
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ObjectStore


def addrs(*texts: str) -> tuple[Addr, ...]:
    return tuple(map(parse_addr, texts))


LOCAL = addrs("127.0.0.1", "10.0.0.1", "10.0.0.2", "fd00::2")

HTTP = (SlicePort("http", Protocol.TCP, 8080),)

RANGE = (Cidr(parse_addr("192.0.2.0"), 120),)


def key(said: Service | EndpointSlice | Node | Pod) -> ObjectKey:
    match said:
        case Service():
            return ObjectKey(Kind.SERVICE, said.namespace, said.name)
        case EndpointSlice():
            return ObjectKey(Kind.SLICE, said.namespace, said.name)
        case Node():
            return ObjectKey(Kind.NODE, "", said.name)
        case Pod():
            return ObjectKey(Kind.POD, said.namespace, said.name)


def up(said: Service | EndpointSlice | Node | Pod) -> Upsert:
    return Upsert(key(said), said)


def gone(said: Service | EndpointSlice | Node | Pod) -> Delete:
    return Delete(key(said))


def state_of_all(
    objects: Iterable[Service | EndpointSlice | Node | Pod],
    local: Collection[Addr],
    config: Config,
    in_use: InUse = NOT_IN_USE,
) -> DesiredState:
    """By a builder that sees these objects at once, and nothing before."""
    store, builder = ObjectStore("me"), DesiredStateBuilder()
    builder.update(store, store.apply(map(up, objects)), local, config, in_use)
    return builder.state


def end(number: int, **said) -> Endpoint:
    """The endpoint 10.1.0.NUMBER, ready by default."""
    return Endpoint(parse_addr(f"10.1.0.{number}"), **said)


CONDITIONS = {
    "": {},
    "unready": {"ready": False},
    "draining": {"ready": False, "terminating": True},
    "down": {"ready": False, "serving": False},
    "dead": {"ready": False, "serving": False, "terminating": True},
    "leaving": {"terminating": True},
    "leaving-not-serving": {"terminating": True, "serving": False},
    "not-serving": {"serving": False},
}


def ends(text: str) -> tuple[Endpoint, ...]:
    """Endpoints as ``NUMBER/CONDITION@NODE,ZONE>HINT,HINT``; all but the number may be absent.

    A hint of one letter names a zone, a longer one a node; ``1>`` has an empty list of hints.
    """
    made = []
    for word in text.split():
        rest, has_hints, hint_text = word.partition(">")
        rest, _, place = rest.partition("@")
        number, _, condition = rest.partition("/")
        node, _, zone = place.partition(",")
        hints = hint_text.split(",") if hint_text else []
        zones, nodes = tuple(h for h in hints if len(h) == 1), tuple(h for h in hints if len(h) > 1)
        given = {"zone_hints": zones, "node_hints": nodes} if has_hints else {}
        made.append(end(int(number), node=node, zone=zone, **CONDITIONS[condition], **given))
    return tuple(made)


def piece(
    endpoints: str | tuple[Endpoint, ...],
    service: str = "web",
    name: str = "",
    ports: tuple[SlicePort, ...] = HTTP,
    pods: str = "",
) -> EndpointSlice:
    """A slice of a Service; its name is SERVICE-1 by default."""
    listed = ends(endpoints) if isinstance(endpoints, str) else endpoints
    packed = pack_names(tuple(pods.split()))
    return EndpointSlice("ns", name or f"{service}-1", service, 4, listed, ports, packed_pods=packed)


def cidrs(text: str) -> tuple[Cidr, ...]:
    nets = [ipaddress.ip_network(word) for word in text.split()]
    return tuple(Cidr(parse_addr(str(n.network_address)), n.prefixlen + (96 if n.version == 4 else 0)) for n in nets)


def service(text: str) -> Service:
    """A Service as ``NAMESPACE/NAME WORD ...``, by default a LoadBalancer at 10.96.0.1, port 80/TCP.

    The words: its type, ``internal-local``, ``external-local``, and ``KEY=VALUE`` with the keys of `known`; lists
    have commas.
    """
    full_name, *words = text.split()
    namespace, _, name = full_name.rpartition("/")
    known = {"ip": "10.96.0.1", "port": "80", "protocol": "TCP", "node-port": "0", "affinity": "0", "created": ""}
    known |= {"external": "", "vip": "", "ranges": ""}
    given = known | dict(word.split("=") for word in words if "=" in word)
    assert given.keys() == known.keys(), text
    (kind,) = [word for word in words if word in ("ClusterIP", "NodePort")] or ["LoadBalancer"]
    listed = {key: value.replace(",", " ") for key, value in given.items()}
    return Service(
        namespace or "ns",
        name,
        kind,
        addrs(*listed["ip"].split()),
        (ServicePort("http", Protocol[given["protocol"]], int(given["port"]), int(given["node-port"])),),
        external_ips=addrs(*listed["external"].split()),
        lb_vips=addrs(*listed["vip"].split()),
        source_ranges=cidrs(listed["ranges"]),
        internal_local="internal-local" in words,
        external_local="external-local" in words,
        affinity_timeout=int(given["affinity"]),
        creation_timestamp={"old": OLD, "new": NEW, "": ""}[given["created"]],
    )


def numbers(backends: tuple[Backend, ...]) -> str:
    """The backends as in ends(): ``1 2`` is 10.1.0.1 and 10.1.0.2."""
    return " ".join(str(backend.address[-1]) for backend in backends)


OLD, NEW = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"

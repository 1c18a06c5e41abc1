# SPDX-License-Identifier: Apache-2.0
"""Services, slices and nodes to compute with."""

from kbpf.model.address import Addr, parse_addr
from kbpf.model.desired import Backend
from kbpf.model.events import Delete, Kind, ObjectKey, Upsert
from kbpf.model.objects import (
    Cidr,
    Endpoint,
    EndpointSlice,
    Node,
    Pod,
    Protocol,
    Service,
    SlicePort,
    pack_names,
)


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


def end(number: int, **said) -> Endpoint:
    """The endpoint 10.1.0.NUMBER, ready by default."""
    return Endpoint(parse_addr(f"10.1.0.{number}"), **said)


def piece(
    *ends: Endpoint,
    service: str = "web",
    name: str = "",
    family: int = 4,
    ports: tuple[SlicePort, ...] = HTTP,
    pods: tuple[str, ...] = (),
) -> EndpointSlice:
    """A slice of a Service; its name is SERVICE-1 by default."""
    return EndpointSlice("ns", name or f"{service}-1", service, family, ends, ports, packed_pods=pack_names(pods))


def numbers(backends: tuple[Backend, ...]) -> tuple[int, ...]:
    return tuple(backend.address[-1] for backend in backends)


OLD, NEW = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"

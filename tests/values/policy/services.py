# SPDX-License-Identifier: Apache-2.0
"""Services, slices and nodes to compute with."""

from kbpf.model.address import Addr, parse_addr
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
)


def addrs(*texts: str) -> tuple[Addr, ...]:
    return tuple(map(parse_addr, texts))


LOCAL = addrs("127.0.0.1", "10.0.0.1", "10.0.0.2", "fd00::2")

HTTP = (SlicePort("http", Protocol.TCP, 8080),)

RANGE = (Cidr(parse_addr("192.0.2.0"), 120),)


def up(said: Service | EndpointSlice | Node | Pod) -> Upsert:
    match said:
        case Node():
            return Upsert(ObjectKey(Kind.NODE, "", said.name), said)
        case Service():
            return Upsert(ObjectKey(Kind.SERVICE, said.namespace, said.name), said)
        case EndpointSlice():
            return Upsert(ObjectKey(Kind.SLICE, said.namespace, said.name), said)
        case Pod():
            return Upsert(ObjectKey(Kind.POD, said.namespace, said.name), said)


def gone(said: Service | EndpointSlice | Node | Pod) -> Delete:
    return Delete(up(said).key)


def end(number: int, **said) -> Endpoint:
    return Endpoint(parse_addr(f"10.1.0.{number}"), **said)


OLD, NEW = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"

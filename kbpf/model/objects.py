# SPDX-License-Identifier: Apache-2.0
"""Kubernetes objects as we use them: validated, and reduced to the fields that decide something.

Only `source/decode/decode.py` creates them, besides tests. It interns strings that repeat by the
thousand (node names, zones, port names).
"""

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.errors import ObjectError
from kbpf.model.address import Addr, family_of, format_addr, parse_addr


class Protocol(IntEnum):
    """IANA protocol numbers, as the kernel and the maps use them."""

    TCP = 6
    UDP = 17
    SCTP = 132


_PROTOCOL_NAMES: Final = {int(protocol): protocol.name for protocol in Protocol}


def protocol_name(number: int) -> str:
    """``TCP``, ``UDP`` or ``SCTP``; the number of any other protocol."""
    return _PROTOCOL_NAMES.get(number, str(number))


class Algorithm(StrEnum):
    """How a backend is chosen from a set."""

    RANDOM = "random"
    MAGLEV = "maglev"


class ServiceName(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


READ_AS_TEXT: Final = "it is read as"
"""Marks the message about an address that is valid but written unusually."""

ELLIPSIS: Final = "\N{HORIZONTAL ELLIPSIS}"
"""Marks where a name was cut that is only shown."""

API_SERVER: Final = ServiceName("default", "kubernetes")


class Cidr(NamedTuple):
    """A network: its first address (host bits zero) and its prefix length *in 128 bits*."""

    address: Addr
    bits: int

    @classmethod
    def parse(cls, text: str) -> "Cidr":
        """Parses a network such as ``10.0.0.0/8`` or ``fd00::/64``; host bits are cleared. Raises
        ObjectError.
        """
        head, _, tail = text.partition("/")
        width = 128 if ":" in head else 32
        is_number = tail.isascii() and tail.isdigit() and len(tail) < 20
        host_bits = width - int(tail) if is_number else -1
        if not 0 <= host_bits <= width:
            raise ObjectError(f"{text!r} is not a network in CIDR form")
        number = int.from_bytes(parse_addr(head)) >> host_bits << host_bits
        return cls(Addr(number.to_bytes(16)), 128 - host_bits)

    def __str__(self) -> str:
        bits = self.bits - 96 if family_of(self.address) == 4 and self.bits >= 96 else self.bits
        return f"{format_addr(self.address)}/{bits}"

    def contains(self, addr: Addr) -> bool:
        """Whether the address is in this network. Networks never match the other family."""
        if family_of(self.address) != family_of(addr):
            return False  # ::/0 would hold every v4-mapped address
        shift = 128 - self.bits
        network, host = int.from_bytes(self.address), int.from_bytes(addr)
        return network >> shift == host >> shift


class ServicePort(msgspec.Struct, frozen=True, gc=False):
    """One entry of spec.ports. `node_port` 0 means none."""

    name: str
    protocol: Protocol
    port: int
    node_port: int = 0


class Weights(msgspec.Struct, frozen=True):
    """How a Service's connections are divided among its endpoints.

    Each rule is (name, weight), a weight of 0 or more, each name once. The most specific rule
    applies, in the order of the fields; `default` is for all other endpoints.
    """

    addresses: tuple[tuple[Addr, int], ...] = ()
    pods: tuple[tuple[str, int], ...] = ()
    nodes: tuple[tuple[str, int], ...] = ()
    zones: tuple[tuple[str, int], ...] = ()
    default: int = 1


class Service(msgspec.Struct, frozen=True):
    """A Service with cluster IPs. Services that kube-proxy skips are never decoded to this type.

    `lb_vips` holds only status addresses with ipMode VIP or without ipMode. `affinity_timeout` is
    in seconds, 0 without session affinity. `creation_timestamp` is text (RFC 3339 in UTC sorts by
    time), "" if unknown. `algorithm` and `weights` are None without the annotation. `mesh` is the
    mesh to whose control plane it belongs, "" if to none. `skipped` has a line for each part of its
    annotations that was ignored.
    """

    namespace: str
    name: str
    type: str
    cluster_ips: tuple[Addr, ...]
    ports: tuple[ServicePort, ...]
    external_ips: tuple[Addr, ...] = ()
    lb_vips: tuple[Addr, ...] = ()
    source_ranges: tuple[Cidr, ...] = ()
    external_local: bool = False
    internal_local: bool = False
    affinity_timeout: int = 0
    health_check_node_port: int = 0
    creation_timestamp: str = ""
    algorithm: Algorithm | None = None
    weights: Weights | None = None
    mesh: str = ""
    skipped: tuple[str, ...] = ()

    @property
    def key(self) -> ServiceName:
        return ServiceName(self.namespace, self.name)


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """One endpoint, with its conditions resolved: nil ready and serving = true, nil terminating =
    false, as in kube-proxy's endpointslicecache.go. Hints are None if the object has none.
    """

    address: Addr
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    node: str = ""
    zone: str = ""
    zone_hints: tuple[str, ...] | None = None
    node_hints: tuple[str, ...] | None = None


class SlicePort(msgspec.Struct, frozen=True, gc=False):
    """One entry of an EndpointSlice's ports: the number for a port name."""

    name: str
    protocol: Protocol
    port: int


class EndpointSlice(msgspec.Struct, frozen=True):
    """One EndpointSlice of addressType IPv4 or IPv6 (`family` 4 or 6) that belongs to a Service.

    `skipped` has a line for each malformed endpoint that was ignored. `packed_pods` are the names
    of the endpoints' Pods, see pack_names(): few Services need them, so they are not a field of
    Endpoint.
    """

    namespace: str
    name: str
    service: str
    family: int
    endpoints: tuple[Endpoint, ...]
    ports: tuple[SlicePort, ...]
    skipped: tuple[str, ...] = ()
    packed_pods: str = ""

    @property
    def service_name(self) -> ServiceName:
        """The Service that this slice belongs to."""
        return ServiceName(self.namespace, self.service)

    @property
    def pods(self) -> tuple[str, ...]:
        """The Pod of each endpoint, "" if it has none."""
        return unpack_names(self.packed_pods) if self.packed_pods else ("",) * len(self.endpoints)


def pack_names(names: Sequence[str]) -> str:
    """Packs names without line breaks into one string; "" if all are empty. The common prefix is
    stored once, because names of a Deployment's Pods differ only in their last characters.
    """
    if not any(names):
        return ""
    first, last = min(names), max(names)  # their common prefix is that of all names
    pairs = zip(first, last, strict=False)
    prefix_length = next((i for i, (a, b) in enumerate(pairs) if a != b), len(first))
    return "\n".join((first[:prefix_length], *(name[prefix_length:] for name in names)))


def unpack_names(text: str) -> tuple[str, ...]:
    """Reverses pack_names()."""
    prefix, *rest = text.split("\n")
    return tuple(prefix + name for name in rest)


class Node(msgspec.Struct, frozen=True):
    """A Node. `addresses` are its InternalIPs, then its ExternalIPs, in the object's order.

    `skipped` has a line for each malformed address that was ignored (the API server does not
    validate them). `being_deleted`: the Node is being deleted, or the cluster autoscaler is about
    to delete it, so load balancers should send it no new connections.
    """

    name: str
    addresses: tuple[Addr, ...] = ()
    zone: str = ""
    pod_cidrs: tuple[Cidr, ...] = ()
    skipped: tuple[str, ...] = ()
    being_deleted: bool = False


class Pod(msgspec.Struct, frozen=True):
    """A Pod whose sockets are exempt. `node` is "" until it is scheduled, and if the source lists
    only Pods of this node. `mesh`: the mesh that redirects its traffic, "" if it is exempt by its
    label.
    """

    namespace: str
    name: str
    uid: str
    node: str = ""
    mesh: str = ""

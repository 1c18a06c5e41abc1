"""Kubernetes objects as we use them: checked, and only the fields that decide something.

`source/decode/decode.py` makes them from the wire; nobody else does, except tests. Strings that
repeat by the thousand (node names, zones, port names) are interned there.
"""

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.model.address import Addr, family_of


class Protocol(IntEnum):
    """IANA protocol numbers, as the kernel and the maps use them."""

    TCP = 6
    UDP = 17
    SCTP = 132


class Algorithm(StrEnum):
    """How a backend of a set is chosen."""

    RANDOM = "random"
    MAGLEV = "maglev"


class ServiceName(NamedTuple):
    """The key of a Service."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


READ_AS_TEXT: Final = "it is read as"
"""In a line about an address that is used though it is written oddly."""

API_SERVER: Final = ServiceName("default", "kubernetes")


class Cidr(NamedTuple):
    """A network: its first address (host bits zero) and its prefix length *in 128 bits*."""

    address: Addr
    bits: int

    def contains(self, addr: Addr) -> bool:
        """Whether the address lies in this network. Families never match each other."""
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
    """Which endpoints get how much of a Service's connections: (name, whole number from 0 on),
    each name once. The most specific one counts, in this order; `others` is for all the rest.
    """

    addresses: tuple[tuple[Addr, int], ...] = ()
    pods: tuple[tuple[str, int], ...] = ()
    nodes: tuple[tuple[str, int], ...] = ()
    zones: tuple[tuple[str, int], ...] = ()
    default: int = 1


class Service(msgspec.Struct, frozen=True):
    """A Service that has cluster IPs. What kube-proxy skips never becomes one.

    `lb_vips` holds only status addresses with ipMode VIP (or none given).
    `affinity_timeout` is in seconds, 0 without session affinity.
    `created` is the creationTimestamp as text (RFC 3339 in UTC sorts as time), "" if unknown.
    `algorithm` and `weights` are None where the Service does not say.
    `skipped` says, a line each, what was left out of its annotations.
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
    skipped: tuple[str, ...] = ()

    @property
    def key(self) -> ServiceName:
        """Namespace and name."""
        return ServiceName(self.namespace, self.name)


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """One endpoint, its conditions already resolved (nil ready and serving = true, nil terminating
    = false, as in kube-proxy's endpointslicecache.go). Hints are None when there are none.
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
    """One entry of an EndpointSlice's ports: the number behind a port name."""

    name: str
    protocol: Protocol
    port: int


class EndpointSlice(msgspec.Struct, frozen=True):
    """One EndpointSlice of addressType IPv4 or IPv6 (`family` 4 or 6) that belongs to a Service.

    `skipped` says, a line each, which endpoints were left out because they are malformed.
    `packed_pods` are the names of the endpoints' Pods, see pack_names(): few Services ask for
    them, so they cost no field of each endpoint.
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
        """The Service that this slice is part of."""
        return ServiceName(self.namespace, self.service)

    @property
    def pods(self) -> tuple[str, ...]:
        """The Pod of each endpoint, "" where it has none."""
        return unpack_names(self.packed_pods) if self.packed_pods else ("",) * len(self.endpoints)


def pack_names(names: Sequence[str]) -> str:
    """Names without line breaks as one text; "" when none is there. Those of a Deployment's Pods
    differ in their last characters, so what all begin with stands there once.
    """
    if not any(names):
        return ""
    first, last = min(names), max(names)  # what these two share, all between them do
    pairs = zip(first, last, strict=False)
    prefix_length = next((i for i, (a, b) in enumerate(pairs) if a != b), len(first))
    return "\n".join((first[:prefix_length], *(name[prefix_length:] for name in names)))


def unpack_names(text: str) -> tuple[str, ...]:
    """The names of pack_names()."""
    prefix, *rest = text.split("\n")
    return tuple(prefix + name for name in rest)


class Node(msgspec.Struct, frozen=True):
    """Our own Node. `addresses` are its InternalIPs, then ExternalIPs, in the object's order.

    `skipped` says, a line each, which addresses were left out because they are malformed: an API
    server does not check them. `leaving`: it is being deleted, or about to be by the cluster
    autoscaler, so LoadBalancers should send it nothing new.
    """

    name: str
    addresses: tuple[Addr, ...] = ()
    zone: str = ""
    pod_cidrs: tuple[Cidr, ...] = ()
    skipped: tuple[str, ...] = ()
    being_deleted: bool = False


class Pod(msgspec.Struct, frozen=True):
    """A Pod whose sockets are to be left alone. `node` is "" when it is on none yet."""

    namespace: str
    name: str
    uid: str
    node: str = ""

# SPDX-License-Identifier: Apache-2.0
"""What the kernel should do, as values: the pure result of policy, shared by all data planes."""

from collections.abc import Container, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.model.address import ANY4, ANY6, Addr, family_of, format_endpoint
from kbpf.model.objects import Algorithm, Cidr, EndpointSlice, Protocol, ServiceName


class ServicePortKey(NamedTuple):
    """One port of a Service in one family; it has its own backend sets and session affinity.

    kube-proxy runs one proxier for each family, with separate ServicePorts.
    """

    namespace: str
    name: str
    port: str
    protocol: Protocol
    family: int

    @property
    def service(self) -> ServiceName:
        return ServiceName(self.namespace, self.name)

    def __str__(self) -> str:
        port = f":{self.port}" if self.port else ""
        return f"{self.namespace}/{self.name}{port} {self.protocol.name} IPv{self.family}"


class FrontendKind(StrEnum):
    """Which field of a Service an address comes from."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    EXTERNAL_IP = "ExternalIP"
    LOAD_BALANCER = "LoadBalancer"


class FrontendAddress(NamedTuple):
    """What a client connects to. A NodePort has the address ANY4 or ANY6: one entry serves every
    address of that family in DesiredState.node_addresses.
    """

    address: Addr
    port: int
    protocol: Protocol

    def __str__(self) -> str:
        if self.address in (ANY4, ANY6):
            host = "0.0.0.0" if self.address == ANY4 else "[::]"
            return f"{host}:{self.port}/{self.protocol.name}"
        return f"{format_endpoint(self.address, self.port)}/{self.protocol.name}"


class Frontend(msgspec.Struct, frozen=True):
    """An address of a Service port.

    `restricted`: loadBalancerSourceRanges or node port ranges apply, so only a hook that sees the
    client's address may serve it. `at_node`: an ExternalIP or LoadBalancer address that is also a
    NodePort address, so its port must not be another Service's NodePort. `on_device`: a ClusterIP
    that a device of this node has, so ports at which no Service is served are the node's.
    """

    at: FrontendAddress
    kind: FrontendKind
    restricted: bool = False
    at_node: bool = False
    on_device: bool = False


class Backend(msgspec.Struct, frozen=True, gc=False, order=True):
    """An address and port to which connections are sent."""

    address: Addr
    port: int
    protocol: Protocol

    def __str__(self) -> str:
        return format_endpoint(self.address, self.port)


class RealServer(NamedTuple):
    """A backend in mode ipvs, whose virtual service has the protocol."""

    address: Addr
    port: int

    def __str__(self) -> str:
        return format_endpoint(self.address, self.port)


class VirtualService(NamedTuple):
    """A virtual service of IPVS: of an address and port, or, if `fwmark` is not 0, of all packets
    with that fwmark. Then `address` is the ANY address of the family, `port` is 0 and `protocol` is
    TCP, which is what the kernel reports for such a service. Other programs' may have a protocol
    that no Service has.
    """

    protocol: int
    address: Addr
    port: int
    fwmark: int = 0

    @property
    def family(self) -> int:
        """4 or 6."""
        return family_of(self.address)

    def __str__(self) -> str:
        if self.fwmark:
            return f"mark {self.fwmark:#x} IPv{self.family}"
        return f"{format_endpoint(self.address, self.port)}/{self.protocol}"


BackendSet = tuple[Backend, ...]
"""The backends of a frontend; sorted, without duplicates."""


class Spread(msgspec.Struct, frozen=True, gc=False):
    """How connections are distributed over the backends of a set. `weights`: one for each backend,
    at least 1 and without a common divisor; () if all are equal.
    """

    algorithm: Algorithm = Algorithm.RANDOM
    weights: tuple[int, ...] = ()


SpreadSet = tuple[BackendSet, Spread]
EVEN_SPREAD: Final = Spread()


class ServiceState(msgspec.Struct, frozen=True):
    """One Service port as it should be programmed.

    `cluster` and `local` are the backend sets by traffic policy, without backends of weight 0;
    `local` is empty unless a policy is Local. `algorithm` applies to both; for the weights see
    Spread. `serving` holds every endpoint that still serves, selected or not: UDP flows to any
    other address are cut. `any_endpoints` decides between refuse and drop when a set is empty.
    `on_node` are the addresses of all endpoints on this node. `source_ranges` are the clients, of
    this family, that may connect to restricted frontends; `node_port_ranges` the same for a
    restricted NodePort. `lost` are frontends that another Service has won, and that Service
    (policy/frontends.py). `refused` are frontends that this Service may not have, with the reason
    (policy/admission.py). `left_to_node` are ClusterIPs that a device of this node
    has and that a process of the node serves: their traffic is not touched.
    `created` is the Service's creationTimestamp, "" if unknown. `slices` are the EndpointSlices of
    this family that the endpoints come from, sorted by name: what they say of an endpoint (Pod,
    node, zone, conditions) is shown, and decides nothing.
    """

    key: ServicePortKey
    frontends: tuple[Frontend, ...]
    cluster: BackendSet
    local: BackendSet = ()
    serving: BackendSet = ()
    internal_local: bool = False
    external_local: bool = False
    affinity_timeout: int = 0
    any_endpoints: bool = False
    source_ranges: tuple[Cidr, ...] = ()
    lost: tuple[tuple[FrontendAddress, ServiceName], ...] = ()
    algorithm: Algorithm = Algorithm.RANDOM
    cluster_weights: tuple[int, ...] = ()
    local_weights: tuple[int, ...] = ()
    on_node: tuple[Addr, ...] = ()
    refused: tuple[tuple[FrontendAddress, str], ...] = ()
    left_to_node: tuple[FrontendAddress, ...] = ()
    node_port_ranges: tuple[Cidr, ...] = ()
    created: str = ""
    slices: tuple[EndpointSlice, ...] = ()

    @property
    def sets(self) -> tuple["SpreadSet", "SpreadSet"]:
        """The cluster and the local set, each with its spread."""
        return (
            (self.cluster, _spread(self.algorithm, self.cluster_weights)),
            (self.local, _spread(self.algorithm, self.local_weights)),
        )


_EVEN_SPREADS: Final = {algorithm: Spread(algorithm) for algorithm in Algorithm}


def _spread(algorithm: Algorithm, weights: tuple[int, ...]) -> Spread:
    """Shares one value among nearly all Services."""
    return Spread(algorithm, weights) if weights else _EVEN_SPREADS[algorithm]


class DesiredState(msgspec.Struct, frozen=True):
    """Everything that a data plane has to program.

    `masquerade_addresses`: the node's address for SNAT, at most one of each family.
    `local_networks`: clients in these networks are pods of this node, at most one network of each
    family; if empty, pods are recognized by their devices. `exempt_pods`: uids of pods of this
    node whose sockets are not translated; while not `exempt_pods_known`, exemptions stay as they
    are. `other_node_addresses` is only for what is shown: a Pod with hostNetwork has its node's
    address.

    Once this value was passed on, only its writer may change `services` in place, and only between
    two calls of apply().
    """

    services: Mapping[ServicePortKey, ServiceState]
    node_addresses: tuple[Addr, ...] = ()
    masquerade_addresses: tuple[Addr, ...] = ()
    local_networks: tuple[Cidr, ...] = ()
    exempt_pods: tuple[str, ...] = ()
    exempt_pods_known: bool = True
    other_node_addresses: Container[Addr] = ()

"""What the kernel should do, as values: the policy's pure result, shared by all data planes."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from kbpf.model.address import ANY4, ANY6, Addr, format_endpoint
from kbpf.model.objects import Algorithm, Cidr, Protocol, ServiceName


class ServicePortKey(NamedTuple):
    """One port of a Service in one family: what has backend sets and affinity of its own.

    kube-proxy runs one proxier per family, each with its own ServicePorts.
    """

    namespace: str
    name: str
    port: str
    protocol: Protocol
    family: int

    @property
    def service(self) -> ServiceName:
        """The Service."""
        return ServiceName(self.namespace, self.name)

    def __str__(self) -> str:
        port = f":{self.port}" if self.port else ""
        return f"{self.namespace}/{self.name}{port} {self.protocol.name} IPv{self.family}"


class FrontendKind(StrEnum):
    """Why an address is ours."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    EXTERNAL_IP = "ExternalIP"
    LOAD_BALANCER = "LoadBalancer"


class FrontendAddress(NamedTuple):
    """What a client dials. A NodePort has the address ANY4 or ANY6: one entry serves every
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
    """An address of a Service port. `restricted`: loadBalancerSourceRanges apply to it, so only
    a hook that sees the client's address may serve it. `at_node`: an ExternalIP or LoadBalancer
    address that serves NodePorts, so it must not have the port of another Service's NodePort.
    """

    at: FrontendAddress
    kind: FrontendKind
    restricted: bool = False
    at_node: bool = False


class Backend(msgspec.Struct, frozen=True, gc=False, order=True):
    """An address and port that serves."""

    address: Addr
    port: int
    protocol: Protocol

    def __str__(self) -> str:
        return format_endpoint(self.address, self.port)


BackendSet = tuple[Backend, ...]
"""The list that a frontend points at; sorted, without duplicates."""


class Spread(msgspec.Struct, frozen=True, gc=False):
    """How connections are spread over the backends of a set. `weights`: one for each backend, 1 or
    more and without a common divisor, or () where all are equal.
    """

    algorithm: Algorithm = Algorithm.RANDOM
    weights: tuple[int, ...] = ()


EVEN_SPREAD: Final = Spread()


class ServiceState(msgspec.Struct, frozen=True):
    """One Service port as it should be programmed.

    `cluster` and `local` are the sets by traffic policy; `local` is empty unless a policy asks.
    Who gets no connections by its weight is in neither. `algorithm` holds for both, and the
    weights are those of Spread.
    `serving` holds every endpoint that still serves, selected or not: UDP flows to anything else
    are cut. `any_endpoints` chooses between refuse and drop when a set is empty.
    `on_node` are the addresses of endpoints of this node, selected or not.
    `source_ranges` are who may dial restricted frontends, of this family; `node_port_ranges` the
    same of a restricted NodePort, the node's own.
    `lost` names frontends that another Service won, with the winner; `refused` those that no
    Service may have, with the reason in words (policy/admission.py).
    `created` is the Service's creationTimestamp; "" is unknown.
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
    node_port_ranges: tuple[Cidr, ...] = ()
    created: str = ""

    @property
    def cluster_spread(self) -> Spread:
        """Of the cluster set."""
        return _spread(self.algorithm, self.cluster_weights)

    @property
    def local_spread(self) -> Spread:
        """Of the local set."""
        return _spread(self.algorithm, self.local_weights)


_EVEN_SPREADS: Final = {algorithm: Spread(algorithm) for algorithm in Algorithm}


def _spread(algorithm: Algorithm, weights: tuple[int, ...]) -> Spread:
    """The same value for nearly all Services."""
    return Spread(algorithm, weights) if weights else _EVEN_SPREADS[algorithm]


class DesiredState(msgspec.Struct, frozen=True):
    """Everything that a data plane has to make true.

    `masquerade_as`: the node's own address for translated sources, at most one of each family.
    `local_networks`: clients in them are pods of this node, at most one network of each family;
    none: by their devices. `exempt_pods`: uids of pods of this node whose sockets are left alone;
    not `pods_known`: nobody has told yet, so what was exempt stays so.

    Do not change `services` in place after it was handed out, other than by the one writer between
    two calls of apply().
    """

    services: Mapping[ServicePortKey, ServiceState]
    node_addresses: tuple[Addr, ...] = ()
    masquerade_addresses: tuple[Addr, ...] = ()
    local_networks: tuple[Cidr, ...] = ()
    exempt_pods: tuple[str, ...] = ()
    exempt_pods_known: bool = True

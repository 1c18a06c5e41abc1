"""The agent's settings, after files and flags were read and checked."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from kbpf.model.address import Addr
from kbpf.model.objects import API_SERVER, Algorithm, Cidr, ServiceName


class SocketLb(StrEnum):
    """Whose sockets are served at connect(). Everybody else's packets need the packet path."""

    OFF = "off"
    HOST_NAMESPACE_ONLY = "hostNamespaceOnly"
    ON = "on"


class Accounting(StrEnum):
    """What is counted of connections by Service and backend, beside those that there are."""

    OFF = "off"
    CONNECTIONS = "connections"
    FULL = "full"


class ServiceAnnotations(StrEnum):
    """Which annotations of a Service count: none, kbpf.io/algorithm, or kbpf.io/weights as well."""

    OFF = "off"
    ALGORITHM = "algorithm"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class MapSizes:
    """How many entries the maps may hold at most; they start smaller and grow on demand.

    `affinity` is an LRU map: full means that the oldest entry goes.
    `connections` are those of the packet path: beyond it those make room that nobody needs.
    `counts` are pairs of a Service port and a backend whose connections are counted.
    """

    frontends: int = 262_144
    slots: int = 4_194_304
    backends: int = 1_048_576
    connections: int = 131_072
    affinity: int = 65_536
    counts: int = 131_072


@dataclass(frozen=True, slots=True)
class Serving:
    """Where the agent answers questions about itself, and about Services' health.

    `healthz` (/healthz, /livez) and `metrics` (/metrics, /configz and others) are ``IP:PORT``, an
    IPv6 address in brackets, several with commas between them; "" switches the server off. A
    wildcard of either family means both, as in Go. `hard_fail`: an address that cannot be had ends
    the agent, instead of being tried again.
    `late_seconds`: what has waited for so long to be programmed makes the agent unhealthy:
    kube-proxy's 2 x syncPeriod. `service_series`: so many Services at most have their own series,
    `backend_series`: so many of their backends.
    """

    healthz: str = "0.0.0.0:10256"
    metrics: str = "127.0.0.1:10249"
    hard_fail: bool = False
    late_seconds: float = 60.0
    service_series: int = 1000
    backend_series: int = 0


MAX_CONNTRACK_ENTRIES: Final = 1_048_576
"""Entries that the kernel's conntrack is told to hold, on machines with many CPUs."""


@dataclass(frozen=True, slots=True)
class Conntrack:
    """What the kernel's conntrack is set to at the start: kube-proxy's settings and defaults. Times
    are whole seconds; 0 leaves what is there.

    Entries: `max_per_core` for each CPU, `least` at least; `max_per_core` 0 leaves what is there,
    whatever `least` says.
    """

    max_per_core: int = 32_768
    least: int = 131_072
    tcp_established: int = 86_400
    tcp_close_wait: int = 3_600
    tcp_be_liberal: bool = False
    udp: int = 0
    udp_stream: int = 0


@dataclass(frozen=True, slots=True)
class IpvsTimeoutSettings:
    """After how many seconds without a packet IPVS forgets a connection; 0 leaves what is there:
    Linux begins with 900, 120 and 300. `tcp_fin`: after an end's FIN.
    """

    tcp: int = 0
    tcp_fin: int = 0
    udp: int = 0


class LocalMode(StrEnum):
    """How pods of this node are told from others: kube-proxy's words."""

    NONE = ""
    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that decides what the agent does. Defaults are kube-proxy's where it has them.

    `node_port_addresses`: networks in which the node's own addresses serve NodePorts; empty
    means the primary addresses (nftables mode's default).
    `primary_node_ports`: the primary addresses beside these networks.
    `all_node_port_addresses`: every address of the node instead.
    `socket_lb`: whose sockets the hooks serve, but for processes in a cgroup whose path below the
    cgroup v2 root matches one of `socket_lb_exempt` (fnmatch).
    `socket_lb_label`: whether Pods of an API server are watched for the label kbpf.io/socket-lb.
    `packet_path`: whether packets from outside and from unhooked pods are balanced, on `devices`
    (patterns; empty: chosen by their kind) but for `excluded_devices`. `masquerade_ports`: the
    ports, both included, for sources that become the node's address. `masquerade_bit`: which bit
    of the mark (0 to 31) the packets of such flows carry through the node's stack.
    `forwarding`: how a packet gets to a pod of this node: up the `stack`, past the host's
    netfilter, or `direct` to the pod's device.
    `detect_local_mode`: who counts as a pod of this node, as with kube-proxy. `cluster_cidrs`,
    `pod_bridge_interface` and `pod_interface_name_prefix` belong to one mode each.
    `node_port_source_ranges`: who may dial NodePorts; of a family without any: everybody.
    `external_ips`: which ExternalIPs are served: "all" but those that belong to the node or a pod,
    or those in these networks, of which there may be none. `watch_nodes`: which Nodes are watched
    for addresses that are no ExternalIPs: `own`, `all`, or `auto`, all in a cluster that is not
    large.
    `algorithm`: of Services that do not say by annotation. `service_annotations`: which of them
    count. `system_namespaces`: whose Services are programmed first and may use what is kept of the
    maps for them, beside the Service default/kubernetes.
    `ipvs_scheduler`: IPVS' word for how Services without an algorithm or weights of their own are
    spread. `ipvs_device` holds their addresses, `nft_table` is of the family inet, and `state_dir`
    holds what a bpffs cannot. `ipvs_times`: when IPVS forgets idle connections. `strict_arp`: only
    addresses of the asked device are answered for.
    `serving`: health checks and metrics. `accounting`: what is counted of connections by
    Service and backend: nothing, their beginning, or their end, too.
    `proxy_mode`: kube-proxy's word for the mode that it was asked for, "" when nobody did.
    `bind_address`: overrides what the Node says is its first address of that family; nothing is
    bound to it. `min_sync_period`: changes are programmed at least so many seconds apart, 0: at
    once. `config_sync_period`: so often, in seconds, all that is programmed is read and compared.
    `source_empty_grace`: seconds that a folder of objects keeps what it held after its last file is
    gone. `allow_insecure_api`: credentials may go over http://, and an unverified server is fine.
    `oom_score_adj`: of this process. `conntrack`: what the kernel's is set to.
    """

    node_name: str = ""
    kubeconfig: Path | None = None
    master: str = ""
    source: Path | None = None
    mode: str = "auto"
    pin_dir: Path = Path("/sys/fs/bpf/kbpf")
    cgroup: Path | None = None
    cache_dir: Path = Path("/var/cache/kbpf")
    node_port_addresses: tuple[Cidr, ...] = ()
    primary_node_ports: bool = False
    all_node_port_addresses: bool = False
    localhost_node_ports: bool = True
    node_port_source_ranges: tuple[Cidr, ...] = ()
    external_ips: str | tuple[Cidr, ...] = "all"
    watch_nodes: str = "auto"
    algorithm: Algorithm = Algorithm.RANDOM
    service_annotations: ServiceAnnotations = ServiceAnnotations.ALL
    system_namespaces: tuple[str, ...] = ("kube-system",)
    sizes: MapSizes = field(default_factory=MapSizes)
    socket_lb: SocketLb = SocketLb.ON
    socket_lb_exempt: tuple[str, ...] = ()
    socket_lb_label: bool = False
    packet_path: bool = True
    devices: tuple[str, ...] = ()
    excluded_devices: tuple[str, ...] = ()
    masquerade_all: bool = False
    masquerade_ports: tuple[int, int] = (1024, 29_999)
    masquerade_bit: int = 14
    forwarding: str = "stack"
    detect_local_mode: LocalMode = LocalMode.NONE
    cluster_cidrs: tuple[Cidr, ...] = ()
    pod_bridge_interface: str = ""
    pod_interface_name_prefix: str = ""
    ipvs_scheduler: str = "rr"
    ipvs_device: str = "kbpf-ipvs0"
    nft_table: str = "kbpf"
    state_dir: Path = Path("/run/kbpf")
    ipvs_times: IpvsTimeoutSettings = field(default_factory=IpvsTimeoutSettings)
    strict_arp: bool = False
    serving: Serving = field(default_factory=Serving)
    accounting: Accounting = Accounting.CONNECTIONS
    proxy_mode: str = ""
    bind_address: Addr | None = None
    min_sync_period: float = 0.0
    config_sync_period: float = 900.0
    source_empty_grace: float = 60.0
    allow_insecure_api: bool = False
    oom_score_adj: int = -999
    conntrack: Conntrack = field(default_factory=Conntrack)
    log_format: str = "text"
    log_level: str = "info"


def is_system_service(service: ServiceName, config: Config) -> bool:
    """Whether the cluster itself depends on this Service, so that it comes before all others."""
    return service.namespace in config.system_namespaces or service == API_SERVER

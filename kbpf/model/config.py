# SPDX-License-Identifier: Apache-2.0
"""The agent's settings, after configuration file, flags and environment were read and checked."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from kbpf.model.address import Addr
from kbpf.model.objects import API_SERVER, Algorithm, Cidr, ServiceName


class SocketLb(StrEnum):
    """Which sockets are translated at connect(). Traffic of all others needs the packet path."""

    OFF = "off"
    HOST_NAMESPACE_ONLY = "hostNamespaceOnly"
    ON = "on"


class Accounting(StrEnum):
    """What is counted for each Service and backend, besides the number of open connections."""

    OFF = "off"
    CONNECTIONS = "connections"
    FULL = "full"


SLOTS_PER_BACKEND: Final = 4
"""A backend has a slot in each set that contains it, or several with weights or Maglev."""


@dataclass(frozen=True, slots=True)
class MapSizes:
    """Upper limits for the number of map entries. Maps start smaller and grow on demand."""

    frontends: int = 262_144

    backends: int = 1_048_576

    slots: int = 4_194_304
    """Not a setting: it follows from `backends`, with at least SLOTS_PER_BACKEND for each."""

    connections: int = 131_072
    """Connections of the packet path. At the limit, entries that are no longer needed are evicted.
    """

    affinity: int = 65_536
    """An LRU map: when it is full, the least recently used entry is evicted."""

    counts: int = 131_072
    """Pairs of Service port and backend whose connections are counted. Not a setting."""


@dataclass(frozen=True, slots=True)
class Serving:
    """HTTP servers of the agent: health checks and metrics.

    `healthz` and `metrics` are ``IP:PORT``, with an IPv6 address in brackets; several are separated
    by commas. "" switches the server off. A wildcard of either family means both, as in Go.
    """

    healthz: str = "0.0.0.0:10256"
    """Serves /healthz and /livez."""

    metrics: str = "127.0.0.1:10249"
    """Serves /metrics, /configz and others."""

    hard_fail: bool = False
    """The agent exits if it cannot bind an address; otherwise it keeps retrying."""

    late_seconds: float = 60.0
    """The agent is unhealthy once a change has waited this long to be programmed (kube-proxy: 2 x
    syncPeriod).
    """

    service_series: int = 1000
    """Maximum number of Service ports with their own metric series."""

    backend_series: int = 0
    """Maximum number of pairs of Service port and backend with their own metric series."""


IPVS_DEVICE: Final = "kbpf-ipvs0"
"""Mode ipvs: the dummy device that holds Service addresses."""

MAX_CONNTRACK_ENTRIES: Final = 1_048_576
"""Upper limit for nf_conntrack_max, which is otherwise computed from the number of CPUs."""


@dataclass(frozen=True, slots=True)
class Conntrack:
    """The kernel's conntrack settings, written once at start: kube-proxy's settings and defaults.

    Timeouts are in seconds; 0 leaves the kernel's value unchanged.
    """

    max_per_core: int = 32_768
    """nf_conntrack_max per CPU; 0 leaves nf_conntrack_max unchanged, whatever `least` is."""

    least: int = 131_072
    """Lower limit for nf_conntrack_max."""

    tcp_established: int = 86_400

    tcp_close_wait: int = 3_600

    tcp_be_liberal: bool = False

    udp: int = 0

    udp_stream: int = 0


@dataclass(frozen=True, slots=True)
class IpvsTimeoutSettings:
    """IPVS timeouts for idle connections, in seconds; 0 leaves the kernel's value unchanged.

    Linux starts with 900, 120 and 300.
    """

    tcp: int = 0

    tcp_fin: int = 0
    """After a FIN."""

    udp: int = 0


class LocalMode(StrEnum):
    """How pods of this node are recognized, in kube-proxy's terms (detectLocalMode)."""

    NONE = ""
    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of the agent. Defaults are those of kube-proxy where it has the setting."""

    node_name: str = ""
    """The name of our Node object."""

    kubeconfig: Path | None = None
    """None: the service account of the pod."""

    master: str = ""
    """URL of the API server, or several with commas; replaces the one in the kubeconfig."""

    source: Path | None = None
    """A folder of manifests to read instead of an API server."""

    mode: str = "auto"
    """Which data plane: "bpf", "ipvs" or "auto"."""

    pin_dir: Path = Path("/sys/fs/bpf/kbpf")
    """The folder on a bpffs in which maps and links are pinned."""

    cgroup: Path | None = None
    """The cgroup v2 folder to which the hooks attach; None: the root of the hierarchy."""

    cache_dir: Path = Path("/var/cache/kbpf")
    """Where compiled programs are stored."""

    node_port_addresses: tuple[Cidr, ...] = ()
    """The node's addresses in these networks serve NodePorts. Empty: its primary addresses, as in
    kube-proxy's nftables mode.
    """

    primary_node_ports: bool = False
    """The primary addresses serve NodePorts in addition to `node_port_addresses`."""

    all_node_port_addresses: bool = False
    """Every address of the node serves NodePorts."""

    localhost_node_ports: bool = True
    """NodePorts are also served on the host's loopback addresses."""

    kubernetes_version: str = "1.37"
    """The version whose kube-proxy is followed where two versions differ."""

    node_port_source_ranges: tuple[Cidr, ...] = ()
    """Clients that may connect to NodePorts; a family without ranges is not restricted."""

    external_ips: str | tuple[Cidr, ...] = "all"
    """Which ExternalIPs are served: "all" except addresses of nodes and pods, or only those in
    these networks; an empty tuple means none.
    """

    algorithm: Algorithm = Algorithm.RANDOM
    """For Services without the annotation kbpf.io/algorithm."""

    system_namespaces: tuple[str, ...] = ("kube-system",)
    """Services in these namespaces, and default/kubernetes, are programmed first and may use map
    entries that are reserved for them.
    """

    sizes: MapSizes = field(default_factory=MapSizes)

    socket_lb: SocketLb = SocketLb.ON

    socket_lb_exempt: tuple[str, ...] = ()
    """fnmatch patterns for cgroup paths, relative to the cgroup v2 root. Sockets of processes in a
    matching cgroup are not translated.
    """

    socket_lb_label: bool = False
    """Whether Pods of an API server are watched for the label kbpf.io/socket-lb."""

    mesh_pods: bool = True
    """Whether sockets of Pods whose traffic a service mesh redirects are exempt. Needs permission
    to watch Pods; without it, no Pod is recognized.
    """

    packet_path: bool = True
    """Whether packets from other machines, and from pods without hooks, are load-balanced."""

    devices: tuple[str, ...] = ()
    """Patterns for the devices of the packet path; empty: they are chosen by their kind."""

    excluded_devices: tuple[str, ...] = ()
    """Patterns for devices to which no program is attached."""

    masquerade_all: bool = False
    """All connections to a ClusterIP are masqueraded, as in kube-proxy."""

    masquerade_ports: tuple[int, int] = (1024, 29_999)
    """First and last source port for SNAT to an address of the node."""

    masquerade_bit: int = 14
    """Bit (0 to 31) of the packet mark that SNATed packets carry through the node's stack."""

    forwarding: str = "auto"
    """Who translates packets from outside, and what they pass: "netfilter", the host's conntrack;
    "stack", the packet path, and then the host's netfilter, except for masqueraded flows to other
    nodes; "direct", the packet path, past the stack; "auto", netfilter if possible, else stack.
    """

    detect_local_mode: LocalMode = LocalMode.NONE

    cluster_cidrs: tuple[Cidr, ...] = ()
    """For mode ClusterCIDR."""

    pod_bridge_interface: str = ""
    """For mode BridgeInterface."""

    pod_interface_name_prefix: str = ""
    """For mode InterfaceNamePrefix."""

    ipvs_scheduler: str = "rr"
    """The IPVS scheduler for Services without an algorithm or weights of their own."""

    state_dir: Path = Path("/run/kbpf")
    """State that cannot be stored on a bpffs."""

    ipvs_times: IpvsTimeoutSettings = field(default_factory=IpvsTimeoutSettings)

    strict_arp: bool = False
    """Mode ipvs: the node does not answer ARP requests for Service addresses."""

    serving: Serving = field(default_factory=Serving)

    accounting: Accounting = Accounting.CONNECTIONS

    proxy_mode: str = ""
    """The mode requested in kube-proxy's terms; "" if none was."""

    bind_address: Addr | None = None
    """Used as an address of the node, before those in the Node object. No socket is bound to it."""

    min_sync_period: float = 0.0
    """Minimum number of seconds between two applies; 0: changes are applied at once."""

    config_sync_period: float = 900.0
    """Seconds between two full comparisons of the programmed state with the desired one."""

    verify_period: float = 300.0
    """Seconds between two proofs that connections to Services are translated; 0: never."""

    verify_readiness: bool = False
    """Whether /readyz and /healthz fail while they are not."""

    allow_insecure_api: bool = False
    """Credentials may be sent over http:// or to a server whose certificate is not verified."""

    oom_score_adj: int = -999
    """Of this process."""

    conntrack: Conntrack = field(default_factory=Conntrack)

    log_format: str = "text"

    log_level: str = "info"

    ignored_in_ipvs: tuple[str, ...] = field(default=(), compare=False)
    """The flags of settings that are not the default and have no effect in mode ipvs."""

    @property
    def ipvs_folder(self) -> Path:
        """The state folder of mode ipvs."""
        return self.state_dir / IPVS_DEVICE

    @property
    def uses_conntrack(self) -> bool:
        """Whether conntrack translates the flows of the packet path, in mode bpf."""
        return self.packet_path and self.forwarding == "netfilter"


def is_system_service(service: ServiceName, config: Config) -> bool:
    """Whether the cluster depends on this Service, so that it is programmed before others."""
    return service.namespace in config.system_namespaces or service == API_SERVER

# SPDX-License-Identifier: Apache-2.0
"""The settings of `kbpf run`, one row each; load.py builds a Config from them.

A flag overrides its environment variable (`--pin-dir`: KBPF_PIN_DIR), which overrides the
configuration file, which overrides the default, which is that of the field in model/config.py. An
empty flag or variable counts as unset, except for the addresses of servers, where it means "do not
listen". For kube-proxy's own flags together with kube-proxy's own file see load.py.
"""

from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from kbpf.config import kinds
from kbpf.config.kinds import USED_GATES, Kind
from kbpf.model.config import Config

CLUSTER: Final = "Where Services come from"
NODE: Final = "This node"
CONNTRACK: Final = "The kernel's conntrack, as kube-proxy sets it (flows in kbpf's own maps have fixed timeouts)"
SERVING: Final = "Health and metrics"
LOGGING: Final = "Logging"
SIZES: Final = "Map sizes (maximum number of entries)"
UNUSED_FLAGS: Final = "Accepted for compatibility with kube-proxy, but not used"

BPF, IPVS = "bpf", "ipvs"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting.

    `field`: what it sets in Config (with a dot: in a part of it); "" for a flag of kube-proxy that
    has no effect here, and then `text` says why. `group` and `text`: its heading in the help, and
    the help. `aliases`: other names of the flag. `kbpf`: the path in KbpfConfiguration.
    `kube_proxy`: the paths in KubeProxyConfiguration, separated by blanks; kubeproxy.py reads those
    that depend on other fields. `proxy_modes`: kube-proxy's modes in which the flag counts; () for
    all. `only`: the mode without which the setting has no effect. Paths of BPF objects are not
    marked: mode auto uses them, and so does an agent of mode ipvs that drains what mode bpf left.
    """

    name: str
    field: str
    kind: Kind
    group: str
    text: str
    aliases: tuple[str, ...] = ()
    kbpf: str = ""
    kube_proxy: str = ""
    only: str = ""
    proxy_modes: tuple[str, ...] = ()

    @property
    def environment_variable(self) -> str:
        """The environment variable that sets the same field."""
        return "KBPF_" + self.name.strip("-").replace("-", "_").upper()

    @property
    def help(self) -> str:
        return f"mode ipvs: {self.text}" if self.only == IPVS else self.text

    @property
    def is_ignored_with_kube_proxy_document(self) -> bool:
        """Whether kube-proxy ignores the flag if it has a configuration file. It still reads
        --hostname-override, --master and its logging flags.
        """
        is_kube_proxys = bool(self.kube_proxy) or not self.field
        return is_kube_proxys and not (
            self.group == LOGGING or self.name.startswith(("--hostname-", "--log-", "--vmodule"))
        )


DEFAULT: Final = Config()


@dataclass(frozen=True, slots=True)
class UnusedSetting:
    """A setting of kube-proxy that has no effect here, and why. `flag` and `path`: its flag and its
    field in KubeProxyConfiguration, or "". `defaults`: values of the field that mean the default,
    besides the zero value. `json_type`: of the field.
    """

    flag: str
    path: str
    why: str
    defaults: Collection[Any] = ()
    json_type: Any = str


FEW_REQUESTS: Final = "kbpf sends few requests, which need no rate limit"

UNUSED_SETTINGS: Final = (
    UnusedSetting(
        "--kube-api-content-type",
        "clientConnection.contentType",
        "kbpf requests JSON",
        ("application/vnd.kubernetes.protobuf", "application/json"),
    ),
    UnusedSetting("--kube-api-qps", "clientConnection.qps", FEW_REQUESTS, (5,), float),
    UnusedSetting("--kube-api-burst", "clientConnection.burst", FEW_REQUESTS, (10,), int),
    UnusedSetting("--show-hidden-metrics-for-version", "showHiddenMetricsForVersion", "no metric is hidden"),
    UnusedSetting(
        "--ipvs-exclude-cidrs",
        "ipvs.excludeCIDRs",
        "kbpf never changes IPVS services that it has not created",
        json_type=kinds.LIST,
    ),
    UnusedSetting("--healthz-port", "", "use --healthz-bind-address and --metrics-bind-address"),
    UnusedSetting("--metrics-port", "", "use --healthz-bind-address and --metrics-bind-address"),
    UnusedSetting(
        "--log-flush-frequency",
        "logging.flushFrequency",
        "each line is written immediately",
        ("0s", "5s", 5_000_000_000),
        int | str,
    ),
    UnusedSetting("--vmodule", "logging.vmodule", "kbpf logs by level, not by file", (), tuple[dict[str, Any], ...]),
    UnusedSetting("--log-text-info-buffer-size", "", "each line is written immediately"),
    UnusedSetting("--log-json-info-buffer-size", "", "each line is written immediately"),
    UnusedSetting("--boot-id-file", "", "kube-proxy does not use them either"),
    UnusedSetting("--machine-id-file", "", "kube-proxy does not use them either"),
    UnusedSetting("--profiling", "enableProfiling", "kbpf has no /debug/pprof", json_type=bool),
    UnusedSetting("--log-text-split-stream", "", "all lines go to stderr", json_type=bool),
    UnusedSetting("--log-json-split-stream", "", "all lines go to stderr", json_type=bool),
    UnusedSetting("", "clientConnection.acceptContentTypes", "kbpf requests JSON"),
    UnusedSetting(
        "",
        "iptables.snatNodeInternalIP",
        "clients get an address of the outgoing device, which may differ from the node's "
        "InternalIP that policies may expect",
        json_type=bool,
    ),
    UnusedSetting("", "winkernel", "kbpf runs on Linux only", json_type=dict[str, Any]),
    UnusedSetting("", "windowsRunAsService", "kbpf runs on Linux only", json_type=bool),
    UnusedSetting("", "portRange", "kube-proxy does not use it either"),
    UnusedSetting("", "udpIdleTimeout", "kube-proxy does not use it either"),
    UnusedSetting("", "logging.options", "all lines go to stderr", json_type=dict[str, Any]),
    UnusedSetting(
        "", "featureGates", f"kbpf uses {' and '.join(sorted(USED_GATES))} and no other feature gate of Kubernetes"
    ),
)

SETTINGS: Final = (
    Setting(
        "--kubeconfig",
        "kubeconfig",
        kinds.FILE,
        CLUSTER,
        "how to reach the API server (default: the Pod's own service account)",
        kube_proxy="clientConnection.kubeconfig",
    ),
    Setting(
        "--master",
        "master",
        kinds.URL,
        CLUSTER,
        "the API server's URL, overriding the kubeconfig's; several servers of one cluster, "
        "separated by commas, are tried in turn when one cannot be reached",
        kbpf="master",
    ),
    Setting(
        "--source",
        "source",
        kinds.DIR,
        CLUSTER,
        "a folder of Kubernetes YAML instead of an API server, watched for changes",
        kbpf="source",
    ),
    Setting(
        "--allow-insecure-api",
        "allow_insecure_api",
        kinds.BOOLEAN,
        CLUSTER,
        "whether a token or password may be sent over http://, and insecure-skip-tls-verify is not "
        "reported as a problem (default false)",
        kbpf="allowInsecureApi",
    ),
    Setting(
        "--hostname-override",
        "node_name",
        kinds.NODE_NAME,
        NODE,
        "this node's name in Kubernetes (default: the hostname)",
        kube_proxy="hostnameOverride",
    ),
    Setting(
        "--proxy-mode",
        "proxy_mode",
        kinds.PROXY_MODE,
        NODE,
        "kube-proxy's mode, iptables, nftables or ipvs; it only decides on which addresses NodePorts answer by default",
        kube_proxy="mode",
    ),
    Setting(
        "--bind-address",
        "bind_address",
        kinds.BIND_ADDRESS,
        NODE,
        "the node's own address of this family, overriding its Node object; no socket is bound to it",
        kube_proxy="bindAddress",
    ),
    Setting(
        "--mode",
        "mode",
        kinds.MODE,
        NODE,
        "the data plane: bpf, ipvs (with nftables), or auto: bpf if the node supports it, else ipvs (default auto)",
        kbpf="mode",
    ),
    Setting(
        "--ipvs-scheduler",
        "ipvs_scheduler",
        kinds.SCHEDULER,
        NODE,
        "the scheduler for Services without kbpf.io/algorithm and kbpf.io/weights: rr, wrr, lc, "
        "wlc, lblc, lblcr, sh, mh, dh, sed, nq or fo (default rr)",
        kube_proxy="ipvs.scheduler",
        only=IPVS,
    ),
    Setting(
        "--ipvs-strict-arp",
        "strict_arp",
        kinds.BOOLEAN,
        NODE,
        "whether the node does not answer ARP requests for Service addresses (default false)",
        kube_proxy="ipvs.strictARP",
        only=IPVS,
    ),
    Setting(
        "--ipvs-tcp-timeout",
        "ipvs_times.tcp",
        kinds.WHOLE_SECONDS,
        NODE,
        "timeout of an idle TCP connection; 0 leaves it unchanged (default 0s)",
        kube_proxy="ipvs.tcpTimeout",
        only=IPVS,
    ),
    Setting(
        "--ipvs-tcpfin-timeout",
        "ipvs_times.tcp_fin",
        kinds.WHOLE_SECONDS,
        NODE,
        "timeout of a TCP connection after a FIN; 0 leaves it unchanged (default 0s)",
        kube_proxy="ipvs.tcpFinTimeout",
        only=IPVS,
    ),
    Setting(
        "--ipvs-udp-timeout",
        "ipvs_times.udp",
        kinds.WHOLE_SECONDS,
        NODE,
        "timeout of a UDP flow; 0 leaves it unchanged (default 0s)",
        kube_proxy="ipvs.udpTimeout",
        only=IPVS,
    ),
    Setting(
        "--state-dir",
        "state_dir",
        kinds.ABSOLUTE_DIR,
        NODE,
        f"the folder of the agent's lock and status (default {DEFAULT.state_dir})",
        kbpf="ipvs.stateDir",
        only=IPVS,
    ),
    Setting(
        "--pin-dir",
        "pin_dir",
        kinds.ABSOLUTE_DIR,
        NODE,
        f"the folder, in a bpffs, where maps and links are pinned across restarts (default {DEFAULT.pin_dir})",
        kbpf="pinDir",
    ),
    Setting(
        "--cgroup",
        "cgroup",
        kinds.DIR,
        NODE,
        "the cgroup v2 folder whose processes use Services (default: the root, all processes)",
        kbpf="cgroup",
    ),
    Setting(
        "--cache-dir",
        "cache_dir",
        kinds.DIR,
        NODE,
        f"the folder of compiled programs (default {DEFAULT.cache_dir})",
        kbpf="cacheDir",
    ),
    Setting(
        "--nodeport-addresses",
        "node_ports",
        kinds.NODE_PORTS,
        NODE,
        "the addresses on which NodePorts answer: networks, `primary` (the Node's addresses), "
        "`localhost` or `all`, separated by commas (default primary)",
        kube_proxy="nodePortAddresses",
    ),
    Setting(
        "--localhost-nodeports",
        "localhost_node_ports",
        kinds.BOOLEAN,
        NODE,
        "whether NodePorts answer on loopback, to processes of the host (default true); only if "
        "--nodeport-addresses includes loopback or is unset, and not with --proxy-mode nftables or ipvs",
        ("--iptables-localhost-nodeports",),
        kbpf="localhostNodePorts",
        kube_proxy="iptables.localhostNodePorts",
    ),
    Setting(
        "--nodeport-source-ranges",
        "node_port_source_ranges",
        kinds.NETWORKS,
        NODE,
        "the client networks that may connect to this node's NodePorts, separated by commas; a "
        "family without a network is not restricted (default: not restricted)",
        kbpf="nodePortSourceRanges",
    ),
    Setting(
        "--kubernetes-version",
        "kubernetes_version",
        kinds.KUBERNETES_VERSION,
        NODE,
        "the version of Kubernetes whose kube-proxy is followed where they differ: whether NodePorts answer on "
        "loopback in mode nftables (default 1.37)",
        kbpf="kubernetesVersion",
    ),
    Setting(
        "--feature-gates",
        "feature_gates",
        kinds.FEATURE_GATES,
        NODE,
        "kube-proxy's feature gates: AllowServiceExternalIPs=false means --external-ips off; "
        "KubeProxyNFTablesLocalhostNodePorts=true, the default of 1.38: NodePorts answer on loopback in mode "
        "nftables if --nodeport-addresses lists it; others are ignored",
        kube_proxy="featureGates",
    ),
    Setting(
        "--external-ips",
        "external_ips",
        kinds.EXTERNAL_IPS,
        NODE,
        "the ExternalIPs that Services may have. all: any except addresses of nodes and Pods. off: "
        "none. CIDRS: any in these networks, even addresses of nodes and Pods (default all)",
        kbpf="externalIPs",
    ),
    Setting(
        "--algorithm",
        "algorithm",
        kinds.ALGORITHM,
        NODE,
        "how a backend is chosen for Services without the annotation kbpf.io/algorithm (default random)",
        kbpf="algorithm",
    ),
    Setting(
        "--system-namespaces",
        "system_namespaces",
        kinds.NAMES,
        NODE,
        "namespaces whose Services are programmed first, like default/kubernetes, and for which a "
        "part of the maps is reserved (default kube-system)",
        kbpf="systemNamespaces",
    ),
    Setting(
        "--socket-lb",
        "socket_lb",
        kinds.SOCKET_LB,
        NODE,
        "the sockets that are connected to a backend at connect(): none, those in the host's "
        "network namespace, or all (default on); all other sockets need the packet path",
        kbpf="socketLB.mode",
        only=BPF,
    ),
    Setting(
        "--socket-lb-exempt",
        "socket_lb_exempt",
        kinds.CGROUPS,
        NODE,
        "cgroups whose processes use the packet path instead, as folders below the cgroup v2 root, "
        "separated by commas; patterns such as system.slice/istio* are allowed (for a pod use the "
        "label kbpf.io/socket-lb=off: --socket-lb-label)",
        kbpf="socketLB.exempt",
        only=BPF,
    ),
    Setting(
        "--socket-lb-label",
        "socket_lb_label",
        kinds.BOOLEAN,
        NODE,
        "whether Pods of this node are watched for the label kbpf.io/socket-lb=off, which needs "
        "permission to list and watch Pods (default false); Pods of --source are always read",
        kbpf="socketLB.label",
    ),
    Setting(
        "--mesh-pods",
        "mesh_pods",
        kinds.BOOLEAN,
        NODE,
        "whether Pods whose traffic a service mesh redirects (Istio, Linkerd, Consul, Kmesh) use the "
        "packet path, so that the mesh sees the Service's address (default true); without "
        "permission to list and watch Pods they are not recognized",
        kbpf="socketLB.meshPods",
    ),
    Setting(
        "--packet-path",
        "packet_path",
        kinds.BOOLEAN,
        NODE,
        "whether traffic from outside the node, and traffic of pods that the socket hooks do not "
        "see, is load-balanced per packet (default true)",
        kbpf="packetPath.enabled",
        only=BPF,
    ),
    Setting(
        "--device",
        "devices",
        kinds.NAMES,
        NODE,
        "the uplinks, separated by commas; patterns such as *.100 are allowed (default: chosen by the kind of device)",
        kbpf="packetPath.devices",
        only=BPF,
    ),
    Setting(
        "--exclude-device",
        "excluded_devices",
        kinds.NAMES,
        NODE,
        "devices on which packets are not load-balanced",
        kbpf="packetPath.excludeDevices",
        only=BPF,
    ),
    Setting(
        "--masquerade-ports",
        "masquerade_ports",
        kinds.PORTS,
        NODE,
        "the source ports for SNAT to the node's address; the node's own sockets do not get them (default 1024-29999)",
        kbpf="packetPath.masqueradePorts",
    ),
    Setting(
        "--iptables-masquerade-bit",
        "masquerade_bit",
        kinds.BIT,
        NODE,
        "--masquerade-bit, except in kube-proxy's mode nftables",
        kube_proxy="iptables.masqueradeBit",
        proxy_modes=("iptables", "ipvs"),
    ),
    *(
        Setting(
            f"--{mode}-{name}",
            field,
            kind,
            NODE,
            f"--{name}, in kube-proxy's mode {' or '.join(modes)}",
            kube_proxy=" ".join(f"{mode}.{path}" for mode in modes),
            proxy_modes=modes,
        )
        for name, field, kind, path in (
            ("sync-period", "serving.late_seconds", kinds.DOUBLED_PERIOD, "syncPeriod"),
            ("min-sync-period", "min_sync_period", kinds.SECONDS, "minSyncPeriod"),
        )
        for mode, modes in (("iptables", ("iptables", "nftables")), ("ipvs", ("ipvs",)))
    ),
    Setting(
        "--masquerade-bit",
        "masquerade_bit",
        kinds.BIT,
        NODE,
        "the bit of the packet mark that requests SNAT in the host's stack (default 14, as in kube-proxy)",
        kube_proxy="iptables.masqueradeBit nftables.masqueradeBit",
    ),
    Setting(
        "--masquerade-all",
        "masquerade_all",
        kinds.BOOLEAN,
        NODE,
        "whether traffic to ClusterIPs gets SNAT to the node's address, too (default false)",
        kube_proxy="iptables.masqueradeAll nftables.masqueradeAll",
    ),
    Setting(
        "--forwarding",
        "forwarding",
        kinds.FORWARDING,
        NODE,
        "who translates packets from outside, and what they pass: netfilter: conntrack, so that "
        "firewall rules before DNAT see NodePorts; stack: kbpf, before these; direct: kbpf, and "
        "packets go straight to the pod's veth, bypassing the host's firewall and network "
        "policies; or auto: netfilter from Linux 6.1 on if possible, else stack (default auto)",
        kbpf="packetPath.forwarding",
        only=BPF,
    ),
    Setting(
        "--detect-local-mode",
        "detect_local_mode",
        kinds.LOCAL_MODE,
        NODE,
        "how traffic of this node's pods is recognized: ClusterCIDR, NodeCIDR, BridgeInterface or "
        "InterfaceNamePrefix (default: ClusterCIDR with --cluster-cidr, else by device)",
        kube_proxy="detectLocalMode",
    ),
    Setting(
        "--cluster-cidr",
        "cluster_cidrs",
        kinds.CLUSTER_CIDRS,
        NODE,
        "the networks of the cluster's pods, separated by a comma; the first of each family is used",
        kube_proxy="clusterCIDR",
    ),
    Setting(
        "--pod-bridge-interface",
        "pod_bridge_interface",
        kinds.DEVICE,
        NODE,
        "the bridge of the pods, for --detect-local-mode BridgeInterface",
        kube_proxy="detectLocal.bridgeInterface",
    ),
    Setting(
        "--pod-interface-name-prefix",
        "pod_interface_name_prefix",
        kinds.DEVICE_PREFIX,
        NODE,
        "the name prefix of pod devices, for --detect-local-mode InterfaceNamePrefix",
        kube_proxy="detectLocal.interfaceNamePrefix",
    ),
    Setting(
        "--min-sync-period",
        "min_sync_period",
        kinds.SECONDS,
        NODE,
        "minimum time between two writes of changes (default 0s)",
        kube_proxy="iptables.minSyncPeriod ipvs.minSyncPeriod nftables.minSyncPeriod",
    ),
    Setting(
        "--config-sync-period",
        "config_sync_period",
        kinds.PERIOD,
        NODE,
        "interval at which the programmed state is compared with the desired one and repaired (default 15m)",
        kube_proxy="configSyncPeriod",
    ),
    Setting(
        "--oom-score-adj",
        "oom_score_adj",
        kinds.OOM_SCORE,
        NODE,
        "oom_score_adj of the agent's process, -1000 to 1000 (default -999)",
        kube_proxy="oomScoreAdj",
    ),
    Setting(
        "--conntrack-max-per-core",
        "conntrack.max_per_core",
        kinds.COUNT,
        CONNTRACK,
        "entries per CPU; 0 leaves the limit unchanged (default 32768)",
        kube_proxy="conntrack.maxPerCore",
    ),
    Setting(
        "--conntrack-min",
        "conntrack.least",
        kinds.COUNT,
        CONNTRACK,
        "minimum number of entries (default 131072)",
        kube_proxy="conntrack.min",
    ),
    Setting(
        "--conntrack-tcp-timeout-established",
        "conntrack.tcp_established",
        kinds.WHOLE_SECONDS,
        CONNTRACK,
        "timeout of an idle TCP connection; 0 leaves it unchanged (default 24h)",
        kube_proxy="conntrack.tcpEstablishedTimeout",
    ),
    Setting(
        "--conntrack-tcp-timeout-close-wait",
        "conntrack.tcp_close_wait",
        kinds.WHOLE_SECONDS,
        CONNTRACK,
        "timeout in state CLOSE_WAIT; 0 leaves it unchanged (default 1h)",
        kube_proxy="conntrack.tcpCloseWaitTimeout",
    ),
    Setting(
        "--conntrack-tcp-be-liberal",
        "conntrack.tcp_be_liberal",
        kinds.BOOLEAN,
        CONNTRACK,
        "whether packets out of the TCP window are accepted as valid (default false)",
        kube_proxy="conntrack.tcpBeLiberal",
    ),
    Setting(
        "--conntrack-udp-timeout",
        "conntrack.udp",
        kinds.WHOLE_SECONDS,
        CONNTRACK,
        "timeout of a UDP flow without a reply; 0 leaves it unchanged (default 0s)",
        kube_proxy="conntrack.udpTimeout",
    ),
    Setting(
        "--conntrack-udp-timeout-stream",
        "conntrack.udp_stream",
        kinds.WHOLE_SECONDS,
        CONNTRACK,
        "timeout of a UDP flow with replies; 0 leaves it unchanged (default 0s)",
        kube_proxy="conntrack.udpStreamTimeout",
    ),
    Setting(
        "--healthz-bind-address",
        "serving.healthz",
        kinds.HEALTHZ,
        SERVING,
        "the address of /healthz and /livez; empty: none (default 0.0.0.0:10256: all addresses of both families)",
        kube_proxy="healthzBindAddress",
    ),
    Setting(
        "--metrics-bind-address",
        "serving.metrics",
        kinds.METRICS,
        SERVING,
        "the address of /metrics, /configz and others; empty: none (default 127.0.0.1:10249)",
        kube_proxy="metricsBindAddress",
    ),
    Setting(
        "--bind-address-hard-fail",
        "serving.hard_fail",
        kinds.BOOLEAN,
        SERVING,
        "whether the agent exits if one of these addresses is in use; otherwise it retries (default false)",
        kube_proxy="bindAddressHardFail",
    ),
    Setting(
        "--sync-period",
        "serving.late_seconds",
        kinds.DOUBLED_PERIOD,
        SERVING,
        "the agent is unhealthy if a change has waited for twice this time (default 30s)",
        kube_proxy="iptables.syncPeriod ipvs.syncPeriod nftables.syncPeriod",
    ),
    Setting(
        "--metrics-services",
        "serving.service_series",
        kinds.COUNT,
        SERVING,
        "maximum number of Service ports with their own series, shared among namespaces: those "
        "with failures, then the busiest (default 1000)",
        kbpf="metrics.services",
    ),
    Setting(
        "--metrics-backends",
        "serving.backend_series",
        kinds.COUNT,
        SERVING,
        "maximum number of backends with their own series, counted once per Service port and "
        "chosen likewise (default 0)",
        kbpf="metrics.backends",
        only=BPF,
    ),
    Setting(
        "--accounting",
        "accounting",
        kinds.ACCOUNTING,
        SERVING,
        "what is counted per Service and backend: new and failed connections, or also bytes, "
        "retransmits and round-trip times (default connections)",
        kbpf="metrics.accounting",
        only=BPF,
    ),
    Setting(
        "--verify-period",
        "verify_period",
        kinds.SECONDS,
        SERVING,
        "interval at which the agent proves with connections of its own, without a packet, that "
        "Services are translated; 0s: never (default 5m)",
        kbpf="verify.period",
        only=BPF,
    ),
    Setting(
        "--verify-readiness",
        "verify_readiness",
        kinds.BOOLEAN,
        SERVING,
        "/readyz and /healthz return 503 while that proof fails (default false)",
        kbpf="verify.readiness",
        only=BPF,
    ),
    Setting(
        "-v",
        "log_level",
        kinds.VERBOSITY,
        LOGGING,
        "klog verbosity: 4 or more is debug, which logs each object that changes, each write to "
        "the maps and each request to the API server; less is info",
        ("--v",),
        kube_proxy="logging.verbosity",
    ),
    Setting(
        "--log-format",
        "log_format",
        kinds.LOG_FORMAT,
        LOGGING,
        "plain text, or one JSON object per line (default text)",
        ("--logging-format",),
        kube_proxy="logging.format",
    ),
    *(
        Setting(
            f"--max-{name}",
            f"sizes.{name}",
            kind,
            SIZES,
            f"{text} (default {getattr(DEFAULT.sizes, name)})",
            kbpf=f"mapSizes.{name}",
            only=BPF,
        )
        for name, kind, text in (
            ("frontends", kinds.ENTRIES, "addresses and ports of Services"),
            ("backends", kinds.ENTRIES, "backends, and a quarter of the slots of backend sets"),
            (
                "connections",
                kinds.CONNECTIONS,
                "connections of the packet path; while all are in use, new ones are dropped",
            ),
            ("affinity", kinds.ENTRIES, "clients with session affinity; the oldest are evicted"),
        )
    ),
    *(
        Setting(
            unused.flag,
            "",
            kinds.BOOLEAN if unused.json_type is bool else kinds.TEXT,
            UNUSED_FLAGS,
            unused.why,
        )
        for unused in UNUSED_SETTINGS
        if unused.flag
    ),
)

REMOVED_SETTINGS: Final = tuple(
    Setting(flag, "", kinds.TEXT, "", why, kbpf=path)
    for flag, path, why in (
        ("--ipvs-device", "ipvs.device", "the device is kbpf-ipvs0"),
        ("--log-level", "logLevel", "`-v 4` is debug, and less is info"),
        ("--max-counts", "mapSizes.counts", "131072 pairs are counted"),
        ("--max-slots", "mapSizes.slots", "there are four for each backend of `--max-backends`"),
        ("--metrics-latencies", "metrics.latencies", "they belong to `--accounting full`"),
        ("--nft-table", "ipvs.nftTable", "the table is kbpf"),
        ("--service-annotations", "serviceAnnotations", "both annotations are used"),
        ("--source-empty-grace", "sourceEmptyGrace", "it is one minute"),
        ("--source-speed", "sourceSpeed", "`--source` is a folder of YAML"),
        ("--status-page", "statusPage", "`kbpf page` prints the page about a node"),
        (
            "--watch-nodes",
            "watchNodes",
            "all Nodes are watched in a cluster of up to 500, else this one; `--external-ips` restricts ExternalIPs",
        ),
    )
)
"""Settings that this version still accepts, with a warning that they have no effect (`text`: why).
The next version refuses them.
"""

SETTINGS_BY_FLAG: Final = {
    name: setting for setting in (*SETTINGS, *REMOVED_SETTINGS) for name in (setting.name, *setting.aliases)
}


def ignored_in_ipvs(config: Config) -> tuple[str, ...]:
    """The flags of settings of mode bpf that differ from the default."""
    rows = (setting for setting in SETTINGS if setting.only == BPF)
    return tuple(
        setting.name for setting in rows if attrgetter(setting.field)(config) != attrgetter(setting.field)(DEFAULT)
    )

# SPDX-License-Identifier: Apache-2.0
"""The flags of `kbpf run`, one row each; load.py builds a Config from them.

A flag overrides its environment variable (`--pin-dir`: KBPF_PIN_DIR), which overrides the
configuration file, which overrides the default. An empty flag or variable counts as unset, except
for the addresses of servers, where it means "do not listen". For kube-proxy's own flags together
with kube-proxy's own file see load.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kbpf.config import parsers
from kbpf.config.parsers import Parser
from kbpf.model.config import Config, MapSizes


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag: its name, the field of Config that it sets (with a dot: a field of a part), its
    parser, the placeholder for its value in the help, its group in the help, and the help text.

    `field` is "" for a flag of kube-proxy that has no effect here; then `help` says why.
    `aliases` are other names of the flag.
    """

    name: str
    field: str
    parse: Parser
    metavar: str
    group: str
    help: str
    aliases: tuple[str, ...] = ()

    @property
    def environment_variable(self) -> str:
        """The environment variable that sets the same field."""
        return "KBPF_" + self.name.strip("-").replace("-", "_").upper()

    @property
    def is_boolean(self) -> bool:
        """Whether the flag without a value means `true`, as in kube-proxy."""
        return self.parse is parsers.boolean

    @property
    def accepts_empty(self) -> bool:
        """Whether an empty value has a meaning (no server). Otherwise it counts as unset."""
        return self.parse in (parsers.healthz, parsers.metrics)

    @property
    def is_repeatable(self) -> bool:
        """Whether the flag may be repeated, each time with further values."""
        return self.parse in (parsers.names, parsers.node_ports, parsers.cgroups)


CLUSTER: Final = "Where Services come from"
NODE: Final = "This node"
CONNTRACK: Final = "The kernel's conntrack, as kube-proxy sets it"
SERVING: Final = "Health and metrics"
LOGGING: Final = "Logging"
SIZES: Final = "Map sizes (maximum number of entries)"
UNUSED_FLAGS: Final = "Accepted for compatibility with kube-proxy, but not used"


def _size_flags() -> Iterator[Flag]:
    descriptions = {
        "frontends": "addresses and ports of Services",
        "slots": "slots of all backend sets together",
        "backends": "backends",
        "connections": "connections of the packet path; while all are in use, new ones are dropped",
        "affinity": "clients with session affinity; the oldest are evicted",
        "counts": "pairs of a Service and a backend whose connections are counted; further "
        "pairs are not counted",
    }
    default = MapSizes()
    for name, description in descriptions.items():
        text = f"{description} (default {getattr(default, name)})"
        reader = parsers.connections if name == "connections" else parsers.entries
        yield Flag(f"--max-{name}", f"sizes.{name}", reader, "NUMBER", SIZES, text)


def _conntrack_flags() -> Iterator[Flag]:
    count, duration, boolean = parsers.count, parsers.whole_seconds, parsers.boolean
    for name, field, parse, description in (
        ("max-per-core", "max_per_core", count, "entries per CPU; 0 leaves the limit unchanged "
         "(default 32768)"),
        ("min", "least", count, "minimum number of entries (default 131072)"),
        ("tcp-timeout-established", "tcp_established", duration,
         "timeout of an idle TCP connection; 0 leaves it unchanged (default 24h)"),
        ("tcp-timeout-close-wait", "tcp_close_wait", duration,
         "timeout in state CLOSE_WAIT; 0 leaves it unchanged (default 1h)"),
        ("tcp-be-liberal", "tcp_be_liberal", boolean,
         "whether packets out of the TCP window are accepted as valid (default false)"),
        ("udp-timeout", "udp", duration,
         "timeout of a UDP flow without a reply; 0 leaves it unchanged (default 0s)"),
        ("udp-timeout-stream", "udp_stream", duration,
         "timeout of a UDP flow with replies; 0 leaves it unchanged (default 0s)"),
    ):  # fmt: skip
        kind = {count: "NUMBER", duration: "TIME"}.get(parse, "true|false")
        yield Flag(f"--conntrack-{name}", f"conntrack.{field}", parse, kind, CONNTRACK, description)


def _ipvs_timeout_flags() -> Iterator[Flag]:
    for name, field, description in (
        ("tcp", "tcp", "an idle TCP connection"),
        ("tcpfin", "tcp_fin", "a TCP connection after a FIN"),
        ("udp", "udp", "a UDP flow"),
    ):
        yield Flag(
            f"--ipvs-{name}-timeout",
            f"ipvs_times.{field}",
            parsers.whole_seconds,
            "TIME",
            NODE,
            f"mode ipvs: timeout of {description}; 0 leaves it unchanged (default 0s)",
        )


def _unused_flags() -> Iterator[Flag]:
    for names, why in (
        ("kube-api-content-type", "kbpf requests JSON"),
        ("kube-api-qps kube-api-burst", "kbpf sends few requests, which need no rate limit"),
        ("show-hidden-metrics-for-version", "no metric is hidden"),
        ("ipvs-exclude-cidrs", "kbpf never changes IPVS services that it has not created"),
        ("healthz-port metrics-port", "use --healthz-bind-address and --metrics-bind-address"),
        ("log-flush-frequency", "each line is written immediately"),
        ("vmodule", "kbpf logs by level, not by file"),
        ("log-text-info-buffer-size log-json-info-buffer-size", "each line is written immediately"),
        ("boot-id-file machine-id-file", "kube-proxy does not use them either"),
    ):
        for name in names.split():
            yield Flag(f"--{name}", "", parsers.text, "VALUE", UNUSED_FLAGS, why)
    for name, why in (
        ("profiling", "kbpf has no /debug/pprof"),
        ("log-text-split-stream", "all lines go to stderr"),
        ("log-json-split-stream", "all lines go to stderr"),
    ):
        yield Flag(f"--{name}", "", parsers.boolean, "true|false", UNUSED_FLAGS, why)


FLAGS: Final = (
    Flag("--kubeconfig", "kubeconfig", parsers.path, "FILE", CLUSTER,
         "how to reach the API server (default: the Pod's own service account)"),
    Flag("--master", "master", parsers.text, "URL", CLUSTER,
         "the API server's URL, overriding the kubeconfig's; several servers of one cluster, "
         "separated by commas, are tried in turn when one cannot be reached"),
    Flag("--source", "source", parsers.path, "DIR", CLUSTER,
         "a folder of Kubernetes YAML instead of an API server; watched for changes"),
    Flag("--source-empty-grace", "source_empty_grace", parsers.seconds, "TIME", CLUSTER,
         "how long the objects of --source stay in force after its last file is gone, in case a "
         "mount is missing (default 1m)"),
    Flag("--allow-insecure-api", "allow_insecure_api", parsers.boolean, "true|false", CLUSTER,
         "whether a token or password may be sent over http://, and insecure-skip-tls-verify is "
         "not reported as a problem (default false)"),
    Flag("--hostname-override", "node_name", parsers.node_name, "NAME", NODE,
         "this node's name in Kubernetes (default: the hostname)"),
    Flag("--proxy-mode", "proxy_mode", parsers.proxy_mode, "MODE", NODE,
         "kube-proxy's mode, iptables, nftables or ipvs; it only decides on which addresses "
         "NodePorts answer by default"),
    Flag("--bind-address", "bind_address", parsers.bind_address, "IP", NODE,
         "the node's own address of this family, overriding its Node object; no socket is bound "
         "to it"),
    Flag("--mode", "mode", parsers.mode, "auto|bpf|ipvs", NODE,
         "the data plane: bpf, ipvs (with nftables), or auto: bpf if the node supports it, else "
         "ipvs (default auto)"),
    Flag("--ipvs-scheduler", "ipvs_scheduler", parsers.scheduler, "NAME", NODE,
         "mode ipvs: the scheduler for Services without kbpf.io/algorithm and kbpf.io/weights: "
         "rr, wrr, lc, wlc, lblc, lblcr, sh, mh, dh, sed, nq or fo (default rr)"),
    Flag("--ipvs-strict-arp", "strict_arp", parsers.boolean, "true|false", NODE,
         "mode ipvs: whether the node does not answer ARP requests for Service addresses "
         "(default false)"),
    *_ipvs_timeout_flags(),
    Flag("--ipvs-device", "ipvs_device", parsers.device, "NAME", NODE,
         f"mode ipvs: the dummy device for Service addresses (default {Config().ipvs_device})"),
    Flag("--nft-table", "nft_table", parsers.table, "NAME", NODE,
         f"mode ipvs: the nftables table, of family inet (default {Config().nft_table})"),
    Flag("--state-dir", "state_dir", parsers.absolute_path, "DIR", NODE,
         f"mode ipvs: the folder of the agent's lock and status (default {Config().state_dir})"),
    Flag("--pin-dir", "pin_dir", parsers.absolute_path, "DIR", NODE,
         "the folder, in a bpffs, where maps and links are pinned across restarts "
         f"(default {Config().pin_dir})"),
    Flag("--cgroup", "cgroup", parsers.path, "DIR", NODE,
         "the cgroup v2 folder whose processes use Services (default: the root, all processes)"),
    Flag("--cache-dir", "cache_dir", parsers.path, "DIR", NODE,
         f"the folder of compiled programs (default {Config().cache_dir})"),
    Flag("--nodeport-addresses", "node_ports", parsers.node_ports, "CIDRS", NODE,
         "the addresses on which NodePorts answer: networks, `primary` (the Node's addresses), "
         "`localhost` or `all`, separated by commas (default primary)"),
    Flag("--localhost-nodeports", "localhost_node_ports", parsers.boolean, "true|false", NODE,
         "whether NodePorts answer on loopback, to processes of the host (default true)",
         ("--iptables-localhost-nodeports",)),
    Flag("--nodeport-source-ranges", "node_port_source_ranges", parsers.networks, "CIDRS", NODE,
         "the client networks that may connect to this node's NodePorts, separated by commas; a "
         "family without a network is not restricted (default: not restricted)"),
    Flag("--feature-gates", "external_ips", parsers.external_ips_gate, "NAME=true|false", NODE,
         "kube-proxy's feature gates: AllowServiceExternalIPs=false means --external-ips off; "
         "others are ignored"),
    Flag("--external-ips", "external_ips", parsers.external_ips, "all|off|CIDRS", NODE,
         "the ExternalIPs that Services may have. all: any except addresses of nodes and Pods. "
         "off: none. CIDRS: any in these networks, even addresses of nodes and Pods (default all)"),
    Flag("--watch-nodes", "watch_nodes", parsers.watch_nodes, "auto|own|all", NODE,
         "the Nodes that are watched, so that no ExternalIP takes a node's address: own, all, or "
         "auto: all in a cluster of up to 500 Nodes, else own (default auto)"),
    Flag("--algorithm", "algorithm", parsers.algorithm, "random|maglev", NODE,
         "how a backend is chosen for Services without the annotation kbpf.io/algorithm "
         "(default random)"),
    Flag("--service-annotations", "service_annotations", parsers.service_annotations,
         "off|algorithm|all", NODE,
         "the Service annotations that are used: none, kbpf.io/algorithm, or kbpf.io/weights as "
         "well (default all)"),
    Flag("--system-namespaces", "system_namespaces", parsers.names, "NAMES", NODE,
         "namespaces whose Services are programmed first, like default/kubernetes, and for which "
         "a part of the maps is reserved (default kube-system)"),
    Flag("--socket-lb", "socket_lb", parsers.socket_lb, "off|hostNamespaceOnly|on", NODE,
         "the sockets that are connected to a backend at connect(): none, those in the host's "
         "network namespace, or all (default on); all other sockets need the packet path"),
    Flag("--socket-lb-exempt", "socket_lb_exempt", parsers.cgroups, "PATTERNS", NODE,
         "cgroups whose processes use the packet path instead, as folders below the cgroup v2 "
         "root, separated by commas; patterns such as system.slice/istio* are allowed (for a pod "
         "use the label kbpf.io/socket-lb=off: --socket-lb-label)"),
    Flag("--socket-lb-label", "socket_lb_label", parsers.boolean, "true|false", NODE,
         "whether Pods of this node are watched for the label kbpf.io/socket-lb=off, which needs "
         "permission to list and watch Pods (default false); Pods of --source are always read"),
    Flag("--packet-path", "packet_path", parsers.boolean, "true|false", NODE,
         "whether traffic from outside the node, and traffic of pods that the socket hooks do not "
         "see, is load-balanced per packet (default true)"),
    Flag("--device", "devices", parsers.names, "NAMES", NODE,
         "the uplinks, separated by commas; patterns such as *.100 are allowed (default: chosen "
         "by the kind of device)"),
    Flag("--exclude-device", "excluded_devices", parsers.names, "NAMES", NODE,
         "devices on which packets are not load-balanced"),
    Flag("--masquerade-ports", "masquerade_ports", parsers.ports, "LOW-HIGH", NODE,
         "the source ports for SNAT to the node's address; the node's own sockets do not get "
         "them (default 1024-29999)"),
    Flag("--masquerade-bit", "masquerade_bit", parsers.bit, "NUMBER", NODE,
         "the bit of the packet mark that requests SNAT in the host's stack (default 14, as in "
         "kube-proxy)", ("--iptables-masquerade-bit",)),
    Flag("--masquerade-all", "masquerade_all", parsers.boolean, "true|false", NODE,
         "whether traffic to ClusterIPs gets SNAT to the node's address, too (default false)"),
    Flag("--forwarding", "forwarding", parsers.forwarding, "stack|direct", NODE,
         "how the packet path reaches pods of this node: through the host's stack and netfilter, "
         "or direct to the pod's veth, bypassing the host's firewall and network policies "
         "(default stack)"),
    Flag("--detect-local-mode", "detect_local_mode", parsers.local_mode, "MODE", NODE,
         "how traffic of this node's pods is recognized: ClusterCIDR, NodeCIDR, BridgeInterface "
         "or InterfaceNamePrefix (default: ClusterCIDR with --cluster-cidr, else by device)"),
    Flag("--cluster-cidr", "cluster_cidrs", parsers.networks, "CIDRS", NODE,
         "the networks of the cluster's pods, separated by a comma; the first of each family is "
         "used"),
    Flag("--pod-bridge-interface", "pod_bridge_interface", parsers.device, "NAME", NODE,
         "the bridge of the pods, for --detect-local-mode BridgeInterface"),
    Flag("--pod-interface-name-prefix", "pod_interface_name_prefix", parsers.device, "PREFIX", NODE,
         "the name prefix of pod devices, for --detect-local-mode InterfaceNamePrefix"),
    Flag("--min-sync-period", "min_sync_period", parsers.seconds, "TIME", NODE,
         "minimum time between two writes of changes (default 0s)",
         ("--iptables-min-sync-period", "--ipvs-min-sync-period")),
    Flag("--config-sync-period", "config_sync_period", parsers.period, "TIME", NODE,
         "interval at which the programmed state is compared with the desired one and repaired "
         "(default 15m)"),
    Flag("--oom-score-adj", "oom_score_adj", parsers.oom_score, "NUMBER", NODE,
         "oom_score_adj of the agent's process, -1000 to 1000 (default -999)"),
    *_conntrack_flags(),
    Flag("--healthz-bind-address", "serving.healthz", parsers.healthz, "IP:PORT", SERVING,
         "the address of /healthz and /livez; empty: none (default 0.0.0.0:10256: all addresses "
         "of both families)"),
    Flag("--metrics-bind-address", "serving.metrics", parsers.metrics, "IP:PORT", SERVING,
         "the address of /metrics, /configz and others; empty: none (default 127.0.0.1:10249)"),
    Flag("--bind-address-hard-fail", "serving.hard_fail", parsers.boolean, "true|false", SERVING,
         "whether the agent exits if one of these addresses is in use; otherwise it retries "
         "(default false)"),
    Flag("--sync-period", "serving.late_seconds", parsers.doubled_period, "TIME", SERVING,
         "the agent is unhealthy if a change has waited for twice this time (default 30s)",
         ("--iptables-sync-period", "--ipvs-sync-period")),
    Flag("--metrics-services", "serving.service_series", parsers.count, "NUMBER", SERVING,
         "maximum number of Service ports with their own series: those with the most connections "
         "(default 1000)"),
    Flag("--metrics-backends", "serving.backend_series", parsers.count, "NUMBER", SERVING,
         "maximum number of backends with their own series, counted once per Service port: "
         "those with the most connections (default 0)"),
    Flag("--accounting", "accounting", parsers.accounting, "off|connections|full", SERVING,
         "what is counted per Service and backend: new connections, or also their failures, "
         "bytes, retransmits and round-trip times (default connections)"),
    Flag("-v", "log_level", parsers.verbosity, "NUMBER", LOGGING,
         "klog verbosity: 4 or more is debug, which logs each object that changes, each write to "
         "the maps and each request to the API server; less is info",
         ("--v",)),
    Flag("--log-level", "log_level", parsers.log_level, "LEVEL", LOGGING,
         "debug, info, warning or error (default info)"),
    Flag("--log-format", "log_format", parsers.log_format, "text|json", LOGGING,
         "plain text, or one JSON object per line (default text)", ("--logging-format",)),
    *_size_flags(),
    *_unused_flags(),
)  # fmt: skip


FLAGS_BY_NAME: Final = {name: flag for flag in FLAGS for name in (flag.name, *flag.aliases)}

_KUBE_PROXY_FLAG_NAMES: Final = (
    "kubeconfig proxy-mode bind-address nodeport-addresses localhost-nodeports masquerade-bit "
    "masquerade-all detect-local-mode cluster-cidr pod-bridge-interface pod-interface-name-prefix "
    "healthz-bind-address metrics-bind-address bind-address-hard-fail sync-period min-sync-period "
    "config-sync-period feature-gates oom-score-adj ipvs-scheduler ipvs-strict-arp "
    "ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout"
)
KUBE_PROXY_FLAGS: Final = frozenset(
    {f"--{name}" for name in _KUBE_PROXY_FLAG_NAMES.split()}
    | {
        flag.name
        for flag in FLAGS
        if flag.group in (CONNTRACK, UNUSED_FLAGS)
        and not flag.name.startswith(("--log-", "--vmodule"))
    }
)
"""Flags that kube-proxy ignores if it has a configuration file. It still reads
--hostname-override, --master and its logging flags."""

"""The flags of `kbpf run`: one row each. load.py makes a Config of them.

A flag beats its environment variable (`--pin-dir`: KBPF_PIN_DIR), which beats what a file says,
which beats the default; an empty flag or variable is as good as none, but for the addresses of
servers, where it means none. kube-proxy's own flags are another
matter where there is kube-proxy's own file: see load.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kbpf.config import parsers
from kbpf.config.parsers import Parser
from kbpf.model.config import Config, MapSizes


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag: its name, the field of Config (or, with a dot, of one of its parts) that it sets, how
    it is read, what stands for its value in the help, under which heading, and the help.

    `field` is "" where kube-proxy has something to set and we have not; then `help` says why.
    `aliases`: other names of it.
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
        """The environment variable that sets it too."""
        return "KBPF_" + self.name.strip("-").replace("-", "_").upper()

    @property
    def is_boolean(self) -> bool:
        """Whether the flag without a value means `true`, as with kube-proxy."""
        return self.parse is parsers.boolean

    @property
    def accepts_empty(self) -> bool:
        """Whether an empty value means something: no server. Else it is as good as none."""
        return self.parse in (parsers.healthz, parsers.metrics)

    @property
    def is_repeatable(self) -> bool:
        """Whether it may stand several times, each with more of them."""
        return self.parse in (parsers.names, parsers.node_ports, parsers.cgroups)


CLUSTER: Final = "Where Services come from"
NODE: Final = "This node"
CONNTRACK: Final = "The kernel's conntrack, as kube-proxy sets it"
SERVING: Final = "Health and metrics"
LOGGING: Final = "Logging"
SIZES: Final = "Sizes of the maps (entries at most)"
UNUSED_FLAGS: Final = "Accepted, since kube-proxy has it, and not used"


def _size_flags() -> Iterator[Flag]:
    descriptions = {
        "frontends": "addresses that clients dial",
        "slots": "places in all backend sets together",
        "backends": "backends",
        "connections": "connections of the packet path; the oldest goes",
        "affinity": "clients with session affinity; the oldest goes",
        "counts": "pairs of a Service and a backend whose connections are counted; what comes "
        "later is not",
    }
    default = MapSizes()
    for name, description in descriptions.items():
        text = f"{description} (default {getattr(default, name)})"
        reader = parsers.connections if name == "connections" else parsers.entries
        yield Flag(f"--max-{name}", f"sizes.{name}", reader, "NUMBER", SIZES, text)


def _conntrack_flags() -> Iterator[Flag]:
    count, duration, boolean = parsers.count, parsers.whole_seconds, parsers.boolean
    for name, field, parse, description in (
        ("max-per-core", "max_per_core", count, "entries for each CPU; 0 leaves the number as it "
         "is (default 32768)"),
        ("min", "least", count, "entries at least (default 131072)"),
        ("tcp-timeout-established", "tcp_established", duration,
         "how long an idle connection is kept; 0 leaves it as it is (default 24h)"),
        ("tcp-timeout-close-wait", "tcp_close_wait", duration,
         "how long after the other side's end; 0 leaves it as it is (default 1h)"),
        ("tcp-be-liberal", "tcp_be_liberal", boolean,
         "true: nothing is invalid for being out of the window (default false)"),
        ("udp-timeout", "udp", duration, "without an answer; 0 leaves it as it is (default 0s)"),
        ("udp-timeout-stream", "udp_stream", duration,
         "with answers; 0 leaves it as it is (default 0s)"),
    ):  # fmt: skip
        kind = {count: "NUMBER", duration: "TIME"}.get(parse, "true|false")
        yield Flag(f"--conntrack-{name}", f"conntrack.{field}", parse, kind, CONNTRACK, description)


def _ipvs_timeout_flags() -> Iterator[Flag]:
    for name, field, description in (
        ("tcp", "tcp", "an idle TCP connection"),
        ("tcpfin", "tcp_fin", "a TCP connection whose end has begun"),
        ("udp", "udp", "a UDP flow"),
    ):
        yield Flag(
            f"--ipvs-{name}-timeout",
            f"ipvs_times.{field}",
            parsers.whole_seconds,
            "TIME",
            NODE,
            f"mode ipvs: how long {description} is kept; 0 leaves it as it is (default 0s)",
        )


def _unused_flags() -> Iterator[Flag]:
    for names, why in (
        ("kube-api-content-type", "the API server is asked for JSON"),
        ("kube-api-qps kube-api-burst", "there are few requests, and nothing to slow down"),
        ("show-hidden-metrics-for-version", "no metric is hidden"),
        ("ipvs-exclude-cidrs", "IPVS services of others are never touched"),
        ("healthz-port metrics-port", "use --healthz-bind-address and --metrics-bind-address"),
        ("log-flush-frequency", "each line is written at once"),
        ("vmodule", "there are levels, and nothing by file"),
        ("log-text-info-buffer-size log-json-info-buffer-size", "each line is written at once"),
        ("boot-id-file machine-id-file", "kube-proxy does not use them either"),
    ):
        for name in names.split():
            yield Flag(f"--{name}", "", parsers.text, "VALUE", UNUSED_FLAGS, why)
    for name, why in (
        ("profiling", "there is no /debug/pprof of Go"),
        ("log-text-split-stream", "all lines go to stderr"),
        ("log-json-split-stream", "all lines go to stderr"),
    ):
        yield Flag(f"--{name}", "", parsers.boolean, "true|false", UNUSED_FLAGS, why)


FLAGS: Final = (
    Flag("--kubeconfig", "kubeconfig", parsers.path, "FILE", CLUSTER,
         "how to reach the API server (default: the Pod's own service account)"),
    Flag("--master", "master", parsers.text, "URL", CLUSTER,
         "the API server's address, in place of the kubeconfig's; several servers of one cluster, "
         "separated by commas, are tried in turn when one cannot be reached"),
    Flag("--source", "source", parsers.path, "DIR", CLUSTER,
         "a folder of Kubernetes YAML instead of an API server; watched for changes"),
    Flag("--source-empty-grace", "source_empty_grace", parsers.seconds, "TIME", CLUSTER,
         "how long what a folder held stays in force when its last file is gone: it may be a mount "
         "that is missing (default 1m)"),
    Flag("--allow-insecure-api", "allow_insecure_api", parsers.boolean, "true|false", CLUSTER,
         "whether a token or password may go over http://, and insecure-skip-tls-verify is no "
         "problem (default false)"),
    Flag("--hostname-override", "node_name", parsers.node_name, "NAME", NODE,
         "this node's name in Kubernetes (default: the hostname)"),
    Flag("--proxy-mode", "proxy_mode", parsers.proxy_mode, "MODE", NODE,
         "how kube-proxy would do it: iptables, nftables or ipvs; where NodePorts answer by "
         "default depends on it, and nothing else"),
    Flag("--bind-address", "bind_address", parsers.bind_address, "IP", NODE,
         "the node's own address of this family, over what its Node object says; nothing is bound "
         "to it"),
    Flag("--mode", "mode", parsers.mode, "auto|bpf|ipvs", NODE,
         "the data plane: BPF, IPVS with nftables, or BPF where it can be had and else IPVS "
         "(default auto)"),
    Flag("--ipvs-scheduler", "ipvs_scheduler", parsers.scheduler, "NAME", NODE,
         "mode ipvs: how a backend is chosen for Services without an algorithm or weights of their "
         "own: rr, wrr, lc, wlc, lblc, lblcr, sh, mh, dh, sed, nq or fo (default rr)"),
    Flag("--ipvs-strict-arp", "strict_arp", parsers.boolean, "true|false", NODE,
         "mode ipvs: whether the node keeps from answering ARP for addresses of Services "
         "(default false)"),
    *_ipvs_timeout_flags(),
    Flag("--ipvs-device", "ipvs_device", parsers.device, "NAME", NODE,
         f"mode ipvs: the dummy device for addresses of Services (default {Config().ipvs_device})"),
    Flag("--nft-table", "nft_table", parsers.table, "NAME", NODE,
         f"mode ipvs: the nftables table, of the family inet (default {Config().nft_table})"),
    Flag("--state-dir", "state_dir", parsers.absolute_path, "DIR", NODE,
         f"mode ipvs: a folder for the agent's lock and status (default {Config().state_dir})"),
    Flag("--pin-dir", "pin_dir", parsers.absolute_path, "DIR", NODE,
         "where maps and attachments are kept over restarts: a folder in a bpffs "
         f"(default {Config().pin_dir})"),
    Flag("--cgroup", "cgroup", parsers.path, "DIR", NODE,
         "the cgroup v2 folder whose processes get Services (default: the root, so all)"),
    Flag("--cache-dir", "cache_dir", parsers.path, "DIR", NODE,
         f"where the compiled programs are kept (default {Config().cache_dir})"),
    Flag("--nodeport-addresses", "node_ports", parsers.node_ports, "CIDRS", NODE,
         "where NodePorts answer: networks with commas between them, among which `primary` (the "
         "Node's own addresses), `localhost` and `all` may stand (default primary)"),
    Flag("--localhost-nodeports", "localhost_node_ports", parsers.boolean, "true|false", NODE,
         "whether NodePorts answer on loopback, for the host's own processes (default true)",
         ("--iptables-localhost-nodeports",)),
    Flag("--nodeport-source-ranges", "node_port_source_ranges", parsers.networks, "CIDRS", NODE,
         "the client networks that may connect to this node's NodePorts, separated by commas; a "
         "family with no network listed is not restricted (default: not restricted)"),
    Flag("--feature-gates", "external_ips", parsers.external_ips_gate, "NAME=true|false", NODE,
         "kube-proxy's feature gates: AllowServiceExternalIPs=false is --external-ips off; others "
         "are not used"),
    Flag("--external-ips", "external_ips", parsers.external_ips, "all|off|CIDRS", NODE,
         "the ExternalIPs that Services may have. all: any but addresses of nodes and Pods. off: "
         "none. Networks: any in these networks, including addresses of nodes and Pods (default "
         "all)"),
    Flag("--watch-nodes", "watch_nodes", parsers.watch_nodes, "auto|own|all", NODE,
         "the Nodes that are watched so that no ExternalIP takes an address of theirs: this "
         "node's own, all, or auto: all in a cluster of at most 500 Nodes, else this node's "
         "own (default auto)"),
    Flag("--algorithm", "algorithm", parsers.algorithm, "random|maglev", NODE,
         "how a backend is chosen for Services without the annotation kbpf.io/algorithm "
         "(default random)"),
    Flag("--service-annotations", "service_annotations", parsers.service_annotations,
         "off|algorithm|all", NODE,
         "which annotations of a Service count: none, kbpf.io/algorithm, or kbpf.io/weights as "
         "well (default all)"),
    Flag("--system-namespaces", "system_namespaces", parsers.names, "NAMES", NODE,
         "namespaces whose Services are programmed before all others, like default/kubernetes, and "
         "for which a part of the maps is kept (default kube-system)"),
    Flag("--socket-lb", "socket_lb", parsers.socket_lb, "off|hostNamespaceOnly|on", NODE,
         "whose sockets are led to a backend at connect(): nobody's, those of the node's own "
         "network, or everybody's (default on); the others need the packet path"),
    Flag("--socket-lb-exempt", "socket_lb_exempt", parsers.cgroups, "PATTERNS", NODE,
         "cgroups whose processes are left to the packet path, as folders below the cgroup v2 "
         "root with commas between them; patterns as system.slice/istio* will do (a pod says it "
         "by the label kbpf.io/socket-lb=off: --socket-lb-label)"),
    Flag("--socket-lb-label", "socket_lb_label", parsers.boolean, "true|false", NODE,
         "whether Pods of this node are watched for the label kbpf.io/socket-lb=off, which needs "
         "the right to list and watch Pods (default false); a folder's Pods are always read"),
    Flag("--packet-path", "packet_path", parsers.boolean, "true|false", NODE,
         "whether traffic from outside of the node, and of pods that the socket hooks do not see, "
         "is balanced per packet (default true)"),
    Flag("--device", "devices", parsers.names, "NAMES", NODE,
         "devices to other machines, with commas between them; patterns as *.100 will do "
         "(default: chosen by their kind)"),
    Flag("--exclude-device", "excluded_devices", parsers.names, "NAMES", NODE,
         "devices that packets are left alone on"),
    Flag("--masquerade-ports", "masquerade_ports", parsers.ports, "LOW-HIGH", NODE,
         "the node's ports for clients whose address becomes the node's; kept clear of the node's "
         "own sockets (default 1024-29999)"),
    Flag("--masquerade-bit", "masquerade_bit", parsers.bit, "NUMBER", NODE,
         "the bit of the mark that packets of such clients carry through the node's stack "
         "(default 14, as kube-proxy's)", ("--iptables-masquerade-bit",)),
    Flag("--masquerade-all", "masquerade_all", parsers.boolean, "true|false", NODE,
         "whether backends see the node instead of the client for ClusterIPs too (default false)"),
    Flag("--forwarding", "forwarding", parsers.forwarding, "stack|direct", NODE,
         "how the packet path reaches pods of this node: up the host's stack with its netfilter, "
         "or direct to the pod's device, past firewalls and policies of the host (default stack)"),
    Flag("--detect-local-mode", "detect_local_mode", parsers.local_mode, "MODE", NODE,
         "how pods of this node are told from others: ClusterCIDR, NodeCIDR, BridgeInterface or "
         "InterfaceNamePrefix (default: ClusterCIDR with --cluster-cidr, else by their devices)"),
    Flag("--cluster-cidr", "cluster_cidrs", parsers.networks, "CIDRS", NODE,
         "the networks of the cluster's pods, with a comma between them; the first of each family "
         "counts"),
    Flag("--pod-bridge-interface", "pod_bridge_interface", parsers.device, "NAME", NODE,
         "the bridge that pods are on, for BridgeInterface"),
    Flag("--pod-interface-name-prefix", "pod_interface_name_prefix", parsers.device, "PREFIX", NODE,
         "how the names of pods' devices begin, for InterfaceNamePrefix"),
    Flag("--min-sync-period", "min_sync_period", parsers.seconds, "TIME", NODE,
         "changes are programmed at least so far apart (default 0s: at once)",
         ("--iptables-min-sync-period", "--ipvs-min-sync-period")),
    Flag("--config-sync-period", "config_sync_period", parsers.period, "TIME", NODE,
         "so often all that is programmed is compared with what it should be (default 15m)"),
    Flag("--oom-score-adj", "oom_score_adj", parsers.oom_score, "NUMBER", NODE,
         "of the agent's process, -1000 to 1000 (default -999)"),
    *_conntrack_flags(),
    Flag("--healthz-bind-address", "serving.healthz", parsers.healthz, "IP:PORT", SERVING,
         "where /healthz and /livez answer; empty: nowhere (default 0.0.0.0:10256, so all of both "
         "families)"),
    Flag("--metrics-bind-address", "serving.metrics", parsers.metrics, "IP:PORT", SERVING,
         "where /metrics, /configz and others answer; empty: nowhere (default "
         "127.0.0.1:10249)"),
    Flag("--bind-address-hard-fail", "serving.hard_fail", parsers.boolean, "true|false", SERVING,
         "whether one of these addresses that is taken ends the agent; else it is tried again "
         "(default false)"),
    Flag("--sync-period", "serving.late_seconds", parsers.doubled_period, "TIME", SERVING,
         "the agent is unhealthy when a change has waited for twice as long (default 30s)",
         ("--iptables-sync-period", "--ipvs-sync-period")),
    Flag("--metrics-services", "serving.service_series", parsers.count, "NUMBER", SERVING,
         "so many Services at most have series of their own: those with the most connections "
         "(default 1000)"),
    Flag("--metrics-backends", "serving.backend_series", parsers.count, "NUMBER", SERVING,
         "so many backends at most have series of their own, for each Service that they serve: "
         "those with the most connections (default 0)"),
    Flag("--accounting", "accounting", parsers.accounting, "off|connections|full", SERVING,
         "what is counted of connections by Service and backend: those that begin, or also what "
         "they come to: failures, bytes, segments sent again, round trips (default connections)"),
    Flag("-v", "log_level", parsers.verbosity, "NUMBER", LOGGING,
         "verbosity as Kubernetes counts it: 4 or more is debug, which logs each object that "
         "changes, each write to the maps and each request to the API server; less is info",
         ("--v",)),
    Flag("--log-level", "log_level", parsers.log_level, "LEVEL", LOGGING,
         "debug, info, warning or error (default info)"),
    Flag("--log-format", "log_format", parsers.log_format, "text|json", LOGGING,
         "lines for people, or one JSON object a line (default text)", ("--logging-format",)),
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
"""Flags that kube-proxy does not read when it has a file. It reads --hostname-override, --master
and those of its log."""

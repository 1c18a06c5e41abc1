"""kube-proxy's own configuration: KubeProxyConfiguration v1alpha1, as kubeadm writes it.

The structs are the file; a value that is zero (or null) means kube-proxy's default. `settings()`
makes of it what we do, with kube-proxy's defaults and its checks, and `notes()` says what is
accepted and not done. Both say where, as a path in the document.

Where a setting depends on the mode (nodePortAddresses, masqueradeBit, the periods), it is read as
kube-proxy in that mode reads it: "" is iptables.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from kbpf.config import durations, parsers
from kbpf.config.diagnostic import Note
from kbpf.config.documents import KUBE_PROXY
from kbpf.config.values import Values
from kbpf.errors import ConfigError
from kbpf.model.address import family_of
from kbpf.model.objects import Cidr

MODES: Final = ("iptables", "nftables", "ipvs")
SYNC_SECONDS: Final = 30.0
DEFAULT_BIT: Final = 14
LOOPBACK4, LOOPBACK6 = (parsers.cidr(text, "") for text in parsers.LOOPBACK)
HEEDED_GATES: Final = frozenset((parsers.EXTERNAL_IPS_GATE, parsers.LOCALHOST_GATE))


def spelling(name: str) -> str:
    """The name of a field as the document has it: ``clusterCIDR``, ``strictARP``."""
    known = {"cidr": "CIDR", "cidrs": "CIDRs", "arp": "ARP", "dsr": "DSR"}
    first, *rest = name.split("_")
    return first + "".join(known.get(word, word.capitalize()) for word in rest)


class ClientConnection(msgspec.Struct, frozen=True, rename=spelling):
    """How the API server is asked."""

    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = ""
    qps: float = 0.0
    burst: int = 0


class Iptables(msgspec.Struct, frozen=True, rename=spelling):
    """Of the mode iptables; some of ipvs, too."""

    masquerade_bit: int | None = None
    masquerade_all: bool = False
    localhost_node_ports: bool | None = None
    snat_node_internal_ip: bool | None = msgspec.field(default=None, name="snatNodeInternalIP")
    sync_period: str = ""
    min_sync_period: str = ""


class Ipvs(msgspec.Struct, frozen=True, rename=spelling):
    """Of the mode ipvs."""

    sync_period: str = ""
    min_sync_period: str = ""
    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] = ()
    strict_arp: bool = False
    tcp_timeout: str = ""
    tcp_fin_timeout: str = ""
    udp_timeout: str = ""


class Nftables(msgspec.Struct, frozen=True, rename=spelling):
    """Of the mode nftables."""

    masquerade_bit: int | None = None
    masquerade_all: bool = False
    sync_period: str = ""
    min_sync_period: str = ""


class Winkernel(msgspec.Struct, frozen=True, rename=spelling):
    """Of Windows."""

    network_name: str = ""
    source_vip: str = ""
    enable_dsr: bool = False
    root_hns_endpoint_name: str = ""
    forward_health_check_vip: bool = False


class DetectLocal(msgspec.Struct, frozen=True, rename=spelling):
    """What two of the modes of detectLocalMode need."""

    bridge_interface: str = ""
    interface_name_prefix: str = ""


class Conntrack(msgspec.Struct, frozen=True, rename=spelling):
    """What the kernel's conntrack is set to. None of a time: the default; "0s": left as it is."""

    max_per_core: int | None = None
    min: int | None = None
    tcp_established_timeout: str | None = None
    tcp_close_wait_timeout: str | None = None
    tcp_be_liberal: bool = False
    udp_timeout: str = ""
    udp_stream_timeout: str = ""


class Logging(msgspec.Struct, frozen=True, rename=spelling):
    """Of all Kubernetes components."""

    format: str = ""
    flush_frequency: int | str = 0
    verbosity: int = 0
    vmodule: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = {}


class KubeProxyConfiguration(msgspec.Struct, frozen=True, rename=spelling):
    """The document, without kind and apiVersion."""

    feature_gates: dict[str, bool] = {}
    client_connection: ClientConnection = ClientConnection()
    logging: Logging = Logging()
    hostname_override: str = ""
    bind_address: str = ""
    healthz_bind_address: str = ""
    metrics_bind_address: str = ""
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    show_hidden_metrics_for_version: str = ""
    mode: str = ""
    iptables: Iptables = Iptables()
    ipvs: Ipvs = Ipvs()
    nftables: Nftables = Nftables()
    winkernel: Winkernel = Winkernel()
    detect_local_mode: str = ""
    detect_local: DetectLocal = DetectLocal()
    cluster_cidr: str = ""
    node_port_addresses: tuple[str, ...] = ()
    oom_score_adj: int | None = None
    conntrack: Conntrack = Conntrack()
    config_sync_period: str = ""
    port_range: str = ""
    windows_run_as_service: bool = False
    udp_idle_timeout: str = msgspec.field(default="", name="udpIdleTimeout")


# ---- what we make of it --------------------------------------------------------------------------


def settings(said: KubeProxyConfiguration) -> Values:
    """The fields of Config that the document decides: all of kube-proxy's, said or not."""
    made = Values(f"{KUBE_PROXY}.")
    _identity(said, made)
    _servers(said, made)
    _mode(said, made)
    _node_ports(said, made)
    if not said.feature_gates.get(parsers.EXTERNAL_IPS_GATE, True):
        made.put("external_ips", f"featureGates.{parsers.EXTERNAL_IPS_GATE}", ())
    _local(said, made)
    _conntrack(said.conntrack, made)
    return made


def _identity(said: KubeProxyConfiguration, made: Values) -> None:
    if said.hostname_override:
        made.read("node_name", "hostnameOverride", said.hostname_override, parsers.node_name)
    if said.client_connection.kubeconfig:
        at = "clientConnection.kubeconfig"
        made.read("kubeconfig", at, said.client_connection.kubeconfig, parsers.path)
    if said.client_connection.burst < 0:
        made.wrong("clientConnection.burst", f"less than 0: {said.client_connection.burst}")
    if said.oom_score_adj is not None:
        made.read("oom_score_adj", "oomScoreAdj", str(said.oom_score_adj), parsers.oom_score)
    if said.logging.format:
        made.read("log_format", "logging.format", said.logging.format, parsers.log_format)
    made.read("log_level", "logging.verbosity", str(said.logging.verbosity), parsers.verbosity)
    period = _period(made, "configSyncPeriod", said.config_sync_period, parsers.period)
    if period:
        made.put("config_sync_period", "configSyncPeriod", period)


def _servers(said: KubeProxyConfiguration, made: Values) -> None:
    made.put("serving.hard_fail", "bindAddressHardFail", said.bind_address_hard_fail)
    if said.bind_address:
        made.read("bind_address", "bindAddress", said.bind_address, parsers.bind_address)
    any_host, loopback = ("[::]", "[::1]") if ":" in said.bind_address else ("0.0.0.0", "127.0.0.1")
    healthz = said.healthz_bind_address or any_host
    made.read("serving.healthz", "healthzBindAddress", healthz, parsers.healthz)
    metrics = said.metrics_bind_address or loopback
    made.read("serving.metrics", "metricsBindAddress", metrics, parsers.metrics)


def _mode(said: KubeProxyConfiguration, made: Values) -> None:
    if said.mode not in ("", *MODES):
        made.wrong("mode", f"unknown value {said.mode!r}", f"use {' or '.join(MODES)}, or none")
    made.put("proxy_mode", "mode", said.mode)
    _periods(said, made)
    _masquerade(said, made)
    made.put("strict_arp", "ipvs.strictARP", said.ipvs.strict_arp)
    _ipvs_times(said, made)
    if said.mode == "ipvs":
        _ipvs(said.ipvs, made)
    elif said.ipvs.scheduler in parsers.SCHEDULERS:
        made.put("ipvs_scheduler", "ipvs.scheduler", said.ipvs.scheduler)


def _periods(said: KubeProxyConfiguration, made: Values) -> None:
    """Those of the mode's own section."""
    sections: dict[str, Iptables | Ipvs | Nftables]
    sections = {"nftables": said.nftables, "ipvs": said.ipvs}
    name = said.mode if said.mode in sections else "iptables"
    section = sections.get(name, said.iptables)
    most = _period(made, f"{name}.syncPeriod", section.sync_period, parsers.period) or SYNC_SECONDS
    made.put("serving.late_seconds", f"{name}.syncPeriod", 2 * most)
    least = _period(made, f"{name}.minSyncPeriod", section.min_sync_period, parsers.seconds)
    if least:
        made.put("min_sync_period", f"{name}.minSyncPeriod", least)
    if least > most:
        made.wrong(f"{name}.minSyncPeriod", f"longer than syncPeriod, {durations.write(most)}")


def _masquerade(said: KubeProxyConfiguration, made: Values) -> None:
    """Those of nftables in its mode, else those of iptables, whose bit is checked in any mode."""
    bit, whole = said.iptables.masquerade_bit, said.iptables.masquerade_all
    if bit is not None:
        made.read("masquerade_bit", "iptables.masqueradeBit", str(bit), parsers.bit)
    made.put("masquerade_all", "iptables.masqueradeAll", whole)
    if said.mode == "nftables":
        made.put("masquerade_all", "nftables.masqueradeAll", said.nftables.masquerade_all)
        bit = said.nftables.masquerade_bit
        text = str(DEFAULT_BIT if bit is None else bit)
        made.read("masquerade_bit", "nftables.masqueradeBit", text, parsers.bit)


def _ipvs(said: Ipvs, made: Values) -> None:
    """What kube-proxy checks in this mode only."""
    if said.scheduler:
        made.read("ipvs_scheduler", "ipvs.scheduler", said.scheduler, parsers.scheduler)
    for i, text in enumerate(said.exclude_cidrs):
        made.check(f"ipvs.excludeCIDRs[{i}]", text, parsers.cidr)


def _ipvs_times(said: KubeProxyConfiguration, made: Values) -> None:
    """What is wrong with them counts in mode ipvs only."""
    for field, at, text in (
        ("tcp", "ipvs.tcpTimeout", said.ipvs.tcp_timeout),
        ("tcp_fin", "ipvs.tcpFinTimeout", said.ipvs.tcp_fin_timeout),
        ("udp", "ipvs.udpTimeout", said.ipvs.udp_timeout),
    ):
        if not text:
            continue
        if said.mode == "ipvs":
            made.read(f"ipvs_times.{field}", at, text, parsers.whole_seconds)
        else:
            with contextlib.suppress(ConfigError):
                made.put(f"ipvs_times.{field}", at, parsers.whole_seconds(text, at))


def _node_ports(said: KubeProxyConfiguration, made: Values) -> None:
    """Where NodePorts answer. Without a word: on all addresses, but in nftables mode on the primary
    ones. On loopback: in iptables mode where the networks have it, and in nftables mode, with
    kube-proxy 1.37's feature gate, where one of them is a network of loopback.
    """
    words = said.node_port_addresses or (("primary",) if said.mode == "nftables" else ())
    loopback = not words
    if not words:
        made.put("node_ports", "nodePortAddresses", "all")
    else:
        found = made.read("node_ports", "nodePortAddresses", words, parsers.node_port_words)
        loopback = found == "all"
        if isinstance(found, tuple):
            networks = [each for each in found if isinstance(each, Cidr)]
            four = [each for each in networks if family_of(each.address) == 4]
            has_four = four or "primary" in found
            loopback = not has_four or any(map(_holds_loopback, four))
    if said.mode == "nftables":
        gate = said.feature_gates.get(parsers.LOCALHOST_GATE, False)
        at = f"featureGates.{parsers.LOCALHOST_GATE}"
        made.put("localhost_node_ports", at, gate and any(map(_is_loopback, words)))
        return
    wanted = said.iptables.localhost_node_ports is not False and said.mode in ("", "iptables")
    made.put("localhost_node_ports", "iptables.localhostNodePorts", wanted and loopback)


def _holds_loopback(cidr: Cidr) -> bool:
    """As kube-proxy asks: it begins in 127.0.0.0/8, or has the first address of that."""
    return cidr.contains(LOOPBACK4.address) or LOOPBACK4.contains(cidr.address)


def _is_loopback(word: str) -> bool:
    """Whether it is `localhost`, or a network with nothing but loopback addresses."""
    with contextlib.suppress(ConfigError):  # which is told already
        if word not in parsers.NODE_PORT_WORDS:
            network = parsers.cidr(word, "")
            return LOOPBACK4.contains(network.address) or network == LOOPBACK6
    return word == "localhost"


def _local(said: KubeProxyConfiguration, made: Values) -> None:
    mode = said.detect_local_mode
    made.read("detect_local_mode", "detectLocalMode", mode, parsers.local_mode)
    below = said.detect_local
    for field, at, text, needed in (
        ("pod_bridge_interface", "bridgeInterface", below.bridge_interface, "BridgeInterface"),
        ("pod_interface_name_prefix", "interfaceNamePrefix", below.interface_name_prefix,
         "InterfaceNamePrefix"),
    ):  # fmt: skip
        if mode != needed:
            continue
        if text:
            made.read(field, f"detectLocal.{at}", text, parsers.device)
        else:
            made.wrong(f"detectLocal.{at}", f"{needed} says nothing by itself", "name one")
    if mode in ("", "ClusterCIDR"):
        made.read("cluster_cidrs", "clusterCIDR", said.cluster_cidr, parsers.cluster_cidrs)


def _conntrack(said: Conntrack, made: Values) -> None:
    for field, at, count in (
        ("max_per_core", "maxPerCore", said.max_per_core),
        ("least", "min", said.min),
    ):
        if count is not None and count < 0:
            made.wrong(f"conntrack.{at}", f"less than 0: {count}")
        elif count is not None:
            made.put(f"conntrack.{field}", f"conntrack.{at}", count)
    made.put("conntrack.tcp_be_liberal", "conntrack.tcpBeLiberal", said.tcp_be_liberal)
    for field, at, time in (
        ("tcp_established", "tcpEstablishedTimeout", said.tcp_established_timeout),
        ("tcp_close_wait", "tcpCloseWaitTimeout", said.tcp_close_wait_timeout),
        ("udp", "udpTimeout", said.udp_timeout or None),
        ("udp_stream", "udpStreamTimeout", said.udp_stream_timeout or None),
    ):
        if time is not None:
            made.read(f"conntrack.{field}", f"conntrack.{at}", time, parsers.whole_seconds)


def _period(made: Values, at: str, text: str, reader: parsers.Reader) -> float:
    """A period in seconds; 0.0 for the default, which is zero's meaning."""

    def read(text: str, where: str) -> float:
        found: float = reader(text, where) if durations.parse(text, where) else 0.0
        return found

    return made.check(at, text, read) or 0.0 if text else 0.0


# ---- what is accepted and not done ---------------------------------------------------------------

PROTOBUF: Final = "application/vnd.kubernetes.protobuf"
"""kube-proxy's default."""
FLUSHES: Final = (0, "", "0s", "5s", 5_000_000_000)
"""kube-proxy's default, in the forms in which it may stand."""

Said = Callable[[KubeProxyConfiguration], object]
ACCEPTED: Final[tuple[tuple[str, Said, str], ...]] = (
    ("featureGates", lambda c: c.feature_gates.keys() - HEEDED_GATES,
     f"kbpf heeds {' and '.join(sorted(HEEDED_GATES))} and no other feature gate of Kubernetes"),
    ("clientConnection.acceptContentTypes", lambda c: c.client_connection.accept_content_types,
     "the API server is asked for JSON"),
    ("clientConnection.contentType",
     lambda c: c.client_connection.content_type not in ("", PROTOBUF, "application/json"),
     "the API server is asked for JSON"),
    ("clientConnection.qps", lambda c: c.client_connection.qps not in (0, 5),
     "there are four watches and nothing to slow down"),
    ("clientConnection.burst", lambda c: c.client_connection.burst not in (0, 10),
     "there are four watches and nothing to slow down"),
    ("logging.flushFrequency", lambda c: c.logging.flush_frequency not in FLUSHES,
     "each line is written at once"),
    ("logging.vmodule", lambda c: c.logging.vmodule, "kbpf logs by level, not by file"),
    ("logging.options", lambda c: _routed(c.logging.options), "all lines go to stderr"),
    ("showHiddenMetricsForVersion", lambda c: c.show_hidden_metrics_for_version,
     "no metric is hidden"),
    ("enableProfiling", lambda c: c.enable_profiling, "there is no /debug/pprof of Go"),
    ("iptables.snatNodeInternalIP", lambda c: c.iptables.snat_node_internal_ip,
     "clients get an address of the device that they leave by, which need not be the node's "
     "InternalIP, by which policies may know it"),
    ("ipvs.excludeCIDRs", lambda c: c.ipvs.exclude_cidrs,
     "IPVS services of others are never touched"),
    ("winkernel", lambda c: c.winkernel != Winkernel(), "this is Linux"),
    ("windowsRunAsService", lambda c: c.windows_run_as_service, "this is Linux"),
    ("portRange", lambda c: c.port_range, "kube-proxy does not use it either"),
    ("udpIdleTimeout", lambda c: _is_time(c.udp_idle_timeout),
     "kube-proxy does not use it either"),
)  # fmt: skip
"""Path, whether it is said, and why nothing follows from it."""
WARNED_OF: Final = frozenset(("iptables.snatNodeInternalIP",))
"""Of these: backends may see another address than the operator has asked for."""


def _default_mode_matters(said: KubeProxyConfiguration) -> bool:
    """Whether the mode is unset and NodePorts answer on other addresses in mode nftables."""
    if said.mode:
        return False
    now, later = Values(), Values()
    _node_ports(said, now)
    _node_ports(msgspec.structs.replace(said, mode="nftables"), later)
    return now.found != later.found


def notes(said: KubeProxyConfiguration) -> Iterator[Note]:
    """A line for each field that is accepted and does nothing, and for what kube-proxy warns of."""
    for path, is_said, why in ACCEPTED:
        if is_said(said):
            text = f"{KUBE_PROXY}.{path} is accepted and not used: {why}"
            yield Note(text, is_warning=path in WARNED_OF)
    if _default_mode_matters(said):
        yield Note(
            f"{KUBE_PROXY}.mode is unset: kbpf reads it as iptables, kube-proxy from 1.40 on as "
            "nftables, and NodePorts answer on other addresses there; set mode: iptables or "
            "mode: nftables",
            event="KubeProxyDefaultMode",
        )
    if said.mode in MODES:
        yield Note(
            f"{KUBE_PROXY}.mode: {said.mode} is read for defaults only; the data plane is chosen "
            "by KbpfConfiguration.mode or --mode"
        )
    times = (said.ipvs.tcp_timeout, said.ipvs.tcp_fin_timeout, said.ipvs.udp_timeout)
    if said.ipvs.scheduler or said.ipvs.strict_arp or any(map(_is_time, times)):
        yield Note(
            f"{KUBE_PROXY}.ipvs: scheduler, strictARP and timeouts count where IPVS serves (mode "
            "ipvs of KbpfConfiguration); BPF chooses by chance, or by kbpf.io/algorithm",
            is_warning=bool(said.ipvs.scheduler),
        )
    if not said.node_port_addresses and said.mode != "nftables":
        yield Note(
            f"{KUBE_PROXY}.nodePortAddresses is unset: NodePorts answer on all addresses of the "
            'node; consider ["primary"]'
        )
    gate = said.mode == "nftables" and said.feature_gates.get(parsers.LOCALHOST_GATE)
    if "localhost" in said.node_port_addresses and said.mode in ("nftables", "ipvs") and not gate:
        other = f" without the feature gate {parsers.LOCALHOST_GATE}"
        yield Note(
            f"{KUBE_PROXY}.nodePortAddresses: localhost does nothing in mode {said.mode}"
            f"{other if said.mode == 'nftables' else ''}, as with kube-proxy; "
            "KbpfConfiguration.localhostNodePorts: true makes NodePorts answer there"
        )
    if said.cluster_cidr and said.detect_local_mode not in ("", "ClusterCIDR"):
        yield Note(
            f"{KUBE_PROXY}.clusterCIDR is not used: detectLocalMode is {said.detect_local_mode}"
        )
    for at, name, needed in (
        ("bridgeInterface", said.detect_local.bridge_interface, "BridgeInterface"),
        ("interfaceNamePrefix", said.detect_local.interface_name_prefix, "InterfaceNamePrefix"),
    ):
        if name and said.detect_local_mode != needed:
            yield Note(
                f"{KUBE_PROXY}.detectLocal.{at} is not used: detectLocalMode is "
                f"{said.detect_local_mode or 'ClusterCIDR'}"
            )
    if not said.cluster_cidr and said.detect_local_mode in ("", "ClusterCIDR"):
        yield Note(
            f"{KUBE_PROXY}.clusterCIDR is empty: no ClusterIP is masqueraded, and pods of this "
            "node are told by their devices"
        )


def _is_time(text: str) -> bool:
    try:
        return bool(text) and durations.parse(text, "") != 0
    except ConfigError:
        return False


def _routed(options: dict[str, Any]) -> bool:
    """Whether logging.options asks for anything: kubeadm writes it with nothing in it."""
    below = [value for value in options.values() if isinstance(value, dict)]
    return any(v not in (None, False, "", "0", 0) for each in below for v in each.values())

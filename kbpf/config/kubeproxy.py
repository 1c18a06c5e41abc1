# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's configuration: KubeProxyConfiguration v1alpha1, as kubeadm writes it.

The structs mirror the file; a zero value (or null) means kube-proxy's default. `read_settings()`
turns a document into settings, with kube-proxy's defaults and checks; `find_diagnostics()` yields
what is accepted but not used. Both name the path in the document.

A setting that depends on the mode (masqueradeBit, the periods) is read as kube-proxy reads it in
that mode; "" means iptables. load.py decides where NodePorts answer, for flags and this file alike.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from kbpf.config import durations, kinds
from kbpf.config.documents import KUBE_PROXY
from kbpf.config.settings import SETTINGS, UNUSED_SETTINGS, UnusedSetting
from kbpf.config.values import ConfigValues, Diagnostic
from kbpf.errors import ConfigError

PROXY_MODES: Final = ("iptables", "nftables", "ipvs")
DEFAULT_SYNC_PERIOD: Final = 30.0
DEFAULT_MASQUERADE_BIT: Final = 14


def json_name(name: str) -> str:
    """Returns the name of a field in the document: ``clusterCIDR``, ``strictARP``."""
    acronyms = {"cidr": "CIDR", "cidrs": "CIDRs", "arp": "ARP", "dsr": "DSR"}
    first, *rest = name.split("_")
    return first + "".join(acronyms.get(part, part.capitalize()) for part in rest)


class _Section(msgspec.Struct, frozen=True, rename=json_name):
    """A part of the document; a subclass has to repeat `frozen`."""


class ClientConnectionConfiguration(_Section, frozen=True):
    """How to connect to the API server."""

    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = ""
    qps: float = 0.0
    burst: int = 0


class KubeProxyIPTablesConfiguration(_Section, frozen=True):
    """Settings of mode iptables, some also used in mode ipvs."""

    masquerade_bit: int | None = None
    masquerade_all: bool = False
    localhost_node_ports: bool | None = None
    snat_node_internal_ip: bool | None = msgspec.field(default=None, name="snatNodeInternalIP")
    sync_period: str = ""
    min_sync_period: str = ""


class KubeProxyIPVSConfiguration(_Section, frozen=True):
    sync_period: str = ""
    min_sync_period: str = ""
    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] = ()
    strict_arp: bool = False
    tcp_timeout: str = ""
    tcp_fin_timeout: str = ""
    udp_timeout: str = ""


class KubeProxyNFTablesConfiguration(_Section, frozen=True):
    masquerade_bit: int | None = None
    masquerade_all: bool = False
    sync_period: str = ""
    min_sync_period: str = ""


class KubeProxyWinkernelConfiguration(_Section, frozen=True):
    network_name: str = ""
    source_vip: str = ""
    enable_dsr: bool = False
    root_hns_endpoint_name: str = ""
    forward_health_check_vip: bool = False


class DetectLocalConfiguration(_Section, frozen=True):
    """Settings of two of the modes of detectLocalMode."""

    bridge_interface: str = ""
    interface_name_prefix: str = ""


class KubeProxyConntrackConfiguration(_Section, frozen=True):
    """Values for the kernel's conntrack. For a timeout, None is the default and "0s" leaves it
    unchanged.
    """

    max_per_core: int | None = None
    min: int | None = None
    tcp_established_timeout: str | None = None
    tcp_close_wait_timeout: str | None = None
    tcp_be_liberal: bool = False
    udp_timeout: str = ""
    udp_stream_timeout: str = ""


class LoggingConfiguration(_Section, frozen=True):
    """The logging settings of all Kubernetes components."""

    format: str = ""
    flush_frequency: int | str = 0
    verbosity: int = 0
    vmodule: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = {}


class KubeProxyConfiguration(_Section, frozen=True):
    """The document, without kind and apiVersion."""

    feature_gates: dict[str, bool] = {}
    client_connection: ClientConnectionConfiguration = ClientConnectionConfiguration()
    logging: LoggingConfiguration = LoggingConfiguration()
    hostname_override: str = ""
    bind_address: str = ""
    healthz_bind_address: str = ""
    metrics_bind_address: str = ""
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    show_hidden_metrics_for_version: str = ""
    mode: str = ""
    iptables: KubeProxyIPTablesConfiguration = KubeProxyIPTablesConfiguration()
    ipvs: KubeProxyIPVSConfiguration = KubeProxyIPVSConfiguration()
    nftables: KubeProxyNFTablesConfiguration = KubeProxyNFTablesConfiguration()
    winkernel: KubeProxyWinkernelConfiguration = KubeProxyWinkernelConfiguration()
    detect_local_mode: str = ""
    detect_local: DetectLocalConfiguration = DetectLocalConfiguration()
    cluster_cidr: str = ""
    node_port_addresses: tuple[str, ...] = ()
    oom_score_adj: int | None = None
    conntrack: KubeProxyConntrackConfiguration = KubeProxyConntrackConfiguration()
    config_sync_period: str = ""
    port_range: str = ""
    windows_run_as_service: bool = False
    udp_idle_timeout: str = msgspec.field(default="", name="udpIdleTimeout")


DEFAULTS: Final = msgspec.to_builtins(KubeProxyConfiguration())

# ---- settings ------------------------------------------------------------------------------------

DEPENDENT_FIELDS: Final = (
    "clusterCIDR",
    "configSyncPeriod",
    "detectLocal",
    "featureGates",
    "healthzBindAddress",
    "iptables.",
    "ipvs.",
    "metricsBindAddress",
    "mode",
    "nftables.",
    "nodePortAddresses",
)
"""Fields, or their prefixes, with rules of their own, below. All others mean what the row in
settings.py says."""


def read_settings(document: KubeProxyConfiguration) -> ConfigValues:
    """Returns the fields of Config that the document decides: all of kube-proxy's, set or not."""
    values = ConfigValues(f"{KUBE_PROXY}.")
    _read_independent_fields(document, values)
    if document.client_connection.burst < 0:
        values.add_error("clientConnection.burst", f"less than 0: {document.client_connection.burst}")
    period = _parse_period(values, "configSyncPeriod", document.config_sync_period, kinds.period)
    if period:
        values.set("config_sync_period", "configSyncPeriod", period)
    _read_servers(document, values)
    _read_mode(document, values)
    _read_node_ports(document.node_port_addresses, values)
    is_enabled = document.iptables.localhost_node_ports is not False
    values.set("localhost_node_ports", "iptables.localhostNodePorts", is_enabled)
    values.set("feature_gates", "featureGates", document.feature_gates)
    _read_detect_local(document, values)
    return values


def _read_node_ports(items: tuple[str, ...], values: ConfigValues) -> None:
    """Parses each item alone, or a repeated keyword twice, so that an error has the path of the item."""
    count = len(values.errors)
    for i, item in enumerate(items):
        is_repeated = item in kinds.NODE_PORT_KEYWORDS and item in items[:i]
        values.try_parse(f"nodePortAddresses[{i}]", (item,) * (1 + is_repeated), kinds.node_port_list)
    if items and len(values.errors) == count:
        values.parse("node_ports", "nodePortAddresses", items, kinds.node_port_list)


def _read_independent_fields(document: KubeProxyConfiguration, values: ConfigValues) -> None:
    fields = msgspec.to_builtins(document)
    for setting in SETTINGS:
        for path in setting.kube_proxy.split():
            value = _set_value(fields, path)
            if value is None or path.startswith(DEPENDENT_FIELDS):
                continue
            if setting.kind is kinds.COUNT and value < 0:
                values.add_error(path, f"less than 0: {value}")
            else:
                values.parse(setting.field, path, setting.kind.flag_text(value), setting.parse)


def _set_value(fields: Mapping[str, Any], path: str) -> Any:
    """Returns the value of a field of the document; None if it is unset or the zero value."""
    value, default = fields, DEFAULTS
    for name in path.split("."):
        value, default = value[name], default[name]
    return None if value == default else value


def _read_servers(document: KubeProxyConfiguration, values: ConfigValues) -> None:
    any_host, loopback = ("[::]", "[::1]") if ":" in document.bind_address else ("0.0.0.0", "127.0.0.1")
    healthz = document.healthz_bind_address or any_host
    values.parse("serving.healthz", "healthzBindAddress", healthz, kinds.healthz)
    metrics = document.metrics_bind_address or loopback
    values.parse("serving.metrics", "metricsBindAddress", metrics, kinds.metrics)


def _read_mode(document: KubeProxyConfiguration, values: ConfigValues) -> None:
    if document.mode not in ("", *PROXY_MODES):
        values.add_error("mode", f"unknown value {document.mode!r}", f"use {' or '.join(PROXY_MODES)}, or none")
    values.set("proxy_mode", "mode", document.mode)
    _read_periods(document, values)
    _read_masquerade(document, values)
    values.set("strict_arp", "ipvs.strictARP", document.ipvs.strict_arp)
    _read_ipvs_timeouts(document, values)
    if document.mode == "ipvs":
        _read_ipvs(document.ipvs, values)
    elif document.ipvs.scheduler in kinds.IPVS_SCHEDULERS:
        values.set("ipvs_scheduler", "ipvs.scheduler", document.ipvs.scheduler)


def _read_periods(document: KubeProxyConfiguration, values: ConfigValues) -> None:
    """Reads the periods from the section of the mode."""
    sections: dict[str, KubeProxyIPTablesConfiguration | KubeProxyIPVSConfiguration | KubeProxyNFTablesConfiguration]
    sections = {"nftables": document.nftables, "ipvs": document.ipvs}
    name = document.mode if document.mode in sections else "iptables"
    section = sections.get(name, document.iptables)
    sync_period = _parse_period(values, f"{name}.syncPeriod", section.sync_period, kinds.period) or DEFAULT_SYNC_PERIOD
    values.set("serving.late_seconds", f"{name}.syncPeriod", 2 * sync_period)
    min_sync_period = _parse_period(values, f"{name}.minSyncPeriod", section.min_sync_period, kinds.seconds)
    if min_sync_period:
        values.set("min_sync_period", f"{name}.minSyncPeriod", min_sync_period)
    if min_sync_period > sync_period:
        minimum = durations.format_duration(min_sync_period)
        values.add_error(f"{name}.syncPeriod", f"shorter than minSyncPeriod, {minimum}")


def _read_masquerade(document: KubeProxyConfiguration, values: ConfigValues) -> None:
    """Reads the section of nftables in that mode, else of iptables, whose bit is checked in any
    mode.
    """
    bit, masquerade_all = document.iptables.masquerade_bit, document.iptables.masquerade_all
    if bit is not None:
        values.parse("masquerade_bit", "iptables.masqueradeBit", str(bit), kinds.bit)
    values.set("masquerade_all", "iptables.masqueradeAll", masquerade_all)
    if document.mode == "nftables":
        values.set("masquerade_all", "nftables.masqueradeAll", document.nftables.masquerade_all)
        bit = document.nftables.masquerade_bit
        text = str(DEFAULT_MASQUERADE_BIT if bit is None else bit)
        values.parse("masquerade_bit", "nftables.masqueradeBit", text, kinds.bit)


def _read_ipvs(section: KubeProxyIPVSConfiguration, values: ConfigValues) -> None:
    """Reads what kube-proxy checks in this mode only."""
    if section.scheduler:
        values.parse("ipvs_scheduler", "ipvs.scheduler", section.scheduler, kinds.SCHEDULER.parse)
    for i, text in enumerate(section.exclude_cidrs):
        values.try_parse(f"ipvs.excludeCIDRs[{i}]", text, kinds.cidr)


def _read_ipvs_timeouts(document: KubeProxyConfiguration, values: ConfigValues) -> None:
    """Invalid timeouts are errors in mode ipvs only."""
    for field, path, text in (
        ("tcp", "ipvs.tcpTimeout", document.ipvs.tcp_timeout),
        ("tcp_fin", "ipvs.tcpFinTimeout", document.ipvs.tcp_fin_timeout),
        ("udp", "ipvs.udpTimeout", document.ipvs.udp_timeout),
    ):
        if not text:
            continue
        if document.mode == "ipvs":
            values.parse(f"ipvs_times.{field}", path, text, kinds.whole_seconds)
        else:
            with contextlib.suppress(ConfigError):
                values.set(f"ipvs_times.{field}", path, kinds.whole_seconds(text, path))


def _read_detect_local(document: KubeProxyConfiguration, values: ConfigValues) -> None:
    mode = document.detect_local_mode
    values.parse("detect_local_mode", "detectLocalMode", mode, kinds.local_mode)
    for field, name, text, required_mode in _pod_device_names(document.detect_local):
        if mode != required_mode:
            continue
        if text:
            values.parse(field, f"detectLocal.{name}", text, kinds.device)
        else:
            values.add_error(f"detectLocal.{name}", f"{required_mode} needs a name", "set it")
    if mode in ("", "ClusterCIDR"):
        values.parse("cluster_cidrs", "clusterCIDR", document.cluster_cidr, kinds.cluster_cidrs)


def _pod_device_names(section: DetectLocalConfiguration) -> tuple[tuple[str, str, str, str], ...]:
    """Field of Config, field of this section, its value, and the mode that uses it."""
    return (
        ("pod_bridge_interface", "bridgeInterface", section.bridge_interface, "BridgeInterface"),
        ("pod_interface_name_prefix", "interfaceNamePrefix", section.interface_name_prefix, "InterfaceNamePrefix"),
    )


def _parse_period(values: ConfigValues, path: str, text: str, parser: kinds.Parser) -> float:
    """Returns a period in seconds; 0.0 if unset or zero, which mean the default."""

    def parse_nonzero(text: str, where: str) -> float:
        seconds: float = parser(text, where) if durations.parse(text, where) else 0.0
        return seconds

    return values.try_parse(path, text, parse_nonzero) or 0.0 if text else 0.0


# ---- fields that are accepted but not used -------------------------------------------------------


def _is_time(text: str) -> bool:
    try:
        return bool(text) and durations.parse(text, "") != 0
    except ConfigError:
        return False


def _has_log_options(options: dict[str, Any]) -> bool:
    """Whether logging.options sets anything: kubeadm writes empty options."""
    formats = [value for value in options.values() if isinstance(value, dict)]
    return any(v not in (None, False, "", "0", 0) for format_options in formats for v in format_options.values())


IS_SET: Final[Mapping[str, Callable[[Any], object]]] = {
    "featureGates": lambda gates: gates.keys() - kinds.USED_GATES,
    "logging.options": _has_log_options,
    "udpIdleTimeout": _is_time,
}
"""Path of an unused field → whether it is set, if that is not obvious."""
WARNED_FIELDS: Final = frozenset(("iptables.snatNodeInternalIP",))
"""Unused fields that get a warning: backends may see another address than the operator expects."""


def _is_set(unused: UnusedSetting, fields: Mapping[str, Any]) -> bool:
    value = _set_value(fields, unused.path)
    if value is None or value in unused.defaults:
        return False
    return unused.path not in IS_SET or bool(IS_SET[unused.path](value))


def find_diagnostics(document: KubeProxyConfiguration) -> Iterator[Diagnostic]:
    """Yields a line for each field that is accepted but not used, and for what kube-proxy warns
    about.
    """
    fields = msgspec.to_builtins(document)
    for unused in UNUSED_SETTINGS:
        if unused.path and _is_set(unused, fields):
            text = f"{KUBE_PROXY}.{unused.path} is accepted but not used: {unused.why}"
            yield Diagnostic(text, is_warning=unused.path in WARNED_FIELDS)
    if document.mode in PROXY_MODES:
        yield Diagnostic(
            f"{KUBE_PROXY}.mode: {document.mode} only sets defaults; the data plane is "
            "chosen by KbpfConfiguration.mode or --mode"
        )
    times = (document.ipvs.tcp_timeout, document.ipvs.tcp_fin_timeout, document.ipvs.udp_timeout)
    if document.ipvs.scheduler or document.ipvs.strict_arp or any(map(_is_time, times)):
        yield Diagnostic(
            f"{KUBE_PROXY}.ipvs: scheduler, strictARP and timeouts are used only in mode ipvs "
            "(KbpfConfiguration.mode); BPF chooses at random, or by kbpf.io/algorithm",
            is_warning=bool(document.ipvs.scheduler),
        )
    if not document.node_port_addresses and document.mode != "nftables":
        yield Diagnostic(
            f"{KUBE_PROXY}.nodePortAddresses is unset: NodePorts answer on all addresses of the "
            'node; consider ["primary"]'
        )
    yield from _find_detect_local_diagnostics(document)


def _find_detect_local_diagnostics(document: KubeProxyConfiguration) -> Iterator[Diagnostic]:
    if document.cluster_cidr and document.detect_local_mode not in ("", "ClusterCIDR"):
        yield Diagnostic(f"{KUBE_PROXY}.clusterCIDR is not used: detectLocalMode is {document.detect_local_mode}")
    for _, field, name, required_mode in _pod_device_names(document.detect_local):
        if name and document.detect_local_mode != required_mode:
            yield Diagnostic(
                f"{KUBE_PROXY}.detectLocal.{field} is not used: detectLocalMode is "
                f"{document.detect_local_mode or 'ClusterCIDR'}"
            )
    if not document.cluster_cidr and document.detect_local_mode in ("", "ClusterCIDR"):
        yield Diagnostic(
            f"{KUBE_PROXY}.clusterCIDR is empty: no ClusterIP is masqueraded, and pods of this "
            "node are recognized by their devices"
        )

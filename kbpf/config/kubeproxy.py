# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's configuration: KubeProxyConfiguration v1alpha1, as kubeadm writes it.

A document becomes settings, with kube-proxy's defaults and checks, and a line for each field that is
accepted but not used. Errors and lines name the path in the document.

A setting that depends on the mode (masqueradeBit, the periods) is read as kube-proxy reads it in
that mode; "" means iptables. load.py decides where NodePorts answer, for flags and this file alike.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Final

from kbpf.config import documents, durations, kinds
from kbpf.config.documents import KUBE_PROXY
from kbpf.config.settings import IPVS, SETTINGS, UNUSED_SETTINGS, UnusedSetting
from kbpf.config.values import ConfigValues, Diagnostic
from kbpf.errors import ConfigError

PROXY_MODES: Final = ("iptables", "nftables", "ipvs")
DEFAULT_SYNC_PERIOD: Final = 30.0
DEFAULT_MASQUERADE_BIT: Final = 14

FIELD_TYPES: Final[Mapping[str, Any]] = {
    **{unused.path: unused.json_type for unused in UNUSED_SETTINGS if unused.path},
    **{path: setting.kind.json_type for setting in SETTINGS for path in setting.kube_proxy.split()},
}
"""Path in the document → type of its value. These are all fields of v1alpha1."""
KubeProxyConfiguration: Final = documents.build_type(KUBE_PROXY, FIELD_TYPES)

Fields = Mapping[str, Any]
"""Path → value of the fields that a document sets. null and "" mean kube-proxy's default."""

# ---- settings ------------------------------------------------------------------------------------

DEPENDENT_FIELDS: Final = (
    "clusterCIDR",
    "configSyncPeriod",
    "detectLocal",
    "featureGates",
    "healthzBindAddress",
    "iptables.",
    "ipvs.minSyncPeriod",
    "ipvs.syncPeriod",
    "metricsBindAddress",
    "mode",
    "nftables.",
    "nodePortAddresses",
)
"""Fields, or their prefixes, with rules of their own, below. All others mean what the row in
settings.py says."""


def read(document: Mapping[str, Any]) -> ConfigValues:
    """Returns the fields of Config that the document decides: all of kube-proxy's, set or not. The
    document is without kind and apiVersion.
    """
    values = ConfigValues(f"{KUBE_PROXY}.")
    decoded = documents.decode(KubeProxyConfiguration, document, KUBE_PROXY, values)
    all_fields = {path: attrgetter(path)(decoded) for path in FIELD_TYPES}
    fields = {path: value for path, value in all_fields.items() if value not in (None, "")}
    mode = fields.get("mode", "")
    _read_independent_fields(fields, mode, values)
    if (burst := fields.get("clientConnection.burst", 0)) < 0:
        values.add_error("clientConnection.burst", f"less than 0: {burst}")
    if period := _parse_period(fields, "configSyncPeriod", values):
        values.set("config_sync_period", "configSyncPeriod", period)
    _read_servers(fields, values)
    if mode not in ("", *PROXY_MODES):
        values.add_error("mode", f"unknown value {mode!r}", f"use {' or '.join(PROXY_MODES)}, or none")
    values.set("proxy_mode", "mode", mode)
    _read_periods(fields, mode, values)
    _read_masquerade(fields, mode, values)
    _read_node_ports(fields.get("nodePortAddresses", ()), values)
    is_enabled = fields.get("iptables.localhostNodePorts", True)
    values.set("localhost_node_ports", "iptables.localhostNodePorts", is_enabled)
    values.set("feature_gates", "featureGates", fields.get("featureGates", {}))
    _read_detect_local(fields, values)
    values.notes += _find_diagnostics(fields)
    return values


def _read_node_ports(items: tuple[str, ...], values: ConfigValues) -> None:
    """Parses each item alone, or a repeated keyword twice, so that an error has the path of the item."""
    count = len(values.errors)
    for i, item in enumerate(items):
        is_repeated = item in kinds.NODE_PORT_KEYWORDS and item in items[:i]
        values.try_parse(f"nodePortAddresses[{i}]", (item,) * (1 + is_repeated), kinds.node_port_list)
    if items and len(values.errors) == count:
        values.parse("node_ports", "nodePortAddresses", items, kinds.node_port_list)


def _read_independent_fields(fields: Fields, mode: str, values: ConfigValues) -> None:
    """What is invalid among the settings of mode ipvs is an error in this mode only."""
    of_ipvs = ConfigValues(f"{KUBE_PROXY}.")
    for setting in SETTINGS:
        for path in setting.kube_proxy.split():
            value = fields.get(path)
            if value is None or path.startswith(DEPENDENT_FIELDS):
                continue
            if setting.kind is kinds.COUNT and value < 0:
                values.add_error(path, f"less than 0: {value}")
            else:
                holder = of_ipvs if setting.only == IPVS else values
                holder.parse(setting.field, path, setting.kind.flag_text(value), setting.kind.parse)
    for i, text in enumerate(fields.get("ipvs.excludeCIDRs", ())):
        of_ipvs.try_parse(f"ipvs.excludeCIDRs[{i}]", text, kinds.cidr)
    if mode != "ipvs":
        of_ipvs.errors.clear()
    values.merge(of_ipvs)


def _read_servers(fields: Fields, values: ConfigValues) -> None:
    is_v6 = ":" in fields.get("bindAddress", "")
    any_host, loopback = ("[::]", "[::1]") if is_v6 else ("0.0.0.0", "127.0.0.1")
    for field, path, default, parser in (
        ("serving.healthz", "healthzBindAddress", any_host, kinds.healthz),
        ("serving.metrics", "metricsBindAddress", loopback, kinds.metrics),
    ):
        values.parse(field, path, fields.get(path, default), parser)


def _read_periods(fields: Fields, mode: str, values: ConfigValues) -> None:
    """Reads the periods from the section of the mode."""
    section = mode if mode in PROXY_MODES else "iptables"
    path, min_path = f"{section}.syncPeriod", f"{section}.minSyncPeriod"
    sync_period = _parse_period(fields, path, values) or DEFAULT_SYNC_PERIOD
    values.set("serving.late_seconds", path, 2 * sync_period)
    min_sync_period = _parse_period(fields, min_path, values)
    if min_sync_period:
        values.set("min_sync_period", min_path, min_sync_period)
    if min_sync_period > sync_period:
        values.add_error(path, f"shorter than minSyncPeriod, {durations.format_duration(min_sync_period)}")


def _read_masquerade(fields: Fields, mode: str, values: ConfigValues) -> None:
    """Reads the section of nftables in that mode, else of iptables, whose bit is checked in any
    mode.
    """
    for section in ("iptables", "nftables") if mode == "nftables" else ("iptables",):
        bit_path, all_path = f"{section}.masqueradeBit", f"{section}.masqueradeAll"
        values.parse("masquerade_bit", bit_path, str(fields.get(bit_path, DEFAULT_MASQUERADE_BIT)), kinds.BIT.parse)
        values.set("masquerade_all", all_path, fields.get(all_path, False))


POD_DEVICE_NAMES: Final = (
    ("pod_bridge_interface", "detectLocal.bridgeInterface", "BridgeInterface"),
    ("pod_interface_name_prefix", "detectLocal.interfaceNamePrefix", "InterfaceNamePrefix"),
)
"""Field of Config, its path in the document, and the mode that uses it."""


def _read_detect_local(fields: Fields, values: ConfigValues) -> None:
    mode = fields.get("detectLocalMode", "")
    values.parse("detect_local_mode", "detectLocalMode", mode, kinds.local_mode)
    for field, path, required_mode in POD_DEVICE_NAMES:
        if mode != required_mode:
            continue
        if path in fields:
            values.parse(field, path, fields[path], kinds.device)
        else:
            values.add_error(path, f"{required_mode} needs a name", "set it")
    if mode in ("", "ClusterCIDR"):
        values.parse("cluster_cidrs", "clusterCIDR", fields.get("clusterCIDR", ""), kinds.cluster_cidrs)


def _parse_period(fields: Fields, path: str, values: ConfigValues) -> float:
    """Returns a period in seconds; 0.0 if unset or zero, which mean the default."""
    return values.try_parse(path, fields.get(path, "0s"), kinds.seconds) or 0.0


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
    "winkernel": lambda section: any(section.values()),  # kubeadm writes zeros
}
"""Path of an unused field → whether it is set, if that is not obvious."""
WARNED_FIELDS: Final = frozenset(("iptables.snatNodeInternalIP",))
"""Unused fields that get a warning: backends may see another address than the operator expects."""


def _is_set(unused: UnusedSetting, fields: Fields) -> bool:
    value = fields.get(unused.path)
    if not value or value in unused.defaults:
        return False
    return unused.path not in IS_SET or bool(IS_SET[unused.path](value))


def _find_diagnostics(fields: Fields) -> Iterator[Diagnostic]:
    """Yields a line for each field that is accepted but not used, and for what kube-proxy warns
    about.
    """
    for unused in UNUSED_SETTINGS:
        if unused.path and _is_set(unused, fields):
            text = f"{KUBE_PROXY}.{unused.path} is accepted but not used: {unused.why}"
            yield Diagnostic(text, is_warning=unused.path in WARNED_FIELDS)
    mode = fields.get("mode", "")
    if mode in PROXY_MODES:
        yield Diagnostic(
            f"{KUBE_PROXY}.mode: {mode} only sets defaults; the data plane is "
            "chosen by KbpfConfiguration.mode or --mode"
        )
    has_scheduler = "ipvs.scheduler" in fields
    times = (fields.get(f"ipvs.{name}Timeout", "") for name in ("tcp", "tcpFin", "udp"))
    if has_scheduler or fields.get("ipvs.strictARP") or any(map(_is_time, times)):
        yield Diagnostic(
            f"{KUBE_PROXY}.ipvs: scheduler, strictARP and timeouts are used only in mode ipvs "
            "(KbpfConfiguration.mode); BPF chooses at random, or by kbpf.io/algorithm",
            is_warning=has_scheduler,
        )
    if not fields.get("nodePortAddresses") and mode != "nftables":
        yield Diagnostic(
            f"{KUBE_PROXY}.nodePortAddresses is unset: NodePorts answer on all addresses of the "
            'node; consider ["primary"]'
        )
    local_mode = fields.get("detectLocalMode", "ClusterCIDR")
    for path, required_mode in (("clusterCIDR", "ClusterCIDR"), *(row[1:] for row in POD_DEVICE_NAMES)):
        if path in fields and local_mode != required_mode:
            yield Diagnostic(f"{KUBE_PROXY}.{path} is not used: detectLocalMode is {local_mode}")
    if "clusterCIDR" not in fields and local_mode == "ClusterCIDR":
        yield Diagnostic(
            f"{KUBE_PROXY}.clusterCIDR is empty: no ClusterIP is masqueraded, and pods of this "
            "node are recognized by their devices"
        )

# SPDX-License-Identifier: Apache-2.0
"""Builds the Config from flags, environment variables and the configuration file, with
diagnostics.

Precedence:

- A flag overrides its environment variable, and both override the file.
- However, kube-proxy's own flags, and their variables, are ignored if the file has a document of
  kube-proxy. kube-proxy's --config works like that, and its DaemonSets rely on it. The ignored
  ones are named in one line.
- If both documents of the file set the same thing (localhostNodePorts), kbpf's document wins.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from kbpf.config import documents, durations, kinds, kubeproxy
from kbpf.config.documents import KBPF, KUBE_PROXY, ConfigDocuments
from kbpf.config.settings import DEFAULT, REMOVED_SETTINGS, SETTINGS, SETTINGS_BY_FLAG, ignored_in_ipvs
from kbpf.config.values import ConfigValues, Diagnostic
from kbpf.errors import ConfigError, ConfigErrors, closest_name
from kbpf.kernel.system import mounts
from kbpf.model.address import family_of, parse_addr
from kbpf.model.config import (
    MAX_CONNTRACK_ENTRIES,
    SLOTS_PER_BACKEND,
    Config,
    Conntrack,
    IpvsTimeoutSettings,
    LocalMode,
    MapSizes,
    Serving,
    SocketLb,
)
from kbpf.model.objects import Cidr

MIN_CONNECTIONS: Final = 1000
"""A new connection tries to evict one of the 32 oldest, so there must be many more than that."""
MAX_FILE_BYTES: Final = 16 << 20
"""At most this many bytes of a configuration file are read; bounded_yaml.CONFIGURATION allows
fewer."""
CONFIG_FILE_VARIABLE: Final = "KBPF_CONFIG"
NODE_NAME_PATTERN: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
DEFAULT_NODE_PORT_RANGE: Final = range(30_000, 32_768)
"""The default of kube-apiserver's --service-node-port-range."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The settings and the diagnostics. `config.node_name` is "" if it is not set. `origins`:
    where each field was set.
    """

    config: Config
    notes: tuple[Diagnostic, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)


def read_file(path: Path) -> bytes:
    """Returns the bytes of a configuration file, up to MAX_FILE_BYTES."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration: {error.strerror}", str(path), "give --config FILE"
        ) from error


def load(
    flag_values: Mapping[str, str], environ: Mapping[str, str], data: bytes | None = None, where: str = "--config"
) -> LoadedConfig:
    """Loads flags, environment and the text of a file, which comes from `where`. Raises
    ConfigErrors, or ConfigError if the file cannot be parsed.
    """
    file_documents = documents.parse(data, where) if data is not None else ConfigDocuments()
    values = ConfigValues()
    values.notes += file_documents.notes
    if file_documents.kube_proxy is not None:
        values.merge(kubeproxy.read(file_documents.kube_proxy))
    if file_documents.kbpf is not None:
        values.merge(documents.read_kbpf(file_documents.kbpf))
    values.merge(_read_flags(flag_values, environ, file_documents.kube_proxy is not None))
    if not values.errors:
        result = _build_config(values)
        values.errors += _find_contradictions(result, values)
    if values.errors:
        warnings = tuple(note.text for note in values.notes if note.is_warning)
        raise ConfigErrors(tuple(values.errors), warnings, values.get("log_format", Config().log_format))
    return LoadedConfig(result, (*values.notes, *_find_warnings(result, values)), values.origins)


def _read_flags(
    flag_values: Mapping[str, str], environ: Mapping[str, str], has_kube_proxy_document: bool
) -> ConfigValues:
    """Reads flags and environment variables."""
    values = ConfigValues()
    ignored: list[str] = []
    proxy_mode = flag_values.get("--proxy-mode") or environ.get("KBPF_PROXY_MODE") or "iptables"
    values.notes += _find_unknown_variables(environ)
    values.notes += _find_removed_settings(flag_values, environ)
    for setting in SETTINGS:
        flag, variable = setting.name, setting.environment_variable
        if flag_values.get(flag) or (flag in flag_values and setting.kind.accepts_empty):
            origin, text = flag, flag_values[flag]
        elif setting.field and environ.get(variable):
            origin, text = variable, environ[variable]
        else:
            continue
        if has_kube_proxy_document and setting.is_ignored_with_kube_proxy_document:
            ignored.append(origin)
        elif setting.proxy_modes and proxy_mode not in setting.proxy_modes:
            values.notes.append(Diagnostic(f"{origin} is not used: kube-proxy's mode is {proxy_mode}"))
        elif not setting.field:
            values.notes.append(Diagnostic(f"{origin} is accepted but not used: {setting.help}"))
        else:
            values.parse(setting.field, origin, text, setting.kind.parse)
            if setting.kind is kinds.FEATURE_GATES:
                values.notes += _find_unused_gates(origin, text)
    if ignored:
        values.notes.append(
            Diagnostic(
                f"ignored, as kube-proxy does with --config: {', '.join(ignored)}; set it in the file's {KUBE_PROXY}",
                is_warning=True,
            )
        )
    return values


SERVICE_LINK_PATTERN: Final = re.compile(r"KBPF(_[A-Z0-9]+)*_(SERVICE_(HOST|PORT)|PORT)(_[A-Z0-9_]+)?")
"""Variables that kubelet sets for a Service whose name begins with kbpf."""
TEST_VARIABLE_PREFIXES: Final = ("KBPF_TEST_", "KBPF_BENCH_")
"""Variables of the project's own tests."""


def _find_unknown_variables(environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    variables = {setting.environment_variable for setting in SETTINGS if setting.field}
    variables.add(CONFIG_FILE_VARIABLE)
    variables |= {setting.environment_variable for setting in REMOVED_SETTINGS}
    for name in sorted(environ):
        if not name.startswith("KBPF_") or name in variables or name.startswith(TEST_VARIABLE_PREFIXES):
            continue
        if not SERVICE_LINK_PATTERN.fullmatch(name):
            known_name = closest_name(name, sorted(variables))
            hint = f"is {known_name} meant?" if known_name else "it is ignored"
            yield Diagnostic(f"{name} is an unknown variable; {hint}", is_warning=True)


def _find_removed_settings(flag_values: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    for setting in REMOVED_SETTINGS:
        for origin, given in ((setting.name, flag_values), (setting.environment_variable, environ)):
            if given.get(origin):
                yield Diagnostic(f"{origin} has no effect: {setting.text}", is_warning=True)


def _find_unused_gates(origin: str, text: str) -> Iterator[Diagnostic]:
    with contextlib.suppress(ConfigError):  # already reported
        if unused := sorted(kinds.feature_gate_values(text, origin).keys() - kinds.USED_GATES):
            yield Diagnostic(f"{origin}: {', '.join(unused)} is accepted but not used")


def _build_config(values: ConfigValues) -> Config:
    """Builds the Config, with defaults that depend on other fields."""
    parts: dict[str, Any] = {
        "sizes": MapSizes(),
        "serving": Serving(),
        "conntrack": Conntrack(),
        "ipvs_times": IpvsTimeoutSettings(),
    }
    for name, value in values.fields.items():
        part, dot, attribute = name.partition(".")
        if dot:
            parts[part] = replace(parts[part], **{attribute: value})
    sizes = parts["sizes"]
    slots = min(SLOTS_PER_BACKEND * sizes.backends, kinds.MAX_ENTRIES)
    parts["sizes"] = replace(sizes, slots=max(sizes.slots, slots))
    plain = {k: v for k, v in values.fields.items() if "." not in k}
    if not plain.pop("feature_gates", {}).get(kinds.EXTERNAL_IPS_GATE, True):
        plain.setdefault("external_ips", ())
    plain.pop("node_ports", None)
    plain |= _resolve_node_ports(values, plain.get("proxy_mode"))
    if plain.get("cluster_cidrs") and not plain.get("detect_local_mode"):
        plain["detect_local_mode"] = LocalMode.CLUSTER_CIDR
    for mode, name in LOCAL_MODE_FLAGS.items():
        if plain.get("detect_local_mode") != mode:
            plain.pop(SETTINGS_BY_FLAG[name].field, None)
    result = Config(**plain, **parts)
    return replace(result, ignored_in_ipvs=ignored_in_ipvs(result))


LOOPBACK4, LOOPBACK6 = (kinds.cidr(text, "") for text in kinds.LOOPBACK)
LOCALHOST4: Final = parse_addr("127.0.0.1")
WHOLE_FAMILIES: Final = (Cidr.parse("0.0.0.0/0"), Cidr.parse("::/0"))


def _resolve_node_ports(values: ConfigValues, mode: str | None) -> dict[str, Any]:
    """Where NodePorts answer, by kube-proxy's rules in this mode; None: no mode and no document of
    kube-proxy, so that kbpf's defaults apply. If unset: on all addresses, in mode nftables and by
    default on the primary ones. On loopback (nodeport_addresses.go): in mode iptables if the
    networks include it, and in mode nftables, with a feature gate, if one of them is a loopback
    network. KbpfConfiguration overrides this.
    """
    entries = values.get("node_ports", ("primary",) if mode in (None, "nftables") else ("all",))
    networks = tuple(entry for entry in entries if isinstance(entry, Cidr))
    localhost = values.get("localhost_node_ports", DEFAULT.localhost_node_ports)
    if values.origins.get("localhost_node_ports", "").startswith(KBPF):
        pass
    elif mode == "nftables":
        gates, is_default = values.get("feature_gates", {}), _is_like_1_38(values)
        localhost = gates.get(kinds.LOCALHOST_GATE, is_default) and _lists_loopback(values)
    elif mode == "ipvs":
        localhost = False
    elif "all" not in entries and (mode is not None or "node_ports" in values.fields):
        ipv4 = [network for network in networks if family_of(network.address) == 4]
        # A family without networks is served on all addresses.
        in_networks = any(n.contains(LOOPBACK4.address) or LOOPBACK4.contains(n.address) for n in ipv4)
        localhost = localhost and (in_networks or not (ipv4 or "primary" in entries))
    result = {"localhost_node_ports": localhost, "all_node_port_addresses": "all" in entries}
    if "all" in entries:
        return result
    return {**result, "node_port_addresses": networks, "primary_node_ports": bool(networks) and "primary" in entries}


def _is_like_1_38(values: ConfigValues) -> bool:
    version: str = values.get("kubernetes_version", DEFAULT.kubernetes_version)
    return version == "1.38"


def _lists_loopback(values: ConfigValues) -> bool:
    """Whether nodePortAddresses has a loopback network: in 1.38 any with 127.0.0.1 or ::1, except a whole family."""
    networks = [entry for entry in values.get("node_ports", ()) if isinstance(entry, Cidr)]
    if _is_like_1_38(values):
        hosts = (LOCALHOST4, LOOPBACK6.address)
        return any(network.contains(host) for network in networks for host in hosts if network not in WHOLE_FAMILIES)
    return any(LOOPBACK4.contains(network.address) or network == LOOPBACK6 for network in networks)


LOCAL_MODE_FLAGS: Final = {
    LocalMode.CLUSTER_CIDR: "--cluster-cidr",
    LocalMode.BRIDGE_INTERFACE: "--pod-bridge-interface",
    LocalMode.INTERFACE_NAME_PREFIX: "--pod-interface-name-prefix",
}
"""The flag that only this mode uses. ClusterCIDR does not require a network; without one it detects
nothing, as in kube-proxy, whose configuration files often omit it."""


def _find_contradictions(config: Config, values: ConfigValues) -> Iterator[ConfigError]:
    """Yields settings that exclude each other."""
    origin_of = _origin_lookup(values)
    if config.source is not None and (config.kubeconfig is not None or config.master):
        yield ConfigError(
            "a folder and an API server cannot both be the source",
            origin_of("source"),
            "leave out --source, or --kubeconfig and --master",
        )
    if config.sizes.connections < MIN_CONNECTIONS:
        yield ConfigError(
            f"too few connections: {config.sizes.connections}",
            origin_of("sizes.connections"),
            f"give {MIN_CONNECTIONS} or more: otherwise connections in use would be evicted",
        )
    if config.min_sync_period > config.serving.late_seconds / 2:
        yield ConfigError(
            f"longer than --sync-period, {durations.format_duration(config.serving.late_seconds / 2)}",
            origin_of("min_sync_period"),
            "choose a value up to --sync-period: otherwise waiting changes would make the agent unhealthy",
        )
    yield from _find_port_conflicts(config, origin_of)
    for mode, name in LOCAL_MODE_FLAGS.items():
        is_required = config.detect_local_mode is mode and mode is not LocalMode.CLUSTER_CIDR
        if is_required and not getattr(config, SETTINGS_BY_FLAG[name].field):
            yield ConfigError(f"{mode} needs a name", origin_of("detect_local_mode"), f"add {name}")
    if config.socket_lb is not SocketLb.ON and not config.packet_path:
        yield ConfigError(
            f"with --socket-lb {config.socket_lb} the packet path must be on",
            origin_of("socket_lb"),
            "leave out --packet-path false, or --socket-lb",
        )


WILDCARDS: Final = frozenset(("0.0.0.0", "[::]"))
"""Either one listens on all addresses of both families (serve/http.py)."""


def _find_port_conflicts(config: Config, origin_of: Callable[[str], str]) -> Iterator[ConfigError]:
    """Yields pairs of addresses of which the second could not be bound."""
    listens = [
        (field, *address.rpartition(":")[::2])
        for field in ("serving.healthz", "serving.metrics")
        for address in getattr(config.serving, field.partition(".")[2]).split(",")
        if address
    ]
    for (first_field, first_host, port), (second_field, second_host, second_port) in combinations(listens, 2):
        if port == second_port and (first_host == second_host or {first_host, second_host} & WILDCARDS):
            yield ConfigError(
                f"{first_host}:{port} and {second_host}:{port} cannot both be listened on",
                origin_of(first_field)
                if first_field == second_field
                else f"{origin_of(first_field)}, {origin_of(second_field)}",
                "choose another port for one of them",
            )


def _find_warnings(config: Config, values: ConfigValues) -> Iterator[Diagnostic]:
    """Yields settings that are probably not intended."""
    origin_of = _origin_lookup(values)
    if config.proxy_mode == "ipvs":
        yield Diagnostic(
            f"{origin_of('proxy_mode')}: kube-proxy's mode ipvs is deprecated: 1.40 rejects it by "
            "default, 1.43 removes it; kbpf's own mode ipvs stays",
            is_warning=True,
            event="IPVSDeprecation",
        )
    mode = values.get("proxy_mode", None)
    if mode == "" and _resolve_node_ports(values, "") != _resolve_node_ports(values, "nftables"):
        yield Diagnostic(
            f"{KUBE_PROXY}.mode is unset: kbpf reads it as iptables, kube-proxy from 1.40 on as "
            "nftables, where NodePorts answer on other addresses; set mode: iptables or "
            "mode: nftables",
            event="KubeProxyDefaultMode",
        )
    is_ineffective = mode in ("nftables", "ipvs") and not config.localhost_node_ports
    if is_ineffective and _lists_loopback(values):
        gate_condition = f" without the feature gate {kinds.LOCALHOST_GATE}" if mode == "nftables" else ""
        yield Diagnostic(
            f"{origin_of('node_ports')}: localhost has no effect in mode {mode}{gate_condition}, as with kube-proxy; "
            f"{KBPF}.localhostNodePorts: true makes NodePorts answer on loopback"
        )
    wanted_by = values.origins.get("localhost_node_ports", KUBE_PROXY)
    is_wanted = values.get("localhost_node_ports", False) and not wanted_by.startswith(KUBE_PROXY)
    if is_wanted and not config.localhost_node_ports:
        yield Diagnostic(
            f"{wanted_by} has no effect, as with kube-proxy: --proxy-mode or --nodeport-addresses excludes loopback; "
            f"{KBPF}.localhostNodePorts: true makes NodePorts answer there",
            is_warning=True,
        )
    low, high = config.masquerade_ports
    if config.packet_path and low < DEFAULT_NODE_PORT_RANGE.stop and high >= DEFAULT_NODE_PORT_RANGE.start:
        yield Diagnostic(
            f"{origin_of('masquerade_ports')} {low}-{high} overlaps "
            f"{DEFAULT_NODE_PORT_RANGE.start}-{DEFAULT_NODE_PORT_RANGE.stop - 1}, the API server's "
            "default range of NodePorts: a client of one may be mistaken for a client of the "
            "other; choose ports below or above",
            is_warning=True,
        )
    if config.node_name and not NODE_NAME_PATTERN.fullmatch(config.node_name):
        yield Diagnostic(
            f"{origin_of('node_name')}: no Node can have the name {config.node_name!r} (a-z, "
            "0-9, - and ., 253 characters at most): no endpoint counts as local to this node",
            is_warning=True,
        )
    for device in sorted({*config.devices} & {*config.excluded_devices}):
        yield Diagnostic(
            f"{origin_of('devices')} and {origin_of('excluded_devices')} both name {device}: it is ignored",
            is_warning=True,
        )
    if config.conntrack.max_per_core > MAX_CONNTRACK_ENTRIES:
        yield Diagnostic(
            f"{origin_of('conntrack.max_per_core')}: {config.conntrack.max_per_core} is limited to "
            f"{MAX_CONNTRACK_ENTRIES}, the maximum for all cores together",
            is_warning=True,
        )
    families = {family_of(cidr.address) for cidr in config.node_port_addresses}
    is_other_family_open = len(families) == 1 and not config.primary_node_ports
    if is_other_family_open and len({family_of(cidr.address) for cidr in config.cluster_cidrs}) == 2:
        yield Diagnostic(
            f"{origin_of('node_ports')} has IPv{families.pop()} networks only, but pods have "
            "addresses of both families: NodePorts answer on all addresses of the other one",
            is_warning=True,
        )
    if values.get("cluster_cidrs", ()) and not config.cluster_cidrs:
        yield Diagnostic(f"{origin_of('cluster_cidrs')} is not used: pods are recognized by {config.detect_local_mode}")


def _origin_lookup(values: ConfigValues) -> Callable[[str], str]:
    """Returns a function from a field to where it was set, or to the flag that would set it."""
    names = {setting.field: setting.name for setting in SETTINGS}
    return lambda field: values.origins.get(field) or names[field]


# ---- what the settings name on this machine ------------------------------------------------------

SYS_CLASS_NET: Final = Path("/sys/class/net")


def check_settings(loaded: LoadedConfig) -> LoadedConfig:
    """Returns the settings with further diagnostics. Raises ConfigErrors."""
    if errors := tuple(_errors(loaded)):
        warnings = tuple(note.text for note in loaded.notes if note.is_warning)
        raise ConfigErrors(errors, warnings, loaded.config.log_format)
    return replace(loaded, notes=(*loaded.notes, *_notes(loaded)))


def _errors(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """A misspelt cgroup would otherwise look like a missing feature of the kernel, and mode auto
    would fall back to IPVS.
    """
    cgroup = loaded.config.cgroup
    if cgroup is not None and loaded.config.mode != "ipvs" and not mounts.is_cgroup2(cgroup):
        yield ConfigError(
            f"{'not a' if cgroup.is_dir() else 'no such'} cgroup v2 folder: {cgroup}",
            loaded.origins["cgroup"],
            "name an existing folder of cgroup v2, or leave it out for the root cgroup",
        )


def _notes(loaded: LoadedConfig) -> Iterator[Diagnostic]:
    bridge = loaded.config.pod_bridge_interface
    if bridge and not (SYS_CLASS_NET / bridge).exists():
        yield Diagnostic(
            f"{loaded.origins['pod_bridge_interface']}: device {bridge} does not exist yet; until "
            "it does, no traffic counts as traffic of this node's pods",
            is_warning=True,
        )

# SPDX-License-Identifier: Apache-2.0
"""Writes a Config as a configuration file in which every setting is explicit."""

import json
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from kbpf.config import durations, kbpf_configuration, output, parsers
from kbpf.config.documents import API_VERSIONS, KBPF, KUBE_PROXY
from kbpf.config.flags import FLAGS_BY_NAME
from kbpf.config.parsers import Parser
from kbpf.errors import ConfigError
from kbpf.model.address import V4_PREFIX, format_addr
from kbpf.model.config import Config, LocalMode
from kbpf.model.objects import Cidr

ALL_NETWORKS: Final = ("0.0.0.0/0", "::/0")


def write(config: Config, path: Path) -> None:
    """Writes the file; see output.py. Raises ConfigError."""
    try:
        output.write(path, format_documents(config))
    except BrokenPipeError:
        raise  # `--write-config-to /dev/stdout | head`
    except OSError as error:
        raise ConfigError(
            f"cannot write the configuration: {error.strerror}", str(path), "name another file"
        ) from error


def format_documents(config: Config) -> str:
    """Formats both documents as YAML. Reading them gives the same Config, except for settings that
    only a flag has (docs/configuration.md).
    """
    from kbpf import bounded_yaml  # PyYAML takes 1.3 MB

    documents = (
        {"apiVersion": API_VERSIONS[KUBE_PROXY], "kind": KUBE_PROXY, **kube_proxy_fields(config)},
        {"apiVersion": API_VERSIONS[KBPF], "kind": KBPF, **kbpf_fields(config)},
    )
    return "---\n".join(bounded_yaml.dump(document) for document in documents)


def format_configz(config: Config) -> bytes:
    """Formats both documents as JSON by API group, for /configz, as kube-proxy does."""
    by_group = {
        API_VERSIONS[kind].partition("/")[0]: {
            "kind": kind,
            "apiVersion": API_VERSIONS[kind],
            **fields,
        }
        for kind, fields in ((KUBE_PROXY, kube_proxy_fields(config)), (KBPF, kbpf_fields(config)))
    }
    return json.dumps(by_group, separators=(",", ":")).encode()


def kube_proxy_fields(config: Config) -> dict[str, Any]:
    """The fields of KubeProxyConfiguration that kbpf uses."""
    sync_period, min_sync_period = config.serving.late_seconds / 2, config.min_sync_period
    common = {
        "masqueradeBit": config.masquerade_bit,
        "masqueradeAll": config.masquerade_all,
        "syncPeriod": durations.format_duration(sync_period),
        "minSyncPeriod": durations.format_duration(min_sync_period),
    }
    ipvs = {
        "scheduler": config.ipvs_scheduler,
        "strictARP": config.strict_arp,
        "tcpTimeout": durations.format_duration(config.ipvs_times.tcp),
        "tcpFinTimeout": durations.format_duration(config.ipvs_times.tcp_fin),
        "udpTimeout": durations.format_duration(config.ipvs_times.udp),
        "syncPeriod": durations.format_duration(sync_period),
        "minSyncPeriod": durations.format_duration(min_sync_period),
    }
    conntrack = config.conntrack
    return {
        "bindAddress": format_addr(config.bind_address) if config.bind_address else "0.0.0.0",
        "bindAddressHardFail": config.serving.hard_fail,
        "clientConnection": {"kubeconfig": str(config.kubeconfig or "")},
        "clusterCIDR": ",".join(map(_format_cidr, config.cluster_cidrs)),
        "conntrack": {
            "maxPerCore": conntrack.max_per_core,
            "min": conntrack.least,
            "tcpBeLiberal": conntrack.tcp_be_liberal,
            "tcpCloseWaitTimeout": durations.format_duration(conntrack.tcp_close_wait),
            "tcpEstablishedTimeout": durations.format_duration(conntrack.tcp_established),
            "udpStreamTimeout": durations.format_duration(conntrack.udp_stream),
            "udpTimeout": durations.format_duration(conntrack.udp),
        },
        "configSyncPeriod": durations.format_duration(config.config_sync_period),
        "detectLocal": {
            "bridgeInterface": config.pod_bridge_interface,
            "interfaceNamePrefix": config.pod_interface_name_prefix,
        },
        "detectLocalMode": str(config.detect_local_mode or LocalMode.CLUSTER_CIDR),
        "healthzBindAddress": config.serving.healthz,
        "hostnameOverride": config.node_name,
        "iptables": {**common, "localhostNodePorts": config.localhost_node_ports},
        "ipvs": ipvs,
        "logging": {
            "format": config.log_format,
            "verbosity": 4 if config.log_level == "debug" else 0,
        },
        "metricsBindAddress": config.serving.metrics,
        "mode": config.proxy_mode,
        "nftables": common,
        "nodePortAddresses": _node_ports(config),
        "oomScoreAdj": config.oom_score_adj,
    }


def kbpf_fields(config: Config) -> Mapping[str, Any]:
    """The fields of KbpfConfiguration that have a value."""
    fields: dict[str, Any] = {}
    for path, name in kbpf_configuration.FLAG_BY_PATH.items():
        flag = FLAGS_BY_NAME[name]
        plain = _to_plain(attrgetter(flag.field)(config), flag.parse)
        if plain not in (None, "", []):
            *parents, leaf = path.split(".")
            section = fields
            for parent in parents:
                section = section.setdefault(parent, {})
            section[leaf] = plain
    return fields


def _format_external_ips(value: str | tuple[Cidr, ...]) -> str:
    return value if isinstance(value, str) else ",".join(map(_format_cidr, value)) or "off"


_FORMATTERS: Final[Mapping[Parser, Callable[[Any], Any]]] = {
    parsers.seconds: durations.format_duration,
    parsers.whole_seconds: durations.format_duration,
    parsers.period: durations.format_duration,
    parsers.doubled_period: lambda seconds: durations.format_duration(seconds / 2),
    parsers.ports: lambda ports: f"{ports[0]}-{ports[1]}",
    parsers.networks: lambda networks: [_format_cidr(cidr) for cidr in networks],
    parsers.external_ips: _format_external_ips,
}
"""Parser → its inverse, for values that cannot be written as they are."""


def _to_plain(value: Any, parse: Parser) -> Any:
    if parse in _FORMATTERS:
        return _FORMATTERS[parse](value)
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, bool | int) else str(value)


def _node_ports(config: Config) -> list[str]:
    if config.all_node_port_addresses:
        return list(ALL_NETWORKS) if config.proxy_mode == "nftables" else []
    networks = [_format_cidr(cidr) for cidr in config.node_port_addresses]
    return ["primary", *networks] if config.primary_node_ports or not networks else networks


def _format_cidr(cidr: Cidr) -> str:
    is_ipv4 = cidr.address.startswith(V4_PREFIX) and cidr.bits >= 96
    return f"{format_addr(cidr.address)}/{cidr.bits - 96 if is_ipv4 else cidr.bits}"

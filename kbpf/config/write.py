# SPDX-License-Identifier: Apache-2.0
"""Writes a Config as a configuration file in which every setting is explicit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kbpf.config import durations, kbpf_configuration, output
from kbpf.config.documents import API_VERSIONS, KBPF, KUBE_PROXY
from kbpf.config.flags import FLAGS_BY_NAME
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
    for path, flag in kbpf_configuration.FLAG_BY_PATH.items():
        value: Any = config
        for name in FLAGS_BY_NAME[flag].field.split("."):
            value = getattr(value, name)
        plain = _to_plain(value, path)
        if plain not in (None, "", []):
            *parents, leaf = path.split(".")
            section = fields
            for name in parents:
                section = section.setdefault(name, {})
            section[leaf] = plain
    return fields


def _to_plain(value: Any, path: str) -> Any:
    if path == "packetPath.masqueradePorts":
        return f"{value[0]}-{value[1]}"
    if path == "sourceEmptyGrace":
        return durations.format_duration(value)
    if path == "externalIPs":
        return value if isinstance(value, str) else ",".join(map(_format_cidr, value)) or "off"
    if path == "nodePortSourceRanges":
        return [_format_cidr(cidr) for cidr in value]
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

"""The Config → the text of a file that says the same: all settings, said one by one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kbpf.config import durations, kbpf_configuration, output
from kbpf.config.documents import KUBE_PROXY, OWN, VERSIONS
from kbpf.config.flags import BY_NAME
from kbpf.errors import ConfigError
from kbpf.model.address import V4_PREFIX, format_addr
from kbpf.model.config import Config, LocalMode
from kbpf.model.objects import Cidr

EVERYWHERE: Final = ("0.0.0.0/0", "::/0")


def write(config: Config, path: Path) -> None:
    """Writes the file, as output.py describes."""
    try:
        output.write(path, text(config))
    except BrokenPipeError:
        raise  # `--write-config-to /dev/stdout | head`
    except OSError as error:
        raise ConfigError(
            f"cannot write the configuration: {error.strerror}", str(path), "name another file"
        ) from error


def text(config: Config) -> str:
    """Both documents as YAML. What is read from it is the same Config, but for what only a flag can
    say (docs/configuration.md).
    """
    from kbpf import bounded_yaml  # and yaml: 1.3 MB

    documents = (
        {"apiVersion": VERSIONS[KUBE_PROXY], "kind": KUBE_PROXY, **kube_proxy(config)},
        {"apiVersion": VERSIONS[OWN], "kind": OWN, **ours(config)},
    )
    return "---\n".join(bounded_yaml.dump(each) for each in documents)


def configz(config: Config) -> bytes:
    """Both documents as JSON, by their groups: what /configz shows, as kube-proxy does."""
    made = {
        VERSIONS[kind].partition("/")[0]: {"kind": kind, "apiVersion": VERSIONS[kind], **fields}
        for kind, fields in ((KUBE_PROXY, kube_proxy(config)), (OWN, ours(config)))
    }
    return json.dumps(made, separators=(",", ":")).encode()


def kube_proxy(config: Config) -> dict[str, Any]:
    """The fields of KubeProxyConfiguration, all but those that we do not use."""
    late, least = config.serving.late_seconds / 2, config.min_sync_period
    common = {
        "masqueradeBit": config.masquerade_bit,
        "masqueradeAll": config.masquerade_all,
        "syncPeriod": durations.write(late),
        "minSyncPeriod": durations.write(least),
    }
    ipvs = {
        "scheduler": config.ipvs_scheduler,
        "strictARP": config.strict_arp,
        "tcpTimeout": durations.write(config.ipvs_times.tcp),
        "tcpFinTimeout": durations.write(config.ipvs_times.tcp_fin),
        "udpTimeout": durations.write(config.ipvs_times.udp),
        "syncPeriod": durations.write(late),
        "minSyncPeriod": durations.write(least),
    }
    conntrack = config.conntrack
    return {
        "bindAddress": format_addr(config.bind_address) if config.bind_address else "0.0.0.0",
        "bindAddressHardFail": config.serving.hard_fail,
        "clientConnection": {"kubeconfig": str(config.kubeconfig or "")},
        "clusterCIDR": ",".join(map(_cidr, config.cluster_cidrs)),
        "conntrack": {
            "maxPerCore": conntrack.max_per_core,
            "min": conntrack.least,
            "tcpBeLiberal": conntrack.tcp_be_liberal,
            "tcpCloseWaitTimeout": durations.write(conntrack.tcp_close_wait),
            "tcpEstablishedTimeout": durations.write(conntrack.tcp_established),
            "udpStreamTimeout": durations.write(conntrack.udp_stream),
            "udpTimeout": durations.write(conntrack.udp),
        },
        "configSyncPeriod": durations.write(config.config_sync_period),
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


def ours(config: Config) -> Mapping[str, Any]:
    """The fields of KbpfConfiguration that have a value."""
    made: dict[str, Any] = {}
    for path, flag in kbpf_configuration.FLAG_OF.items():
        value: Any = config
        for name in BY_NAME[flag].field.split("."):
            value = getattr(value, name)
        plain = _plain(value, path)
        if plain not in (None, "", []):
            *above, last = path.split(".")
            below = made
            for name in above:
                below = below.setdefault(name, {})
            below[last] = plain
    return made


def _plain(value: Any, path: str) -> Any:
    if path == "packetPath.masqueradePorts":
        return f"{value[0]}-{value[1]}"
    if path == "sourceEmptyGrace":
        return durations.write(value)
    if path == "externalIPs":
        return value if isinstance(value, str) else ",".join(map(_cidr, value)) or "off"
    if path == "nodePortSourceRanges":
        return [_cidr(each) for each in value]
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, bool | int) else str(value)


def _node_ports(config: Config) -> list[str]:
    if config.all_node_port_addresses:
        return list(EVERYWHERE) if config.proxy_mode == "nftables" else []
    networks = [_cidr(cidr) for cidr in config.node_port_addresses]
    return ["primary", *networks] if config.primary_node_ports or not networks else networks


def _cidr(cidr: Cidr) -> str:
    four = cidr.address.startswith(V4_PREFIX) and cidr.bits >= 96
    return f"{format_addr(cidr.address)}/{cidr.bits - 96 if four else cidr.bits}"

# SPDX-License-Identifier: Apache-2.0
"""kbpf's own document in the configuration file, KbpfConfiguration. It has the settings that
kube-proxy's document lacks. Each field corresponds to one flag and has the same parser and errors.
"""

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import msgspec

from kbpf.config.documents import KBPF
from kbpf.config.flags import FLAGS_BY_NAME
from kbpf.config.values import ConfigValues

NameList = tuple[str, ...] | None


def json_name(name: str) -> str:
    """Returns the name of a field in the document: ``packetPath``, ``socketLB``."""
    first, *rest = name.split("_")
    return first + "".join("LB" if part == "lb" else part.capitalize() for part in rest)


class SocketLbSection(msgspec.Struct, frozen=True, rename=json_name):
    """Socket load balancing at connect(). YAML reads on and off as true and false."""

    mode: str | bool | None = None
    exempt: NameList = None
    label: bool | None = None


class PacketPathSection(msgspec.Struct, frozen=True, rename=json_name):
    """Load balancing per packet."""

    enabled: bool | None = None
    devices: NameList = None
    exclude_devices: NameList = None
    masquerade_ports: str | None = None
    forwarding: str | None = None


class IpvsSection(msgspec.Struct, frozen=True, rename=json_name):
    """Mode ipvs. The scheduler and strictARP are in kube-proxy's document."""

    device: str | None = None
    nft_table: str | None = None
    state_dir: str | None = None


class MapSizesSection(msgspec.Struct, frozen=True, rename=json_name):
    """The maximum number of entries of each map."""

    frontends: int | None = None
    slots: int | None = None
    backends: int | None = None
    connections: int | None = None
    affinity: int | None = None
    counts: int | None = None


class MetricsSection(msgspec.Struct, frozen=True, rename=json_name):
    """What /metrics exports. YAML reads off as false."""

    services: int | None = None
    backends: int | None = None
    accounting: str | bool | None = None


class KbpfConfiguration(msgspec.Struct, frozen=True, rename=json_name):
    """The document, without kind and apiVersion. None means unset."""

    mode: str | None = None
    master: str | None = None
    source: str | None = None
    source_empty_grace: str | None = None
    allow_insecure_api: bool | None = None
    pin_dir: str | None = None
    cgroup: str | None = None
    cache_dir: str | None = None
    algorithm: str | None = None
    service_annotations: str | bool | None = None
    system_namespaces: NameList = None
    localhost_node_ports: bool | None = None
    node_port_source_ranges: NameList = None
    external_ips: str | bool | None = msgspec.field(default=None, name="externalIPs")
    watch_nodes: str | None = None
    socket_lb: SocketLbSection = SocketLbSection()
    packet_path: PacketPathSection = PacketPathSection()
    ipvs: IpvsSection = IpvsSection()
    map_sizes: MapSizesSection = MapSizesSection()
    metrics: MetricsSection = MetricsSection()
    log_level: str | None = None


FLAG_BY_PATH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mode": "--mode",
        "master": "--master",
        "source": "--source",
        "sourceEmptyGrace": "--source-empty-grace",
        "allowInsecureApi": "--allow-insecure-api",
        "pinDir": "--pin-dir",
        "cgroup": "--cgroup",
        "cacheDir": "--cache-dir",
        "algorithm": "--algorithm",
        "serviceAnnotations": "--service-annotations",
        "systemNamespaces": "--system-namespaces",
        "localhostNodePorts": "--localhost-nodeports",
        "nodePortSourceRanges": "--nodeport-source-ranges",
        "externalIPs": "--external-ips",
        "watchNodes": "--watch-nodes",
        "socketLB.mode": "--socket-lb",
        "socketLB.exempt": "--socket-lb-exempt",
        "socketLB.label": "--socket-lb-label",
        "packetPath.enabled": "--packet-path",
        "packetPath.devices": "--device",
        "packetPath.excludeDevices": "--exclude-device",
        "packetPath.masqueradePorts": "--masquerade-ports",
        "packetPath.forwarding": "--forwarding",
        "ipvs.device": "--ipvs-device",
        "ipvs.nftTable": "--nft-table",
        "ipvs.stateDir": "--state-dir",
        "mapSizes.frontends": "--max-frontends",
        "mapSizes.slots": "--max-slots",
        "mapSizes.backends": "--max-backends",
        "mapSizes.connections": "--max-connections",
        "mapSizes.affinity": "--max-affinity",
        "mapSizes.counts": "--max-counts",
        "metrics.services": "--metrics-services",
        "metrics.backends": "--metrics-backends",
        "metrics.accounting": "--accounting",
        "logLevel": "--log-level",
    }
)
"""Path in the document → the corresponding flag."""

_CAPITALS: Final = {"LB": "Lb", "IPs": "Ips"}


def _attribute_path(path: str) -> str:
    for capitals, replacement in _CAPITALS.items():
        path = path.replace(capitals, replacement)
    return "".join("_" + c.lower() if c.isupper() else c for c in path)


_ATTRIBUTE_BY_PATH: Final = {path: _attribute_path(path) for path in FLAG_BY_PATH}


def read_settings(document: KbpfConfiguration) -> ConfigValues:
    """Returns the fields of Config that the document sets. Empty values count as unset."""
    values = ConfigValues(f"{KBPF}.")
    for path, name in FLAG_BY_PATH.items():
        text = _flag_text(attrgetter(_ATTRIBUTE_BY_PATH[path])(document), path)
        if text:
            values.parse(FLAGS_BY_NAME[name].field, path, text, FLAGS_BY_NAME[name].parse)
    return values


ON_OFF_FIELDS: Final = frozenset(
    ("externalIPs", "socketLB.mode", "metrics.accounting", "serviceAnnotations")
)
"""Fields for which `on` and `off` are values; YAML reads them as true and false."""


def _flag_text(value: Any, path: str) -> str:
    """Returns the value as it would be written for the flag."""
    match value:
        case None:
            return ""
        case bool() if path in ON_OFF_FIELDS:
            return "on" if value else "off"
        case bool():
            return str(value).lower()
        case tuple():
            return ",".join(value)
        case _:
            return str(value)

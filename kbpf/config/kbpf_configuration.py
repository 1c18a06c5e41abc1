"""Our own document in the configuration file: KbpfConfiguration. It has what kube-proxy's cannot
say, and each field is one flag: the same rule, the same words of complaint.
"""

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import msgspec

from kbpf.config.documents import OWN
from kbpf.config.flags import BY_NAME
from kbpf.config.values import Values

Names = tuple[str, ...] | None


def spelling(name: str) -> str:
    """The name of a field as the document has it: ``packetPath``, ``socketLB``."""
    first, *rest = name.split("_")
    return first + "".join("LB" if word == "lb" else word.capitalize() for word in rest)


class SocketLb(msgspec.Struct, frozen=True, rename=spelling):
    """Whose sockets are led to a backend at connect(). YAML reads on and off as true and false."""

    mode: str | bool | None = None
    exempt: Names = None
    label: bool | None = None


class PacketPath(msgspec.Struct, frozen=True, rename=spelling):
    """What is balanced per packet, and how."""

    enabled: bool | None = None
    devices: Names = None
    exclude_devices: Names = None
    masquerade_ports: str | None = None
    forwarding: str | None = None


class Ipvs(msgspec.Struct, frozen=True, rename=spelling):
    """Of the mode ipvs; its scheduler and strictARP are kube-proxy's."""

    device: str | None = None
    nft_table: str | None = None
    state_dir: str | None = None


class MapSizes(msgspec.Struct, frozen=True, rename=spelling):
    """How many entries the maps may hold at most."""

    frontends: int | None = None
    slots: int | None = None
    backends: int | None = None
    connections: int | None = None
    affinity: int | None = None
    counts: int | None = None


class Metrics(msgspec.Struct, frozen=True, rename=spelling):
    """What /metrics tells. YAML reads off as false."""

    services: int | None = None
    backends: int | None = None
    accounting: str | bool | None = None


class KbpfConfiguration(msgspec.Struct, frozen=True, rename=spelling):
    """The document, without kind and apiVersion. None: not said."""

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
    system_namespaces: Names = None
    localhost_node_ports: bool | None = None
    node_port_source_ranges: Names = None
    external_ips: str | bool | None = msgspec.field(default=None, name="externalIPs")
    watch_nodes: str | None = None
    socket_lb: SocketLb = SocketLb()
    packet_path: PacketPath = PacketPath()
    ipvs: Ipvs = Ipvs()
    map_sizes: MapSizes = MapSizes()
    metrics: Metrics = Metrics()
    log_level: str | None = None


FLAG_OF: Final[Mapping[str, str]] = MappingProxyType(
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
"""Path in the document → the flag that says the same."""

_CAPITALS: Final = {"LB": "Lb", "IPs": "Ips"}


def _attribute(path: str) -> str:
    for capitals, word in _CAPITALS.items():
        path = path.replace(capitals, word)
    return "".join("_" + c.lower() if c.isupper() else c for c in path)


_ATTRIBUTES: Final = {path: _attribute(path) for path in FLAG_OF}


def settings(said: KbpfConfiguration) -> Values:
    """The fields of Config that the document decides. What is empty says nothing."""
    made = Values(f"{OWN}.")
    for path, name in FLAG_OF.items():
        text = _text(attrgetter(_ATTRIBUTES[path])(said), path)
        if text:
            made.read(BY_NAME[name].field, path, text, BY_NAME[name].read)
    return made


YAML_WORDS: Final = frozenset(
    ("externalIPs", "socketLB.mode", "metrics.accounting", "serviceAnnotations")
)
"""Fields of which `on` and `off` are values; YAML reads them as true and false."""


def _text(value: Any, path: str) -> str:
    """As it would stand behind the flag."""
    match value:
        case None:
            return ""
        case bool() if path in YAML_WORDS:
            return "on" if value else "off"
        case bool():
            return str(value).lower()
        case tuple():
            return ",".join(value)
        case _:
            return str(value)

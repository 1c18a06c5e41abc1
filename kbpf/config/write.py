# SPDX-License-Identifier: Apache-2.0
"""Writes a Config as a configuration file in which every setting is explicit."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from kbpf.config import kinds, output
from kbpf.config.documents import API_VERSIONS, KBPF, KBPF_SETTINGS, KUBE_PROXY
from kbpf.config.settings import SETTINGS, Setting
from kbpf.errors import ConfigError
from kbpf.model.config import Config

Fields = dict[str, Any]
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


def kube_proxy_fields(config: Config) -> Fields:
    """The fields of KubeProxyConfiguration that kbpf uses, sorted as kubeadm does."""
    fields: Fields = {}
    for setting in SETTINGS:
        if setting.kind is kinds.FEATURE_GATES:
            continue
        for path in setting.kube_proxy.split():
            value = _node_ports(config) if setting.kind is kinds.NODE_PORTS else _plain(setting, config)
            _insert(fields, path, value)
    return _sorted(fields)


def kbpf_fields(config: Config) -> Fields:
    """The fields of KbpfConfiguration that have a value."""
    fields: Fields = {}
    for path, setting in KBPF_SETTINGS.items():
        value = _plain(setting, config)
        if value not in (None, "", []):
            _insert(fields, path, value)
    return fields


def _plain(setting: Setting, config: Config) -> Any:
    return setting.kind.write(attrgetter(setting.field)(config))


def _insert(fields: Fields, path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        fields = fields.setdefault(section, {})
    fields[name] = value


def _sorted(fields: Fields) -> Fields:
    return {name: _sorted(value) if isinstance(value, dict) else value for name, value in sorted(fields.items())}


def _node_ports(config: Config) -> list[str]:
    if config.all_node_port_addresses:
        return list(ALL_NETWORKS) if config.proxy_mode == "nftables" else []
    networks = [str(cidr) for cidr in config.node_port_addresses]
    return ["primary", *networks] if config.primary_node_ports or not networks else networks

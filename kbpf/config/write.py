# SPDX-License-Identifier: Apache-2.0
"""Writes a Config as a configuration file in which every setting is explicit, to a path that the
operator gave: a file, a symbolic link, a pipe, a terminal or a device.

A regular file is replaced with a rename, so that a reader never sees half of it. Everything else
is written in place: a rename over /dev/stdout or a FIFO would remove it for all its users.
"""

import contextlib
import errno
import json
import os
import stat
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from kbpf.config import kinds
from kbpf.config.documents import API_VERSIONS, KBPF, KBPF_SETTINGS, KUBE_PROXY
from kbpf.config.settings import SETTINGS, Setting
from kbpf.errors import ConfigError
from kbpf.model.config import Config

Fields = dict[str, Any]
ALL_NETWORKS: Final = ("0.0.0.0/0", "::/0")


def write(config: Config, path: Path) -> None:
    """Writes the file; see write_text(). Raises ConfigError."""
    try:
        write_text(path, format_documents(config))
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


# ---- the file ------------------------------------------------------------------------------------

NO_RENAME_ERRNOS: Final = frozenset((errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV))
"""The folder cannot be changed or the file is a mount point; then the file is written in place."""


def write_text(path: Path, text: str) -> None:
    """Writes `text`. Raises OSError; a regular file then keeps its contents, unless it could only
    be written in place.
    """
    data = text.encode()
    old_stat = _stat_or_none(path)
    if old_stat is not None and (not stat.S_ISREG(old_stat.st_mode) or _is_descriptor(path)):
        _write_in_place(path, os.O_APPEND, data)
        return
    if old_stat is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    target = Path(os.path.realpath(path))
    try:
        _replace(target, old_stat, data)
    except OSError as error:
        if old_stat is None or error.errno not in NO_RENAME_ERRNOS:
            raise
        _write_in_place(target, os.O_TRUNC, data)


def _stat_or_none(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_descriptor(path: Path) -> bool:
    """Whether the path leads to a file descriptor through links, as /dev/stdout does. A shell's
    `>` has already opened that file, possibly for appending (`>>`).
    """
    for _ in range(40):  # MAXSYMLINKS of the kernel
        if path.absolute().parent.resolve().is_relative_to("/proc"):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return False


def _write_in_place(path: Path, flag: int, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | flag), "wb") as file:
        file.write(data)


def _replace(target: Path, old_stat: os.stat_result | None, data: bytes) -> None:
    """Replaces the file, keeping its mode and owner."""
    fd, temporary_path = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(fd, "wb") as file:
            file.write(data)
            if old_stat is not None:
                with contextlib.suppress(PermissionError):
                    os.fchown(fd, old_stat.st_uid, old_stat.st_gid)
            os.fchmod(fd, _new_file_mode() if old_stat is None else stat.S_IMODE(old_stat.st_mode))
        os.rename(temporary_path, target)
    except BaseException:
        os.unlink(temporary_path)
        raise


def _new_file_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask

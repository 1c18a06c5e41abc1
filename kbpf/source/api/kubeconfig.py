# SPDX-License-Identifier: Apache-2.0
"""Finds the API server and the credentials: in a kubeconfig, in a pod's files, or from --master.

The `kubernetes` library would lose properties that this reader has (docs/decisions.md, "Agent").
Exec plugins and auth providers need it: then `Access.plugin` is set, and credentials.py runs the
library in a short-lived child process.
"""

import base64
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from kbpf.errors import ConfigError
from kbpf.source.decode.fields import format_decode_error

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach one API server. Inline data (PEM bytes) overrides the file of the same name.

    `where` is for errors: the path of the kubeconfig, or "in-cluster". `plugin` is the kubeconfig
    whose user needs the library, else None. `other_servers` are further servers of the same
    cluster, used if `server` cannot be reached.
    """

    server: str
    where: str
    user: str = ""
    ca_file: str = ""
    ca_data: bytes = b""
    cert_file: str = ""
    cert_data: bytes = b""
    key_file: str = ""
    key_data: bytes = b""
    token: str = ""
    token_file: str = ""
    basic: str = ""
    server_name: str = ""
    insecure: bool = False
    plugin: Path | None = None
    other_servers: tuple[str, ...] = ()


def find_access(
    kubeconfig: Path | None,
    master: str = "",
    environ: Mapping[str, str] = os.environ,
    *,
    allow_insecure: bool = False,
) -> Access:
    """Finds the access as kube-proxy does: from the kubeconfig (`master` overrides its server),
    from `master` alone without credentials, or from the pod's service account. `master` may name
    several servers of one cluster, separated by commas. Raises ConfigError, also if a token or
    password would be sent over http:// and `allow_insecure` is False.
    """
    master, *other_servers = (text.strip() for text in master.split(","))
    if kubeconfig is not None:
        access = read_kubeconfig(kubeconfig)
        access = replace(access, server=master) if master else access
    elif master:
        access = Access(server=master, where="--master")
    else:
        access = in_cluster_access(environ)
    access = replace(
        access,
        server=_check_url(access.server, access.where),
        other_servers=tuple(_check_url(text, "--master") for text in other_servers),
    )
    secret = access.token or access.token_file or access.basic or access.plugin
    plain_urls = [url for url in (access.server, *access.other_servers) if url.startswith("http:")]
    if secret and plain_urls and not allow_insecure:
        raise ConfigError(
            f"the token or password would be sent to {plain_urls[0]} unencrypted",
            access.where,
            "write https://HOST:PORT, or allow it with --allow-insecure-api",
        )
    return access


def in_cluster_access(environ: Mapping[str, str], root: Path = SERVICE_ACCOUNT) -> Access:
    """Returns the access of this pod's service account. Raises ConfigError outside of a pod."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise ConfigError(
            "no API server: neither --kubeconfig nor --master, and not in a pod",
            "KUBERNETES_SERVICE_HOST",
            "give --kubeconfig FILE; `kbpf run --source DIR` works without a cluster",
        )
    for name in ("token", "ca.crt"):
        if not (root / name).is_file():
            hint = "set automountServiceAccountToken, or give --kubeconfig FILE"
            raise ConfigError(f"the pod has no service account {name}", str(root / name), hint)
    return Access(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        where="in-cluster",
        user="the pod's service account",
        ca_file=str(root / "ca.crt"),
        token_file=str(root / "token"),
    )


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    proxy_url: str = ""


class _User(msgspec.Struct, rename="kebab"):
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    username: str = ""
    password: str = ""
    exec: object = None
    auth_provider: object = None
    impersonate: str = msgspec.field(default="", name="as")


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str = ""


class _NamedCluster(msgspec.Struct):
    name: str
    cluster: _Cluster


class _NamedUser(msgspec.Struct):
    name: str
    user: _User


class _NamedContext(msgspec.Struct):
    name: str
    context: _Context


class _KubeconfigFile(msgspec.Struct, rename="kebab"):
    current_context: str = ""
    clusters: list[_NamedCluster] | None = None
    users: list[_NamedUser] | None = None
    contexts: list[_NamedContext] | None = None


def read_kubeconfig(path: Path) -> Access:
    """Returns the access of the current context. Relative paths are relative to the kubeconfig."""
    where = str(path)
    file = _load_file(path)
    if not file.current_context:
        hint = "set one: kubectl config --kubeconfig FILE use-context NAME"
        raise ConfigError("the kubeconfig has no current-context", where, hint)
    context = _find_named(file.contexts, "context", file.current_context, where).context
    cluster = _find_named(file.clusters, "cluster", context.cluster, where).cluster
    user = _find_named(file.users, "user", context.user, where).user if context.user else _User()
    if cluster.proxy_url or user.impersonate:
        field = "proxy-url" if cluster.proxy_url else "as"
        hint = "kbpf talks to the API server directly and as itself; remove it"
        raise ConfigError(f"the kubeconfig sets {field}, which is not supported", where, hint)

    def resolve_path(name: str) -> str:
        return str(path.parent / name) if name else ""

    def decode_base64(text: str, field: str) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except ValueError as error:  # binascii.Error, or text that is not ASCII
            raise ConfigError(f"{field} is not base64: {error}", where) from error

    basic = base64.b64encode(f"{user.username}:{user.password}".encode()).decode()
    return Access(
        server=cluster.server,
        where=where,
        user=context.user,
        ca_file=resolve_path(cluster.certificate_authority),
        ca_data=decode_base64(cluster.certificate_authority_data, "certificate-authority-data"),
        cert_file=resolve_path(user.client_certificate),
        cert_data=decode_base64(user.client_certificate_data, "client-certificate-data"),
        key_file=resolve_path(user.client_key),
        key_data=decode_base64(user.client_key_data, "client-key-data"),
        token=user.token.strip(),
        token_file=resolve_path(user.token_file),
        basic=basic if user.username else "",
        server_name=cluster.tls_server_name,
        insecure=cluster.insecure_skip_tls_verify,
        plugin=path if user.exec or user.auth_provider else None,
    )


def _load_file(path: Path) -> _KubeconfigFile:
    from kbpf import bounded_yaml  # only with a kubeconfig: PyYAML takes 1.3 MB
    from kbpf.bounded_yaml import KUBECONFIG

    try:
        with path.open("rb") as file:
            data = file.read(KUBECONFIG.size + 1)
        documents = bounded_yaml.load_all(data, KUBECONFIG)
        return msgspec.convert(next(documents, None), _KubeconfigFile)
    except OSError as error:
        hint = "give the kubeconfig's path with --kubeconfig"
        raise ConfigError(f"cannot read the kubeconfig: {error.strerror}", str(path), hint) from error
    except (msgspec.ValidationError, *bounded_yaml.YAML_ERRORS) as error:
        raise ConfigError(f"not a kubeconfig: {format_decode_error(error)}", str(path)) from error


_N = TypeVar("_N", _NamedCluster, _NamedUser, _NamedContext)


def _find_named(entries: list[_N] | None, kind: str, name: str, where: str) -> _N:
    for entry in entries or ():
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in entries or ()) or "none"
    raise ConfigError(f"the kubeconfig has no {kind} {name!r}", where, f"it has: {names}")


def _check_url(server: str, where: str) -> str:
    try:
        url = urllib.parse.urlsplit(server)
        is_valid = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(f"not the URL of an API server: {server!r}", where, "write https://HOST:PORT")
    return server.rstrip("/")

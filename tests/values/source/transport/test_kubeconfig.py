# SPDX-License-Identifier: Apache-2.0
"""Kubeconfigs, the server's URL and the node's name."""

import json
import socket
from dataclasses import asdict
from typing import Any

import pytest
import yaml

from kbpf.errors import ConfigError, SourceError
from kbpf.source.api.credentials import Cluster, default_node_name
from kbpf.source.api.kubeconfig import Access, find_access, in_cluster_access
from tests.support.faults.scripted import ScriptedServer
from tests.support.table import each_pair
from tests.values.source.transport.kubeconfigs import URL, b64, ok, write

# --- kubeconfigs and the server's URL ---

OF_CLUSTER = (
    "server",
    "certificate-authority",
    "tls-server-name",
    "insecure-skip-tls-verify",
    "proxy-url",
    "extensions",
)


def by_part(text: str) -> dict[str, dict[str, Any]]:
    """Fields of a kubeconfig, in YAML without the outer braces, as those of its cluster and of its user."""
    parts: dict[str, dict[str, Any]] = {"cluster": {}, "user": {}}
    for name, value in yaml.safe_load("{" + text + "}").items():
        parts["cluster" if name.startswith(OF_CLUSTER) else "user"][name] = value
    return parts


@each_pair(
    "text, expected",
    f"""\
token: "t\\n" → token = t
tokenFile: tok → token_file = DIR/tok
tokenFile: /x/tok → token_file = /x/tok
client-certificate: pki/c.crt, client-key: pki/c.key → cert_file = DIR/pki/c.crt, key_file = DIR/pki/c.key
client-certificate-data: {b64("C")}, client-key-data: {b64("K")} → cert_data = C, key_data = K
username: a, password: 'b:c' → basic = {b64("a:b:c")}
certificate-authority: ca.crt → ca_file = DIR/ca.crt
certificate-authority-data: {b64("CA")} → ca_data = CA
tls-server-name: kube → server_name = kube
insecure-skip-tls-verify: true → insecure = True
server: {URL}/k8s/c1/ → server = {URL}/k8s/c1
extensions: [], colour: red →
""",
)
def test_kubeconfig_is_read(tmp_path, text, expected):
    """Fields of the cluster or the user → the fields of the Access that differ from the defaults."""
    path = write(tmp_path / "kc", **by_part(text))
    plain, found = asdict(Access(URL, str(path), user="u")), asdict(find_access(path))
    changed = {field: value for field, value in found.items() if value != plain[field]}
    texts = [f"{field} = {v.decode() if isinstance(v, bytes) else v}" for field, v in changed.items()]
    assert ", ".join(texts) == expected.replace("DIR", str(tmp_path))


def test_current_context_selects_the_cluster(tmp_path):
    path = write(tmp_path / "kc")
    config = yaml.safe_load(path.read_text())
    config["contexts"].append({"name": "there", "context": {"cluster": "d"}})
    config["clusters"].append({"name": "d", "cluster": {"server": "http://10.0.0.9:8080"}})
    config["current-context"] = "there"
    path.write_text(json.dumps(config))
    assert find_access(path) == Access("http://10.0.0.9:8080", str(path))


def test_master_overrides_the_server_of_the_kubeconfig(tmp_path):
    access = find_access(write(tmp_path / "kc", {}, {"token": "t"}), "https://10.0.0.1:6443")
    assert (access.server, access.token) == ("https://10.0.0.1:6443", "t")


def test_master_may_name_several_servers(tmp_path):
    path = write(tmp_path / "kc", {}, {"token": "t"})
    access = find_access(path, "https://a:1, https://b:2")
    assert (access.server, access.other_servers) == ("https://a:1", ("https://b:2",))
    with pytest.raises(ConfigError, match="not the URL of an API server: 'b'"):
        find_access(path, "https://a:1,b")
    with pytest.raises(ConfigError, match="http://b:2 unencrypted"):
        find_access(path, "https://a:1,http://b:2")


def test_next_server_is_tried_if_one_is_unreachable(connect):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with ScriptedServer(ok, ok) as first, ScriptedServer(ok) as second:
        connection = connect(gone, other_servers=(first.url, second.url))
        with pytest.raises(SourceError, match="refused") as caught:
            connection.request("/x")
        assert gone in str(caught.value)
        for _ in range(2):
            connection.request("/x").read()
        assert len(first.requests) == 2, "it stays with the one that answers"
        first.__exit__()
        connection.drop()
        with pytest.raises(SourceError):
            connection.request("/x")
        connection.request("/x").read()
        assert len(second.requests) == 1


def test_master_alone_has_no_credentials():
    assert find_access(None, "http://127.0.0.1:8080") == Access("http://127.0.0.1:8080", "--master")


@pytest.mark.parametrize(
    ("host", "url"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_in_a_pod_the_service_account_is_used(tmp_path, host, url):
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}
    access = in_cluster_access(environ, tmp_path)
    assert (access.server, access.where) == (url, "in-cluster")
    assert access.token_file == str(tmp_path / "token")
    assert access.ca_file == str(tmp_path / "ca.crt")


def test_in_a_pod_without_a_service_account_token_is_an_error(tmp_path):
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigError, match=r"no service account token .*automountServiceAccount"):
        in_cluster_access(environ, tmp_path)


def test_outside_a_pod_a_kubeconfig_or_source_is_required():
    with pytest.raises(ConfigError, match=r"--kubeconfig FILE; `kbpf run --source DIR`"):
        find_access(None, "", {})


BAD_KUBECONFIGS = {
    "": "not a kubeconfig",
    "{": "not a kubeconfig",
    "\x00": "not a kubeconfig",
    "[]": "not a kubeconfig: expected an object, got a list",
    "{}": "no current-context",
    "{current-context: x}": "no context 'x' .*it has: none",
    "{clusters: [{name: x, cluster: {server: 5}}]}": r"clusters\[0\].cluster.server: expected a string, got an integer",
    "{current-context: x, contexts: [{name: x, context: {cluster: v}}], clusters: [{name: z, cluster: {}}]}": (
        "no cluster 'v' .*it has: z"
    ),
    "{current-context: x, contexts: [{name: x, context: {cluster: v, user: u}}], clusters: [{name: v, cluster: {}}]}": (
        "no user 'u'"
    ),
}


@pytest.mark.parametrize("text", BAD_KUBECONFIGS)
def test_bad_kubeconfig_is_a_one_line_error_with_its_path(tmp_path, text):
    path = tmp_path / "kc"
    path.write_text(text)
    with pytest.raises(ConfigError, match=BAD_KUBECONFIGS[text]) as caught:
        find_access(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@each_pair(
    "text, error",
    """\
server: '' → not the URL of an API server: ''
server: '10.0.0.1:6443' → write https://HOST:PORT
server: 'https://h:99999' → not the URL of an API server:
certificate-authority-data: '%' → certificate-authority-data is not base64
certificate-authority-data: é → certificate-authority-data is not base64
proxy-url: 'http://p' → sets proxy-url, which is not supported
as: someone → sets as, which is not supported
""",
)
def test_unusable_kubeconfig_is_refused(tmp_path, text, error):
    with pytest.raises(ConfigError, match=error):
        find_access(write(tmp_path / "kc", **by_part(text)))


def test_missing_kubeconfig_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the kubeconfig: No such file .*--kubeconfig"):
        find_access(tmp_path / "none")


@each_pair(
    "text, error",
    f"""\
certificate-authority: none → cannot use certificate-authority: No such file
certificate-authority-data: {b64("no PEM")} → cannot use certificate-authority
client-certificate: none, client-key: none → cannot use client-certificate
client-certificate-data: {b64("x")}, client-key-data: {b64("y")} → cannot use client-certificate or client-key
tokenFile: none → cannot read the token file: No such file
token: "two\\nlines" → the token is empty or contains invalid characters
""",
)
def test_unreadable_credentials_are_an_error(tmp_path, text, error):
    cluster = Cluster(find_access(write(tmp_path / "kc", **by_part(text))))
    with pytest.raises(SourceError, match=error) as caught:
        cluster.get_tls_context(cluster.get_credentials())
    assert str(tmp_path) in str(caught.value)


# --- the node's name ---


@pytest.mark.parametrize(("hostname", "name"), [("Node-1.Example", "node-1.example"), (" n1 ", "n1")])
def test_node_name_is_the_hostname_in_lower_case(monkeypatch, hostname, name):
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    assert default_node_name() == name


def test_empty_hostname_is_an_error(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: " ")
    with pytest.raises(ConfigError, match="--hostname-override"):
        default_node_name()

# SPDX-License-Identifier: Apache-2.0
"""Kubeconfigs, credentials and TLS: what is read, what is sent to the server, and the errors."""

import base64
import calendar
import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kbpf.errors import ConfigError, SourceError
from kbpf.source.api import credentials as cluster_module
from kbpf.source.api.credentials import Cluster, PluginCredentials, default_node_name
from kbpf.source.api.event_sink import EventSink
from kbpf.source.api.kubeconfig import Access, find_access, in_cluster_access
from kbpf.source.api.reflector import Reflector
from kbpf.source.api.resource import SERVICES
from kbpf.source.api.transport import ApiConnection, ReadTimeout, explain_error
from tests.support.cluster.certs import Authority
from tests.support.faults.scripted import Exchange, ScriptedServer
from tests.support.lab.lab import PATIENCE, until

URL = "https://192.0.2.1:6443"


def write(path: Path, cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None):
    """Writes a kubeconfig with one context, cluster and user."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": URL} | (cluster or {})}],
        "users": [{"name": "u", "user": user or {}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def ok(exchange: Exchange) -> None:
    exchange.answer(200, {})


def unauthorized(exchange: Exchange) -> None:
    exchange.answer(401, {})


# --- kubeconfigs and the server's URL ---


@pytest.mark.parametrize(
    ("name", "cluster", "user", "expected"),
    [
        ("a token", {}, {"token": "t\n"}, {"token": "t"}),
        ("a relative token file", {}, {"tokenFile": "tok"}, {"token_file": "DIR/tok"}),
        ("an absolute token file", {}, {"tokenFile": "/x/tok"}, {"token_file": "/x/tok"}),
        (
            "a client certificate in files",
            {},
            {"client-certificate": "pki/c.crt", "client-key": "pki/c.key"},
            {"cert_file": "DIR/pki/c.crt", "key_file": "DIR/pki/c.key"},
        ),
        (
            "a client certificate inside",
            {},
            {"client-certificate-data": b64("C"), "client-key-data": b64("K")},
            {"cert_data": b"C", "key_data": b"K"},
        ),
        ("basic", {}, {"username": "a", "password": "b:c"}, {"basic": b64("a:b:c")}),
        ("a CA file", {"certificate-authority": "ca.crt"}, {}, {"ca_file": "DIR/ca.crt"}),
        ("a CA inside", {"certificate-authority-data": b64("CA")}, {}, {"ca_data": b"CA"}),
        ("another name", {"tls-server-name": "kube"}, {}, {"server_name": "kube"}),
        ("no verification", {"insecure-skip-tls-verify": True}, {}, {"insecure": True}),
        ("a path below the server", {"server": URL + "/k8s/c1/"}, {}, {"server": URL + "/k8s/c1"}),
        ("an unknown field", {"extensions": []}, {"colour": "red"}, {}),
    ],
)
def test_kubeconfig_is_read(tmp_path, name, cluster, user, expected):
    path = write(tmp_path / "kc", cluster, user)
    expected = {
        field: value.replace("DIR", str(tmp_path)) if isinstance(value, str) else value
        for field, value in expected.items()
    }
    base: dict[str, Any] = {"server": URL, "where": str(path), "user": "u"}
    assert find_access(path) == Access(**(base | expected)), name


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
    with pytest.raises(ConfigError, match="--kubeconfig FILE, or --source DIR"):
        find_access(None, "", {})


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("empty", "", "not a kubeconfig"),
        ("no YAML", "{", "not a kubeconfig"),
        ("bytes", "\x00", "not a kubeconfig"),
        ("no mapping", "[]", "not a kubeconfig: expected an object, got a list"),
        ("no context", "{}", "no current-context"),
        ("another context", "{current-context: x}", "no context 'x' .*it has: none"),
        (
            "no such cluster",
            "{current-context: x, contexts: [{name: x, context: {cluster: v}}],"
            " clusters: [{name: z, cluster: {}}]}",
            "no cluster 'v' .*it has: z",
        ),
        (
            "no such user",
            "{current-context: x, contexts: [{name: x, context: {cluster: v, user: u}}],"
            " clusters: [{name: v, cluster: {}}]}",
            "no user 'u'",
        ),
        (
            "a wrong type",
            "{clusters: [{name: x, cluster: {server: 5}}]}",
            r"clusters\[0\].cluster.server: expected a string, got an integer",
        ),
    ],
)
def test_bad_kubeconfig_is_a_one_line_error_with_its_path(tmp_path, name, text, error):
    path = tmp_path / "kc"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error) as caught:
        find_access(path)
    assert str(path) in str(caught.value), name
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "user", "error"),
    [
        ({"server": ""}, {}, "not the URL of an API server: ''"),
        ({"server": "10.0.0.1:6443"}, {}, "write https://HOST:PORT"),
        ({"server": "https://h:99999"}, {}, "not the URL of an API server: "),
        ({"certificate-authority-data": "%"}, {}, "certificate-authority-data is not base64"),
        ({"certificate-authority-data": "\u00e9"}, {}, "certificate-authority-data is not base64"),
        ({"proxy-url": "http://p"}, {}, "sets proxy-url, which is not supported"),
        ({}, {"as": "someone"}, "sets as, which is not supported"),
    ],
    ids=str,
)
def test_unusable_kubeconfig_is_refused(tmp_path, cluster, user, error):
    with pytest.raises(ConfigError, match=error):
        find_access(write(tmp_path / "kc", cluster, user))


def test_missing_kubeconfig_is_an_error(tmp_path):
    with pytest.raises(
        ConfigError, match=r"cannot read the kubeconfig: No such file .*--kubeconfig"
    ):
        find_access(tmp_path / "none")


@pytest.mark.parametrize(
    ("cluster", "user", "error"),
    [
        ({"certificate-authority": "none"}, {}, "cannot use certificate-authority: No such file"),
        ({"certificate-authority-data": b64("no PEM")}, {}, "cannot use certificate-authority"),
        ({}, {"client-certificate": "none", "client-key": "none"}, "cannot use client-certificate"),
        (
            {},
            {"client-certificate-data": b64("x"), "client-key-data": b64("y")},
            "cannot use client-certificate or client-key",
        ),
        ({}, {"tokenFile": "none"}, "cannot read the token file: No such file"),
        ({}, {"token": "two\nlines"}, "the token is empty or contains invalid characters"),
    ],
    ids=str,
)
def test_unreadable_credentials_are_an_error_at_start(tmp_path, cluster, user, error):
    access = find_access(write(tmp_path / "kc", cluster, user))
    with pytest.raises(ConfigError, match=error) as caught:
        Cluster(access).check_credentials()
    assert str(tmp_path) in str(caught.value)


# --- requests ---


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def server_tls(authority) -> ssl.SSLContext:
    made = authority.issue("server", ["127.0.0.1", "kube.example"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.crt, made.key)
    return context


Connect = Callable[..., ApiConnection]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """connect(server, **access_fields) opens a connection that is closed after the test."""
    opened: list[ApiConnection] = []

    def begin(server: str, **fields: Any) -> ApiConnection:
        opened.append(
            ApiConnection(Cluster(Access(server, "the test", **fields)), response_timeout=60)
        )
        return opened[-1]

    yield begin
    for connection in opened:
        connection.close()
        connection.drop()


def headers(server: ScriptedServer) -> list[str | None]:
    return [request.headers.get("authorization") for request in server.requests]


@pytest.mark.parametrize(
    ("fields", "header"),
    [
        ({}, None),
        ({"token": "abc"}, "Bearer abc"),
        ({"basic": b64("a:b")}, f"Basic {b64('a:b')}"),
    ],
)
def test_credentials_are_sent(connect, fields, header):
    with ScriptedServer(ok) as server:
        connect(server.url, **fields).request("/x").read()
        assert headers(server) == [header]


def test_a_token_file_is_read_for_each_request(connect, tmp_path):
    token = tmp_path / "token"
    token.write_text("one\n")
    with ScriptedServer(ok, unauthorized, ok) as server:
        connection = connect(server.url, token_file=str(token))
        connection.request("/x").read()
        token.write_text("two\n")
        assert connection.request("/x").status == 401
        token.unlink()
        with pytest.raises(SourceError, match="cannot read the token file"):
            connection.request("/x")
        token.write_text("three")
        connection.request("/x").read()
        assert headers(server) == ["Bearer one", "Bearer two", "Bearer three"]


def test_requests_are_counted_with_their_outcome():
    told: list[tuple[str, str, str]] = []

    def asked(host: str, method: str, code: str, seconds: float) -> None:
        assert seconds >= 0
        told.append((host, method, code))

    with ScriptedServer(ok, unauthorized, lambda exchange: exchange.reset()) as server:
        cluster = Cluster(Access(server.url, "the test"), asked)
        # A new connection each, since the server does not read request bodies.
        for status in (200, 401):
            assert EventSink(cluster).post("/a", b'{"x": 1}') == status
        poster = EventSink(cluster)
        with pytest.raises(SourceError):
            poster.post("/c", b"{}")
        poster.close()
        with pytest.raises(SourceError, match="stopped"):
            poster.post("/d", b"{}")
        assert server.requests[0].headers["content-type"] == "application/json"
        host = server.url.removeprefix("http://")
    assert told == [(host, "POST", code) for code in ("200", "401", "<error>")]


def test_path_in_the_server_url_is_kept(connect):
    with ScriptedServer(ok) as server:
        connect(server.url + "/k8s/c1").request("/api/v1/services?limit=5").read()
        assert server.requests[0].path == "/k8s/c1/api/v1/services"
        assert server.requests[0].headers["host"] == server.url.removeprefix("http://")


def test_connection_is_reused_after_a_fully_read_response(connect):
    with ScriptedServer(ok, ok, lambda e: e.watch({}), ok) as server:
        connection = connect(server.url)
        for read in (True, True, False, True):  # the third, a watch, is not read to its end
            response = connection.request("/x")
            if read:
                response.read()
        first, second, watch, last = (request.port for request in server.requests)
        assert first == second == watch != last


def test_connection_uses_tcp_keepalive(connect):
    with ScriptedServer(ok) as server:
        connection = connect(server.url)
        connection.request("/x").read()
        sock = connection._sock
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, between, count, user = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
        assert idle + between * count <= 30
        assert user <= 30_000


def test_silence_after_the_headers_times_out(connect):
    with ScriptedServer() as server:
        response = connect(server.url).request("/x", silence_timeout=0.1)
        with pytest.raises(ReadTimeout):
            response.read_chunk()


def test_close_ends_a_read_in_another_thread(connect):
    with ScriptedServer() as server:
        connection = connect(server.url)
        response = connection.request("/x", silence_timeout=60)
        threading.Timer(0.05, connection.close).start()
        begun = time.monotonic()
        with contextlib.suppress(SourceError):  # an error and a clean end are both correct
            assert response.read_chunk() == b""
        assert time.monotonic() - begun < 50, "it did not wait for silence"
        with pytest.raises(SourceError, match="stopped"):
            connection.request("/x")


# --- TLS ---


def test_server_is_verified_with_a_ca_file_or_ca_data(connect, authority, server_tls):
    with ScriptedServer(ok, ok, tls=server_tls) as server:
        connect(server.url, ca_file=str(authority.crt)).request("/x").read()
        connect(server.url, ca_data=authority.crt.read_bytes()).request("/x").read()
        assert len(server.requests) == 2


def test_certificate_of_another_ca_is_refused(connect, server_tls, tmp_path):
    other = Authority(tmp_path)
    with ScriptedServer(ok, tls=server_tls) as server:
        for fields in ({"ca_file": str(other.crt)}, {}):
            with pytest.raises(
                SourceError,
                match=r"not trusted.*check "
                r"certificate-authority in the",
            ):
                connect(server.url, **fields).request("/x")
        assert server.requests == []


def test_certificate_for_another_name_is_refused_without_tls_server_name(
    connect, authority, server_tls
):
    with ScriptedServer(ok, tls=server_tls) as server:
        ca = str(authority.crt)
        with pytest.raises(
            SourceError,
            match=r"is for another name: .*; set the server in .* to a name or "
            r"address of",
        ):
            connect(server.url, ca_file=ca, server_name="other.example").request("/x")
        connect(server.url, ca_file=ca, server_name="kube.example").request("/x").read()
        assert len(server.requests) == 1


def test_each_request_is_logged_at_debug(connect, caplog):
    caplog.set_level("DEBUG", "kbpf.source")
    with ScriptedServer(unauthorized) as server:
        connect(server.url, token="secret").request("/x?watch=1").read()
    (line,) = caplog.messages
    host = server.url.removeprefix("http://")
    assert re.fullmatch(rf"request GET /x\?watch=1 host={host} code=401 ms=\d+\.\d", line)


def test_insecure_skips_verification(connect, server_tls):
    with ScriptedServer(ok, tls=server_tls) as server:
        connect(server.url, insecure=True).request("/x").read()


def test_plain_http_at_a_tls_port_and_the_reverse_are_errors(connect, authority, server_tls):
    with ScriptedServer(tls=server_tls) as server, pytest.raises(SourceError):
        connect(server.url.replace("https", "http")).request("/x")
    with ScriptedServer() as server, pytest.raises(SourceError, match="TLS"):
        connect(server.url.replace("http", "https"), ca_file=str(authority.crt)).request("/x")


def tls_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}]")
    error.reason = reason
    return error


EXPLAINED = [
    (tls_error("WRONG_VERSION_NUMBER"), "https://x:6443", "the server does not use TLS"),
    (tls_error("NO_CIPHERS"), "https://x:6443", "TLS: NO_CIPHERS"),
    (ConnectionResetError(104, "Connection reset by peer"), "http://x:6443", "does it require https://?"),
    (ConnectionResetError(104, "Connection reset by peer"), "https://x:6443", "check that it runs"),
    (socket.gaierror(-3, "Temporary failure in name resolution"),
     "https://CONTROL-PLANE-ENDPOINT:6443", "the placeholder of the manifests is still in place"),
    (socket.gaierror(-3, "Temporary failure in name resolution"), "https://x:6443",
     "temporary failure in name resolution"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "url", "words"), EXPLAINED)
def test_connection_errors_say_what_to_do(error, url, words):
    assert words in str(explain_error(error, url, "the kubeconfig"))


def client_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    crt, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
               "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30", "-subj", f"/CN={name}",
               "-keyout", str(key), "-out", str(crt)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return crt, key


@pytest.mark.parametrize("inside", [False, True], ids=("in files", "inside the kubeconfig"))
def test_client_certificate_is_sent(connect, authority, tmp_path, inside):
    crt, key = client_certificate(tmp_path, "kbpf-node")
    made = authority.issue("asks", ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.crt, made.key)
    context.load_verify_locations(crt)
    context.verify_mode = ssl.CERT_REQUIRED
    fields: dict[str, Any] = (
        {"cert_data": crt.read_bytes(), "key_data": key.read_bytes()}
        if inside
        else {"cert_file": str(crt), "key_file": str(key)}
    )
    with ScriptedServer(ok, tls=context) as server:
        connect(server.url, ca_file=str(authority.crt), **fields).request("/x").read()
        assert "kbpf-node" in server.requests[0].peer


def test_certificate_data_leaks_no_file_descriptor(tmp_path):
    crt, key = client_certificate(tmp_path, "kbpf-node")
    access = Access(URL, "x", cert_data=crt.read_bytes(), key_data=key.read_bytes())
    before = os.listdir("/proc/self/fd")
    Cluster(access).check_credentials()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_changed_ca_file_is_read_again_unless_it_is_broken(authority, server_tls, tmp_path):
    ca = tmp_path / "ca.crt"
    (tmp_path / "other").mkdir()
    shutil.copy(Authority(tmp_path / "other").crt, ca)
    with ScriptedServer(ok, ok, tls=server_tls) as server:
        cluster = Cluster(Access(server.url, "the test", ca_file=str(ca)))
        errors: list[str] = []

        def works() -> bool:
            connection = ApiConnection(cluster)
            try:
                return connection.request("/x").status == 200
            except SourceError as error:
                errors.append(error.what)
                return False
            finally:
                connection.drop()

        assert not works()
        assert "not trusted" in errors[0]
        shutil.copy(authority.crt, ca)
        assert works()
        ca.write_text("half")
        assert works()


# --- exec plugins, run by the kubernetes library in a child process ---


def exec_user(tmp_path: Path, script: str) -> dict[str, Any]:
    plugin = tmp_path / "plugin"
    plugin.write_text(f"#!/bin/sh\n{script}\n")
    plugin.chmod(0o755)
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}
    return {"exec": command | {"interactiveMode": "Never"}}


def credential(**fields: str) -> str:
    body = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    return json.dumps(body | {"status": fields})


def test_exec_plugin_runs_once_and_again_after_401(tmp_path):
    count = tmp_path / "count"
    script = f"echo x >> {count}; n=$(wc -l < {count}); sed s/N/$n/ {tmp_path}/answer"
    (tmp_path / "answer").write_text(credential(token="tokN"))
    user = exec_user(tmp_path, script)
    with ScriptedServer(ok, unauthorized, ok) as server:
        path = write(tmp_path / "kc", {"server": server.url}, user)
        access = find_access(path, allow_insecure=True)
        connection = ApiConnection(Cluster(access))
        for _ in range(3):
            connection.request("/x").read()
        connection.drop()
        assert headers(server) == ["Bearer tok1", "Bearer tok1", "Bearer tok2"]


def test_exec_plugin_runs_again_before_its_token_expires(tmp_path, monkeypatch):
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 900))
    answer = credential(token="t", expirationTimestamp=expires)
    count = tmp_path / "count"
    user = exec_user(tmp_path, f"echo x >> {count}; echo '{answer}'")
    cluster = Cluster(find_access(write(tmp_path / "kc", {}, user)))
    login = cluster.get_credentials()
    assert login.authorization == "Bearer t"
    assert login.expires_at == calendar.timegm(time.strptime(expires, "%Y-%m-%dT%H:%M:%SZ"))
    assert cluster.get_credentials() is login
    later = login.expires_at - 50
    monkeypatch.setattr(cluster_module.time, "time", lambda: later)
    assert cluster.get_credentials() is not login
    assert count.read_text() == "x\nx\n"


@pytest.mark.parametrize(
    ("name", "script", "error"),
    [
        ("fails", "echo no ticket >&2; exit 3", "no ticket"),
        ("prints nothing", "true", "failed to decode"),
        ("does not exist", "", r"\[Errno 2\] No such file or directory"),
    ],
)
def test_failed_exec_plugin_is_an_error_with_its_reason(tmp_path, name, script, error):
    access = find_access(write(tmp_path / "kc", {}, exec_user(tmp_path, script)))
    if not script:
        (tmp_path / "plugin").unlink()
    with pytest.raises(SourceError, match=f"no credentials: (?!ERROR).*{error}") as caught:
        Cluster(access).get_credentials()
    assert str(tmp_path / "kc") in str(caught.value), name
    assert "\n" not in str(caught.value)


def test_failed_exec_plugin_is_run_again_with_backoff(tmp_path):
    """Four watches request credentials every 0.2 s for a minute.

    The plugin runs at 0, 1, 3, 7, 15 and 31 s only.
    """
    count = tmp_path / "count"
    user = exec_user(tmp_path, f"echo x >> {count}; echo no ticket >&2; exit 3")
    path = write(tmp_path / "kc", {}, user)
    clock = [100.0]
    plugin = PluginCredentials(lambda: clock[0], lambda: 1.0)
    for _ in range(300):
        for _ in range(4):
            with pytest.raises(SourceError, match=r"no credentials: .*no ticket"):
                plugin.get(path, lambda: False)
        clock[0] += 0.2
    assert count.read_text() == "x\n" * 6


def test_exec_plugin_waits_if_its_new_credentials_are_rejected_too(tmp_path):
    count = tmp_path / "count"
    user = exec_user(tmp_path, f"echo x >> {count}; echo '{credential(token='t')}'")
    path = write(tmp_path / "kc", {}, user)
    clock = [100.0]
    plugin = PluginCredentials(lambda: clock[0], lambda: 1.0)
    first = plugin.get(path, lambda: False)
    plugin.reject(first)
    second = plugin.get(path, lambda: False)
    plugin.reject(first)  # by a late watch: these credentials have been replaced already
    assert plugin.get(path, lambda: False) is second
    plugin.reject(second)
    with pytest.raises(SourceError, match="the API server rejected the last ones"):
        plugin.get(path, lambda: False)
    clock[0] += 2.1
    third = plugin.get(path, lambda: False)
    clock[0] += 3600.0
    plugin.reject(third)
    plugin.get(path, lambda: False)
    assert count.read_text() == "x\n" * 4


@pytest.mark.parametrize(
    "user",
    [
        {"token": "t"},
        {"tokenFile": "token"},
        {"username": "a", "password": "b"},
        {"exec": {"x": 1}},
    ],
    ids=("token", "token file", "password", "plugin"),
)
def test_credentials_are_not_sent_over_http(tmp_path, user):
    path = write(tmp_path / "kc", {"server": "http://10.0.0.1:8080"}, user)
    with pytest.raises(ConfigError, match=r"unencrypted .*--allow-insecure-api"):
        find_access(path)
    with pytest.raises(ConfigError, match="unencrypted"):
        find_access(write(tmp_path / "tls", {}, user), "http://10.0.0.1:8080")
    assert find_access(path, allow_insecure=True).server == "http://10.0.0.1:8080"


def test_http_without_credentials_is_allowed(tmp_path):
    path = write(tmp_path / "kc", {"server": "http://10.0.0.1:8080"}, {})
    assert find_access(path).server == "http://10.0.0.1:8080"


@pytest.mark.parametrize(
    ("cluster", "allowed", "told"),
    [
        ({}, False, False),
        ({"insecure-skip-tls-verify": True}, False, True),
        ({"insecure-skip-tls-verify": True}, True, False),
    ],
)
def test_unverified_server_is_a_problem_unless_allowed(tmp_path, cluster, allowed, told):
    access = find_access(write(tmp_path / "kc", cluster, {"token": "t"}))
    made = Cluster(access, allow_insecure=allowed)
    assert any("is not verified" in line for line in made.problems) == told
    reflector = Reflector(made, SERVICES, lambda event: None)
    assert reflector.status().problems == made.problems


def has_ended(pid: int) -> bool:
    """Whether the process does not exist, or is a zombie that its new parent has not reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_hanging_exec_plugin_is_killed_when_the_connection_closes(tmp_path):
    started = tmp_path / "started"
    user = exec_user(tmp_path, f"echo $$ > {started}; exec sleep 600")
    connection = ApiConnection(Cluster(find_access(write(tmp_path / "kc", {}, user))))
    errors: list[SourceError] = []

    def ask() -> None:
        try:
            connection.request("/x")
        except SourceError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until("the plugin has started", lambda: started.exists() and started.read_text().strip())
    connection.close()
    thread.join(PATIENCE)
    assert "stopped" in str(errors[0])
    until("the plugin has ended too", lambda: has_ended(int(started.read_text())))


def test_kubernetes_library_is_not_imported_by_the_agent():
    code = (
        "import sys, kbpf.source.api.reflector, kbpf.source.folder.folder\n"
        "assert not {'kubernetes', 'urllib3', 'asyncio', 'subprocess'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the node's name ---


@pytest.mark.parametrize(
    ("hostname", "name"), [("Node-1.Example", "node-1.example"), (" n1 ", "n1")]
)
def test_node_name_is_the_hostname_in_lower_case(monkeypatch, hostname, name):
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    assert default_node_name() == name


def test_empty_hostname_is_an_error(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: " ")
    with pytest.raises(ConfigError, match="--hostname-override"):
        default_node_name()

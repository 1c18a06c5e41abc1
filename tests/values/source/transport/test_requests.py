# SPDX-License-Identifier: Apache-2.0
"""Credentials, TLS and connections of requests."""

import os
import re
import shutil
import socket
import ssl
import tempfile
from typing import Any

import pytest

from kbpf.errors import SourceError
from kbpf.source.api.credentials import Cluster
from kbpf.source.api.kubeconfig import Access
from kbpf.source.api.transport import ApiConnection, EventSink, explain_error
from tests.support.cluster.certs import Authority
from tests.support.faults.scripted import ScriptedServer
from tests.values.source.transport.kubeconfigs import URL, b64, headers, ok, unauthorized

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


@pytest.mark.parametrize(
    ("fields", "header"), [({}, None), ({"token": "abc"}, "Bearer abc"), ({"basic": b64("a:b")}, f"Basic {b64('a:b')}")]
)
def test_credentials_are_sent(connect, fields, header):
    with ScriptedServer(ok) as server:
        connect(server.url, **fields).request("/x").read()
        assert headers(server) == [header]


def test_a_proxy_of_the_environment_is_ignored(connect, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with ScriptedServer(ok) as server:
        assert connect(server.url).request("/x").status == 200


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
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        )
        assert idle + between * count <= 30
        assert user <= 30_000


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
            with pytest.raises(SourceError, match=r"not trusted.*check certificate-authority in the"):
                connect(server.url, **fields).request("/x")
        assert server.requests == []


def test_certificate_for_another_name_is_refused_without_tls_server_name(connect, authority, server_tls):
    with ScriptedServer(ok, tls=server_tls) as server:
        ca = str(authority.crt)
        with pytest.raises(SourceError, match=r"is for another name: .*; set the server in .* to a name or address of"):
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


RESET = ConnectionResetError(104, "Connection reset by peer")
UNRESOLVED = socket.gaierror(-3, "Temporary failure in name resolution")
EXPLAINED = [
    (tls_error("WRONG_VERSION_NUMBER"), "https://x:6443", "the server does not use TLS"),
    (tls_error("NO_CIPHERS"), "https://x:6443", "TLS: NO_CIPHERS"),
    (RESET, "http://x:6443", "does it require https://?"),
    (RESET, "https://x:6443", "check that it runs"),
    (UNRESOLVED, "https://CONTROL-PLANE-ENDPOINT:6443", "the placeholder of the manifests is still in place"),
    (UNRESOLVED, "https://x:6443", "temporary failure in name resolution"),
]


@pytest.mark.parametrize(("error", "url", "words"), EXPLAINED)
def test_connection_errors_say_what_to_do(error, url, words):
    assert words in str(explain_error(error, url, "the kubeconfig"))


@pytest.mark.parametrize("inside", [False, True], ids=("in files", "inside the kubeconfig"))
def test_client_certificate_is_sent(connect, authority, inside):
    client = authority.issue_client("client", "kbpf-node", "system:nodes")
    made = authority.issue("asks", ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.crt, made.key)
    context.load_verify_locations(authority.crt)
    context.verify_mode = ssl.CERT_REQUIRED
    fields: dict[str, Any] = (
        {"cert_data": client.crt.read_bytes(), "key_data": client.key.read_bytes()}
        if inside
        else {"cert_file": str(client.crt), "key_file": str(client.key)}
    )
    with ScriptedServer(ok, tls=context) as server:
        connect(server.url, ca_file=str(authority.crt), **fields).request("/x").read()
        assert "kbpf-node" in server.requests[0].peer


def test_certificate_data_leaks_no_file_descriptor_and_stays_in_memory(authority, tmp_path, monkeypatch):
    client = authority.issue_client("client", "kbpf-node", "system:nodes")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    access = Access(URL, "x", cert_data=client.crt.read_bytes(), key_data=client.key.read_bytes())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        cluster = Cluster(access)
        cluster.get_tls_context(cluster.get_credentials())
    # Servers of earlier tests may close theirs meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before
    assert os.listdir(tmp_path) == []


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

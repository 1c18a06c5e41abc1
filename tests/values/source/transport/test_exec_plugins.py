# SPDX-License-Identifier: Apache-2.0
"""Exec plugins, run by the kubernetes library in a child process."""

import calendar
import json
import re
import threading
import time
from pathlib import Path

import pytest

from kbpf.errors import ConfigError, SourceError
from kbpf.kernel.system.process import is_alive
from kbpf.source.api import credentials
from kbpf.source.api.credentials import Cluster, Credentials, PluginCredentials
from kbpf.source.api.kubeconfig import find_access
from kbpf.source.api.reflector import Reflector
from kbpf.source.api.resource import SERVICES
from kbpf.source.api.transport import ApiConnection
from tests.support.faults.scripted import ScriptedServer
from tests.support.lab.lab import PATIENCE, until
from tests.support.table import each_cells
from tests.values.source.transport.kubeconfigs import exec_user, headers, ok, unauthorized, write


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
    cluster = Cluster(find_access(write(tmp_path / "kc", {}, exec_user(tmp_path, f"echo '{answer}'"))))
    login = cluster.get_credentials()
    assert login.authorization == "Bearer t"
    assert login.expires_at == calendar.timegm(time.strptime(expires, "%Y-%m-%dT%H:%M:%SZ"))
    assert cluster.get_credentials() is login
    monkeypatch.setattr(credentials.time, "time", lambda: login.expires_at - 50)
    assert cluster.get_credentials() is not login


@each_cells(
    "script, error",
    """\
fails | echo no ticket >&2; exit 3 | no ticket
prints nothing | true | failed to decode
prints without end | exec yes | the plugin printed more than 1 MiB
complains without end | exec yes >&2 | the plugin printed more than 1 MiB
does not exist |  | [Errno 2] No such file or directory
""",
)
def test_failed_exec_plugin_is_an_error_with_its_reason(tmp_path, script, error):
    access = find_access(write(tmp_path / "kc", {}, exec_user(tmp_path, script)))
    if not script:
        (tmp_path / "plugin").unlink()
    with pytest.raises(SourceError, match=f"no credentials: (?!ERROR).*{re.escape(error)}") as caught:
        Cluster(access).get_credentials()
    assert str(tmp_path / "kc") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def runs(monkeypatch) -> list[Credentials]:
    """Plugins return new credentials at once, which are listed here."""
    made: list[Credentials] = []

    def run_plugin(*_: object) -> Credentials:
        made.append(Credentials("Bearer t"))
        return made[-1]

    monkeypatch.setattr(credentials, "_run_plugin", run_plugin)
    return made


def test_failed_exec_plugin_is_run_again_with_backoff(monkeypatch):
    """Four watches request credentials every 0.2 s for a minute."""
    clock, runs = [100.0], []

    def fail(*_: object) -> Credentials:
        runs.append(round(clock[0] - 100))
        raise SourceError("no ticket")

    monkeypatch.setattr(credentials, "_run_plugin", fail)
    plugin = PluginCredentials(lambda: clock[0], lambda: 1.0)
    for _ in range(300):
        for _ in range(4):
            with pytest.raises(SourceError, match="no ticket"):
                plugin.get(Path("kc"), lambda: False)
        clock[0] += 0.2
    assert runs == [0, 1, 3, 7, 15, 31]


def test_exec_plugin_waits_if_its_new_credentials_are_rejected_too(runs: list[Credentials]):
    clock = [100.0]
    plugin = PluginCredentials(lambda: clock[0], lambda: 1.0)

    def get() -> Credentials:
        return plugin.get(Path("kc"), lambda: False)

    first = get()
    plugin.reject(first)
    second = get()
    plugin.reject(first)  # by a late watch: these credentials have been replaced already
    assert get() is second
    plugin.reject(second)
    with pytest.raises(SourceError, match="the API server rejected the last ones"):
        get()
    clock[0] += 2.1
    third = get()
    clock[0] += 3600.0
    plugin.reject(third)
    get()
    assert len(runs) == 4


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
    until("the plugin has ended too", lambda: not is_alive(int(started.read_text())))

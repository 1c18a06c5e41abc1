# SPDX-License-Identifier: Apache-2.0
"""Tests of the test support: the API server and the fault proxy behave as other tests rely on."""

import contextlib
import http.client
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.build import go_build
from tests.support.cluster.apiserver import ApiServer, ServerDied
from tests.support.cluster.kube import Connection, Kube, KubeError, Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service
from tests.support.faults.faults import Cut, FaultProxy, Request
from tests.support.lab.lab import PATIENCE, ip, until

STREAMING = {
    "sendInitialEvents": "true",
    "resourceVersionMatch": "NotOlderThan",
    "allowWatchBookmarks": "true",
}
SLICES = "endpointslices"


class Watcher:
    """A watch of EndpointSlices in a thread; its events are put into the queue `events`."""

    def __init__(self, kube: Kube, version: str) -> None:
        self.events: queue.Queue[Object] = queue.Queue()
        self.end: Exception | None = None
        self._events = kube.watch("EndpointSlice", "default", since(version))
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def name(self) -> str:
        """Return the name of the next event's object."""
        return str(self.events.get(timeout=PATIENCE)["object"]["metadata"]["name"])

    def ended(self) -> Exception | None:
        """Wait for the watch to end; return its error, or None if the body was complete."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the watch still runs"
        return self.end

    def _run(self) -> None:
        try:
            for event in self._events:
                self.events.put(event)
        except (OSError, ValueError, http.client.HTTPException, KubeError) as error:
            self.end = error


@pytest.fixture
def kube(apiserver: ApiServer) -> Iterator[Kube]:
    with apiserver.kube() as client:
        client.clear()
        yield client


@pytest.fixture
def proxied(faults: FaultProxy) -> Iterator[Kube]:
    with faults.kube() as client:
        yield client


@pytest.fixture
def watcher(faults: FaultProxy, kube: Kube, proxied: Kube) -> Watcher:
    """A watch through the proxy, from the current resourceVersion on."""
    version = kube.list("EndpointSlice")["metadata"]["resourceVersion"]
    made = Watcher(proxied, version)
    faults.wait_for_watches(1, SLICES)
    return made


def add_slice(kube: Kube, name: str) -> None:
    kube.create(endpoint_slice("web", endpoint("10.1.0.1", node="a"), name=name))


# The programs.


def test_given_programs_are_used_and_a_missing_one_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    given = tmp_path / "etcd"
    given.touch(mode=0o755)
    assert go_build.build("etcd") == given
    with pytest.raises(go_build.BuildError, match="KUBEBUILDER_ASSETS is set, but has no kube-api"):
        go_build.build("kube-apiserver")


def test_a_build_that_fails_says_what_where_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    cache = tmp_path / "cache"
    monkeypatch.setenv("KBPF_CACHE", str(cache))
    monkeypatch.setenv("GOMODCACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("GOPROXY", "off")
    with pytest.raises(go_build.BuildError, match=r"cannot build etcd(.|\n)*GOPROXY=off"):
        go_build.build("etcd")
    assert [path.name for path in cache.rglob("*etcd*")] == [".etcd.lock"]


# The server.


def test_a_service_gets_addresses_of_both_families(kube: Kube) -> None:
    made = kube.create(service("web", port(80, "http"), families=("IPv4", "IPv6")))
    v4, v6 = made["spec"]["clusterIPs"]
    assert v4.startswith("10.96.")
    assert v6.startswith("fd00:10:96::")


def test_the_version_is_that_of_the_release(kube: Kube) -> None:
    status, body = kube.request("GET", "/version")
    assert status == 200
    assert b'"gitVersion": "v1.' in body


def test_every_kind_of_object_can_be_written_changed_and_deleted(kube: Kube) -> None:
    kube.create(service("web", port(80, target="http"), type="LoadBalancer", affinity_seconds=30))
    kube.set_load_balancer("web", ["192.0.2.1", "2001:db8::1"], ip_mode="Proxy")
    ingress = kube.get("Service", "web")["status"]["loadBalancer"]["ingress"]
    assert [row["ip"] for row in ingress] == ["192.0.2.1", "2001:db8::1"]
    kube.patch("Service", "web", {"spec": {"externalTrafficPolicy": "Local"}})
    assert kube.get("Service", "web")["spec"]["healthCheckNodePort"] > 0
    add_slice(kube, "web-1")
    hints = endpoint("10.1.0.2", for_zones=["z"], for_nodes=["a"], ready=None, terminating=True)
    kube.replace(endpoint_slice("web", hints, name="web-1"))
    assert kube.get("EndpointSlice", "web-1")["endpoints"][0]["hints"]["forZones"]
    kube.create(node("a", "192.0.2.10", "2001:db8::10", zone="z", pod_cidrs=["10.1.0.0/24"]))
    assert len(kube.get("Node", "a")["status"]["addresses"]) == 2
    kube.delete("Service", "web")
    with pytest.raises(KubeError, match="not found"):
        kube.get("Service", "web")
    kube.clear()
    assert kube.list("Node")["items"] == []


def test_many_slices_are_written_over_few_connections(faults: FaultProxy, kube: Kube) -> None:
    """Connections are reused: a thousand slices take seconds, without a TLS handshake for each."""
    with faults.kube() as through:
        slices = (endpoint_slice("web", endpoint("10.1.0.1"), name=f"s{n}") for n in range(300))
        through.create_many(slices)
    assert len(kube.list("EndpointSlice")["items"]) == 300
    assert faults.count("create") == 300
    assert faults.accepted <= 4


def test_initial_events_end_with_the_annotated_bookmark(kube: Kube) -> None:
    for name in ("one", "two"):
        add_slice(kube, name)
    seen = []
    for event in kube.watch("EndpointSlice", "default", STREAMING):
        meta = event["object"]["metadata"]
        if event["type"] == "BOOKMARK":
            assert meta["annotations"]["k8s.io/initial-events-end"] == "true"
            break
        seen.append((event["type"], meta["name"]))
    assert sorted(seen) == [("ADDED", "one"), ("ADDED", "two")]


def test_user_kbpf_may_only_read_and_user_nobody_may_do_nothing(apiserver: ApiServer, kube: Kube) -> None:
    with apiserver.kube("kbpf") as kbpf, apiserver.kube("nobody") as nobody:
        for kind in ("Service", "EndpointSlice", "Node"):
            assert kbpf.list(kind)["kind"] == f"{kind}List"
            with pytest.raises(KubeError) as refused:
                nobody.list(kind)
            assert refused.value.status == 403
        with pytest.raises(KubeError) as refused:
            kbpf.create(service("web"))
        assert refused.value.status == 403
    with Kube(apiserver.url, "wrong", apiserver.authority.crt) as stranger:
        with pytest.raises(KubeError) as refused:
            stranger.list("Service")
        assert refused.value.status == 401


def test_a_restart_keeps_data_and_port(apiserver: ApiServer, kube: Kube) -> None:
    add_slice(kube, "kept")
    port_before = apiserver.port
    apiserver.restart()
    assert kube.get("EndpointSlice", "kept")["metadata"]["name"] == "kept"
    apiserver.kill()
    apiserver.restart()
    assert kube.get("EndpointSlice", "kept")["metadata"]["name"] == "kept"
    assert apiserver.port == port_before


def test_a_killed_server_refuses_connections(apiserver: ApiServer) -> None:
    apiserver.kill()
    try:
        with apiserver.kube() as client, pytest.raises(ConnectionRefusedError):
            client.list("Node")
    finally:
        apiserver.restart()


def test_a_server_in_a_network_namespace_is_reachable_from_outside() -> None:
    name, outside = (f"kbpf-api-{os.getpid()}-{end}" for end in "io")
    with contextlib.ExitStack() as stack:
        for each in (name, outside):
            ip(f"netns add {each}")
            stack.callback(ip, f"netns del {each}")
        ip("link set lo up", netns=name)
        ip(f"link add out type veth peer name in netns {name}", netns=outside)
        for where, device, address in ((outside, "out", 1), (name, "in", 2)):
            ip(f"addr add 198.18.254.{address}/30 dev {device}", netns=where)
            ip(f"link set {device} up", netns=where)
        server = stack.enter_context(ApiServer(netns=name, addresses=["198.18.254.2"]))
        assert server.url.startswith("https://198.18.254.2:")
        proxy = stack.enter_context(FaultProxy(server))
        for url, netns in (
            (server.url, outside),
            (server.url, name),
            (server.url_at("127.0.0.1"), name),
            (proxy.url, name),
        ):
            with Kube(url, server.token, server.authority.crt, netns=netns) as client:
                assert client.list("Node")["items"] == []
        with server.kube() as client:  # it publishes its address after it is ready
            until("an address is published", lambda: client.list("EndpointSlice")["items"] != [])
            slices = client.list("EndpointSlice")["items"]
        assert slices[0]["endpoints"][0]["addresses"] == ["198.18.254.2"]


def test_stop_removes_processes_files_and_port() -> None:
    server = ApiServer()
    server.start()
    pids, folder, at = server.pids, server.folder, ("127.0.0.1", server.port)
    server.stop()
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with socket.create_server(at):
        pass


def test_the_server_dies_with_the_process_that_started_it() -> None:
    script = (
        "import signal; from tests.support.cluster.apiserver import ApiServer;"
        "s = ApiServer(); s.start(); print(*s.pids, s.folder, flush=True); signal.pause()"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=-1) as parent:
        assert parent.stdout is not None
        *pids, folder = parent.stdout.readline().decode().split()
        assert len(pids) == 2
        parent.send_signal(signal.SIGKILL)
    try:
        until("all have ended", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    finally:
        subprocess.run(["rm", "-r", folder], check=True)  # the killed process could not


def test_a_failed_server_start_is_an_error_and_cleans_up() -> None:
    server = ApiServer(extra=["--no-such-flag"])
    with pytest.raises(ServerDied, match="unknown flag: --no-such-flag"):
        server.start()
    assert server.pids == ()


def test_a_kubeconfig_works_for_other_programs(apiserver: ApiServer, tmp_path: Path) -> None:
    path = apiserver.kubeconfig(tmp_path / "config", "kbpf", tls_server_name="localhost")
    assert path.stat().st_mode & 0o077 == 0
    text = path.read_text()
    assert apiserver.tokens["kbpf"] in text
    assert apiserver.token not in text
    assert apiserver.url in text


# The fault proxy.


def test_requests_pass_and_are_recorded(faults: FaultProxy, kube: Kube, proxied: Kube, watcher: Watcher) -> None:
    add_slice(kube, "one")
    assert watcher.name() == "one"
    proxied.list("Service", query={"labelSelector": "a=b", "limit": "7"})
    proxied.create(service("web"))
    proxied.set_load_balancer("web", [])
    (listed,) = faults.requests("list", "services")
    assert dict(listed.query) == {"labelSelector": "a=b", "limit": "7"}
    assert listed.headers["authorization"].startswith("Bearer ")
    (patched,) = faults.requests("patch", "services/status")
    assert (patched.namespace, patched.name) == ("default", "web")
    assert faults.count() == 4
    faults.forget()
    assert faults.count() == 0


def test_a_client_that_hangs_up_is_noticed(faults: FaultProxy, proxied: Kube) -> None:
    events = proxied.watch("EndpointSlice", None, STREAMING)
    next(events)
    faults.wait_for_watches(1, SLICES)
    events.close()
    faults.wait_for_watches(0)


@pytest.mark.parametrize("how", list(Cut))
def test_watches_are_cut(faults: FaultProxy, watcher: Watcher, how: Cut) -> None:
    assert faults.cut_watches(how, "services") == 0
    assert faults.cut_watches(how, SLICES) == 1
    assert isinstance(watcher.ended(), ConnectionError) == (how is not Cut.END)
    faults.wait_for_watches(0)


def raw_watch(
    proxied: Kube, apiserver: ApiServer, accept: str = "application/json"
) -> tuple[Connection, http.client.HTTPResponse]:
    connection = Connection(proxied.target, PATIENCE)
    path = "/apis/discovery.k8s.io/v1/endpointslices?watch=1"
    headers = {"Authorization": f"Bearer {apiserver.token}", "Accept": accept}
    connection.request("GET", path, headers=headers)
    return connection, connection.getresponse()


@pytest.mark.parametrize("how", [Cut.CLOSE, Cut.RESET])
def test_a_close_is_a_fin_and_a_reset_an_rst(
    apiserver: ApiServer, faults: FaultProxy, kube: Kube, proxied: Kube, how: Cut
) -> None:
    """Observed below TLS, since Python 3.11's ssl reports an end of file for both."""
    connection, _ = raw_watch(proxied, apiserver)
    with contextlib.closing(connection):
        faults.cut_watches(how)
        select.select([connection.sock], [], [], PATIENCE)
        if how is Cut.CLOSE:
            assert socket.socket.recv(connection.sock, 1, socket.MSG_PEEK) == b""
        else:
            with pytest.raises(ConnectionResetError):
                socket.socket.recv(connection.sock, 1, socket.MSG_PEEK)


def test_a_cut_in_the_middle_sends_half_a_line(
    apiserver: ApiServer, faults: FaultProxy, kube: Kube, proxied: Kube
) -> None:
    connection, answer = raw_watch(proxied, apiserver)
    with contextlib.closing(connection):
        faults.cut_watches(Cut.MIDLINE)
        said = answer.fp.read()
    assert b'{"type":' in said
    assert not said.endswith((b"}\n\r\n", b"0\r\n\r\n"))


def test_after_a_complete_body_the_connection_is_reused(
    apiserver: ApiServer, faults: FaultProxy, kube: Kube, proxied: Kube
) -> None:
    connection, answer = raw_watch(proxied, apiserver)
    with contextlib.closing(connection):
        faults.cut_watches(Cut.END)
        answer.read()
        connection.request("GET", "/version")
        assert connection.getresponse().status in {200, 403}
    assert faults.accepted == 1


@pytest.mark.parametrize("status", [410, 429, 500, 503])
def test_the_next_watches_are_answered_with_an_error(
    faults: FaultProxy, kube: Kube, proxied: Kube, status: int
) -> None:
    faults.answer(status, times=2, resource=SLICES, retry_after=1 if status == 429 else None)
    for _ in range(2):
        with pytest.raises(KubeError) as refused:
            next(proxied.watch("EndpointSlice", None, STREAMING))
        assert refused.value.status == status
    assert next(proxied.watch("EndpointSlice", None, STREAMING))["type"] in {"ADDED", "BOOKMARK"}
    assert proxied.list("EndpointSlice")["kind"] == "EndpointSliceList"


def test_a_429_has_a_retry_after_header(apiserver: ApiServer, faults: FaultProxy, kube: Kube) -> None:
    faults.answer(429, retry_after=7)
    connection, answer = raw_watch(faults.kube(), apiserver)
    with contextlib.closing(connection):
        assert answer.getheader("Retry-After") == "7"
        assert b'"retryAfterSeconds": 7' in answer.read()


def test_an_error_for_the_second_page_only(faults: FaultProxy, kube: Kube, proxied: Kube) -> None:
    for name in ("one", "two"):
        add_slice(kube, name)
    faults.answer(410, verb="list", where=lambda request: "continue" in request.query)
    page = proxied.list("EndpointSlice", query={"limit": "1"})["metadata"]["continue"]
    with pytest.raises(KubeError) as refused:
        proxied.list("EndpointSlice", query={"limit": "1", "continue": page})
    assert refused.value.status == 410


def test_running_watches_expire(faults: FaultProxy, watcher: Watcher) -> None:
    faults.expire_watches()
    event = watcher.events.get(timeout=PATIENCE)
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
    assert watcher.ended() is None


def test_an_outage_refuses_and_resets_until_healed(
    faults: FaultProxy, kube: Kube, proxied: Kube, watcher: Watcher
) -> None:
    before = faults.port
    faults.refuse()
    assert isinstance(watcher.ended(), ConnectionError)
    with pytest.raises(ConnectionRefusedError):
        proxied.list("Node")
    faults.heal()
    assert proxied.list("Node")["items"] == []
    assert faults.port == before


def test_a_hanging_server_accepts_but_is_silent_until_healed(
    apiserver: ApiServer, faults: FaultProxy, kube: Kube, watcher: Watcher
) -> None:
    faults.hang()
    accepted = faults.accepted
    crt = apiserver.authority.crt
    with (
        Kube(faults.url, apiserver.token, crt, timeout=0.5) as hasty,
        pytest.raises(TimeoutError),
    ):
        hasty.list("Node")
    until("it is accepted", lambda: faults.accepted == accepted + 1)
    add_slice(kube, "late")
    with pytest.raises(queue.Empty):
        watcher.events.get(timeout=0.5)
    faults.heal()
    assert watcher.name() == "late"


def test_frozen_watches_fall_silent_and_others_do_not(
    faults: FaultProxy, kube: Kube, proxied: Kube, watcher: Watcher
) -> None:
    faults.freeze_watches(SLICES)
    other = Watcher(proxied, "0")
    faults.wait_for_watches(2, SLICES)
    add_slice(kube, "late")
    while other.name() != "late":
        pass
    assert watcher.events.empty()
    assert faults.watches(SLICES) == 2
    faults.heal()
    assert watcher.name() == "late"


def test_a_frozen_watch_can_be_cut(faults: FaultProxy, kube: Kube, watcher: Watcher) -> None:
    faults.freeze_watches()
    add_slice(kube, "lost")
    faults.cut_watches(Cut.RESET)
    assert isinstance(watcher.ended(), ConnectionError)
    assert watcher.events.empty()


@pytest.mark.parametrize("status", [400, 422])
def test_streaming_lists_are_refused_and_plain_watches_are_not(
    faults: FaultProxy, kube: Kube, proxied: Kube, status: int
) -> None:
    add_slice(kube, "one")
    faults.refuse_initial_events(status)
    for _ in range(2):
        with pytest.raises(KubeError) as refused:
            next(proxied.watch("EndpointSlice", None, STREAMING))
        assert refused.value.status == status
    assert next(proxied.watch("EndpointSlice", None, since("0")))["type"] == "ADDED"


def test_a_request_is_delayed(faults: FaultProxy, kube: Kube, proxied: Kube) -> None:
    faults.delay(0.4, times=1, verb="list")
    started = time.monotonic()
    proxied.list("Node")
    assert time.monotonic() - started >= 0.4

    def is_quick() -> bool:
        started = time.monotonic()
        proxied.list("Node")
        return time.monotonic() - started < 0.4

    until("it is no longer delayed", is_quick)  # usually the first one, unless the machine is busy


def test_a_held_request_is_served_when_healed(faults: FaultProxy, kube: Kube, proxied: Kube) -> None:
    faults.hold(verb="list", resource="nodes")
    answered = threading.Event()

    def ask() -> None:
        proxied.list("Node")
        answered.set()

    thread = threading.Thread(target=ask, name="held")
    thread.start()
    faults.wait_for_requests(1, "list", "nodes")
    assert not answered.wait(0.3)
    faults.heal()
    assert answered.wait(PATIENCE)
    thread.join()


def test_objects_are_rewritten_in_lists_and_watches(
    faults: FaultProxy, kube: Kube, proxied: Kube, watcher: Watcher
) -> None:
    def hook(request: Request, obj: Object) -> Object | None:
        assert request.resource == SLICES
        name = obj["metadata"]["name"]
        return None if name == "hidden" else obj | {"endpoints": name}

    faults.rewrite_objects(hook)
    for name in ("hidden", "shown"):
        add_slice(kube, name)
    assert watcher.events.get(timeout=PATIENCE)["object"]["endpoints"] == "shown"
    listed = proxied.list("EndpointSlice", "default")["items"]
    assert [row["endpoints"] for row in listed] == ["shown"]


def test_lines_are_rewritten(faults: FaultProxy, kube: Kube, watcher: Watcher) -> None:
    faults.rewrite_lines(lambda _, line: line[: len(line) // 2] + b"\n")
    add_slice(kube, "broken")
    assert isinstance(watcher.ended(), ValueError)


def test_bodies_that_are_not_json_pass_unchanged(
    apiserver: ApiServer, faults: FaultProxy, kube: Kube, proxied: Kube
) -> None:
    faults.rewrite_objects(lambda _, obj: None)
    faults.rewrite_lines(lambda _, line: None)
    protobuf = "application/vnd.kubernetes.protobuf"
    add_slice(kube, "one")
    path = "/apis/discovery.k8s.io/v1/endpointslices"
    status, body = proxied.request("GET", path, headers={"Accept": protobuf})
    assert (status, body[:4]) == (200, b"k8s\0")
    connection, answer = raw_watch(proxied, apiserver, f"{protobuf};stream=watch")
    with contextlib.closing(connection):
        length = int.from_bytes(answer.read(4), "big")
        assert b"ADDED" in answer.read(length)


def test_a_line_made_by_a_test_is_sent(faults: FaultProxy, watcher: Watcher) -> None:
    faults.send({"type": "ADDED", "object": {"metadata": {"name": "invented"}}}, SLICES)
    assert watcher.name() == "invented"


def test_a_dead_server_behind_the_proxy_resets_its_clients(
    apiserver: ApiServer, faults: FaultProxy, kube: Kube, proxied: Kube, watcher: Watcher
) -> None:
    apiserver.kill()
    try:
        assert isinstance(watcher.ended(), ConnectionError)
        with pytest.raises(ConnectionError):
            proxied.list("Node")
    finally:
        apiserver.restart()
    assert proxied.list("Node")["items"] == []


def test_a_version_from_before_a_restart_is_too_old(apiserver: ApiServer, kube: Kube) -> None:
    version = kube.list("EndpointSlice")["metadata"]["resourceVersion"]
    for name in ("one", "two"):
        add_slice(kube, name)
    apiserver.restart()
    event = next(kube.watch("EndpointSlice", "default", since(version)))
    assert (event["type"], event["object"].get("code")) == ("ERROR", 410)


def since(version: str) -> dict[str, str]:
    return {"resourceVersion": version}

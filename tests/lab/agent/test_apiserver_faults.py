# SPDX-License-Identifier: Apache-2.0
"""The API server fails in every common way: Services stay served, and changes arrive.

Each test injects a fault into the agent's connections, changes an object meanwhile, and waits until
the agent has applied the change (settle()). A failure must not delete anything, and requests are
repeated with backoff only.
"""

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kbpf.model.address import format_addr
from kbpf.model.events import Delete, Event, ObjectKey, Synced, Upsert
from kbpf.model.objects import EndpointSlice
from kbpf.source.api import credentials as source
from kbpf.source.api.kubeconfig import find_access
from kbpf.source.api.reflector import Reflector
from kbpf.source.api.resource import SERVICES, SLICES
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube_objects import endpoint, endpoint_slice
from tests.support.faults.faults import Cut, FaultProxy, Request
from tests.support.lab.dial import UNSERVED, Dial, check
from tests.support.lab.lab import PATIENCE, ip, until
from tests.support.lab.load import under_load

HOST, NAME = "10.96.0.20", "web-20"
RESOURCES = ("services", "endpointslices", "nodes", "pods")


@pytest.fixture(scope="module")
def faulty(programs: None) -> Iterator[Cluster]:
    """One node; its agent reaches the API server through a fault proxy."""
    with Cluster(1, "f", faulty=True, arguments=("--socket-lb-label", "true")) as made:
        yield made


@pytest.fixture
def web(faulty: Cluster) -> Iterator[Cluster]:
    """The cluster with one Service and no faults, and an agent that was just started."""
    faulty.agent.kill()
    faulty.proxy.heal()
    faulty.start(faulty.agent)
    with faulty.given(*faulty.web(20, "a1")):
        faulty.proxy.wait_for_watches(4)
        faulty.proxy.forget()
        yield faulty


def expect(cluster: Cluster, to: str, outcome: str, client: str = "a3") -> None:
    check(cluster, Dial("current state", client, to, outcome))


def streams(request: Request) -> bool:
    return "sendInitialEvents" in request.query


def asked(proxy: FaultProxy, verb: str | None, resource: str | None = None) -> list[Request]:
    """The requests, except lists with limit=1, which only fetch the version and the Node count."""
    return [one for one in proxy.requests(verb, resource) if one.query.get("limit") != "1"]


def whole_lists(proxy: FaultProxy) -> int:
    """How many requests asked for a complete list, as pages or as a streaming watch."""
    return len(asked(proxy, "list")) + sum(map(streams, proxy.requests("watch")))


def is_unwell(cluster: Cluster) -> bool:
    """Whether the running agent reports an error for every source."""
    status = cluster.agent.own_status()
    return status is not None and all(source["error"] for source in status["sources"])


def test_each_resource_is_requested_once_with_kube_proxys_selectors(web: Cluster) -> None:
    """Selectors are applied by the server, so filtered objects cost no traffic."""
    selectors = {
        "services": {
            "labelSelector": "!service.kubernetes.io/service-proxy-name",
            "fieldSelector": "spec.clusterIP!=None",
        },
        "endpointslices": {"labelSelector": "!service.kubernetes.io/headless"},
        "nodes": {},  # all of a small cluster: see test_reserved.py
        "pods": {"fieldSelector": "spec.nodeName=node-1"},
    }
    web.agent.kill()
    web.proxy.forget()
    web.start(web.agent)
    web.settle()
    for resource, wanted in selectors.items():
        (request,) = asked(web.proxy, None, resource)
        for field, selector in wanted.items():
            assert selector in request.query[field].split(",")
        assert set(request.query) & {"labelSelector", "fieldSelector"} == set(wanted)


@pytest.mark.parametrize("fault", [FaultProxy.refuse, FaultProxy.hang], ids=["refused", "hung"])
def test_an_outage_deletes_nothing_and_changes_arrive_after_it(
    web: Cluster, fault: Callable[[FaultProxy], None]
) -> None:
    """The agent is killed and started during the outage; changes made during it are applied
    later.
    """
    proxy, gone = web.proxy, web.web(21, "a2")
    web.create(*gone)
    web.settle()
    before = web.served()
    with under_load(web, HOST, "a2", "host-1") as load:
        fault(proxy)
        web.kube.replace(web.slice(NAME, "a3"))
        web.delete(*gone)
        web.create(*web.web(22, "a1"))
        load.goes_on()
        web.agent.kill()
        web.start(web.agent, wait=False)
        if fault is FaultProxy.refuse:
            until("the agent reports the outage", lambda: is_unwell(web))
        until("the agent has started", web.agent.own_status)
        load.goes_on()
        assert not web.agent.own_status()["synced"]
        assert web.served() == before, "nothing is deleted before the first list"
        proxy.heal()
        web.agent.wait_synced()
        web.settle()
        expect(web, f"{HOST}:80", "a3")
        expect(web, "10.96.0.21:80", UNSERVED)
        expect(web, "10.96.0.22:80", "a1")
    web.delete(*web.web(22, ""))


@pytest.mark.parametrize("how", list(Cut), ids=lambda how: how.name)
def test_an_ended_watch_resumes_at_its_version(web: Cluster, how: Cut) -> None:
    web.settle()
    assert web.proxy.cut_watches(how) == 4
    web.change(web.slice(NAME, "a2"))
    expect(web, f"{HOST}:80", "a2")
    web.proxy.wait_for_watches(4)
    assert whole_lists(web.proxy) == 0


@pytest.mark.parametrize("how", ["event", "answer"])
def test_an_expired_version_causes_a_new_list(web: Cluster, how: str) -> None:
    with under_load(web, HOST, "a2") as load:
        if how == "event":
            web.proxy.expire_watches()
        else:
            for resource in RESOURCES:
                web.proxy.answer(410, resource=resource)
            web.proxy.cut_watches(Cut.RESET)
        load.goes_on()
        web.change(web.slice(NAME, "a2"))
        expect(web, f"{HOST}:80", "a2")
    web.proxy.wait_for_watches(4)
    assert whole_lists(web.proxy) == 4, "one list for each resource"


def test_a_new_list_deletes_objects_whose_deletion_was_missed(web: Cluster) -> None:
    more = web.web(23, "a1")
    with web.given(*more):
        web.proxy.freeze_watches()
        web.delete(*more)
        expect(web, "10.96.0.23:80", "a1")
        web.proxy.expire_watches()
        web.settle()
        expect(web, "10.96.0.23:80", UNSERVED)


def test_an_unreadable_watch_line_causes_a_new_list(web: Cluster) -> None:
    with under_load(web, HOST, "a2"):
        web.proxy.send(b'{"type":"MODIFIED","object":{"kind":\n', "services")
        web.proxy.send(b"<html>bad gateway</html>\n", "endpointslices")
        web.change(web.slice(NAME, "a2"))
        expect(web, f"{HOST}:80", "a2")
    assert any("cannot read an event watch=" in line for line in web.agent.lines())


def test_without_streaming_lists_pages_are_read(web: Cluster) -> None:
    web.proxy.refuse_initial_events()
    with under_load(web, HOST, "a2"):
        web.agent.kill()
        web.start(web.agent)
        web.change(web.slice(NAME, "a2"))
        expect(web, f"{HOST}:80", "a2")
    for resource in RESOURCES:
        assert len(asked(web.proxy, "list", resource)) == 1


@pytest.mark.parametrize(
    ("status", "retry_after", "times", "least"),
    [(500, None, 3, 1.2), (503, None, 2, 0.5), (401, None, 2, 0.5), (429, 1, 2, 1.9)],
)
def test_errors_are_retried_with_backoff(
    web: Cluster, status: int, retry_after: int | None, times: int, least: float
) -> None:
    """`least`: the minimum of seconds from the first error to the request that succeeds."""
    for resource in RESOURCES:
        web.proxy.answer(status, times, resource=resource, retry_after=retry_after)
    with under_load(web, HOST, "a2"):
        web.proxy.cut_watches(Cut.RESET)
        web.proxy.wait_for_requests(times, "watch", "endpointslices")
        web.change(web.slice(NAME, "a2"))
        expect(web, f"{HOST}:80", "a2")
    web.proxy.wait_for_watches(4)
    for resource in RESOURCES:
        at = [request.at for request in web.proxy.requests("watch", resource)]
        assert len(at) == times + 1
        assert at[-1] - at[0] >= least
    assert whole_lists(web.proxy) == 0


def test_a_failed_list_deletes_nothing_and_is_retried_with_backoff(web: Cluster) -> None:
    before = web.served()
    web.proxy.answer(500, None, verb=None)
    web.agent.kill()
    web.proxy.forget()
    web.start(web.agent, wait=False)
    for resource in RESOURCES:
        requests = web.proxy.wait_for_requests(5, None, resource)
        # backoff of 0.2, 0.4, 0.8, 1.6 seconds, with jitter from half to full
        assert requests[4].at - requests[0].at >= 1.5, "pauses grow"
    assert web.served() == before
    expect(web, f"{HOST}:80", "a1")


def test_an_incomplete_list_deletes_nothing(web: Cluster) -> None:
    """The second page never arrives, for a running agent and for one that starts."""
    web.kube.create_many(
        endpoint_slice("nobody", endpoint(f"10.250.0.{n % 250}"), name=f"nobody-{n}") for n in range(501)
    )
    web.settle()
    before = web.served()

    def cut_lists_short() -> None:
        web.proxy.refuse_initial_events()
        web.proxy.answer(500, None, verb="list", where=lambda r: "continue" in r.query)
        web.proxy.forget()

    cut_lists_short()
    web.proxy.expire_watches("endpointslices")
    web.proxy.wait_for_requests(4, "list", "endpointslices")
    assert web.served() == before
    web.agent.kill()
    cut_lists_short()
    web.start(web.agent, wait=False)
    web.proxy.wait_for_requests(4, "list", "endpointslices")
    until("the agent writes its status", web.agent.own_status)
    assert web.served() == before
    assert not web.agent.own_status()["synced"]
    expect(web, f"{HOST}:80", "a1")
    web.proxy.heal()
    web.agent.wait_synced()
    web.settle()
    assert web.served() == before
    for obj in web.kube.list("EndpointSlice")["items"]:
        if obj["metadata"]["name"].startswith("nobody-"):
            web.kube.delete("EndpointSlice", obj["metadata"]["name"])


def test_a_stream_without_its_end_bookmark_deletes_nothing(web: Cluster) -> None:
    before = web.served()
    web.proxy.rewrite_lines(lambda _, line: None if b"initial-events-end" in line else line)
    web.agent.kill()
    web.proxy.forget()
    web.start(web.agent, wait=False)
    web.proxy.wait_for_watches(4)
    until("the agent has started", web.agent.own_status)
    assert not web.agent.own_status()["synced"]
    assert web.served() == before

    def synced_by_pages() -> bool:
        """Whether all sources are synced, by pages if their stream began and broke off. A stream
        may not have begun.
        """
        if not all(source["synced"] for source in web.agent.own_status()["sources"]):
            web.proxy.cut_watches(Cut.RESET)
            return False
        return True

    until("all are listed by pages", synced_by_pages)
    assert len(asked(web.proxy, "list")) == 4
    assert web.served() == before


def test_changes_arrive_after_a_network_outage(web: Cluster) -> None:
    """The link is down without a RST or an ICMP error; changes arrive once it is up again."""
    link = f"n{web.lab.nodes[0].number}"
    with under_load(web, HOST, "a2", "host-1") as load:
        ip(f"link set {link} down", netns=web.lab.fabric)
        web.kube.replace(web.slice(NAME, "a3"))
        load.goes_on(100)
        ip(f"link set {link} up", netns=web.lab.fabric)
        web.settle()
        expect(web, f"{HOST}:80", "a3")


def test_a_silent_watch_is_resumed(apiserver: ApiServer, faults: FaultProxy, tmp_path: Path) -> None:
    """A proxy in between has lost the server. The agent's time-out is 90 s; here it is 1 s."""
    said: queue.SimpleQueue[Event] = queue.SimpleQueue()
    access = find_access(faults.kubeconfig(tmp_path / "kubeconfig"))
    reflector = Reflector(source.Cluster(access), SLICES, said.put, silence_timeout=1.0)
    with apiserver.kube() as kube:
        kube.clear()
        reflector.start()
        try:
            while not isinstance(said.get(timeout=PATIENCE), Synced):
                pass
            faults.wait_for_watches(1)
            faults.forget()
            faults.freeze_watches()
            kube.create(endpoint_slice("web", endpoint("10.1.0.1")))
            event = said.get(timeout=PATIENCE)
        finally:
            reflector.stop()
    assert isinstance(event, Upsert)
    assert event.key.name == "web-ipv4"
    assert not any(map(streams, faults.requests())), "the watch resumes at its version, without a new list"


@pytest.mark.parametrize("overtakes", [False, True], ids=["", "overtakes"])
def test_an_etcd_restored_from_a_backup_restores_objects(
    programs: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, overtakes: bool
) -> None:
    """Objects created, changed or deleted since the backup return to their state in it. One warning
    is logged for all watches. Later changes arrive although their versions were used before.
    `overtakes`: when the watches reconnect, the server's version is higher than theirs again.
    """
    known: dict[ObjectKey, object] = {}

    def put(event: Event) -> None:
        match event:
            case Upsert():
                known[event.key] = event.object
            case Delete():
                known.pop(event.key, None)

    def slices() -> dict[str, str]:
        """Name of a slice → the address of its only endpoint."""
        found = {key.name: obj for key, obj in known.items() if isinstance(obj, EndpointSlice)}
        return {name: format_addr(obj.endpoints[0].address) for name, obj in found.items() if name.startswith("web")}

    def slice_(name: str, host: int) -> dict[str, Any]:
        return endpoint_slice(name, endpoint(f"10.1.0.{host}"), name=name)

    def config_map() -> dict[str, Any]:
        metadata = {"generateName": "unwatched-", "namespace": "default"}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}

    with ApiServer() as server, server.kube() as kube, FaultProxy(server) as proxy:
        address = proxy if overtakes else server
        cluster = source.Cluster(find_access(address.kubeconfig(tmp_path / "kubeconfig")))
        reflectors = [Reflector(cluster, resource, put) for resource in (SERVICES, SLICES)]
        kube.create(slice_("web-kept", 1))
        kube.create(slice_("web-deleted", 2))
        server.back_up()
        for reflector in reflectors:
            reflector.start()
        try:
            until("both are listed", lambda: all(each.status().synced for each in reflectors))
            assert slices() == {"web-kept": "10.1.0.1", "web-deleted": "10.1.0.2"}
            kube.create(slice_("web-lost", 3))
            kube.replace(slice_("web-kept", 4))
            kube.delete("EndpointSlice", "web-deleted")
            changed = {"web-kept": "10.1.0.4", "web-lost": "10.1.0.3"}
            until("changes arrive", lambda: slices() == changed)
            lost = max(int(each.status().resource_version) for each in reflectors)
            proxy.refuse()
            server.restore()
            while overtakes and int(kube.list("ConfigMap")["metadata"]["resourceVersion"]) <= lost:
                kube.create(config_map())
            proxy.heal()
            restored = {"web-kept": "10.1.0.1", "web-deleted": "10.1.0.2"}
            until("the state of the backup is back", lambda: slices() == restored)
            kube.create(slice_("web-new", 5))
            until("later changes arrive", lambda: slices() == {**restored, "web-new": "10.1.0.5"})
        finally:
            for reflector in reflectors:
                reflector.stop()
    warnings = [line for line in caplog.messages if "version went back from" in line]
    assert len(warnings) == 1, warnings

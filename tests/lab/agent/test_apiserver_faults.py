# SPDX-License-Identifier: Apache-2.0
"""The API server fails, or says what cannot be used: Services stay served, and changes arrive.

Each test injects a fault into the agent's connections, changes an object meanwhile, and waits until
the agent has applied the change (settle()). A failure must not delete anything; bad input gives one
line that says what, where and what to do. Which requests follow a fault, and when, is tested in
tests/values/source.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kbpf
from kbpf.cli import app
from kbpf.model.address import format_addr
from kbpf.model.events import Delete, Event, ObjectKey, Upsert
from kbpf.model.objects import EndpointSlice
from kbpf.source.api import credentials as source
from kbpf.source.api.kubeconfig import find_access
from kbpf.source.api.reflector import Reflector
from kbpf.source.api.resource import SERVICES, SLICES
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice
from tests.support.faults.fault_wire import Request
from tests.support.faults.faults import Cut, FaultProxy
from tests.support.features import lacking
from tests.support.lab.dial import UNSERVED, Dial, check
from tests.support.lab.lab import ip, until
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
    faulty.agent.code = None
    faulty.proxy.heal()
    faulty.start(faulty.agent)
    with faulty.given(*faulty.web(20, "a1")):
        faulty.proxy.wait_for_watches(4)
        faulty.proxy.forget()
        yield faulty


def expect(cluster: Cluster, to: str, outcome: str) -> None:
    check(cluster, Dial("current state", "a3", to, outcome))


def whole_lists(proxy: FaultProxy) -> int:
    """How many requests asked for a complete list, as pages or as a streaming watch. Lists with
    limit=1 only fetch the version and the Node count.
    """
    pages = [one for one in proxy.requests("list") if one.query.get("limit") != "1"]
    return len(pages) + sum("sendInitialEvents" in one.query for one in proxy.requests("watch"))


def is_unwell(cluster: Cluster) -> bool:
    """Whether the running agent reports an error for every source."""
    status = cluster.agent.own_status()
    return status is not None and all(source["error"] for source in status["sources"])


def complaints(cluster: Cluster) -> list[str]:
    """The log lines above INFO, without those about a feature that this kernel lacks."""
    lacks = "iterator of socket storage" if lacking("socket_iterator") else " INFO "
    return [line for line in cluster.agent.lines() if " INFO " not in line and lacks not in line]


# ---- outages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [FaultProxy.refuse, FaultProxy.hang], ids=["refused", "hung"])
def test_an_outage_deletes_nothing_and_changes_arrive_after_it(web: Cluster, fault: Callable[[FaultProxy], None]):
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


def test_an_ended_watch_resumes_at_its_version(web: Cluster):
    for how, who in zip(Cut, ("a2", "a3", "a1", "a2"), strict=True):
        web.settle()
        assert web.proxy.cut_watches(how) == 4, how
        web.change(web.slice(NAME, who))
        expect(web, f"{HOST}:80", who)
        web.proxy.wait_for_watches(4)
        assert whole_lists(web.proxy) == 0, how


def test_an_expired_version_causes_one_new_list_of_each_resource(web: Cluster):
    with under_load(web, HOST, "a2") as load:
        web.proxy.expire_watches()
        load.goes_on()
        web.change(web.slice(NAME, "a2"))
        expect(web, f"{HOST}:80", "a2")
        web.proxy.wait_for_watches(4)
        assert whole_lists(web.proxy) == 4
        for resource in RESOURCES:
            web.proxy.answer(410, resource=resource)
        web.proxy.cut_watches(Cut.RESET)
        load.goes_on()
        web.change(web.slice(NAME, "a3"))
        expect(web, f"{HOST}:80", "a3")
    web.proxy.wait_for_watches(4)
    assert whole_lists(web.proxy) == 8


def test_a_new_list_deletes_objects_whose_deletion_was_missed(web: Cluster):
    more = web.web(23, "a1")
    with web.given(*more):
        web.proxy.freeze_watches()
        web.delete(*more)
        expect(web, "10.96.0.23:80", "a1")
        web.proxy.expire_watches()
        web.settle()
        expect(web, "10.96.0.23:80", UNSERVED)


def test_changes_arrive_after_a_network_outage(web: Cluster):
    """The link is down without a RST or an ICMP error; changes arrive once it is up again."""
    link = f"n{web.lab.nodes[0].number}"
    with under_load(web, HOST, "a2", "host-1") as load:
        ip(f"link set {link} down", netns=web.lab.fabric)
        web.kube.replace(web.slice(NAME, "a3"))
        load.goes_on(100)
        ip(f"link set {link} up", netns=web.lab.fabric)
        web.settle()
        expect(web, f"{HOST}:80", "a3")


def test_an_etcd_restored_from_a_backup_restores_objects(
    programs: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Objects created, changed or deleted since the backup return to their state in it. One warning
    is logged for all watches. Later changes arrive although their versions were used before.
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

    with ApiServer() as server, server.kube() as kube:
        cluster = source.Cluster(find_access(server.kubeconfig(tmp_path / "kubeconfig")))
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
            server.restore()
            restored = {"web-kept": "10.1.0.1", "web-deleted": "10.1.0.2"}
            until("the state of the backup is back", lambda: slices() == restored)
            kube.create(slice_("web-new", 5))
            until("later changes arrive", lambda: slices() == {**restored, "web-new": "10.1.0.5"})
        finally:
            for reflector in reflectors:
                reflector.stop()
    warnings = [line for line in caplog.messages if "version went back from" in line]
    assert len(warnings) == 1, warnings


# ---- permissions and objects ---------------------------------------------------------------------


def test_missing_permissions_are_one_line_each_and_granting_them_helps(web: Cluster):
    """One line for each resource, once. Granting what it says helps without a restart."""
    web.agent.stop()
    web.proxy.forget()
    web.start(web.agent, wait=False, user="nobody")
    for resource in ("services", "endpointslices", "nodes"):
        web.proxy.wait_for_requests(3, None, resource)
        line = refusal(web, resource)
        assert web.proxy.url in line
        hint = f"grant list and watch on {resource} to nobody (ClusterRole system:node-proxier)"
        assert hint in line
    expect(web, f"{HOST}:80", "a1")
    grant(web)
    try:
        web.agent.wait_synced()
        web.change(web.slice(NAME, "a2"))
        expect(web, f"{HOST}:80", "a2")
        # Kubernetes' own role does not include Pods; Services are served without them.
        until(
            "the only problem is about Pods",
            lambda: [s["name"] for s in web.agent.status()["sources"] if s["error"]] == ["pods"],
        )
        line = refusal(web, "pods")
        assert "grant list and watch on pods to nobody (manifests/components/socket-lb-label)" in line
        assert line.partition("error=")[2].strip("'\"").startswith("cannot list pods: 403")
        said = web.agent.status()
        assert (said["synced"], said["error"]) == (True, "")
        assert not {s["name"]: s["synced"] for s in said["sources"]}["pods"]
        command = ["inspect", "status", "--pin-dir", str(web.agent.pin_dir)]
        # It fails while the last heartbeat of the agent is old.
        until("the status is good", lambda: app.call(command) == 0)
    finally:
        web.kube.request("DELETE", f"{BINDINGS}/nobody")


def refusal(cluster: Cluster, resource: str) -> str:
    """The line about a resource that may not be listed. It is repeated after a minute."""
    first, *repeats = [line for line in complaints(cluster) if f"list {resource}: 403" in line]
    assert all(int(seconds) >= 60 for line in repeats for seconds in AFTER.findall(line)), repeats
    return first


AFTER = re.compile(r" for=(\d+)s ")


BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"


def grant(cluster: Cluster) -> None:
    group = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "nobody"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "system:node-proxier"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "nobody"}],
    }
    kind = {"Content-Type": "application/json"}
    status, body = cluster.kube.request("POST", BINDINGS, json.dumps(binding).encode(), kind)
    assert status == 201, body


def test_a_malformed_service(web: Cluster):
    """A new Service is not served, a known one keeps its last state; once repaired it is used."""

    def hook(_: Request, obj: Object) -> Object:
        if obj["metadata"]["name"] == "web-21" and "spec" in obj:
            obj["spec"]["ports"][0]["port"] = "eighty"
        return obj

    said = "Service default/web-21: spec.ports[0].port: expected an integer, got a string"
    web.proxy.rewrite_objects(hook)
    with web.given(*web.web(21, "a2")):
        assert len([line for line in complaints(web) if said in line]) == 1, complaints(web)
        until("it is in the status", lambda: any(said in problem for problem in web.agent.status()["problems"]))
        expect(web, "10.96.0.21:80", UNSERVED)
        web.change(web.slice(NAME, "a1 a2"))
        expect(web, f"{HOST}:80", "a1 a2")
        web.proxy.heal()
        web.change(web.web(21, "a2", labels={"repaired": "yes"})[0])
        expect(web, "10.96.0.21:80", "a2")
        until("no problem is reported", lambda: not web.agent.status()["problems"])
        web.proxy.rewrite_objects(hook)
        web.change(web.web(21, "a2", labels={"repaired": "no"})[0])
        expect(web, "10.96.0.21:80", "a2")
        web.proxy.heal()


# ---- starts that fail ----------------------------------------------------------------------------


def fails(cluster: Cluster, code: int, *pattern: str) -> None:
    """The started agent exits with this status and one line; Services stay served."""
    assert cluster.agent.wait_ended() == code
    *_, line = complaints(cluster)
    assert re.search(".*".join(pattern), line), line
    expect(cluster, f"{HOST}:80", "a1")


def test_wrong_settings_are_errors(web: Cluster, tmp_path: Path):
    """More settings: the tests named test_bad_inputs.py."""
    for setting, value, code, *said in (
        ("--kubeconfig", "/nowhere", 1, " ERROR kbpf ", "cannot read the kubeconfig", "/nowhere"),
        ("--cgroup", str(tmp_path), 2, "not a cgroup v2 folder"),
        ("--max-backends", "many", 2, "many"),
    ):
        if web.agent.is_running:
            web.agent.stop()
        web.agent.start(wait=False, extra=("--kubeconfig", str(web.kubeconfig()), setting, value))
        fails(web, code, *said)


def test_programs_that_do_not_compile_are_one_error(web: Cluster, tmp_path: Path):
    shutil.copytree(Path(kbpf.__file__).parent, tmp_path / "kbpf")
    with (tmp_path / "kbpf/bpf/lookup.h").open("a") as header:
        header.write("not_a_type nonsense;\n")
    web.agent.stop()
    web.agent.code = tmp_path
    web.start(web.agent, wait=False)
    fails(web, 1, "ERROR kbpf cannot compile", "not_a_type", r"lookup\.h:\d+")
    assert len(complaints(web)) == 1

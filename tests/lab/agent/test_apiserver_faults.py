# SPDX-License-Identifier: Apache-2.0
"""The API server cannot be reached, loses its latest writes, or refuses: Services stay served, and changes arrive.

Which requests follow a fault, and when, is tested in tests/values/source; random faults of watches
and lists in tests/fuzz/inputs/test_api_histories.py.
"""

import re
from collections.abc import Iterator

import pytest
import yaml

from kbpf.cli import app
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube import path_of
from tests.support.lab.dial import UNSERVED, Dial, check
from tests.support.lab.lab import ip, until
from tests.support.lab.load import under_load

HOST, NAME = "10.96.0.20", "web-20"


@pytest.fixture
def web(cluster: Cluster) -> Iterator[Cluster]:
    with cluster.given(*cluster.web(20, "a1")):
        yield cluster


def expect(cluster: Cluster, to: str, outcome: str) -> None:
    check(cluster, Dial("current state", "a3", to, outcome))


def is_unwell(cluster: Cluster) -> bool:
    """Whether the running agent reports an error for every source."""
    status = cluster.agent.own_status()
    return status is not None and all(source["error"] for source in status["sources"])


def test_an_outage_deletes_nothing_and_changes_arrive_after_it(web: Cluster):
    """The link is down, without a RST or an ICMP error. The agent is killed and started meanwhile."""
    link, gone = f"n{web.lab.nodes[0].number}", web.web(21, "a2")
    web.create(*gone)
    web.settle()
    before = web.served()
    with under_load(web, HOST, "a2", "host-1") as load:
        ip(f"link set {link} down", netns=web.lab.fabric)
        web.kube.replace(web.slice(NAME, "a3"))
        web.delete(*gone)
        web.create(*web.web(22, "a1"))
        load.goes_on(100)
        web.agent.kill()
        web.start(web.agent, wait=False)
        until("the agent reports the outage", lambda: is_unwell(web))
        load.goes_on()
        assert not web.agent.own_status()["synced"]
        assert web.served() == before, "nothing is deleted before the first list"
        ip(f"link set {link} up", netns=web.lab.fabric)
        web.agent.wait_synced()
        web.settle()
        expect(web, f"{HOST}:80", "a3")
        expect(web, "10.96.0.21:80", UNSERVED)
        expect(web, "10.96.0.22:80", "a1")
    web.delete(*web.web(22, ""))


def test_an_etcd_restored_from_a_backup_restores_objects(web: Cluster):
    """Objects created, changed or deleted since the backup return to their state in it. One warning
    is logged for all watches. Later changes arrive although their versions were used before.
    """
    with web.given(*web.web(21, "a2")):
        web.api.back_up()
        before = web.served()
        web.create(*web.web(22, "a1"))
        web.delete(*web.web(21, ""))
        web.change(web.slice(NAME, "a2"))
        assert web.served() != before
        web.api.restore()
        until("the state of the backup is back", lambda: web.served() == before)
        web.change(web.slice(NAME, "a3"))
        expect(web, f"{HOST}:80", "a3")
    warnings = [line for line in web.agent.lines() if "version went back from" in line]
    assert len(warnings) == 1, warnings


BINDING = """
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: nobody}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:node-proxier}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: nobody}]
"""


def test_missing_permissions_are_one_line_each_and_granting_them_helps(web: Cluster):
    """One line for each resource. Granting what it says helps without a restart."""
    web.agent.stop()
    web.start(web.agent, wait=False, user="nobody")
    try:
        for resource in ("services", "endpointslices", "nodes"):
            line = refusal(web, resource)
            assert web.api.url in line
            assert f"grant list and watch on {resource} to nobody (ClusterRole system:node-proxier)" in line
        expect(web, f"{HOST}:80", "a1")
        web.create(yaml.safe_load(BINDING))
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
        web.kube.request("DELETE", path_of("ClusterRoleBinding", name="nobody"))
        web.agent.stop()
        web.start(web.agent)


def refusal(cluster: Cluster, resource: str) -> str:
    """The line about a resource that may not be listed. It is repeated after a minute."""

    def refused() -> list[str]:
        return [line for line in cluster.agent.lines() if f"list {resource}: 403" in line]

    first, *repeats = until(f"the agent may not list {resource}", refused)
    assert all(int(seconds) >= 60 for line in repeats for seconds in AFTER.findall(line)), repeats
    return first


AFTER = re.compile(r" for=(\d+)s ")

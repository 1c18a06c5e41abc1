# SPDX-License-Identifier: Apache-2.0
"""manifests/ with a real API server: it accepts every object, grants the account the listed rights
and no others, and applying an overlay turns kubeadm's kube-proxy into kbpf.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kbpf.model.events import REQUIRED_KINDS, Event, Synced
from kbpf.source.api.credentials import Cluster
from kbpf.source.api.kubeconfig import find_access
from kbpf.source.api.reflector import Reflector
from kbpf.source.api.resource import SERVICES, SLICES, own_node_resource
from tests.host.test_manifests import VALUES, with_component
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kubeadm import Kubeadm
from tests.support.cluster.kubectl import MANIFESTS, OVERLAYS, Kubectl, call, documents, kustomize
from tests.support.lab.lab import until

VAGRANT = Path(__file__).parents[3] / "vagrant"
NAMES = sorted(path.name for path in OVERLAYS.iterdir())
SPACE = "kube-system"
ACCOUNT = f"system:serviceaccount:{SPACE}:kbpf"


@pytest.fixture(scope="module")
def admin(apiserver: ApiServer, kubectl: Path, tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    return Kubectl(kubectl, apiserver, tmp_path_factory.mktemp("kubectl"))


@pytest.mark.parametrize("name", [*(f"overlays/{name}" for name in NAMES), "cleanup", "prepull"])
def test_the_server_accepts_each_overlay(admin: Kubectl, kubectl: Path, name: str):
    folder = MANIFESTS / name
    said = admin("--warnings-as-errors", "apply", "--dry-run=server", "-k", str(folder))
    assert len(said.splitlines()) == len(kustomize(kubectl, folder))
    assert all(line.endswith("(server dry run)") for line in said.splitlines()), said


@pytest.mark.parametrize("name", VALUES)
def test_the_server_accepts_the_charts_objects(admin: Kubectl, helm: Path, tmp_path: Path, name: str):
    values = [f"--values={MANIFESTS / 'chart' / file}" for file in VALUES[name]]
    command = [str(helm), "template", "kbpf", str(MANIFESTS / "chart"), "--kube-version=1.37"]
    text = call([*command, "-n", SPACE, *values], tmp_path)
    said = admin("--warnings-as-errors", "apply", "--dry-run=server", "-f", "-", stdin=text)
    assert len(said.splitlines()) == len(documents(text))
    assert all(line.endswith("(server dry run)") for line in said.splitlines()), said


# ---- rights ------------------------------------------------------------------------------


@pytest.fixture
def beside(admin: Kubectl) -> Iterator[None]:
    """The overlay side-by-side, whose account has exactly the rights of the base."""
    folder = str(OVERLAYS / "side-by-side")
    admin("apply", "-k", folder)
    yield
    admin("delete", "-k", folder, "--ignore-not-found", "--wait=false")


GRANTED = {
    "services": {"list", "watch"},
    "nodes": {"list", "watch"},
    "endpointslices.discovery.k8s.io": {"list", "watch"},
    "events.events.k8s.io": {"create"},
}
ANYBODY = re.compile(r"selfsubject\S+\.(authorization|authentication)\.k8s\.io|clustertrustbundles\..*")
"""What every ServiceAccount may do: review its own rights, and read public paths."""


def test_the_account_has_exactly_the_documented_rights(admin: Kubectl, beside: None):
    text = admin("auth", "can-i", "--list", f"--as={ACCOUNT}", "-n", SPACE)
    rows = {}
    for line in text.splitlines()[1:]:
        found = re.fullmatch(r"(\S+)?\s+\[(.*?)\]\s+\[(.*?)\]\s+\[(.*?)\]", line)
        assert found is not None, line
        resource, urls, names, verbs = found.groups()
        if resource and not ANYBODY.fullmatch(resource):
            assert (urls, names) == ("", "")
            rows[resource] = set(verbs.split())
    assert rows == GRANTED


def test_the_agents_sources_sync_with_these_rights(admin: Kubectl, beside: None, apiserver: ApiServer, tmp_path: Path):
    config = json.loads(apiserver.kubeconfig(tmp_path / "config").read_text())
    with apiserver.kube() as kube:
        config["users"][0]["user"]["token"] = kube.token("kbpf", SPACE)
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    heard: list[Event] = []
    cluster = Cluster(find_access(path))
    watched = (SERVICES, SLICES, own_node_resource("n"))
    sources = [Reflector(cluster, r, heard.append) for r in watched]
    try:
        for source in sources:
            source.start()
        until(
            "all have synced",
            lambda: {e.kind for e in heard if isinstance(e, Synced)} == REQUIRED_KINDS,
        )
    finally:
        for source in sources:
            source.stop()


@pytest.mark.parametrize("component", ["mesh-pods", "socket-lb-label"])
def test_the_component_grants_watching_pods(admin: Kubectl, kubectl: Path, tmp_path: Path, component: str):
    folder = with_component("side-by-side", component, tmp_path)
    admin("apply", "-k", str(folder))
    try:
        for verb in ("list", "watch"):
            until(f"it may {verb}", lambda verb=verb: admin.may(verb, "pods", ACCOUNT))
    finally:
        admin("delete", "-k", str(folder), "--ignore-not-found", "--wait=false")


ORDERS = [("side-by-side", "kubeadm"), ("kubeadm", "side-by-side")]


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_trial_and_drop_in_do_not_change_each_others_objects(admin: Kubectl, kubectl: Path, first: str, second: str):
    """In either order: applying the second changes no object of the first, and `delete -k` of the
    first changes none of the second. Each account keeps its rights.
    """
    accounts = {"side-by-side": "kbpf", "kubeadm": "kube-proxy"}
    try:
        admin("apply", "-k", str(OVERLAYS / first))
        before = versions(admin, kubectl, first)
        admin("apply", "-k", str(OVERLAYS / second))
        assert versions(admin, kubectl, first) == before
        for name, account in accounts.items():
            until(f"{name} has its rights", lambda account=account: may_watch(admin, account))
        before = versions(admin, kubectl, second)
        admin("delete", "-k", str(OVERLAYS / first), "--wait=false")
        until(f"{first} has lost its rights", lambda: not may_watch(admin, accounts[first]))
        assert may_watch(admin, accounts[second])
        assert versions(admin, kubectl, second) == before
    finally:
        for name in (first, second):
            folder = str(OVERLAYS / name)
            admin("delete", "-k", folder, "--ignore-not-found", "--wait=false")


def may_watch(admin: Kubectl, account: str) -> bool:
    """Whether the account may watch Nodes. Deleting an overlay revokes all that it grants."""
    user = f"--as=system:serviceaccount:{SPACE}:{account}"
    return admin("auth", "can-i", "--list", user).count("nodes ") >= 1


def versions(admin: Kubectl, kubectl: Path, name: str) -> dict[tuple[str, str], tuple[str, str]]:
    """By kind and name, the UID and the resourceVersion of each object of an overlay."""
    made = {}
    for each in kustomize(kubectl, OVERLAYS / name):
        key = each["kind"], each["metadata"]["name"]
        (found,) = admin.objects("-n", SPACE, "get", "/".join(key))
        made[key] = found["metadata"]["uid"], found["metadata"]["resourceVersion"]
    return made


# ---- in the place of kubeadm's kube-proxy ------------------------------------------------


@pytest.fixture
def kube_proxy_of_kubeadm(admin: Kubectl, kubeadm: Path, apiserver: ApiServer, tmp_path: Path) -> Iterator[None]:
    """kube-proxy's objects, made by kubeadm."""
    program = Kubeadm(kubeadm, apiserver, tmp_path)
    program.install_kube_proxy()
    yield
    program.remove_kube_proxy(admin)


def test_apply_turns_kubeadms_kube_proxy_into_kbpf(admin: Kubectl, kubectl: Path, kube_proxy_of_kubeadm: None):
    """The same DaemonSet gets another template, so that the controller rolls it out; the ConfigMap
    is untouched. `kubectl rollout restart` changes the template again.
    """
    folder = str(OVERLAYS / "kubeadm")
    try:
        before = {each["kind"]: each for each in objects(admin)}
        said = admin("apply", "-k", folder)
        assert "daemonset.apps/kube-proxy configured" in said, "changed, not created"
        after = {each["kind"]: each for each in objects(admin)}
        assert after["ConfigMap"] == before["ConfigMap"]
        one, other = (each["DaemonSet"]["metadata"] for each in (before, after))
        assert one["uid"] == other["uid"]
        assert one["generation"] < other["generation"]

        (wanted,) = (e for e in kustomize(kubectl, OVERLAYS / "kubeadm") if e["kind"] == "DaemonSet")
        assert_has(after["DaemonSet"]["spec"]["template"], wanted["spec"]["template"])
        (container,) = after["DaemonSet"]["spec"]["template"]["spec"]["containers"]
        assert container["command"][0] == "kbpf"
        assert container["securityContext"]["privileged"] is False

        admin("-n", SPACE, "rollout", "restart", "ds", "kube-proxy")
        (last,) = admin.objects("-n", SPACE, "get", "ds", "-l", "k8s-app=kube-proxy")
        assert last["metadata"]["generation"] == other["generation"] + 1
        assert "unchanged" in admin("apply", "-k", folder), "applying again changes nothing"
    finally:
        admin("delete", "-k", folder, "--ignore-not-found", "--wait=false")


def test_vagrants_kbpf_script_installs_the_new_cluster_overlay(
    admin: Kubectl, kubectl: Path, apiserver: ApiServer, tmp_path: Path
):
    """kbpf.sh does what docs/install.md says for a cluster without kube-proxy."""
    config = apiserver.kubeconfig(tmp_path / "config", "admin")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "KUBECTL": f"{kubectl} --kubeconfig={config}",
    }
    script = VAGRANT / "kubeadm" / "provision" / "kbpf.sh"
    server, pods = "https://192.0.2.1:6443", "10.9.0.0/16,fd00:9::/56"
    try:
        subprocess.run(["sh", script, server, pods, VAGRANT.parent], env=environment, check=True)
        (files,) = admin.objects("-n", SPACE, "get", "configmap/kube-proxy")
        reached = yaml.safe_load(files["data"]["kubeconfig.conf"])
        assert reached["clusters"][0]["cluster"]["server"] == server
        assert yaml.safe_load(files["data"]["config.conf"])["clusterCIDR"] == pods
        (found,) = admin.objects("-n", SPACE, "get", "ds/kube-proxy")
        assert found["spec"]["template"]["spec"]["containers"][0]["command"][0] == "kbpf"
    finally:
        folder = str(OVERLAYS / "kubeadm-new")
        admin("delete", "-k", folder, "--ignore-not-found", "--wait=false")


def objects(admin: Kubectl) -> list[dict]:
    names = ["serviceaccount/kube-proxy", "configmap/kube-proxy", "daemonset/kube-proxy"]
    return admin.objects("-n", SPACE, "get", *names)


def assert_has(found: object, wanted: object, where: str = "template") -> None:
    """Checks that `found` contains `wanted`. The server adds defaults and keeps foreign fields."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict), where
        for key, value in wanted.items():
            assert key in found, f"{where}.{key}"
            assert_has(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, list) and wanted and isinstance(wanted[0], dict) and "name" in wanted[0]:
        rows = {(each["name"], each.get("mountPath")): each for each in found}  # type: ignore
        for value in wanted:
            assert_has(rows[value["name"], value.get("mountPath")], value, f"{where}[{value['name']}]")
    else:
        assert found == wanted, where

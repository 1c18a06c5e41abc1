# SPDX-License-Identifier: Apache-2.0
"""A real kubeadm: its kube-proxy's objects compared with ours, replaced by ours, and restored."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.build import go_build
from tests.support.build.programs import PREVIOUS
from tests.support.cluster import kubeadm as support
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Object
from tests.support.cluster.kubeadm import ControlPlaneNode, Kubeadm
from tests.support.cluster.kubectl import OVERLAYS, Kubectl, call, copy_of_manifests, kustomize
from tests.support.lab.lab import until
from tests.support.runtime import docs

Objects = dict[tuple[str, str], Object]
"""By kind and name."""
SPACE = "kube-system"
PODS = "10.244.0.0/16,fd00:10:244::/56"
ENDPOINT = "cluster.example:6443"
OURS = {("ClusterRole", "kbpf"), ("ClusterRoleBinding", "kbpf")}
"""Rights that kubeadm's role for kube-proxy lacks: Pods (docs/operate.md)."""


UPGRADES = sorted(
    match.groups()
    for span in docs.spans("docs/install.md")
    if (match := re.fullmatch(r"kubeadm upgrade (\w+).* --skip-phases=(\S+)", span))
)


def test_kubeadm_upgrade_has_the_skipped_phases(kubeadm: Path):
    """docs/install.md: the phases that its commands skip exist."""
    assert [command for command, _ in UPGRADES] == ["apply", "node"]
    for command, phase in UPGRADES:
        assert "--skip-phases" in call([str(kubeadm), "upgrade", command, "--help"], Path("/"))
        words = [str(kubeadm), "upgrade", command, "phase", *phase.split("/"), "--help"]
        assert "Upgrade the kube-proxy addon" in call(words, Path("/"))


@pytest.fixture
def made(kubeadm: Path, apiserver: ApiServer, tmp_path) -> Objects:
    """The objects that kubeadm prints, by kind and name."""
    return named(Kubeadm(kubeadm, apiserver, tmp_path, endpoint=ENDPOINT, pods=PODS).kube_proxy())


@pytest.fixture
def ours(kubectl: Path, tmp_path) -> Objects:
    """The objects of the overlay for a cluster without kube-proxy, as an operator fills it in."""
    manifests = copy_of_manifests(tmp_path / "ours", f"https://{ENDPOINT}", PODS)
    return named(kustomize(kubectl, manifests / "overlays" / "kubeadm-new"))


def named(objects: list[Object]) -> Objects:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def said(value: Any) -> Any:
    """The value without nulls, status and a subject's default API group."""
    if isinstance(value, dict):
        rbac = {"apiGroup": "rbac.authorization.k8s.io"} if value.get("kind") == "Group" else {}
        rows = {key: said(each) for key, each in value.items() if key != "status"}
        return rbac | {key: each for key, each in rows.items() if each is not None}
    return [said(each) for each in value] if isinstance(value, list) else value


def test_names_accounts_and_rights_equal_kubeadms(made: Objects, ours: Objects):
    assert ours.keys() == made.keys() | OURS
    others = made.keys() - {("DaemonSet", "kube-proxy"), ("ConfigMap", "kube-proxy")}
    assert sorted(kind for kind, _ in others) == ["ClusterRoleBinding", "Role", "RoleBinding", "ServiceAccount"]
    for key in others:
        assert said(ours[key]) == said(made[key])


def test_the_config_map_equals_kubeadms_in_effect(made: Objects, ours: Objects):
    """Ours sets fewer fields, to equal values; the others are zero in kubeadm's."""
    theirs, own = (each["ConfigMap", "kube-proxy"] for each in (made, ours))
    assert own["metadata"]["labels"] == theirs["metadata"]["labels"]
    assert own["data"].keys() == theirs["data"].keys()
    kube = [yaml.safe_load(each["data"]["kubeconfig.conf"]) for each in (theirs, own)]
    assert kube[0] == kube[1]
    files = [yaml.safe_load(each["data"]["config.conf"]) for each in (theirs, own)]
    for part in ("clientConnection", "iptables", "nftables"):
        theirs, own = (each[part] for each in files)
        assert theirs | own == theirs
        files[1][part] = theirs
        assert not any(set_fields({k: v for k, v in theirs.items() if k not in own}))
    assert files[0] | files[1] == files[0]
    assert not any(set_fields({k: v for k, v in files[0].items() if k not in files[1]}))


def set_fields(value: Any) -> Iterator[object]:
    """All values in it, nested ones included, that are not zero."""
    if isinstance(value, dict):
        for each in value.values():
            yield from set_fields(each)
    elif value not in (None, "", "0", "0s", 0, False):
        yield value


def test_the_texts_of_other_tests_equal_kubeadms(made: Objects):
    """The texts of tests/support/cluster/kubeadm.py are literally those of kubeadm."""
    data = made["ConfigMap", "kube-proxy"]["data"]
    account = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    assert data == {
        "config.conf": support.config(PODS).rstrip("\n"),
        "kubeconfig.conf": support.kubeconfig(f"https://{ENDPOINT}", account).rstrip("\n"),
    }


def test_the_daemonset_has_the_metadata_and_settings_of_kubeadms(made: Objects, ours: Objects):
    """Names, labels, nodes, priority, account, file, flags and environment are equal; the rest of
    the template is ours. Our environment has one more variable, the file's path for commands in the
    pod.
    """
    more = {"name": "KBPF_CONFIG", "value": "/var/lib/kube-proxy/config.conf"}

    def facts(objects: Objects) -> Object:
        found = objects["DaemonSet", "kube-proxy"]
        spec = found["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        keys = ("priorityClassName", "hostNetwork", "serviceAccountName", "tolerations", "nodeSelector")
        return {
            "meta": found["metadata"],
            "selector": found["spec"]["selector"],
            "labels": found["spec"]["template"]["metadata"]["labels"],
            "update": found["spec"]["updateStrategy"]["type"],
            "name": container["name"],
            "arguments": [word for word in container["command"] if word.startswith("--")],
            "env": [each for each in container["env"] if each != more],
            "files": {
                mount["mountPath"]: volumes[mount["name"]]["configMap"]
                for mount in container["volumeMounts"]
                if "configMap" in volumes[mount["name"]]
            },
            **{key: spec[key] for key in keys},
        }

    assert said(facts(ours)) == said(facts(made))


@pytest.fixture
def admin(kubeadm: Path, kubectl: Path, apiserver: ApiServer, tmp_path) -> Iterator[Kubectl]:
    """kubectl as administrator; removes kbpf, kube-proxy and the node after the test."""
    made = Kubectl(kubectl, apiserver, tmp_path)
    yield made
    made("delete", "-k", str(OVERLAYS / "kubeadm"), *GONE)
    made("-n", SPACE, "delete", "cm", "kbpf-settings", *GONE)
    name = ControlPlaneNode.name
    made("-n", SPACE, "delete", f"node/{name}", f"pod/kube-apiserver-{name}", "--force", *GONE)
    Kubeadm(kubeadm, apiserver, tmp_path).remove_kube_proxy(made)


GONE = ("--ignore-not-found", "--wait=false")


def upgrade(
    program: Path, server: ApiServer, admin: Kubectl, folder: Path, patches: Path | None = None
) -> ControlPlaneNode:
    """A control plane node on which this kubeadm upgrades the cluster."""
    (folder / "none").mkdir()
    node = ControlPlaneNode(program, server, folder, patches or folder / "none")
    admin("apply", "-f", "-", stdin=node.objects)
    return node


@pytest.fixture
def patches(kubectl: Path, tmp_path) -> Path:
    """The folder that the lines of docs/install.md make."""
    folder = tmp_path / "patches"
    block = PATCH_BLOCK.replace("/etc/kubernetes/patches", str(folder))
    for line in block.splitlines()[:2]:
        call(["bash", "-c", line.replace("kubectl", str(kubectl), 1)], docs.ROOT)
    return folder


(PATCH_BLOCK,) = [text for text in docs.blocks("docs/install.md", "sh") if "--patches" in text]
PATCHED = tuple(PATCH_BLOCK.splitlines()[2].split()[-2:])
"""The option of `kubeadm upgrade` there."""


def apply_kbpf(admin: Kubectl) -> str:
    return admin("apply", "-k", str(OVERLAYS / "kubeadm"))


def state(admin: Kubectl, *names: str) -> list[Object]:
    return admin.objects("-n", SPACE, "get", *names)


def daemonset(admin: Kubectl) -> Object:
    (found,) = state(admin, "ds/kube-proxy")
    return found


def runs(admin: Kubectl) -> str:
    """The program of the DaemonSet kube-proxy."""
    (container,) = daemonset(admin)["spec"]["template"]["spec"]["containers"]
    return str(container["command"][0])


KUBE_PROXY = "/usr/local/bin/kube-proxy"


def change_config(admin: Kubectl, change: Callable[[str], str]) -> None:
    """Changes config.conf in the ConfigMap kube-proxy."""
    (config_map,) = state(admin, "cm/kube-proxy")
    config_map["data"]["config.conf"] = change(config_map["data"]["config.conf"])
    admin("replace", "-f", "-", stdin=json.dumps(config_map))


OWN_DOCUMENT = """
---
apiVersion: kbpf.io/v1alpha1
kind: KbpfConfiguration
pinDir: /sys/fs/bpf/mine
"""


def test_with_the_patch_kubeadm_installs_kbpf(
    kubeadm: Path, apiserver: ApiServer, admin: Kubectl, patches: Path, tmp_path
):
    """`kubeadm init`: in the place of kube-proxy at once, and after it was there."""
    program = Kubeadm(kubeadm, apiserver, tmp_path)
    (tmp_path / "with").mkdir()
    patched = Kubeadm(kubeadm, apiserver, tmp_path / "with", patches=patches)
    patched.install_kube_proxy()
    ours = daemonset(admin)["spec"]["template"]
    program.install_kube_proxy()
    assert runs(admin) == KUBE_PROXY
    apply_kbpf(admin)
    assert unordered(daemonset(admin)["spec"]["template"]) == unordered(ours)
    patched.install_kube_proxy()
    assert unordered(daemonset(admin)["spec"]["template"]) == unordered(ours)


PREVIOUS_VERSION = go_build.kubernetes_version(PREVIOUS)
UPGRADES_OF_THE_ADD_ON = [
    ("node", ControlPlaneNode.skipped),
    ("apply", "VERSION", "--yes", ControlPlaneNode.skipped),
]
"""`kubeadm upgrade` with these arguments."""
KEPT = "cm/kbpf-settings clusterrole/kbpf clusterrolebinding/kbpf clusterrolebinding/kubeadm:node-proxier sa/kube-proxy"


@pytest.mark.parametrize("words", UPGRADES_OF_THE_ADD_ON, ids=" ".join)
def test_kbpf_survives_kubeadm_upgrade_with_the_patch(
    previous_kubeadm: Path,
    kubeadm: Path,
    apiserver: ApiServer,
    admin: Kubectl,
    patches: Path,
    tmp_path,
    words: tuple[str, ...],
):
    """A cluster of the previous minor version is upgraded. The DaemonSet does not change, so no
    node restarts its agent, nor do the rights and the ConfigMaps, except for the document of kbpf
    in `config.conf`, which is lost. Without the patch kube-proxy returns.
    """
    previous = Kubeadm(previous_kubeadm, apiserver, tmp_path, version=PREVIOUS_VERSION)
    previous.install_kube_proxy()
    previous.upload_config()
    apply_kbpf(admin)
    settings = ("create", "configmap", "kbpf-settings", "--from-literal=PIN_DIR=/sys/fs/bpf/mine")
    admin("-n", SPACE, *settings)
    change_config(admin, lambda text: text.replace("masqueradeBit: null", "masqueradeBit: 13") + OWN_DOCUMENT)
    node = upgrade(kubeadm, apiserver, admin, tmp_path, patches)
    version = go_build.kubernetes_version()
    command = ("upgrade", *(version if word == "VERSION" else word for word in words))

    def kept() -> list[Object]:
        return [{**each, "metadata": each["metadata"]["name"]} for each in state(admin, *KEPT.split())]

    before, kept_before = daemonset(admin), kept()
    assert "Applied essential addon: kube-proxy" in node.run(*command, *PATCHED)
    after = daemonset(admin)
    assert after["spec"] == before["spec"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert kept() == kept_before
    (config_map,) = state(admin, "cm/kube-proxy")
    assert config_map["data"]["config.conf"].count("masqueradeBit: 13") == 2
    assert "KbpfConfiguration" not in config_map["data"]["config.conf"]
    apply_kbpf(admin)
    assert daemonset(admin)["metadata"]["generation"] == before["metadata"]["generation"]
    node.run(*command)
    assert runs(admin) == KUBE_PROXY


@pytest.mark.parametrize(
    ("version", "command", "disabled"),
    [
        (PREVIOUS_VERSION, "apply", True),
        (support.VERSION, "node", False),
    ],
)
def test_kubeadm_upgrade_leaves_kbpf_alone_without_the_add_on(
    apiserver: ApiServer,
    admin: Kubectl,
    tmp_path,
    request,
    version: str,
    command: str,
    disabled: bool,
):
    """docs/install.md: `proxy.disabled` in the ClusterConfiguration, or the phase skipped, both
    without a patch. DaemonSet and ConfigMap stay as they are, with kbpf's document. Without either,
    kube-proxy returns.
    """
    is_previous = version == PREVIOUS_VERSION
    kubeadm = request.getfixturevalue("previous_kubeadm" if is_previous else "kubeadm")
    Kubeadm(kubeadm, apiserver, tmp_path, version=version).install_kube_proxy()
    apply_kbpf(admin)
    change_config(admin, lambda text: text + OWN_DOCUMENT)
    node = upgrade(kubeadm, apiserver, admin, tmp_path)
    words = ("upgrade", command, *([version, "--yes"] if command == "apply" else []))
    phases = node.skipped if disabled else f"{node.skipped},{dict(UPGRADES)[command]}"

    def upload_config(is_disabled: bool) -> None:
        Kubeadm(kubeadm, apiserver, tmp_path, disabled=is_disabled, version=version).upload_config()

    upload_config(disabled)
    before = state(admin, "ds/kube-proxy", "cm/kube-proxy")
    message = "Skipping the addon/kube-proxy phase. The addon is disabled."
    assert (message in node.run(*words, phases)) is disabled
    assert state(admin, "ds/kube-proxy", "cm/kube-proxy") == before
    upload_config(False)
    node.run(*words, node.skipped)
    assert runs(admin) == KUBE_PROXY


def test_the_account_that_kubeadm_makes_has_the_rights_of_an_agent(
    kubeadm: Path, kubectl: Path, apiserver: ApiServer, admin: Kubectl, tmp_path
):
    """So `kubeadm init --patches` needs no object of kbpf's own: system:node-proxier has all that
    the ClusterRole kbpf has.
    """
    Kubeadm(kubeadm, apiserver, tmp_path).install_kube_proxy()
    objects = kustomize(kubectl, OVERLAYS / "kubeadm")
    (role,) = [each for each in objects if each["kind"] == "ClusterRole"]
    account = f"system:serviceaccount:{SPACE}:kube-proxy"
    for rule in role["rules"]:
        for verb, group, resource in product(rule["verbs"], rule["apiGroups"], rule["resources"]):
            name = f"{resource}.{group}" if group else resource
            until(f"{verb} {name}", lambda right=(verb, name): admin.may(*right, account))


def unordered(value: Any) -> Any:
    """The value with lists of named objects as mappings by name, since their order is
    irrelevant.
    """
    if isinstance(value, dict):
        return {key: unordered(each) for key, each in value.items()}
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return sorted(map(unordered, value), key=str)
    return value

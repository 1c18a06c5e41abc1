# SPDX-License-Identifier: Apache-2.0
"""A real kubeadm: its kube-proxy's objects compared with ours, replaced by ours, and restored."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cluster import kubeadm as support
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Object
from tests.support.cluster.kubeadm import Kubeadm
from tests.support.cluster.kubectl import OVERLAYS, Kubectl, call, copy_of_manifests, kustomize
from tests.support.runtime import docs

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


def test_kubeadm_upgrade_has_the_skipped_phases(kubeadm: Path) -> None:
    """docs/install.md: the phases that its commands skip exist."""
    assert [command for command, _ in UPGRADES] == ["apply", "node"]
    for command, phase in UPGRADES:
        assert "--skip-phases" in call([str(kubeadm), "upgrade", command, "--help"], Path("/"))
        words = [str(kubeadm), "upgrade", command, "phase", *phase.split("/"), "--help"]
        assert "Upgrade the kube-proxy addon" in call(words, Path("/"))


@pytest.fixture
def made(kubeadm: Path, apiserver: ApiServer, tmp_path: Path) -> dict[tuple[str, str], Object]:
    """The objects that kubeadm prints, by kind and name."""
    return named(Kubeadm(kubeadm, apiserver, tmp_path, endpoint=ENDPOINT, pods=PODS).kube_proxy())


@pytest.fixture
def ours(kubectl: Path, tmp_path: Path) -> dict[tuple[str, str], Object]:
    """The objects of the overlay for a cluster without kube-proxy, as an operator fills it in."""
    manifests = copy_of_manifests(tmp_path / "ours", f"https://{ENDPOINT}", PODS)
    return named(kustomize(kubectl, manifests / "overlays" / "kubeadm-new"))


def named(objects: list[Object]) -> dict[tuple[str, str], Object]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def said(value: Any) -> Any:
    """The value without nulls, status and a subject's default API group."""
    if isinstance(value, dict):
        rbac = {"apiGroup": "rbac.authorization.k8s.io"} if value.get("kind") == "Group" else {}
        rows = {key: said(each) for key, each in value.items() if key != "status"}
        return rbac | {key: each for key, each in rows.items() if each is not None}
    return [said(each) for each in value] if isinstance(value, list) else value


def test_objects_have_the_names_of_kubeadms(
    made: dict[tuple[str, str], Object], ours: dict[tuple[str, str], Object]
) -> None:
    assert ours.keys() == made.keys() | OURS
    assert made.keys() >= {("DaemonSet", "kube-proxy"), ("ConfigMap", "kube-proxy")}


@pytest.mark.parametrize(
    "key",
    [
        ("ServiceAccount", "kube-proxy"),
        ("ClusterRoleBinding", "kubeadm:node-proxier"),
        ("Role", "kube-proxy"),
        ("RoleBinding", "kube-proxy"),
    ],
    ids=lambda key: key[0],
)
def test_accounts_and_rights_equal_kubeadms(
    made: dict[tuple[str, str], Object], ours: dict[tuple[str, str], Object], key: tuple[str, str]
) -> None:
    assert said(ours[key]) == said(made[key])


def test_the_config_map_equals_kubeadms_in_effect(
    made: dict[tuple[str, str], Object], ours: dict[tuple[str, str], Object]
) -> None:
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


def test_the_texts_of_other_tests_equal_kubeadms(made: dict[tuple[str, str], Object]) -> None:
    """The texts of tests/support/cluster/kubeadm.py are literally those of kubeadm."""
    data = made["ConfigMap", "kube-proxy"]["data"]
    account = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    assert data == {
        "config.conf": support.config(PODS).rstrip("\n"),
        "kubeconfig.conf": support.kubeconfig(f"https://{ENDPOINT}", account).rstrip("\n"),
    }


def test_the_daemonset_has_the_metadata_and_settings_of_kubeadms(
    made: dict[tuple[str, str], Object], ours: dict[tuple[str, str], Object]
) -> None:
    """Names, labels, nodes, priority, account, file, flags and environment are equal; the rest of
    the template is ours. Our environment has one more variable, the file's path for commands in the
    pod.
    """
    more = {"name": "KBPF_CONFIG", "value": "/var/lib/kube-proxy/config.conf"}

    def facts(objects: dict[tuple[str, str], Object]) -> Object:
        found = objects["DaemonSet", "kube-proxy"]
        spec = found["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        keys = ("priorityClassName", "hostNetwork", "serviceAccountName", "tolerations",
                "nodeSelector")  # fmt: skip
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


def test_with_the_patch_kubeadm_keeps_kbpf(
    kubeadm: Path, kubectl: Path, apiserver: ApiServer, tmp_path: Path
) -> None:
    """docs/install.md: the lines that make the patch, and kubeadm's phase that writes the
    DaemonSet. `kubeadm upgrade` runs the same phase with --patches, but only on a node.
    """
    (block,) = [text for text in docs.blocks("docs/install.md", "sh") if "--patches" in text]
    lines = block.replace("/etc/kubernetes/patches", str(tmp_path / "patches")).splitlines()
    for line in lines[:2]:
        call(["bash", "-c", line.replace("kubectl", str(kubectl), 1)], docs.ROOT)
    for command in ("apply", "node"):
        assert lines[2].startswith("kubeadm upgrade apply ")
        said = call([str(kubeadm), "upgrade", command, "--help"], Path("/"))
        assert re.search(r"--patches string.*kubeproxydaemonset", said)
    admin = Kubectl(kubectl, apiserver, tmp_path)
    program = Kubeadm(kubeadm, apiserver, tmp_path)
    (tmp_path / "with").mkdir()
    patched = Kubeadm(kubeadm, apiserver, tmp_path / "with", patches=tmp_path / "patches")

    def template() -> Object:
        (found,) = admin.objects("-n", SPACE, "get", "ds/kube-proxy")
        container = found["spec"]["template"]["spec"]["containers"][0]
        return {"command": container["command"][0], **found["spec"]["template"]}

    try:
        program.install_kube_proxy()
        admin("apply", "-k", str(OVERLAYS / "kubeadm"))
        ours = template()
        assert ours["command"] == "kbpf"
        patched.install_kube_proxy()
        assert unordered(template()) == unordered(ours)
        program.install_kube_proxy()
        assert template()["command"] == "/usr/local/bin/kube-proxy"
        patched.install_kube_proxy()
        assert unordered(template()) == unordered(ours)
    finally:
        admin("delete", "-k", str(OVERLAYS / "kubeadm"), "--ignore-not-found", "--wait=false")
        program.remove_kube_proxy(admin)


def unordered(value: Any) -> Any:
    """The value with lists of named objects as mappings by name, since their order is
    irrelevant.
    """
    if isinstance(value, dict):
        return {key: unordered(each) for key, each in value.items()}
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return sorted(map(unordered, value), key=str)
    return value


def test_apply_turns_kube_proxy_into_kbpf_and_kubeadm_back(
    kubeadm: Path, kubectl: Path, apiserver: ApiServer, tmp_path: Path
) -> None:
    """The same DaemonSet gets another template, and the ConfigMap is untouched; done twice."""
    admin = Kubectl(kubectl, apiserver, tmp_path)
    program = Kubeadm(kubeadm, apiserver, tmp_path)
    folder = str(OVERLAYS / "kubeadm")

    def found() -> tuple[Object, Object]:
        one, other = admin.objects("-n", SPACE, "get", "ds/kube-proxy", "cm/kube-proxy")
        return one, other["data"]

    try:
        program.install_kube_proxy()
        first, config = found()
        for _ in range(2):
            assert "daemonset.apps/kube-proxy configured" in admin("apply", "-k", folder)
            daemonset, data = found()
            (container,) = daemonset["spec"]["template"]["spec"]["containers"]
            assert container["command"][:2] == ["kbpf", "run"]
            assert container["securityContext"]["privileged"] is False
            assert (daemonset["metadata"]["uid"], data) == (first["metadata"]["uid"], config)
            program.install_kube_proxy()
            back, data = found()
            assert (back["spec"], data) == (first["spec"], config)
    finally:
        admin("delete", "-k", folder, "--ignore-not-found", "--wait=false")
        program.remove_kube_proxy(admin)

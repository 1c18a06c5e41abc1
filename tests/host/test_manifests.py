# SPDX-License-Identifier: Apache-2.0
"""The DaemonSet of each overlay, and that the chart makes equal objects.

tests/lab/cluster/test_manifests.py applies them to an API server, test_daemonset.py there runs
them.
"""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.cluster.kube import Object
from tests.support.cluster.kubectl import MANIFESTS, OVERLAYS, call, documents, kustomize
from tests.support.lab.lab import run

NAMES = sorted(path.name for path in OVERLAYS.iterdir())
VALUES = {"kubeadm": (), "kubeadm-new": ("values-kubeadm-new.yaml",), "side-by-side": ("values-side-by-side.yaml",)}
KUBE_PROXY, OWN = "kube-proxy", "kbpf"
CALLED = {"kubeadm": KUBE_PROXY, "kubeadm-new": KUBE_PROXY, "side-by-side": OWN}


def daemonset(objects: list[Object]) -> Object:
    (found,) = (each for each in objects if each["kind"] == "DaemonSet")
    return found


def container(objects: list[Object]) -> Object:
    (found,) = daemonset(objects)["spec"]["template"]["spec"]["containers"]
    return found


def pod(objects: list[Object]) -> Object:
    return daemonset(objects)["spec"]["template"]["spec"]


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    made = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(made) == len(objects)
    return made


def rules(objects: list[Object]) -> list[Object]:
    """The rules of our ClusterRole."""
    (found,) = (each for each in objects if each["kind"] == "ClusterRole")
    return list(found["rules"])


@pytest.fixture(scope="module", params=NAMES)
def overlay(request, kubectl: Path) -> tuple[str, list[Object]]:
    return request.param, kustomize(kubectl, OVERLAYS / request.param)


@pytest.fixture
def chart(helm: Path, tmp_path) -> Callable[..., list[Object]]:
    """Renders the chart with values as a dict, and with the value files of an overlay."""

    def render(values: Object, overlay: str = "kubeadm") -> list[Object]:
        (tmp_path / "values.yaml").write_text(json.dumps(values))
        files = [*(MANIFESTS / "chart" / file for file in VALUES[overlay]), tmp_path / "values.yaml"]
        command = [str(helm), "template", "kbpf", str(MANIFESTS / "chart"), "-n", "kube-system", "--kube-version=1.37"]
        return documents(call([*command, *(f"--values={file}" for file in files)], tmp_path))

    return render


@pytest.fixture
def with_component(kubectl: Path, tmp_path) -> Callable[[str, str], list[Object]]:
    """Renders an overlay with a component. Kustomize accepts relative paths only."""

    def render(overlay: str, component: str) -> list[Object]:
        made = {
            "resources": [os.path.relpath(OVERLAYS / overlay, tmp_path)],
            "components": [os.path.relpath(MANIFESTS / "components" / component, tmp_path)],
        }
        (tmp_path / "kustomization.yaml").write_text(json.dumps(made))
        return kustomize(kubectl, tmp_path)

    return render


def test_every_overlay_is_known():
    assert set(NAMES) == set(VALUES) == set(CALLED)


POD = """
tolerations: [{operator: Exists}]
hostNetwork: true
hostPID: null
priorityClassName: system-node-critical
automountServiceAccountToken: true
enableServiceLinks: false
"""
SECURITY = """
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL], add: [BPF, NET_ADMIN, PERFMON, SYS_ADMIN, SYS_RESOURCE]}
"""
SETTINGS = {"name": "kbpf-settings", "optional": True}


def test_the_spec_of_the_pod(overlay: tuple[str, list[Object]]):
    """It runs on every node that has Linux, and has the rights that it needs."""
    objects = overlay[1]
    for text, found in ((POD, pod(objects)), (SECURITY, container(objects)["securityContext"])):
        wanted = yaml.safe_load(text)
        assert {key: found.get(key) for key in wanted} == wanted
    assert pod(objects)["nodeSelector"]["kubernetes.io/os"] == "linux"
    assert daemonset(objects)["spec"]["updateStrategy"]["type"] == "RollingUpdate"
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}} in pod(objects)["volumes"]
    writable = {mount["mountPath"] for mount in container(objects)["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/sys/fs/bpf", "/host/proc/sys/net", "/run/kbpf", "/var/cache/kbpf", "/tmp"}
    assert "cpu" not in container(objects)["resources"]["limits"]
    # settings, which commands in the pod read too
    assert container(objects)["envFrom"] == [{"prefix": "KBPF_", "configMapRef": SETTINGS}]


COMPONENTS = yaml.safe_load("""
confined:
  seccompProfile: {type: Localhost, localhostProfile: kbpf.json}
  appArmorProfile: {type: Localhost, localhostProfile: kbpf}
no-sys-admin:
  capabilities: {drop: [ALL], add: [BPF, NET_ADMIN, PERFMON, SYS_RESOURCE]}
  seccompProfile: {type: Localhost, localhostProfile: kbpf.json}
confined-no-sys-admin:
  capabilities: {drop: [ALL], add: [BPF, NET_ADMIN, PERFMON, SYS_RESOURCE]}
  seccompProfile: {type: Localhost, localhostProfile: kbpf.json}
  appArmorProfile: {type: Localhost, localhostProfile: kbpf-no-sys-admin}
""")
"""The changes of each component to the container's securityContext, the only ones it makes."""


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_changes_these_rights_only(
    overlay: tuple[str, list[Object]], component: str, with_component, chart
):
    name, objects = overlay
    rights = COMPONENTS[component]
    wanted = copy.deepcopy(objects)
    container(wanted)["securityContext"] |= rights
    assert by_name(with_component(name, component)) == by_name(wanted)
    values = rights | ({"capabilities": rights["capabilities"]["add"]} if "capabilities" in rights else {})
    assert by_name(chart(values, name)) == by_name(wanted)


DENIED = """
mount umount2 pivot_root chroot fsopen move_mount ptrace process_vm_readv kexec_load reboot swapon
init_module finit_module delete_module keyctl add_key io_uring_setup userfaultfd perf_event_open
clone3 open_by_handle_at mknod quotactl settimeofday
"""


def test_the_seccomp_profile_denies_unneeded_calls():
    """It denies calls that the agent never needs, whatever the container's capabilities are."""
    profile = json.loads((MANIFESTS / "security" / "kbpf.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    free = {n for rule in profile["syscalls"] if "args" not in rule for n in rule["names"]}
    some = {n: rule["args"] for rule in profile["syscalls"] if "args" in rule for n in rule["names"]}
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ALLOW"}
    assert {"bpf", "socket", "execve"} <= free
    assert some.keys() == {"clone", "setns", "unshare"}
    assert some["setns"][0]["value"] == some["unshare"][0]["value"] == 0x40000000, "CLONE_NEWNET"
    assert free.isdisjoint(DENIED.split())


@pytest.mark.parametrize("without", ["", "sys_admin"])
def test_the_apparmor_profile_is_valid_and_allows_the_capabilities(without: str):
    """This machine's apparmor_parser accepts it (without loading it), and it allows the
    capabilities that the pod is granted.
    """
    name = "kbpf-no-sys-admin" if without else "kbpf"
    profile = MANIFESTS / "security" / f"{name}.apparmor"
    run("apparmor_parser", "--skip-kernel-load", "--skip-cache", str(profile))
    text = profile.read_text()
    given = {line.split()[1].rstrip(",") for line in text.splitlines() if "  capability " in line}
    security = yaml.safe_load((MANIFESTS / "base" / "daemonset.yaml").read_text())
    granted = set(container([security])["securityContext"]["capabilities"]["add"])
    assert {name.upper() for name in given} == granted - {without.upper()}


def test_the_apparmor_profiles_differ_in_sys_admin_only():
    usual, without = (
        (MANIFESTS / "security" / f"{name}.apparmor").read_text() for name in ("kbpf", "kbpf-no-sys-admin")
    )
    assert usual.count("  capability sys_admin,\n") == 1
    wanted = usual.replace("  capability sys_admin,\n", "")
    for before in ("profile kbpf", "peer=kbpf", "--replace kbpf"):
        wanted = wanted.replace(before, f"{before}-no-sys-admin")
    assert without == wanted


def test_names_and_labels(overlay: tuple[str, list[Object]]):
    """All names are kubeadm's, or all are ours: never a mixture."""
    name, objects = overlay
    wanted = CALLED[name]
    found = daemonset(objects)
    label = {"k8s-app": wanted}
    assert found["metadata"]["labels"] == found["spec"]["selector"]["matchLabels"] == label
    (config,) = (v["configMap"]["name"] for v in pod(objects)["volumes"] if "configMap" in v)
    called = found["metadata"]["name"], container(objects)["name"], pod(objects)["serviceAccountName"], config
    assert {*called} == {wanted}
    made = {(each["kind"], each["metadata"]["name"]) for each in objects}
    assert ("ServiceAccount", wanted) in made
    assert (("ConfigMap", wanted) in made) == (name != "kubeadm"), "kubeadm's own ConfigMap stays"
    for each in objects:
        for subject in each.get("subjects", []):
            if subject["kind"] == "ServiceAccount":
                assert (subject["name"], subject["namespace"]) == (wanted, "kube-system")


def test_the_chart_makes_the_same_objects(overlay: tuple[str, list[Object]], chart):
    name, objects = overlay
    assert by_name(chart({}, name)) == by_name(objects)


IN_PLACE = [name for name in NAMES if CALLED[name] == KUBE_PROXY]


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_trial_shares_no_object_with_a_drop_in(name: str, kubectl: Path):
    """So neither overlay changes or deletes objects of the other, namespaced or not."""
    trial, after = (by_name(kustomize(kubectl, OVERLAYS / each)) for each in ("side-by-side", name))
    assert trial.keys() & after.keys() == set()


def test_drop_in_overlays_agree_on_common_objects(kubectl: Path):
    """One can be applied over the other."""
    one, other = (by_name(kustomize(kubectl, OVERLAYS / name)) for name in IN_PLACE)
    assert {key: one[key] for key in one.keys() & other.keys()} == one


UNPRIVILEGED = """
runAsUser: 65534
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
"""


def test_the_prepull_daemonset_has_no_rights(kubectl: Path):
    """It has the same image, but no access to the node or to the API server."""
    (found,) = objects = kustomize(kubectl, MANIFESTS / "prepull")
    base = kustomize(kubectl, MANIFESTS / "base")
    assert container(objects)["image"] == container(base)["image"]
    assert container(objects)["imagePullPolicy"] == container(base)["imagePullPolicy"]
    for key in ("nodeSelector", "tolerations"):
        assert pod(objects)[key] == pod(base)[key], "on every node that gets the agent"
    assert container(objects)["command"] == ["sleep", "infinity"]
    assert container(objects)["securityContext"] == yaml.safe_load(UNPRIVILEGED)
    assert pod(objects)["automountServiceAccountToken"] is False
    assert "volumes" not in pod(objects)
    assert found["metadata"]["name"] not in CALLED.values()


GIVEN = yaml.safe_load("""
imagePullSecrets: [{name: registry}]
extraArgs: [-v=4, --mode=bpf]
env: [{name: KUBERNETES_SERVICE_HOST, value: 192.0.2.10}]
""")


def test_chart_values_are_added_to_the_pod(chart):
    objects = chart(GIVEN)
    assert pod(objects)["imagePullSecrets"] == GIVEN["imagePullSecrets"]
    assert container(objects)["command"][2:] == [
        "--config=/var/lib/kube-proxy/config.conf",
        "--hostname-override=$(NODE_NAME)",
        *GIVEN["extraArgs"],
    ]
    names = [row["name"] for row in container(objects)["env"]]
    assert names == ["NODE_NAME", "KBPF_CONFIG", "KUBERNETES_SERVICE_HOST"]
    assert container(objects)["env"][2:] == GIVEN["env"]


SWITCHES = [
    ("socket-lb-label", "socketLbLabel", [{"name": "KBPF_SOCKET_LB_LABEL", "value": "true"}]),
    ("mesh-pods", "meshPods", []),
]
"""A component, the chart's value for it, and the environment variables that it adds."""


@pytest.mark.parametrize(("component", "value", "variables"), SWITCHES)
def test_pods_may_be_watched_with_a_component_or_value_only(
    overlay: tuple[str, list[Object]], component: str, value: str, variables: list[Object], with_component, chart
):
    name, plain = overlay
    assert all("pods" not in rule["resources"] for rule in rules(plain))
    more = with_component(name, component)
    assert rules(more) == [*rules(plain), {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert container(more)["env"] == [*container(plain)["env"], *variables]
    switched = chart({value: True}, name)
    core = next(rule for rule in rules(switched) if rule["apiGroups"] == [""])
    assert core["resources"] == ["services", "nodes", "pods"]
    assert [row for row in container(switched)["env"] if row not in container(plain)["env"]] == variables

# SPDX-License-Identifier: Apache-2.0
"""The DaemonSet of each overlay, and that the chart makes equal objects.

tests/lab/cluster/test_manifests.py applies them to an API server, test_daemonset.py there runs
them.
"""

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.cluster.kube import Object
from tests.support.cluster.kubectl import MANIFESTS, OVERLAYS, call, documents, kustomize

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


@pytest.fixture(scope="module", params=NAMES)
def overlay(request: pytest.FixtureRequest, kubectl: Path) -> tuple[str, list[Object]]:
    return request.param, kustomize(kubectl, OVERLAYS / request.param)


def test_every_overlay_is_known():
    assert set(NAMES) == set(VALUES) == set(CALLED)


ROWS: list[tuple[str, Callable[[list[Object]], object], object]] = [
    ("tolerates all taints", lambda o: pod(o)["tolerations"], [{"operator": "Exists"}]),
    ("host network", lambda o: pod(o)["hostNetwork"], True),
    ("own PID namespace", lambda o: pod(o).get("hostPID", False), False),
    ("priority class", lambda o: pod(o)["priorityClassName"], "system-node-critical"),
    ("Linux only", lambda o: pod(o)["nodeSelector"]["kubernetes.io/os"], "linux"),
    ("rolling update", lambda o: daemonset(o)["spec"]["updateStrategy"]["type"], "RollingUpdate"),
    ("not privileged", lambda o: container(o)["securityContext"]["privileged"], False),
    ("no privilege escalation", lambda o: container(o)["securityContext"]["allowPrivilegeEscalation"], False),
    ("read-only root", lambda o: container(o)["securityContext"]["readOnlyRootFilesystem"], True),
    (
        "capabilities",
        lambda o: container(o)["securityContext"]["capabilities"],
        {"drop": ["ALL"], "add": ["BPF", "NET_ADMIN", "PERFMON", "SYS_ADMIN", "SYS_RESOURCE"]},
    ),
    (
        "bounded scratch space",
        lambda o: next(v["emptyDir"] for v in pod(o)["volumes"] if v["name"] == "tmp"),
        {"sizeLimit": "64Mi"},
    ),
    (
        "writable mounts",
        lambda o: {m["mountPath"] for m in container(o)["volumeMounts"] if not m.get("readOnly")},
        {"/sys/fs/bpf", "/host/proc/sys/net", "/run/kbpf", "/var/cache/kbpf", "/tmp"},
    ),
    ("service account token is mounted explicitly", lambda o: pod(o)["automountServiceAccountToken"], True),
    ("no environment variables of Services", lambda o: pod(o)["enableServiceLinks"], False),
    ("no CPU limit", lambda o: "cpu" in container(o)["resources"]["limits"], False),
]


@pytest.mark.parametrize(("name", "look", "wanted"), ROWS, ids=[row[0] for row in ROWS])
def test_the_spec_of_the_pod(
    overlay: tuple[str, list[Object]], name: str, look: Callable[[list[Object]], object], wanted: object
):
    assert look(overlay[1]) == wanted, name


COMPONENTS = {
    "confined": {
        "seccompProfile": {"type": "Localhost", "localhostProfile": "kbpf.json"},
        "appArmorProfile": {"type": "Localhost", "localhostProfile": "kbpf"},
    },
    "no-sys-admin": {
        "capabilities": {"drop": ["ALL"], "add": ["BPF", "NET_ADMIN", "PERFMON", "SYS_RESOURCE"]},
        "seccompProfile": {"type": "Localhost", "localhostProfile": "kbpf.json"},
    },
    "confined-no-sys-admin": {
        "capabilities": {"drop": ["ALL"], "add": ["BPF", "NET_ADMIN", "PERFMON", "SYS_RESOURCE"]},
        "seccompProfile": {"type": "Localhost", "localhostProfile": "kbpf.json"},
        "appArmorProfile": {"type": "Localhost", "localhostProfile": "kbpf-no-sys-admin"},
    },
}
"""The changes of each component to the container's securityContext, the only ones it makes."""


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_changes_these_rights_only(
    overlay: tuple[str, list[Object]], component: str, kubectl: Path, helm: Path, tmp_path: Path
):
    name, objects = overlay
    folder = Path(os.path.relpath(MANIFESTS, tmp_path))
    made = tmp_path / "kustomization.yaml"
    made.write_text(
        json.dumps(
            {"resources": [str(folder / "overlays" / name)], "components": [str(folder / "components" / component)]}
        )
    )
    changed = kustomize(kubectl, tmp_path)
    wanted = copy.deepcopy(objects)
    container(wanted)["securityContext"] |= COMPONENTS[component]
    assert by_name(changed) == by_name(wanted)
    chart = MANIFESTS / "chart"
    rights = COMPONENTS[component]
    values = tmp_path / "rights.yaml"
    values.write_text(
        json.dumps(
            {key: rights[key] for key in ("seccompProfile", "appArmorProfile") if key in rights}
            | ({"capabilities": rights["capabilities"]["add"]} if "capabilities" in rights else {})
        )
    )
    given = [f"--values={chart / file}" for file in VALUES[name]]
    command = [str(helm), "template", "kbpf", str(chart), "-n", "kube-system"]
    text = call([*command, "--kube-version=1.37", *given, f"--values={values}"], tmp_path)
    assert by_name(documents(text)) == by_name(wanted)


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
    assert not free & {
        "mount",
        "umount2",
        "pivot_root",
        "chroot",
        "ptrace",
        "process_vm_readv",
        "kexec_load",
        "init_module",
        "finit_module",
        "delete_module",
        "keyctl",
        "add_key",
        "io_uring_setup",
        "userfaultfd",
        "perf_event_open",
        "reboot",
        "swapon",
        "clone3",
        "open_by_handle_at",
        "mknod",
        "fsopen",
        "move_mount",
        "quotactl",
        "settimeofday",
    }


@pytest.mark.parametrize("without", ["", "sys_admin"])
def test_the_apparmor_profile_is_valid_and_allows_the_capabilities(without: str):
    """This machine's apparmor_parser accepts it (without loading it), and it allows the
    capabilities that the pod is granted.
    """
    name = "kbpf-no-sys-admin" if without else "kbpf"
    profile = MANIFESTS / "security" / f"{name}.apparmor"
    command = ["apparmor_parser", "--skip-kernel-load", "--skip-cache", str(profile)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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
    assert found["metadata"]["name"] == wanted
    assert found["metadata"]["labels"] == label
    assert found["spec"]["selector"]["matchLabels"] == label
    assert found["spec"]["template"]["metadata"]["labels"] == label
    assert container(objects)["name"] == wanted
    assert pod(objects)["serviceAccountName"] == wanted
    (config,) = (v["configMap"]["name"] for v in pod(objects)["volumes"] if "configMap" in v)
    assert config == wanted
    made = {(each["kind"], each["metadata"]["name"]) for each in objects}
    assert ("ServiceAccount", wanted) in made
    assert (("ConfigMap", wanted) in made) == (name != "kubeadm"), "kubeadm's own ConfigMap stays"
    for each in objects:
        for subject in each.get("subjects", []):
            if subject["kind"] == "ServiceAccount":
                assert (subject["name"], subject["namespace"]) == (wanted, "kube-system")


@pytest.mark.parametrize("name", NAMES)
def test_the_chart_makes_the_same_objects(name: str, kubectl: Path, helm: Path, tmp_path: Path):
    chart = MANIFESTS / "chart"
    command = [str(helm), "template", "kbpf", str(chart), "-n", "kube-system"]
    values = [f"--values={chart / file}" for file in VALUES[name]]
    text = call([*command, "--kube-version=1.37", *values], tmp_path)
    assert by_name(documents(text)) == by_name(kustomize(kubectl, OVERLAYS / name))


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


def test_the_prepull_daemonset_has_no_rights(kubectl: Path):
    """It has the same image, but no access to the node or to the API server."""
    (found,) = objects = kustomize(kubectl, MANIFESTS / "prepull")
    base = kustomize(kubectl, MANIFESTS / "base")
    assert container(objects)["image"] == container(base)["image"]
    assert container(objects)["imagePullPolicy"] == container(base)["imagePullPolicy"]
    for key in ("nodeSelector", "tolerations"):
        assert pod(objects)[key] == pod(base)[key], "on every node that gets the agent"
    assert container(objects)["command"] == ["sleep", "infinity"]
    assert container(objects)["securityContext"] == {
        "runAsUser": 65534,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert pod(objects)["automountServiceAccountToken"] is False
    assert "volumes" not in pod(objects)
    assert found["metadata"]["name"] not in CALLED.values()


GIVEN = {
    "imagePullSecrets": [{"name": "registry"}],
    "extraArgs": ["-v=4", "--mode=bpf"],
    "env": [{"name": "KUBERNETES_SERVICE_HOST", "value": "192.0.2.10"}],
}


def test_chart_values_are_added_to_the_pod(helm: Path, tmp_path: Path):
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps(GIVEN))
    command = [str(helm), "template", "kbpf", str(MANIFESTS / "chart"), "-n", "kube-system"]
    objects = documents(call([*command, "--kube-version=1.37", f"--values={values}"], tmp_path))
    assert pod(objects)["imagePullSecrets"] == GIVEN["imagePullSecrets"]
    assert container(objects)["command"][2:] == [
        "--config=/var/lib/kube-proxy/config.conf",
        "--hostname-override=$(NODE_NAME)",
        *GIVEN["extraArgs"],
    ]
    names = [row["name"] for row in container(objects)["env"]]
    assert names == ["NODE_NAME", "KBPF_CONFIG", "KUBERNETES_SERVICE_HOST"]
    assert container(objects)["env"][2:] == GIVEN["env"]


def with_component(name: str, component: str, folder: Path) -> Path:
    """A kustomization of an overlay with a component. Kustomize accepts relative paths only."""
    made = {
        "resources": [os.path.relpath(OVERLAYS / name, folder)],
        "components": [os.path.relpath(MANIFESTS / "components" / component, folder)],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(made))
    return folder


def rules(objects: list[Object]) -> list[Object]:
    """The rules of our ClusterRole."""
    (found,) = (each for each in objects if each["kind"] == "ClusterRole")
    return list(found["rules"])


LABEL_SWITCH = {"name": "KBPF_SOCKET_LB_LABEL", "value": "true"}


@pytest.mark.parametrize(("component", "switches"), [("socket-lb-label", [LABEL_SWITCH]), ("mesh-pods", [])])
@pytest.mark.parametrize("name", NAMES)
def test_pods_may_be_watched_with_a_component_only(
    name: str, component: str, switches: list[Object], kubectl: Path, tmp_path: Path
):
    plain = kustomize(kubectl, OVERLAYS / name)
    more = kustomize(kubectl, with_component(name, component, tmp_path))
    assert all("pods" not in rule["resources"] for rule in rules(plain))
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    assert rules(more) == [*rules(plain), pods]
    assert container(more)["env"] == [*container(plain)["env"], *switches]


@pytest.mark.parametrize(("value", "switches"), [("socketLbLabel", [LABEL_SWITCH]), ("meshPods", [])])
def test_the_charts_value_equals_the_component(value: str, switches: list[Object], helm: Path, tmp_path: Path):
    command = [str(helm), "template", "kbpf", str(MANIFESTS / "chart"), "-n", "kube-system"]
    command += ["--kube-version=1.37"]
    plain = documents(call(command, tmp_path))
    objects = documents(call([*command, f"--set={value}=true"], tmp_path))
    core = next(rule for rule in rules(objects) if rule["apiGroups"] == [""])
    assert core["resources"] == ["services", "nodes", "pods"]
    added = [row for row in container(objects)["env"] if row not in container(plain)["env"]]
    assert added == switches


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_the_pod_use_the_agents_file(name: str, kubectl: Path):
    found = container(kustomize(kubectl, OVERLAYS / name))
    (told,) = (row["value"] for row in found["env"] if row["name"] == "KBPF_CONFIG")
    assert f"--config={told}" in found["command"]


def test_the_cleanup_pods_do_not_set_kbpf_config(kubectl: Path):
    """The file may not exist; then the defaults apply."""
    found = container(kustomize(kubectl, MANIFESTS / "cleanup"))
    assert "KBPF_CONFIG" not in {row["name"] for row in found["env"]}


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    made = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(made) == len(objects)
    return made

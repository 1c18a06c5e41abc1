# SPDX-License-Identifier: Apache-2.0
"""vagrant/kubeadm/provision, the scripts that make a cluster of three machines, run on a fake
machine (tests/support/runtime/provision.py) with the Vagrantfile's arguments. The real kubeadm and
kubectl check what the scripts write.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Object
from tests.support.cluster.kubectl import OVERLAYS, Kubectl, documents, kustomize
from tests.support.runtime.provision import ROOT, VERSION, Machine

VAGRANTFILE = (ROOT / "vagrant/kubeadm/Vagrantfile").read_text()
CONTROL_PLANE, WORKER = "192.168.56.10", "192.168.56.11"
CONTAINERD = """\
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/opt/cni/bin"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = false
"""
FLANNEL = """\
apiVersion: v1
kind: Namespace
metadata: {name: kube-flannel}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-flannel-ds, namespace: kube-flannel}
spec:
  selector: {matchLabels: {app: flannel}}
  template:
    metadata: {labels: {app: flannel}}
    spec:
      containers:
      - name: kube-flannel
        image: flannel
        args: [--ip-masq, --kube-subnet-mgr]
        env: [{name: EVENT_QUEUE_DEPTH, value: "5000"}]
"""
"""The lines of flannel's manifest that the script changes, verbatim."""

Make = Callable[[str], Machine]


@pytest.fixture(scope="module")
def make(previous_kubeadm: Path, kubectl: Path, apiserver: ApiServer, tmp_path_factory) -> Make:
    access = apiserver.kubeconfig(tmp_path_factory.mktemp("admin") / "admin", "admin")

    def made(address: str) -> Machine:
        folder = tmp_path_factory.mktemp("machine")
        machine = Machine(folder, address, previous_kubeadm, kubectl, access)
        machine.put("containerd.toml", CONTAINERD)
        machine.put("Release.key", "key")
        machine.put("kube-flannel.yml", FLANNEL)
        return machine

    return made


@pytest.fixture(scope="module")
def admin(apiserver: ApiServer, kubectl: Path, tmp_path_factory) -> Iterator[Kubectl]:
    """kubectl as administrator; removes what the scripts have made after the test, except flannel's
    Namespace: no controller would finalize it.
    """
    command = Kubectl(kubectl, apiserver, tmp_path_factory.mktemp("kubectl"))
    gone = ("--ignore-not-found", "--wait=false")
    yield command
    command("delete", "-k", str(OVERLAYS / "kubeadm-new"), *gone)
    command("-n", "kube-flannel", "delete", "ds", "--all", *gone)


@pytest.fixture(scope="module")
def control_plane(make: Make, admin: Kubectl) -> Machine:
    """A machine on which control-plane.sh has succeeded."""
    machine = make(CONTROL_PLANE)
    succeeds(machine, "control-plane.sh")
    return machine


def arguments(script: str) -> list[str]:
    """The script's arguments in the Vagrantfile, for the control plane or the first worker."""
    (found,) = re.findall(rf'path: "provision/{script}", args: \[(.*)\]$', VAGRANTFILE, re.M)[-1:]
    values = dict(re.findall(r'^([A-Z_]+) = (?:ENV.fetch\("\w+", )?"([^"]+)"', VAGRANTFILE, re.M))
    return [{**values, "address": WORKER}[name] for name in found.split(", ")]


def names(machine: Machine) -> list[str]:
    """The first two words of each call on the machine."""
    return [" ".join(line.split()[:2]) for line in machine.said]


def succeeds(machine: Machine, script: str) -> None:
    done = machine.run(script, *arguments(script))
    assert done.returncode == 0, done.stdout + done.stderr


def fails(machine: Machine, script: str, fail: str) -> str:
    """Runs a script that must fail; returns the last line of its output."""
    done = machine.run(script, *arguments(script), fail=fail)
    assert done.returncode != 0, done.stdout
    return done.stderr.splitlines()[-1]


# ---- every machine ----------------------------------------------------------------------

ONCE = ["curl -fsSL", "gpg --dearmor", "apt-get update", "apt-get install", "apt-mark hold"]
IMAGE = ["buildah build", "buildah push", "ctr --namespace"]


def test_preparing_a_node_is_idempotent(make: Make, kubectl: Path):
    """Everything is done again, except what ONCE has."""
    machine = make(WORKER)
    machine.file("/etc/fstab").write_text("/dev/vda1 / ext4 rw 0 1\n/dev/vda2 none swap sw 0 0\n")
    succeeds(machine, "node.sh")
    (version,) = re.findall(r'"(v[\d.]+)"\)', VAGRANTFILE)
    assert VERSION.startswith(f"{version}."), "the tested version is installed"
    keyring, packages = "/etc/apt/keyrings/kubernetes.gpg", f"https://pkgs.k8s.io/core:/stable:/{version}/deb/"
    files = {
        "apt/sources.list.d/kubernetes.list": f"deb [signed-by={keyring}] {packages} /",
        "apt/keyrings/kubernetes.gpg": "key",
        "fstab": "/dev/vda1 / ext4 rw 0 1",
        "containerd/config.toml": CONTAINERD.replace("SystemdCgroup = false", "SystemdCgroup = true").rstrip(),
        "modules-load.d/kubernetes.conf": "overlay\nbr_netfilter",
    }
    assert {name: machine.file(f"/etc/{name}").read_text().rstrip() for name in files} == files
    assert "net.ipv4.ip_forward = 1\n" in machine.file("/etc/sysctl.d/kubernetes.conf").read_text()
    assert {
        "swapoff -a",
        "modprobe -a overlay br_netfilter",
        "sysctl --quiet --system",
        "systemctl restart containerd",
        "apt-get install -y -qq kubelet kubeadm kubectl",
    } <= {*machine.said}
    containerd_gets_the_image_of_the_manifests(machine, kubectl)
    first = names(machine)
    at = first.index(ONCE[0])
    assert first[at:] == [*ONCE, *IMAGE]
    succeeds(machine, "node.sh")
    assert names(machine) == [*first[:at], *IMAGE]


def containerd_gets_the_image_of_the_manifests(machine: Machine, kubectl: Path) -> None:
    (daemonset,) = (each for each in kustomize(kubectl, OVERLAYS / "kubeadm-new") if each["kind"] == "DaemonSet")
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    assert container["imagePullPolicy"] == "IfNotPresent"
    name = f"docker.io/library/{container['image']}"
    build, push, load = (line for line in machine.said if line.startswith(("buildah", "ctr")))
    assert build.split()[-3:-1] == ["--tag", name]
    archive = load.split()[-1]
    assert push.split()[-2:] == [name, f"docker-archive:{archive}:{name}"]
    assert load == f"ctr --namespace k8s.io images import {archive}"


# ---- the control plane ------------------------------------------------------------------


def test_the_control_plane_gets_kbpf_then_flannel(control_plane: Machine, admin: Kubectl):
    """kbpf before flannel, which reaches the API server by its ClusterIP. The script can be
    repeated: kubeadm is not run again, and the objects do not change.
    """
    config = control_plane.file("/root/.kube/config")
    assert config.read_text() == control_plane.file("/etc/kubernetes/admin.conf").read_text()
    assert config.stat().st_mode & 0o777 == 0o600
    assert names(control_plane)[:2] == ["kubeadm version", "kubeadm init"]
    calls = control_plane.said[2:]
    waited = [line.split()[2:6] for line in calls if "rollout status" in line]
    assert waited == [
        ["kube-system", "rollout", "status", "ds/kube-proxy"],
        ["kube-flannel", "rollout", "status", "ds/kube-flannel-ds"],
        ["kube-system", "rollout", "status", "deploy/coredns"],
    ]
    succeeds(control_plane, "control-plane.sh")
    assert names(control_plane) == [" ".join(line.split()[:2]) for line in calls]
    assert [each["metadata"]["generation"] for each in applied(admin)] == [1, 1]


def test_kubeadm_reads_the_scripts_configuration(control_plane: Machine):
    """kubeadm has also validated the configuration (support/runtime/provision.py)."""
    out = control_plane.out("init")
    for line in (
        f"Using Kubernetes version: {VERSION}",
        f'KUBELET_KUBEADM_ARGS="--node-ip={CONTROL_PLANE}"',
        f"--advertise-address={CONTROL_PLANE}",
        f"--initial-advertise-peer-urls=https://{CONTROL_PLANE}:2380",
        "--cluster-cidr=10.244.0.0/16",
        "--allocate-node-cidrs=true",
        f"server: https://{CONTROL_PLANE}:6443",
        "Applied essential addon: CoreDNS",
    ):
        assert line in out, line
    assert "addon: kube-proxy" not in out
    made = attached(out)
    assert ("Deployment", "coredns") in made
    assert ("DaemonSet", "kube-proxy") not in made
    kept = yaml.safe_load(made["ConfigMap", "kubeadm-config"]["data"]["ClusterConfiguration"])
    assert kept["proxy"] == {"disabled": True}, "otherwise `kubeadm upgrade` would install kube-proxy"
    token_id, _, _ = arguments("worker.sh")[2].partition(".")
    secret = made["Secret", f"bootstrap-token-{token_id}"]
    assert "expiration" not in secret["data"], "a worker may join a day later"


def attached(out: str) -> dict[tuple[str, str], Object]:
    """The objects that a dry run prints."""
    found = re.findall(r"^\[dryrun\] Attached object:\n(.*?)^$", out, re.M | re.S)
    objects = [each for text in found for each in documents(text)]
    return {(each["kind"], each["metadata"].get("name", "")): each for each in objects}


def test_kbpf_and_flannel_use_the_machines_addresses(control_plane: Machine, admin: Kubectl):
    """They use neither the ClusterIP, which needs kbpf, nor the default route's device, on which
    VirtualBox gives each machine the same address.
    """
    (files,) = admin.objects("-n", "kube-system", "get", "configmap/kube-proxy")
    reached = yaml.safe_load(files["data"]["kubeconfig.conf"])
    assert reached["clusters"][0]["cluster"]["server"] == f"https://{CONTROL_PLANE}:6443"
    config = yaml.safe_load(files["data"]["config.conf"])
    told = yaml.safe_load(control_plane.yaml("init").split("---")[1])
    assert config["clusterCIDR"] == told["networking"]["podSubnet"]
    kbpf, flannel = applied(admin)
    assert kbpf["spec"]["template"]["spec"]["containers"][0]["command"][0] == "kbpf"
    (container,) = flannel["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--ip-masq", "--kube-subnet-mgr", "--iface=$(NODE_ADDRESS)"]
    assert [each["name"] for each in container["env"]] == ["EVENT_QUEUE_DEPTH", "NODE_ADDRESS"]
    assert container["env"][1]["valueFrom"]["fieldRef"]["fieldPath"] == "status.hostIP"


def applied(admin: Kubectl) -> list[Object]:
    """kbpf's DaemonSet and flannel's."""
    return [
        *admin.objects("-n", "kube-system", "get", "ds/kube-proxy"),
        *admin.objects("-n", "kube-flannel", "get", "ds/kube-flannel-ds"),
    ]


# ---- workers ----------------------------------------------------------------------------


def test_a_worker_joins_once(make: Make):
    """kubeadm's dry run finds the cluster by this token only. After a failure the script really
    resets: kubeadm refuses to join with files of a previous join.
    """
    machine = make(WORKER)
    assert fails(machine, "worker.sh", "after kubeadm join") == "worker.sh: failed at: kubeadm join"
    succeeds(machine, "worker.sh")
    assert names(machine) == ["kubeadm reset", "kubeadm join"]
    out = machine.out("join")
    assert "This node has joined the cluster" in out
    assert f'KUBELET_KUBEADM_ARGS="--node-ip={WORKER}"' in out
    told = yaml.safe_load(machine.yaml("join"))
    found = told["discovery"]["bootstrapToken"]
    assert found["apiServerEndpoint"] == f"{CONTROL_PLANE}:6443"
    assert found["token"] == arguments("control-plane.sh")[1]
    assert told["timeouts"]["discovery"] == "60m", "the control plane is set up at the same time"
    succeeds(machine, "worker.sh")
    assert machine.said == []

# SPDX-License-Identifier: Apache-2.0
"""A node: containerd and kubelet."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.cluster.layout import (
    ARCHITECTURE,
    DNS_ADDRESS,
    Cluster,
    Machine,
    Object,
    call,
    program,
    search_path,
    wait_for,
    write,
)
from tests.conformance.cluster.machines import inside, start_service

ZONES = "abc"
SOCKET = "/run/containerd/containerd.sock"
CONTAINERD = """\
version = 3
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp",
                    "io.containerd.internal.v1.tracing"]
[grpc]
  address = "{socket}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "registry.k8s.io/pause:{pause}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  enable_unprivileged_ports = true
  enable_unprivileged_icmp = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{programs}"]
    conf_dir = "{folder}/cni-conf"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "{runc}"
      SystemdCgroup = false
"""


def node_object(cluster: Cluster, machine: Machine) -> Object:
    """A Node with the addresses that kubelet reports: a CNI's daemon, which starts earlier here,
    may exit without them (kube-router).
    """
    labels = {
        "kubernetes.io/hostname": machine.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": ARCHITECTURE,
        "topology.kubernetes.io/region": "conformance",
        "topology.kubernetes.io/zone": f"zone-{ZONES[(machine.index - 1) % len(ZONES)]}",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": machine.name, "labels": labels},
        "spec": {"podCIDR": machine.pod_cidrs[0], "podCIDRs": list(machine.pod_cidrs)},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": address} for address in _reported_addresses(cluster, machine)
            ]
        },
    }


def _reported_addresses(cluster: Cluster, machine: Machine) -> tuple[str, ...]:
    return machine.addresses[:1] if cluster.state.ipv4_nodes else machine.addresses


def start_containerd(cluster: Cluster, machine: Machine) -> None:
    folder = cluster.files(machine.name)
    config = CONTAINERD.format(
        folder=folder,
        socket=SOCKET,
        pause=cluster.version.pause,
        programs=cluster.programs,
        runc=program("runc"),
    )
    write(folder / "containerd.toml", config)
    flags = ["--config", str(folder / "containerd.toml"), "--log-level", "warn"]
    command = [str(cluster.programs / "containerd"), *flags]
    start_service(cluster, machine, "containerd", command, search_path(cluster))


def import_images(cluster: Cluster, machine: Machine, archives: Sequence[Path]) -> None:
    ctr = [*inside(cluster, machine), str(cluster.programs / "ctr")]

    def answers() -> bool:
        return subprocess.run([*ctr, "version"], capture_output=True, check=False).returncode == 0

    wait_for(f"containerd of {machine.name} answers", answers)
    for archive in archives:
        call([*ctr, "-n=k8s.io", "images", "import", "--local", "--digests=false", str(archive)])


def start_kubelet(cluster: Cluster, machine: Machine) -> None:
    folder = cluster.files(machine.name)
    config = {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(cluster.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cluster.global_name(machine.name)}",
        "failCgroupV1": False,
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "resolvConf": str(folder / "resolv.conf"),
        "failSwapOn": False,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "imageMinimumGCAge": "24h",
        "maxPods": 110,
        "registerNode": True,
        "volumePluginDir": str(folder / "kubelet" / "volume-plugins"),
        "podLogsDir": "/var/log/pods",
        "healthzBindAddress": "127.0.0.1",
    }
    write(folder / "kubelet.json", config)
    command = [
        str(cluster.programs / "kubelet"),
        f"--config={folder / 'kubelet.json'}",
        f"--kubeconfig={cluster.kubeconfig(machine.name)}",
        f"--root-dir={folder / 'kubelet'}",
        f"--cert-dir={folder / 'kubelet' / 'pki'}",
        f"--hostname-override={machine.name}",
        f"--node-ip={','.join(_reported_addresses(cluster, machine))}",
        "--v=2",
    ]
    start_service(cluster, machine, "kubelet", command, search_path(cluster))


def ready_nodes(cluster: Cluster) -> int:
    """The number of nodes that kubelet reports as ready."""
    conditions = [
        condition for node in cluster.get("nodes")["items"] for condition in node["status"].get("conditions", ())
    ]
    return sum(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

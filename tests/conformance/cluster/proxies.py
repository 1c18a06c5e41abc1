# SPDX-License-Identifier: Apache-2.0
"""Starts and stops the Service proxy: kbpf as the DaemonSet of manifests/, or a process on each
node (kbpf, the real kube-proxy, or any command).
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.conformance.cluster import kbpf
from tests.conformance.cluster.layout import (
    POD_CIDRS,
    SERVICE_CIDRS,
    Cluster,
    Failed,
    Machine,
    call,
    wait_for,
    write,
)
from tests.conformance.cluster.machines import inside, start_service, stop_service

KBPF = "kbpf"
KBPF_PROCESS = "kbpf-process"
FORWARDING = {"kbpf-stack": "stack", "kbpf-direct": "direct"}
"""As kbpf-process, with this --forwarding."""
KUBE_PROXY = "kube-proxy-"
NAMES = (KBPF, KBPF_PROCESS, *FORWARDING, f"{KUBE_PROXY}nftables", f"{KUBE_PROXY}iptables")
SERVICE = "proxy"
GROUP = "rbac.authorization.k8s.io"


def start(cluster: Cluster, proxy: str) -> None:
    """Starts a proxy of NAMES, or a shell command, on all nodes."""
    cluster.state.proxy = proxy
    cluster.save()
    if proxy == KBPF:
        kbpf.apply(cluster)
        return
    if proxy not in NAMES:
        _grant_all(cluster)
    processes = {}
    for node in cluster.nodes:
        command = _command(cluster, node, proxy)
        processes[node.name] = start_service(cluster, node, SERVICE, command, environment(cluster, node))
    time.sleep(1.5)
    for name, process in processes.items():
        if process.poll() is not None:
            log = cluster.files(name, "log", f"{SERVICE}.log").read_text()[-2000:]
            raise Failed(f"the proxy exited on {name} with {process.returncode}:\n{log}")


def stop(cluster: Cluster) -> None:
    """Stops the proxy, and removes what it left on the nodes, unless it is a shell command."""
    proxy = cluster.state.proxy
    if proxy == KBPF:
        kbpf.delete(cluster)
    for node in cluster.nodes:
        stop_service(cluster, node, SERVICE)
        if proxy in NAMES:
            command = [*_command(cluster, node, proxy), "--cleanup"]
            if not proxy.startswith(KUBE_PROXY):
                command = [_own_kbpf(), "cleanup", "--pin-dir", kbpf.PIN_DIR]
            _run(cluster, node, command)
    cluster.state.proxy = ""
    cluster.save()


def _run(cluster: Cluster, node: Machine, command: list[str]) -> None:
    with cluster.files(node.name, "log", "proxy-cleanup.log").open("ab") as log:
        subprocess.run([*inside(cluster, node), *command], stdout=log, stderr=log, timeout=300, check=False)


def _command(cluster: Cluster, node: Machine, proxy: str) -> list[str]:
    if proxy not in NAMES:
        return ["bash", "-c", proxy]
    is_kube_proxy = proxy.startswith(KUBE_PROXY)
    config = cluster.files(node.name, SERVICE, "config.json")
    write(config, _configuration(cluster, proxy.removeprefix(KUBE_PROXY) if is_kube_proxy else ""))
    flags = [f"--config={config}", f"--hostname-override={node.name}"]
    if is_kube_proxy:
        return [str(cluster.programs / "kube-proxy"), *flags]
    forwarding = ("--forwarding", FORWARDING[proxy]) if proxy in FORWARDING else ()
    return [
        *(_own_kbpf(), "run", *flags, *forwarding),
        *("--cgroup", kbpf.NODE_CGROUP, "--pin-dir", kbpf.PIN_DIR),
    ]


def _own_kbpf() -> str:
    return str(Path(sys.executable).parent / "kbpf")


def _configuration(cluster: Cluster, mode: str) -> dict[str, object]:
    """The KubeProxyConfiguration of a process."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "clusterCIDR": ",".join(POD_CIDRS),
        "bindAddress": "0.0.0.0",
        "clientConnection": {"kubeconfig": str(cluster.kubeconfig("proxy"))},
        "healthzBindAddress": "0.0.0.0:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0},  # conntrack's size is the whole machine's
    }


def environment(cluster: Cluster, node: Machine) -> dict[str, str]:
    """The environment of a proxy's process; README.md describes it."""
    ipv4, ipv6 = node.addresses
    return {
        "NODE_NAME": node.name,
        "KUBECONFIG": str(cluster.kubeconfig("proxy")),
        "CGROUP": kbpf.NODE_CGROUP,
        "NODE_IP": ipv4,
        "NODE_IP6": ipv6,
        "POD_CIDR": node.pod_cidrs[0],
        "POD_CIDR6": node.pod_cidrs[1],
        "CLUSTER_CIDR": POD_CIDRS[0],
        "CLUSTER_CIDR6": POD_CIDRS[1],
        "SERVICE_CIDR": SERVICE_CIDRS[0],
        "SERVICE_CIDR6": SERVICE_CIDRS[1],
        "API_SERVER": cluster.api_server,
        "WORKDIR": str(cluster.files(node.name, SERVICE)),
        "BIN": str(cluster.programs),
    }


def _grant_all(cluster: Cluster) -> None:
    """We do not know what a command needs."""
    cluster.apply(
        {
            "apiVersion": f"{GROUP}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "conformance-proxy"},
            "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"apiGroup": GROUP, "kind": "User", "name": "system:kube-proxy"}],
        }
    )


def wait_until_serving(cluster: Cluster) -> None:
    """Until the cluster's DNS is available: its pods ask the API server through its Service."""
    if cluster.state.proxy == KBPF:
        kbpf.wait(cluster)

    def has_dns() -> bool:
        status = json.loads(call(cluster.kubectl_command("-n=kube-system", "get", "deploy/coredns", "-o=json")))[
            "status"
        ]
        return int(status.get("availableReplicas", 0)) == 2

    wait_for("CoreDNS is available", has_dns, step=1)

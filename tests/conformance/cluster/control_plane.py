# SPDX-License-Identifier: Apache-2.0
"""The control plane's machine: certificates, users, etcd, kube-apiserver, controller manager and
scheduler; and the load balancer of the fabric.
"""

import base64
import secrets
import subprocess
import sys

from tests.conformance.cluster.layout import (
    CONTROL_PLANE,
    FABRIC,
    FILES,
    LOAD_BALANCER_CIDRS,
    POD_CIDRS,
    SERVICE_CIDRS,
    Cluster,
    Failed,
    wait_for,
    write,
)
from tests.conformance.cluster.machines import make_cgroup, spawn, start_service
from tests.support.cluster.certs import Authority

ETCD = "http://127.0.0.1:2379"


def make_pki(cluster: Cluster) -> None:
    """The CA, the API server's certificates, and the key of service accounts' tokens."""
    cluster.pki.mkdir(parents=True)
    authority = Authority(cluster.pki)
    service = "kubernetes.default.svc"
    names = ["kubernetes", "kubernetes.default", service, f"{service}.cluster.local", "localhost"]
    own = cluster.machines[CONTROL_PLANE].addresses
    authority.issue("apiserver", [*names, "127.0.0.1", "::1", "10.96.0.1", "fd00:10:96::1", *own])
    authority.issue_client("kubelet-client", "kube-apiserver-kubelet-client", "system:masters")
    key = str(cluster.pki / "service-accounts.key")
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)


def make_users(cluster: Cluster) -> None:
    """A kubeconfig with a token for each user of the API."""
    users = {
        "admin": ("admin", "system:masters"),
        "controller-manager": ("system:kube-controller-manager", ""),
        "scheduler": ("system:kube-scheduler", ""),
        "proxy": ("system:kube-proxy", ""),
        **{node.name: (f"system:node:{node.name}", "system:nodes") for node in cluster.nodes},
    }
    authority = base64.b64encode((cluster.pki / "ca.crt").read_bytes()).decode()
    tokens = []
    for name, (user, group) in users.items():
        token = secrets.token_hex(16)
        tokens.append(f'{token},{user},{name},"{group}"\n')
        server = {"server": cluster.api_server, "certificate-authority-data": authority}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "conformance",
            "clusters": [{"name": "conformance", "cluster": server}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "conformance", "context": {"cluster": "conformance", "user": name}}],
        }
        write(cluster.kubeconfig(name), config, 0o600)
    write(cluster.pki / "tokens.csv", "".join(tokens), 0o600)


def start(cluster: Cluster) -> None:
    """Returns once the API server is ready."""
    machine = cluster.machines[CONTROL_PLANE]
    pki, service_cidrs = cluster.pki, ",".join(SERVICE_CIDRS)

    def run(name: str, *flags: str) -> None:
        start_service(cluster, machine, name, [str(cluster.programs / name), *flags])

    run(
        "etcd",
        f"--data-dir={cluster.files(CONTROL_PLANE, 'etcd')}",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--log-level=warn",
    )
    run(
        "kube-apiserver",
        f"--etcd-servers={ETCD}",
        f"--advertise-address={machine.addresses[0]}",
        "--secure-port=6443",
        "--allow-privileged=true",
        f"--service-cluster-ip-range={service_cidrs}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--token-auth-file={pki}/tokens.csv",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--kubelet-client-certificate={pki}/kubelet-client.crt",
        f"--kubelet-client-key={pki}/kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-signing-key-file={pki}/service-accounts.key",
        f"--service-account-key-file={pki}/service-accounts.key",
    )
    wait_for("the API server is ready", lambda: _is_ready(cluster))
    own = "--bind-address=127.0.0.1", "--leader-elect=false"
    run(
        "kube-controller-manager",
        f"--kubeconfig={cluster.kubeconfig('controller-manager')}",
        "--use-service-account-credentials=true",
        f"--root-ca-file={pki}/ca.crt",
        f"--service-account-private-key-file={pki}/service-accounts.key",
        "--allocate-node-cidrs=false",
        f"--cluster-cidr={','.join(POD_CIDRS)}",
        f"--service-cluster-ip-range={service_cidrs}",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        *own,
    )
    run("kube-scheduler", f"--kubeconfig={cluster.kubeconfig('scheduler')}", *own)


def _is_ready(cluster: Cluster) -> bool:
    try:
        return cluster.kubectl("get", "--raw", "/readyz") == "ok"
    except Failed:
        return False


def start_load_balancer(cluster: Cluster) -> None:
    """It runs in the fabric's network namespace, and has a separate cgroup."""
    log = cluster.files(FABRIC, "log", "load-balancer.log")
    log.parent.mkdir(parents=True)
    name = cluster.global_name(FABRIC)
    make_cgroup(name)
    command = [
        *(str(FILES / "cgroup-exec"), f"/{name}/system"),
        *("nsenter", f"--net={cluster.netns(FABRIC)}", sys.executable),
        *("-m", "tests.conformance.cluster.load_balancer", str(cluster.kubeconfig("admin"))),
        *LOAD_BALANCER_CIDRS,
    ]
    spawn(command, log, folder=FILES.parents[2])

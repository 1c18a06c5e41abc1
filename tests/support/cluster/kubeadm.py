# SPDX-License-Identifier: Apache-2.0
"""A real kubeadm and its add-on kube-proxy, the files that it writes into the ConfigMap kube-proxy
(1.37), and a fake of a ConfigMap's mount.

tests/lab/cluster/test_kubeadm.py compares the texts here with the program's output.
"""

import shutil
from pathlib import Path

import yaml

from tests.support.build import go_build
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Object
from tests.support.cluster.kubectl import Kubectl, call, documents
from tests.support.lab.lab import inside

VERSION = go_build.kubernetes_version()
KUBECONFIG = "/var/lib/kube-proxy/kubeconfig.conf"
_CONFIG = """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: {kubeconfig}
  qps: 0
clusterCIDR: {cluster_cidr}
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
kind: KubeProxyConfiguration
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: iptables
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
"""
_KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters:
- cluster:
    certificate-authority: {account}/ca.crt
    server: {server}
  name: default
contexts:
- context:
    cluster: default
    namespace: default
    user: default
  name: default
current-context: default
users:
- name: default
  user:
    tokenFile: {account}/token
"""
_CLUSTER = """\
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint: {{advertiseAddress: 198.51.100.1}}
nodeRegistration: {{criSocket: "unix:///run/containerd/containerd.sock"}}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: {version}
controlPlaneEndpoint: {endpoint}
networking: {{podSubnet: "{pods}"}}
"""
"""kubeadm's configuration, complete so that it detects nothing on this machine."""


def config(cluster_cidr: str, kubeconfig: Path | str = KUBECONFIG) -> str:
    """The text of config.conf, with the pod networks of --pod-network-cidr."""
    return _CONFIG.format(cluster_cidr=cluster_cidr, kubeconfig=kubeconfig)


def kubeconfig(server: str, account: Path) -> str:
    """The text of kubeconfig.conf, with the control plane's address. `account`: the folder in which
    kubelet mounts the ServiceAccount's files.
    """
    return _KUBECONFIG.format(server=server, account=account)


class Kubeadm:
    """`kubeadm init phase addon kube-proxy` for a cluster whose control plane is this API server.

    `endpoint`: its controlPlaneEndpoint, HOST:PORT, by default the server's; `pods`: its
    networking.podSubnet; `proxy`: fields of the user's KubeProxyConfiguration; `patches`: a folder
    of patches; `disabled`: whether the add-on kube-proxy is; `version`: of Kubernetes.
    """

    def __init__(
        self,
        program: Path,
        server: ApiServer,
        folder: Path,
        *,
        endpoint: str = "",
        pods: str = "10.244.0.0/16",
        proxy: Object | None = None,
        patches: Path | None = None,
        disabled: bool = False,
        version: str = VERSION,
    ) -> None:
        self._program, self._netns, self._folder = program, server.netns, folder
        self._admin = server.kubeconfig(folder / "kubeconfig-kubeadm", "admin")
        self._config = folder / "kubeadm.yaml"
        endpoint = endpoint or server.url.removeprefix("https://")
        objects = [*yaml.safe_load_all(_CLUSTER.format(endpoint=endpoint, pods=pods, version=version))]
        if proxy is not None:
            kind = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
            objects.append(kind | proxy)
        if disabled:
            objects[1]["proxy"] = {"disabled": True}
        if patches is not None:
            objects[0]["patches"] = {"directory": str(patches)}
        self._config.write_text(yaml.safe_dump_all(objects))

    def install_kube_proxy(self) -> None:
        """Creates kube-proxy's objects, or restores them."""
        said = self._addon(f"--kubeconfig={self._admin}")
        assert "Applied essential addon: kube-proxy" in said, said

    def upload_config(self) -> None:
        """Stores the configuration in the ConfigMaps kubeadm-config and kubelet-config, as `kubeadm
        init` does.
        """
        command = (
            str(self._program),
            "init",
            "phase",
            "upload-config",
            "all",
            f"--config={self._config}",
            f"--kubeconfig={self._admin}",
        )
        call(inside(self._netns, None, *command), self._folder)

    def remove_kube_proxy(self, admin: Kubectl) -> None:
        """Deletes kube-proxy's objects, as far as they exist."""
        admin("delete", "-f", "-", "--ignore-not-found", "--wait=false", stdin=self.manifest())

    def kube_proxy(self) -> list[Object]:
        """kube-proxy's objects."""
        return documents(self.manifest())

    def manifest(self) -> str:
        """kube-proxy's objects as YAML, as kubeadm prints them."""
        return self._addon("--print-manifest")

    def _addon(self, *arguments: str) -> str:
        command = (str(self._program), "init", "phase", "addon", "kube-proxy", f"--config={self._config}", *arguments)
        return call(inside(self._netns, None, *command), self._folder)


class ControlPlaneNode:
    """A control plane node as far as `kubeadm upgrade` looks at one: its files below a root folder
    of its own, its Node, and the mirror Pod of its kube-apiserver. There is no container runtime
    and no kubelet, so the phases of kubeadm that need them are skipped.
    """

    name = "control-plane"
    objects = """
apiVersion: v1
kind: Node
# kubeadm 1.36 waits a minute for a Node to have this label, before it patches it.
metadata: {name: control-plane, labels: {kubernetes.io/hostname: control-plane}}
---
apiVersion: v1
kind: Pod
metadata:
  name: kube-apiserver-control-plane
  namespace: kube-system
  labels: {component: kube-apiserver, tier: control-plane}
  annotations:
    kubernetes.io/config.mirror: "0"
    kubeadm.kubernetes.io/kube-apiserver.advertise-address.endpoint: "198.51.100.1:6443"
spec: {nodeName: control-plane, containers: [{name: kube-apiserver, image: kube-apiserver}]}
"""
    """The Node, and the Pod with the address of its API server."""
    skipped = "--skip-phases=preflight,control-plane,kubelet-config,addon/coredns"
    """What pulls images, waits for kubelet to start static pods, and changes files of kubelet."""

    def __init__(self, program: Path, server: ApiServer, folder: Path, patches: Path) -> None:
        self._root, self._netns = folder / "root", server.netns
        for path in ("etc/kubernetes/manifests", "var/lib/kubelet", "tmp", "proc"):
            (self._root / path).mkdir(parents=True)
        shutil.copy(program, self._root / "kubeadm")
        shutil.copytree(patches, self._root / "etc/kubernetes/patches")
        server.kubeconfig(self._root / "etc/kubernetes/admin.conf", "admin")
        (self._root / "etc/kubernetes/manifests/kube-apiserver.yaml").touch()
        (self._root / "var/lib/kubelet/instance-config.yaml").write_text(
            "containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n"
        )

    def run(self, *arguments: str) -> str:
        """The output of `kubeadm ARGUMENTS` on this node."""
        script = 'hostname "$1"; root=$2; shift 2; exec chroot "$root" /kubeadm "$@"'
        words = ("unshare", "--uts", "sh", "-c", script, "sh", self.name, str(self._root))
        return call(inside(self._netns, None, *words, *arguments), self._root)


class Mount:
    """A folder whose files change atomically, as kubelet mounts a ConfigMap or a token: FILE →
    ..data/FILE, ..data → ..N.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        folder.mkdir()

    def put(self, **files: str) -> None:
        """Replaces all files by these (`_` is a dot in their names)."""
        self._count += 1
        version = self.folder / f"..{self._count}"
        version.mkdir()
        for name, text in files.items():
            (version / name.replace("_", ".")).write_text(text)
        swap = self.folder / "..data_tmp"
        swap.symlink_to(version.name)
        swap.rename(self.folder / "..data")
        for name in files:
            link = self.folder / name.replace("_", ".")
            if not link.is_symlink():
                link.symlink_to(f"..data/{link.name}")

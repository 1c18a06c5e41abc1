"""What `kubeadm init` writes into the ConfigMap kube-proxy (1.36), and a ConfigMap's mount."""

from pathlib import Path

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
mode: ""
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


def config(cluster_cidr: str, kubeconfig: Path | str = KUBECONFIG) -> str:
    """config.conf, with the pods' networks of --pod-network-cidr."""
    return _CONFIG.format(cluster_cidr=cluster_cidr, kubeconfig=kubeconfig)


def kubeconfig(server: str, account: Path) -> str:
    """kubeconfig.conf, with the control plane's address. `account`: the folder that holds what
    kubelet mounts of the service account.
    """
    return _KUBECONFIG.format(server=server, account=account)


class Mount:
    """A folder of files that change all at once, as kubelet mounts a ConfigMap or a token:
    FILE → ..data/FILE, ..data → ..N.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        folder.mkdir()

    def put(self, **files: str) -> None:
        """These files (`_` is a dot in their names), and none else, from now on."""
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

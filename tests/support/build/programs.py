# SPDX-License-Identifier: Apache-2.0
"""The Go programs of the tests: the module that pins each, its package, and how it is built."""

from dataclasses import dataclass

PREVIOUS = "previous.mod"
"""The go.mod file that pins the minor version of Kubernetes before go.mod's."""
PREVIOUS_SUFFIX = "-1.36"
"""Ends the names of the programs that PREVIOUS pins."""


@dataclass(frozen=True, slots=True)
class Program:
    """One binary: the module folder below go/ that pins it, and its main package, which is one of
    the module's dependencies, or our source: "." or ./FOLDER.
    """

    module: str
    package: str
    in_assets: bool = False  # $KUBEBUILDER_ASSETS must have it
    pins: str = "go.mod"  # the go.mod file to use
    cgo: bool = False  # it has parts in C: it needs gcc
    is_test: bool = False  # a package of tests, built by `go test -c`
    tags: str = ""
    version_variable: str = ""  # gets the version of the package's module, without "v"


def _programs(text: str) -> dict[str, Program]:
    """A program on each line: its name, module, package, and fields with another value than the default."""
    found = {}
    for name, module, package, *fields in map(str.split, text.strip().splitlines()):
        options = (field.partition("=") for field in fields)
        found[name] = Program(module, package, **{key: value or True for key, _, value in options})
    return found


PROGRAMS = _programs("""
etcd            etcd         go.etcd.io/etcd/server/v3                                      in_assets
etcdctl         etcdtools    go.etcd.io/etcd/etcdctl/v3
etcdutl         etcdtools    go.etcd.io/etcd/etcdutl/v3
kube-apiserver  apiserver    k8s.io/kubernetes/cmd/kube-apiserver                           in_assets
kube-proxy      apiserver    k8s.io/kubernetes/cmd/kube-proxy
kubeadm         apiserver    k8s.io/kubernetes/cmd/kubeadm
kubectl         apiserver    k8s.io/kubernetes/cmd/kubectl
judge           apiserver    ./judge
judge-1.36      apiserver    ./judge                                                        pins=previous.mod
kubeadm-1.36    apiserver    k8s.io/kubernetes/cmd/kubeadm                                  pins=previous.mod
coredns         coredns      .
registers       registers    .
helm            helm         helm.sh/helm/v3/cmd/helm
bridge          cni          github.com/containernetworking/plugins/plugins/main/bridge
ptp             cni          github.com/containernetworking/plugins/plugins/main/ptp
host-local      cni          github.com/containernetworking/plugins/plugins/ipam/host-local
loopback        cni          github.com/containernetworking/plugins/plugins/main/loopback
portmap         cni          github.com/containernetworking/plugins/plugins/meta/portmap
bandwidth       cni          github.com/containernetworking/plugins/plugins/meta/bandwidth
firewall        cni          github.com/containernetworking/plugins/plugins/meta/firewall
flannel         cni          github.com/containernetworking/plugins/plugins/meta/flannel    pins=flannel.mod
flanneld        flannel      github.com/flannel-io/flannel                                  cgo
kube-router     kuberouter   github.com/cloudnativelabs/kube-router/v2/cmd/kube-router
""")
"""For all tests except tests/conformance."""
RARE = {"kube-router"}
"""Programs that `make test` does not need."""
CILIUM = ("github.com/cilium/cilium@v1.20.2", "h1:dqiEGIcXc+gqCLYG/l7VCFJ8GHyb4HUrwbZOpkX5dL8=")
"""A module whose files are read, and its digest."""
CNI_PLUGINS = ("bridge", "ptp", "host-local", "portmap", "bandwidth", "firewall")

_CONTAINERD = "github.com/containerd/containerd/v2"
NODE_PROGRAMS = {
    **{
        name: Program(
            "containerd",
            f"{_CONTAINERD}/cmd/{name}",
            tags="no_btrfs,no_devmapper,no_zfs",
            version_variable=f"{_CONTAINERD}/version.Version",
        )
        for name in ("containerd", "containerd-shim-runc-v2", "ctr")
    },
    "cluster-coredns": Program("clusterdns", "github.com/coredns/coredns"),
}
"""For tests/conformance: a node's container runtime, and the cluster's DNS."""

_KUBERNETES = {
    name: Program("conformance", f"k8s.io/kubernetes/{folder}/{name}")
    for folder, names in (
        ("cmd", ("kube-controller-manager", "kube-scheduler", "kubelet")),
        ("test/images", ("agnhost", "regression-issue-74839")),
    )
    for name in names
} | {
    "ginkgo": Program("conformance", "github.com/onsi/ginkgo/v2/ginkgo"),
    "e2e.test": Program("conformance", "k8s.io/kubernetes/test/e2e", is_test=True),
}
CLUSTER_PROGRAMS = {"kube-apiserver", "kube-proxy", "kubectl", *_KUBERNETES}
"""The programs of a cluster of tests/conformance that exist once for each version of Kubernetes."""
CONFORMANCE = NODE_PROGRAMS | _KUBERNETES
"""For tests/conformance, with the version of Kubernetes that the other tests use."""
CONFORMANCE_PREVIOUS = {
    f"{name}{PREVIOUS_SUFFIX}": Program(
        "conformance",
        _KUBERNETES[name].package if name in _KUBERNETES else PROGRAMS[name].package,
        pins=PREVIOUS,
        is_test=name in _KUBERNETES and _KUBERNETES[name].is_test,
    )
    for name in sorted(CLUSTER_PROGRAMS)
}
"""The same of the minor version before."""
ALL = PROGRAMS | CONFORMANCE | CONFORMANCE_PREVIOUS

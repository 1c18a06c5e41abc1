# SPDX-License-Identifier: Apache-2.0
"""kbpf as operators install it: the overlay kubeadm-new of manifests/, with an image built from the
Containerfile, run by the real kubelets.

Three things differ from manifests/, because the nodes share one machine:

- KBPF_CGROUP: a node's cgroup root is a cgroup of the machine. kbpf, which looks for the root of
  the hierarchy, would attach its hooks to all nodes.
- conntrack's limit is not set: it is the whole machine's.
- A capability that the machine does not have cannot be granted.
"""

import tempfile
from pathlib import Path

import yaml

from kbpf import __version__
from tests.conformance.cluster.layout import POD_CIDRS, Cluster, Object
from tests.conformance.cluster.nodes import import_images
from tests.support.build import image
from tests.support.cluster.kubectl import copy_of_manifests, kustomize
from tests.support.runtime.pods import capabilities_here

TARGET = "slim"
"""The image with compiled programs: with the other one, each node would run the compiler."""
IMAGE = f"docker.io/library/kbpf:{__version__}"
DAEMON_SET = "daemonset/kube-proxy"
NODE_CGROUP = "/run/node-cgroup"
"""Where files/node-init shows the node's cgroup."""
PIN_DIR = "/sys/fs/bpf/kbpf"
ROLLOUT_SECONDS = 300


def apply(cluster: Cluster) -> None:
    """Builds the image, shows it to the nodes, and creates the objects of manifests/."""
    with tempfile.TemporaryDirectory(dir=cluster.folder, prefix="kbpf-") as name:
        folder = Path(name)
        archive = folder / "kbpf.tar"
        image.archive(TARGET, folder, IMAGE, archive)
        for node in cluster.nodes:
            import_images(cluster, node, [archive])
        manifests = copy_of_manifests(folder, cluster.api_server, ",".join(POD_CIDRS))
        objects = kustomize(cluster.programs / "kubectl", manifests / "overlays" / "kubeadm-new")
    cluster.apply(*map(_adapted, objects))


def delete(cluster: Cluster) -> None:
    cluster.kubectl("-n=kube-system", "delete", DAEMON_SET, "--cascade=foreground")


def wait(cluster: Cluster) -> None:
    """Until every pod of the DaemonSet is ready."""
    timeout = f"--timeout={ROLLOUT_SECONDS}s"
    cluster.kubectl("-n=kube-system", "rollout", "status", DAEMON_SET, timeout)


def _adapted(object_: Object) -> Object:
    if object_["kind"] == "ConfigMap" and "config.conf" in object_["data"]:
        config = yaml.safe_load(object_["data"]["config.conf"])
        config["conntrack"] = {"maxPerCore": 0, "min": 0}
        object_["data"]["config.conf"] = yaml.safe_dump(config)
    if object_["kind"] == "DaemonSet":
        spec = object_["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        container["env"].append({"name": "KBPF_CGROUP", "value": "/host/sys/fs/cgroup"})
        (cgroup,) = (each for each in spec["volumes"] if each["name"] == "cgroup")
        cgroup["hostPath"]["path"] = NODE_CGROUP
        granted = container["securityContext"]["capabilities"]["add"]
        granted[:] = sorted(capabilities_here(granted))
    return object_

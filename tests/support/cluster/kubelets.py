# SPDX-License-Identifier: Apache-2.0
"""A fake of the kubelets of a lab's nodes and of the DaemonSet controller.

It reads DaemonSets, ConfigMaps, ServiceAccounts and Nodes from the API server, decides where pods
run, creates the Pod objects, updates their status and the DaemonSets', and lets the node run the
container (daemonset.PodAgent). It also records a DaemonSet's templates as ControllerRevisions, for
`kubectl rollout undo`. A node has one serving pod, and possibly auxiliary pods of manifests/cleanup
and manifests/prepull.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.cluster.kube import Kube, Object, path_of
from tests.support.cluster.scenario import put
from tests.support.lab.lab import until
from tests.support.runtime.pods import Container

if TYPE_CHECKING:
    from tests.support.cluster.daemonset import PodAgent

SPACE = "kube-system"


@dataclass(frozen=True, slots=True)
class _Beside:
    """An auxiliary pod: its name, the digest of its template, and the container."""

    pod: str
    runs: str
    container: Container
    ready: bool


class Kubelets:
    def __init__(self, kube: Kube, ca: Path, agents: Sequence["PodAgent"]) -> None:
        self._kube = kube
        self._ca = ca
        self._agents = {agent.node.name: agent for agent in agents}
        self.images = {"kbpf:0.1.0", "kbpf:0.2.0"}
        """Images that nodes can pull, in addition to all of registry.k8s.io."""
        self.never_ready: set[str] = set()
        """Images whose pods never become ready: a rollout stops there, since maxUnavailable allows
        no further node. Those that are not in `images` either cannot be pulled.
        """
        self._pods: dict[str, str] = {}  # node → the name of its serving Pod
        self.pulled: dict[str, set[str]] = {name: set() for name in self._agents}
        """Node → the images that it has pulled."""
        self._beside: dict[tuple[str, str], _Beside] = {}  # by node and DaemonSet
        self._count = 0

    def sync(self) -> None:
        """Ends pods that should not run or have an old template; then starts missing
        ones and waits until each is ready by its probe: node by node, like a rolling update, which
        stops at a pod that does not become ready.
        """
        nodes = {each["metadata"]["name"]: each for each in self._kube.list("Node")["items"]}
        sets = self._kube.list("DaemonSet", SPACE)["items"]
        for each in sets:
            record_revision(self._kube, each)
        is_stopped = False
        for name in self._agents:
            wanted = [each for each in sets if name in nodes and runs_on(each["spec"]["template"]["spec"], nodes[name])]
            if not is_stopped:
                serving = [each for each in wanted if not is_beside(each)]
                is_stopped = not self._sync_serving(name, serving)
            self._sync_beside(name, [each for each in wanted if is_beside(each)])
        for each in sets:
            self._report(each, nodes)

    def _sync_serving(self, name: str, wanted: list[Object]) -> bool:
        """Syncs a node's serving pod; returns whether it is ready."""
        assert len(wanted) <= 1, "a node runs one agent"
        agent = self._agents[name]
        if agent.runs and not agent.is_running:
            agent.forget()
        stays = wanted and agent.runs == digest(wanted[0]["spec"]["template"])
        if agent.runs and not stays:
            assert agent.stop() == 0, agent.tail()
        if not agent.runs:
            self._remove_pod(self._pods.pop(name, ""))
        gets_ready = not wanted or image_of(wanted[0]) not in self.never_ready
        if wanted and not agent.runs:
            self._start(agent, wanted[0])
            if gets_ready:
                agent.wait_ready(wanted[0]["spec"]["template"]["spec"])
                self._is_ready(self._pods[name])
        return gets_ready

    def _sync_beside(self, name: str, wanted: list[Object]) -> None:
        """Syncs a node's auxiliary pods: ends outdated ones and starts missing ones."""
        sets = {each["metadata"]["name"]: each for each in wanted}
        for key in [key for key in self._beside if key[0] == name]:
            owner = sets.get(key[1])
            if owner is None or digest(owner["spec"]["template"]) != self._beside[key].runs:
                made = self._beside.pop(key)
                made.container.close()
                self._remove_pod(made.pod)
        for owner_name, owner in sets.items():
            if (name, owner_name) not in self._beside:
                self._beside[name, owner_name] = self._start_beside(self._agents[name], owner)

    def _start_beside(self, agent: "PodAgent", owner: Object) -> _Beside:
        """Starts an auxiliary pod, waits until it has done its work, and runs its readiness
        probe.
        """
        template = owner["spec"]["template"]
        pod = self._create_pod(agent.node.name, owner["metadata"]["name"], template)
        assert self._pulls(agent, owner)
        container = agent.beside(template["spec"], *self._needs(agent, template["spec"]))
        until(
            "the auxiliary pod has done its work",
            lambda: container.code is not None or _command(container).startswith(b"sleep\0"),
        )
        (spec,) = template["spec"]["containers"]
        probe = spec.get("readinessProbe", {}).get("exec", {}).get("command")
        ready = container.code is None
        if ready and probe:
            ready = container.exec(*probe).returncode == 0
        if ready:
            self._is_ready(pod)
        return _Beside(pod, digest(template), container, ready)

    def launch(self, agent: "PodAgent") -> None:
        """Starts an agent's pod, without waiting for it to be ready."""
        (only,) = self._kube.list("DaemonSet", SPACE)["items"]
        self._remove_pod(self._pods.pop(agent.node.name, ""))
        self._start(agent, only)

    def try_out(self, agent: "PodAgent", command: list[str], paths: Mapping[str, Path]) -> str:
        """The output of a command in a new container of the pod's spec, with these hostPaths."""
        (only,) = self._kube.list("DaemonSet", SPACE)["items"]
        spec = only["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        spec["containers"] = [{**container, "command": command}]
        volumes, account = self._needs(agent, spec)
        return agent.try_out(spec, volumes, account, paths)

    def runc(self) -> dict[str, tuple[str, ...]]:
        """Pod → the command prefix that runs a command in its container, like `kubectl exec`."""
        running = {name: agent for name, agent in self._agents.items() if agent.is_running}
        return {self._pods[name]: agent.runc_exec for name, agent in running.items()}

    def close(self) -> None:
        for each in self._beside.values():
            each.container.close()

    def _start(self, agent: "PodAgent", owner: Object) -> None:
        template = owner["spec"]["template"]
        volumes, account = self._needs(agent, template["spec"])
        name = self._create_pod(agent.node.name, owner["metadata"]["name"], template)
        self._pods[agent.node.name] = name
        if self._pulls(agent, owner):
            agent.launch(template, volumes, account)

    def _pulls(self, agent: "PodAgent", owner: Object) -> bool:
        """Whether the image can be pulled. It must be, unless a test has put it into
        `never_ready`.
        """
        image = image_of(owner)
        there = image in self.images or image.startswith("registry.k8s.io/")
        assert there or image in self.never_ready, f"ErrImagePull: {image} is not in the registry"
        if there:
            self.pulled[agent.node.name].add(image)
        return there

    # ---- objects written to the API server -------------------------------------------------

    def _create_pod(self, node_name: str, owner: str, template: Object) -> str:
        self._count += 1
        name = f"{owner}-{self._count}"
        meta = {"name": name, "namespace": SPACE, "labels": template["metadata"]["labels"]}
        spec = {**template["spec"], "nodeName": node_name}
        self._kube.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        return name

    def _is_ready(self, name: str) -> None:
        kinds = ("Initialized", "ContainersReady", "Ready")
        status = {"phase": "Running", "conditions": [{"type": kind, "status": "True"} for kind in kinds]}
        self._kube.patch("Pod", name, {"status": status}, SPACE, "status")

    def _remove_pod(self, name: str) -> None:
        """Deletes the Pod object, if it exists, as a kubelet does once the containers have
        ended.
        """
        if name:
            path = f"{path_of('Pod', SPACE, name)}?gracePeriodSeconds=0"
            code, said = self._kube.request("DELETE", path)
            assert code in (200, 404), said

    def _report(self, owner: Object, nodes: Mapping[str, Object]) -> None:
        """Updates the DaemonSet's status, which `kubectl rollout status` waits for."""
        template = owner["spec"]["template"]
        desired = [name for name, each in nodes.items() if runs_on(template["spec"], each)]
        runs = digest(template)
        if is_beside(owner):
            updated = len(desired)
            pods = [self._beside.get((name, owner["metadata"]["name"])) for name in desired]
            ready = sum(pod is not None and pod.ready for pod in pods)
        else:
            updated = sum(self._agents[name].runs == runs for name in desired)
            ready = updated if image_of(owner) not in self.never_ready else 0
        status = {
            "observedGeneration": owner["metadata"]["generation"],
            "desiredNumberScheduled": len(desired),
            "currentNumberScheduled": len(desired),
            "updatedNumberScheduled": updated,
            "numberReady": ready,
            "numberAvailable": ready,
        }
        name = owner["metadata"]["name"]
        self._kube.patch("DaemonSet", name, {"status": status}, SPACE, "status")

    # ---- volumes ---------------------------------------------------------------------------

    def _needs(self, agent: "PodAgent", spec: Object) -> tuple[dict[str, Path], Path | None]:
        """The volumes with objects of the API server, and the ServiceAccount's if it is mounted.
        Stores the environment variables that come from ConfigMaps.
        """
        maps = {each["metadata"]["name"]: each.get("data", {}) for each in self._kube.list("ConfigMap", SPACE)["items"]}
        (container,) = spec["containers"]
        agent.env_from = {
            f"{source.get('prefix', '')}{key}": value
            for source in container.get("envFrom", ())
            for key, value in _data(maps, source["configMapRef"]).items()
        }
        volumes = {}
        for volume in spec.get("volumes", ()):
            if given := volume.get("configMap"):
                name = given["name"] if given["name"] in maps else "none"
                folder = volumes[volume["name"]] = agent.folder / "configmaps" / name
                folder.mkdir(parents=True, exist_ok=True)
                for file, text in _data(maps, given).items():
                    put(folder, file, text)
        if not spec.get("automountServiceAccountToken", True):
            return volumes, None
        return volumes, self._account(agent, spec["serviceAccountName"])

    def _account(self, agent: "PodAgent", name: str) -> Path:
        folder = agent.folder / "serviceaccount"
        folder.mkdir(parents=True, exist_ok=True)
        files = {"token": self._kube.token(name, SPACE), "namespace": SPACE, "ca.crt": self._ca.read_text()}
        for file, text in files.items():  # an agent that runs may be reading them
            put(folder, file, text)
        return folder


def _data(maps: Mapping[str, Mapping[str, str]], reference: Object) -> Mapping[str, str]:
    """The files or variables of a ConfigMap, which must exist unless the reference is optional."""
    name = reference["name"]
    assert name in maps or reference.get("optional"), name
    return maps.get(name, {})


def record_revision(kube: Kube, owner: Object) -> None:
    """Records the DaemonSet's current template as the newest ControllerRevision."""
    meta = owner["metadata"]
    data = {"spec": {"template": {**owner["spec"]["template"], "$patch": "replace"}}}
    revisions = [
        each
        for each in kube.list("ControllerRevision", SPACE)["items"]
        if each["metadata"]["ownerReferences"][0]["uid"] == meta["uid"]
    ]
    newest = max(revisions, key=lambda each: int(each["revision"]), default=None)
    if newest is not None and newest["data"] == data:
        return
    for each in revisions:
        if each["data"] == data:  # used before: like a controller, give it a new number
            kube.delete("ControllerRevision", each["metadata"]["name"], SPACE)
    number = 1 if newest is None else newest["revision"] + 1
    reference = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
    }
    metadata = {
        "name": f"{meta['name']}-{meta['uid'][:8]}-{number}",
        "namespace": SPACE,
        "labels": owner["spec"]["template"]["metadata"]["labels"],
        "ownerReferences": [reference],
    }
    kube.create(
        {"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": metadata, "data": data, "revision": number}
    )


def is_beside(owner: Object) -> bool:
    """Whether this is the DaemonSet of manifests/cleanup or manifests/prepull."""
    (container,) = owner["spec"]["template"]["spec"]["containers"]
    command = " ".join(container["command"])
    return "kbpf cleanup" in command or command.startswith("sleep ")


def image_of(owner: Object) -> str:
    (container,) = owner["spec"]["template"]["spec"]["containers"]
    return str(container["image"])


def _command(container: Container) -> bytes:
    """The command line of the container's first process; empty if it does not run."""
    state = container.state()
    if state is None or not state["pid"]:
        return b""
    try:
        return Path(f"/proc/{state['pid']}/cmdline").read_bytes()
    except OSError:
        return b""  # it has exited


def digest(template: Object) -> str:
    """A hash that identifies a pod template, like a controller's revision hash."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:12]


def runs_on(spec: Object, given: Object) -> bool:
    """Whether a DaemonSet's pod runs on this Node: its selector matches, and it tolerates all
    taints if there is one.
    """
    labels, taints = given["metadata"].get("labels", {}), given["spec"].get("taints")
    matches = spec.get("nodeSelector", {}).items() <= labels.items()
    return matches and (not taints or {"operator": "Exists"} in spec.get("tolerations", ()))

"""A lab whose agents are the pods of a real DaemonSet, without a kubelet.

There is no kubelet and no DaemonSet controller here. Kubelets is the fake that stands for both: it
reads DaemonSets, ConfigMaps, ServiceAccounts and Nodes from the API server, decides where a pod has
to run, and runs its container by runc exactly as the spec says (pods.py). What differs from a node:

- a node's cgroup root is a cgroup of the machine's, so the agent is told where it is (KBPF_CGROUP);
- hostPaths are folders of this node's own, as several nodes share one machine (see host_paths());
- the image is the machine's own /usr and this tree, unless a test brings one;
- no probe is asked, unless a test does.
"""

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kbpf.errors import KbpfError
from kbpf.kernel.libbpf import Map
from tests.support.cluster import Cluster
from tests.support.kube import Kube, Object
from tests.support.kube_objects import node
from tests.support.kubectl import Kubectl, copy_of_manifests
from tests.support.lab import Agent, Node, inside
from tests.support.plane import BPFFS
from tests.support.pods import Container, Host, Image, oci_config, this_machine

ROOT = Path(__file__).parents[2]
SPACE = "kube-system"
CONTROL_PLANE = {
    "key": "node-role.kubernetes.io/control-plane",
    "effect": "NoSchedule",
}
LINUX = {"kubernetes.io/os": "linux"}


class PodAgent(Agent):
    """The DaemonSet's container on one node, as an agent of the lab."""

    def __init__(self, home: Node) -> None:
        super().__init__(home)
        self.bpffs = BPFFS / home.netns
        self.bpffs.mkdir()
        self.pin_dir = self.bpffs / "kbpf"
        self.folder = home.lab.folder / f"kubelet-{home.name}"
        self.runs = ""  # which pod template, by its digest
        self.versions: dict[str, Path] = {}
        """Names of images → what their kbpf/ is; all others have this tree's."""
        self._container: Container | None = None
        self._count = 0

    def host_paths(self) -> dict[str, Path]:
        """Each hostPath of the node → where it is on this machine."""
        return {
            "/sys/fs/bpf": self.bpffs,
            "/sys/fs/cgroup": self.node.cgroup,
            "/proc/sys/net": Path("/proc/sys/net"),
            "/run/netns": Path("/run/netns"),
            "/run/kbpf": self.folder / "run",
            "/var/cache/kbpf": self._cache,
        }

    def launch(self, template: Object, volumes: Mapping[str, Path], account: Path | None) -> None:
        """Runs the pod's container. The log and the maps are where those of an Agent are."""
        self.begin()
        self._container = self._make(template["spec"], volumes, account, self.log)
        self._process = self._container.process
        self.runs = digest(template)

    def try_out(
        self,
        spec: Object,
        volumes: Mapping[str, Path],
        account: Path | None,
        paths: Mapping[str, Path],
    ) -> str:
        """What another container of the node prints, with these hostPaths elsewhere."""
        log = self.folder / "tried"
        made = self._make(spec, volumes, account, log, paths)
        try:
            code = made.wait()
        finally:
            made.close()
        said = log.read_text().strip()
        log.unlink()
        assert code == 0, said
        return said

    def _make(
        self,
        spec: Object,
        volumes: Mapping[str, Path],
        account: Path | None,
        log: Path,
        paths: Mapping[str, Path] = MappingProxyType({}),
    ) -> Container:
        self._count += 1
        folder = self.folder / f"pod-{self._count}"
        (folder / "rootfs").mkdir(parents=True)
        (folder / "tmp").mkdir()
        name = f"{self.node.netns}-{self._count}"
        host = Host(
            self.node.netns,
            self.node.name,
            name,
            {**self.host_paths(), **paths},
            {**volumes, "tmp": folder / "tmp"},
            account,
        )
        image = self.image(folder / "rootfs")
        (container,) = spec["containers"]
        if (other := self.versions.get(container["image"])) is not None:
            image = replace(image, instead={ROOT / "kbpf": other})
        config = oci_config(spec, image, host)
        return Container(config, folder, name, self.node.cgroup / "host", log)

    def image(self, rootfs: Path) -> Image:
        """What the container sees of the image."""
        made = this_machine(rootfs, ROOT, Path(sys.prefix))
        scripts = sysconfig.get_path("scripts")
        return Image(
            made.root,
            made.shown,
            f"{scripts}:{made.path}",
            {"KBPF_CGROUP": "/host/sys/fs/cgroup", "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def status(self) -> dict[str, Any] | None:
        """What the agent that was started last says, whichever version's maps it has."""
        found = []
        for path in self.pin_dir.glob("maps-*/agent_status"):
            with contextlib.suppress(KbpfError), Map.open(path) as opened:
                raw = (opened.lookup(bytes(4)) or b"").rstrip(b"\0")
                found += [json.loads(raw)] if raw else []
        return max(found, key=lambda each: each["started"], default=None)

    @property
    def pid(self) -> int:
        """Of the container's process, as the machine sees it."""
        assert self._container is not None
        state = self._container.state()
        assert state is not None
        return int(state["pid"])

    @property
    def _cgroup(self) -> str:
        """Of the container that was started last, below the root of a hierarchy."""
        return f"{self.node.netns}-{self._count}"

    def exec(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """`kubectl exec` in the pod."""
        assert self._container is not None
        return self._container.exec(*command)

    def use_cache(self, folder: Path) -> None:
        """The node's /var/cache/kbpf from now on; else one that all tests share."""
        self._cache = folder

    def usage(self) -> dict[str, float]:
        """What the container's cgroup has used: bytes at most and now, seconds of processor time.

        On machines that have v1 and v2 runc puts it into v1's controllers.
        """
        root = Path("/sys/fs/cgroup")

        def count(controller: str, file: str) -> int:
            return int((root / controller / self._cgroup / file).read_text())

        if (root / "cgroup.controllers").exists():
            (used,) = re.findall(
                r"^usage_usec (\d+)$", (root / self._cgroup / "cpu.stat").read_text(), re.M
            )
            return {
                "peak": count("", "memory.peak"),
                "now": count("", "memory.current"),
                "cpu": int(used) / 1e6,
            }
        return {
            "peak": count("memory", "memory.max_usage_in_bytes"),
            "now": count("memory", "memory.usage_in_bytes"),
            "cpu": count("cpuacct", "cpuacct.usage") / 1e9,
        }

    def stop(self) -> int:
        """SIGTERM, as kubelet does; the exit code."""
        return self._end("TERM")

    def kill(self) -> None:
        """SIGKILL."""
        self._end("KILL")

    def _end(self, signal: str) -> int:
        assert self._container is not None
        code = self._container.stop(signal)
        self.forget()
        return code

    def forget(self) -> None:
        """A container that has ended is removed."""
        assert self._container is not None
        self._container.close()
        self.runs = ""

    def close(self) -> None:
        """Ends it and removes its pins."""
        if self._container is not None:
            self._container.close()
        self.remove_pins()
        shutil.rmtree(self.bpffs, ignore_errors=True)


ASK = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60)
connection.request("GET", sys.argv[3])
print(connection.getresponse().status)
"""


def asked(agent: PodAgent, port: int, path: str) -> int:
    """What a probe of the pod gets, at the node's address as a kubelet asks; 0: nobody answers."""
    words = ("/usr/bin/python3", "-S", "-c", ASK, agent.node.ip, str(port), path)
    command = inside(agent.node.netns, None, *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout or 0)


class Kubelets:
    """The fake of the module's first lines, for all nodes of a lab."""

    def __init__(self, kube: Kube, ca: Path, agents: Sequence["PodAgent"]) -> None:
        self._kube = kube
        self._ca = ca
        self._agents = {agent.node.name: agent for agent in agents}

    def sync(self) -> None:
        """Ends pods that should not run, or not so; then starts those that are missing, and waits
        until each has synced: one node after the other, as a rolling update.
        """
        nodes = {each["metadata"]["name"]: each for each in self._kube.list("Node")["items"]}
        sets = self._kube.list("DaemonSet", SPACE)["items"]
        for name, agent in self._agents.items():
            wanted = [
                each["spec"]["template"]
                for each in sets
                if name in nodes and runs_on(each["spec"]["template"]["spec"], nodes[name])
            ]
            assert len(wanted) <= 1, "one agent on a node"
            if agent.runs and not agent.is_running:
                agent.forget()
            if agent.runs and (not wanted or agent.runs != digest(wanted[0])):
                assert agent.stop() == 0, agent.tail()
            if wanted and not agent.runs:
                self._start(agent, wanted[0])
                agent.wait_synced()

    def launch(self, agent: PodAgent) -> None:
        """Starts its pod, whatever becomes of it."""
        (only,) = self._kube.list("DaemonSet", SPACE)["items"]
        self._start(agent, only["spec"]["template"])

    def try_out(self, agent: PodAgent, command: list[str], paths: Mapping[str, Path]) -> str:
        """What a command prints in another container of the pod's kind, with these hostPaths."""
        (only,) = self._kube.list("DaemonSet", SPACE)["items"]
        spec = only["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        spec["containers"] = [{**container, "command": command}]
        volumes, account = self._needs(agent, spec)
        return agent.try_out(spec, volumes, account, paths)

    def _start(self, agent: PodAgent, template: Object) -> None:
        volumes, account = self._needs(agent, template["spec"])
        agent.launch(template, volumes, account)

    def _needs(self, agent: PodAgent, spec: Object) -> tuple[dict[str, Path], Path | None]:
        """The volumes that come from the API server, and the account's, if it wants one."""
        volumes = {}
        for volume in spec["volumes"]:
            if given := volume.get("configMap"):
                volumes[volume["name"]] = self._config_map(agent, given["name"])
        if not spec.get("automountServiceAccountToken", True):
            return volumes, None
        return volumes, self._account(agent, spec["serviceAccountName"])

    def delete_pod(self, agent: PodAgent) -> None:
        """`kubectl delete pod`: it ends; sync() makes another."""
        assert agent.stop() == 0, agent.tail()

    def _config_map(self, agent: PodAgent, name: str) -> Path:
        folder = agent.folder / "configmaps" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in self._kube.get("ConfigMap", name, SPACE)["data"].items():
            (folder / f"{file}.new").write_text(text)
            (folder / f"{file}.new").rename(folder / file)
        return folder

    def _account(self, agent: PodAgent, name: str) -> Path:
        folder = agent.folder / "serviceaccount"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "token").write_text(self._kube.token(name, SPACE))
        (folder / "namespace").write_text(SPACE)
        shutil.copy(self._ca, folder / "ca.crt")
        return folder


def digest(template: Object) -> str:
    """What tells a pod template from another, as a controller's revision hash does."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:12]


def runs_on(spec: Object, given: Object) -> bool:
    """Whether a DaemonSet's pod runs on this Node: labels are selected, taints tolerated."""
    labels = given["metadata"].get("labels", {})
    if not spec.get("nodeSelector", {}).items() <= labels.items():
        return False
    rows = spec.get("tolerations", [])
    return all(
        any(_tolerates(row, taint) for row in rows) for taint in given["spec"].get("taints", [])
    )


def _tolerates(row: Object, taint: Object) -> bool:
    if row.get("effect") not in (None, "", taint["effect"]):
        return False
    if row.get("operator", "Equal") == "Exists":
        return row.get("key") in (None, "", taint["key"])
    return row.get("key") == taint["key"] and row.get("value", "") == taint.get("value", "")


class PodCluster(Cluster):
    """A cluster in which `kubectl apply -k` brings kbpf to the nodes. The first one is a control
    plane with its taint; the last one joins later, with join().
    """

    def __init__(self, kubectl: Path, nodes: int, name: str) -> None:
        super().__init__(nodes, name)
        self._kubectl = kubectl
        self.pod_agents: list[PodAgent] = []

    def agent_on(self, home: Node, *arguments: str) -> Agent:
        """A pod."""
        assert not arguments, "the pod's spec says all"
        self.pod_agents.append(PodAgent(home))
        return self.pod_agents[-1]

    def bring_up(self) -> None:
        """All but the last Node, and what `kubectl apply -k` brings there."""
        self.prepare()
        self.kubectl("apply", "-k", str(self.overlay))
        self.kubelets.sync()

    def prepare(self) -> None:
        """All but the last Node; `overlay` is what an operator would apply."""
        self.kubectl = Kubectl(self._kubectl, self.api, self.lab.folder)
        self.kubelets = Kubelets(self.kube, self.api.authority.crt, self.pod_agents)
        manifests = copy_of_manifests(self.lab.folder, self.api.url, "10.244.0.0/16")
        self.overlay = manifests / "overlays" / "kubeadm-new"
        for each in self.lab.nodes[:-1]:
            self.register(each)

    def register(self, each: Node) -> None:
        """Its Node, as kubelet and kubeadm make it."""
        made = node(
            each.name, each.ip, each.ip6, labels=LINUX, pod_cidrs=[f"10.244.{each.number}.0/24"]
        )
        if each.number == 1:
            made["spec"]["taints"] = [CONTROL_PLANE]
        self.kube.create(made)

    def join(self) -> PodAgent:
        """The last node joins; its agent, once it has synced."""
        self.register(self.lab.nodes[-1])
        self.kubelets.sync()
        return self.pod_agents[-1]

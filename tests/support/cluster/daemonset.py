# SPDX-License-Identifier: Apache-2.0
"""A lab whose agents are the pods of a real DaemonSet, without a kubelet.

kubelets.py has a fake of the kubelets and of the DaemonSet controller; it runs each container with
runc exactly as the spec says (pods.py). Differences from a real node:

- a node's cgroup root is a cgroup of the machine, so the agent gets its path (KBPF_CGROUP);
- hostPaths are separate folders for each node, as several nodes share one machine (host_paths());
- the image is the machine's /usr and this tree, unless a test brings one; kube-proxy's image is the
  machine's /usr and the program built by the tests;
- of the probes only readiness is used; tests use the others themselves.
"""

import compileall
import contextlib
import http.client
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kbpf.dataplane.bpf.maps import status_entries
from kbpf.errors import KbpfError
from kbpf.kernel.bpf.objects import Map
from tests.support.build import go_build
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import node
from tests.support.cluster.kubectl import Kubectl, copy_of_manifests
from tests.support.cluster.kubelets import SPACE, Kubelets, digest
from tests.support.lab.lab import PATIENCE, Agent, Node, cgroup2, until
from tests.support.lab.web import get
from tests.support.plane import BPFFS
from tests.support.runtime.pods import Container, Host, Image, oci_config, this_machine

ROOT = Path(__file__).parents[3]
CONTROL_PLANE = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
LINUX = {"kubernetes.io/os": "linux"}


class PodAgent(Agent):
    """The DaemonSet's container on one node, as an agent of the lab."""

    def __init__(self, home: Node) -> None:
        super().__init__(home)
        self.bpffs = BPFFS / home.netns
        self.bpffs.mkdir()
        self.pin_dir = self.bpffs / "kbpf"
        self.folder = home.lab.folder / f"kubelet-{home.name}"
        self.runs = ""  # the digest of its pod template
        self._is_kube_proxy = False
        self.versions: dict[str, Path] = {}
        """Image name → the folder of its kbpf/; all other images have this tree's."""
        self.env_from: dict[str, str] = {}
        """Environment variables of the next container, from ConfigMaps."""
        self._container: Container | None = None
        self._count = 0

    def host_paths(self) -> dict[str, Path]:
        """Each hostPath of the node → its folder on this machine."""
        return {
            "/sys/fs/bpf": self.bpffs,
            "/sys/fs/cgroup": self.node.cgroup,
            "/proc/sys/net": Path("/proc/sys/net"),
            "/run/netns": Path("/run/netns"),
            "/run/kbpf": self.folder / "run",
            "/run/xtables.lock": self.folder / "xtables.lock",
            "/lib/modules": self.folder,
            "/var/cache/kbpf": self._cache,
            "/var/log/pods": self.folder / "pod-logs",
        }

    def launch(self, template: Object, volumes: Mapping[str, Path], account: Path | None) -> None:
        """Runs the pod's container. Its log and maps are where an Agent's are."""
        self.begin()
        (container,) = template["spec"]["containers"]
        self._is_kube_proxy = is_kube_proxy(container)
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
        """The output of another container of the node, with other folders for these hostPaths."""
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

    def beside(self, spec: Object, volumes: Mapping[str, Path], account: Path | None) -> Container:
        """Starts another container of the node, which runs until it is closed."""
        return self._make(spec, volumes, account, self.folder / "beside.log")

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
            self._cgroup,
            {**self.host_paths(), **paths},
            {**volumes, "tmp": folder / "tmp"},
            account,
        )
        rootfs = folder / "rootfs"
        (container,) = spec["containers"]
        image = kube_proxy_image(rootfs) if is_kube_proxy(container) else self.image(rootfs)
        if (other := self.versions.get(container["image"])) is not None:
            compileall.compile_dir(other, quiet=1)  # else each process in the pod does
            image = replace(image, instead={ROOT / "kbpf": other})
        image = replace(image, env={**image.env, **self.env_from})
        config = oci_config(spec, image, host)
        return Container(config, folder, name, self.node.cgroup / "host", log)

    def image(self, rootfs: Path) -> Image:
        made = this_machine(rootfs, ROOT, Path(sys.prefix))
        scripts = sysconfig.get_path("scripts")
        return Image(
            made.root,
            made.shown,
            f"{scripts}:{made.path}",
            {"KBPF_CGROUP": "/host/sys/fs/cgroup", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)},
        )

    def wait_ready(self, spec: Object) -> None:
        """Waits until a kubelet would call it ready: the container runs, and its readiness probe,
        if it has one, returns 200.
        """
        (container,) = spec["containers"]
        probe = container.get("readinessProbe", {}).get("httpGet")
        said = ""

        def ready() -> bool:
            nonlocal said
            assert self.is_running, f"it has ended: {self.tail()}"
            if probe is None:
                return self.pid > 0
            code, said = answered(self, probe["port"], probe["path"])
            return code == 200

        try:
            until(f"the pod on {self.node.name} is ready", ready, 2 * PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{said}\n{self.tail()}") from None

    def status(self) -> dict[str, Any] | None:
        """The status of the agent started last, from the maps of whichever version it is."""
        found = []
        for path in self.pin_dir.glob("maps-*/agent_status"):
            with contextlib.suppress(KbpfError), Map.open(path) as opened:
                raw = status_entries.read(opened)
                found += [json.loads(raw)] if raw else []
        return max(found, key=lambda each: each["started"], default=None)

    @property
    def pid(self) -> int:
        """The container process's id in the machine's PID namespace; 0 before it runs."""
        state = self._container.state()
        return int(state["pid"]) if state is not None else 0

    @property
    def _cgroup(self) -> str:
        """The cgroup of the container started last, relative to a hierarchy's root. It is below the
        node's cgroup, so that the hooks apply to the container, as on a real node.
        """
        return str(self.node.cgroup.relative_to(cgroup2()) / f"{self.node.netns}-{self._count}")

    def exec(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Runs a command in the pod like `kubectl exec`."""
        return self._container.exec(*command)

    @property
    def runc_exec(self) -> tuple[str, ...]:
        """The command prefix that exec() uses."""
        return self._container.runc_exec

    def use_cache(self, folder: Path) -> None:
        """Sets the node's /var/cache/kbpf; by default all tests share one."""
        self._cache = folder

    def usage(self) -> dict[str, float]:
        """The container's resource usage: peak and current memory in bytes, CPU time in seconds.

        On machines with cgroup v1 and v2 it is counted by v1's controllers, which runc uses.
        """
        root = Path("/sys/fs/cgroup")

        def count(controller: str, file: str) -> int:
            return int((root / controller / self._cgroup / file).read_text())

        if (root / "cgroup.controllers").exists():
            (used,) = re.findall(r"^usage_usec (\d+)$", (root / self._cgroup / "cpu.stat").read_text(), re.M)
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
        """Sends SIGTERM, as kubelet does; the exit code. A kube-proxy is ended by the signal, which
        counts as 0.
        """
        code = self._end("TERM")
        return 0 if self._is_kube_proxy else code

    def kill(self) -> None:
        self._end("KILL")

    def _end(self, signal: str) -> int:
        code = self._container.stop(signal)
        self.forget()
        return code

    def forget(self) -> None:
        """Removes the container, which must have ended."""
        self._container.close()
        self.runs = ""

    def close(self) -> None:
        """Ends the container and removes its pins."""
        if self._container is not None:
            self._container.close()
        self.remove_pins()
        shutil.rmtree(self.bpffs, ignore_errors=True)
        self._remove_v1_cgroups()

    def _remove_v1_cgroups(self) -> None:
        """Removes the node's cgroups that runc makes in each cgroup v1 hierarchy, where v1 exists.
        The lab removes that of v2.
        """
        node = self.node.cgroup.relative_to(cgroup2())
        for hierarchy in set(Path("/sys/fs/cgroup").iterdir()) - {cgroup2()}:
            for folder in (hierarchy / node, *(hierarchy / each for each in node.parents[:-1])):
                with contextlib.suppress(OSError):  # it does not exist, or has another node's in it
                    folder.rmdir()


def is_kube_proxy(container: Object) -> bool:
    """Whether this is the container of kubeadm's kube-proxy."""
    return bool(container["command"][0].endswith("/kube-proxy"))


def kube_proxy_image(rootfs: Path) -> Image:
    """kube-proxy's image: the program, and the machine's iptables and nft."""
    made = this_machine(rootfs)
    folders = (Path("/usr") / name for name in ("bin", "sbin", "lib", "lib64", "share"))
    program = {Path("/usr/local/bin/kube-proxy"): go_build.build("kube-proxy")}
    shown = (*(each for each in folders if each.exists()), Path("/etc"))
    return replace(made, shown=shown, instead=program)


def asked(agent: PodAgent, port: int, path: str) -> int:
    """The status that a probe of the pod gets; 0 if nothing answers."""
    return answered(agent, port, path)[0]


def answered(agent: PodAgent, port: int, path: str) -> tuple[int, str]:
    """Status and body that a probe gets at the node's address, where a kubelet probes."""
    try:
        answer = get(agent.node.netns, agent.node.ip, port, path)
    except (OSError, http.client.HTTPException):
        return 0, ""
    return answer.status, answer.body.decode().strip()


class PodCluster(Cluster):
    """A cluster in which `kubectl apply -k` installs kbpf. The first node is a control plane with
    its taint; the last one joins later, with join().
    """

    def __init__(self, kubectl: Path, nodes: int, name: str, network: str = "routed") -> None:
        super().__init__(nodes, name, network=network)
        self._kubectl = kubectl
        self.pod_agents: list[PodAgent] = []

    def agent_on(self, home: Node, *arguments: str) -> Agent:
        assert not arguments, "the pod's spec has all arguments"
        self.pod_agents.append(PodAgent(home))
        return self.pod_agents[-1]

    def bring_up(self) -> None:
        """Registers all Nodes but the last, and applies the overlay."""
        self.prepare()
        self.kubectl("apply", "-k", str(self.overlay))
        self.kubelets.sync()

    def prepare(self) -> None:
        """Registers all Nodes but the last, sets `overlay` to the one that an operator would apply,
        and creates the default ServiceAccount, as a controller does in each namespace.
        """
        account = {"name": "default", "namespace": SPACE}
        self.kube.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
        self.kubectl = Kubectl(self._kubectl, self.api, self.lab.folder)
        self.kubelets = Kubelets(self.kube, self.api.authority.crt, self.pod_agents)
        self._stack.callback(self.kubelets.close)
        manifests = copy_of_manifests(self.lab.folder, self.api.url, "10.244.0.0/16")
        self.overlay = manifests / "overlays" / "kubeadm-new"
        for each in self.lab.nodes[:-1]:
            self.register(each)

    def register(self, each: Node) -> None:
        """Creates a node's Node object, as kubelet and kubeadm do."""
        made = node(each.name, each.ip, each.ip6, labels=LINUX, pod_cidrs=[f"10.244.{each.number}.0/24"])
        if each.number == 1:
            made["spec"]["taints"] = [CONTROL_PLANE]
        self.kube.create(made)

    def join(self) -> PodAgent:
        """Lets the last node join; returns its agent once it is synced."""
        self.register(self.lab.nodes[-1])
        self.kubelets.sync()
        return self.pod_agents[-1]

# SPDX-License-Identifier: Apache-2.0
"""Names, addresses, files and the stored state of a cluster.

Everything that the whole machine can see (cgroups, network namespaces, the folder) has the
cluster's name in its name, so several clusters can exist at the same time.
"""

import ipaddress
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tests.conformance.versions import VERSIONS, Version

CLUSTERS = Path("/var/tmp/kbpf-conformance")
"""Has a folder for each cluster: a short path, because kubelet's sockets are below it, and not on
tmpfs, because containerd's overlays are.
"""
FILES = Path(__file__).parents[1] / "files"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
PREFIX = "conformance-"
FABRIC, CONTROL_PLANE, CLIENT = "fabric", "cp", "client"
NODE_NETWORKS = ipaddress.ip_network("172.30.0.0/24"), ipaddress.ip_network("fd00:172:30::/64")
CLIENT_NETWORKS = ipaddress.ip_network("192.168.77.0/24"), ipaddress.ip_network("fd00:77::/64")
"""The client's own network: tests tell by the address whether traffic comes from outside."""
POD_CIDRS = ("10.244.0.0/16", "fd00:10:244::/56")
SERVICE_CIDRS = ("10.96.0.0/16", "fd00:10:96::/112")
LOAD_BALANCER_CIDRS = ("172.30.200.0/24", "fd00:172:30:200::/64")
DNS_ADDRESS = "10.96.0.10"
CONTROL_PLANE_HOST, CLIENT_HOST, FIRST_NODE_HOST, GATEWAY_HOST = 10, 20, 100, 254

Kind = Literal["control-plane", "client", "node"]
Object = dict[str, Any]


class Failed(Exception):
    """A step failed: what, and the last lines of the output."""


class Process(msgspec.Struct, frozen=True):
    """A process, which is no longer meant if its process id is used again."""

    pid: int
    started: int  # clock ticks after boot

    @property
    def is_alive(self) -> bool:
        return start_time(self.pid) == self.started


class Machine(msgspec.Struct):
    """A simulated machine. `index` counts the nodes from 1; `host` is its number in the network."""

    name: str
    kind: Kind
    host: int
    index: int = 0
    init: Process | None = None  # the first process of its PID namespace
    services: dict[str, Process] = {}

    @property
    def addresses(self) -> tuple[str, str]:
        """Its IPv4 and IPv6 address."""
        ipv4, ipv6 = CLIENT_NETWORKS if self.kind == "client" else NODE_NETWORKS
        return str(ipv4[self.host]), str(ipv6[self.host])

    @property
    def pod_cidrs(self) -> tuple[str, str]:
        return f"10.244.{self.index}.0/24", f"fd00:10:244:{self.index:x}::/64"


class State(msgspec.Struct):
    """What is stored in state.json."""

    version: str
    ipv4_nodes: bool  # nodes report only their IPv4 address
    machines: dict[str, Machine]
    proxy: str = ""
    cni: str = ""


class Cluster:
    """A cluster's names, files and state."""

    def __init__(self, name: str, state: State) -> None:
        self.name, self.state = name, state
        self.folder = folder_of(name)
        self.programs = self.folder / "bin"

    @classmethod
    def load(cls, name: str) -> "Cluster":
        """The running cluster with this name."""
        try:
            text = (folder_of(name) / "state.json").read_bytes()
        except FileNotFoundError:
            raise Failed(f"no cluster {name}: create it with up") from None
        return cls(name, msgspec.json.decode(text, type=State))

    def save(self) -> None:
        path = self.folder / "state.json"
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self.state))
        new.rename(path)

    @property
    def version(self) -> Version:
        return VERSIONS[self.state.version]

    @property
    def machines(self) -> dict[str, Machine]:
        return self.state.machines

    @property
    def nodes(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.kind == "node"]

    @property
    def api_server(self) -> str:
        return f"https://{self.machines[CONTROL_PLANE].addresses[0]}:6443"

    def global_name(self, machine: str) -> str:
        """The name of a machine's cgroup and network namespace."""
        return f"{PREFIX}{self.name}-{machine}"

    def netns(self, machine: str) -> str:
        return f"/run/netns/{self.global_name(machine)}"

    def files(self, machine: str, *names: str) -> Path:
        """A path in the machine's folder."""
        return self.folder.joinpath("m", machine, *names)

    def kubeconfig(self, user: str) -> Path:
        return self.folder / "kubeconfig" / user

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    def on_client(self, *command: str) -> list[str]:
        """The command line that runs a command on the client machine."""
        return ["nsenter", f"--net={self.netns(CLIENT)}", *command]

    def kubectl_command(self, *arguments: str) -> list[str]:
        config = f"--kubeconfig={self.kubeconfig('admin')}"
        return self.on_client(str(self.programs / "kubectl"), config, *arguments)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Its output; Failed with its errors."""
        return call(self.kubectl_command(*arguments), stdin)

    def get(self, *arguments: str) -> Object:
        return dict(json.loads(self.kubectl("get", "-o", "json", *arguments)))

    def apply(self, *objects: Object) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(items))


def folder_of(name: str) -> Path:
    return CLUSTERS / name


def start_time(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


def process(pid: int) -> Process:
    return Process(pid, start_time(pid) or 0)


def call(command: Sequence[str], stdin: str | None = None) -> str:
    """The output of a command; Failed with its output."""
    done = subprocess.run(
        command,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    if done.returncode:
        words = " ".join(command)
        raise Failed(f"{words}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def shell(script: str, netns: str = "") -> None:
    """Runs a script that ends at the first failed command."""
    enter = ["nsenter", f"--net={netns}"] if netns else []
    call([*enter, "bash", "-e", "-s"], script)


def wait_for(condition: str, check: Callable[[], bool], seconds: float = 600, step: float = 0.3) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise Failed(f"after {seconds:.0f} s: not true: {condition}")
        time.sleep(step)


def write(path: Path, data: str | Object, mode: int = 0o644) -> None:
    """Writes a text, or an object as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data, indent=1))
    path.chmod(mode)


def search_path(cluster: Cluster) -> dict[str, str]:
    """The environment of services: containerd looks for its shim in PATH."""
    return {"PATH": f"{cluster.programs}:{os.environ['PATH']}"}


def program(name: str) -> str:
    """The path of an installed program."""
    if path := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
        return path
    raise Failed(f"{name} is not installed: run tools/packages tests image")

# SPDX-License-Identifier: Apache-2.0
"""The demo's environment: a node, backends and clients, each in its own network namespace, and the
real agent on the node. All names contain the id of this process. Everything is removed when the
block ends. A demo that was killed leaves everything behind, and the next one removes it.

    kbpf-demo-PID-node      192.0.2.1, the bridge, and `kbpf run`
    kbpf-demo-PID-b1 ...    backends, 10.244.0.11 ...
    kbpf-demo-PID-client    a Pod, 10.244.0.100; no route leads to the Service's address
    kbpf-demo-PID-outside   192.0.2.100, another machine; no route leads to the backends
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Self

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.demo import enter, manifests
from kbpf.demo.manifests import BackendPod
from kbpf.errors import KbpfError, KernelError
from kbpf.kernel.net import links
from kbpf.kernel.net.links import Links
from kbpf.kernel.system import cgroups, children, mounts, netns, pods, sysctl
from kbpf.model.address import parse_addr
from kbpf.model.inspection import Part

BACKENDS: Final = 3
PREFIX: Final = "kbpf-demo-"
BRIDGE: Final = "pods"
UPLINK: Final = "uplink"
_NAME_PATTERN = re.compile(re.escape(PREFIX) + r"(\d+)(-.*)?")
_LOG_NAME: Final = f"default_{manifests.CLIENT}_"
"""The folder of a Pod's logs, without its uid: from it `kbpf` knows the client's name."""


class DemoError(KbpfError):
    """The demo itself failed, as opposed to requests in it."""


class DemoScene:
    """A context manager that creates the environment with BACKENDS backends, and one Pod more, in
    which no process listens. set_endpoints() decides which are endpoints of the Service. `options`
    are those of the agent.
    """

    def __init__(self, cache_dir: Path, parent: Path | None = None, options: tuple[str, ...] = ()) -> None:
        self._options = options
        self._pods = range(1, BACKENDS + 2)
        self._cache_dir = cache_dir.absolute()  # the agent has another working directory
        self._parent = parent and parent.absolute()
        self._name = f"{PREFIX}{os.getpid()}"
        self._stack = contextlib.ExitStack()
        self._children: list[subprocess.Popen[str]] = []
        self._servers: list[subprocess.Popen[str]] = []
        self._agent: subprocess.Popen[str] | None = None
        self._client_uid = f"{os.getpid():032x}"

    def __enter__(self) -> Self:
        parent = self._parent or mounts.find_cgroup_root()
        if not mounts.is_cgroup2(parent):
            raise DemoError("not a cgroup v2 folder", str(parent), "give one with --cgroup")
        sweep(parent)
        try:
            self._build(parent)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- building --------------------------------------------------------------------------

    def _build(self, parent: Path) -> None:
        """Creates everything. The removal of each thing is registered before it is created."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self._name}-"))
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._pins = Pins(mounts.BPF_FS / self._name)
        self._cgroup = parent / self._name
        names = ["node", "client", "outside", *(f"b{i}" for i in self._pods)]
        for name in names:
            self._stack.callback(links.remove_namespace, f"{self._name}-{name}")
            links.create_namespace(f"{self._name}-{name}")
        outside, kubepods = parent / f"{self._name}-outside", self._cgroup / "kubepods"
        self._cgroups = {"node": self._cgroup / "node", "outside": outside}
        self._cgroups["client"] = kubepods / f"pod{self._client_uid}"
        self._cgroups |= {f"b{i}": kubepods / f"b{i}" for i in self._pods}
        for path in (self._cgroup, outside):
            self._stack.callback(cgroups.remove, path)
        for path in (self._cgroup, kubepods, *self._cgroups.values()):
            cgroups.create(path)
        log_folder = pods.LOG_FOLDER / f"{_LOG_NAME}{self._client_uid}"
        self._stack.callback(_remove_log_folder, log_folder)
        log_folder.mkdir(parents=True)
        self._stack.callback(pinning.remove, self._pins)
        self._stack.callback(self._kill_children)
        self._connect_namespaces()
        ports = str(manifests.POD_HTTP_PORT), str(manifests.POD_DNS_PORT)
        for i in range(1, BACKENDS + 1):
            server = children.python_command("kbpf.demo.server", BackendPod(i).name, *ports)
            self._servers.append(self._start_child(f"b{i}", *server))
        (self._folder / "objects").mkdir()
        self._write_objects("service", manifests.SERVICE)
        self.set_endpoints([])
        self.start_agent()

    def _namespace(self, name: str) -> Path:
        return links.namespace_path(f"{self._name}-{name}")

    def _connect_namespaces(self) -> None:
        """Connects all Pods to a bridge, and the machine outside to the uplink."""
        addresses = {"client": manifests.CLIENT_ADDRESS}
        addresses |= {f"b{i}": BackendPod(i).address for i in self._pods}
        pod_names = tuple(addresses)

        def configure_node() -> None:
            sysctl.write("net.ipv4.ip_forward", "1")
            with Links() as netlink:
                netlink.set_up("lo")
                netlink.add_bridge(BRIDGE)
                netlink.set_up(BRIDGE)
                netlink.add_address(BRIDGE, manifests.POD_GATEWAY, 24)
                for name in pod_names:
                    netlink.add_veth(name, "eth0", self._namespace(name), BRIDGE)
                netlink.add_veth(UPLINK, "eth0", self._namespace("outside"))
                netlink.add_address(UPLINK, manifests.NODE_ADDRESS, 24)

        def configure_pod(address: str, gateway: str) -> None:
            with Links() as netlink:
                netlink.set_up("lo")
                netlink.set_up("eth0")
                netlink.add_address("eth0", address, 24)
                if gateway:
                    netlink.add_default_route(gateway)

        netns.run_in(self._namespace("node"), configure_node)
        addresses["outside"] = manifests.OUTSIDE_ADDRESS
        for name, address in addresses.items():
            gateway = manifests.POD_GATEWAY if name.startswith("b") else ""
            netns.run_in(self._namespace(name), partial(configure_pod, address, gateway))

    # ---- children --------------------------------------------------------------------------

    def _start_child(self, place: str, *command: str) -> subprocess.Popen[str]:
        """Starts a process in the network namespace and the cgroup of this name. It has its own
        session, so Ctrl-C in the terminal does not reach it.
        """
        environment = _environment()
        with self._log_path().open("ab") as log:
            child = subprocess.Popen(
                self.enter_command(place, *command),
                cwd=children.WORKING_DIRECTORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    @property
    def pin_dir(self) -> Path:
        """The agent's --pin-dir."""
        return self._pins.root

    def enter_command(self, place: str, *command: str) -> list[str]:
        """The command line that runs `command` where `node`, `client`, ... are."""
        return enter.enter_command(self._namespace(place), self._cgroups[place], *command)

    def _log_path(self) -> Path:
        return self._folder / "log"

    def wait_until_ready(self) -> None:
        """Returns when all backends listen. The agent may still be starting."""
        for server in self._servers:
            assert server.stdout is not None
            if server.stdout.readline().strip() != "ready":
                hint = "is kbpf installed completely?"
                raise DemoError("a backend did not start", self._last_log_line(), hint)

    def start_agent(self) -> None:
        """Starts `kbpf run` on the node. is_synced() tells when it has programmed everything."""
        self._agent = self._start_child(
            "node",
            *children.python_command(
                "kbpf",
                "run",
                "--source",
                str(self._folder / "objects"),
                "--hostname-override",
                manifests.NODE,
                "--pin-dir",
                str(self.pin_dir),
                "--cgroup",
                str(self._cgroup),
                "--cache-dir",
                str(self._cache_dir),
                # kbpf's own table records why connections from outside fail.
                "--forwarding",
                "stack",
                *self._options,
            ),
        )

    def kill_agent(self) -> None:
        """Ends the agent as `kill -9` does, and returns when its process is gone."""
        assert self._agent is not None
        self._agent.kill()
        self._agent.wait()
        self._agent = None

    def is_synced(self) -> bool:
        """Whether the agent that runs now has programmed everything."""
        status = snapshot.read(self._pins.root, Part.STATUS).status
        return bool(self._agent and status and status.pid == self._agent.pid and status.synced)

    def is_served_by(self, pods: Iterable[BackendPod]) -> bool:
        """Whether requests to the Service reach these backends and no others."""
        reached = {
            backend.address
            for port in snapshot.read(self._pins.root, Part.SERVICES).services
            for frontend in port.frontends
            for backend in frontend.cluster.shares()
        }
        return reached == {parse_addr(pod.address) for pod in pods}

    def _kill_children(self) -> None:
        if self._cgroup.is_dir():
            cgroups.kill(self._cgroup)
        for child in self._children:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()

    # ---- use -------------------------------------------------------------------------------

    def _write_objects(self, name: str, text: str) -> None:
        """Writes a file atomically, so that the agent never reads an incomplete one."""
        temporary = self._folder / f"{name}.new"
        temporary.write_text(text)
        temporary.rename(self._folder / "objects" / f"{name}.yaml")

    def set_endpoints(self, backends: Iterable[BackendPod]) -> None:
        """Sets the endpoints of the Service."""
        self._write_objects("endpoints", manifests.endpoint_slices(backends))

    def start_client(self, place: str, requests: int, rate: float, waits: bool) -> subprocess.Popen[str]:
        """Starts a client (client.py): `client` is a Pod and dials the ClusterIP, `outside` is
        another machine and dials the NodePort.
        """
        ports = manifests.HTTP_PORT, manifests.DNS_PORT
        address = manifests.SERVICE_ADDRESS
        if place == "outside":
            address, ports = manifests.NODE_ADDRESS, (manifests.NODE_PORT, 0)
        return self._start_child(
            place,
            *children.python_command("kbpf.demo.client", address, *map(str, (*ports, requests, rate, int(waits)))),
        )

    def run_command(self, *arguments: str) -> str:
        """The output of a command of kbpf on the node."""
        command = children.python_command("kbpf", *arguments, "--pin-dir", str(self.pin_dir))
        environment = _environment()
        done = subprocess.run(
            self.enter_command("node", *command),
            cwd=children.WORKING_DIRECTORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise DemoError(f"`kbpf {' '.join(arguments)}` failed: {done.stderr.strip()}")
        return done.stdout

    def check_agent(self) -> None:
        """Raises DemoError if the agent has exited by itself."""
        code = self._agent and self._agent.poll()
        if code is not None:
            problem = f"the agent exited with {code}: {self._last_log_line()}"
            raise DemoError(problem, "", "`kbpf check` may show why")

    def _last_log_line(self) -> str:
        lines = self._log_path().read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


def _environment() -> dict[str, str]:
    """That of all children: without the settings of an agent of this machine."""
    return {k: v for k, v in children.child_environment().items() if not k.startswith("KBPF_")}


def _remove_log_folder(folder: Path) -> None:
    for path in (folder, folder.parent):
        with contextlib.suppress(OSError):  # other Pods have logs there
            path.rmdir()


# ---- leftovers of earlier demos ------------------------------------------------------------


def sweep(parent: Path) -> None:
    """Removes what earlier demos left behind, if their process no longer exists: they were killed,
    or the machine was rebooted.
    """
    for path in _orphaned(parent):
        cgroups.remove(path)
    for path in _orphaned(mounts.BPF_FS):
        with contextlib.suppress(OSError):
            pinning.remove(Pins(path))
    for path in _orphaned(links.NETNS_DIR):
        with contextlib.suppress(KernelError):
            links.remove_namespace(path.name)
    for path in _orphaned(Path(tempfile.gettempdir())):
        shutil.rmtree(path, ignore_errors=True)
    for path in pods.LOG_FOLDER.glob(f"{_LOG_NAME}{'0' * 16}*"):
        with contextlib.suppress(ValueError):
            if not Path("/proc", str(int(path.name.removeprefix(_LOG_NAME), 16))).exists():
                _remove_log_folder(path)


def _orphaned(folder: Path) -> Iterator[Path]:
    paths = sorted(folder.glob(f"{PREFIX}*")) if folder.is_dir() else []
    for path in paths:
        match = _NAME_PATTERN.fullmatch(path.name)
        if match and not Path("/proc", match[1]).exists():
            yield path

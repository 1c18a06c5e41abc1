# SPDX-License-Identifier: Apache-2.0
"""The demo's environment: a node, backends and a client, each in its own network namespace, and the
real agent on the node. All names contain the id of this process. Everything is removed when the
block ends. A demo that was killed leaves everything behind, and the next one removes it.

    kbpf-demo-PID-node      the bridge, and `kbpf run`
    kbpf-demo-PID-b1 ...    backends, 10.244.0.11 ...
    kbpf-demo-PID-client    10.244.0.100; no route leads to the Service's address
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Self

from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.demo import enter, manifests
from kbpf.demo.manifests import BackendPod
from kbpf.errors import KbpfError, KernelError
from kbpf.kernel.net import links
from kbpf.kernel.net.links import Links
from kbpf.kernel.system import cgroups, children, mounts, netns

PREFIX: Final = "kbpf-demo-"
BRIDGE: Final = "pods"
_NAME_PATTERN = re.compile(re.escape(PREFIX) + r"(\d+)(-.*)?")


class DemoError(KbpfError):
    """The demo itself failed, as opposed to requests in it."""


class DemoScene:
    """A context manager that creates the environment with `pods` backends. set_endpoints() decides
    which of them are endpoints of the Service.
    """

    def __init__(self, pods: int, cache_dir: Path, parent: Path | None = None) -> None:
        self._pods = pods
        self._cache_dir = cache_dir.absolute()  # the agent has another working directory
        self._parent = parent and parent.absolute()
        self._name = f"{PREFIX}{os.getpid()}"
        self._stack = contextlib.ExitStack()
        self._children: list[subprocess.Popen[str]] = []

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
        names = ["node", "client", *(f"b{i}" for i in range(1, self._pods + 1))]
        for name in names:
            self._stack.callback(links.remove_namespace, f"{self._name}-{name}")
            links.create_namespace(f"{self._name}-{name}")
        self._stack.callback(cgroups.remove, self._cgroup)
        cgroups.create(self._cgroup)
        for name in ("node", "client", "pods"):
            cgroups.create(self._cgroup / name)
        self._stack.callback(pinning.remove, self._pins)
        self._stack.callback(self._kill_children)
        self._connect_namespaces()
        self._servers = [self._start_server(number) for number in range(1, self._pods + 1)]
        self._agent = self._start_agent()

    def _namespace(self, name: str) -> Path:
        return links.namespace_path(f"{self._name}-{name}")

    def _connect_namespaces(self) -> None:
        """Connects the client and all backends to a bridge, which has the node's address."""
        addresses = {"client": manifests.CLIENT_ADDRESS}
        addresses |= {f"b{i}": BackendPod(i).address for i in range(1, self._pods + 1)}

        def configure_node() -> None:
            with Links() as netlink:
                netlink.set_up("lo")
                netlink.add_bridge(BRIDGE)
                netlink.set_up(BRIDGE)
                netlink.add_address(BRIDGE, manifests.NODE_ADDRESS, 24)
                for name in addresses:
                    netlink.add_veth(name, BRIDGE, "eth0", self._namespace(name))

        def configure_pod(address: str) -> None:
            with Links() as netlink:
                netlink.set_up("lo")
                netlink.set_up("eth0")
                netlink.add_address("eth0", address, 24)

        netns.run_in(self._namespace("node"), configure_node)
        for name, address in addresses.items():
            netns.run_in(self._namespace(name), partial(configure_pod, address))

    # ---- children --------------------------------------------------------------------------

    def _start_child(self, namespace: str, cgroup: str, *command: str) -> subprocess.Popen[str]:
        """Starts a process in a network namespace and a cgroup. It has its own session, so Ctrl-C
        in the terminal does not reach it.
        """
        environment = {
            k: v for k, v in children.child_environment().items() if not k.startswith("KBPF_")
        }
        with self._log_path().open("ab") as log:
            child = subprocess.Popen(
                enter.enter_command(self._namespace(namespace), self._cgroup / cgroup, *command),
                cwd=children.WORKING_DIRECTORY, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self._children.append(child)
        return child

    def _log_path(self) -> Path:
        return self._folder / "log"

    def _start_server(self, number: int) -> subprocess.Popen[str]:
        ports = str(manifests.POD_HTTP_PORT), str(manifests.POD_DNS_PORT)
        return self._start_child(
            f"b{number}", "pods",
            *children.python_command("kbpf.demo.server", BackendPod(number).name, *ports),
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Returns when all backends listen. The agent may still be starting."""
        for server in self._servers:
            assert server.stdout is not None
            if server.stdout.readline().strip() != "ready":
                hint = "is kbpf installed completely?"
                raise DemoError("a backend did not start", self._last_log_line(), hint)

    def _start_agent(self) -> subprocess.Popen[str]:
        source = self._folder / "objects"
        source.mkdir()
        self._write_object("node", manifests.node())
        self._write_object("service", manifests.service())
        self.set_endpoints([])
        return self._start_child(
            "node", "node",
            *children.python_command(
                "kbpf", "run", "--source", str(source),
                "--hostname-override", manifests.NODE, "--pin-dir", str(self._pins.root),
                "--cgroup", str(self._cgroup), "--cache-dir", str(self._cache_dir),
            ),
        )  # fmt: skip

    def _kill_children(self) -> None:
        if self._cgroup.is_dir():
            cgroups.kill(self._cgroup)
        for child in self._children:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()

    # ---- use -------------------------------------------------------------------------------

    def _write_object(self, name: str, manifest: dict[str, Any]) -> None:
        """Writes a file atomically, so that the agent never reads an incomplete one."""
        temporary = self._folder / f"{name}.new"
        temporary.write_text(json.dumps(manifest, indent=2))
        temporary.rename(self._folder / "objects" / f"{name}.json")

    def set_endpoints(self, pods: Iterable[BackendPod]) -> None:
        """Sets the endpoints of the Service."""
        self._write_object("endpoints", manifests.endpoint_slice(pods))

    def start_client(self, requests: int, rate: float) -> IO[str]:
        """Starts the client (client.py). Returns its standard output."""
        child = self._start_child(
            "client", "client",
            *children.python_command(
                "kbpf.demo.client", manifests.SERVICE_ADDRESS, str(manifests.HTTP_PORT),
                str(manifests.DNS_PORT), str(requests), str(rate),
            ),
        )  # fmt: skip
        assert child.stdout is not None
        return child.stdout

    def check_agent(self) -> None:
        """Raises DemoError if the agent has exited."""
        code = self._agent.poll()
        if code is not None:
            raise DemoError(
                f"the agent exited with {code}: {self._last_log_line()}",
                "",
                "`kbpf check` may show why",
            )

    def _last_log_line(self) -> str:
        lines = self._log_path().read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


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


def _orphaned(folder: Path) -> Iterator[Path]:
    paths = sorted(folder.glob(f"{PREFIX}*")) if folder.is_dir() else []
    for path in paths:
        match = _NAME_PATTERN.fullmatch(path.name)
        if match and not Path("/proc", match[1]).exists():
            yield path

# SPDX-License-Identifier: Apache-2.0
"""A small cluster on one machine: nodes, pods and an outside machine, each a network namespace.

    fabric   one bridge that all nodes are on (198.18.0.0/24, fd00:198:18::/64)
    node n   198.18.0.n, with routes to the pods of the others (podnet.py); an agent runs in it
    pod      10.244.n.i, fd00:10:244:n::i, a veth to its node
    outside  198.18.0.254, the API server's machine: this process' namespace, or a separate one

A node's cgroup has a child for the host's processes and one for each pod; the agent's hooks are
attached to the node's. All names begin with a prefix that is unique to the lab; `close()` removes
everything.

Several labs can exist at the same time if their outside is a separate namespace (`apart`), of the
others only one, since all labs use the same addresses.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Link
from tests.support.build import artifacts
from tests.support.lab import podnet
from tests.support.lab.agent_state import AgentState

PATIENCE = 240.0
"""Seconds to wait for things that usually take moments. A long deadline costs nothing on success,
and a busy or emulated machine may stop any process for some seconds, or start an agent in a minute.
"""
PROBER = Path(__file__).with_name("prober.py")
DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


def cgroup2() -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, path, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(path)
    raise RuntimeError("no cgroup v2 on this machine: mount one to run the tests")


V1_ONLY = (
    *("unshare", "--mount", "sh", "-c"),
    'umount -l $(findmnt -t cgroup2 -no TARGET) && exec "$@"',
    "sh",
)
"""The start of a command line that runs a command as on a node with cgroup v1 only."""


def run(*command: str, stdin: str | None = None) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(command, input=stdin, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or stdin}")
    return done.stdout


def ip(*lines: str, netns: str | None = None) -> None:
    """Runs `ip` commands in one process (-batch)."""
    where = ["-n", netns] if netns else []
    run("ip", *where, "-batch", "-", stdin="\n".join(lines))


def bridge(*lines: str, netns: str) -> None:
    """Runs iproute2 `bridge` commands in one process (-batch)."""
    run("bridge", "-n", netns, "-batch", "-", stdin="\n".join(lines))


def let_forward(where: str) -> None:
    """Makes this network namespace a router."""
    run(
        *inside(where, None, "sh", "-c"),
        "echo 1 > /proc/sys/net/ipv4/ip_forward;"
        "echo 1 > /proc/sys/net/ipv6/conf/all/forwarding;"
        # a rate-limited ICMP error would look like a dropped packet
        "echo 0 > /proc/sys/net/ipv4/icmp_ratelimit;"
        "echo 0 > /proc/sys/net/ipv6/icmp/ratelimit",
    )


def set_rp_filter(where: str, value: int) -> None:
    """Sets the reverse path filter of all devices of this network namespace: 0 is off, 1 strict."""
    script = f"for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo {value} > $f; done"
    run(*inside(where, None, "sh", "-c", script))


def inside(netns: str | None, cgroup: Path | None, *command: str) -> list[str]:
    """The command line that runs a command in a network namespace and a cgroup.

    `ip netns exec` would remount /sys and hide the bpffs.
    """
    enter = ["nsenter", f"--net=/run/netns/{netns}"] if netns else []
    if cgroup is None:
        return [*enter, *command]
    return [*enter, "sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh", *command]


def on(where: "Node | Place", *command: str, stdin: str | None = None) -> str:
    """The output of run() in the network namespace of a node or pod."""
    return run(*inside(where.netns, None, *command), stdin=stdin)


def until(
    what: str,
    check: Callable[[], Any],
    seconds: float = PATIENCE,
    state: Callable[[], object] | None = None,
) -> Any:
    """Polls `check` and returns its first true result. Raises AssertionError after the deadline,
    with what was waited for and the result of `state`. A check that starts processes takes at most
    a third of a processor from what it waits for.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        late = began > deadline
        answer = check()
        if answer:
            return answer
        if late:
            instead = f"; instead: {state()}" if state else ""
            raise AssertionError(f"not within {seconds} s: {what}{instead}")
        time.sleep(max(0.02, 2 * (time.monotonic() - began)))


def settled(netns: str | None, *addresses: str) -> None:
    """Waits until packets to these IPv6 addresses of the namespace arrive: `ip addr add` returns
    before the kernel has made their routes, also with `nodad`.
    """
    wanted = {ip_address(address) for address in addresses}
    where = ["-n", netns] if netns else []

    def are_local() -> bool:
        rows = json.loads(run("ip", *where, "-6", "-j", "route", "show", "table", "local"))
        local = (row["dst"] for row in rows if row.get("type", "local") == "local")
        return wanted <= {ip_address(dst) for dst in local if "/" not in dst}

    until(f"{addresses} are local", are_local)


def reachable(place: "Place", *addresses: str) -> None:
    """Dials a closed port until it is refused: carriers and neighbours need time to come up."""
    for address in addresses:
        until(
            f"{address} is reached from {place.name}",
            lambda to=address: place.tcp(to, 1, timeout=0.2).get("error") == "ECONNREFUSED",
        )


class Place:
    """A place to serve and dial from: a pod, or a node's own network."""

    def __init__(self, name: str, netns: str | None, cgroup: Path | None, udp_ports: tuple[int, ...] = ()) -> None:
        """`udp_ports`: first and last port of its clients; else the kernel chooses them."""
        self.name = name
        self.netns = netns
        self.cgroup = cgroup
        self.ip = ""
        self.ip6 = ""
        if cgroup is not None:
            cgroup.mkdir(parents=True, exist_ok=True)
        command = inside(netns, cgroup, "/usr/bin/python3", "-S", str(PROBER), *map(str, udp_ports))
        self._process = subprocess.Popen(
            [*DIE_WITH_US, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the prober in {self.name} died")
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert "failed" not in answer, answer
        return answer

    def serve(self, *tcp: int, udp: tuple[int, ...] = (), address: str = "::") -> "Place":
        """Serves these ports under this place's name."""
        self.ask("serve", name=self.name, tcp=list(tcp), udp=list(udp), address=address)
        return self

    def tcp(self, host: str, port: int, **options: Any) -> dict[str, Any]:
        """Makes one TCP connection: {"name", "client", "port", "peer"} or {"error"}."""
        return self.ask("tcp", host=host, port=port, **_with_family(host, options))

    def udp(self, host: str, port: int, **options: Any) -> dict[str, Any]:
        """Sends one datagram and returns the answer like tcp()."""
        return self.ask("udp", host=host, port=port, **_with_family(host, options))

    def many(self, count: int, host: str, port: int, **options: Any) -> dict[str, Any]:
        """Dials `count` times: {"names": {backend: answers}, "errors": {...}}."""
        return self.ask("many", count=count, host=host, port=port, **_with_family(host, options))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if self.cgroup is not None:
            remove_cgroup(self.cgroup)


def _with_family(host: str, options: dict[str, Any]) -> dict[str, Any]:
    family = "4" if ":" not in host else "mapped" if host.startswith("::ffff:") else "6"
    return {"family": family, **options}


def remove_cgroup(path: Path) -> None:
    """Removes a cgroup and those in it; waits for its last process, which may still be exiting."""

    def gone() -> bool:
        for folder, _, _ in os.walk(path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return not path.exists()

    until(f"{path} is empty", gone)


@dataclass
class Node:
    lab: "Lab"
    number: int
    cgroup: Path
    host: Place = field(init=False)
    pods: list[Place] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    agent: "Agent | None" = None

    @property
    def name(self) -> str:
        """The name of its Node object."""
        return f"node-{self.number}"

    @property
    def netns(self) -> str:
        return f"{self.lab.prefix}n{self.number}"

    @property
    def ip(self) -> str:
        """Its InternalIP."""
        return f"198.18.0.{self.number}"

    @property
    def ip6(self) -> str:
        """Its second InternalIP."""
        return f"fd00:198:18::{self.number}"

    @property
    def folder(self) -> Path:
        """The lab's."""
        return self.lab.folder

    def pod(self, name: str) -> Place:
        """A new pod: a namespace behind a veth pair, reachable from everywhere in the lab."""
        index = len(self.pods) + 1
        netns = f"{self.netns}p{index}"
        v4, v6 = f"10.244.{self.number}.{index + 1}", f"fd00:10:244:{self.number}::{index + 1}"
        self.lab.add_netns(netns)
        self.lab.attach(self, podnet.Pod(index, netns, v4, v6))
        place = Place(name, netns, self.cgroup / f"pod{index}")
        place.ip, place.ip6 = v4, v6
        self.pods.append(place)
        reachable(self.host, v4, v6)
        return place

    def host_network_pod(self, name: str) -> Place:
        place = Place(name, self.netns, self.cgroup / f"hostpod{len(self.places)}")
        place.ip, place.ip6 = self.ip, self.ip6
        self.places.append(place)
        return place

    def close(self) -> None:
        if self.agent is not None:
            self.agent.close()
        for place in (*self.pods, *self.places, self.host):
            place.close()
        remove_cgroup(self.cgroup)


TRACEBACK_LINES = 30
"""How many lines of a traceback are shown."""


def traceback_in(log: Path) -> str:
    """The first traceback in this file, with its name; "" if there is none."""
    lines = log.read_text(errors="replace").splitlines()
    at = next((i for i, line in enumerate(lines) if "Traceback (most" in line), None)
    if at is None:
        return ""
    return "\n".join((f"{log.name}:", *lines[max(0, at - 1) : at + TRACEBACK_LINES]))


class Lab:
    """The nodes, the fabric and the outside of the module docstring."""

    def __init__(
        self,
        nodes: int = 2,
        name: str = "",
        apart: bool = False,
        network: str | podnet.Routed = "routed",
    ) -> None:
        self.prefix = f"kb{name}{os.getpid()}"
        self.network = podnet.SHAPES[network] if isinstance(network, str) else network
        self.outside = f"{self.prefix}o" if apart else None
        self.folder = Path(tempfile.mkdtemp(prefix="kbpf-lab-"))
        self._netns: list[str] = []
        self._cgroup = cgroup2() / self.prefix
        self.fabric = f"{self.prefix}f"
        self.nodes: list[Node] = []
        self.outside_ip = "198.18.0.254"
        try:
            self._build(nodes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Closes the lab. A traceback in the log of any agent is a failure."""
        faults = [] if kind else [*map(traceback_in, self.folder.glob("*.log"))]
        self.close()
        assert not any(faults), "\n".join(filter(None, faults))

    def _build(self, nodes: int) -> None:
        self._cgroup.mkdir()
        self.add_netns(self.fabric)
        ip("link add br0 type bridge", "link set br0 up", netns=self.fabric)
        if self.outside:
            self.add_netns(self.outside)
        ip(
            f"link add {self.prefix} type veth peer name outside netns {self.fabric}",
            netns=self.outside,
        )
        ip("link set outside master br0", "link set outside up", netns=self.fabric)
        ip(
            f"""
            link set lo up
            addr add {self.outside_ip}/24 dev {self.prefix}
            addr add fd00:198:18::fe/64 dev {self.prefix} nodad
            link set {self.prefix} up
            """,
            netns=self.outside,
        )
        settled(self.outside, "fd00:198:18::fe")
        for number in range(1, nodes + 1):
            self.nodes.append(self._node(number))
        for node in self.nodes:
            others = [n for n in self.nodes if n is not node]
            lines, entries = self.network.join(node, others)
            ip(*lines, netns=node.netns)
            if entries:
                bridge(*entries, netns=node.netns)
        for node in self.nodes:
            for other in self.nodes:
                reachable(node.host, other.ip, other.ip6)

    def _node(self, number: int) -> Node:
        node = Node(self, number, self._cgroup / f"n{number}")
        node.cgroup.mkdir()
        self.add_netns(node.netns)
        ip(
            f"""
            link add n{number} type veth peer name eth0 netns {node.netns}
            link set n{number} master br0
            link set n{number} up
            """,
            netns=self.fabric,
        )
        let_forward(node.netns)
        ip(
            "link set lo up",
            f"addr add {node.ip}/24 dev eth0",
            f"addr add {node.ip6}/64 dev eth0 nodad",
            *self.network.node(number),
            "link set eth0 up",
            f"route add default via {self.outside_ip}",
            "route add default via fd00:198:18::fe",
            netns=node.netns,
        )
        settled(node.netns, node.ip6, *self.network.own6(number))
        node.host = Place(f"host-{number}", node.netns, node.cgroup / "host")
        node.host.ip, node.host.ip6 = node.ip, node.ip6
        return node

    def attach(self, node: Node, pod: podnet.Pod) -> None:
        """Connects a pod's namespace to its node."""
        ip(*self.network.cable(node.number, pod), netns=node.netns)
        ip(*self.network.inside(node.number, pod), netns=pod.netns)

    def add_netns(self, name: str) -> None:
        """Adds a namespace that close() removes."""
        run("ip", "netns", "add", name)
        self._netns.append(name)

    def close(self) -> None:
        """Removes everything, users before what they use."""
        for node in self.nodes:
            node.close()
        subprocess.run(["ip", "link", "del", self.prefix], capture_output=True, check=False)
        for name in reversed(self._netns):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        if self._cgroup.exists():
            remove_cgroup(self._cgroup)
        shutil.rmtree(self.folder, ignore_errors=True)


MODE = os.environ.get("KBPF_TEST_MODE", "bpf")
"""Which data plane the lab's agents have: "bpf" or "ipvs". tests.kernels runs files with both."""


class Agent(AgentState):
    """`kbpf run` on one node."""

    def __init__(self, node: Node, *arguments: str, cache: Path | None = None) -> None:
        state_dir = node.lab.folder / f"state-{node.name}"
        super().__init__(node.netns, Path("/sys/fs/bpf") / node.netns, state_dir, MODE)
        self.node = node
        self.log = node.lab.folder / f"{node.name}.log"
        self._cache = cache or artifacts.compiled()
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._log_start = 0
        self.code: Path | None = None
        """The folder to start it in, if that has another kbpf/; None for ours."""
        self.module = "kbpf"
        """The module to run: kbpf or a variant (tests/support/runtime/clsact_agent.py)."""
        self.wrapper: tuple[str, ...] = ()
        """A command in front of the agent's that executes it."""
        self.extra: tuple[str, ...] = ()
        """The additional arguments of the process started last."""
        node.agent = self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, wait: bool = True, extra: tuple[str, ...] = ()) -> "Agent":
        """Starts it, and waits until it has synced."""
        command = (
            *self.wrapper,
            *(sys.executable, "-m", self.module, "run", "--hostname-override", self.node.name),
            *("--pin-dir", str(self.pin_dir), "--cgroup", str(self.node.cgroup)),
            *(() if self.mode == "bpf" else ("--mode", self.mode)),
            *("--state-dir", str(self.state_dir)),
            *("--cache-dir", str(self._cache), *self._arguments, *extra),
        )
        self.extra = extra
        self.begin()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*DIE_WITH_US, *inside(self.node.netns, self.node.cgroup / "host", *command)],
                stderr=log,
                cwd=self.code,
            )
        if wait:
            self.wait_synced()
        return self

    def begin(self) -> None:
        """Marks a new start: lines() and own_status() ignore everything written before."""
        self._started = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0

    def wait_synced(self, seconds: float = 2 * PATIENCE) -> None:
        """Waits until the process started last has programmed everything once. It may have to
        compile its programs before.
        """
        try:
            until(f"the agent of {self.node.name} has synced", self._is_synced, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.status()}\n{self.tail()}") from None

    def _is_synced(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"the agent ended: {self.tail()}")
        status = self.own_status()
        return status is not None and status["synced"]

    def own_status(self) -> dict[str, Any] | None:
        """status(), if it was written by the process started last."""
        status = self.status()
        return status if status is not None and status["started"] >= self._started else None

    def wait_ended(self) -> int:
        """Waits until the process exits by itself; its exit code."""
        return self._process.wait(2 * PATIENCE)

    def lines(self) -> list[str]:
        """The log lines of the process started last; not one that is being written."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().rpartition(b"\n")[0].decode(errors="replace").splitlines()

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.lines()[-lines:])

    def kbpf(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Runs a command of kbpf on the agent's node, with its folders."""
        command = inside(self.node.netns, self.node.cgroup / "host", sys.executable, "-m", "kbpf", *words)
        folders = {"KBPF_PIN_DIR": str(self.pin_dir), "KBPF_STATE_DIR": str(self.state_dir)}
        return subprocess.run(command, env=os.environ | folders, capture_output=True, text=True, check=False)

    def stop(self) -> int:
        """Sends SIGTERM, as kubelet does; the exit code."""
        self._process.terminate()
        return self._process.wait(PATIENCE)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self.is_running:
            self.kill()
        self.remove_pins()

    def remove_pins(self) -> None:
        """Detaches and removes all pins of an agent that has ended. IPVS ends with the
        namespace.
        """
        if self.pin_dir.exists():
            for pin in (*self.pin_dir.glob("links/*"), *self.pin_dir.glob("devices/*")):
                detach(pin)
            shutil.rmtree(self.pin_dir / "links", ignore_errors=True)
            shutil.rmtree(self.pin_dir, ignore_errors=True)


def detach(pin: Path) -> None:
    """Detaches a pinned link at once: without its pin alone the kernel detaches it some time later.
    Other pins, and links that only end with their pin, stay as they are.
    """
    with contextlib.suppress(KernelError), Link.open(pin) as link:
        link.detach()

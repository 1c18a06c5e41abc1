# SPDX-License-Identifier: Apache-2.0
"""Start time and memory, with a real API server on the same machine.

Sizes: 1 Service of 1 endpoint, 100 of 1, 1,000 of 10, 10,000 of 10. The compile cache is warm. The
start time is that from exec until all Services are programmed. For the smallest and the largest
size it also measures the time from exec to the first successful connection, for kbpf and a real
kube-proxy in turn: from a process of the node to a ClusterIP, and from a client outside to a
NodePort.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.tools.common import chosen, goal, median, memory, rounds, say
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Kube
from tests.support.cluster.kube_objects import (
    endpoint,
    endpoint_slice,
    node,
    port,
    service,
    slice_port,
)
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.lab.lab import DIE_WITH_US, Agent, Lab, Place, inside, until
from tests.support.lab.lab import run as command

SIZES = {"1x1": (1, 1), "100x1": (100, 1), "1000x10": (1_000, 10), "10000x10": (10_000, 10)}
FIRST_GOALS = {"1x1": 1.0, "10000x10": 3.0}
"""Goals in seconds, from exec to the first connection of a process of the node."""
MEMORY_GOALS = {1: 60.0, 100: 60.0, 1_000: 80.0, 10_000: 150.0}
STARTS = 5
SETTLE_SECONDS = 2.0
"""The time that the kernel gets to detach and free what the previous proxy had attached."""
FIRST = Path(__file__).parent / "tools" / "first.py"
VIP, NODE_PORT = "10.96.77.77", 30077
"""Addresses of the Service that is dialled. Its name sorts after all others."""


def fill(kube: Kube, first: int, count: int, endpoints: int) -> None:
    """Creates Services `first` to `count` - 1, each with a slice of `endpoints` endpoints."""
    numbers = range(first, count)
    kube.create_many([service(f"s{n}", port(80, "http", target=8080)) for n in numbers], 8)
    kube.create_many([slice_of(n, endpoints) for n in numbers], 8)


def slice_of(number: int, endpoints: int, shift: int = 0) -> dict[str, Any]:
    """The only slice of Service `number`. `shift` replaces that many of its endpoints."""
    backends = [endpoint(address(number, i + shift), node=f"node-{i % 3}") for i in range(endpoints)]
    return endpoint_slice(f"s{number}", *backends, ports=[slice_port(8080, "http")], name=f"s{number}-x")


def address(number: int, index: int) -> str:
    """A distinct pod address for each endpoint."""
    flat = number * 16 + index
    return f"10.{160 + flat // 65_536}.{flat // 256 % 256}.{flat % 256}"


def start_time(agent: Agent) -> float:
    """Starts the agent; returns the seconds until all Services are programmed."""
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    agent.start(wait=False)

    def synced() -> bool:
        status = agent.status()
        return bool(status and status["synced"] and status["started"] >= began)

    until("programmed", synced, 120)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def dialled(pod: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Service that is dialled, and its slice: one pod of the node."""
    made = service("zz", port(80, target=8080, node_port=NODE_PORT), type="NodePort", cluster_ip=VIP)
    return made, endpoint_slice("zz", endpoint(pod.ip, node="node-1"), ports=[slice_port(8080)], name="zz-x")


def processor_seconds(pid: int) -> float:
    """CPU seconds of a process, its threads and its reaped children, also before exec."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # utime, stime, cutime and cstime, counted from the field after the name (proc_pid_stat(5))
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def dialer(netns: str | None, cgroup: Path | None, host: str, at: int) -> Iterator[Any]:
    """Runs first.py and yields its stdout, once it has begun to dial."""
    words = inside(netns, cgroup, "/usr/bin/python3", "-S", str(FIRST), host, str(at))
    with subprocess.Popen([*DIE_WITH_US, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process.stdout
        finally:
            process.kill()


def first_connections(lab: Lab, start: Callable[[], int]) -> dict[str, float]:
    """Starts a proxy by `start`, which returns its pid. Returns the seconds to the first connection
    of each client, and the proxy's CPU seconds at the node's.
    """
    here = lab.nodes[0]
    time.sleep(SETTLE_SECONDS)
    with ExitStack() as stack:
        of_node = stack.enter_context(dialer(here.netns, here.host.cgroup, VIP, 80))
        outside = stack.enter_context(dialer(lab.outside, None, here.ip, NODE_PORT))
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        pid = start()
        node_at = float(of_node.readline())
        used = processor_seconds(pid)
        outside_at = float(outside.readline())
        return {"node_s": node_at - began, "cpu_s": used, "outside_s": outside_at - began}


def first(lab: Lab, agent: Agent, config: Path) -> dict[str, Any]:
    """Measures the first connection of kbpf and kube-proxy in turn; returns medians by proxy."""
    here = lab.nodes[0]
    kube_proxy = KubeProxy(here, "nftables", config)

    def kbpf() -> int:
        agent.start(wait=False)
        return agent.pid

    found: dict[str, list[dict[str, float]]] = {"kbpf": [], "kube-proxy": []}
    for _ in range(rounds(STARTS)):
        agent.close()
        found["kbpf"].append(first_connections(lab, kbpf))
        agent.close()
        try:
            found["kube-proxy"].append(first_connections(lab, lambda: kube_proxy.start().pid))
        finally:
            kube_proxy.stop()
            for family in ("ip", "ip6"):
                # Adding it first: kube-proxy may have been stopped before it created the table.
                for do in ("add", "delete"):
                    command(*inside(here.netns, None, "nft", do, "table", family, "kube-proxy"))
    return {name: {what: median([row[what] for row in rows]) for what in rows[0]} for name, rows in found.items()}


def run() -> dict[str, Any]:
    """Returns the results by size. $KBPF_BENCH_ONLY: only sizes whose names contain one of these
    words.
    """
    results: dict[str, Any] = {}
    with Lab(1, "bench") as lab, ApiServer(address=lab.outside_ip) as server:
        config = server.kubeconfig(lab.folder / "kubeconfig")
        kube = server.kube()
        pod = lab.nodes[0].pod("server").serve(8080)
        agent = Agent(lab.nodes[0], "--kubeconfig", str(config))
        agent.start()
        agent.stop()  # this start has filled the compile cache
        existing = 0
        for size in chosen(SIZES):
            count, endpoints = SIZES[size]
            if count <= 1_000 or not results:
                kube.clear()
                existing = 0
                kube.create(node("node-1", lab.nodes[0].ip))
                kube.create_many(dialled(pod), 1)
            say(f"creating {count} x {endpoints}")
            fill(kube, existing, count - 1, endpoints)
            existing = count - 1
            results[size] = measure(agent, count)
            if size in FIRST_GOALS:
                found = first(lab, agent, config)
                results[size]["first"] = found
                reached = goal(found["kbpf"]["node_s"], at_most=FIRST_GOALS[size])
                results[size]["first_goal"] = reached
            say(f"{size}: {results[size]}")
    return results


def measure(agent: Agent, count: int) -> dict[str, Any]:
    """Measures cold starts (nothing is pinned), warm starts (adopting pinned maps) and memory."""
    cold, warm = [], []
    for _ in range(STARTS):
        agent.close()
        cold.append(start_time(agent))
        agent.stop()
        warm.append(start_time(agent))
        os.kill(agent.pid, 0)
        time.sleep(1.5)  # after the grace period the agent has freed what only the start needs
        used = memory(agent.pid)
        agent.stop()
    result: dict[str, Any] = {
        "start_s": median(cold),
        "restart_s": median(warm),
        "memory": used,
        "memory_goal": goal(used["rss_mb"], at_most=MEMORY_GOALS[count]),
        "peak_goal": goal(round(used["peak_mb"] / used["rss_mb"], 2), at_most=1.5),
    }
    if count == 10_000:
        result["start_goal"] = goal(median(cold), at_most=3.0)
    return result

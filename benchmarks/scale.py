"""From process start to programmed, and memory, over a real API server.

Sizes: 100 Services x 1 endpoint, 1,000 x 10, 10,000 x 10. A warm compile cache.
"""

import os
import time
from typing import Any

from benchmarks.common import goal, median, memory, say
from tests.support.apiserver import ApiServer
from tests.support.kube import Kube
from tests.support.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.lab import Agent, Lab, until

SIZES = ((100, 1), (1_000, 10), (10_000, 10))
MEMORY_GOALS = {100: 60.0, 1_000: 80.0, 10_000: 150.0}
STARTS = 5


def fill(kube: Kube, first: int, count: int, endpoints: int) -> None:
    """Services `first`..`count`, each with a slice of so many endpoints."""
    numbers = range(first, count)
    kube.create_many([service(f"s{n}", port(80, "http", target=8080)) for n in numbers], 8)
    kube.create_many([slice_of(n, endpoints) for n in numbers], 8)


def slice_of(number: int, endpoints: int, shift: int = 0) -> dict[str, Any]:
    """The one slice of Service `number`."""
    backends = [
        endpoint(address(number, i + shift), node=f"node-{i % 3}") for i in range(endpoints)
    ]
    return endpoint_slice(
        f"s{number}", *backends, ports=[slice_port(8080, "http")], name=f"s{number}-x"
    )


def address(number: int, index: int) -> str:
    """A pod address of its own for each endpoint."""
    flat = number * 16 + index
    return f"10.{160 + flat // 65_536}.{flat // 256 % 256}.{flat % 256}"


def start_time(agent: Agent) -> float:
    """Seconds from the start of the process to everything programmed."""
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    agent.start(wait=False)

    def synced() -> bool:
        status = agent.status()
        return bool(status and status["synced"] and status["started"] >= began)

    until("programmed", synced, 120)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def run() -> dict[str, Any]:
    """By number of Services."""
    results: dict[str, Any] = {}
    with Lab(1, "bench") as lab, ApiServer(addresses=(lab.outside_ip,)) as server:
        config = server.kubeconfig(lab.folder / "kubeconfig", url=server.url_at(lab.outside_ip))
        kube = server.kube()
        kube.create(node("node-1", lab.nodes[0].ip))
        agent = Agent(lab.nodes[0], "--kubeconfig", str(config))
        agent.start()
        agent.stop()  # the compile cache is warm now
        existing = 0
        for count, endpoints in SIZES:
            if count == 1_000:
                kube.clear()
                existing = 0
                kube.create(node("node-1", lab.nodes[0].ip))
            say(f"creating {count} x {endpoints}")
            fill(kube, existing, count, endpoints)
            existing = count
            results[f"{count}x{endpoints}"] = measure(agent, count)
            say(f"{count}x{endpoints}: {results[f'{count}x{endpoints}']}")
    return results


def measure(agent: Agent, count: int) -> dict[str, Any]:
    """Cold starts (nothing pinned) and warm ones (adopting), then memory."""
    cold, warm = [], []
    for _ in range(STARTS):
        agent.close()
        cold.append(start_time(agent))
        agent.stop()
        warm.append(start_time(agent))
        os.kill(agent.pid, 0)
        time.sleep(1.5)  # the grace period: what it needs for a moment is given back
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

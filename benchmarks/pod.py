# SPDX-License-Identifier: Apache-2.0
"""Memory and CPU time of the DaemonSet's container. Its requests and limits come from here.

Memory is what the cgroup counts, which includes BPF maps and the compiler. Sizes as in scale.py.
The container is that of the tests (tests/support/cluster/daemonset.py), so its limit is in force.
"""

import shutil
import time
from typing import Any

from benchmarks.scale import SIZES, fill
from benchmarks.tools.common import chosen, say
from tests.support.build import go_build
from tests.support.cluster.daemonset import PodAgent, PodCluster

MB = 1 << 20
IDLE_SECONDS = 20.0


def run() -> dict[str, Any]:
    """Returns the results by number of Services."""
    results: dict[str, Any] = {}
    with PodCluster(go_build.build("kubectl"), 2, "bench") as cluster:
        agent = cluster.pod_agents[0]
        existing, existing_endpoints = 0, 1
        for size in chosen(SIZES):
            count, endpoints = SIZES[size]
            if endpoints != existing_endpoints:
                cluster.kube.clear()
                cluster.register(cluster.lab.nodes[0])
                existing = 0
            say(f"creating {count} x {endpoints}")
            fill(cluster.kube, existing, count, endpoints)
            existing, existing_endpoints = count, endpoints
            results[size] = {
                "first_start": measure(cluster, agent, fresh=True),
                "restart": measure(cluster, agent, fresh=False),
            }
            say(f"{size}: {results[size]}")
    return results


def measure(cluster: PodCluster, agent: PodAgent, fresh: bool) -> dict[str, float]:
    """Measures a start and then IDLE_SECONDS without changes. `fresh`: as on a node that has never
    run kbpf, so the agent compiles its programs.
    """
    agent.stop()
    if fresh:
        agent.remove_pins()
        agent.use_cache(agent.folder / "cache")
        shutil.rmtree(agent.folder / "cache", ignore_errors=True)
    cluster.kubelets.sync()
    started = agent.usage()
    time.sleep(IDLE_SECONDS)
    idle = agent.usage()
    return {
        "peak_mb": round(idle["peak"] / MB, 1),
        "now_mb": round(idle["now"] / MB, 1),
        "start_cpu_s": round(started["cpu"], 2),
        "idle_cpu_percent": round((idle["cpu"] - started["cpu"]) / IDLE_SECONDS * 100, 2),
    }

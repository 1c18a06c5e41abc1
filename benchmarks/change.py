# SPDX-License-Identifier: Apache-2.0
"""The latency from an event's arrival at the agent to the written map, with 10,000 Services of 10
endpoints.

A real API server; EndpointSlices are changed one after the other. The agent itself measures the
latency (`event_to_map_*` in its status). Goal: p99 <= 10 ms.
"""

import time
from typing import Any

from benchmarks.scale import fill, slice_of
from benchmarks.tools.common import goal, say
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube_objects import node
from tests.support.lab.lab import Agent, Lab

SERVICES, ENDPOINTS, CHANGES, PAUSE = 10_000, 10, 2_000, 0.005


def run() -> dict[str, Any]:
    """Returns the latencies in milliseconds."""
    with Lab(1, "bench") as lab, ApiServer(address=lab.outside_ip) as server:
        config = server.kubeconfig(lab.folder / "kubeconfig")
        kube = server.kube()
        kube.create(node("node-1", lab.nodes[0].ip))
        say(f"creating {SERVICES} x {ENDPOINTS}")
        fill(kube, 0, SERVICES, ENDPOINTS)
        agent = Agent(lab.nodes[0], "--kubeconfig", str(config)).start()
        for number in range(CHANGES):
            which = number * 7919 % SERVICES
            kube.replace(slice_of(which, ENDPOINTS, shift=1 + number % 5))
            time.sleep(PAUSE)
        time.sleep(3)
        status = agent.status()
        assert status is not None
        agent.stop()
        return {
            "changes": CHANGES,
            "p50_ms": status["event_to_map_p50_ms"],
            "p99_ms": status["event_to_map_p99_ms"],
            "goal": goal(status["event_to_map_p99_ms"], at_most=10.0),
        }

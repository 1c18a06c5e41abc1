# SPDX-License-Identifier: Apache-2.0
"""Short TCP connections through a ClusterIP compared with direct ones, with 1 and 10,000 Services.

Client and backend are pods of one node. Each round measures:
  bare     directly to the backend, from a process outside the hooked cgroup
  direct   directly to the backend, hooked: the cost for connections that use no Service
  service  through the ClusterIP
Goal: service / bare >= 0.97.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.tools.common import build_c, goal, interleave, median, ratio, say, sysctl
from tests.support.lab.lab import Agent, Lab, Place, cgroup2, inside, until

PORT = 9000
ROUNDS = 15
SECONDS = 1.0
VIP = "10.96.0.10"


def objects(count: int, backend: str) -> dict[str, Any]:
    """A List of `count` Services with their EndpointSlices. The one that the client uses is in the
    middle, at VIP.
    """
    items: list[dict[str, Any]] = []
    for number in range(count):
        dialled = number == count // 2
        name = "bench" if dialled else f"other-{number}"
        vip = VIP if dialled else f"10.97.{number // 250}.{number % 250 + 1}"
        address = backend if dialled else f"10.99.{number // 250}.{number % 250 + 1}"
        spec = {"clusterIP": vip, "clusterIPs": [vip], "ipFamilies": ["IPv4"]}
        items.append(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name},
                "spec": {**spec, "ports": [{"port": 80, "protocol": "TCP"}]},
            }
        )
        items.append(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [address]}],
                "ports": [{"name": "", "port": PORT, "protocol": "TCP"}],
            }
        )
    return {"apiVersion": "v1", "kind": "List", "items": items}


def dial(program: Path, place: Place, cgroup: Path, address: str, port: int) -> float:
    """Runs the load generator; returns connections per second."""
    command = inside(place.netns, cgroup, str(program), "short", address, str(port), str(SECONDS))
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    done, failed, seconds = out.split()
    if int(failed):
        raise SystemExit(f"{failed} of {done} connections to {address}:{port} failed")
    return int(done) / float(seconds)


def measure(lab: Lab, program: Path, count: int) -> dict[str, Any]:
    """Measures with `count` Services."""
    node = lab.nodes[0]
    client, backend = node.pods
    folder = lab.folder / f"source-{count}"
    folder.mkdir()
    (folder / "objects.json").write_text(json.dumps(objects(count, backend.ip)))
    agent = Agent(node, "--source", str(folder)).start()
    assert client.cgroup is not None
    hooked, unhooked = client.cgroup, cgroup2()
    sides = {
        "bare": lambda: dial(program, client, unhooked, backend.ip, PORT),
        "direct": lambda: dial(program, client, hooked, backend.ip, PORT),
        "service": lambda: dial(program, client, hooked, VIP, 80),
    }
    for side in sides.values():
        side()  # warm up: neighbour entries, caches
    results = interleave(ROUNDS, sides)
    agent.close()
    compared = ratio(results, "service", "bare")
    say(f"{count} Services: service / bare {compared}")
    return {
        "per_second": {name: median(values) for name, values in results.items()},
        "service_by_bare": compared,
        "direct_by_bare": ratio(results, "direct", "bare"),
        "goal": goal(compared["median"], at_least=0.97),
    }


def run() -> dict[str, Any]:
    """Returns the results by number of Services."""
    program = build_c("load")
    with Lab(1, "bench") as lab:
        node = lab.nodes[0]
        sysctl(node.pod("client").netns, ipv4__tcp_max_tw_buckets=0)
        backend = node.pod("backend")
        server = subprocess.Popen(inside(backend.netns, backend.cgroup, str(program), "serve", backend.ip, str(PORT)))
        try:
            until("the backend listens", lambda: "error" not in _probe(node.host, backend.ip), 5)
            time.sleep(0.2)
            return {str(count): measure(lab, program, count) for count in (1, 10_000)}
        finally:
            server.kill()
            server.wait()


def _probe(host: Place, address: str) -> dict[str, Any]:
    answer = host.tcp(address, 1, timeout=0.2)
    return {} if answer.get("error") == "ECONNREFUSED" else answer

# SPDX-License-Identifier: Apache-2.0
"""The cost of `--accounting` and a running `kbpf monitor` for a short TCP connection.

Identical nodes, one for each setting. Client and backend are pods of the same node, both in
the hooked cgroup, so with `full` the kernel calls `sock_ops` at both ends. Each round measures, on
every node:
  bare     directly to the backend; client and backend are outside the hooked cgroup
  direct   directly to the backend, hooked: the cost for connections that use no Service
  service  through the ClusterIP
Compared are the ratios service / bare and direct / bare of a node with those of another level
(LEVELS). Only the best tenth of the rounds counts, since other work on the machine can only slow a
round down.
"""

import json
import subprocess
import sys
from typing import Any

from benchmarks.connect import PORT, VIP, _probe, objects
from benchmarks.tools.common import build_c, first, goal, interleave, median, rounds, say, sysctl
from tests.support.lab.lab import Agent, Lab, Node, cgroup2, inside, until

SECONDS = 0.3
LEVELS = {
    "full": ("off", "--accounting", "full"),
    "monitor": ("connections", "--accounting", "connections"),
    "connections": ("off", "--accounting", "connections"),
    "off": ("", "--accounting", "off"),
}
"""The level that each is compared with, and the flags of its agent."""
SERVICES = 1_000
BARE_PORT = PORT + 1


def run() -> dict[str, Any]:
    """Returns connections per second by node and side, and the ratios of ratios."""
    program = build_c("load")
    with Lab(len(LEVELS), "acc", apart=True) as lab:
        servers = []
        agents = {}
        for node, (name, (_, *flags)) in zip(lab.nodes, LEVELS.items(), strict=True):
            client, backend = node.pod("client"), node.pod("backend")
            sysctl(client.netns, ipv4__tcp_max_tw_buckets=0)
            for cgroup, port in ((backend.cgroup, PORT), (cgroup2(), BARE_PORT)):
                command = inside(backend.netns, cgroup, str(program), "serve", backend.ip, str(port))
                servers.append(subprocess.Popen(command))
            folder = lab.folder / f"source-{node.name}"
            folder.mkdir()
            (folder / "objects.json").write_text(json.dumps(objects(SERVICES, backend.ip)))
            agents[name] = Agent(node, "--source", str(folder), *flags).start()
            host, address = node.host, backend.ip
            until("it listens", lambda: "error" not in _probe(host, address), 5)  # noqa: B023
        try:
            servers.append(watch(agents["monitor"]))
            return measure(lab.nodes, str(program))
        finally:
            for server in servers:
                server.kill()
                server.wait()
            for agent in agents.values():
                agent.close()


def watch(agent: Agent) -> "subprocess.Popen[bytes]":
    """Starts a monitor on the agent's node, which shows a hundred of its connections a second."""
    command = (sys.executable, "-m", "kbpf", "monitor", "--pin-dir", str(agent.pin_dir))
    return subprocess.Popen(inside(agent.node.netns, cgroup2(), *command), stdout=subprocess.DEVNULL)


def measure(nodes: list[Node], program: str) -> dict[str, Any]:
    """Measures all sides of all nodes, interleaved."""
    sides = {}
    for node, name in zip(nodes, LEVELS, strict=True):
        client, backend = node.pods
        for side, cgroup, address, port in (
            ("bare", cgroup2(), backend.ip, BARE_PORT),
            ("direct", client.cgroup, backend.ip, PORT),
            ("service", client.cgroup, VIP, 80),
        ):
            command = inside(client.netns, cgroup, *first(0), program, "short", address, str(port), str(SECONDS))
            sides[f"{name}_{side}"] = lambda command=command: dial(command)
    for side in sides.values():
        side()  # warm up: neighbour entries, caches
    results = interleave(rounds(31), sides)
    found: dict[str, Any] = {name: median(values) for name, values in results.items()}
    for side in ("direct", "service"):
        shares = {name: best(results, f"{name}_{side}", f"{name}_bare") for name in LEVELS}
        found[f"{side}_by_bare"] = shares
        for name, (other, *_) in LEVELS.items():
            if not other:
                continue
            share: Any = round(shares[name] / shares[other], 4)
            if name == "connections":  # the default; the others are asked for
                share = goal(share, at_least=0.99)
            found[f"{side}_{name}_by_{other}"] = share
            say(f"{side}, {name} / {other}: {share}")
    return found


def best(results: dict[str, list[float]], one: str, other: str) -> float:
    """The ratio `one` / `other` of the sums of the best tenth of the rounds."""
    count = max(1, len(results[one]) // 10)
    tops = [sum(sorted(results[name])[-count:]) for name in (one, other)]
    return round(tops[0] / tops[1], 4)


def dial(command: list[str]) -> float:
    """Runs the load generator; returns connections per second."""
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    done, failed, seconds = out.split()
    if int(failed):
        raise SystemExit(f"{failed} of {done} connections failed: {command}")
    return int(done) / float(seconds)

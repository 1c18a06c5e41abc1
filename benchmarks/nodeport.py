"""Short TCP connections through a NodePort, against direct ones to the backend by its route.

The client is a machine outside of the cluster; backends are a pod of the node that is dialled and
one of another node. Sides of each round, with `--forwarding stack` and, where there is one, with
`direct`:
  local, direct     to the local pod's address, routed by its node
  local, NodePort   through the NodePort
  remote, ...       the same with the pod of the other node
The goals are those of the packet path's issue; what a real kube-proxy reaches stands beside them
there.
"""

import socket
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import build_c, interleave, median, ratio, say
from tests.support.field import FORWARDINGS, Field, at, forward, split, there
from tests.support.kube_objects import slice_port
from tests.support.lab import inside, ip, until

PORT, ROUNDS, SECONDS = 9000, 11, 1.0
BACKENDS = {"local": (71, "a1"), "remote": (72, "b1")}


def dial(field: Field, program: Path, processes: int, host: str, port: int) -> float:
    """Connections per second, of so many processes together."""
    command = inside(field.lab.outside, None, str(program), "dial", host, str(port), str(SECONDS))
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
               for _ in range(processes)]  # fmt: skip
    rate = 0.0
    for each in running:
        done, failed, seconds = each.communicate()[0].split()
        if int(failed):
            raise SystemExit(f"{failed} of {done} connections to {host}:{port} failed")
        rate += int(done) / float(seconds)
    return rate


def sides(field: Field, program: Path, processes: int) -> dict[str, Callable[[], float]]:
    """What is compared, by name."""
    found: dict[str, Callable[[], float]] = {}
    for name, (number, who) in BACKENDS.items():
        found[f"{name}, direct"] = partial(dial, field, program, processes, field[who].ip, PORT)
        host, port = split(at("NodePort", number))
        found[f"{name}, NodePort"] = partial(dial, field, program, processes, host, port)
    return found


def measure(program: Path, how: str) -> dict[str, Any]:
    """One way of forwarding."""
    with Field(*forward(how), name="np", pods=(1, 1)) as field:
        servers = []
        try:
            for number, who in BACKENDS.values():
                pod = field[who]
                command = inside(pod.netns, None, str(program), "serve", pod.ip, str(PORT))
                servers.append(subprocess.Popen(command))
                service, *_ = field.all_ways(number, "")
                field.create(service, field.slice(f"web-{number}", who, slice_port(PORT)))
            for node in field.lab.nodes:
                ip(f"route add 10.244.{node.number}.0/24 via {node.ip}", netns=field.lab.outside)
            field.settle()
            for _, who in BACKENDS.values():
                until(f"{who} serves", partial(_serves, field, field[who].ip))
            results = {}
            for processes in (1, 2):
                compared = sides(field, program, processes)
                for side in compared.values():
                    side()  # neighbours, caches
                rates = interleave(ROUNDS, compared)
                results[f"{processes} clients"] = {
                    "per_second": {name: median(values) for name, values in rates.items()},
                    **{
                        f"{name}_by_direct": ratio(rates, f"{name}, NodePort", f"{name}, direct")
                        for name in BACKENDS
                    },
                }
                say(f"{how}, {processes}: {results[f'{processes} clients']}")
            return results
        finally:
            for server in servers:
                server.kill()
                server.wait()


def _serves(field: Field, address: str) -> bool:
    def connects() -> bool:
        with socket.socket() as s:
            return s.connect_ex((address, PORT)) == 0

    return bool(there(field["outside"], connects))


def run() -> dict[str, Any]:
    """By way of forwarding."""
    program = build_c("short")
    return {how: measure(program, how) for how in FORWARDINGS}

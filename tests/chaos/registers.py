# SPDX-License-Identifier: Apache-2.0
"""What clients are served never goes back.

A Service has one endpoint, another one in each version of its slice. Clients dial it all the time
while a real API server gets version after version and agents restart, are killed or stopped, or
have to grow their maps. porcupine (support/build/go/registers) judges the dials: each frontend on
each node is a register that gets the versions in their order, each at one moment for all clients,
at the latest when the agents have settled. No dial may fail.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import closing
from typing import Any, Self

from tests.support.build import go_build
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.lab.lab import Agent, Node, Place, until

BACKENDS = range(9100, 9164)
"""The port of version n is number n % 64 of these, so a dial that goes back by exactly 64 versions
is not found. Even versions are on a1, odd ones on b1."""
CLUSTER_IP, NODE_PORT = "10.96.0.30", 30_030
DISTURBANCES = ("nothing", "restart", "kill", "stop", "growth")
GROWTH = 100
"""Services of a growth; maps begin with 128 entries."""
PAUSE_S = 0.002
"""Between two dials of a thread."""
LONGEST_PAUSE_S = 0.03
"""Between two versions. With short pauses an agent programs several at once."""
AFTERWARDS = 20
"""Dials of each client after the last version of a round is in force."""


class Registers(Cluster):
    """Two nodes, and the clients of both, as a context manager."""

    def __init__(self, name: str) -> None:
        super().__init__(2, name, pods=3)
        self.version = self.dials = 0
        self._grown = 0

    def agent_on(self, home: Node, *arguments: str) -> Agent:
        made = super().agent_on(home, *arguments)
        made.module = "tests.support.runtime.small_maps_agent"
        return made

    def __enter__(self) -> Self:
        super().__enter__()
        for name in ("a1", "b1"):
            self[name].serve(*BACKENDS, udp=tuple(BACKENDS))
        ports = [port(80, "t", node_port=NODE_PORT), port(80, "u", "UDP")]
        self.create(service("register", *ports, type="NodePort", cluster_ip=CLUSTER_IP), self._slice())
        self.settle()
        inside = (CLUSTER_IP, 80)
        self._clients: list[tuple[str, Place, tuple[str, int], str]] = []
        for home, letter in zip(self.lab.nodes, "ab", strict=True):
            outside = self._stack.enter_context(closing(Place(f"outside-{home.number}", self.lab.outside, None)))
            self._clients += [
                (f"{home.name} ClusterIP TCP", self[f"{letter}2"], inside, "tcp"),
                (f"{home.name} ClusterIP TCP", self[f"{letter}3"], inside, "tcp"),
                (f"{home.name} ClusterIP UDP", self[f"host-{home.number}"], inside, "udp"),
                (f"{home.name} NodePort", outside, (home.ip, NODE_PORT), "tcp"),
            ]
        return self

    def round(self, disturbance: str, versions: int, order: random.Random) -> None:
        """Writes so many versions, disturbs one agent, and judges the dials meanwhile."""
        first, agent = self.version, order.choice(self.agents)
        begin, end = sorted(order.sample(range(versions), 2))
        written = []
        for _, place, (host, at), protocol in self._clients:
            place.ask("start_load", host=host, port=at, threads=2, pause=PAUSE_S, protocol=protocol, record=True)
        for number in range(versions):
            if number == begin:
                self._disturb(agent, disturbance)
            if number == end:
                self._restore(agent, disturbance)
            self.version += 1
            written.append(time.monotonic_ns())
            self.kube.replace(self._slice())
            time.sleep(order.uniform(0, LONGEST_PAUSE_S))
        self.settle()
        settled = time.monotonic_ns()
        for _, place, _, _ in self._clients:
            goal = _made(place) + AFTERWARDS
            until("it dials", lambda place=place, goal=goal: _made(place) >= goal)
        writes = [
            {"Write": True, "Version": version, "Call": called, "Return": settled}
            for version, called in enumerate(written, first + 1)
        ]
        dials = defaultdict(list)
        for name, place, _, _ in self._clients:
            result = place.ask("stop_load")
            assert not result["errors"], (name, result["errors"][:5])
            dials[name] += [
                {"Version": BACKENDS.index(at), "Call": began, "Return": ended}
                for began, ended, _, at in result["recorded"]
            ]
        histories = [
            {"Name": name, "First": first, "Backends": len(BACKENDS), "Operations": writes + made}
            for name, made in dials.items()
        ]
        assert judge(*histories) == [], disturbance
        self.dials += sum(map(len, dials.values()))

    def _slice(self) -> Object:
        at, pod = BACKENDS[self.version % len(BACKENDS)], self["b1" if self.version % 2 else "a1"]
        ports = [slice_port(at, "t"), slice_port(at, "u", "UDP")]
        return endpoint_slice("register", endpoint(pod.ip), ports=ports)

    def _disturb(self, agent: Agent, how: str) -> None:
        if how == "restart":
            agent.stop()
        elif how == "kill":
            agent.kill()
        elif how == "stop":
            os.kill(agent.pid, signal.SIGSTOP)
        elif how == "growth":
            more = {f"more-{n}": f"{n // 250}.{1 + n % 250}" for n in range(self._grown, self._grown + GROWTH)}
            self._grown += GROWTH
            self.kube.create_many(service(name, cluster_ip=f"10.96.1{at}") for name, at in more.items())
            self.kube.create_many(endpoint_slice(name, endpoint(f"10.99.{at}")) for name, at in more.items())

    def _restore(self, agent: Agent, how: str) -> None:
        if how == "stop":
            os.kill(agent.pid, signal.SIGCONT)
        elif not agent.is_running:
            self.start(agent, wait=False)


def judge(*histories: dict[str, Any]) -> list[str]:
    """The names of those that no order of their operations explains."""
    text = "".join(json.dumps(history) + "\n" for history in histories)
    done = subprocess.run([go_build.build("registers")], input=text, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _made(place: Place) -> int:
    return sum(place.ask("peek_load")["names"].values())

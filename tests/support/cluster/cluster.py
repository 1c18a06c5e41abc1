# SPDX-License-Identifier: Apache-2.0
"""A lab with a real API server outside of it and an agent on each node.

The test replaces all controllers: it writes Services, EndpointSlices and Nodes. `settle()` is the
only way to wait for the agents. It changes a marker Service and its slice, and returns once both
have been programmed twice; then everything written before is programmed too, since an API server's
watch keeps the order within a kind. So a test can check at once what is served and what is *not*.

Nodes: node-1 in zone-1, node-2 in zone-2, ...
Places: pods a1, a2, ... on node-1, b1, ... on node-2; host-network pods a-net, b-net; the hosts'
own processes, host-1, host-2.
Every pod answers on TCP and UDP 8080 and 8081, host-network pods on 9080.

Service addresses have an "unreachable" route: without kbpf, dialling one fails with EHOSTUNREACH at
once.
"""

import contextlib
import ipaddress
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from kbpf.model.address import Addr
from kbpf.model.objects import Protocol
from tests.support import plane
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import KubeError, Object
from tests.support.cluster.kube_objects import (
    endpoint,
    endpoint_slice,
    node,
    port,
    service,
    slice_port,
)
from tests.support.lab.lab import MODE, PATIENCE, Agent, Lab, Node, Place, ip, until
from tests.support.lab.placed import HOST_PORT, POD_PORTS, Placed
from tests.support.lab.podnet import gate

UNROUTED = ("10.96.0.0/16", "192.0.2.0/24", "203.0.113.0/24", "fd00:10:96::/112", "2001:db8::/32")


class Places(Placed):
    """Pods and hosts with their servers, and the agents of their nodes."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.home: dict[str, Node] = {}
        self.agents: list[Agent] = []
        self._marks = 0

    def settle_in(self, letter: str, home: Node, pods: int, *arguments: str) -> None:
        """Creates a node's pods, which serve, and its agent with these arguments, not yet
        started.
        """
        _unroute(home.netns)
        for index in range(1, pods + 1):
            pod = home.pod(f"{letter}{index}").serve(*POD_PORTS, udp=POD_PORTS)
            self.places[pod.name] = pod
            if MODE == "bpf":  # in other modes the pods' packets have to leave
                _unroute(pod.netns)
        hosted = home.host_network_pod(f"{letter}-net")
        for address in (hosted.ip, hosted.ip6):  # bound, so that UDP answers come from it
            hosted.serve(HOST_PORT, udp=(HOST_PORT,), address=address)
        for place in (hosted, home.host):
            self.places[place.name] = place
        self.home |= {place.name: home for place in (*home.pods, *home.places, home.host)}
        self.agents.append(self.agent_on(home, *arguments))

    def agent_on(self, home: Node, *arguments: str) -> Agent:
        return Agent(home, *arguments)

    def settle(self, *agents: Agent, seconds: float = PATIENCE) -> None:
        """Waits until the agents (default: all) have applied everything written so far.

        Within a round an agent programs the smallest changes first. That may be the marker, with
        the other changes of its round following moments later; so a second marker is written, which
        belongs to a later round.
        """
        for _ in range(2):
            self._marks += 1
            self.write_mark(*mark(self._marks))
            for agent in agents or self.agents:
                until(
                    f"{agent.node.name} has applied everything",
                    lambda agent=agent: shows(agent, self._marks),
                    seconds,
                )

    def write_mark(self, *objects: Object) -> None:
        """Creates or replaces the marker's Service and slice."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> Place:
        return self.places[name]

    @property
    def agent(self) -> Agent:
        """The first node's agent."""
        return self.agents[0]

    def served(self, agent: Agent | None = None) -> dict[str, dict[str, Any]]:
        """Frontend → its Service, flags and backends, without ids and without the marker."""
        one = agent or self.agent
        if one.mode == "ipvs":
            return {at: behind for at, behind in one.behind().items() if behind["service"] != MARK}
        found = plane.dump(one.entries)["frontends"]
        return {at: behind for at, behind in found.items() if behind["service"] != MARK}

    def seen_as(self, client: str, server: str, v6: bool) -> str:
        """The client's address as the server sees it without masquerading."""
        here, there, home = self.places[client], self.places[server], self.home[client]
        if here in home.pods:
            return here.ip6 if v6 else here.ip
        if there in home.pods:
            return gate(home.number, v6)
        if there in self.home[server].pods:
            return home.lab.network.seen_elsewhere(home, v6)
        if self.home[server] is not home:
            return home.ip6 if v6 else home.ip
        return there.ip6 if v6 else there.ip


class Cluster(Places):
    """The lab of the module docstring, a context manager."""

    def __init__(
        self,
        nodes: int = 2,
        name: str = "",
        pods: int = 3,
        network: str = "routed",
        arguments: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._arguments = arguments
        self._shape = (nodes, name, pods, network)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        nodes, name, pods, network = self._shape
        with self._stack:
            enter = self._stack.enter_context
            self.lab = enter(Lab(nodes, name, apart=True, network=network))
            for letter, each in zip("abcdef", self.lab.nodes, strict=False):
                self.settle_in(letter, each, pods, *self._arguments)
            self.api = enter(ApiServer(address=self.lab.outside_ip, netns=self.lab.outside))
            self.kube = enter(self.api.kube())
            self.bring_up()
            self._stack = self._stack.pop_all()
        return self

    def bring_up(self) -> None:
        """Creates the Nodes and starts their agents."""
        for number, each in enumerate(self.lab.nodes, 1):
            self.kube.create(node(each.name, each.ip, each.ip6, zone=f"zone-{number}"))
        for agent in self.agents:
            agent.start(wait=False, extra=("--kubeconfig", str(self.kubeconfig())))
        for agent in self.agents:
            agent.wait_synced()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def kubeconfig(self, user: str = "kbpf") -> Path:
        """The kubeconfig for the agents."""
        path = self.lab.folder / f"kubeconfig-{user}"
        return self.api.kubeconfig(path, user)

    def start(self, agent: Agent, wait: bool = True, user: str = "kbpf") -> None:
        """Starts an agent that has ended."""
        agent.start(wait, ("--kubeconfig", str(self.kubeconfig(user))))

    # ---- objects ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def given(self, *objects: Object) -> Iterator[None]:
        """Creates the objects and waits for the agents; deletes them at the end of the block."""
        try:
            self.create(*objects)
            self.settle()
            yield
        finally:
            self.delete(*objects)

    def create(self, *objects: Object) -> None:
        """Creates the objects; a Service's `status` is written to the status subresource."""
        for obj in objects:
            self.kube.create(obj)
            if obj["kind"] == "Service" and "status" in obj:
                name, space = obj["metadata"]["name"], obj["metadata"]["namespace"]
                self.kube.patch("Service", name, {"status": obj["status"]}, space, "status")

    def delete(self, *objects: Object) -> None:
        """Deletes the objects, if they exist."""
        for obj in objects:
            try:
                self.kube.delete(obj["kind"], obj["metadata"]["name"], obj["metadata"]["namespace"])
            except KubeError as error:
                if error.status != 404:
                    raise

    def change(self, *objects: Object, agents: Sequence[Agent] = ()) -> None:
        """Replaces the objects and waits for the agents (default: all)."""
        for obj in objects:
            self.kube.replace(obj)
        self.settle(*agents)

    def write_mark(self, *objects: Object) -> None:
        for obj in objects:
            (self.kube.replace if self._marks > 1 else self.kube.create)(obj)


MARK = "default/settled"


def _unroute(netns: str | None) -> None:
    """Adds the unreachable routes. Pods need them too: routers limit the rate of ICMP errors."""
    ip(*(f"route add unreachable {each}" for each in UNROUTED), netns=netns)


def mark(number: int) -> tuple[Object, Object]:
    """The marker's Service and slice. The number is a port of both, so both must have arrived."""
    row = service("settled", port(1000 + number), cluster_ip="10.96.0.250")
    end = endpoint("10.255.0.1")
    return row, endpoint_slice("settled", end, ports=[slice_port(1000 + number)])


def shows(agent: Agent, number: int) -> bool:
    """Whether this marker is programmed, with everything that precedes it."""
    at = 1000 + number
    if agent.mode == "ipvs":
        return _shows_ipvs(agent, at)
    key = ipaddress.ip_address("::ffff:10.96.0.250").packed + at.to_bytes(2, "big") + b"\x06\0"
    if key not in agent.entries("services"):
        return False
    behind = plane.dump(agent.entries)["frontends"].get(f"10.96.0.250:{at}/TCP")
    return behind is not None and behind["cluster"] == [f"10.255.0.1:{at}/TCP"]


def _shows_ipvs(agent: Agent, at: int) -> bool:
    """shows() for mode ipvs. The records of stale names are deleted last. The nftables tables, slow
    to list under emulation, are only read if the rest fits.
    """
    servers = agent.virtual_services().get(f"10.96.0.250:{at}/6", {})
    if servers.get(f"10.255.0.1:{at}") != 1:
        return False
    sets = agent.elements()
    answers = {parts for name in ("served", "refused", "dropped") for parts in sets.get(name, ())}
    mark_ = (Addr(ipaddress.ip_address("::ffff:10.96.0.250").packed), Protocol.TCP, at)
    return mark_ in sets.get("served", ()) and answers == set(sets.get("own", ()))

# SPDX-License-Identifier: Apache-2.0
"""Nodes with one folder of objects, with the packet path on, and a client outside the cluster.

Two nodes by default. "outside" is a separate machine on the nodes' network. It routes external IPs
and VIPs to node-1, as a router would. node-1 has the pods a1, a2, a3, node-2 b1, b2. A place named
like a pod with "!" appended is in that pod's network namespace, but in no hooked cgroup.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from kbpf.kernel.system import netns
from tests.support.cluster.cluster import UNROUTED, Cluster, Object
from tests.support.cluster.kube_objects import node
from tests.support.cluster.scenario import file_of, put
from tests.support.features import lacking
from tests.support.lab.dial import REFUSED, UNSERVED, Dial, explain
from tests.support.lab.lab import Agent, Lab, Node, Place, ip
from tests.support.lab.modes import PACKETS
from tests.support.lab.podnet import gate

DROPPED = "timeout"
OUT4, OUT6 = "198.18.0.254", "fd00:198:18::fe"
NODES4, NODES6 = ("198.18.0.1", "198.18.0.2"), ("fd00:198:18::1", "fd00:198:18::2")
ROUTED = ("10.96.0.0/16", "192.0.2.0/24", "203.0.113.0/24")
ROUTED6 = ("fd00:10:96::/112", "2001:db8::/32")
FORWARDINGS = ("stack",) if PACKETS else ("stack", "direct")
"""Values of `--forwarding`; each side sees the same with all of them. Mode ipvs has only one."""
WITH_CONNTRACK = (*FORWARDINGS, *(() if PACKETS or lacking("conntrack_nat") else ("netfilter",)))
"""The same, and the one with which conntrack translates."""
UNHOOKED_UDP_PORTS = (62_000, 65_535)
"""Used in turns: for 30 s, a datagram from a port that was used before belongs to the same flow,
whatever has changed since. None of those that the kernel gives to hooked clients (up to 60,999),
nor of `--masquerade-ports`: a CNI that masquerades a pod keeps the port, which a client outside may
have too.
"""
BULK = 7000
"""The port of a pod's `serve_bulk`."""
BULK_SERVICES = f"41 -> a1 target={BULK}\n42 -> b1 target={BULK}\n43 -> a1 external=Local target={BULK}"
WAIT = 0.4
"""Seconds to wait where no answer is expected."""

crossed = pytest.mark.parametrize(("protocol", "v6"), [("tcp", False), ("udp", True)], ids=["tcp v4", "udp v6"])
"""Programs tell protocols and families apart in different places. tests/programs/packets has all four."""
both_families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])


class Field(Cluster):
    """The nodes of the module docstring. `arguments` are the agents' flags, `pods` the number of
    pods of each node, and `module` is the Python module that runs as the agent (lab.Agent). Only the
    first `agents` nodes have one.
    """

    def __init__(
        self,
        *arguments: str,
        name: str = "ns",
        pods: Sequence[int] = (3, 2),
        module: str = "kbpf",
        agents: int = 2,
    ) -> None:
        super().__init__()
        self.arguments = arguments
        self.module = module
        self.own = contextlib.ExitStack()
        self._named, self._pods, self._agents = name, pods, agents

    def __enter__(self) -> Self:
        with self.own:
            self.lab = self.own.enter_context(self.new_lab(len(self._pods), self._named))
            self.prepare()
            arguments = (*self.source(), "--packet-path", "true", *self.arguments)
            for letter, home, pods in zip("abcdef", self.lab.nodes, self._pods, strict=False):
                self.settle_in(letter, home, pods, *arguments)
                self.agents[-1].module = self.module
                for pod in () if PACKETS else home.pods:
                    ip(*(f"route del unreachable {net}" for net in UNROUTED), netns=pod.netns)
            del self.agents[self._agents :]
            self.unhook("outside", self.lab.outside, OUT4, OUT6, self.lab.nodes[0])
            for name in ("a1", "a2")[: self._pods[0]]:
                pod = self[name]
                self.unhook(f"{name}!", pod.netns, pod.ip, pod.ip6, self.home[name])
            ip(
                *(f"route add {net} via {NODES4[0]}" for net in ROUTED),
                *(f"route add {net} via {NODES6[0]}" for net in ROUTED6),
                netns=self.lab.outside,
            )
            self.bring_up()
            self.own = self.own.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.own.close()

    def new_lab(self, nodes: int, name: str) -> Lab:
        return Lab(nodes, name, apart=True)

    def source(self) -> tuple[str, ...]:
        """The agents' flags that say where the objects are."""
        self.folder = self.lab.folder / "objects"
        self.folder.mkdir()
        return ("--source", str(self.folder))

    def bring_up(self) -> None:
        """Creates the Nodes and starts their agents."""
        self.create(*(node(n.name, n.ip, n.ip6) for n in self.lab.nodes))
        for agent in self.agents:
            agent.start(wait=False)
        for agent in self.agents:
            agent.wait_synced()

    def prepare(self) -> None:
        """Called before pods and agents exist, for subclasses that change the nodes."""

    def unhook(self, name: str, where: str | None, v4: str, v6: str, home: Node) -> Place:
        """A place whose sockets no agent hooks."""
        place = Place(name, where, None, UNHOOKED_UDP_PORTS)
        self.own.callback(place.close)
        place.ip, place.ip6 = v4, v6
        self.places[name], self.home[name] = place, home
        return place

    def start(self, agent: Agent, wait: bool = True, user: str = "") -> None:
        agent.start(wait)

    def create(self, *objects: Object) -> None:
        for obj in objects:
            put(self.folder, file_of(obj), yaml.safe_dump(obj))

    def delete(self, *objects: Object) -> None:
        for obj in objects:
            (self.folder / file_of(obj)).unlink(missing_ok=True)

    def change(self, *objects: Object) -> None:
        self.create(*objects)
        self.settle()

    def write_mark(self, *objects: Object) -> None:
        put(self.folder, "~mark.yaml", yaml.safe_dump_all(objects))


def forward(how: str) -> tuple[str, ...]:
    """The agent's arguments for this value of `--forwarding`."""
    return ("--forwarding", how) if len(FORWARDINGS) > 1 else ()


KINDS = ("NodePort", "ExternalIP", "VIP", "ClusterIP")


def at(kind: str, number: int, v6: bool = False, node_number: int = 1) -> str:
    """The host:port of this kind at which all_ways() puts the Service."""
    if kind == "NodePort":
        host = (NODES6 if v6 else NODES4)[node_number - 1]
        return f"[{host}]:{30000 + number}" if v6 else f"{host}:{30000 + number}"
    nets = {"ExternalIP": ("203.0.113.", "2001:db8:1::"), "VIP": ("192.0.2.", "2001:db8::")}
    net4, net6 = nets.get(kind, ("10.96.0.", "fd00:10:96::"))
    return f"[{net6}{number}]:80" if v6 else f"{net4}{number}:80"


def split(to: str) -> tuple[str, int]:
    host, _, number = to.rpartition(":")
    return host.strip("[]"), int(number)


def check(field: Field, row: Dial) -> None:
    """Like dial.check(), for clients that are answered by packets."""
    host, number = split(row.to)
    names = row.outcome.split()
    fails = row.outcome in (REFUSED, DROPPED, UNSERVED)
    received = _datagrams(field, row)
    answer = field[row.client].many(
        1 if row.outcome == DROPPED else 2 if fails else 24 if len(names) > 1 else 3,
        host,
        number,
        protocol=row.protocol,
        connected=True,  # otherwise UDP gets no errors and accepts answers from any source
        **({"timeout": WAIT} if row.outcome == DROPPED else {}),
    )

    def why() -> str:
        lines = [str(row), f"got {answer}"]
        if row.protocol == "udp":
            lines.append(f"datagrams that arrived: {_datagrams(field, row) - received}")
        return "\n".join([*lines, explain(field, row.client, host)])

    if fails:
        assert not answer["names"], why()
        assert set(answer["errors"]) == {row.outcome}, why()
        return
    assert not answer["errors"], why()
    assert set(answer["names"]) == set(names), why()
    for _, _, client, peer, peer_port in answer["seen"]:
        assert client in may_see(field, row.backend_sees), why()
        assert (peer, peer_port) == (host, number), why()


def _datagrams(field: Field, row: Dial) -> Counter[str]:
    """How many datagrams each of the row's servers has received so far. A lost one is not sent
    again.
    """
    if row.protocol != "udp":
        return Counter()
    servers = (name for name in row.outcome.split() if name in field.places)
    return Counter({name: sum(field[name].ask("seen")["udp"].values()) for name in servers})


def may_see(field: Field, address: str) -> frozenset[str]:
    """The client addresses that a backend may see if a row expects `address`. In mode ipvs the
    kernel chooses a node's address, as for any MASQUERADE rule: one of the device to the pod or,
    since that has none here, any of the node's.
    """
    for ip4, ip6, number in zip(NODES4, NODES6, (1, 2), strict=True):
        if field.agent.mode == "ipvs" and address in (ip4, ip6):
            return frozenset((address, gate(number, v6=address == ip6)))
    return frozenset((address,))


def transfer(client: Place, to: str, size: int = 1 << 20) -> None:
    """Sends bytes to a pod's BULK and back. Each side must receive what the other sent."""
    host, port = split(to)
    got = client.ask("bulk", host=host, port=port, size=size, family="6" if ":" in host else "4")
    assert (got.get("there"), got.get("back")) == (True, True), got


def there(place: Place, action: Callable[[], Any]) -> Any:
    """The result of `action`, run in this place's network namespace."""
    return netns.run_in(Path("/run/netns") / str(place.netns), action)

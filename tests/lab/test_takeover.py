"""A real kube-proxy, in each mode, gives way to kbpf and comes back, on nodes that are in use: the
steps of docs/migration.md.

Connections without end go on all the while, from outside to NodePorts of both nodes and from a pod
to the ClusterIP, and none may fail. Others are held open from before each step until after it, and
all of them have to go on.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kbpf.dataplane.bpf.layout import Reason
from tests.support.apiserver import ApiServer
from tests.support.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.kube_proxy import MODES, KubeProxy
from tests.support.lab import Agent, Lab, Node, Place, inside, until
from tests.support.lab import run as command
from tests.support.load import Load

NODE_PORT, VIP = 30080, "10.96.0.80"
CLUSTER = "10.244.0.0/16,fd00:10:244::/32"
HELD = 4
"""Connections that each client holds open in each step: to either pod, as chance will have it."""


class World:
    """Two nodes with a pod each, clients outside and in a pod, and whoever balances."""

    def __init__(self, stack: ExitStack) -> None:
        self.lab = lab = stack.enter_context(Lab(2, "to", apart=True))
        api = stack.enter_context(ApiServer(addresses=(lab.outside_ip,), netns=lab.outside))
        self.config = api.kubeconfig(lab.folder / "kubeconfig")
        first, second = lab.nodes
        pods = first.pod("a1").serve(8080), second.pod("b1").serve(8080)
        outside = Place("to node-1", lab.outside, None), Place("to node-2", lab.outside, None)
        for place in outside:
            stack.callback(place.close)
        self.dials = {
            outside[0]: (first.ip, NODE_PORT),
            outside[1]: (second.ip, NODE_PORT),
            first.pod("to the ClusterIP"): (VIP, 80),
        }
        options = ("--packet-path", "true", "--cluster-cidr", CLUSTER)
        self.agents = [Agent(each, *options) for each in lab.nodes]
        self.proxies: list[KubeProxy] = []
        self.held: list[tuple[Place, str]] = []
        stack.callback(self.stop_proxies)
        with api.kube() as kube:
            for each in lab.nodes:
                kube.create(node(each.name, each.ip, each.ip6))
            row = port(80, node_port=NODE_PORT)
            kube.create(service("web", row, type="NodePort", cluster_ip=VIP))
            ends = [endpoint(pods[0].ip, node=first.name), endpoint(pods[1].ip, node=second.name)]
            kube.create(endpoint_slice("web", *ends, ports=[slice_port(8080)]))

    # ---- who balances ----------------------------------------------------------------------

    def start_proxies(self, mode: str) -> None:
        """kube-proxy begins on each node; returns when its rules are there."""
        for home in self.lab.nodes:
            made = KubeProxy(home, mode, self.config, "--cluster-cidr", CLUSTER).start()
            self.proxies.append(made)
        for each in self.proxies:
            until("kube-proxy's rules", lambda one=each: one.has_programmed(NODE_PORT))

    def stop_proxies(self) -> None:
        """They end; their rules stay."""
        while self.proxies:
            self.proxies.pop().stop()

    def start_agents(self, *arguments: str) -> None:
        """kbpf begins on each node; returns when it serves."""
        for agent in self.agents:
            agent.start(wait=False, extra=("--kubeconfig", str(self.config), *arguments))
        for agent in self.agents:
            agent.wait_synced()

    def stop_agents(self) -> None:
        """They end; what they have pinned goes on."""
        for agent in self.agents:
            assert agent.stop() == 0

    def kbpf(self, home: Node, *words: str) -> str:
        """A command on that node."""
        assert home.agent is not None
        where = ("--pin-dir", str(home.agent.pin_dir))
        return command(*inside(home.netns, None, sys.executable, "-m", "kbpf", *words, *where))

    def cleanup(self, *options: str) -> list[str]:
        """On each node."""
        return [self.kbpf(home, "cleanup", *options) for home in self.lab.nodes]

    def rules(self) -> str:
        """All of nf_tables on both nodes."""
        return "".join(
            command(*inside(home.netns, None, "nft", "list", "ruleset")) for home in self.lab.nodes
        )

    # ---- who dials -------------------------------------------------------------------------

    @contextmanager
    def load(self) -> Iterator[Load]:
        """Each of them connects without end; not one may fail."""
        load = Load(tuple(self.dials))
        for place, (host, number) in self.dials.items():
            place.ask("start_load", host=host, port=number, threads=2, pause=0.002)
        try:
            load.goes_on()
            yield load
            load.goes_on()
        finally:
            results = {place.name: place.ask("stop_load") for place in load.places}
        for name, result in results.items():
            assert result["errors"] == [], name
            assert set(result["names"]) == {"a1", "b1"}, name

    def hold(self) -> None:
        """Each of them opens connections and keeps them."""
        for place, (host, number) in self.dials.items():
            for _ in range(HELD):
                keep = f"held {len(self.held)}"
                answer = place.tcp(host, number, keep=keep)
                assert "error" not in answer, (place.name, answer)
                self.held.append((place, keep))

    def all_talk(self) -> None:
        """Every connection that is held goes on."""
        for place, keep in self.held:
            answer = place.ask("talk", keep=keep)
            assert "error" not in answer, (place.name, keep, answer)

    def let_go(self) -> None:
        """All held connections end."""
        for place, keep in self.held:
            place.ask("drop", keep=keep)
        self.held = []


@pytest.mark.parametrize("mode", MODES)
def test_there_and_back(programs: None, kube_proxy: Path, mode: str) -> None:
    """Begins on nodes whose kernel has never tracked a connection, so that kbpf's are in the middle
    when kube-proxy's rules make it begin.
    """
    with ExitStack() as stack:
        world = World(stack)
        world.start_agents()
        with world.load() as load:
            world.hold()
            kube_proxy_comes(world, mode, load)
            world.let_go()
            world.cleanup()
            load.goes_on()
            world.hold()
            kbpf_comes(world, load)
            world.hold()
            world.all_talk()


def kube_proxy_comes(world: World, mode: str, load: Load) -> None:
    """kbpf lets go of the bit of the mark that kube-proxy takes for its own, ends, and leaves new
    connections to kube-proxy; those that it has translated go on.
    """
    world.stop_agents()
    world.start_agents("--masquerade-bit", "13")
    load.goes_on()
    world.stop_agents()
    world.start_proxies(mode)
    world.all_talk()
    assert all("frontends" in said for said in world.cleanup("--keep-connections"))
    before = [agent.reasons()[Reason.NEW_FLOW] for agent in world.agents]
    load.goes_on()
    world.hold()
    world.all_talk()
    assert [agent.reasons()[Reason.NEW_FLOW] for agent in world.agents] == before


def kbpf_comes(world: World, load: Load) -> None:
    """kube-proxy ends, its rules serve on until kbpf does, and are then removed. Connections that
    they have translated go on, by a table that the agent removes when they are over.
    """
    world.stop_proxies()
    world.start_agents()
    before = [agent.reasons()[Reason.NEW_FLOW] for agent in world.agents]
    load.goes_on()
    for was, agent in zip(before, world.agents, strict=True):
        assert agent.reasons()[Reason.NEW_FLOW] > was, agent.node.name
    assert all("of kube-proxy" in said for said in world.cleanup("--kube-proxy"))
    rules = world.rules()
    assert "kube-proxy" not in rules
    assert set(re.findall(r"KUBE-[A-Z-]+", rules)) <= {"KUBE-FIREWALL"}
    assert rules.count("table ip kbpf-handover") == len(world.agents)
    load.goes_on()
    world.all_talk()

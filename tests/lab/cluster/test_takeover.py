# SPDX-License-Identifier: Apache-2.0
"""A real kube-proxy in mode iptables or ipvs is replaced by kbpf and returns, on nodes in use: the steps of
docs/migration.md. Mode ipvs of either needs a kernel with IPVS (tests/kernels); test_drop_in.py has
mode nftables, with Kubernetes objects.

New connections are made throughout, from outside to NodePorts of both nodes and from a pod to the
ClusterIP, and none may fail. Others are held open across each step, and must all survive it, even
if the policy of FORWARD is DROP.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from kbpf.dataplane.bpf.maps.layout import Reason
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import (
    endpoint,
    endpoint_slice,
    node,
    port,
    service,
    slice_port,
)
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.cluster.scenario import file_of, put
from tests.support.cluster.static_api import StaticApi
from tests.support.features import IN_GUEST, needs
from tests.support.lab.kept import Kept
from tests.support.lab.lab import PATIENCE, Agent, Lab, Node, Place, on, until
from tests.support.lab.load import Load

NODE_PORT, VIP = 30080, "10.96.0.80"
CLUSTER = "10.244.0.0/16,fd00:10:244::/32"
PAUSE = 0.05 if IN_GUEST else 0.01
JSON = ("--kube-api-content-type", "application/json")
SLOWLY = 600.0
"""Seconds to wait: IPVS and conntrack keep closed connections for two minutes."""
PROGRAMMED = SLOWLY if IN_GUEST else PATIENCE
"""Seconds to wait: a kube-proxy in mode ipvs runs a hundred programs first."""
HELD = 4
"""Connections that each client holds open across a step, to either pod at random."""


class World:
    """Two nodes with a pod each, clients outside and in a pod, and the load balancers: on both
    nodes, but only on the first under emulation, where starting them takes too long.
    """

    def __init__(self, stack: ExitStack, mode: str) -> None:
        """`mode` is kbpf's."""
        self.mode = mode
        self.lab = lab = stack.enter_context(Lab(2, "to", apart=True))
        first, second = lab.nodes
        pods = first.pod("a1").serve(8080), second.pod("b1").serve(8080)
        self.homes = lab.nodes[:1] if IN_GUEST else lab.nodes
        self.dials = {}
        for home in self.homes:
            place = Place(f"to {home.name}", lab.outside, None)
            stack.callback(place.close)
            self.dials[place] = home.ip, NODE_PORT
        # Not the pod that makes the load: one of its ports could be used both through IPVS and
        # directly to the same backend (docs/ipvs.md).
        self.held = Kept(*self.dials.items(), (first.pod("keeps"), (VIP, 80)))
        self.dials[first.pod("to the ClusterIP")] = VIP, 80
        options = ("--packet-path", "true", "--cluster-cidr", CLUSTER)
        self.agents = [Agent(each, *options) for each in self.homes]
        for agent in self.agents:
            agent.mode = mode
        self.proxies: list[KubeProxy] = []
        stack.callback(self.stop_proxies)
        row = port(80, node_port=NODE_PORT)
        ends = [endpoint(pods[0].ip, node=first.name), endpoint(pods[1].ip, node=second.name)]
        self._serve_objects(
            stack,
            *(node(each.name, each.ip, each.ip6) for each in lab.nodes),
            service("web", row, type="NodePort", cluster_ip=VIP),
            endpoint_slice("web", *ends, ports=[slice_port(8080)]),
        )

    def _serve_objects(self, stack: ExitStack, *objects: Object) -> None:
        """kube-proxy reads the objects from a stand-in for the API server, kbpf from a folder: under
        emulation a real API server would take minutes to start.
        """
        api = stack.enter_context(StaticApi(objects, self.lab.outside_ip, str(self.lab.outside)))
        self.config = api.kubeconfig(self.lab.folder / "kubeconfig")
        self.objects = self.lab.folder / "objects"
        self.objects.mkdir()
        for obj in objects:
            put(self.objects, file_of(obj), yaml.safe_dump(obj))

    # ---- load balancers --------------------------------------------------------------------

    def start_proxies(self, mode: str) -> None:
        """Starts kube-proxy on each node and waits for its rules."""
        for home in self.homes:
            made = KubeProxy(home, mode, self.config, "--cluster-cidr", CLUSTER, *JSON).start()
            self.proxies.append(made)
        for each in self.proxies:
            try:
                until("its rules", lambda one=each: one.has_programmed(NODE_PORT), PROGRAMMED)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{each.tail()}") from None

    def stop_proxies(self) -> None:
        """Stops each kube-proxy; their rules stay."""
        while self.proxies:
            self.proxies.pop().stop()

    def start_agents(self, *arguments: str) -> None:
        """Starts kbpf on each node and waits until it is synced."""
        for agent in self.agents:
            agent.start(wait=False, extra=("--source", str(self.objects), *arguments))
        for agent in self.agents:
            agent.wait_synced()

    def stop_agents(self) -> None:
        """Stops each kbpf; what they have pinned keeps serving."""
        for agent in self.agents:
            assert agent.stop() == 0

    def cleanup(self, *options: str) -> list[str]:
        """The output of `kbpf cleanup` on each node."""
        found = [agent.kbpf("cleanup", *options) for agent in self.agents]
        assert not any(done.returncode for done in found), found
        return [done.stdout for done in found]

    def rules(self) -> str:
        return self.everywhere("nft", "list", "ruleset")

    def everywhere(self, *words: str) -> str:
        """The joined output of a command run on each node."""
        return "".join(on(home, *words) for home in self.homes)

    def led(self) -> list[int]:
        """How many flows the packet path of each node has created; empty in mode ipvs."""
        if self.mode == "ipvs":
            return []
        return [agent.reasons()[Reason.NEW_FLOW] for agent in self.agents]

    # ---- clients ---------------------------------------------------------------------------

    @contextmanager
    def load(self) -> Iterator[Load]:
        """Each client connects repeatedly throughout the block; no connection may fail."""
        load = Load(tuple(self.dials))
        for place, (host, number) in self.dials.items():
            place.ask("start_load", host=host, port=number, threads=2, pause=PAUSE)
        try:
            load.goes_on()
            yield load
            load.goes_on()
        finally:
            results = {place.name: place.ask("stop_load") for place in load.places}
        for name, result in results.items():
            assert result["errors"] == [], name
            assert set(result["names"]) == {"a1", "b1"}, name


@pytest.mark.timeout(SLOWLY * 6)
@pytest.mark.parametrize(
    ("mode", "ours"),
    [
        ("iptables", "bpf"),
        pytest.param("ipvs", "bpf", marks=needs("ipvs")),
        pytest.param("ipvs", "ipvs", marks=needs("ipvs")),
    ],
)
def test_replacing_kube_proxy_and_back_fails_no_connection(programs: None, kube_proxy: Path, mode: str, ours: str):
    """Starts on nodes whose conntrack has never been enabled. kube-proxy's rules enable it while
    kbpf's connections are established, so that conntrack sees them from the middle.
    """
    with ExitStack() as stack:
        world = World(stack, ours)
        world.start_agents()
        with world.load() as load:
            world.held.open(HELD)
            kube_proxy_comes(world, mode, load)
            world.held.close()
            world.cleanup()
            load.goes_on()
            world.held.open(HELD)
            kbpf_comes(world, mode, load)
            world.held.open(HELD)
            world.held.all_talk()
        if mode == "ipvs":
            nothing_stays(world)


def kube_proxy_comes(world: World, mode: str, load: Load) -> None:
    """kbpf stops using kube-proxy's mark bit, stops, and leaves new connections to kube-proxy;
    connections that it has translated continue.
    """
    world.stop_agents()
    world.start_agents("--masquerade-bit", "13")
    load.goes_on()
    world.stop_agents()
    world.start_proxies(mode)
    world.held.all_talk()
    if world.mode == "ipvs":  # whose connections are in the same table as kube-proxy's
        assert all("nftables inet kbpf" in said for said in world.cleanup())
    else:
        assert all("frontends" in said for said in world.cleanup("--keep-connections"))
    before = world.led()
    load.goes_on()
    world.held.open(HELD)
    world.held.all_talk()
    assert world.led() == before


def kbpf_comes(world: World, mode: str, load: Load) -> None:
    """kube-proxy stops; its rules serve until kbpf does, and are then removed. Connections that
    they have translated continue with the help of a table, which the agent removes with the last of
    them.
    """
    world.stop_proxies()
    world.start_agents()
    before = world.led()
    load.goes_on()
    for was, now in zip(before, world.led(), strict=True):
        assert now > was
    for output in world.cleanup("--kube-proxy"):
        assert re.search(r"^kube-proxy ", output, re.MULTILINE), output
    rules = world.rules()
    assert "kube-proxy" not in rules
    assert set(re.findall(r"KUBE-[A-Z-]+", rules)) <= {"KUBE-FIREWALL"}
    kept = 0 if world.mode == "ipvs" else len(world.agents)  # theirs stay in IPVS' table
    assert rules.count("table ip kbpf-keepalive") == kept
    assert "kube-ipvs0" not in world.everywhere("ip", "link")
    if mode == "ipvs":
        assert world.everywhere("ipset", "list", "-name") == ""
    load.goes_on()
    world.held.all_talk()


def nothing_stays(world: World) -> None:
    """With its last connection all of kube-proxy's IPVS state is removed; new ones are served."""
    world.held.close()
    if world.mode == "bpf":
        until("IPVS has nothing", lambda: not any(map(Agent.virtual_services, world.agents)), SLOWLY)
        until("the table has gone", lambda: "kbpf-keepalive" not in world.rules(), SLOWLY)
        assert "kbpf-keepalive" not in world.everywhere("ip", "link")
    with world.load():
        world.held.open(HELD)
    world.held.all_talk()


@pytest.mark.timeout(SLOWLY * 6)
@pytest.mark.parametrize(
    ("mode", "ours"),
    [
        ("iptables", "bpf"),
        pytest.param("iptables", "ipvs", marks=needs("ipvs")),
        pytest.param("ipvs", "bpf", marks=needs("ipvs")),
        pytest.param("ipvs", "ipvs", marks=needs("ipvs")),
    ],
)
def test_a_closed_forward_chain_cuts_no_connection(programs: None, kube_proxy: Path, mode: str, ours: str):
    """FORWARD has policy DROP, as with a CNI that relies on kube-proxy's rules. An outside client's
    connection to a pod is masqueraded, so kube-proxy's rules mark and accept its first packet.
    """
    with ExitStack() as stack:
        world = World(stack, ours)
        home = world.homes[0]
        world.held = Kept(*(way for way in world.dials.items() if way[1] == (home.ip, NODE_PORT)))
        on(home, "iptables", "-w", "-P", "FORWARD", "DROP")
        world.start_proxies(mode)
        world.held.open(HELD)
        world.held.all_talk()
        world.stop_proxies()
        world.start_agents()
        world.cleanup("--kube-proxy")
        assert "KUBE-FORWARD" not in world.rules()
        world.held.all_talk()
        begun_by_kube_proxy = len(established(home))
        world.stop_agents()
        world.start_agents()
        world.held.open(HELD)
        world.held.all_talk()
        assert len(established(home)) == begun_by_kube_proxy == (mode != ours)
        world.held.close()
        on(home, "conntrack", "-F")  # which keeps closed ones for two minutes
        until("the rule has gone", lambda: not established(home), SLOWLY)
        assert "kbpf-keepalive" not in on(home, "nft", "list", "tables")
        world.held.open(HELD)
        world.held.all_talk()


def established(home: Node) -> list[str]:
    """The rules in FORWARD that accept established connections, as `iptables-save` prints them."""
    saved = on(home, "iptables-save", "-t", "filter")
    rules = [line for line in saved.splitlines() if line.startswith("-A FORWARD")]
    return [rule for rule in rules if "--ctstate RELATED,ESTABLISHED" in rule]

"""A real kube-proxy, in each mode, gives way to kbpf and comes back, on nodes that are in use: the
steps of docs/migration.md. Mode ipvs, of either, needs a kernel with IPVS (tests/kernels).

Connections without end go on all the while, from outside to NodePorts of both nodes and from a pod
to the ClusterIP, and none may fail. Others are held open from before each step until after it, and
all of them have to go on, also where FORWARD is closed.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from kbpf.dataplane.bpf.maps.layout import Reason
from kbpf.kernel.net.netlink import Netlink
from kbpf.kernel.netfilter import conntrack
from kbpf.kernel.system import netns
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import (
    endpoint,
    endpoint_slice,
    node,
    port,
    service,
    slice_port,
)
from tests.support.cluster.kube_proxy import MODES, KubeProxy
from tests.support.cluster.static_api import StaticApi
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE, Agent, Lab, Node, Place, inside, until
from tests.support.lab.lab import run as command
from tests.support.lab.load import Load
from tests.support.scenario import file_of, put

NODE_PORT, VIP = 30080, "10.96.0.80"
CLUSTER = "10.244.0.0/16,fd00:10:244::/32"
EMULATED = PATIENCE > 60
PAUSE = 0.05 if EMULATED else 0.002
JSON = ("--kube-api-content-type", "application/json") if EMULATED else ()
SLOWLY = 600.0
"""Seconds: IPVS and conntrack keep what has ended for two minutes."""
PROGRAMMED = SLOWLY if EMULATED else PATIENCE
"""Seconds: a kube-proxy in mode ipvs runs a hundred programs first."""
HELD = 4
"""Connections that each client holds open in each step: to either pod, as chance will have it."""


class World:
    """Two nodes with a pod each, clients outside and in a pod, and whoever balances: on both nodes,
    where that does not take too long.
    """

    def __init__(self, stack: ExitStack, mode: str) -> None:
        """`mode` is kbpf's."""
        self.mode = mode
        self.lab = lab = stack.enter_context(Lab(2, "to", apart=True))
        first, second = lab.nodes
        pods = first.pod("a1").serve(8080), second.pod("b1").serve(8080)
        self.homes = lab.nodes[:1] if EMULATED else lab.nodes
        self.dials = {}
        for home in self.homes:
            place = Place(f"to {home.name}", lab.outside, None)
            stack.callback(place.close)
            self.dials[place] = home.ip, NODE_PORT
        # Not the pod that dials all the while: docs/ipvs.md, one port through IPVS and directly.
        self.holds = {**self.dials, first.pod("keeps"): (VIP, 80)}
        self.dials[first.pod("to the ClusterIP")] = VIP, 80
        options = ("--packet-path", "true", "--cluster-cidr", CLUSTER)
        self.agents = [Agent(each, *options) for each in self.homes]
        for agent in self.agents:
            agent.mode = mode
        self.proxies: list[KubeProxy] = []
        self.held: list[tuple[Place, str]] = []
        stack.callback(self.stop_proxies)
        row = port(80, node_port=NODE_PORT)
        ends = [endpoint(pods[0].ip, node=first.name), endpoint(pods[1].ip, node=second.name)]
        self.config = lab.folder / "kubeconfig"
        self.source = self._serve_objects(
            stack,
            *(node(each.name, each.ip, each.ip6) for each in lab.nodes),
            service("web", row, type="NodePort", cluster_ip=VIP),
            endpoint_slice("web", *ends, ports=[slice_port(8080)]),
        )

    def _serve_objects(self, stack: ExitStack, *objects: Object) -> tuple[str, str]:
        """By a real API server, or for kube-proxy by a stand-in, where that one would take minutes
        to start; where kbpf has them from.
        """
        outside = self.lab.outside
        assert outside is not None
        if not EMULATED:
            api = stack.enter_context(ApiServer(addresses=(self.lab.outside_ip,), netns=outside))
            api.kubeconfig(self.config)
            with api.kube() as kube:
                for obj in objects:
                    kube.create(obj)
            return "--kubeconfig", str(self.config)
        stack.enter_context(StaticApi(objects, self.lab.outside_ip, outside)).kubeconfig(
            self.config
        )
        folder = self.lab.folder / "objects"
        folder.mkdir()
        for obj in objects:
            put(folder, file_of(obj), yaml.safe_dump(obj))
        return "--source", str(folder)

    # ---- who balances ----------------------------------------------------------------------

    def start_proxies(self, mode: str) -> None:
        """kube-proxy begins on each node; returns when its rules are there."""
        for home in self.homes:
            made = KubeProxy(home, mode, self.config, "--cluster-cidr", CLUSTER, *JSON).start()
            self.proxies.append(made)
        for each in self.proxies:
            try:
                until("its rules", lambda one=each: one.has_programmed(NODE_PORT), PROGRAMMED)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{each.tail()}") from None

    def stop_proxies(self) -> None:
        """They end; their rules stay."""
        while self.proxies:
            self.proxies.pop().stop()

    def start_agents(self, *arguments: str) -> None:
        """kbpf begins on each node; returns when it serves."""
        for agent in self.agents:
            agent.start(wait=False, extra=(*self.source, *arguments))
        for agent in self.agents:
            agent.wait_synced()

    def stop_agents(self) -> None:
        """They end; what they have pinned goes on."""
        for agent in self.agents:
            assert agent.stop() == 0

    def kbpf(self, home: Node, *words: str) -> str:
        """A command on that node."""
        assert home.agent is not None
        where = "--pin-dir", str(home.agent.pin_dir), "--state-dir", str(home.agent.state_dir)
        return command(*inside(home.netns, None, sys.executable, "-m", "kbpf", *words, *where))

    def cleanup(self, *options: str) -> list[str]:
        """On each node."""
        return [self.kbpf(home, "cleanup", *options) for home in self.homes]

    def rules(self) -> str:
        """All of nf_tables on each node."""
        return self.everywhere("nft", "list", "ruleset")

    def everywhere(self, *words: str) -> str:
        """What a command says, on each node."""
        return "".join(command(*inside(home.netns, None, *words)) for home in self.homes)

    def led(self) -> list[int]:
        """How many connections the packet path of each node has begun."""
        if self.mode == "ipvs":
            return []
        return [agent.reasons()[Reason.NEW_FLOW] for agent in self.agents]

    # ---- who dials -------------------------------------------------------------------------

    @contextmanager
    def load(self) -> Iterator[Load]:
        """Each of them connects without end; not one may fail."""
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

    def hold(self) -> None:
        """Clients open connections and keep them."""
        for place, (host, number) in self.holds.items():
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


@pytest.mark.timeout(SLOWLY * 6 if EMULATED else 600)
@pytest.mark.parametrize(
    ("mode", "ours"),
    [
        *((mode, "bpf") for mode in MODES),
        pytest.param("ipvs", "bpf", marks=needs("ipvs")),
        pytest.param("ipvs", "ipvs", marks=needs("ipvs")),
    ],
)
def test_there_and_back(programs: None, kube_proxy: Path, mode: str, ours: str) -> None:
    """Begins on nodes whose kernel has never tracked a connection, so that kbpf's are in the middle
    when kube-proxy's rules make it begin.
    """
    with ExitStack() as stack:
        world = World(stack, ours)
        world.start_agents()
        with world.load() as load:
            world.hold()
            kube_proxy_comes(world, mode, load)
            world.let_go()
            world.cleanup()
            load.goes_on()
            world.hold()
            kbpf_comes(world, mode, load)
            world.hold()
            world.all_talk()
        if mode == "ipvs":
            nothing_stays(world)


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
    if world.mode == "ipvs":  # whose connections are in the same table as kube-proxy's
        assert all("nftables inet kbpf" in said for said in world.cleanup())
    else:
        assert all("frontends" in said for said in world.cleanup("--keep-connections"))
    before = world.led()
    load.goes_on()
    world.hold()
    world.all_talk()
    assert world.led() == before


def kbpf_comes(world: World, mode: str, load: Load) -> None:
    """kube-proxy ends, its rules serve on until kbpf does, and are then removed. Connections that
    they have translated go on, by a table that the agent removes when they are over.
    """
    world.stop_proxies()
    world.start_agents()
    before = world.led()
    load.goes_on()
    for was, now in zip(before, world.led(), strict=True):
        assert now > was
    assert all("kube-proxy" in said for said in world.cleanup("--kube-proxy"))
    rules = world.rules()
    assert "kube-proxy" not in rules
    assert set(re.findall(r"KUBE-[A-Z-]+", rules)) <= {"KUBE-FIREWALL"}
    kept = 0 if world.mode == "ipvs" else len(world.agents)  # they go on in its own table
    assert rules.count("table ip kbpf-handover") == kept
    assert "kube-ipvs0" not in world.everywhere("ip", "link")
    if mode == "ipvs":
        assert world.everywhere("ipset", "list", "-name") == ""
    load.goes_on()
    world.all_talk()


def nothing_stays(world: World) -> None:
    """With its last connection all of kube-proxy's IPVS is gone. New ones are served still."""
    world.let_go()
    if world.mode == "bpf":
        until(
            "IPVS has nothing", lambda: not any(map(Agent.virtual_services, world.agents)), SLOWLY
        )
        until("the table has gone", lambda: "kbpf-handover" not in world.rules(), SLOWLY)
        assert "kbpf-handover" not in world.everywhere("ip", "link")
    with world.load():
        world.hold()
    world.all_talk()


@pytest.mark.timeout(SLOWLY * 6 if EMULATED else 600)
@pytest.mark.parametrize(
    ("mode", "ours"),
    [
        ("iptables", "bpf"),
        pytest.param("iptables", "ipvs", marks=needs("ipvs")),
        pytest.param("ipvs", "bpf", marks=needs("ipvs")),
        pytest.param("ipvs", "ipvs", marks=needs("ipvs")),
    ],
)
def test_a_forward_that_is_closed_cuts_no_connection(
    programs: None, kube_proxy: Path, mode: str, ours: str
) -> None:
    """It lets nothing pass by itself, as beside a CNI that counts on kube-proxy's rules: a client
    outside asks the node for a pod, which is masqueraded, so kube-proxy marks the first packet.
    """
    with ExitStack() as stack:
        world = World(stack, ours)
        home = world.homes[0]
        world.holds = {place: to for place, to in world.dials.items() if to == (home.ip, NODE_PORT)}
        command(*inside(home.netns, None, "iptables", "-w", "-P", "FORWARD", "DROP"))
        world.start_proxies(mode)
        world.hold()
        world.all_talk()
        world.stop_proxies()
        world.start_agents()
        world.cleanup("--kube-proxy")
        assert "KUBE-FORWARD" not in world.rules()
        world.all_talk()
        begun_by_kube_proxy = len(established(home))
        world.stop_agents()
        world.start_agents()
        world.hold()
        world.all_talk()
        assert len(established(home)) == begun_by_kube_proxy == (mode != ours)
        world.let_go()
        netns.run_in(Path("/run/netns") / home.netns, forget_connections)
        until("the rule has gone", lambda: not established(home), SLOWLY)
        assert "kbpf-handover" not in command(*inside(home.netns, None, "nft", "list", "tables"))
        world.hold()
        world.all_talk()


def established(home: Node) -> list[str]:
    """The rules in FORWARD that let pass what is established, as iptables reads them."""
    saved = command(*inside(home.netns, None, "iptables-save", "-t", "filter"))
    rules = [line for line in saved.splitlines() if line.startswith("-A FORWARD")]
    return [rule for rule in rules if "--ctstate RELATED,ESTABLISHED" in rule]


def forget_connections() -> None:
    """All that conntrack knows: else it remembers those that have ended for two minutes."""
    with Netlink(conntrack.NETLINK_NETFILTER, "conntrack") as netlink:
        netlink.request(1 << 8 | 2, bytes(4))  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_DELETE

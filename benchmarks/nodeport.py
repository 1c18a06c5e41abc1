# SPDX-License-Identifier: Apache-2.0
"""A client outside connects through a NodePort: kbpf compared with a real kube-proxy and with plain
routing, which is the upper limit.

Each "way" to serve the client has a pair of nodes, all pairs identical. The client dials the first
node; the backend is a pod on that node (local) or on the second one (remote). The ways:

  direct     the pod's own address; both nodes only route
  hooked     the pod's own address too, but kbpf's programs see every packet: the cost for packets
             that are for no Service
  stack      kbpf with `--forwarding stack`
  forwarded  kbpf with `--forwarding direct`
  conntrack  kbpf with `--forwarding netfilter`
  nftables   kube-proxy in this mode, built from its Go module
  iptables   kube-proxy in this mode

Packets of every way cross the same number of nodes in both directions: the remote pod's replies on
the direct way are routed back through the first node, as masqueraded replies are. All ways are up
at the same time, on one API server, with the same Services. Each round measures all of them, in
rotating order.

By default client and server share one CPU, with the highest priority, so that the result is the
total cost of a connection, request or byte, wherever it is spent. KBPF_BENCH_CPUS=0,1 gives them
one CPU each (client, servers); then waking up the other CPU is part of the result, for all ways.

Each way is verified. Before and after the rounds its own counters must grow by exactly the number
of connections that were dialled (`_proof`). In every run the server must have seen that number, and
from the right address: the client's for direct and hooked, otherwise the first node's.
"""

import contextlib
import os
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

from benchmarks.tools.common import build_c, chosen, first, goal, interleave, ratio, rounds, say, sysctl
from kbpf.dataplane.bpf.maps.layout import Reason
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.lab.lab import Agent, Lab, Node, Place, inside, ip, until
from tests.support.lab.lab import run as command

PORT = 9000
SECONDS = 0.3
PROOF = 500
CLUSTER = "10.244.0.0/16,fd00:10:244::/32"
CLIENT_ON, SERVERS_ON = map(int, os.environ.get("KBPF_BENCH_CPUS", "0,0").split(","))
WAYS = ("direct", "hooked", "stack", "forwarded", "conntrack", "nftables", "iptables")
STRAIGHT = ("direct", "hooked")
KBPF = ("stack", "forwarded", "conntrack")
FORWARDING = {"hooked": "stack", "stack": "stack", "forwarded": "direct", "conntrack": "netfilter"}
KUBE_PROXY = ("nftables", "iptables")
KINDS = {
    "short": "short connections a second",
    "requests": "requests a second, one kept connection",
    "upload": "MB a second, to the pod",
    "download": "MB a second, from the pod",
}
BACKENDS = ("local", "remote")


@dataclass
class Way:
    """One way to serve a client, with a pod on each of its nodes `front` and `back`."""

    name: str
    number: int
    front: Node
    back: Node
    pods: Mapping[str, Place]
    agent: Agent | None = None
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def vip(self, backend: str) -> str:
        """The ClusterIP of this way's Service for this backend."""
        return f"10.96.{1 + self.number}.{1 + BACKENDS.index(backend)}"

    def node_port(self, backend: str) -> int:
        """The NodePort of this way's Service for this backend."""
        return 30100 + 10 * self.number + BACKENDS.index(backend)

    def objects(self, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """This way's Service for this backend, and its EndpointSlice."""
        name = f"{self.name}-{backend}"
        home = self.front if backend == "local" else self.back
        row = port(80, node_port=self.node_port(backend))
        end = endpoint(self.pods[backend].ip, node=home.name)
        return (
            service(name, row, type="NodePort", cluster_ip=self.vip(backend)),
            endpoint_slice(name, end, ports=[slice_port(PORT)]),
        )


class Frontend(NamedTuple):
    """The address that is dialled, and where each way counts its connections: `reason` of kbpf, the
    `rule` of iptables (a pattern), the `map` of nftables and its `element` (a pattern).
    """

    at: tuple[str, int]
    reason: Reason
    rule: str
    map: str
    element: str


class World:
    """The lab with all ways, up and serving."""

    def __init__(self, ways: tuple[str, ...] = WAYS) -> None:
        self.program = build_c("load")
        self._names = ways
        self._stack = contextlib.ExitStack()
        self.ways: dict[str, Way] = {}

    def __enter__(self) -> Self:
        with self._stack:
            enter = self._stack.enter_context
            self.lab = enter(Lab(2 * len(self._names), "np", apart=True))
            api = enter(ApiServer(address=self.lab.outside_ip, netns=self.lab.outside))
            self.config = api.kubeconfig(self.lab.folder / "kubeconfig")
            sysctl(self.lab.outside, ipv4__tcp_max_tw_buckets=0)
            with api.kube() as kube:
                for each in self.lab.nodes:
                    for which in ("all", "eth0"):
                        sysctl(each.netns, **{f"ipv4__conf__{which}__send_redirects": 0})
                    kube.create(node(each.name, each.ip, each.ip6))
                for number, name in enumerate(self._names):
                    self._way(number, name)
                for way in self.ways.values():
                    for obj in (obj for backend in BACKENDS for obj in way.objects(backend)):
                        kube.create(obj)
            for way in self.ways.values():
                self._balance(way)
            for way in self.ways.values():
                for backend in BACKENDS:
                    until(f"{way.name}, {backend}", partial(self._answers, way, backend))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _way(self, number: int, name: str) -> None:
        """Starts a way's servers, and sets the routes of direct and hooked."""
        front, back = self.lab.nodes[2 * number : 2 * number + 2]
        way = Way(name, number, front, back, {"local": front.pod("a1"), "remote": back.pod("b1")})
        self.ways[name] = way
        for pod in way.pods.values():
            serve = (*first(SERVERS_ON), str(self.program), "serve", pod.ip, str(PORT), "2")
            server = subprocess.Popen(inside(pod.netns, pod.cgroup, *serve))
            self._stack.callback(server.wait)
            self._stack.callback(server.kill)
        if name in STRAIGHT:
            nets = (f"10.244.{home.number}.0/24 via {front.ip}" for home in (front, back))
            ip(*(f"route add {net}" for net in nets), netns=self.lab.outside)
            ip(f"route add {self.lab.outside_ip} via {front.ip}", netns=back.netns)

    def _balance(self, way: Way) -> None:
        """Starts kbpf or kube-proxy on both nodes of a way."""
        for home in (way.front, way.back):
            if way.name in FORWARDING:
                how = ("--packet-path", "true", "--forwarding", FORWARDING[way.name])
                agent = Agent(home, *how, "--cluster-cidr", CLUSTER)
                agent.start(extra=("--kubeconfig", str(self.config)))
                way.agent = way.agent or agent
            elif way.name in KUBE_PROXY:
                proxy = KubeProxy(home, way.name, self.config, "--cluster-cidr", CLUSTER)
                self._stack.enter_context(proxy)

    def _answers(self, way: Way, backend: str) -> bool:
        done, _, _ = self.load(way, backend, "short", 0.1, 1)
        return done == 1

    # ---- what is dialled -------------------------------------------------------------------

    def frontend(self, way: Way, backend: str) -> Frontend:
        """The frontend of this way. Direct and hooked dial the pod instead; see load()."""
        number = way.node_port(backend)
        return Frontend(
            (way.front.ip, number),
            Reason.NOT_A_SERVICE if way.name in STRAIGHT else Reason.NEW_FLOW,
            rf"-A KUBE-NODEPORTS -p tcp .*--dport {number} .*KUBE-EXT-",
            "service-nodeports",
            rf"tcp \. {number}",
        )

    def enter(self, _: Way) -> list[str]:
        """The command prefix that runs a program as the client."""
        return inside(self.lab.outside, None)

    def comes_as(self, way: Way) -> set[str]:
        """The source addresses that its pods may see: the client's, or those of the first node."""
        if way.name in STRAIGHT:
            return {self.lab.outside_ip}
        return {way.front.ip, f"10.244.{way.front.number}.1"}

    # ---- load ------------------------------------------------------------------------------

    def load(self, way: Way, backend: str, kind: str, seconds: float, count: int = 0) -> tuple[int, int, float]:
        """Runs the load generator; returns (done, failed, seconds). `done` counts connections,
        requests or bytes.
        """
        host, number = self.frontend(way, backend).at
        if way.name in STRAIGHT:
            host, number = way.pods[backend].ip, PORT
        what = (str(self.program), kind, host, str(number), str(seconds), str(count))
        done, failed, took = command(*self.enter(way), *first(CLIENT_ON), *what).split()
        return int(done), int(failed), float(took)

    def seen(self, way: Way, backend: str) -> dict[str, int]:
        """The number of connections that this way's pod has accepted, by source address."""
        pod = way.pods[backend]
        lines = command(*inside(pod.netns, None, str(self.program), "seen", pod.ip, str(PORT)))
        return {host: int(count) for host, count in (one.split() for one in lines.splitlines())}

    def measure(self, way: Way, backend: str, kind: str) -> float:
        """Returns connections, requests or MB per second. Raises SystemExit unless all connections
        of the run reached the pod by this way.
        """
        before = self.seen(way, backend)
        done, failed, took = self.load(way, backend, kind, SECONDS)
        after = self.seen(way, backend)
        came = {host: n - before.get(host, 0) for host, n in after.items() if n != before.get(host)}
        expected = done if kind == "short" else 1
        if failed or sum(came.values()) != expected or not set(came) <= self.comes_as(way):
            raise SystemExit(
                f"{way.name}, {backend}, {kind}: {failed} failed; expected {expected} connections"
                f" from {sorted(self.comes_as(way))}, the pod saw {came}"
            )
        return done / took / (1e6 if kind.endswith("load") else 1)


# ---- what a way has counted ----------------------------------------------------------------------


def _counted(way: Way, frontend: Frontend) -> int:
    """The number of connections to this frontend so far, by the way's own counters."""
    if way.agent is not None:
        return way.agent.reasons()[frontend.reason]
    if way.name == "iptables":
        return _iptables_counter(way, frontend.rule)
    return 0


def _iptables_counter(way: Way, rule: str) -> int:
    """The packets that matched this rule: the first one of each connection."""
    rules = command(*inside(way.front.netns, None, "iptables-save", "-c", "-t", "nat"))
    found = re.search(rf"\[(\d+):\d+\] {rule}", rules)
    if found is None:
        raise SystemExit(f"no rule of kube-proxy like {rule}:\n{rules}")
    return int(found[1])


@contextlib.contextmanager
def _nft_counter(way: Way, frontend: Frontend) -> Iterator[Callable[[], int]]:
    """Yields a function that counts connections. kube-proxy's rules in this mode do not count, so
    within this context a counter is inserted into the chain that the frontend's map element names.
    """
    inner = partial(command, *inside(way.front.netns, None), "nft")
    elements = inner("list", "map", "ip", "kube-proxy", frontend.map)
    found = re.search(rf"{frontend.element} : goto (\S+?)[,\s]", elements)
    if found is None:
        raise SystemExit(f"no chain of kube-proxy for {frontend.element}:\n{elements}")
    rule = ("rule", "ip", "kube-proxy", f"{found[1]}")
    made = inner("--echo", "--handle", "insert", *rule, "counter")
    number = re.search(r"handle (\d+)", made)
    assert number is not None, made

    def count() -> int:
        listed = inner("list", "chain", "ip", "kube-proxy", found[1])
        packets = re.search(r"counter packets (\d+)", listed)
        assert packets is not None, listed
        return int(packets[1])

    try:
        yield count
    finally:
        inner("delete", *rule, "handle", number[1])


def _proof(world: World, way: Way, backend: str) -> int:
    """Makes PROOF connections and returns how much the way's own counter grew. Raises SystemExit if
    that is another number. On `hooked` it may be larger, since its counter counts all packets that
    are for no Service.
    """
    frontend = world.frontend(way, backend)
    with contextlib.ExitStack() as stack:
        count: Callable[[], int] = partial(_counted, way, frontend)
        if way.name == "nftables":
            count = stack.enter_context(_nft_counter(way, frontend))
        before = count()
        done, failed, _ = world.load(way, backend, "short", 60, PROOF)
        grown = count() - before
    expected = 0 if way.name == "direct" else PROOF
    counted = grown >= expected if way.name == "hooked" else grown == expected
    if (done, failed, counted) != (PROOF, 0, True):
        raise SystemExit(f"{way.name}, {backend}: {done} done, {failed} failed, {grown} counted")
    return grown


def prove(world: World) -> dict[str, int]:
    """Verifies all ways; returns the counts by way and backend."""
    return {
        f"{name}, {backend}": _proof(world, way, backend) for name, way in world.ways.items() for backend in BACKENDS
    }


# ---- results -------------------------------------------------------------------------------------


def _cell(world: World, kind: str, backend: str) -> dict[str, Any]:
    """Measures one kind of load to one backend, on all ways."""
    sides = {name: partial(world.measure, way, backend, kind) for name, way in world.ways.items()}
    rates = interleave(rounds(), sides)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    proxies = [name for name in KUBE_PROXY if name in medians]
    better = max(proxies, key=lambda name: medians[name])
    cell: dict[str, Any] = {
        "unit": KINDS[kind],
        "median": {name: round(value, 1) for name, value in medians.items()},
        "better_kube_proxy": better,
        "by_direct": {n: ratio(rates, n, "direct") for n in medians if n != "direct"},
        "by_kube_proxy": {n: ratio(rates, n, better) for n in medians if n in KBPF},
        "undisturbed": _undisturbed(rates),
    }
    for name, found in cell["by_kube_proxy"].items():
        # Conntrack does what it does for kube-proxy, so this can only be as fast.
        at_least = 0.97 if name == "conntrack" else 1.0
        found["goal"] = goal(found["median"], at_least=at_least)
        if name == "forwarded" and kind == "short":
            limit = cell["by_direct"][name]
            limit["goal"] = goal(limit["median"], at_least=1.0)
    say(f"{backend}, {kind}: {cell['median']}")
    return cell


def _undisturbed(rates: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """The same two ratios for the best tenth of each way's rounds: other work on the machine can
    only slow a round down.
    """
    best = {name: statistics.quantiles(values, n=10)[-1] for name, values in rates.items()}
    proxy = max(best[name] for name in KUBE_PROXY if name in best)
    return {
        name: {"by_direct": round(value / best["direct"], 4), "by_kube_proxy": round(value / proxy, 4)}
        for name, value in best.items()
    }


def table(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """Formats the results as a table, with a line for each cell and way."""
    head = f"{'':12}{'median':>12}{'/ direct':>10}{'/ kube-proxy':>14}{'quartiles':>17}"
    lines = [f"{head}    best tenth: / direct, / kube-proxy"]
    for name, cell in cells.items():
        lines.append(f"{name}: {cell['unit']}; the better kube-proxy: {cell['better_kube_proxy']}")
        for way, value in cell["median"].items():
            limit, proxy = cell["by_direct"].get(way), cell["by_kube_proxy"].get(way)
            best = cell["undisturbed"][way]
            lines.append(
                f"  {way:10}{value:12,.0f}"
                + (f"{limit['median']:10.3f}" if limit else f"{'':10}")
                + (f"{proxy['median']:14.3f}" if proxy else f"{'':14}")
                + (f"{proxy['low']:10.3f} {proxy['high']:6.3f}" if proxy else f"{'':17}")
                + f"{best['by_direct']:24.3f}{best['by_kube_proxy']:14.3f}"
            )
    return "\n".join(lines)


def run() -> dict[str, Any]:
    """Returns all results and the proofs."""
    return compare(World())


def compare(made: World, kinds: Iterable[str] = KINDS) -> dict[str, Any]:
    """Measures all ways, by kind of load and backend. Also prints a table to stderr."""
    with made as world:
        proof = {"before": prove(world)}
        names = {f"{backend}, {kind}": (kind, backend) for kind in kinds for backend in BACKENDS}
        cells = {name: _cell(world, *names[name]) for name in chosen(names)}
        proof["after"] = prove(world)
    say(table(cells))
    return {"rounds": rounds(), "cells": cells, "proof": {"dialled": PROOF, "counted": proof}}

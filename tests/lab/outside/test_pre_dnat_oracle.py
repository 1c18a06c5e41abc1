# SPDX-License-Identifier: Apache-2.0
"""`--forwarding netfilter` next to a real kube-proxy: the same rules on both nodes judge the same
packets, at every place of netfilter that a connection passes.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.lab.outside.netfilter import flush_conntrack, on
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.features import needs
from tests.support.lab.field import NODES4, OUT4, there
from tests.support.lab.lab import Agent, Lab, Node, Place, inside, run, until

pytestmark = needs("conntrack_nat")

RAW = "type filter hook prerouting priority raw;"
MANGLE = "type filter hook prerouting priority mangle;"
FORWARD = "type filter hook forward priority 0;"
RULES = {
    "raw: drop the NodePort": (RAW, "tcp dport {p} counter drop"),
    "mangle: reject": (MANGLE, "tcp dport {p} counter reject with tcp reset"),
    "raw: drop the client": (RAW, f"ip saddr {OUT4} tcp dport {{p}} counter drop"),
    "raw: drop other clients": (RAW, f"ip saddr != {OUT4} tcp dport {{p}} counter drop"),
    "raw: drop by destination": (RAW, "ip daddr {h} tcp dport {p} counter drop"),
    "raw: count the last packets": (RAW, "tcp dport {p} tcp flags & fin == fin counter"),
    "mangle: drop the pod's port": (MANGLE, f"tcp dport 8080 ip saddr {OUT4} counter drop"),
    "mangle: drop what is invalid": (MANGLE, "tcp dport {p} ct state invalid counter drop"),
    "mangle: drop new without SYN": (MANGLE, "tcp dport {p} ct state new tcp flags & (syn|ack) != syn counter drop"),
    "mangle: accept established only": (
        MANGLE,
        "tcp dport {p} ct state established accept\ntcp dport {p} counter drop",
    ),
    "mangle: one new connection": (
        MANGLE,
        "tcp dport {p} ct state new limit rate over 1/hour burst 1 packets counter drop",
    ),
    "forward: drop unless translated": (
        FORWARD,
        f"ip saddr {OUT4} ct status dnat accept\nip saddr {OUT4} counter drop",
    ),
    "forward: drop the NodePort": (FORWARD, "tcp dport {p} counter drop"),
    "forward: drop the pod's port": (FORWARD, "tcp dport 8080 counter drop"),
    "forward: original destination": (FORWARD, "meta l4proto tcp ct original proto-dst {p} counter drop"),
}
"""Chain and rules, with address and port `h` and `p` that the client dials."""
NODE_PORTS = {"local": (30101, 30102), "remote": (30103, 30104)}
"""By backend: the NodePort that is dialled at each of the two nodes."""
DIALS = 3
ONE_RETRY = "echo 1 > /proc/sys/net/ipv4/tcp_syn_retries"
"""A SYN is sent twice within two or three seconds: the kernel counts, however slow the client is.
"""


class Site(NamedTuple):
    nodes: list[Node]
    client: Place


@pytest.fixture(scope="module")
def site(programs: None, kube_proxy: Path) -> Iterator[Site]:
    """node-1 with kube-proxy, node-2 with kbpf."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(2, "po", apart=True))
        api = stack.enter_context(ApiServer(address=lab.outside_ip, netns=lab.outside))
        kube = stack.enter_context(api.kube())
        config = api.kubeconfig(lab.folder / "kubeconfig", "kbpf")
        for each in lab.nodes:
            kube.create(node(each.name, each.ip, each.ip6))
        pods = [each.pod(f"pod{each.number}").serve(8080) for each in lab.nodes]
        for where, numbers in NODE_PORTS.items():
            ends = pods if where == "local" else pods[::-1]
            for index, (pod, number) in enumerate(zip(ends, numbers, strict=True)):
                name = f"{where}{index}"
                kube.create(service(name, port(80, node_port=number), type="NodePort"))
                home = lab.nodes[pods.index(pod)].name
                kube.create(endpoint_slice(name, endpoint(pod.ip, node=home), ports=[slice_port(8080)]))
        stack.enter_context(KubeProxy(lab.nodes[0], "nftables", config, "--cluster-cidr", "10.244.0.0/16"))
        agent = Agent(lab.nodes[1], "--kubeconfig", str(config), "--packet-path", "true", "--forwarding", "netfilter")
        agent.start()
        client = Place("outside", lab.outside, None)
        stack.callback(client.close)
        run(*inside(lab.outside, None, "sh", "-c"), ONE_RETRY)
        for numbers in NODE_PORTS.values():
            for host, number in zip(NODES4, numbers, strict=True):
                at = (host, number)
                until(f"{at} is served", lambda at=at: "name" in client.tcp(*at))
        yield Site(lab.nodes, client)


@contextlib.contextmanager
def judged(home: Node, chain: str, text: str) -> Iterator[None]:
    """The node has these rules."""
    there(home, flush_conntrack)
    on(home, "nft", "-f", "-", stdin=f"table inet judge {{\nchain c {{ {chain}\n{text}\n}}\n}}\n")
    try:
        yield
    finally:
        on(home, "nft", "delete", "table", "inet", "judge")


def count(home: Node) -> str:
    """What the rule has counted."""
    counted = re.search(r"counter packets (\d+)", on(home, "nft", "list", "table", "inet", "judge"))
    assert counted is not None
    return counted[1]


def dial(client: Place, ends: list[tuple[str, int]]) -> list[list[str]]:
    """The results of several connections to each end, which are made at the same time, since one
    without an answer takes seconds.
    """
    names = [[f"{host}:{number} {index}" for index in range(DIALS)] for host, number in ends]
    for (host, number), own in zip(ends, names, strict=True):
        for name in own:
            client.ask("begin", host=host, port=number, keep=name)
    results = [[client.ask("go_on", keep=name).get("error", "served") for name in own] for own in names]
    for name in itertools.chain(*names):
        client.ask("drop", keep=name)
    return results


@pytest.mark.parametrize("backend", NODE_PORTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_judges_as_with_kube_proxy(site: Site, rule: str, backend: str):
    chain, text = RULES[rule]
    ends = list(zip(NODES4, NODE_PORTS[backend], strict=True))
    with contextlib.ExitStack() as stack:
        for home, (host, number) in zip(site.nodes, ends, strict=True):
            stack.enter_context(judged(home, chain, text.format(h=host, p=number)))
        results = dial(site.client, ends)
        with_kube_proxy, with_kbpf = zip(results, map(count, site.nodes), strict=True)
    assert with_kbpf == with_kube_proxy

# SPDX-License-Identifier: Apache-2.0
"""A node with the real kube-proxy next to nodes with kbpf: the same rules of netfilter judge the same packets, at every
place that a connection passes, and TCX programs of other tools see the same of a connection from outside. Netfilter
translates behind ingress and before egress, kbpf at both.
"""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE
from kbpf.kernel.bpf.uapi import BPF_MAP_TYPE_HASH
from tests.lab.outside.netfilter import flush_conntrack, nft_table
from tests.programs.packets.tc.net import NEXT, PAIR, recording
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.cluster.kube_proxy import KubeProxy, lab_for_proxies
from tests.support.features import needs
from tests.support.lab.field import OUT4, there
from tests.support.lab.lab import PATIENCE, Agent, Node, Place, inside, ip, on, run, until
from tests.support.lab.podnet import gate
from tests.support.plane import start_within, within
from tests.support.table import table

pytestmark = needs("conntrack_nat")

PROXIES = ("kube-proxy", "stack", "netfilter")
"""Of node-1, node-2 and node-3: kube-proxy, and kbpf with this value of `--forwarding`."""
SERVICES = {"Cluster": 1, "Local": 2, "remote": 3}
"""Each node has a NodePort of each: of a pod there with this external traffic policy, or of a pod of another node.
"""
ONE_RETRY = "echo 1 > /proc/sys/net/ipv4/tcp_syn_retries"
"""A SYN is sent twice within two or three seconds: the kernel counts, however slow the client is.
"""


def node_port(name: str, home: Node) -> int:
    return 30000 + 100 * SERVICES[name] + home.number


class Second(NamedTuple):
    """A protocol whose server begins another connection, or names its address in what it sends. Conntrack's helper of
    this name translates that, too.
    """

    name: str
    protocol: str
    port: int

    def node_port(self, home: Node) -> int:
        return 30500 + 100 * SECOND_CONNECTIONS.index(self) + home.number


SECOND_CONNECTIONS = (Second("tftp", "UDP", 69), Second("ftp", "TCP", 21), Second("sip", "UDP", 5060))


class Site(NamedTuple):
    nodes: list[Node]
    client: Place


@pytest.fixture(scope="module")
def site(programs: None, kube_proxy: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        lab, kube, config = stack.enter_context(lab_for_proxies(len(PROXIES), "po"))
        for each in lab.nodes:
            for name in ("Cluster", "Local"):
                each.pod(f"{name.lower()}{each.number}").serve(8080)
        for home, name in product(lab.nodes, SERVICES):
            other = lab.nodes[home.number % len(PROXIES)] if name == "remote" else home
            pod, policy = (other.pods[1], "Local") if name == "Local" else (other.pods[0], "Cluster")
            owner, http = f"{name.lower()}-{home.number}", port(80, node_port=node_port(name, home))
            kube.create(service(owner, http, type="NodePort", external_policy=policy))
            kube.create(endpoint_slice(owner, endpoint(pod.ip, node=other.name), ports=[slice_port(8080)]))
        for home, row in product(lab.nodes, SECOND_CONNECTIONS):
            name, end = f"{row.name}-{home.number}", endpoint(home.pods[1].ip, node=home.name)
            number = port(row.port, "p", row.protocol, node_port=row.node_port(home))
            kube.create(service(name, number, type="NodePort", external_policy="Local"))
            kube.create(endpoint_slice(name, end, ports=[slice_port(row.port, "p", row.protocol)]))
        for each, proxy in zip(lab.nodes, PROXIES, strict=True):
            if proxy == "kube-proxy":
                stack.enter_context(KubeProxy(each, "nftables", config, "--cluster-cidr", "10.244.0.0/16"))
            else:
                Agent(each, "--kubeconfig", str(config), "--packet-path", "true", "--forwarding", proxy).start()
        ip(*(f"route add 10.244.{each.number}.0/24 via {each.ip}" for each in lab.nodes), netns=lab.outside)
        client = Place("outside", lab.outside, None)
        stack.callback(client.close)
        run(*inside(lab.outside, None, "sh", "-c"), ONE_RETRY)
        for each, name in product(lab.nodes, SERVICES):
            at = (each.ip, node_port(name, each))
            until(f"{at} is served", lambda at=at: "name" in client.tcp(*at))
        yield Site(lab.nodes, client)


# ---- rules ---------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A hook and a priority, and what nft matches there: `c` is the client, `h` and `p` what it dials."""

    name: str
    hook: str
    priority: str
    match: str


RULES = table(
    Rule,
    """
the NodePort     | prerouting | raw    | tcp dport {p} counter drop
reject           | prerouting | mangle | tcp dport {p} counter reject with tcp reset
the client       | prerouting | raw    | ip saddr {c} tcp dport {p} counter drop
other clients    | prerouting | raw    | ip saddr != {c} tcp dport {p} counter drop
by destination   | prerouting | raw    | ip daddr {h} tcp dport {p} counter drop
count the last   | prerouting | raw    | tcp dport {p} tcp flags & fin == fin counter
the pod's port   | prerouting | mangle | tcp dport 8080 ip saddr {c} counter drop
invalid          | prerouting | mangle | tcp dport {p} ct state invalid counter drop
new without SYN  | prerouting | mangle | tcp dport {p} ct state new tcp flags & (syn|ack) != syn counter drop
established only | prerouting | mangle | tcp dport {p} ct state established accept; tcp dport {p} counter drop
one an hour      | prerouting | mangle | tcp dport {p} ct state new limit rate over 1/hour burst 1 packets counter drop
untranslated     | forward    | 0      | ip saddr {c} ct status dnat accept; ip saddr {c} counter drop
the NodePort     | forward    | 0      | tcp dport {p} counter drop
the pod's port   | forward    | 0      | tcp dport 8080 counter drop
original port    | forward    | 0      | meta l4proto tcp ct original proto-dst {p} counter drop
""",
)
BACKENDS = ("Cluster", "remote")
DIALS = 3


@contextlib.contextmanager
def judged(home: Node, rule: Rule) -> Iterator[None]:
    """The node has this rule, for each of the backends."""
    there(home, flush_conntrack)
    text = ""
    for name in BACKENDS:
        match = rule.match.format(h=home.ip, p=node_port(name, home), c=OUT4)
        text += f"chain {name} {{ type filter hook {rule.hook} priority {rule.priority}; {match}; }}\n"
    with nft_table(home, "inet judge", text):
        yield


def dial(client: Place, ends: list[tuple[str, int]]) -> list[str]:
    """The results of several connections to each end, which are made at the same time, since one
    without an answer takes seconds.
    """
    names = [(*end, f"{end} {index}") for end in ends for index in range(DIALS)]
    for host, number, name in names:
        client.ask("begin", host=host, port=number, keep=name)
    results = [client.ask("go_on", keep=name).get("error", "served") for *_, name in names]
    for *_, name in names:
        client.ask("drop", keep=name)
    return results


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.hook} {rule.priority}: {rule.name}")
def test_a_rule_judges_as_with_kube_proxy(site: Site, rule: Rule):
    """With `--forwarding netfilter`."""
    homes = site.nodes[::2]
    with contextlib.ExitStack() as stack:
        for home in homes:
            stack.enter_context(judged(home, rule))
        results = dial(site.client, [(home.ip, node_port(name, home)) for home in homes for name in BACKENDS])
        rules = [on(home, "nft", "list", "table", "inet", "judge") for home in homes]
    with_kube_proxy, with_kbpf = (re.findall(r"counter packets (\d+)", text) for text in rules)
    assert len(with_kbpf) == len(BACKENDS)
    assert (results[len(results) // 2 :], with_kbpf) == (results[: len(results) // 2], with_kube_proxy)


# ---- programs ------------------------------------------------------------------------------------

UPLINK_IN, UPLINK_OUT, FROM_POD, TO_POD = product(("eth0", "p"), Direction)
KUBE_PROXY = {
    "Cluster": {
        UPLINK_IN: "client > node:NodePort",
        TO_POD: "node > pod:8080",
        FROM_POD: "pod:8080 > node",
        UPLINK_OUT: "node:NodePort > client",
    },
    "Local": {
        UPLINK_IN: "client > node:NodePort",
        TO_POD: "client > pod:8080",
        FROM_POD: "pod:8080 > client",
        UPLINK_OUT: "node:NodePort > client",
    },
}
STACK = {UPLINK_IN: "client > pod:8080", FROM_POD: "pod:8080 > client"}
"""Where kbpf differs with `--forwarding stack`."""


class Recorder:
    """Programs at all hooks of a node, behind the others."""

    def __init__(self, home: Node, stack: contextlib.ExitStack) -> None:
        self.home = home
        self._seen: dict[tuple[str, Direction], Map] = {}
        for device, direction in product(("eth0", "p1", "p2"), Direction):
            seen = stack.enter_context(Map.create(BPF_MAP_TYPE_HASH, "seen", PAIR.size, 4, 1024))
            program = stack.enter_context(recording("recorder", seen, NEXT))
            attach = partial(self._attach, program, device, direction)
            stack.enter_context(there(home.host, attach))
            self._seen[device, direction] = seen

    @staticmethod
    def _attach(program: Program, device: str, direction: Direction) -> Link:
        return Link.attach(program, socket.if_nametoindex(device), ATTACH_TYPE[direction])

    def read(self, policy: str) -> dict[tuple[str, Direction], str]:
        """What the programs have seen of connections to the pod of this policy."""
        rows = {}
        for (device, direction), seen in self._seen.items():
            pairs = {self._describe(key, policy) for key, _ in seen.items()} - {""}
            if device in ("eth0", f"p{SERVICES[policy]}"):
                rows[device.rstrip("12"), direction] = ", ".join(sorted(pairs))
        return rows

    def _describe(self, key: bytes, policy: str) -> str:
        source, target, source_port, target_port = PAIR.unpack(key)
        names = {
            OUT4: "client",
            self.home.ip: "node",
            gate(self.home.number, False): "node",
            self.home.pods[SERVICES[policy] - 1].ip: "pod",
        }
        ports = {node_port(policy, self.home): ":NodePort", 8080: ":8080"}
        ends = [
            (names.get(socket.inet_ntoa(address), ""), ports.get(int.from_bytes(number, "big"), ""))
            for address, number in ((source, source_port), (target, target_port))
        ]
        if not all(name for name, _ in ends) or not any(suffix for _, suffix in ends):
            return ""
        return " > ".join(name + suffix for name, suffix in ends)


@needs("tcx")
@pytest.mark.parametrize("policy", KUBE_PROXY)
@pytest.mark.parametrize("proxy", PROXIES)
def test_programs_of_others_see(site: Site, proxy: str, policy: str):
    home = site.nodes[PROXIES.index(proxy)]
    with contextlib.ExitStack() as stack:
        recorder = Recorder(home, stack)
        assert "name" in site.client.tcp(home.ip, node_port(policy, home))
        expected = KUBE_PROXY[policy] | (STACK if proxy == "stack" else {})
        assert recorder.read(policy) == expected


# ---- helpers of conntrack ------------------------------------------------------------------------

INVITE = """INVITE sip:b@x SIP/2.0\r
Via: SIP/2.0/UDP {0}:{1}\r
From: <sip:a@x>;tag=1\r
To: <sip:b@x>\r
Call-ID: 1@x\r
CSeq: 1 INVITE\r
Contact: <sip:a@{0}:{1}>\r
Content-Length: 0\r
\r
"""


def serve_second(row: Second, address: str, ready: int) -> None:
    """Serves one client in the pod with this address. Writes to `ready` once it listens."""
    kind = socket.SOCK_DGRAM if row.protocol == "UDP" else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as s, socket.socket(socket.AF_INET, kind) as second:
        for each in (s, second):
            each.settimeout(PATIENCE)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((address, row.port))
        if row.name == "ftp":
            s.listen()
        os.write(ready, b"x")
        if row.name == "ftp":
            connection, _ = s.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"230 welcome\r\n")
                *_, high, low = re.findall(rb"\d+", connection.recv(100))
                second.connect((OUT4, int(high) * 256 + int(low)))
                connection.recv(1)
        elif row.name == "tftp":
            _, client = s.recvfrom(600)
            second.sendto(b"\0\3\0\1data", client)
        else:
            request, client = s.recvfrom(2000)
            answer = request.decode().replace("INVITE sip:b@x SIP/2.0", "SIP/2.0 200 OK")
            answer = re.sub("Contact: .*>", f"Contact: <sip:b@{address}:5060>", answer)
            s.sendto(answer.encode(), client)


def dial_second(row: Second, to: tuple[str, int]) -> str:
    """The address that the client outside sees in what the server begins or sends."""
    kind = socket.SOCK_DGRAM if row.protocol == "UDP" else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as s:
        s.settimeout(PATIENCE)
        if row.name == "ftp":
            with socket.create_server((OUT4, 0)) as listener:
                listener.settimeout(PATIENCE)
                s.connect(to)
                s.sendall(b"USER a\r\n")  # the helper ignores what a client sends first
                s.recv(100)
                high, low = divmod(listener.getsockname()[1], 256)
                s.sendall(f"PORT {OUT4.replace('.', ',')},{high},{low}\r\n".encode())
                connection, source = listener.accept()
                connection.close()
                return source[0]
        s.bind((OUT4, 0))
        s.sendto(b"\0\1file\0octet\0" if row.name == "tftp" else INVITE.format(*s.getsockname()).encode(), to)
        answer, source = s.recvfrom(2000)
        return source[0] if row.name == "tftp" else re.search(rb"sip:b@([\d.]+):", answer)[1].decode()


@pytest.mark.parametrize("row", SECOND_CONNECTIONS, ids=lambda row: row.name)
@pytest.mark.parametrize("proxy", PROXIES)
def test_a_helper_of_conntrack(site: Site, proxy: str, row: Second):
    """It translates for kube-proxy only: see docs/limits.md."""
    home = site.nodes[PROXIES.index(proxy)]
    pod, to = home.pods[1], (home.ip, row.node_port(home))
    rules = f"""
        ct helper it {{ type "{row.name}" protocol {row.protocol.lower()}; }}
        chain helps {{ type filter hook prerouting priority mangle;
            {row.protocol.lower()} dport {{ {row.port}, {to[1]} }} ct helper set "it"; }}
    """
    reader, writer = os.pipe()
    with nft_table(home, "ip helped", rules):
        served = start_within(pod, lambda: serve_second(row, pod.ip, writer))
        os.read(reader, 1)
        seen = within(site.client, lambda: dial_second(row, to))
        served()
    assert seen == (home.ip if proxy == "kube-proxy" else pod.ip)

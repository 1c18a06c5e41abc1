# SPDX-License-Identifier: Apache-2.0
"""The packet path with real sockets: clients outside the cluster, and pods without socket hooks.

Nodes, pods and the client are those of tests/support/lab/field.py; the rows are those of tests/rows/outside.py: TCP by
IPv4 and UDP by IPv6, since programs tell protocols and families apart in different places. All are in
tests/programs/packets/test_dials.py.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from tests.lab.outside.netfilter import flush_conntrack
from tests.lab.outside.pod_network import forget, learned
from tests.rows.outside import ROWS, objects
from tests.support.cluster.kube_objects import Object, port
from tests.support.lab.dial import REFUSED, UNSERVED, Dial
from tests.support.lab.field import (
    BULK,
    BULK_SERVICES,
    DROPPED,
    NODES4,
    OUT4,
    OUT6,
    WAIT,
    WITH_CONNTRACK,
    Field,
    at,
    both_families,
    check,
    crossed,
    forward,
    may_see,
    split,
    there,
    transfer,
)
from tests.support.lab.lab import Place, inside, ip, on, set_rp_filter, settled, until
from tests.support.lab.lab import run as command
from tests.support.lab.modes import PACKETS
from tests.support.lab.offloads import offload
from tests.support.lab.prediction import check_prediction
from tests.support.packets.parse import Packet, checksums
from tests.support.packets.wire import Wire
from tests.support.table import table


@pytest.fixture(scope="module", params=WITH_CONNTRACK)
def field(request) -> Iterator[Field]:
    """The Services of the rows, and those of bulk transfers."""
    with Field(*forward(request.param)) as made:
        made.create(*objects(made))
        made.create(*made.all_of(BULK_SERVICES))
        for name in ("a1", "b1"):
            made[name].ask("serve_bulk", ports=[BULK])
        made.settle()
        yield made


CROSSED = [row for row in ROWS if (row.protocol == "udp") == ("[" in row.to)]


@pytest.mark.parametrize("row", CROSSED, ids=lambda row: row.name)
def test_dial(field: Field, row: Dial):
    check_prediction(field, row)
    check(field, row)


# ---- rules of the host ---------------------------------------------------------------------------


@contextlib.contextmanager
def rules(field: Field, *chains: str) -> Iterator[None]:
    """node-1 has these chains of nftables."""
    node, text = field.lab.nodes[0], "\n".join(f"chain c{number} {{ {chain}; }}" for number, chain in enumerate(chains))
    on(node, "nft", "-f", "-", stdin=f"table inet guard {{\n{text}\n}}\n")
    try:
        yield
    finally:
        on(node, "nft", "delete", "table", "inet", "guard")
        there(node, flush_conntrack)


def counted(field: Field) -> int:
    """How many packets these rules have counted."""
    listed = on(field.lab.nodes[0], "nft", "list", "table", "inet", "guard")
    return sum(map(int, re.findall(r"counter packets (\d+)", listed)))


class Way(NamedTuple):
    """A connection, the client that its backend sees (host-1: the node), and the `--forwarding` settings with which it
    bypasses the stack. With the other settings netfilter drops it.
    """

    name: str
    client: str
    kind: str
    number: int
    backend: str
    sees: str
    past: str


WAYS = table(
    Way,
    """
NodePort, another node   | outside | NodePort   | 2 | b1 | host-1  | stack direct
ExternalIP, another node | outside | ExternalIP | 2 | b1 | host-1  | stack direct
VIP, another node        | outside | VIP        | 2 | b1 | host-1  | stack direct
a pod of this node       | outside | NodePort   | 1 | a1 | host-1  | direct
policy Local             | outside | VIP        | 4 | a1 | outside | direct
a pod to itself          | a1!     | ClusterIP  | 1 | a1 | host-1  | direct
a pod to its neighbour   | a2!     | ClusterIP  | 1 | a1 | a2      | direct
a pod to another node's  | a2!     | ClusterIP  | 2 | b1 | a2      | direct
a pod by a NodePort      | a2!     | NodePort   | 2 | b1 | host-1  | direct
""",
)
"""Masqueraded connections to other nodes bypass the stack, unless conntrack translates them."""
HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
CLOSED = [
    *(f"type filter hook {hook} priority -300; meta l4proto {{ tcp, udp }} counter" for hook in HOOKS),
    "type filter hook forward priority 0; policy drop",
]
"""All hooks count packets, and a table in which the agent keeps no rule drops all forwarded ones."""


@pytest.fixture
def strict(field: Field) -> Iterator[None]:
    """Every device has a strict reverse path filter."""
    for value in (1, 0):
        for node in field.lab.nodes:
            set_rp_filter(node.netns, value)
        if value:
            yield


@crossed
@pytest.mark.usefixtures("strict")
def test_which_packets_bypass_a_closed_forward_chain(field: Field, protocol: str, v6: bool):
    for way in WAYS:
        sees, to = field[way.sees], at(way.kind, way.number + (10 if protocol == "tcp" else 20), v6)
        is_past = field.arguments[-1] in way.past.split()
        outcome = way.backend if is_past else DROPPED
        with rules(field, *CLOSED):
            check(field, Dial(way.name, way.client, to, outcome, protocol, sees.ip6 if v6 else sees.ip))
            assert (counted(field) == 0) is is_past, f"{way.name}: what netfilter sees is dropped"


@both_families
@pytest.mark.parametrize("field", WITH_CONNTRACK[::2], indirect=True)
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("NodePort", "priority raw; {protocol} dport {p}"),
        ("VIP", "priority mangle; {ip} saddr {c} {protocol} dport {p}"),
    ],
    ids=["NodePort", "VIP"],
)
def test_rules_before_dnat(field: Field, kind: str, rule: str, v6: bool):
    """With `--forwarding netfilter` and in mode ipvs they guard NodePorts and VIPs, as with kube-proxy.
    Otherwise they do not, as `kbpf check` and docs/limits.md say. More rules:
    tests/lab/neighbours/test_beside_kube_proxy.py.
    """
    is_guarded = PACKETS or "netfilter" in field.arguments
    node, client, ip = (field.lab.nodes[0].ip6, OUT6, "ip6") if v6 else (NODES4[0], OUT4, "ip")
    for number, pod, sees in ((11, "a1", node), (22, "b1", node), (24, "a1", client)):
        protocol, to = "tcp" if number < 20 else "udp", at(kind, number, v6)
        match = rule.format(protocol=protocol, ip=ip, c=client, p=split(to)[1])
        with rules(field, f"type filter hook prerouting {match} counter drop"):
            check(field, Dial(match, "outside", to, DROPPED if is_guarded else pod, protocol, sees))
            assert (counted(field) > 0) == is_guarded


# ---- refusals ------------------------------------------------------------------------------------

PORT_UNREACHABLE = {False: ("icmp", 3, 3), True: ("icmp6", 1, 4)}


def refusal(field: Field, name: str, kind: str, protocol: str, v6: bool) -> Packet:
    """The reply to a packet for port 81 of Service 11, which has no such port."""
    client = field[name]
    device = field.lab.prefix if name == "outside" else "eth0"
    own, host = client.ip6 if v6 else client.ip, split(at(kind, 11, v6))[0]

    def is_reply(packet: Packet) -> bool:
        return packet.transport is not None and packet.ip.destination == own

    with Wire(client.netns, device, tap=True) as tap:
        client.many(1, host, 81, protocol=protocol, connected=True, timeout=WAIT)
        return tap.expect(is_reply)


by_clients = pytest.mark.parametrize(("name", "v6"), [("outside", False), ("a2!", True)])


@by_clients
def test_an_unknown_port_is_refused_by_the_cluster_ip(field: Field, name: str, v6: bool):
    """The RST and the ICMP error come from the ClusterIP. A BPF program sends and counts them. They and the packet that
    the error quotes have correct checksums, whereas the kernel's stack quotes checksums that were left to a device.
    """
    before = Counter() if PACKETS else field.agent.reasons()
    reset, error = (refusal(field, name, "ClusterIP", each, v6) for each in ("tcp", "udp"))
    assert reset.ip.source == error.ip.source == split(at("ClusterIP", 11, v6))[0]
    assert set(reset.transport.flags) == set("RA")
    assert (error.protocol, error.transport.type, error.transport.code) == PORT_UNREACHABLE[v6]
    if not PACKETS:
        assert checksums(reset) == checksums(error) == []
        assert (field.agent.reasons() - before)[Reason.UNKNOWN_PORT] == 2


@both_families
def test_a_refusal_is_intact_with_checksum_offload(field: Field, v6: bool):
    """The pod leaves checksums to its device (CHECKSUM_PARTIAL), and the device back to the pod has
    no offload either: the kernel computes them in a packet that has become an ICMP error.
    """
    home = field.lab.nodes[0].netns
    offload(home, "p2", "tx", False)
    try:
        for kind, number in (("ClusterIP", 26), ("VIP", 26), ("NodePort", 26)):
            check(field, Dial(kind, "a2!", at(kind, number, v6), REFUSED, "udp"))
    finally:
        offload(home, "p2", "tx", True)


# ---- smaller packets -----------------------------------------------------------------------------

NARROW = 1300
FAR4, FAR6 = "198.51.100.7", "fd00:198:51::7"


@pytest.fixture(scope="module")
def far(field: Field) -> Iterator[Place]:
    """A client behind a router; the router is the outside machine."""
    lab = field.lab
    where = f"{lab.prefix}far"
    lab.add_netns(where)
    ip(f"link add far type veth peer name eth0 netns {where}", netns=lab.outside)
    ip(
        """
        addr add 198.51.100.1/24 dev far
        addr add fd00:198:51::1/64 dev far nodad
        link set far up
        """,
        netns=lab.outside,
    )
    ip(
        f"""
        addr add {FAR4}/24 dev eth0
        addr add {FAR6}/64 dev eth0 nodad
        link set lo up
        link set eth0 up
        route add default via 198.51.100.1
        route add default via fd00:198:51::1
        """,
        netns=where,
    )
    settled(lab.outside, "fd00:198:51::1")
    settled(where, FAR6)
    sysctl = "echo 1 > /proc/sys/net/ipv4/ip_forward;echo 1 > /proc/sys/net/ipv6/conf/all/forwarding"
    command(*inside(lab.outside, None, "sh", "-c"), sysctl)
    return field.unhook("far", where, FAR4, FAR6, lab.nodes[0])


@contextlib.contextmanager
def narrow(where: str | None, route: str, after: str) -> Iterator[None]:
    """Lowers this route's MTU. Forwarding respects a route's MTU only if it is locked."""
    ip(f"route replace {route} mtu lock {NARROW}", netns=where)
    try:
        yield
    finally:
        ip(after, netns=where)


class Narrow(NamedTuple):
    """Where the link is narrow, the Service, its backend, and the client that dials it."""

    where: str
    number: int
    backend: str
    client: str
    v6: bool


NARROWS = table(
    Narrow,
    """
before the pod            | 41 | a1 | outside | no
between the nodes         | 42 | b1 | outside | yes
behind the other node     | 42 | b1 | outside | no
before the pod, Local     | 43 | a1 | outside | yes
before the client         | 41 | a1 | far     | yes
before the client, remote | 42 | b1 | far     | no
before the client, Local  | 43 | a1 | far     | yes
""",
)


@pytest.mark.parametrize("row", NARROWS, ids=lambda row: row.where)
def test_the_path_mtu_is_found(field: Field, far: Place, row: Narrow):
    case, number, backend, name, v6 = row
    client, pod = field[name], field[backend]
    first, second = field.lab.nodes
    address = pod.ip6 if v6 else pod.ip
    bits = 128 if v6 else 32
    to = at("NodePort", number, v6)
    if name == "far":
        route = f"{FAR6 if v6 else FAR4}/{bits} dev far"
        where, after = field.lab.outside, f"route del {route}"
    elif case == "between the nodes":
        route = f"{address}/{bits} via {second.ip6 if v6 else second.ip}"
        where, after = first.netns, f"route del {route}"
    else:
        home = field.home[backend]
        route = f"{address}/{bits} dev p1" + ("" if v6 else f" src 10.244.{home.number}.1")
        where, after = home.netns, f"route replace {route}"
    own, far_ip = (first.ip6, FAR6) if v6 else (first.ip, FAR4)
    sender = pod if name == "far" else client  # of the packets that are too big
    forget(sender)
    with narrow(where, route, after):
        transfer(client, to)
        seen = may_see(field, far_ip if number == 43 else own) if sender is pod else (split(to)[0],)
        assert NARROW in {learned(sender, address) for address in seen}
    forget(sender)


# ---- changes -------------------------------------------------------------------------------------


@by_clients
@pytest.mark.parametrize("ports", [[], [port(81, protocol="UDP")]], ids=["Service deleted", "port removed"])
@pytest.mark.parametrize("field", WITH_CONNTRACK[::2], indirect=True)
def test_a_udp_flow_ends_with_its_service_port_although_its_slices_stay(
    field: Field, name: str, v6: bool, ports: list[Object]
):
    """As with kube-proxy 1.38 (kubernetes/kubernetes#141371)."""
    client, to = field[name], at("NodePort" if name == "outside" else "ClusterIP", 62, v6)
    row, *slices = field.all_ways(62, "a1", "UDP")
    with field.given(row, *slices):
        assert client.udp(*split(to), keep="flow", connected=True).get("name") == "a1"
        if ports:
            row["spec"]["ports"] = ports
            field.change(row)
        else:
            field.delete(row)
            field.settle()
        # the agent deletes old flows after it has written the frontends
        until("nobody answers", lambda: "name" not in client.ask("talk", keep="flow", timeout=1.0))
        client.ask("drop", keep="flow")


def test_a_connection_outlives_its_endpoint(field: Field):
    client = field["outside"]
    with field.given(*field.all_ways(53, "a1 b1")):
        for number in range(6):
            client.tcp(*split(at("NodePort", 53)), keep=f"c{number}")
        field.change(field.slice("web-53", "a2"))
        for number in range(6):
            assert client.ask("talk", keep=f"c{number}").get("name") in ("a1", "b1")
            client.ask("drop", keep=f"c{number}")
        check(field, Dial("new connections", "outside", at("NodePort", 53), "a2", "tcp", NODES4[0]))


@pytest.mark.parametrize("field", WITH_CONNTRACK[:1], indirect=True)
def test_without_the_packet_path_all_programs_are_detached(field: Field):
    agent = field.agent
    agent.stop()
    agent.start(extra=("--packet-path", "false"))
    check(field, Dial("the node's stack answers", "outside", at("NodePort", 11), REFUSED))
    check(field, Dial("VIP unserved", "outside", at("VIP", 11), UNSERVED))
    assert "clsact" not in command("tc", "-n", agent.node.netns, "qdisc", "show")
    check(field, Dial("socket hooks still serve", "a2", "10.96.0.11:80", "a1", "tcp", field["a2"].ip))
    agent.stop()
    agent.start()
    for kind in ("NodePort", "VIP"):
        check(field, Dial("served again", "outside", at(kind, 11), "a1", "tcp", NODES4[0]))

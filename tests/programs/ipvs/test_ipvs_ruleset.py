# SPDX-License-Identifier: Apache-2.0
"""The table of the IPVS data plane on any kernel with nf_tables: packets from the node itself and
from a neighbour show what it refuses, drops, passes and masquerades. IPVS is not used: the
virtual addresses are on the loopback device, where a listener accepts what passes.
"""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kbpf.dataplane.ipvs import ruleset
from kbpf.dataplane.ipvs.plan import Element, SetName
from kbpf.dataplane.ipvs.ruleset import RulesetOptions
from kbpf.kernel.netfilter import forward_rules
from kbpf.model.address import ANY4, ANY6, parse_addr
from kbpf.model.objects import Cidr, Protocol
from tests.support.lab import namespace as namespaces
from tests.support.lab.dial import SILENCE
from tests.support.lab.lab import Place, settled
from tests.support.lab.namespace import Namespace
from tests.support.table import each_cells, table

STYLE = RulesetOptions("kbpf", 14)
VIP, VIP6, OWN, OWN6 = "10.96.0.1", "fd00:96::1", "198.18.7.1", "fd00:7::1"
NEIGHBOUR, NEIGHBOUR6 = "198.18.7.2", "fd00:7::2"


class Bench(Namespace):
    """A node and its neighbour, each in a network namespace."""

    def __init__(self, name: str, there: Namespace) -> None:
        super().__init__(name)
        self.there = there
        self.ip(
            f"link add eth0 type veth peer name eth0 netns {there.name}",
            "link set lo up",
            f"addr add {VIP}/32 dev lo",
            f"addr add {VIP6}/128 dev lo nodad",
            f"addr add {OWN}/24 dev eth0",
            f"addr add {OWN6}/64 dev eth0 nodad",
            "link set eth0 up",
        )
        there.ip(
            "link set lo up",
            f"addr add {NEIGHBOUR}/24 dev eth0",
            f"addr add {NEIGHBOUR6}/64 dev eth0 nodad",
            "link set eth0 up",
            f"route add {VIP} via {OWN}",
            f"route add {VIP6} via {OWN6}",
        )
        settled(name, VIP6, OWN6)
        settled(there.name, NEIGHBOUR6)
        self.run("sysctl -qw net.ipv4.icmp_ratelimit=0 net.ipv6.icmp.ratelimit=0")
        self.node, self.neighbour = Place("node", name, None), Place("neighbour", there.name, None)
        for place in (self.node, self.neighbour):
            place.serve(80, 81, 82, 83, 90, 30080, udp=(80, 81, 82, 83, 90))
        self.create_table()

    def create_table(self, options: RulesetOptions = STYLE) -> None:
        self.do(lambda: forward_rules.run_transaction(*ruleset.create_table(options)))

    @contextlib.contextmanager
    def another_table(self, name: str, chain: str) -> Iterator[None]:
        """Adds a table of somebody else for the time of a block."""
        self.run("nft -f -", stdin=f"table {name} {{ chain other {{ {chain}\n}}\n}}\n")
        try:
            yield
        finally:
            self.run(f"nft delete table {name}")

    def read(self) -> frozenset[Element]:
        return self.do(lambda: ruleset.parse_elements(forward_rules.run_transaction(ruleset.LIST_TABLE)))

    def set_elements(self, *wanted: Element) -> None:
        """Makes the sets hold exactly these elements, in one transaction."""
        there = self.read()
        commands = [*ruleset.delete_elements(there - {*wanted}), *ruleset.add_elements({*wanted} - there)]
        if commands:
            self.do(lambda: forward_rules.run_transaction(*commands))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with namespaces.made() as here, namespaces.made() as there:
        made = Bench(here.name, there)
        yield made
        made.node.close()
        made.neighbour.close()


def elements(text: str) -> tuple[Element, ...]:
    """The elements of each line: a set, an address, a port and maybe a mark or a network of clients; one for each
    protocol.
    """
    found = []
    for name, address, port, *more in map(str.split, text.strip().splitlines()):
        if SetName[name] is SetName.SOURCES:
            found += [(SetName.SOURCES, (Cidr.parse(*more), parse_addr(address), p, int(port))) for p in Protocol]
        else:
            marks = [int(mark, 16) for mark in more]
            found += [(SetName[name], (parse_addr(address), p, int(port), *marks)) for p in Protocol]
    return tuple(found)


IPS = tuple((SetName.VIRTUAL_IPS, (parse_addr(one),)) for one in (VIP, VIP6))
EVERYTHING = (
    *IPS,
    *elements("""
OWN                 10.96.0.1  80
SERVED              10.96.0.1  80
SERVED              fd00:96::1 80
REFUSED             10.96.0.1  81
REFUSED             fd00:96::1 81
DROPPED             10.96.0.1  82
DROPPED             fd00:96::1 82
REFUSED             198.18.7.1 81
DROPPED             198.18.7.1 82
SERVED              10.96.0.1  83
SERVED              fd00:96::1 83
RESTRICTED          10.96.0.1  83
RESTRICTED          fd00:96::1 83
SOURCES             10.96.0.1  83 10.96.0.1/32
SOURCES             10.96.0.1  83 198.18.8.0/24
SOURCES             fd00:96::1 83 fd00:7::/64
SOURCES             10.96.0.1  84 0.0.0.0/0
SOURCES             fd00:96::1 84 ::/0
SHORT_CIRCUITS      10.96.0.1  85    6b620001
FWMARKS             10.96.0.1  85    6b620001
FWMARKS             0.0.0.0    30085 6b620001
FWMARKS             ::         30085 6b620002
MASQUERADED         10.96.0.1  80
MASQUERADED_OUTSIDE 10.96.0.1  84
"""),
    (SetName.HAIRPINS, (parse_addr("fd00::1"), parse_addr("fd00::1"))),
    (SetName.LOCAL_NETWORKS, (Cidr(parse_addr("10.1.0.0"), 112),)),
    (SetName.OWN_FWMARKS, (ANY4, 0x6B620001)),
    (SetName.OWN_FWMARKS, (ANY6, 0x6B620002)),
)


def test_written_elements_are_read_back(bench: Bench):
    bench.set_elements(*EVERYTHING)
    assert bench.read() == frozenset(EVERYTHING)
    bench.set_elements()
    assert bench.read() == frozenset()


class Row(NamedTuple):
    """A client, its destination, and the outcome: passed, refused or dropped."""

    client: str
    to: str
    port: int
    outcome: str


PASSES, REFUSED, DROPPED = "node", "ECONNREFUSED", "timeout"
ROWS = table(
    Row,
    """
node      | 10.96.0.1  | 80 | node
node      | fd00:96::1 | 80 | node
neighbour | 10.96.0.1  | 80 | node
neighbour | fd00:96::1 | 80 | node
node      | 10.96.0.1  | 81 | ECONNREFUSED
node      | fd00:96::1 | 81 | ECONNREFUSED
node      | 198.18.7.1 | 81 | ECONNREFUSED
neighbour | 10.96.0.1  | 81 | ECONNREFUSED
neighbour | fd00:96::1 | 81 | ECONNREFUSED
neighbour | 198.18.7.1 | 81 | ECONNREFUSED
node      | 10.96.0.1  | 82 | timeout
node      | fd00:96::1 | 82 | timeout
node      | 198.18.7.1 | 82 | timeout
neighbour | 10.96.0.1  | 82 | timeout
neighbour | fd00:96::1 | 82 | timeout
neighbour | 198.18.7.1 | 82 | timeout
node      | 10.96.0.1  | 90 | ECONNREFUSED
node      | fd00:96::1 | 90 | ECONNREFUSED
neighbour | 10.96.0.1  | 90 | ECONNREFUSED
neighbour | fd00:96::1 | 90 | ECONNREFUSED
node      | 198.18.7.1 | 90 | node
neighbour | 198.18.7.1 | 90 | node
node      | 10.96.0.1  | 83 | node
neighbour | 10.96.0.1  | 83 | timeout
node      | fd00:96::1 | 83 | timeout
neighbour | fd00:96::1 | 83 | node
""",
)
"""The node's own address at port 90 is in no set; port 83 is open to the VIP itself and to fd00:7::/64."""


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.client} {row.to} {row.port}")
def test_tcp_and_udp_packets_pass_or_are_refused_or_dropped(bench: Bench, row: Row, protocol: str):
    bench.set_elements(*EVERYTHING)
    place = getattr(bench, row.client)
    more = {"timeout": 0.5} if row.outcome == DROPPED else {}
    if protocol == "udp":
        answer = place.udp(row.to, row.port, connected=row.outcome == REFUSED, **more)
        if row.outcome != PASSES and row.client == "node":
            # A local sender gets EPERM for a dropped datagram, whatever the reason.
            assert answer == {"error": "EPERM", "at_once": True}
            return
    else:
        answer = place.tcp(row.to, row.port, **more)
    assert answer.get("name", answer.get("error")) == row.outcome


def test_masquerade_rules_use_random_ports_of_our_range(bench: Bench):
    """As kube-proxy's --random-fully: a client's next port cannot be predicted from its last one.
    The ports are not those of mode bpf.
    """
    listed = bench.run("nft -j list chain inet kbpf postrouting")
    expressions = [e for one in json.loads(listed)["nftables"] if "rule" in one for e in one["rule"]["expr"]]
    masquerades = [e["masquerade"] for e in expressions if "masquerade" in e]
    assert len(masquerades) == 2 * (2 * 2 * 3 + 3)
    for one in masquerades:
        assert {"random", "fully-random"} == set(one["flags"])
        assert one["port"] == {"range": list(STYLE.masquerade_ports)}


def test_established_connection_outlives_a_refusal(bench: Bench):
    bench.set_elements(*IPS, *elements("SERVED 10.96.0.1 80"))
    bench.neighbour.tcp(VIP, 80, keep="k")
    bench.set_elements(*IPS, *elements("REFUSED 10.96.0.1 80"))
    assert bench.neighbour.ask("talk", keep="k")["name"] == "node"
    assert bench.neighbour.tcp(VIP, 80)["error"] == REFUSED
    bench.neighbour.ask("drop", keep="k")


def test_ping_to_a_virtual_address_passes(bench: Bench):
    bench.set_elements(*EVERYTHING)

    def ping() -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as s:
            s.settimeout(30)
            s.sendto(bytes((8, 0, 0xF7, 0xFF)) + bytes(4), (VIP, 0))
            return s.recv(100)[20:]

    assert bench.there.do(ping)[:1] == b"\0"


@pytest.mark.parametrize(("bind", "to", "seen"), [(VIP, NEIGHBOUR, OWN), (VIP6, NEIGHBOUR6, OWN6)])
def test_virtual_source_address_is_masqueraded_outside(bench: Bench, bind: str, to: str, seen: str):
    bench.set_elements(*IPS)
    assert bench.node.tcp(to, 80, bind=bind)["client"] == seen
    bench.set_elements()
    assert bench.node.tcp(to, 80, bind=bind)["client"] == bind


@pytest.mark.parametrize(
    ("family", "vip", "to", "seen"),
    [("ip", VIP, NEIGHBOUR, OWN), ("ip6", VIP6, NEIGHBOUR6, OWN6)],
    ids=["IPv4", "IPv6"],
)
def test_hairpin_connection_is_masqueraded(bench: Bench, family: str, vip: str, to: str, seen: str):
    """Another table translates, as IPVS would; our table does not match its packets as its own."""
    itself = (SetName.HAIRPINS, (parse_addr(to), parse_addr(to)))
    bench.run("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
    dnat = f"type nat hook prerouting priority -100; {family} daddr {vip} tcp dport 80 dnat to {to}"
    with bench.another_table(f"{family} ipvs", dnat):
        bench.set_elements(*IPS, itself)
        answer = bench.neighbour.tcp(vip, 80)
        assert (answer["name"], answer["client"]) == ("neighbour", seen)
        bench.set_elements(*IPS)
        assert bench.neighbour.tcp(vip, 80, timeout=SILENCE)["error"] == "timeout"


ALIAS = "198.18.9.9"


def test_packets_marked_by_mode_bpf_keep_their_source(bench: Bench):
    """The packet path of mode bpf uses the same mark bit while one mode replaces the other."""
    bench.set_elements(*IPS, *elements("MASQUERADED 10.96.0.1 80"), (SetName.NODE_IPS, (parse_addr(OWN),)))
    bench.ip(f"addr add {ALIAS}/32 dev lo")
    bench.there.ip(f"route add {ALIAS} via {OWN}")
    mark = "type filter hook output priority -90; tcp dport 80 meta mark set meta mark | 0x4000"
    try:
        with bench.another_table("inet bpf", mark):
            assert bench.node.tcp(NEIGHBOUR, 80, bind=ALIAS)["client"] == ALIAS
    finally:
        bench.ip(f"addr del {ALIAS}/32 dev lo")
        bench.there.ip(f"route del {ALIAS}")


SHORT = elements("SHORT_CIRCUITS 10.96.0.1 80 6b620001")


@each_cells(
    "client, port, mark, bit, pods",
    """
short circuit, from the node        | node      | 80 | 0x6b620001
short circuit, from outside         | neighbour | 80 | 0
short circuit, a pod's device       | neighbour | 80 | 0x6b620001 | 14 | eth*
masqueraded, from outside           | neighbour | 81 | 0x4000
masqueraded, from the node          | node      | 81 | 0x4000
masqueraded, another bit            | neighbour | 81 | 0x8        | 3
masqueraded outside, from outside   | neighbour | 82 | 0x4000
masqueraded outside, from the node  | node      | 82 | 0
masqueraded outside, a pod's device | neighbour | 82 | 0          | 14 | eth0
""",
    port=int,
    bit=lambda cell: int(cell or 14),
)
def test_mark_that_ipvs_sees(bench: Bench, client, port, mark, bit, pods):
    """A client and a port, and the mark that IPVS must see; the ruleset's bit, and the devices of pods. Another table
    matches the marks where IPVS would see them: after our chains.
    """
    bench.create_table(RulesetOptions("kbpf", bit, pods))
    served = elements("SERVED 10.96.0.1 80\nSERVED 10.96.0.1 81\nSERVED 10.96.0.1 82")
    masqueraded = elements("MASQUERADED 10.96.0.1 81\nMASQUERADED_OUTSIDE 10.96.0.1 82")
    bench.set_elements(*IPS, *served, *SHORT, *masqueraded)
    hook, priority = ("output", -98) if client == "node" else ("input", 98)
    syn = f"ip daddr {VIP} tcp dport {port} tcp flags syn"
    rules = f"{syn} meta mark {mark} counter; {syn} meta mark != {mark} counter"
    with bench.another_table("inet see", f"type filter hook {hook} priority {priority}; {rules}"):
        assert getattr(bench, client).tcp(VIP, port)["name"] == "node"
        counts = re.findall(r"counter packets (\d+)", bench.run("nft list table inet see"))
        assert counts == ["1", "0"]
    bench.create_table()


def test_local_network_counts_as_pods(bench: Bench):
    """Clients of these networks get the mark, so the drop after it is not reached."""
    network = (SetName.LOCAL_NETWORKS, (Cidr(parse_addr("198.18.7.0"), 120),))
    dropped = (*IPS, *elements("DROPPED 10.96.0.1 80"), *SHORT)
    bench.set_elements(*dropped)
    assert bench.neighbour.tcp(VIP, 80, timeout=0.5)["error"] == DROPPED
    bench.set_elements(*dropped, network)
    assert bench.neighbour.tcp(VIP, 80)["name"] == "node"


def test_deleting_the_table_leaves_no_rule(bench: Bench):
    before = bench.run("nft list ruleset")
    assert "table inet kbpf" in before
    bench.do(lambda: forward_rules.run_transaction(ruleset.DELETE_TABLE))
    assert bench.run("nft list ruleset") == ""
    bench.create_table()

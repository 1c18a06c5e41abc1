# SPDX-License-Identifier: Apache-2.0
"""`--forwarding netfilter`: conntrack keeps and translates the connections. What clients see is in
test_north_south.py, and which rules are in force in neighbours/test_beside_kube_proxy.py.
"""

import contextlib
import errno
import json
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Self

import pytest
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

from kbpf.dataplane.bpf.inspect.connections import format_target
from kbpf.dataplane.bpf.inspect.monitor import Monitor
from kbpf.dataplane.bpf.maps.flow_entries import FRONTEND, is_port_reservation
from kbpf.dataplane.bpf.maps.layout import (
    COUNTS,
    PORT_SLOT,
    UNCONFIRMED_FLOWS,
    UNCONFIRMED_KEY,
    Reason,
    pack_target,
)
from kbpf.dataplane.bpf.packet_path.nat_table import TABLE
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.netfilter.conntrack import ConntrackStatus
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.objects import Protocol
from tests.lab.outside.netfilter import flush_conntrack, nft_table, objects
from tests.support.cluster.kube_objects import port as service_port
from tests.support.cluster.kube_objects import service
from tests.support.features import needs
from tests.support.lab import sockets
from tests.support.lab.dial import Dial
from tests.support.lab.events import ALL, RATE, patient, read
from tests.support.lab.field import (
    NODES4,
    NODES6,
    OUT4,
    OUT6,
    Field,
    at,
    both_families,
    check,
    crossed,
    split,
    there,
)
from tests.support.lab.lab import PATIENCE, Agent, Node, Place, ip, on, run, until
from tests.support.lab.placed import HOST_PORT
from tests.support.lab.prober import retransmitted
from tests.support.packets import packets
from tests.support.packets.packets import BROADCAST, Extension
from tests.support.packets.wire import Wire

pytestmark = needs("conntrack_nat")

SERVER_PORT = 40_300
"""Of a server of node-1."""
MACHINE_PORT = 46_000
"""Of a machine outside."""
PORT = 40_400
"""The client's own port."""
LOCAL = "10.77.0.1", "fd00:77::1"
"""Of node-1, without NodePorts."""


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    # without the agent's own connections, which count as opened
    options = ("--verify-period", "0s", "--nodeport-addresses", "primary")
    with Field("--forwarding", "netfilter", *options, name="ct", agents=1) as made:
        _closed_for(made, 120)  # by default ten
        node = made.lab.nodes[0]
        ip(*(f"addr add {address} dev lo" for address in LOCAL), netns=node.netns)
        made.unhook("a-lo", node.netns, *LOCAL, node)
        rest = made.all_of(f"16 26:UDP -> a-net target={HOST_PORT}\n17 27:UDP -> a-lo target={HOST_PORT}")
        chained = made.all_of("18 -> a-net target=30011\n28:UDP -> a-net target=30021")
        vips = [split(at("VIP", 24, v6)) for v6 in (False, True)]
        made.unhook("a-vip", node.netns, vips[0][0], vips[1][0], node)
        for (vip, _), router in zip(vips, (OUT4, OUT6), strict=True):
            ip(f"route add {vip} via {router}", netns=node.netns)
        chained += made.all_of(f"38:UDP -> a-vip target={vips[0][1]} external=Local")
        rest += made.all_of(f"13 23:UDP -> a-net target={FORGED_PORT}\n19 29:UDP -> a1 a2")
        made.create(*objects(made), *rest, *chained)
        made.settle()
        yield made


@pytest.fixture(autouse=True)
def _clean(field: Field) -> Iterator[None]:
    yield
    there(field.lab.nodes[0], flush_conntrack)


class Entry(NamedTuple):
    """An entry of node-1's conntrack table. `frontend`: what the client dialled; `seen_port`: the
    client's port as the backend sees it.
    """

    frontend: tuple[str, int]
    status: ConntrackStatus
    seen_port: int


def entries(field: Field, to: str) -> list[Entry]:
    """Those of connections to this frontend."""
    dump = partial(_dump, socket.AF_INET6 if "[" in to else socket.AF_INET)
    return [entry for entry in there(field.lab.nodes[0], dump) if entry.frontend == split(to)]


def _dump(family: int) -> list[Entry]:
    found = []
    with NFCTSocket(nfgen_family=family) as conntrack:
        for message in conntrack.dump():
            original = message.get_attr("CTA_TUPLE_ORIG")
            address = original.get_attr("CTA_TUPLE_IP")
            ports = original.get_attr("CTA_TUPLE_PROTO")
            host = address.get_attr("CTA_IP_V4_DST") or address.get_attr("CTA_IP_V6_DST")
            frontend = host, ports.get_attr("CTA_PROTO_DST_PORT")
            status = ConntrackStatus(message.get_attr("CTA_STATUS"))
            replies = message.get_attr("CTA_TUPLE_REPLY").get_attr("CTA_TUPLE_PROTO")
            seen_port = replies.get_attr("CTA_PROTO_DST_PORT")
            found.append(Entry(frontend, status, seen_port))
    return found


# ---- whose state it is ---------------------------------------------------------------------------


@crossed
def test_a_connection_is_in_conntrack_only(field: Field, protocol: str, v6: bool):
    base, own = 10 if protocol == "tcp" else 20, (NODES6 if v6 else NODES4)[0]
    before = field.agent.reasons()[Reason.NEW_FLOW]
    for kind in ("NodePort", "VIP"):
        to = at(kind, base + 2, v6)
        check(field, Dial("masqueraded", "outside", to, "b1", protocol, own))
        (*found,) = entries(field, to)
        assert len(found) == 3, "check() dials three times"
        both = ConntrackStatus.IPS_SRC_NAT | ConntrackStatus.IPS_DST_NAT
        assert {entry.status & both for entry in found} == {both}
        flows = field.agent.entries("flows").values()
        assert to not in {format_target(raw[FRONTEND]) for raw in flows}
    assert field.agent.reasons()[Reason.NEW_FLOW] - before == 6


REFUSALS = {
    "no rule": "",
    "before conntrack": "type filter hook prerouting priority raw; {} drop",
    "after conntrack": "type filter hook prerouting priority mangle; {} drop",
    "after DNAT": "type filter hook forward priority 0; ip daddr 10.244.0.0/16 {} drop",
}
"""Chains of node-1; "after DNAT", as a network policy. `{}`: the match."""
CLIENTS = UNCONFIRMED_FLOWS + 2048


def send_from_each_port(first: int, to: tuple[str, int]) -> None:
    for port in range(first, first + CLIENTS):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.bind(("", port))
            client.sendto(b"x", to)


@pytest.mark.parametrize(
    ("refusal", "pod"), [*zip(REFUSALS, ("a1", "b1") * 2, strict=True), ("before conntrack", "a-net")]
)
def test_refused_packets_fill_no_table_and_are_no_connections(field: Field, pod: str, refusal: str):
    """The entry is written before these rules see the packet. Without rules, each counts."""
    node, to = field.lab.nodes[0], at("NodePort", {"a1": 21, "b1": 22, "a-net": 26}[pod])
    dropping = REFUSALS[refusal].format("meta l4proto udp")
    with nft_table(node, "inet guard", f"chain c {{ {dropping}; }}" if dropping else ""):
        reasons, counts = field.agent.reasons(), opened(field)
        # other ports, since late replies to the clients without a rule would be replies to these
        first = 20_000 if dropping else 40_000
        there(field["outside"], partial(send_from_each_port, first, split(to)))
        counted = field.agent.reasons()[Reason.NEW_FLOW] - reasons[Reason.NEW_FLOW]
        assert counted == opened(field) - counts == (0 if dropping else CLIENTS)
        # each CPU may take a place at the same time
        most = UNCONFIRMED_FLOWS + (os.cpu_count() or 1) if dropping else CLIENTS
        assert len(entries(field, to)) <= most
        if refusal == "before conntrack":
            until("the entries are gone", lambda: not entries(field, to), 3)
    before = field.agent.reasons()[Reason.NEW_FLOW]
    seen = OUT4 if pod == "a-net" else NODES4[0]
    check(field, Dial("served again", "outside", to, pod, "udp", seen))
    assert field.agent.reasons()[Reason.NEW_FLOW] - before == 3


class Ends(NamedTuple):
    """The ends of a connection from outside, as ``address:port``. `masqueraded`: the client as its
    backend sees it. `pod`: the backend's address alone, from which errors come.
    """

    client: str
    frontend: str
    masqueraded: str
    backend: str
    pod: str


class Forgery(NamedTuple):
    """Packets that seem to belong to a refused connection to Service `number`, and the place that
    sends them. `to_mac`: instead of the node's. `tags`: VLAN tags of their frames.
    """

    packets: Callable[[Ends], list[bytes]]
    by: str = "outside"
    number: int = 21
    v6: tuple[bool, ...] = (False, True)
    to_mac: str = ""
    tags: bytes = b""


def _answer(e: Ends, **ip: Any) -> list[bytes]:
    return [packets.udp(e.backend, e.masqueraded, b"x", **ip)]


def _syn_ack(e: Ends) -> bytes:
    return packets.tcp(e.backend, e.masqueraded, flags="SA", seq=5000, ack=1001, df=False)


def _beginning(mtu: int, e: Ends) -> list[bytes]:
    """Of a SYN-ACK. Its ports may come with another first fragment, so these programs do not know its flow."""
    other = packets.tcp(f"{e.pod}:9", f"{split(e.masqueraded)[0]}:9", flags="SA", seq=5000, ack=1001, df=False)
    return packets.fragments(other, mtu)[:1]


def _ack_of_node(e: Ends) -> list[bytes]:
    return [packets.tcp(e.backend, e.client, flags="A", seq=5000, ack=7)]


def _piece_of_answer_of_node(piece: slice, e: Ends) -> list[bytes]:
    """The others have come before the request, or with other ports."""
    answer = packets.udp(e.backend, e.client, bytes(64), df=False)
    return packets.fragments(answer, 64, id=7)[piece]


def _error(kind: str, e: Ends, **ip: Any) -> list[bytes]:
    quoted = packets.udp(e.masqueraded, e.backend, b"x", **ip)
    return [packets.icmp_error(kind, e.pod, quoted)]


def _error_in_fragments(mtu: int, e: Ends) -> list[bytes]:
    quoted = packets.udp(e.masqueraded, e.backend, b"x")
    return packets.fragments(packets.icmp_error("port unreachable", e.pod, quoted, df=False), mtu)


def _error_about_short_header(e: Ends) -> list[bytes]:
    """The quoted header seems to have one word, so that its id and its fragment field are the ports for conntrack."""
    (server, source), (client, port) = split(e.frontend), split(e.client)
    fields = 0x41, 0, 600, source, port, 64, socket.IPPROTO_UDP, 0, packets.address(server), packets.address(client)
    return [packets.icmp(client, server, 3, 3, 0, struct.pack("!BBHHHBBH4s4s", *fields) + bytes(8))]


def _error_of_client(build: Callable[..., bytes], e: Ends) -> list[bytes]:
    """About an answer that it never got."""
    return [packets.icmp_error("host unreachable", split(e.client)[0], build(e.frontend, e.client))]


def _error_to_client(build: Callable[..., bytes], e: Ends) -> list[bytes]:
    return [packets.icmp_error("host unreachable", e.pod, build(e.client, e.backend))]


PADDING = bytes([0, 0, 0, 0, 0x50, 0x10]) + bytes(12)
"""Behind a frame's packet, of which it is no part: looks like the rest of a TCP header with ACK."""
PRIORITY_TAG, SERVICE_TAG = bytes.fromhex("81006000"), bytes.fromhex("88a80000")
OPTIONS, LSRR = packets.destination(), bytes([131, 7, 4, 203, 0, 113, 77])
FORGERIES = {
    "an answer": Forgery(_answer),
    "an answer in a broadcast frame": Forgery(_answer, to_mac=BROADCAST),
    "an answer behind a priority tag": Forgery(_answer, tags=PRIORITY_TAG),
    "an answer behind two priority tags": Forgery(_answer, tags=PRIORITY_TAG * 2),
    "an answer behind three tags": Forgery(_answer, tags=PRIORITY_TAG + SERVICE_TAG + PRIORITY_TAG),
    "an ACK of a pod behind two tags": Forgery(_ack_of_node, "a1", 16, tags=PRIORITY_TAG + SERVICE_TAG),
    "an answer in fragments": Forgery(lambda e: packets.fragments(*_answer(e, df=False), 28), v6=(False,)),
    "an answer behind five extension headers": Forgery(partial(_answer, extensions=[OPTIONS] * 5), v6=(True,)),
    "an answer behind five extension headers in a broadcast frame": Forgery(
        partial(_answer, extensions=[OPTIONS] * 5), v6=(True,), to_mac=BROADCAST
    ),
    "an ICMP error in a broadcast frame": Forgery(partial(_error, "port unreachable"), to_mac=BROADCAST),
    "an answer behind an authentication header": Forgery(
        partial(_answer, extensions=[Extension(51, bytes([4]) + bytes(22))]), v6=(True,)
    ),
    "a SYN-ACK": Forgery(lambda e: [_syn_ack(e)], number=11),
    "a SYN-ACK in fragments": Forgery(lambda e: packets.fragments(_syn_ack(e), 28), number=11, v6=(False,)),
    "the beginning of a SYN-ACK": Forgery(partial(_beginning, 36), number=11, v6=(False,)),
    "the beginning of a SYN-ACK without flags": Forgery(partial(_beginning, 28), number=11, v6=(False,)),
    "the beginning of a SYN-ACK before padding": Forgery(
        lambda e: [_beginning(28, e)[0] + PADDING], "a1", 11, v6=(False,)
    ),
    "an ACK": Forgery(lambda e: [packets.tcp(e.backend, e.masqueraded, flags="A", seq=5000, ack=7)], number=11),
    "an ICMP error": Forgery(partial(_error, "port unreachable")),
    "an answer with a source route": Forgery(partial(_answer, options=LSRR), v6=(False,)),
    "an ICMP error about a source route": Forgery(partial(_error, "port unreachable", options=LSRR), v6=(False,)),
    "an ICMP error about five extension headers": Forgery(
        partial(_error, "port unreachable", extensions=[OPTIONS] * 5), v6=(True,)
    ),
    "an ICMP error in fragments": Forgery(partial(_error_in_fragments, 28), v6=(False,)),
    "an ICMPv6 error in fragments": Forgery(partial(_error_in_fragments, 56), v6=(True,)),
    "an ICMP error of the client": Forgery(partial(_error_of_client, packets.udp)),
    "an ICMP error of the client, TCP": Forgery(partial(_error_of_client, packets.tcp), number=11),
    "an ICMP error of the client about a short header": Forgery(_error_about_short_header, v6=(False,)),
    "an ICMPv6 message of no known type": Forgery(
        lambda e: [
            packets.icmp(e.pod, split(e.masqueraded)[0], 100, 0, 0, packets.udp(e.masqueraded, e.backend, b"x"))
        ],
        v6=(True,),
    ),
    "an ICMP redirect": Forgery(
        lambda e: [packets.icmp(e.pod, split(e.masqueraded)[0], 5, 1, 0, packets.udp(e.masqueraded, e.backend, b"x"))],
        v6=(False,),
    ),
    "an answer of the pod itself": Forgery(lambda e: [packets.udp(e.backend, e.client, b"x")], by="a1", number=24),
    "an ICMP error of the pod itself": Forgery(
        lambda e: [packets.icmp_error("prohibited", e.pod, packets.udp(e.client, e.backend, b"x"))], by="a1", number=24
    ),
    "an answer of the node": Forgery(lambda e: [packets.udp(e.backend, e.client, b"x")], number=26),
    "the beginning of an answer of the node": Forgery(partial(_piece_of_answer_of_node, slice(1)), number=26),
    "the rest of an answer of the node": Forgery(partial(_piece_of_answer_of_node, slice(1, None)), number=26),
    "the beginning of an answer of another address": Forgery(partial(_piece_of_answer_of_node, slice(1)), number=27),
    "the rest of an answer of another address": Forgery(partial(_piece_of_answer_of_node, slice(1, None)), number=27),
    "the rest of an answer of the node by a pod": Forgery(partial(_piece_of_answer_of_node, slice(1, None)), "a1", 26),
    "an ICMP error about a request to the node": Forgery(partial(_error_to_client, packets.udp), number=26),
    "an ICMP error about a SYN to the node": Forgery(partial(_error_to_client, packets.tcp), "a1", 16),
    "an ACK of the node": Forgery(_ack_of_node, number=16),
    "an ACK of the node by a pod": Forgery(_ack_of_node, by="a1", number=16),
}
FORGED = [
    pytest.param(forgery, v6, id=f"{name}-{'v6' if v6 else 'v4'}")
    for name, forgery in FORGERIES.items()
    for v6 in forgery.v6
]
FORGED_PORT = 0xA000
"""A value of the fragment field, too: _error_about_short_header()."""
GUARD = f"""
chain c {{ type filter hook forward priority 0; ct state established,related counter accept
ct status dnat counter drop
ip saddr 10.244.0.0/16 counter drop
ip6 saddr fd00:10:244::/48 counter drop; }}
chain i {{ type filter hook input priority 0; ct state established,related counter accept
meta l4proto {{ tcp, udp }} th dport {HOST_PORT} counter drop; }}
"""


def send_frames(frames: list[bytes], node: str, mac: str, tags: bytes = b"") -> None:
    """Sends packets to this MAC address by the device that leads to the node."""
    route = json.loads(run("ip", "-j", "route", "get", node))[0]
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as device:
        device.bind((route["dev"], 0))
        for one in frames:
            frame = packets.frame(one, to=mac)
            device.send(frame[:12] + tags + frame[12:])


def mac_towards(towards: str) -> str:
    """The MAC address of this node's device that leads to an address."""
    device = json.loads(run("ip", "-j", "route", "get", towards))[0]["dev"]
    return json.loads(run("ip", "-j", "link", "show", "dev", device))[0]["address"]


class Refused(NamedTuple):
    """A connection from outside to Service `number`, which GUARD refuses."""

    field: Field
    ends: Ends
    request: bytes
    macs: dict[str, str]

    @classmethod
    def of(cls, field: Field, number: int, v6: bool) -> Self:
        node = field.lab.nodes[0]
        own, out = (NODES6[0], OUT6) if v6 else (NODES4[0], OUT4)
        of_node, to = number in (16, 26, 27), at("NodePort", number, v6)
        pod = LOCAL[v6] if number == 27 else own if of_node else field["a1"].ip6 if v6 else field["a1"].ip
        end = packets.end
        ends = Ends(end(out, FORGED_PORT), to, end(own, FORGED_PORT), end(pod, HOST_PORT if of_node else 8080), pod)
        macs = {"outside": out, "a1": field["a1"].ip}
        macs = {name: there(node, partial(mac_towards, towards)) for name, towards in macs.items()}
        return cls(field, ends, opening(number)(ends.client, to), macs)

    def send(self, *frames: bytes, by: str = "outside", to_mac: str = "", tags: bytes = b"") -> None:
        node = split(self.ends.masqueraded)[0]
        there(self.field[by], partial(send_frames, frames, node, to_mac or self.macs[by], tags))

    def ask(self) -> ConntrackStatus:
        """The client's packet, which is refused; the status of its entry."""
        node = self.field.lab.nodes[0]
        before = sum(counted(node, "drop"))
        self.send(self.request)
        until("it is refused", lambda: sum(counted(node, "drop")) > before)
        assert set(counted(node, "accept")) == {0}
        (entry,) = entries(self.field, self.ends.frontend)
        return entry.status


@contextlib.contextmanager
def refusing(field: Field, number: int, v6: bool) -> Iterator[Refused]:
    """GUARD is in force, and has refused the client's first packet."""
    with nft_table(field.lab.nodes[0], "inet guard", GUARD):
        refused = Refused.of(field, number, v6)
        refused.ask()
        yield refused


def opening(number: int) -> Callable[[str, str], bytes]:
    """Builds a client's first packet to a Service of this number."""
    return partial(packets.tcp, flags="S") if number < 20 else partial(packets.udp, payload=b"hello\n")


@pytest.mark.parametrize(("forgery", "v6"), FORGED)
def test_a_forged_answer_does_not_establish_a_refused_connection(field: Field, forgery: Forgery, v6: bool):
    """A usual firewall accepts packets of established connections and errors about them."""
    with refusing(field, forgery.number, v6) as refused:
        before = field.agent.reasons()[Reason.INVALID]
        refused.send(*forgery.packets(refused.ends), by=forgery.by, to_mac=forgery.to_mac, tags=forgery.tags)
        until("it is dropped", lambda: field.agent.reasons()[Reason.INVALID] > before)
        assert not refused.ask() & ConntrackStatus.IPS_SEEN_REPLY


@pytest.mark.parametrize("number", [11, 21, 24])
@both_families
def test_an_answer_that_the_programs_have_not_seen_establishes_nothing(field: Field, number: int, v6: bool):
    """It may be just ahead of the entry, or come by a device without programs."""
    with refusing(field, number, v6) as refused:
        _see_answer(field, refused.ends, "tcp" if number < 20 else "udp")
        (entry,) = entries(field, refused.ends.frontend)
        assert entry.status & ConntrackStatus.IPS_SEEN_REPLY
        if number < 20 and not v6:  # conntrack alone would know that it is a SYN
            before = field.agent.reasons()[Reason.INVALID]
            refused.send(*packets.fragments(refused.request, 28))
            until("they are dropped", lambda: field.agent.reasons()[Reason.INVALID] > before)
        assert not refused.ask() & ConntrackStatus.IPS_SEEN_REPLY


def _see_answer(field: Field, e: Ends, protocol: str, *more: str) -> None:
    """Lets conntrack remember an answer to this client."""
    host, port = split(e.client)
    family = "ipv6" if ":" in host else "ipv4"
    words = ("-p", protocol, "-s", host, "--sport", str(port), "-u", "SEEN_REPLY", *more)
    on(field.lab.nodes[0], "conntrack", "-U", "-f", family, *words)


def test_an_answer_just_ahead_of_the_first_packet_establishes_nothing(field: Field):
    """The packet has passed all rules, and waits for its backend's MAC address. So what conntrack takes for an
    answer cannot be one.
    """
    node, pod = field.lab.nodes[0], field["a1"].ip
    device = json.loads(on(node, "ip", "-j", "route", "get", pod))[0]["dev"]
    mac = json.loads(there(field["a1"], partial(run, "ip", "-j", "link", "show", "eth0")))[0]["address"]
    refused = Refused.of(field, 21, False)
    before = field.agent.reasons()
    ip("link set eth0 arp off", netns=field["a1"].netns)
    try:
        ip(f"neigh del {pod} dev {device}", netns=node.netns)
        with Wire(field["a1"].netns, "eth0", tap=True) as wire:
            refused.send(refused.request)
            until("the entry is written", lambda: len(entries(field, refused.ends.frontend)) == 1)
            _see_answer(field, refused.ends, "udp")
            ip(f"neigh replace {pod} lladdr {mac} dev {device} nud permanent", netns=node.netns)
            until("it is dropped", lambda: field.agent.reasons()[Reason.INVALID] > before[Reason.INVALID])
            assert wire.soon(lambda packet: packet.protocol == "udp", 0.2) is None
        assert field.agent.reasons()[Reason.NEW_FLOW] == before[Reason.NEW_FLOW]
    finally:
        ip("link set eth0 arp on", netns=field["a1"].netns)
        ip(f"neigh del {pod} dev {device}", netns=node.netns)


@pytest.mark.parametrize("number", [26, 27])
@pytest.mark.parametrize("by", ["outside", "a1"])
@both_families
def test_nothing_arrives_in_the_name_of_the_node(field: Field, by: str, number: int, v6: bool):
    """A driver hands up several packets at once, which all pass the programs before conntrack sees the first. So they
    cannot compare an answer with a request that follows it.
    """
    refused = Refused.of(field, number, v6)
    client = packets.end(OUT6 if v6 else OUT4, PORT)  # of no flow
    ends, before = refused.ends._replace(client=client, masqueraded=client), field.agent.reasons()[Reason.INVALID]
    refused.send(*_ack_of_node(ends), *_answer(ends), by=by)
    until("they are dropped", lambda: field.agent.reasons()[Reason.INVALID] == before + 2)


@pytest.mark.parametrize("size", [100, 3000])
@both_families
def test_the_nodes_own_multicast_comes_back(field: Field, size: int, v6: bool):
    """Without a link-layer header: these bytes would be a packet that hides its ports."""
    own, group = (NODES6[0], "ff0e::7:7") if v6 else (NODES4[0], "239.7.7.7")

    def exchange_in_group() -> int:
        family, device = (socket.AF_INET6, socket.if_nametoindex("eth0")) if v6 else (socket.AF_INET, 0)
        with socket.socket(family, socket.SOCK_DGRAM) as member, socket.socket(family, socket.SOCK_DGRAM) as sender:
            member.bind(("", PORT))
            member.settimeout(PATIENCE)
            sender.bind((own, 0))
            if v6:
                place = socket.inet_pton(family, group) + struct.pack("=I", device)
                member.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, place)
                sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, device)
            else:
                place = socket.inet_aton(group) + socket.inet_aton(own)
                member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, place)
                sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own))
            sender.sendto(bytes(size), (group, PORT))
            return len(member.recv(10_000))

    assert there(field.lab.nodes[0], exchange_in_group) == size


def nat_table(node: Node) -> str:
    return on(node, "nft", "list", "table", "inet", TABLE)


UDP_REFUSED = f"chain d {{ type filter hook prerouting priority raw; ip saddr {OUT4} meta l4proto udp drop; }}"


def test_no_key_of_a_refused_flow_stays(field: Field):
    """A client that uses each port for two frontends of one backend. Nor do entries of TCP stay that seem to be
    answered, so that others find room.
    """
    with nft_table(field.lab.nodes[0], "inet guard", GUARD + UDP_REFUSED):
        answered = Refused.of(field, 11, False)
        answered.ask()
        _see_answer(field, answered.ends, "tcp", "--state", "ESTABLISHED")
        for kind in ("NodePort", "VIP"):
            there(field["outside"], partial(send_from_each_port, 40_000, split(at(kind, 21))))
            until("the entries are gone", lambda kind=kind: not entries(field, at(kind, 21)), 5)
        assert not entries(field, answered.ends.frontend)
    keys, slots = field.agent.entries("unconfirmed"), field.agent.entries("port_slots").values()
    assert len(keys) == sum(PORT_SLOT.unpack(slot)[1] for slot in slots) <= UNCONFIRMED_FLOWS + (os.cpu_count() or 1)


@pytest.fixture(scope="module")
def unseen() -> Iterator[Field]:
    """Pods whose devices have no programs."""
    with Field("--forwarding", "netfilter", "--exclude-device", "p*", name="cu", agents=1) as made:
        rest = made.all_of(f"16 26:UDP -> a-net target={HOST_PORT}")
        made.create(*made.all_of("17 27:UDP -> a1 a2\n18 28:UDP -> a1 a2 external=Local"), *rest)
        made.settle()
        yield made


@pytest.mark.parametrize("number", [17, 18, 27, 28])
@both_families
def test_a_flow_that_leaves_by_a_device_without_programs_counts_at_once(unseen: Field, number: int, v6: bool):
    """It has no key, so other clients' refused flows cannot end it."""
    before, kind = unseen.agent.reasons()[Reason.NEW_FLOW], socket.SOCK_STREAM if number < 20 else socket.SOCK_DGRAM
    with connected(unseen["outside"], PORT, at("NodePort", number, v6), kind) as client:
        assert len({exchange(client) for _ in range(8)} - {""}) == 1
        assert unseen.agent.reasons()[Reason.NEW_FLOW] - before == 1
        assert not unseen.agent.entries("unconfirmed")


@both_families
def test_a_flow_by_a_route_that_encapsulates_counts_at_once(unseen: Field, v6: bool):
    """The kernel does not tell its device."""
    node, pod = unseen.lab.nodes[0].netns, unseen["a1"].ip6 if v6 else unseen["a1"].ip
    there(unseen.lab.nodes[0], flush_conntrack)
    ip(f"route add {pod} encap ip id 7 dst 192.0.2.1 dev p1 metric 1", netns=node)
    try:
        test_a_flow_that_leaves_by_a_device_without_programs_counts_at_once(unseen, 27, v6)
    finally:
        ip(f"route del {pod} metric 1", netns=node)


@pytest.mark.parametrize("number", [16, 26])
@pytest.mark.parametrize("others", [0, CLIENTS], ids=["it goes on", "others begin"])
@both_families
def test_a_flow_that_the_node_answers_by_a_device_without_programs(unseen: Field, others: int, number: int, v6: bool):
    """Nobody else can have answered. So it counts with its next packet, and others' refused flows do not end it.
    `kbpf monitor` shows it.
    """
    node, outside = unseen.lab.nodes[0], unseen["outside"]
    to, client = at("NodePort", number, v6), OUT6 if v6 else OUT4
    ends = pack_target(parse_addr(client), PORT + number, Protocol.TCP if number < 20 else Protocol.UDP)
    mac = there(node, partial(mac_towards, client))
    send = partial(send_frames, [opening(number)(packets.end(client, PORT + number), to)], split(to)[0], mac)
    there(node, flush_conntrack)
    ip(f"route add {client} dev p1", netns=node.netns)

    def answered() -> list[Entry]:
        return [entry for entry in entries(unseen, to) if entry.status & ConntrackStatus.IPS_SEEN_REPLY]

    try:
        before = unseen.agent.reasons()[Reason.NEW_FLOW]
        with patient(), Monitor(unseen.agent.pin_dir, RATE, ALL) as monitor:
            there(outside, send)
            until("it is answered", answered)
            if others:
                with nft_table(node, "inet guard", UDP_REFUSED):
                    there(outside, partial(send_from_each_port, 40_000, (NODES4[0], 30_026)))
            else:
                there(outside, send)
            until("it counts", lambda: unseen.agent.reasons()[Reason.NEW_FLOW] - before == 1)
            assert len([event for event in read(monitor) if event.seen_by == "packet"]) == 1
        assert len(answered()) == 1
        assert not [key for key in unseen.agent.entries("unconfirmed") if key.startswith(ends)]
    finally:
        ip(f"route del {client} dev p1", netns=node.netns)


@pytest.mark.parametrize(("number", "kind"), [(11, socket.SOCK_STREAM), (21, socket.SOCK_DGRAM)])
@both_families
def test_keys_of_a_flow_that_has_ended_refuse_nothing(field: Field, number: int, kind: socket.SocketKind, v6: bool):
    """A connection of the node's own to the pod has its ends now."""
    node = field.lab.nodes[0]
    with refusing(field, number, v6) as refused:
        there(node, flush_conntrack)
        before = field.agent.reasons()[Reason.NEW_FLOW]
        with sockets.socket_in(node.netns, socket.AF_INET6 if v6 else socket.AF_INET, kind) as client:
            client.settimeout(PATIENCE)
            client.bind(split(refused.ends.masqueraded))
            client.connect(split(refused.ends.backend))
            assert exchange(client) == "a1"
            if kind is socket.SOCK_STREAM:
                assert not retransmitted(client)
                reset(client)  # in TIME_WAIT it would keep the port from the clients of later tests
        assert field.agent.reasons()[Reason.NEW_FLOW] == before


@both_families
def test_an_answer_that_the_node_forges_confirms_no_flow(field: Field, v6: bool):
    """A raw socket of the node speaks for the pod."""
    with refusing(field, 24, v6) as refused, Wire(field.lab.outside, field.lab.prefix, tap=True) as wire:
        before = field.agent.reasons()[Reason.NEW_FLOW]
        answer = packets.udp(refused.ends.backend, refused.ends.client, b"x")
        there(field.lab.nodes[0], partial(send_raw, answer, split(refused.ends.client)[0]))
        assert wire.soon(lambda packet: packet.source == refused.ends.frontend, PATIENCE)
        assert field.agent.reasons()[Reason.NEW_FLOW] == before


def send_raw(packet: bytes, to: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        raw.sendto(packet, (to, 0))


@both_families
def test_what_the_node_rejects_counts_as_no_connection(field: Field, v6: bool):
    """The firewall's own RST leaves with the entry of the flow."""
    rule = f"chain i {{ type filter hook input priority 0; tcp dport {HOST_PORT} reject with tcp reset; }}"
    with nft_table(field.lab.nodes[0], "inet guard", rule):
        before = field.agent.reasons()[Reason.NEW_FLOW]
        with pytest.raises(ConnectionRefusedError):
            connected(field["outside"], FORGED_PORT, at("NodePort", 16, v6))
        assert field.agent.reasons()[Reason.NEW_FLOW] == before


@pytest.mark.parametrize(("chained", "number"), [(18, 11), (28, 21)])
@both_families
def test_a_chained_service_switches_no_check_off(field: Field, chained: int, number: int, v6: bool):
    """Its endpoint is the NodePort of the other Service."""
    with refusing(field, number, v6) as refused:
        refused.send(opening(number)(refused.ends.client, at("NodePort", chained, v6)))
        _expect_no_forged_answer(refused)


@pytest.mark.parametrize("number", [11, 21])
@both_families
def test_a_service_at_a_pods_address_switches_no_check_off(field: Field, number: int, v6: bool):
    """Anybody may have created it."""
    pod = field["a1"]
    row = service_port(8080, protocol="TCP" if number < 20 else "UDP")
    families, ips = ("IPv4", "IPv6"), ("10.96.0.77", "fd00:10:96::77")
    stranger = service("stranger", row, cluster_ips=ips, families=families, external_ips=[pod.ip, pod.ip6])
    with field.given(stranger, field.slice("stranger", "a3")):
        field.settle()
        with refusing(field, number, v6) as refused:
            _expect_no_forged_answer(refused)


@pytest.mark.parametrize("first", ["chained", "other"])
@both_families
def test_two_flows_of_chained_services_have_a_key_each(field: Field, first: str, v6: bool):
    """An endpoint of Service 38 is the VIP of Service 24, and neither masquerades."""
    node, client, to = field.lab.nodes[0], OUT6 if v6 else OUT4, [at("NodePort", 38, v6), at("VIP", 24, v6)]
    mac, begin = there(node, partial(mac_towards, client)), 50_000 if first == "chained" else 50_100
    ports = range(begin, begin + 20)
    before = set(field.agent.entries("unconfirmed"))
    with nft_table(node, "inet guard", GUARD):
        order = to if first == "chained" else to[::-1]
        frames = [packets.udp(packets.end(client, port), each, b"x") for port in ports for each in order]
        there(field["outside"], partial(send_frames, frames, (NODES6 if v6 else NODES4)[0], mac))
        until("all are refused", lambda: sum(counted(node, "drop")) >= len(frames))
        assert len(set(field.agent.entries("unconfirmed")) - before) == 2 * len(ports)
        assert [len(entries(field, each)) for each in order] == [len(ports)] * 2


@pytest.mark.parametrize("number", [11, 21])
@both_families
def test_a_frame_that_has_met_no_rules_takes_no_key(field: Field, number: int, v6: bool):
    """As a macvlan pod sends it by the uplink of the node."""
    node = field.lab.nodes[0]
    with refusing(field, number, v6) as refused:
        ends = refused.ends
        build = partial(packets.tcp, flags="SA") if number < 20 else partial(packets.udp, payload=b"x")
        there(node, partial(send_frames, [build(ends.frontend, ends.client)], split(ends.client)[0], BROADCAST))
        _expect_no_forged_answer(refused)


@pytest.mark.parametrize(("number", "other"), [(12, 13), (22, 23)])
@both_families
def test_a_connection_of_the_backend_takes_no_key(field: Field, number: int, other: int, v6: bool):
    """It has the port that the refused client's answers come from, and dials a Service whose endpoint is where they
    go.
    """
    node, pod = field.lab.nodes[0], field["b1"]
    own, out = (NODES6[0], OUT6) if v6 else (NODES4[0], OUT4)
    backend, seen = packets.end(pod.ip6 if v6 else pod.ip, 8080), packets.end(own, FORGED_PORT)
    mac, build, to = there(node, partial(mac_towards, out)), opening(number), at("NodePort", number, v6)
    answer = packets.tcp(backend, seen, flags="A", seq=5000, ack=1) if number < 20 else packets.udp(backend, seen, b"x")
    rule = f"chain j {{ type filter hook input priority 1; th dport {FORGED_PORT} counter drop; }}"

    def send(frame: bytes) -> None:
        there(field["outside"], partial(send_frames, [frame], own, mac))

    with nft_table(node, "inet guard", GUARD + rule):
        send(build(packets.end(out, FORGED_PORT), to))
        until("it is refused", lambda: sum(counted(node, "drop")) == 1)
        send(build(backend, at("NodePort", other, v6)))
        until("so is the other", lambda: sum(counted(node, "drop")) == 2)
        before = field.agent.reasons()[Reason.INVALID]
        send(answer)
        until("it is dropped", lambda: field.agent.reasons()[Reason.INVALID] > before)
        (entry,) = entries(field, to)
        assert not entry.status & ConntrackStatus.IPS_SEEN_REPLY


@pytest.mark.parametrize(
    ("number", "kind", "direct"),
    [(19, socket.SOCK_STREAM, False), (29, socket.SOCK_DGRAM, False), (24, socket.SOCK_DGRAM, True)],
    ids=["tcp", "udp", "straight to the pod"],
)
def test_a_key_that_is_left_ends_no_later_connection(field: Field, number: int, kind: socket.SocketKind, direct: bool):
    """Of a client that a rule in raw has refused once; now it has a connection from the same port, perhaps to the
    other backend.
    """
    node, to, ports = field.lab.nodes[0], at("NodePort", number), range(59_500, 59_512)
    mac = there(node, partial(mac_towards, OUT4))
    refused = f"chain d {{ type filter hook prerouting priority raw; th dport {split(to)[1]} drop; }}"
    with nft_table(node, "inet guard", refused):
        frames = [opening(number)(packets.end(OUT4, port), to) for port in ports]
        there(field["outside"], partial(send_frames, frames, NODES4[0], mac))
        until("their entries have expired", lambda: not entries(field, to))
    route = partial(ip, netns=field["outside"].netns)
    with contextlib.ExitStack() as stack:
        if direct:
            to = packets.end(field["a1"].ip, 8080)
            route(f"route add {field['a1'].ip} via {NODES4[0]}")
            stack.callback(route, f"route del {field['a1'].ip}")
        clients = [stack.enter_context(connected(field["outside"], port, to, kind)) for port in ports]
        first = [exchange(client) for client in clients]
        with nft_table(node, "inet guard", UDP_REFUSED):
            there(field["outside"], partial(send_from_each_port, 40_000, split(at("NodePort", 21))))
        assert len(entries(field, to)) == len(ports)
        assert [exchange(client) for client in clients] == first


@pytest.mark.parametrize("number", [11, 21])
@both_families
def test_what_leaves_without_an_entry_is_of_no_refused_flow(field: Field, number: int, v6: bool):
    """As a flowtable sends it, past the rules; here it is a packet socket of the node."""
    node = field.lab.nodes[0]
    with refusing(field, number, v6) as refused:
        before = field.agent.reasons()[Reason.INVALID]
        request = opening(number)(refused.ends.masqueraded, refused.ends.backend)
        with pytest.raises(OSError, match=os.strerror(errno.ENOBUFS)):  # dropped as it leaves
            there(node, partial(send_frames, [request], refused.ends.pod, BROADCAST))
        assert field.agent.reasons()[Reason.INVALID] - before == 1


def _expect_no_forged_answer(refused: Refused) -> None:
    field, before = refused.field, refused.field.agent.reasons()[Reason.INVALID]
    refused.send(_syn_ack(refused.ends), *_answer(refused.ends))  # one of them is of its protocol
    until("it is dropped", lambda: field.agent.reasons()[Reason.INVALID] > before)
    assert not refused.ask() & ConntrackStatus.IPS_SEEN_REPLY


@pytest.mark.parametrize(("chained", "number"), [(18, 11), (28, 21)])
@both_families
def test_a_port_refused_at_a_chained_service_is_served_at_the_other(field: Field, chained: int, number: int, v6: bool):
    """Its endpoint is the other's NodePort. DNAT is done once, so the node refuses it, as with kube-proxy."""
    kind, port = (socket.SOCK_STREAM, socket.SOCK_DGRAM)[number > 20], PORT + 2 * number + v6
    family = socket.AF_INET6 if v6 else socket.AF_INET
    with sockets.socket_in(field["outside"].netns, family, kind) as client:
        client.settimeout(PATIENCE)
        client.bind(("", port))
        with contextlib.suppress(ConnectionRefusedError):
            client.connect(split(at("NodePort", chained, v6)))
            assert exchange(client) == ""
    with connected(field["outside"], port, at("NodePort", number, v6), kind) as client:
        assert exchange(client) == "a1"


@pytest.mark.parametrize("port", [30_021, 31_999], ids=["a NodePort's number", "another"])
def test_an_error_about_a_one_way_flow_of_a_pod_passes(field: Field, port: int):
    """No Service: this node forwards only one direction, so conntrack has seen no answer."""
    node = field.lab.nodes[0]
    ends = f"{OUT4}:{FORGED_PORT}", f"{field['a1'].ip}:{port}"
    mac = there(node, partial(mac_towards, OUT4))
    error = packets.icmp_error("host unreachable", OUT4, packets.udp(*reversed(ends), b"x"))
    before = field.agent.reasons()[Reason.INVALID]
    with Wire(field["a1"].netns, "eth0", tap=True) as pod:
        there(field["outside"], partial(send_frames, [packets.udp(*ends, b"hello\n"), error], NODES4[0], mac))
        pod.expect(lambda packet: packet.protocol == "icmp" and packet.source == OUT4)
    assert field.agent.reasons()[Reason.INVALID] == before


def counted(node: Node, verdict: str) -> list[int]:
    """How many packets each rule of GUARD with this verdict has met: those that accept do so for
    established and related ones.
    """
    rules = on(node, "nft", "list", "table", "inet", "guard")
    return [int(n) for n in re.findall(rf"packets (\d+) bytes \d+ {verdict}", rules)]


def opened(field: Field) -> int:
    """The connections that are counted for all backends of node-1."""
    return sum(COUNTS.unpack(raw)[0] for raw in field.agent.entries("counts").values())


LOW, HIGH = Config().masquerade_ports
NODE_PORTS = {socket.SOCK_STREAM: 30_015, socket.SOCK_DGRAM: 30_025}
"""Of other Services."""


@pytest.mark.parametrize(
    ("number", "pod", "v6"), [(11, "a1", True), (12, "b1", False), (21, "a1", False), (22, "b1", True)]
)
@pytest.mark.parametrize("port", [LOW, HIGH, *NODE_PORTS.values(), HIGH + 1, PORT])
def test_a_client_gets_a_port_of_no_other_flow_and_of_no_frontend(
    field: Field, port: int, number: int, pod: str, v6: bool
):
    """Conntrack does not know the flows of the node's sockets, which have ports up to HIGH. And a
    backend that replies to the node's address and a NodePort seems to dial that.
    """
    kind = socket.SOCK_STREAM if number < 20 else socket.SOCK_DGRAM
    frontends = [at(way, number, v6) for way in ("NodePort", "VIP")]
    seen = []
    for to in frontends:
        with connected(field["outside"], port, to, kind) as client:
            assert exchange(client) == pod
            (entry,) = entries(field, to)
            seen.append(entry.seen_port)
    assert (seen[0] == port) == (port > HIGH and port != NODE_PORTS[kind])
    assert seen[1] != seen[0]
    assert min(seen) > HIGH
    assert NODE_PORTS[kind] not in seen


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
@pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
def test_a_client_gets_no_port_of_a_server_of_the_node(field: Field, kind: socket.SocketKind, v6: bool):
    """Its backend may be a machine, and talk to that server from the backend's port."""
    node, own = field.lab.nodes[0], (NODES6 if v6 else NODES4)[0]
    to = at("NodePort", 12 if kind is socket.SOCK_STREAM else 22, v6)
    with there(node, lambda: socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, kind)) as server:
        server.bind((own, SERVER_PORT))
        if kind is socket.SOCK_STREAM:
            server.listen()
        with connected(field["outside"], SERVER_PORT, to, kind) as client:
            assert exchange(client) == "b1"
            (entry,) = entries(field, to)
    assert entry.seen_port > HIGH
    assert entry.seen_port != SERVER_PORT


def test_a_pod_gets_no_port_of_a_connection_in_conntrack(field: Field):
    """Of a hostPort, to which a machine talks that the pod's Service names."""
    node, pod, own = field.lab.nodes[0], field["a3"], NODES4[0]
    rule = f"ip daddr {own} udp dport 7001-7012 dnat to {field['a1'].ip}:8080;"
    gate = there(node, partial(mac_towards, pod.ip))
    with (
        nft_table(node, "ip hostport", f"chain p {{ type nat hook prerouting priority dstnat; {rule} }}"),
        field.given(*field.all_ways(31, "outside", "UDP", target=MACHINE_PORT)),
        there(field["outside"], lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as machine,
    ):
        machine.bind((OUT4, MACHINE_PORT))
        machine.settimeout(PATIENCE)
        for port in range(7001, 7013):
            for _ in range(2):
                machine.sendto(b"hello\n", (own, port))
                answer, by = machine.recvfrom(2000)
                assert (json.loads(answer)["name"], by) == ("a1", (own, port))
                attack = packets.udp(f"{pod.ip}:{port}", at("NodePort", 31), b"attack")
                there(pod, partial(send_frames, [attack], own, gate))
                assert machine.recvfrom(2000)[0] == b"attack"


def connected(place: Place | Node, port: int, to: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A socket of this place with this port; no hook serves it."""
    client = sockets.connect(place.netns, *split(to), PATIENCE, port, kind)
    if kind is socket.SOCK_STREAM:  # that a lost SYN is retransmitted would hide it
        assert retransmitted(client) == 0
    return client


@pytest.mark.parametrize("first", ["the node", "the client"])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
def test_a_client_and_a_socket_of_the_node_have_different_ports(field: Field, kind: socket.SocketKind, first: str):
    """Both dial one backend of the other node from one port. The node has a route to it by the
    device that its socket sends by, so the socket's address need not change.
    """
    node, number = field.lab.nodes[0], 12 if kind is socket.SOCK_STREAM else 22
    ways = [(node, at("ClusterIP", number)), (field["outside"], at("NodePort", number))]
    port = 45_000 + number + (first == "the node")
    ip("route replace 10.96.0.0/16 via 198.18.0.254", netns=node.netns)
    try:
        with contextlib.ExitStack() as stack:
            clients = []
            for place, to in ways if first == "the node" else reversed(ways):
                clients.append(stack.enter_context(connected(place, port, to, kind)))
                assert exchange(clients[-1]) == "b1"
            for client in clients * 2:
                assert exchange(client) == "b1"
            for client in clients:
                client.setblocking(False)
                with pytest.raises(BlockingIOError):
                    client.recv(1000)
    finally:
        ip("route del 10.96.0.0/16 via 198.18.0.254", "route add unreachable 10.96.0.0/16", netns=node.netns)


def test_ports_of_kube_proxys_clients_are_given_to_no_pod(field: Field):
    """kube-proxy's connections have ports of our range, from which pods get theirs that no hook
    serves.
    """
    node, pod = field.lab.nodes[0], field["a1"].ip
    rules = f"""
    chain p {{ type nat hook prerouting priority dstnat; udp dport 7777 dnat to {pod}:8080; }}
    chain q {{ type nat hook postrouting priority srcnat
    udp dport 8080 ct status dnat snat to {NODES4[0]}:20000; }}"""
    dials = partial(connected, kind=socket.SOCK_DGRAM)
    with nft_table(node, "ip old", rules), contextlib.ExitStack() as stack:
        old = stack.enter_context(dials(field["outside"], 46_000, f"{NODES4[0]}:7777"))
        assert exchange(old) == "a1"
        restart(field.agent, "--masquerade-ports", "20000-20001")
        stack.callback(restart, field.agent)
        until("its port is reserved", lambda: any(map(is_port_reservation, field.agent.entries("flows").values())))
        before = field.agent.reasons()[Reason.NO_SNAT_PORT]
        one, other = (stack.enter_context(dials(field["a2"], port, at("NodePort", 21))) for port in (46_001, 46_002))
        assert exchange(one) == "a1"
        other.send(b"hello\n")
        until("it gets no port", lambda: field.agent.reasons()[Reason.NO_SNAT_PORT] > before)
        for client in (old, one):
            assert exchange(client) == "a1"
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1000)


def _take_ports(backend: str, own: str) -> None:
    """Fills conntrack with flows from the last ports of this node to a backend."""
    with NFCTSocket() as conntrack:
        for port in range(64_512, 65_536):
            ends = {"proto": socket.IPPROTO_UDP, "family": socket.AF_INET}
            there, back = (
                NFCTAttrTuple(saddr=own, daddr=backend, sport=port, dport=8080, **ends),
                NFCTAttrTuple(saddr=backend, daddr=own, sport=8080, dport=port, **ends),
            )
            conntrack.entry("add", tuple_orig=there, tuple_reply=back, timeout=600)


def test_a_client_without_a_free_port_is_dropped_and_counted(field: Field):
    """The kernel would choose any port, maybe one of a flow of the node's sockets."""
    node, to = field.lab.nodes[0], at("NodePort", 22)
    restart(field.agent, "--masquerade-ports", "40000-64511")  # as few ports are left as may be
    there(node, partial(_take_ports, field["b1"].ip, NODES4[0]))
    before = field.agent.reasons()[Reason.NO_SNAT_PORT]
    with connected(field["outside"], 40_000, to, socket.SOCK_DGRAM) as client:
        client.send(b"hello\n")
        until("it is dropped", lambda: field.agent.reasons()[Reason.NO_SNAT_PORT] == before + 1)
        assert entries(field, to) == []
        there(node, flush_conntrack)
        assert exchange(client) == "b1"
    restart(field.agent)


# ---- entries that are in the way -----------------------------------------------------------------


def close_after_the_server(client: socket.socket) -> None:
    """The server closes after `bye`. Conntrack: TIME_WAIT."""
    client.sendall(b"bye\n")
    while client.recv(100):
        pass
    client.close()


def reset(client: socket.socket) -> None:
    """Conntrack: CLOSE."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("end", [close_after_the_server, reset])
@pytest.mark.parametrize(("number", "pod", "v6"), [(11, "a1", False), (12, "b1", True), (14, "a1", False)])
def test_a_port_is_reused_at_once(field: Field, number: int, pod: str, end: Callable[[socket.socket], None], v6: bool):
    """The entry of a connection that has ended makes way for one with NAT."""
    to = at("NodePort", number, v6)
    for _ in range(3):
        with connected(field["outside"], PORT, to) as client:
            assert exchange(client) == pod
            end(client)
        (entry,) = entries(field, to)
        assert entry.status & ConntrackStatus.IPS_DST_NAT


@both_families
def test_a_reset_that_ends_its_own_entry_reaches_the_backend(field: Field, v6: bool):
    """The entry of a connection that has been reset may live for no time at all."""
    connections = "ss", "-Htn", "state", "established", "sport", "=", ":8080"
    _closed_for(field, 0)
    try:
        with connected(field["outside"], PORT, at("NodePort", 11, v6)) as client:
            assert exchange(client) == "a1"
            assert on(field["a1"], *connections)
            reset(client)
        until("the server's connection ends", lambda: not on(field["a1"], *connections))
    finally:
        _closed_for(field, 120)


def _closed_for(field: Field, seconds: int) -> None:
    on(field.lab.nodes[0], "sysctl", "-qw", f"net.netfilter.nf_conntrack_tcp_timeout_close={seconds}")


def test_a_flow_is_not_taken_for_an_earlier_one_that_is_settled(field: Field):
    """The client's port is used again after as many connections as the queue has room for, so the
    oldest key in it is that of the new connection, whose first packet has not left yet.
    """
    ends = ((field.lab.nodes[0].ip, PORT), (field["a1"].ip, 8080))
    key = b"".join(pack_target(parse_addr(host), port, Protocol.TCP) for host, port in ends)
    with Map.open(field.agent.map_path("unconfirmed_queue")) as queue:
        while queue.push(UNCONFIRMED_KEY.pack(key, 0)):
            pass
    for _ in range(2):
        with connected(field["outside"], PORT, at("NodePort", 11)) as client:
            reset(client)


@both_families
def test_a_flow_that_began_before_its_service_is_translated(field: Field, v6: bool):
    """Its entry has no NAT, and each datagram would keep it."""
    number = 56 if v6 else 55
    to = at("NodePort", number, v6)
    with connected(field["outside"], 0, to, socket.SOCK_DGRAM) as client:
        assert exchange(client) == "", "refused"
        assert len(entries(field, to)) == 1
        with field.given(*field.all_ways(number, "a1", "UDP")):
            assert exchange(client) == "a1"


def exchange(client: socket.socket) -> str:
    """Sends a line and returns the name of the server that answers, "" if it is refused."""
    client.send(b"hello\n")
    with contextlib.suppress(ConnectionRefusedError):
        return json.loads(client.recv(1000))["name"]
    return ""


# ---- UDP flows whose backend or frontend is gone -------------------------------------------------


@both_families
def test_udp_flows_of_a_deleted_service_end(field: Field, v6: bool):
    """They are refused, as the next datagram of a new client is."""
    client, number = field["outside"], 58 if v6 else 57
    names = {kind: at(kind, number, v6) for kind in ("NodePort", "VIP")}
    with field.given(*field.all_ways(number, "b1", "UDP")):
        for name, to in names.items():
            assert client.udp(*split(to), keep=name, connected=True).get("name") == "b1"
    for name, to in names.items():
        # Each datagram keeps the entry, so that it does not just expire.
        until(
            f"{to} does not answer, without NAT",
            lambda name=name, to=to: (
                "name" not in client.ask("talk", keep=name, timeout=0.3)
                and not any(ConntrackStatus.IPS_DST_NAT in entry.status for entry in entries(field, to))
            ),
        )
        client.ask("drop", keep=name)


@both_families
def test_udp_flows_end_whose_backend_went_while_no_agent_ran(field: Field, v6: bool):
    client, number = field["outside"], 60 if v6 else 59
    to = at("NodePort", number, v6)
    with field.given(*field.all_ways(number, "a1", "UDP")):
        assert client.udp(*split(to), keep="flow", connected=True).get("name") == "a1"
        field.agent.stop()
        field.create(*field.all_ways(number, "b1", "UDP")[1:])
        assert client.ask("talk", keep="flow").get("name") == "a1"
        field.agent.start()
        until("b1 answers", lambda: client.ask("talk", keep="flow").get("name") == "b1")
        client.ask("drop", keep="flow")


# ---- the table of nftables -----------------------------------------------------------------------

CHANGES = {
    "deleted": ("delete", "table", "inet", TABLE),
    "flushed": ("flush", "table", "inet", TABLE),
    "without a rule": ("flush", "chain", "inet", TABLE, "nat"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_table_is_restored(field: Field, change: tuple[str, ...]):
    node = field.lab.nodes[0]

    def listed() -> str:
        return on(node, "nft", "list", "table", "inet", TABLE)

    until("the agent knows that FORWARD refuses nothing any more", lambda: "before_forward" not in listed())
    before = listed()
    on(node, "nft", *change)
    until("it is written again", lambda: on(node, "nft", "list", "ruleset").count(before) == 1)
    for number, pod in ((11, "a1"), (12, "b1")):
        check(field, Dial("served", "outside", at("VIP", number), pod, "tcp", NODES4[0]))


def keep(client: Place, *numbers: int) -> list[str]:
    """Opens connections; returns their names."""
    names = []
    for kind, number, v6 in product(("NodePort", "VIP"), numbers, (False, True)):
        names.append(f"{kind}{number}{v6}{len(client.name)}")
        assert "name" in client.tcp(*split(at(kind, number, v6)), keep=names[-1])
    return names


def talk(client: Place, names: list[str]) -> None:
    for name in names:
        assert "name" in client.ask("talk", keep=name), f"{name} must survive"


def test_connections_survive_another_forwarding(field: Field):
    """Those that conntrack translates, and those of the packet path."""
    client, node = field["outside"], field.lab.nodes[0]
    by_conntrack = keep(client, 11, 12, 14)
    restart(field.agent, "--forwarding", "stack")
    until("the table is replaced", lambda: TABLE not in on(node, "nft", "list", "tables"))
    talk(client, by_conntrack)
    for name in by_conntrack:
        client.ask("drop", keep=name)
    by_packet_path = keep(client, 11, 12, 14)
    restart(field.agent)
    try:
        talk(client, by_packet_path)
        check(field, Dial("a new one", "outside", at("VIP", 12), "b1", "tcp", NODES4[0]))
        assert entries(field, at("VIP", 12))
    finally:
        for name in by_packet_path:
            client.ask("drop", keep=name)


def restart(agent: Agent, *arguments: str) -> None:
    assert agent.stop() == 0
    agent.start(extra=arguments)


def test_commands_name_the_option(field: Field):
    assert re.search(r"forwarding +netfilter\n", field.agent.kbpf("inspect", "status").stdout)
    assert "conntrack -L" in field.agent.kbpf("inspect", "connections").stderr
    checked = json.loads(field.agent.kbpf("check", "-o", "json").stdout)
    rows = {row["name"]: row for row in checked["items"]}
    assert rows["--forwarding"]["detail"].startswith("netfilter: ")
    for name in ("NAT by conntrack", "no bypassed rules before DNAT"):
        assert rows[name]["result"] == "yes"


def test_cleanup_removes_the_table(field: Field):
    node, agent = field.lab.nodes[0], field.agent
    agent.stop()
    assert f"table inet {TABLE}" in agent.kbpf("cleanup").stdout
    assert "kbpf" not in on(node, "nft", "list", "tables")
    agent.start()
    check(field, Dial("served", "outside", at("VIP", 11), "a1", "tcp", NODES4[0]))

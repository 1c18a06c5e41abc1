# SPDX-License-Identifier: Apache-2.0
"""Request and reply, masquerade and its marks, and next to another data plane."""

import os
import struct
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.flow_entries import DIRECTION
from kbpf.dataplane.bpf.maps.layout import (
    CACHED_DEVICE,
    FLOW,
    NEXT_HOP,
    SCRATCH_SIZE,
    U32,
    DeviceFlag,
    FlowDirection,
    NodeFlag,
    Reason,
    Role,
)
from tests.programs.packets.path.single_packets import (
    ALL_KINDS,
    ANSWERS,
    BACK,
    CLIENT,
    CLUSTER,
    FIRST,
    IP,
    KINDS,
    LOCAL,
    NEAR,
    NET,
    NO_FLAG,
    NODE,
    NONE,
    OTHER,
    OTHER_OWN,
    OWN,
    POD,
    PORTS,
    REMOTE,
    ROUTER,
    SENT,
    SPARE_PORTS,
    Flow,
    Path_,
    Vip,
    ask,
    both_policies,
    client,
    end,
    ends_of,
    flags_of,
    masked,
    parsed,
    pod,
    reply,
    snat_source,
    vip,
)
from tests.support.packets import packets
from tests.support.packets.packets import frame, icmp_error, sctp, tcp, udp
from tests.support.packets.test_run import TC_ACT_SHOT, TC_ACT_UNSPEC, SkbContext, run
from tests.support.table import table

# ---- next to another data plane --------------------------------------------------------------

BEGINS = {
    "tcp": lambda a, b, number: tcp(a, b, flags="S", seq=number),
    "sctp": lambda a, b, number: sctp(a, b, packets.sctp_init(number)),
}


@pytest.mark.parametrize("kind", BEGINS)
def test_connection_begun_under_another_data_plane_stays_its_own(path: Path_, v: int, kind: str):
    own, front, build = client(v), vip(v, LOCAL), BEGINS[kind]
    path.node(NodeFlag.PASSIVE)
    first = build(own, front, 7)
    path.go_in(first, first)
    path.node(NodeFlag.COEXISTING)
    path.go_in(first, first)
    assert translated(path, build(own, front, 8)), "a new connection from the same port"
    assert translated(path, build(client(v), front, 7)), "another client"
    path.node(NodeFlag(0))
    own = client(v)
    path.go_in(build(own, front, 9), build(own, pod(v), 9))


def translated(path: Path_, packet: bytes) -> bool:
    _, got = path.ingress(packet)
    return got[:1] == packet[:1] and got != packet


def test_datagrams_pass_only_while_passive(path: Path_, v: int):
    own, front = client(v), vip(v, LOCAL)
    question = ask(own, front)
    path.node(NodeFlag.PASSIVE)
    path.go_in(question, question)
    path.node(NodeFlag.COEXISTING)
    assert translated(path, question)


def test_existing_flow_is_translated_while_passive(path: Path_, v: int):
    """A new connection from the same port is the other data plane's."""
    flow = Flow(path, v, LOCAL).send("S <SA")
    path.node(NodeFlag.PASSIVE)
    flow.send("A A+ FA <FA A")
    own, front = flow.own, flow.front
    for packet in (tcp(own, front, flags="S", seq=9), tcp(own, front, b"data", seq=10)):
        path.go_in(packet, packet)


def test_client_gets_an_snat_port_while_coexisting(path: Path_, v: int):
    own, front, back = ends_of(v, LOCAL)
    path.node(NodeFlag.COEXISTING)
    _, got = path.ingress(tcp(own, front, flags="S"))
    source = snat_source(got, CLIENT[v])
    path.go_in(tcp(own, front, b"data"), tcp(source, back, b"data"))
    answer = BACK["tcp"]
    path.go_out(answer(back, source), answer(front, own))


def exchange(
    path: Path_, v: int, own: str, which: int, masquerades: bool, kind: str = "question", **more: object
) -> None:
    """Sends a request and its reply, and expects each as it passes ingress and egress."""
    build, answer = (ask, reply) if kind == "question" else (ALL_KINDS[kind], ANSWERS[kind])
    source, front, back = own, vip(v, which), pod(v)
    inside = path.go_in(build(own, front, **more), build(own, back, **more))
    if masquerades:
        source = masked(path, inside, build, back, v, **more)
    else:
        path.go_out(inside, inside)
    inside = path.go_in(answer(back, source, **more), answer(back, own, **more))
    path.go_out(inside, answer(front, own, **more))


@both_policies
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"options": b"\x94\x04\0\0"}, {"ttl": 3, "tos": 7}], ids=["", "options", "ttl"])
def test_request_and_reply(path: Path_, v: int, which: int, kind: str, more: dict[str, object]):
    if v == 6:
        more = {"extensions": [packets.destination()]} if "options" in more else more
    exchange(path, v, client(v), which, which == CLUSTER, kind, **more)


@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_five_extension_headers_hide_a_packet_for_a_service(path: Path_, kind: str):
    """Four do not. Where conntrack translates, the packet is dropped instead."""
    own, front, back = ends_of(6, LOCAL)

    def packet(to: str, count: int) -> bytes:
        return KINDS[kind](own, to, extensions=[packets.destination()] * count)

    path.expect_untouched(packet(front, 5))
    path.go_in(packet(front, 4), packet(back, 4))
    path.node(NodeFlag.NETFILTER)
    with path.counted(Reason.INVALID):
        verdict, _ = path.ingress(packet(front, 5))
    assert verdict == TC_ACT_SHOT


def test_a_client_is_dropped_if_the_node_has_no_address_to_masquerade_to(path: Path_, v: int):
    """Of IPv6, all but link-local ones may be missing."""
    with path.site.restored("node"), path.counted(Reason.NO_SNAT_PORT):
        path.site.put("node", U32.pack(0), bytes(32) + path.site.entries("node")[U32.pack(0)][32:])
        verdict, _ = path.through(ask(client(v), vip(v, CLUSTER)))
    assert verdict == TC_ACT_SHOT


def test_client_port_is_kept_if_free_else_replaced(path: Path_, v: int):
    """At both ends of the range. Another client with the first one gets the port that is left."""
    first, middle, last = (next(SPARE_PORTS) for _ in range(3))
    path.node(NodeFlag(0), first, last)
    for host, own, port in ((CLIENT, first, first), (CLIENT, last, last), (ROUTER, first, middle)):
        _, out = path.through(ask(end(host[v], own), vip(v, CLUSTER)))
        assert parsed(out).source == end(NODE[v], port)


@pytest.mark.parametrize("kind", BACK)
def test_two_frontends_of_one_backend_from_one_client_port(path: Path_, v: int, kind: str):
    """The second flow gets another client port, so that its replies can be distinguished."""
    own, back = client(v), pod(v)
    path.ingress(KINDS[kind](own, vip(v, LOCAL)))
    _, inside = path.ingress(KINDS[kind](own, vip(v, CLUSTER)))
    moved = parsed(inside).source
    assert moved != own
    source = masked(path, inside, KINDS[kind], back, v)
    inside = path.go_in(BACK[kind](back, source), BACK[kind](back, moved))
    path.go_out(inside, BACK[kind](vip(v, CLUSTER), own))
    path.go_out(BACK[kind](back, own), BACK[kind](vip(v, LOCAL), own))


def test_udp_without_checksum_stays_without(path: Path_, v: int):
    own, front, back = ends_of(v, CLUSTER)
    _, inside = path.ingress(ask(own, front, checksum="zero"), complete=True)
    assert inside == ask(own, back, checksum="zero")
    _, out = path.egress(inside, complete=True)
    assert out == ask(parsed(out).source, back, checksum="zero")


def test_zero_udp_checksum_is_written_as_ones(path: Path_, v: int):
    """0 means "no checksum", and IPv6 would drop the packet (RFC 768, RFC 8200)."""
    own, front = client(v), vip(v, LOCAL)
    payloads = (struct.pack("!H", n) for n in range(1 << 16))
    is_ones = lambda raw: parsed(raw).transport.checksum == 0xFFFF  # noqa: E731
    payload = next(one for one in payloads if is_ones(udp(own, pod(v), one)))
    path.go_in(udp(own, front, payload), udp(own, pod(v), payload))


MARTIANS = {
    4: ("0.0.0.0", "127.0.0.1", "224.0.0.1", "239.9.9.9", "255.255.255.255", NODE[4]),
    6: ("::", "::1", "ff02::1", "fe80::7", "::ffff:198.51.100.7", NODE[6]),
}


@pytest.mark.parametrize("kind", [*FIRST, "fragments"])
@pytest.mark.parametrize(("v", "bad"), [(v, bad) for v in MARTIANS for bad in MARTIANS[v]])
def test_martian_sources_pass_untouched_to_the_stack(path: Path_, v: int, bad: str, kind: str):
    """It drops them, or does not forward them. An answer would go to a socket of this node or to
    other machines.
    """
    maps = ["flows", "failures", "affinity", "counts"]
    if bad != NODE[v]:  # fragment_ports() does not know the addresses of the node
        maps.append("fragments")
    before = path.site.reasons(), [path.site.entries(name) for name in maps]
    for to in (vip(v, CLUSTER), vip(v, LOCAL), vip(v, NONE), end(f"{NET[v]}{IP}", 81)):
        own = end(bad, next(PORTS))
        whole = FIRST[kind](own, to) if kind in FIRST else udp(own, to, bytes(2000))
        for packet in packets.fragments(whole, 1280, id=7):
            path.expect_untouched(packet)
    assert (path.site.reasons(), [path.site.entries(name) for name in maps]) == before


@pytest.mark.parametrize("source", ["240.0.0.1", "0.1.2.3"])
def test_sources_that_linux_forwards_are_served(path: Path_, source: str):
    """240/4 since 2.6.25 (some clouds give it to pods and nodes), 0/8 without 0.0.0.0 since 5.3."""
    with path.counted(Reason.NEW_FLOW):
        path.ingress(packets.tcp(end(source, next(PORTS)), vip(4, CLUSTER), flags="S"))


RESUMED = 2 * 72 + FLOW.size + NEXT_HOP.size
"""Offset of `resumed` in a struct scratch, behind two packets, a flow and a next hop."""
JUST_WRITTEN = 0x200


def test_packet_whose_device_is_deleted_meanwhile_leaves_nothing_to_the_next_one(path: Path_):
    """It has been sent back to tc_ingress, which does not parse such packets again."""
    packet, key = tcp(client(4), vip(4, LOCAL), flags="S"), U32.pack(0)
    usual = os.sched_getaffinity(0)
    with path.site.pinned("flow_scratch") as scratch, path.site.pinned("devices") as devices:
        value = bytearray(len(scratch.lookup(key) or b""))
        for start in range(0, len(value), SCRATCH_SIZE):
            U32.pack_into(value, start + RESUMED, JUST_WRITTEN)
        try:
            os.sched_setaffinity(0, {min(usual)})
            scratch.update(key, bytes(value))
            devices.delete(U32.pack(1))
            path.cache(1, bytes(CACHED_DEVICE.size))
            path.expect_untouched(packet)
            path.set_loopback_role(Role.HOST)
            assert translated(path, packet)
        finally:
            os.sched_setaffinity(0, usual)
            scratch.update(key, bytes(len(value)))


class Masquerade(NamedTuple):
    """Whether the backend sees an address of the node, as with kube-proxy. `client`: the backend
    itself, or one that is near (in a local network); `local`: no if the name of a pod's device is not
    that of local pods.
    """

    name: str
    role: Role
    which: Vip
    is_masked: bool
    flags: str = ""
    client: str = ""
    local: bool = True
    kind: str = "question"


MASQUERADES = table(
    Masquerade,
    """
ClusterIP, from a pod | POD | IP | no
ClusterIP, from outside | HOST | IP | no
ClusterIP, masqueradeAll | POD | IP | yes | MASQUERADE_ALL
ClusterIP, outside, local detection | HOST | IP | yes | DETECTS_LOCAL
ClusterIP, a pod, local detection | POD | IP | no | DETECTS_LOCAL
ClusterIP, a pod device of another name | POD | IP | yes | DETECTS_LOCAL |  | no
ClusterIP, outside, in a local network | HOST | IP | no | DETECTS_LOCAL LOCAL_NETWORKS | near
ClusterIP, a pod, in no local network | POD | IP | yes | DETECTS_LOCAL LOCAL_NETWORKS
ClusterIP, hairpin | POD | IP | yes |  | itself
ClusterIP, hairpin, SCTP | POD | IP | yes |  | itself | yes | sctp
Cluster policy, from outside | HOST | CLUSTER | yes
Cluster policy, from a pod | POD | CLUSTER | yes
Local policy, from outside | HOST | LOCAL | no
Local policy, from a pod | POD | LOCAL | no
Local policy, masqueradeAll | HOST | LOCAL | no | MASQUERADE_ALL
Local policy, hairpin | POD | LOCAL | yes |  | itself
""",
)


@pytest.mark.parametrize("row", MASQUERADES, ids=lambda row: row.name)
def test_client_is_masqueraded_as_with_kube_proxy(path: Path_, v: int, row: Masquerade):
    path.set_loopback_role(row.role, None if row.local else NO_FLAG)
    path.node(flags_of(NodeFlag, row.flags))
    own = {"itself": pod(v, next(PORTS)), "near": end(NEAR[v], next(PORTS))}.get(row.client)
    exchange(path, v, own or client(v), row.which, row.is_masked, row.kind)


@pytest.mark.parametrize(
    ("role", "flag", "serves"), [(Role.POD, None, True), (Role.POD, NO_FLAG, False), (Role.HOST, None, False)]
)
def test_the_short_circuit_depends_on_the_device(
    path: Path_, v: int, role: Role, flag: DeviceFlag | None, serves: bool
):
    """Policy Local without a local endpoint: pods of this node may use all, if their device is one of local pods."""
    path.set_loopback_role(role, flag)
    for flags in (NodeFlag(0), NodeFlag.DETECTS_LOCAL):
        path.node(flags)
        assert translated(path, ask(client(v), vip(v, REMOTE))) is serves


class Direct(NamedTuple):
    """A client sends datagrams from one port, to a Service and to its backend's own address."""

    name: str
    sends: str
    answered_by: str
    device: str = "LOCAL PEER"
    flags: str = ""


DIRECT = table(
    Direct,
    """
to the Service | service | service
then directly | service direct | backend
and again | service direct direct | backend
and to the Service again | service direct service | service
directly first | direct service | service
its answer, then directly | service answer direct | backend
directly, then its late answer | service direct answer service answer | service
after a long pause | service pause direct | backend
an error of the pod about an answer | service error | service
by a device that pods share | service direct | service | LOCAL
from outside | service direct | service |
masqueraded | service direct | service | LOCAL PEER | MASQUERADE_ALL
""",
)


@pytest.mark.parametrize("row", DIRECT, ids=lambda row: row.name)
def test_datagrams_to_a_service_and_to_its_backend_from_one_port(path: Path_, v: int, row: Direct):
    """The answer, and an error about the datagram, come from where the pod has sent its last one.
    A datagram that others could forge changes nothing.
    """
    path.set_loopback_role(Role.POD if row.device else Role.HOST, flags_of(DeviceFlag, row.device))
    path.node(flags_of(NodeFlag, row.flags))
    own, back, front = client(v), pod(v), vip(v, IP)
    direct, answer, answered_by = ask(own, back), reply(back, own), front
    for word in row.sends.split():
        if word == "service":
            path.go_in(ask(own, front), direct)
            answered_by = front
        elif word == "direct":
            path.go_in(direct, direct)
            if row.answered_by == "backend":
                path.go_out(direct, direct)
            answered_by = back if "PEER" in row.device and not row.flags else front
        elif word == "answer":
            path.go_out(path.go_in(answer, answer), reply(answered_by, own))
        elif word == "pause":
            Flow(path, v, own=own).age(40)
        else:
            told = icmp_error("port unreachable", CLIENT[v], reply(front, own))
            path.ingress(told)
    source = {"service": front, "backend": back}[row.answered_by]
    path.go_out(path.go_in(answer, answer), reply(source, own))
    told = icmp_error("port unreachable", POD[v], direct)
    error = parsed(path.egress(path.go_in(told, told))[1])
    assert error.embedded.destination == source


# ---- marks ---------------------------------------------------------------------------------------

OTHERS = 0x1001_8001
"""Bits of the mark that belong to other agents."""
MARK = 1 << 14


def marked(path: Path_, name: str, packet: bytes, mark: int) -> tuple[bytes, int]:
    """The packet and its mark after the program."""
    context = SkbContext(mark=mark, ifindex=1).pack()
    done = run(path.programs[name], frame(packet), context=context)
    assert done.retval == TC_ACT_UNSPEC
    return done.packet_out[14:], done.context.mark


@pytest.mark.parametrize("which", [OWN, OTHER_OWN], ids=["masquerade address", "another"])
def test_backend_at_a_node_address_sees_the_client(path: Path_, v: int, which: int):
    """Its packets leave by no device that would translate the source, so an entry and a node port
    for it would only be in the way.
    """
    own, front = client(v), vip(v, which)
    back = end((NODE if which == OWN else OTHER)[v], 8080)
    path.go_in(udp(own, front), udp(own, back))
    assert {raw[DIRECTION] for raw in Flow(path, v, own=own).entries()} == {FlowDirection.ORIGINAL, FlowDirection.REPLY}
    path.go_out(udp(back, own), udp(front, own))


@pytest.mark.parametrize("kind", BACK)
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
@both_policies
def test_masqueraded_packets_are_marked_in_the_stack_both_ways(
    path: Path_, v: int, kind: str, remote: bool, which: int
):
    """The first packet, a later one, their replies and an error about each are marked; the mark is
    removed at egress. A local backend replies to the client, a remote one to the node.
    """
    build, own, back, front = KINDS[kind], client(v), pod(v), vip(v, which)
    want = OTHERS | (MARK if which == CLUSTER else 0)
    source = own

    def through(packet: bytes) -> bytes:
        inside, mark = marked(path, "tc_ingress", packet, OTHERS)
        assert mark == want
        out, mark = marked(path, "tc_egress", inside, mark)
        assert mark == OTHERS
        return out

    for packet in (build(own, front), SENT[kind](own, front)):
        out = through(packet)
        source = parsed(out).source
    assert (source != own) == (which == CLUSTER)
    told = icmp_error("time exceeded", ROUTER[v], out)
    seen = source if remote else own
    assert parsed(through(BACK[kind](back, seen))).source == front
    about = told if remote else icmp_error("time exceeded", ROUTER[v], SENT[kind](own, back))
    assert parsed(through(about)).destination == CLIENT[v]


def test_packets_without_masquerade_are_not_marked(path: Path_, v: int):
    path.set_loopback_role(Role.POD)
    _, mark = marked(path, "tc_ingress", udp(client(v), vip(v, IP)), OTHERS)
    assert mark == OTHERS, "a pod that connects to another one by ClusterIP"
    _, mark = marked(path, "tc_ingress", udp(client(v), end(ROUTER[v], 53)), OTHERS)
    assert mark == OTHERS, "no Service"
    _, mark = marked(path, "tc_egress", udp(client(v), end(ROUTER[v], 53)), OTHERS | MARK)
    assert mark == OTHERS | MARK, "a packet that another agent marked"


def test_packets_of_an_expired_flow_are_not_marked(path: Path_, v: int):
    """A pod that later sends from its server port is no longer part of the flow."""
    flow = Flow(path, v).send("?")
    answer = flow.packet("<!")
    assert marked(path, "tc_ingress", answer, 0)[1] == MARK
    flow.expire()
    assert marked(path, "tc_ingress", answer, 0) == (answer, 0), "nor translated"

# SPDX-License-Identifier: Apache-2.0
"""ICMP errors about flows that bypass the stack; and packets that are too long for the device that
their flow leaves by: the sender gets the MTU.
"""

from functools import partial
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import NodeFlag, Reason
from tests.programs.packets.path.single_packets import (
    ALL_KINDS,
    ANSWERS,
    CLIENT,
    CLUSTER,
    DAMAGED,
    ERRORS,
    FIRST,
    LOCAL,
    MTU,
    NODE,
    POD,
    ROUTER,
    SENT,
    Flow,
    Path_,
    ask,
    ends_of,
    expect_packet,
    expect_redirect,
    expect_sums,
    host_of,
    mtu_of,
    parsed,
    quoted,
    with_length,
    wrong_sums,
)
from tests.support.features import lacking, needs
from tests.support.packets.packets import (
    BROADCAST,
    SCTP_TAG,
    chunk,
    frame,
    icmp_error,
    internet_checksum,
    sctp,
    tcp,
    udp,
)
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_UNSPEC, run


class Bypass(NamedTuple):
    """A flow that bypasses the stack."""

    name: str
    which: int
    flags: NodeFlag


BYPASSES = [
    Bypass("masqueraded, to another node", CLUSTER, NodeFlag(0)),
    Bypass("direct, masqueraded", CLUSTER, NodeFlag.DIRECT),
    Bypass("direct, not masqueraded", LOCAL, NodeFlag.DIRECT),
]
every_bypass = pytest.mark.parametrize("row", BYPASSES, ids=lambda row: row.name)
WIRES = {**SENT, "sctp": sctp}


def bypassing(path: Path_, v: int, row: Bypass, kind: str) -> Flow:
    """A flow that the backend has answered."""
    path.node(row.flags)
    flow = Flow(path, v, row.which)
    retval, got = path.ingress(ALL_KINDS[kind](flow.own, flow.front))
    assert retval == TC_ACT_REDIRECT
    flow.source = parsed(got).source
    path.ingress(ANSWERS[kind](flow.back, flow.source))
    return flow


@every_bypass
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", WIRES)
@pytest.mark.parametrize("about", ["request", "reply"])
def test_error_bypasses_the_stack(uplink: Path_, v: int, row: Bypass, error: str, kind: str, about: str):
    """About a request: from a router behind the node, and from the backend. Conntrack does not know
    the flow. About a reply: from a router in front of the node, and from the client. A masqueraded
    client's router is masqueraded, too: an overlay drops packets from addresses that its nodes do
    not have.
    """
    flow = bypassing(uplink, v, row, kind)
    if about == "request":
        ends, seen_ends = (flow.source, flow.back), (flow.own, flow.front)
        senders = {ROUTER[v]: ROUTER[v], POD[v]: host_of(flow.front)}
    else:
        ends, seen_ends = (flow.front, flow.own), (flow.back, flow.source)
        senders = {host: host if row.which == LOCAL else NODE[v] for host in (ROUTER[v], CLIENT[v])}
    sent = WIRES[kind](*ends)
    for sender, seen in senders.items():
        expect_redirect(
            uplink,
            icmp_error(error, sender, sent, mtu=mtu_of(error), ttl=9),
            icmp_error(error, seen, quoted(sent, WIRES[kind], *seen_ends), mtu=mtu_of(error), ttl=8),
        )


@every_bypass
@pytest.mark.parametrize("why", ["TTL 1", "a node that does not forward"])
def test_error_that_cannot_be_redirected_goes_up_the_stack(uplink: Path_, v: int, row: Bypass, why: str):
    flow = bypassing(uplink, v, row, "udp")
    ttl = 1 if why == "TTL 1" else 64
    error = icmp_error("too big", ROUTER[v], ask(flow.source, flow.back), mtu=1300, ttl=ttl)
    with uplink.forwarding(why == "TTL 1"):
        retval, inside = uplink.ingress(error)
        assert retval == TC_ACT_UNSPEC
        _, out = uplink.egress(inside)
    told = parsed(out)
    assert told.destination == CLIENT[v]
    assert str(told.embedded) == str(parsed(ask(flow.own, flow.front)))
    expect_sums(out)


# ---- packets that are too long ---------------------------------------------------------------------

LONG = {
    "tcp": partial(tcp, payload=bytes(MTU), flags="A"),
    "udp": partial(udp, payload=bytes(MTU)),
    "sctp": partial(sctp, chunks=chunk(0, bytes(MTU)), tag=SCTP_TAG),
}
QUOTES = {"tcp": 20, "udp": 8, "sctp": 20}
"""How many bytes behind the IP header the errors quote."""


def expect_error(path: Path_, name: str, packet: bytes, mtu: int = MTU) -> None:
    """The packet becomes an error to its sender, as from its destination."""
    sent = parsed(packet)
    by = host_of(sent.destination)
    quote = (40 if packet[0] >> 4 == 6 else 20) + QUOTES[sent.protocol]
    before = path.site.reasons()
    retval, got = path.run(name, packet)
    assert retval == TC_ACT_REDIRECT
    assert path.site.reasons() - before == {Reason.TOO_LONG: 1}
    want = icmp_error("too big", by, packet, mtu=mtu, quote=quote, ip_id=0)
    expect_packet(got, want)
    assert [one for one in wrong_sums(got) if "embedded" not in one] == []


@every_bypass
@pytest.mark.parametrize("kind", LONG)
@needs("route_mtu")
def test_sender_of_a_flow_that_bypasses_the_stack_gets_the_mtu(uplink: Path_, v: int, row: Bypass, kind: str):
    """The stack's own error would be invalid for conntrack, if `nf_conntrack_tcp_loose` is 0."""
    flow = bypassing(uplink, v, row, kind)
    more = {"df": True} if v == 4 else {}
    for ends in ((flow.own, flow.front), (flow.back, flow.source)):
        packet = LONG[kind](*ends, **more)
        expect_error(uplink, "tc_ingress", packet)
        done = run(uplink.programs["tc_ingress"], frame(packet, to=BROADCAST))
        assert (done.retval, done.packet_out[14:]) == (TC_ACT_UNSPEC, packet)


SHORT = FIRST | {"tcp": tcp, "sctp": partial(sctp, chunks=chunk(0), tag=SCTP_TAG)}
DAMAGED_LONG = {
    "checksum": lambda kind, a, b: DAMAGED["checksum"](LONG[kind](a, b, df=True)),
    "longer than the packet": lambda kind, a, b: DAMAGED["too long"](LONG[kind](a, b, df=True)),
    "a short packet": lambda kind, a, b: with_length(SHORT[kind](a, b, df=True), 65_000),
}


@every_bypass
@pytest.mark.parametrize("damage", DAMAGED_LONG)
@pytest.mark.parametrize("kind", LONG)
def test_damaged_header_gets_no_error(uplink: Path_, row: Bypass, kind: str, damage: str):
    """The packet is left to the stack, which discards it."""
    flow = bypassing(uplink, 4, row, kind)
    for ends in ((flow.own, flow.front), (flow.back, flow.source)):
        sent = DAMAGED_LONG[damage](kind, *ends)
        before = uplink.site.reasons()
        uplink.expect_untouched(sent)
        assert uplink.site.reasons() == before


@pytest.mark.parametrize("df", [False, True], ids=["", "DF"])
@pytest.mark.parametrize("kind", LONG)
def test_socket_of_the_node_gets_the_mtu(uplink: Path_, v: int, kind: str, df: bool):
    """Whether it has set DF or not: nothing could fragment the packet behind the device. Before
    Linux 5.12 the MTU is not known, and the least one is named.
    """
    own, front, _ = ends_of(v, CLUSTER, NODE)
    assert uplink.egress(FIRST[kind](own, front))[0] == TC_ACT_REDIRECT
    more = {"df": df} if v == 4 else {}
    mtu = 1280 if lacking("route_mtu") else MTU
    expect_error(uplink, "tc_egress", LONG[kind](own, front, **more), mtu)


@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_checksum_that_a_device_completes_stays_right_in_the_quote(uplink: Path_, v: int, kind: str):
    """It holds the sum of the pseudo header. The device adds all bytes that follow, and stores the
    complement: it has to be what is there already, since the error's own checksum covers it.
    """
    own, front, _ = ends_of(v, CLUSTER, NODE)
    assert uplink.egress(FIRST[kind](own, front))[0] == TC_ACT_REDIRECT
    whole = LONG[kind](own, front, checksum="zero")
    header = 20 if v == 4 else 40
    addresses = whole[12:20] if v == 4 else whole[8:40]
    pseudo = ones_sum(addresses) + len(whole) - header + (6 if kind == "tcp" else 17)
    _, got = uplink.egress(LONG[kind](own, front, checksum=ones_sum(pseudo.to_bytes(4))))
    assert [one for one in wrong_sums(got) if "embedded" not in one] == []
    quoted = got[2 * header + 8 :]
    at = 16 if kind == "tcp" else 6
    assert len(quoted) == QUOTES[kind]
    assert ones_sum(quoted) ^ 0xFFFF == int.from_bytes(quoted[at : at + 2], "big")


def ones_sum(data: bytes) -> int:
    """The sum of 16-bit words in ones' complement."""
    return internet_checksum(data) ^ 0xFFFF

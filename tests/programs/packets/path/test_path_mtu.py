# SPDX-License-Identifier: Apache-2.0
"""Packets that are too long for the device that their flow leaves by: the sender gets the MTU."""

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from tests.programs.packets.path.single_packets import (
    CLUSTER,
    DAMAGED,
    FIRST,
    MTU,
    NODE,
    PORTS,
    Path_,
    end,
    expect_packet,
    host_of,
    parsed,
    pod,
    vip,
    with_length,
    wrong_sums,
)
from tests.programs.packets.path.test_bypassing_errors import Bypass, bypassing, every_bypass
from tests.support.features import lacking, needs
from tests.support.packets.datagrams import BROADCAST, frame, internet_checksum
from tests.support.packets.packets import chunk, icmp_error, sctp, tcp, udp
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_UNSPEC, run

LONG = {
    "tcp": lambda a, b, **ip: tcp(a, b, bytes(MTU), flags="A", **ip),
    "udp": lambda a, b, **ip: udp(a, b, bytes(MTU), **ip),
    "sctp": lambda a, b, **ip: sctp(a, b, chunk(1, bytes(MTU)), **ip),
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
    own, source = bypassing(uplink, v, row, kind)
    more = {"df": True} if v == 4 else {}
    for packet in (LONG[kind](own, vip(v, row.which), **more), LONG[kind](pod(v), source, **more)):
        expect_error(uplink, "tc_ingress", packet)
        done = run(uplink.programs["tc_ingress"], frame(packet, to=BROADCAST))
        assert (done.retval, done.packet_out[14:]) == (TC_ACT_UNSPEC, packet)


SHORT = FIRST | {"tcp": tcp}
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
    own, source = bypassing(uplink, 4, row, kind)
    for ends in ((own, vip(4, row.which)), (pod(4), source)):
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
    own, front = end(NODE[v], next(PORTS)), vip(v, CLUSTER)
    assert uplink.egress(FIRST[kind](own, front))[0] == TC_ACT_REDIRECT
    more = {"df": df} if v == 4 else {}
    mtu = 1280 if lacking("route_mtu") else MTU
    expect_error(uplink, "tc_egress", LONG[kind](own, front, **more), mtu)


@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_checksum_that_a_device_completes_stays_right_in_the_quote(uplink: Path_, v: int, kind: str):
    """It holds the sum of the pseudo header. The device adds all bytes that follow, and stores the
    complement: it has to be what is there already, since the error's own checksum covers it.
    """
    own, front = end(NODE[v], next(PORTS)), vip(v, CLUSTER)
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

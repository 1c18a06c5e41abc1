# SPDX-License-Identifier: Apache-2.0
"""ICMP errors about flows that bypass the stack."""

from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import NodeFlag
from tests.programs.packets.path.single_packets import (
    ANSWERS,
    CLIENT,
    CLUSTER,
    KINDS,
    LOCAL,
    NODE,
    POD,
    QUOTED,
    ROUTER,
    SENT,
    Path_,
    both,
    client,
    expect_redirect,
    pod,
    vip,
)
from tests.support.packets.judge import checksums
from tests.support.packets.packets import icmp_error, sctp, udp
from tests.support.packets.parse import parse
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_UNSPEC


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
every_error = pytest.mark.parametrize("error", ["too big", "host unreachable", "time exceeded", "parameter problem"])
WIRES = {**SENT, "sctp": sctp}


def bypassing(path: Path_, v: int, row: Bypass, kind: str) -> tuple[str, str]:
    """Begins a flow that the backend answers: the client, and the source that the backend sees."""
    path.node(row.flags)
    own = client(v)
    first = {**KINDS, "sctp": sctp}[kind](own, vip(v, row.which))
    retval, got = path.run("tc_ingress", first)
    assert retval == TC_ACT_REDIRECT
    source = parse(got, l2=False).source
    path.run("tc_ingress", ANSWERS[kind](pod(v), source))
    return own, source


@both
@every_bypass
@every_error
@pytest.mark.parametrize("kind", WIRES)
def test_error_about_a_packet_to_the_backend_bypasses_the_stack(
    uplink: Path_, v: int, row: Bypass, error: str, kind: str
) -> None:
    """From a router behind the node, and from the backend: conntrack does not know the flow."""
    own, source = bypassing(uplink, v, row, kind)
    build, front, back = WIRES[kind], vip(v, row.which), pod(v)
    sent = build(source, back)
    quote = build(own, front, checksum=parse(sent, l2=False).transport.checksum)
    for sender, seen in ((ROUTER[v], ROUTER[v]), (POD[v], front.rpartition(":")[0].strip("[]"))):
        expect_redirect(
            uplink,
            icmp_error(error, sender, sent, mtu=mtu_of(error), ttl=9),
            icmp_error(error, seen, quote, mtu=mtu_of(error), ttl=8),
        )


@both
@every_bypass
@every_error
@pytest.mark.parametrize("kind", WIRES)
def test_error_about_a_reply_bypasses_the_stack(uplink: Path_, v: int, row: Bypass, error: str, kind: str) -> None:
    """From a router in front of the node, and from the client. A masqueraded client's router is
    masqueraded, too: an overlay drops packets from addresses that its nodes do not have.
    """
    own, source = bypassing(uplink, v, row, kind)
    build, front, back = WIRES[kind], vip(v, row.which), pod(v)
    sent = build(front, own)
    quote = build(back, source, checksum=parse(sent, l2=False).transport.checksum)
    for sender in (ROUTER[v], CLIENT[v]):
        seen = sender if row.which == LOCAL else NODE[v]
        expect_redirect(
            uplink,
            icmp_error(error, sender, sent, mtu=mtu_of(error), ttl=9),
            icmp_error(error, seen, quote, mtu=mtu_of(error), ttl=8),
        )


def mtu_of(error: str) -> int:
    return 1280 if error == "too big" else 0


@both
@every_bypass
@pytest.mark.parametrize("why", ["TTL 1", "a node that does not forward"])
def test_error_that_cannot_be_redirected_goes_up_the_stack(uplink: Path_, v: int, row: Bypass, why: str) -> None:
    own, source = bypassing(uplink, v, row, "udp")
    front, back = vip(v, row.which), pod(v)
    ttl = 1 if why == "TTL 1" else 64
    error = icmp_error("too big", ROUTER[v], udp(source, back, b"?"), mtu=1300, ttl=ttl)
    uplink.forward(why == "TTL 1")
    try:
        retval, inside = uplink.run("tc_ingress", error)
        assert retval == TC_ACT_UNSPEC
        _, out = uplink.run("tc_egress", inside)
    finally:
        uplink.forward(True)
    told = parse(out, l2=False)
    assert told.destination == CLIENT[v]
    assert str(told.embedded) == str(parse(udp(own, front, b"?"), l2=False))
    assert [one for one in checksums(out, l2=False) if one not in QUOTED] == []

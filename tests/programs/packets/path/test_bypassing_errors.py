# SPDX-License-Identifier: Apache-2.0
"""ICMP errors about flows that bypass the stack."""

from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import NodeFlag
from tests.programs.packets.path.single_packets import (
    ALL_KINDS,
    ANSWERS,
    CLIENT,
    CLUSTER,
    ERRORS,
    LOCAL,
    NODE,
    POD,
    ROUTER,
    SENT,
    Path_,
    ask,
    client,
    expect_redirect,
    expect_sums,
    host_of,
    mtu_of,
    parsed,
    pod,
    quoted,
    vip,
)
from tests.support.packets.packets import icmp_error, sctp
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
WIRES = {**SENT, "sctp": sctp}


def bypassing(path: Path_, v: int, row: Bypass, kind: str) -> tuple[str, str]:
    """Begins a flow that the backend answers: the client, and the source that the backend sees."""
    path.node(row.flags)
    own = client(v)
    first = ALL_KINDS[kind](own, vip(v, row.which))
    retval, got = path.ingress(first)
    assert retval == TC_ACT_REDIRECT
    source = parsed(got).source
    path.ingress(ANSWERS[kind](pod(v), source))
    return own, source


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
    own, source = bypassing(uplink, v, row, kind)
    front, back = vip(v, row.which), pod(v)
    if about == "request":
        ends, seen_ends = (source, back), (own, front)
        senders = {ROUTER[v]: ROUTER[v], POD[v]: host_of(front)}
    else:
        ends, seen_ends = (front, own), (back, source)
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
    own, source = bypassing(uplink, v, row, "udp")
    front, back = vip(v, row.which), pod(v)
    ttl = 1 if why == "TTL 1" else 64
    error = icmp_error("too big", ROUTER[v], ask(source, back), mtu=1300, ttl=ttl)
    with uplink.forwarding(why == "TTL 1"):
        retval, inside = uplink.ingress(error)
        assert retval == TC_ACT_UNSPEC
        _, out = uplink.egress(inside)
    told = parsed(out)
    assert told.destination == CLIENT[v]
    assert str(told.embedded) == str(parsed(ask(own, front)))
    expect_sums(out)

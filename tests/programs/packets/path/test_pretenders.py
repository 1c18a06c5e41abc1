# SPDX-License-Identifier: Apache-2.0
"""Forged packets of clients and pods: ICMP errors with a false sender or receiver, packets from another
client's port, and source routes.
"""

import pytest

from kbpf.dataplane.bpf.maps.layout import NodeFlag
from tests.programs.packets.path.single_packets import (
    CLUSTER,
    NEAR,
    NODE,
    POD,
    PORTS,
    ROUTER,
    SENT,
    Path_,
    client,
    end,
    established,
    host_of,
    parsed,
    pod,
    vip,
)
from tests.programs.packets.path.test_bypassing_errors import BYPASSES, Bypass, bypassing
from tests.programs.packets.path.test_senders import BACKEND, OTHER, UPLINK, Node, node
from tests.support.lab.lab import ip
from tests.support.packets.packets import destination, icmp, icmp_error, tcp, udp
from tests.support.packets.test_run import TC_ACT_SHOT, TC_ACT_UNSPEC

__all__ = ["node"]
HOST_UNREACHABLE = {4: (3, 1), 6: (1, 3)}
LSRR = bytes([131, 7, 4, 203, 0, 113, 77])
MARTIANS = {4: ("127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", NODE[4]), 6: ("::1", "ff02::1", NODE[6])}


def error_to(v: int, to: str, by: str, sent: bytes) -> bytes:
    return icmp(by, to, *HOST_UNREACHABLE[v], 0, sent)


@pytest.mark.parametrize("row", BYPASSES, ids=lambda row: row.name)
def test_an_error_to_another_than_the_sender_is_not_redirected(uplink: Path_, v: int, row: Bypass):
    """It would leave with the node's own source address, past FORWARD and rp_filter. conntrack: "outer
    address does not match".
    """
    flow = bypassing(uplink, v, row, "udp")
    packet = error_to(v, NEAR[v], host_of(flow.own), SENT["udp"](flow.front, flow.own))
    assert uplink.ingress(packet) == (TC_ACT_UNSPEC, packet)


@pytest.mark.parametrize("row", BYPASSES, ids=lambda row: row.name)
def test_an_error_of_a_martian_is_left_to_the_stack(uplink: Path_, v: int, row: Bypass):
    """Which drops it, as it drops one with a source route."""
    flow = bypassing(uplink, v, row, "udp")
    for ends in ((flow.source, flow.back), (flow.front, flow.own)):
        for sender in MARTIANS[v]:
            packet = icmp_error("host unreachable", sender, SENT["udp"](*ends))
            assert uplink.ingress(packet) == (TC_ACT_UNSPEC, packet), sender
    if v == 4:
        sent = SENT["udp"](flow.source, flow.back)
        packet = icmp(ROUTER[4], host_of(flow.source), *HOST_UNREACHABLE[4], 0, sent, options=LSRR)
        assert uplink.ingress(packet) == (TC_ACT_UNSPEC, packet)


def test_an_error_to_another_than_the_sender_is_not_masqueraded(path: Path_, v: int):
    flow = established(path, v, kind="udp")
    packet = error_to(v, NEAR[v], host_of(flow.own), SENT["udp"](flow.front, flow.own))
    assert path.ingress(packet) == (TC_ACT_UNSPEC, packet)
    assert path.egress(packet) == (TC_ACT_UNSPEC, packet)


def test_a_pod_sends_no_error_in_the_name_of_anothers_backend(node: Node, v: int):
    """A strict rp_filter of the kernel would drop it, which a redirect bypasses."""
    own = client(v)
    _, sent = node.come(SENT["udp"](own, vip(v, CLUSTER)), UPLINK)
    error = icmp_error("port unreachable", POD[v], udp(parsed(sent).source, pod(v), b"?"))
    assert node.come(error, OTHER) == (TC_ACT_UNSPEC, error)
    _, to_client = node.come(error, BACKEND)
    assert parsed(to_client).destination == host_of(own)


def test_an_error_of_a_router_without_a_route_reaches_the_client(node: Node):
    """Routers have addresses of their own, to which nothing else leads."""
    own = client(4)
    _, sent = node.come(SENT["udp"](own, vip(4, CLUSTER)), UPLINK)
    error = icmp_error("too big", "100.64.0.1", sent, mtu=1400)
    ip("route add blackhole 100.64.0.0/10", netns=node.path.where)
    try:
        _, got = node.path.ingress(error, device=node.devices[UPLINK])
    finally:
        ip("route del blackhole 100.64.0.0/10", netns=node.path.where)
    assert parsed(got).destination == host_of(own)


def test_a_masqueraded_pod_does_not_speak_in_anothers_flow(node: Node, v: int):
    """The CNI's MASQUERADE keeps the source port that the pod has bound, since conntrack does not know
    our flow. The backend's answer to the pod would go to the client that has the port.
    """
    own = client(v)
    _, sent = node.come(SENT["udp"](own, vip(v, CLUSTER)), UPLINK)
    of_pod = udp(parsed(sent).source, pod(v), b"question of the pod")
    hidden = [udp(parsed(sent).source, pod(v), b"?", extensions=[destination()] * 5)] if v == 6 else []
    for one in (of_pod, *hidden):
        verdict, _ = node.path.egress(one, came_by=node.devices[OTHER])
        assert verdict == TC_ACT_SHOT
    assert node.path.egress(of_pod, came_by=node.devices[UPLINK]) == (TC_ACT_UNSPEC, of_pod), "the client's own"


@pytest.mark.parametrize("flags", [NodeFlag(0), NodeFlag.NETFILTER])
def test_a_masqueraded_pod_does_not_speak_in_a_flow_of_the_node(node: Node, v: int, flags: NodeFlag):
    """Of a socket that no hook serves. It keeps its port, or has one of the range with NETFILTER."""
    node.path.node(flags)
    try:
        _, sent = node.path.egress(udp(end(NODE[v], next(PORTS)), vip(v, CLUSTER), b"question of the node"))
        assert parsed(sent).destination == pod(v)
        of_pod = udp(parsed(sent).source, pod(v), b"question of the pod")
        verdict, _ = node.path.egress(of_pod, came_by=node.devices[OTHER])
    finally:
        node.path.node(NodeFlag(0))
    assert verdict == TC_ACT_SHOT


def test_a_source_routed_packet_is_left_to_the_stack(uplink: Path_):
    """Which drops it unless accept_source_route is set."""
    for options in (LSRR, bytes([137, *LSRR[1:]]), bytes([1] * 8) + LSRR):
        packet = tcp(client(4), vip(4, CLUSTER), flags="S", options=options)
        assert uplink.ingress(packet) == (TC_ACT_UNSPEC, packet)
    record_route = bytes([7, 7, 4, 0, 0, 0, 0])
    _, got = uplink.ingress(tcp(client(4), vip(4, CLUSTER), flags="S", options=record_route))
    assert parsed(got).destination == pod(4)

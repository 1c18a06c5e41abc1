# SPDX-License-Identifier: Apache-2.0
"""Packets of the node's own sockets, which the socket hooks have left alone."""

import socket
from collections.abc import Iterator

import pytest

from kbpf.dataplane.bpf.maps.layout import U32, DeviceFlag, Reason, Role, TcpState
from kbpf.source.api.transport import SO_COOKIE
from tests.programs.packets.path.single_packets import (
    ALL_KINDS,
    ANSWERS,
    CLUSTER,
    IP,
    LOCAL,
    NODE,
    NONE,
    POD,
    PORTS,
    ROUTER,
    Flow,
    Path_,
    ask,
    client,
    end,
    ends_of,
    expect_packet,
    expect_redirect,
    expect_sums,
    host_of,
    parsed,
    pod,
    raw_socket,
    reply,
    snat_source,
    vip,
    with_length,
)
from tests.support.features import needs
from tests.support.packets.packets import icmp_error, tcp
from tests.support.packets.parse import parse
from tests.support.packets.test_run import TC_ACT_REDIRECT, TC_ACT_UNSPEC


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("which", [CLUSTER, LOCAL, IP], ids=["Cluster", "Local", "ClusterIP"])
def test_socket_of_the_node_is_translated_at_egress(uplink: Path_, v: int, kind: str, which: int):
    """A packet that the hooks left alone is translated at egress; the reply goes to the socket."""
    build = ALL_KINDS[kind]
    answer = ANSWERS[kind]
    own, front, back = ends_of(v, which, NODE)
    for _ in range(2):
        expect_redirect(uplink, build(own, front), build(own, back), "tc_egress")
    sent = build(own, back)
    uplink.expect_untouched(sent, "tc_egress")
    uplink.go_in(answer(back, own), answer(front, own))


def test_reply_to_a_node_socket_is_redirected_to_its_device(uplink: Path_, v: int):
    """The request left by loopback, so the reply must arrive there: rp_filter."""
    own, front, back = ends_of(v, CLUSTER, NODE)
    expect_redirect(uplink, ask(own, front), ask(own, back), "tc_egress")
    answer, before = reply(back, own), uplink.site.reasons()[Reason.REDIRECTED]
    retval, got = uplink.ingress(answer, device=uplink.out)
    assert retval == TC_ACT_REDIRECT
    assert uplink.site.reasons()[Reason.REDIRECTED] == before + 1
    expect_packet(got, reply(front, own))


@pytest.fixture
def tunnel(uplink: Path_) -> Iterator[Path_]:
    """The uplink is a tunnel of IP in IP."""
    uplink.set_device(uplink.out, Role.HOST, DeviceFlag.TUNNEL)
    yield uplink
    uplink.set_device(uplink.out, Role.HOST)


@pytest.mark.parametrize("is_error", [False, True], ids=["reply", "error"])
def test_reply_with_outer_headers_stays_on_the_device_of_the_tunnel(tunnel: Path_, v: int, is_error: bool):
    """Before Linux 5.14 they precede a packet that leaves a tunnel. Delivered on another device, it
    would be the outer packet. These headers have the length of the inner packet, since here the
    kernel takes them for the packet's.
    """
    own, front, back = ends_of(v, CLUSTER, NODE)
    expect_redirect(tunnel, ask(own, front), ask(own, back), "tc_egress")
    inner, want = reply(back, own), reply(front, own)
    if is_error:
        checksum = parsed(ask(own, back)).transport.checksum
        host = host_of(front)
        inner = icmp_error("port unreachable", POD[v], ask(own, back))
        want = icmp_error("port unreachable", host, ask(own, front, checksum=checksum))
    outer = inner[:6] + bytes(34) if v == 6 else with_length(b"\x45" + bytes(19), len(inner))
    retval, got = tunnel.ingress(outer + inner, device=tunnel.out)
    assert (retval, got[: len(outer)]) == (TC_ACT_UNSPEC, outer)
    expect_packet(got[len(outer) :], want)


def test_socket_of_the_node_is_refused_at_egress(uplink: Path_, v: int):
    own, front, _ = ends_of(v, NONE, NODE)
    retval, got = uplink.egress(tcp(own, front, flags="S", seq=7))
    assert retval == TC_ACT_REDIRECT
    assert parsed(got).source == front
    assert "R" in parsed(got).flags


def syn_destination(path: Path_, v: int, to: str, port: int, is_agents: bool) -> str:
    """The destination of a node socket's SYN on the wire; the agent's programs are on the
    device.
    """
    family = socket.AF_INET if v == 4 else socket.AF_INET6
    host, number = to.rsplit(":", 1)
    with raw_socket("gate") as wire, socket.socket(family) as sock, path.site.pinned("agent_sockets") as agents:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((NODE[v], port))
        sock.setblocking(False)
        cookie = sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8)
        if is_agents:
            agents.update(cookie, U32.pack(1))
        sock.connect_ex((host.strip("[]"), int(number)))
        try:
            while True:
                seen = parse(wire.recv(2000))
                if seen.source == end(NODE[v], port):
                    return str(seen.destination)
        finally:
            agents.delete(cookie)


@pytest.mark.parametrize(("which", "led"), [(IP, True), (CLUSTER, False)], ids=["ClusterIP", "LoadBalancer"])
def test_agent_socket_does_not_match_a_flow_of_another_socket(uplink: Path_, v: int, which: int, led: bool):
    """A process of the node used the port through a Service that has the API server's address; then
    the agent's socket has the port. The agent's sockets are translated at ClusterIPs only.
    """
    own, front = next(PORTS), vip(v, which)

    def all_of_it() -> None:
        assert syn_destination(uplink, v, front, own, is_agents=False) == pod(v)
        want = pod(v) if led else front
        assert syn_destination(uplink, v, front, own, is_agents=True) == want

    uplink.inside(all_of_it)
    left = Flow(uplink, v, own=end(NODE[v], own)).entries()
    assert bool(left) == led, "later packets do not match that flow, either"


@needs("came_in_by")
def test_forwarded_packet_is_not_translated_at_egress(uplink: Path_, v: int):
    """It came in by another device and was handled there."""
    packet = ask(client(v), vip(v, CLUSTER))
    assert uplink.egress(packet, came_by=uplink.out) == (TC_ACT_UNSPEC, packet)


# ---- towards another device than that of the Service ---------------------------------------------

OVERLAY = {4: "10.244.9.0", 6: "fd00:10:244:9::"}


@pytest.fixture
def overlay(uplink: Path_) -> Iterator[Path_]:
    """The device to the backends has an address of its own; sockets send by loopback."""
    uplink.set_device(uplink.out, Role.HOST, own=(OVERLAY[4], OVERLAY[6]))
    yield uplink
    uplink.set_device(uplink.out, Role.HOST)


def through_overlay(path: Path_, v: int, kind: str, own: str, front: str) -> str:
    """The source that the backend sees."""
    build = ALL_KINDS[kind]
    retval, got = path.egress(build(own, front))
    assert retval == TC_ACT_REDIRECT
    source = parsed(got).source
    assert host_of(source) == OVERLAY[v]
    expect_redirect(path, build(own, front), build(source, pod(v)), "tc_egress")
    return source


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_socket_of_the_node_gets_the_address_of_the_overlay(overlay: Path_, v: int, kind: str):
    """As with MASQUERADE. The reply comes back by the overlay, and goes where the socket sends."""
    own, front, back = ends_of(v, CLUSTER, NODE)
    source = through_overlay(overlay, v, kind, own, front)
    sent = ALL_KINDS[kind](source, back)
    assert snat_source(sent, OVERLAY[v]) == source
    overlay.expect_untouched(sent, "tc_egress")
    answer = ANSWERS[kind]
    retval, got = overlay.ingress(answer(back, source), device=overlay.out)
    assert retval == TC_ACT_REDIRECT
    expect_packet(got, answer(front, own))


def test_masqueraded_client_gets_the_address_of_the_overlay(overlay: Path_, v: int):
    """As with MASQUERADE: replies then come back through the overlay."""
    own, front, back = ends_of(v, CLUSTER)
    source = snat_source(overlay.ingress(ask(own, front))[1], OVERLAY[v])
    expect_redirect(overlay, ask(own, front), ask(source, back, ttl=63))
    expect_redirect(overlay, reply(back, source), reply(front, own, ttl=63))


def test_connection_of_a_node_socket_over_an_overlay_ends(overlay: Path_, v: int):
    flow = Flow(overlay, v, own=end(NODE[v], next(PORTS)))
    for word in ("S", "<SA", "A", "A+100", "<A+50", "FA", "<FA", "A"):
        _, got = overlay.run("tc_ingress" if "<" in word else "tc_egress", flow.packet(word))
        flow.source = flow.source or parsed(got).source
    assert flow.states() == {TcpState.CLOSED}


def test_socket_with_the_overlays_address_keeps_its_port(overlay: Path_, v: int):
    own = end(OVERLAY[v], next(PORTS))
    assert through_overlay(overlay, v, "udp", own, vip(v, CLUSTER)) == own


def test_socket_that_sends_by_the_overlay_keeps_its_address(overlay: Path_, v: int):
    """It has chosen its address for this device, or has bound another one on purpose."""
    own, front, _ = ends_of(v, CLUSTER, NODE)
    retval, got = overlay.egress(ask(own, front), device=overlay.out)
    assert retval == TC_ACT_REDIRECT
    expect_packet(got, ask(own, pod(v)))


@pytest.mark.parametrize("by", ["router", "backend"])
def test_error_to_a_socket_of_the_node_is_translated(overlay: Path_, v: int, by: str):
    """The backend's own error has the frontend's address, so it is delivered on the device that the
    request left by; a router's stays on the device that it came by: rp_filter.
    """
    own, front, back = ends_of(v, CLUSTER, NODE)
    source = through_overlay(overlay, v, "udp", own, front)
    sender = ROUTER[v] if by == "router" else POD[v]
    error = icmp_error("port unreachable", sender, ask(source, back))
    retval, got = overlay.ingress(error, device=overlay.out)
    assert retval == (TC_ACT_UNSPEC if by == "router" else TC_ACT_REDIRECT)
    found = parsed(got)
    seen = ROUTER[v] if by == "router" else host_of(front)
    assert (found.source, found.destination) == (seen, NODE[v])
    assert str(found.embedded) == str(parsed(ask(own, front)))
    expect_sums(got)

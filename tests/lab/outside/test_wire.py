# SPDX-License-Identifier: Apache-2.0
"""Packets of the tests compared with the kernel's: it accepts what the builder builds, and what it
sends itself is read and built again without a difference.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.lab.lab import Place, inside, ip, run, settled
from tests.support.lab.offloads import offload
from tests.support.packets.judge import checksums, difference, reassembled
from tests.support.packets.packets import destination, echo, fragments, hop_by_hop, icmp, tcp, udp
from tests.support.packets.parse import Icmp, Packet, Tcp, Udp, parse
from tests.support.packets.wire import Wire

CLIENT, SERVER = "198.18.9.7", "198.18.9.1"
CLIENT6, SERVER6 = "fd00:198:18:9::7", "fd00:198:18:9::1"
MAC = "02:00:00:00:00:01"
"""Of the server."""
WEB, DNS, CLOSED = 80, 53, 9
families = pytest.mark.parametrize(("client", "server"), [(CLIENT, SERVER), (CLIENT6, SERVER6)], ids=["v4", "v6"])


@pytest.fixture(scope="module")
def kernel() -> Iterator[tuple[str, Wire]]:
    """The network namespace of a server, and a wire to it from another one. The server's limit of
    one ICMP error a second is lifted.
    """
    ours, theirs = (f"kbw{os.getpid()}{end}" for end in "cs")
    with contextlib.ExitStack() as stack:
        for name in (ours, theirs):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
        for setting in ("ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit"):
            run(*inside(theirs, None, "sh", "-c", f"echo 0 > /proc/sys/net/{setting}"))
        ip(
            f"link add s0 address {MAC} type veth peer name c0 address 02:00:00:00:00:02 netns {ours}",
            *("link set lo up", f"addr add {SERVER}/24 dev s0", f"addr add {SERVER6}/64 dev s0 nodad"),
            "link set s0 up",
            *(f"neigh add {each} lladdr 02:00:00:00:00:02 dev s0 nud permanent" for each in (CLIENT, CLIENT6)),
            netns=theirs,
        )
        ip("link set c0 up", netns=ours)
        settled(theirs, SERVER6)
        server = Place("server", theirs, None)
        stack.callback(server.close)
        server.serve(WEB, udp=(DNS,))
        yield theirs, stack.enter_context(Wire(ours, "c0"))


@pytest.fixture
def wire(kernel: tuple[str, Wire]) -> Wire:
    kernel[1].forget()
    return kernel[1]


def end(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


ODD = {
    "plain": ({}, {}),
    "type of service": ({"tos": 0x48}, {"tos": 0x48}),
    "options": ({"options": b"\x01\x01\x01\0"}, {"extensions": [destination()]}),
    "router alert": ({"options": b"\x94\x04\0\0"}, {"extensions": [hop_by_hop()]}),
}
"""Options of the builder by IPv4 and by IPv6."""


@pytest.mark.parametrize("odd", ODD)
@families
def test_the_kernel_accepts_built_packets(wire: Wire, client: str, server: str, odd: str):
    wire.send(echo(client, server, b"abcdefg", id=7, seq=8, **ODD[odd][":" in client]), to=MAC)
    answer = wire.expect(lambda p: p.ip.source == server)
    wanted = parse(echo(server, client, b"abcdefg", id=7, seq=8, reply=True), l2=False)
    assert (answer.transport, answer.payload) == (wanted.transport, b"abcdefg")


@families
def test_the_kernel_reassembles_fragments(wire: Wire, client: str, server: str):
    payload = os.urandom(3000)
    wire.send(*reversed(fragments(echo(client, server, payload, id=7), 1300)), to=MAC)
    pieces = [wire.expect()]
    while pieces[-1].ip is not None and pieces[-1].ip.more:
        pieces.append(wire.expect())
    whole = reassembled(*(piece.packet for piece in pieces))
    assert len(pieces) > 1
    assert checksums(whole, l2=False) == []
    assert parse(whole, l2=False).payload == payload


def again(packet: Packet) -> bytes:
    """The same packet, built by our builder."""
    header, ends = packet.ip, (packet.source, packet.destination)
    assert header is not None
    common: dict[str, Any] = {"ttl": header.ttl, "tos": header.tos}
    if header.version == 4:
        common |= {"df": header.df, "ip_id": header.id, "options": header.options}
    else:
        common |= {"flow": header.flow}
    match packet.transport:
        case Tcp(sequence=seq, acknowledgement=ack, window=window, flags=flags, options=options):
            numbers = {"seq": seq, "ack": ack, "window": window}
            return tcp(*ends, packet.payload, flags=flags, tcp_options=options, **numbers, **common)
        case Udp():
            return udp(*ends, packet.payload, **common)
        case Icmp(type=kind, code=code, rest=rest):
            inner = packet.embedded.packet if packet.embedded else packet.payload
            return icmp(*ends, kind, code, rest, inner, **common)
    raise AssertionError(f"not built here: {packet}")


@pytest.mark.parametrize("offloaded", [False, True], ids=["checksums by the kernel", "checksum offload"])
@families
def test_packets_of_the_kernel_are_built_identically(
    kernel: tuple[str, Wire], wire: Wire, client: str, server: str, offloaded: bool
):
    """An echo, an ICMP error, a datagram, a SYN-ACK and a reset."""
    offload(kernel[0], "s0", "tx", offloaded)
    asked = (
        echo(client, server, b"odd"),
        udp(end(client, 4015), end(server, CLOSED), b"unreachable"),
        udp(end(client, 4015), end(server, DNS), b"?"),
        tcp(end(client, 4014), end(server, CLOSED), flags="S"),
        tcp(end(client, 4016), end(server, WEB), flags="S", mss=1400),
    )
    for packet in asked:
        wire.send(packet, to=MAC)
        answer = wire.expect(lambda p: p.ip.source == server)
        assert checksums(answer) == []
        assert difference(parse(answer.packet, l2=False), parse(again(answer), l2=False)) == ""
        assert answer.packet == again(answer)
    wire.send(tcp(end(client, 4016), end(server, WEB), flags="R", seq=1001), to=MAC)

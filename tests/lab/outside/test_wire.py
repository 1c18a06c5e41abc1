# SPDX-License-Identifier: Apache-2.0
"""The hand-made peer, the packet builder and the parser tested against the kernel: it accepts what
the builder builds, and the parser reads what it sends.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from kbpf.kernel.system import netns
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE, Place, inside, ip, run, settled
from tests.support.packets import packets
from tests.support.packets.judge import checksums, difference, reassembled
from tests.support.packets.packets import (
    destination,
    echo,
    fragments,
    hop_by_hop,
    icmp_error,
    tcp,
    udp,
)
from tests.support.packets.parse import Icmp, Packet, Sctp, Tcp, Udp, parse
from tests.support.packets.stream import HostError, Stream
from tests.support.packets.wire import Wire, between, finished

CLIENT, SERVER, FAR = "198.18.9.7", "198.18.9.1", "192.0.2.1"
CLIENT6, SERVER6, FAR6 = "fd00:198:18:9::7", "fd00:198:18:9::1", "2001:db8::1"
FAMILIES = pytest.mark.parametrize(
    ("client", "server"),
    [(CLIENT, SERVER), (CLIENT6, SERVER6), (CLIENT, FAR), (CLIENT6, FAR6)],
    ids=["IPv4", "IPv6", "IPv4 behind a gateway", "IPv6 behind a gateway"],
)
PAIRS = pytest.mark.parametrize(("client", "server"), [(CLIENT, SERVER), (CLIENT6, SERVER6)], ids=["IPv4", "IPv6"])
WEB, DNS, DISCARDED = 80, 53, 9
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17


@dataclass
class Lab:
    """A wire in one namespace and a kernel's stack with a server in another."""

    wire: Wire
    kernel: Place
    netns: str

    def inside(self, action: Any) -> Any:
        return netns.run_in(Path("/run/netns") / self.netns, action)

    def socket(self, kind: socket.SocketKind, address: str = "::", port: int = 0) -> socket.socket:
        """A bound socket in the server's namespace."""

        def make() -> socket.socket:
            made = socket.socket(socket.AF_INET6, kind)
            made.settimeout(PATIENCE)
            made.bind((address, port))
            return made

        return self.inside(make)

    def offload(self, on: bool) -> None:
        """Sets whether the server's kernel leaves checksums to its device."""

        def switch() -> None:
            command = (ctypes.c_uint32 * 2)(ETHTOOL_STXCSUM, on)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                request = struct.pack("16sQ16x", b"s0", ctypes.addressof(command))
                fcntl.ioctl(probe, SIOCETHTOOL, request)

        self.inside(switch)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """198.18.9.0/24 and fd00:198:18:9::/64 connect the two; FAR and FAR6 are behind the server. The
    server's ICMP rate limit is lifted (by default one error a second to each host).
    """
    ours, theirs = (f"kbw{os.getpid()}{end}" for end in "cs")
    with contextlib.ExitStack() as stack:
        for name in (ours, theirs):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
        for setting in ("ipv4/icmp_ratelimit=0", "ipv6/icmp/ratelimit=0", "ipv4/ip_forward=1"):
            name, _, value = setting.partition("=")
            run(*inside(theirs, None, "sh", "-c", f"echo {value} > /proc/sys/net/{name}"))
        ip(f"link add s0 type veth peer name c0 netns {ours}", netns=theirs)
        ip("link set c0 up", netns=ours)
        ip(
            "link set lo up",
            f"addr add {FAR}/32 dev lo",
            f"addr add {FAR6}/128 dev lo nodad",
            f"addr add {SERVER}/24 dev s0",
            f"addr add {SERVER6}/64 dev s0 nodad",
            "link set s0 up",
            netns=theirs,
        )
        settled(theirs, FAR6, SERVER6)
        kernel = Place("server", theirs, None)
        stack.callback(kernel.close)
        kernel.serve(WEB, udp=(DNS,))
        wire = stack.enter_context(Wire(ours, "c0", f"{CLIENT}/24", f"{CLIENT6}/64", gateways=(SERVER, SERVER6)))
        yield Lab(wire, kernel, theirs)


@pytest.fixture
def wire(lab: Lab) -> Wire:
    """The lab's wire with an empty capture."""
    lab.wire.forget()
    return lab.wire


def end(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def told(answer: bytes) -> tuple[str, str]:
    """The server's name and the client address it saw, from an answer."""
    said = json.loads(answer)
    return said["name"], said["client"]


# ---- TCP ---------------------------------------------------------------------------------------


@FAMILIES
def test_a_server_answers_a_hand_made_connection(wire: Wire, client: str, server: str) -> None:
    answer = wire.dial_tcp(end(client, 4001), end(server, WEB), b"hello\n")
    assert told(answer) == ("server", client)
    wire.none(0, lambda packet: packet.protocol == "tcp" and "R" in packet.flags)


def test_a_connection_stays_open_inside_its_context(wire: Wire) -> None:
    with wire.connected(f"{CLIENT}:4002", f"{SERVER}:{WEB}") as stream:
        for _ in range(3):
            stream.send(b"hello\n")
            assert told(stream.receive()) == ("server", CLIENT)


def test_the_same_port_can_dial_repeatedly(wire: Wire) -> None:
    for _ in range(5):
        assert wire.dial_tcp(f"{CLIENT}:4003", f"{SERVER}:{WEB}", b"bye\n")


def test_a_port_in_time_wait_can_dial(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in TIME-WAIT answers a SYN with a lower sequence number by an ACK of the old
    connection.
    """
    now = time.monotonic_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: now() + (1 << 42))
        with wire.connected(f"{CLIENT}:4011", f"{SERVER}:{WEB}") as stream:
            stream.send(b"bye\n")
            stream.receive(lambda _: False)
            stream.close()
    assert wire.dial_tcp(f"{CLIENT}:4011", f"{SERVER}:{WEB}", b"bye\n")


def test_a_lost_syn_is_sent_again(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "SYN_SECONDS", 0.1)
    sent, send = [], wire.send

    def lose_the_first(packet: bytes) -> None:
        sent.append(packet)
        if len(sent) > 1:
            send(packet)

    monkeypatch.setattr(wire, "send", lose_the_first)
    assert wire.dial_tcp(f"{CLIENT}:4012", f"{SERVER}:{WEB}", b"bye\n")
    assert sent[0] == sent[1]


@FAMILIES
def test_a_refused_connection_is_an_error(wire: Wire, client: str, server: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        wire.dial_tcp(end(client, 4004), end(server, DISCARDED))


def test_an_unreachable_host_is_an_error_that_shows_the_packet(lab: Lab, wire: Wire) -> None:
    ip("route add prohibit 192.0.2.66", netns=lab.netns)
    with pytest.raises(HostError) as failed:
        wire.dial_tcp(f"{CLIENT}:4005", "192.0.2.66:80")
    error = failed.value.packet
    assert isinstance(error.transport, Icmp)
    assert (error.transport.type, error.transport.code) == (3, 13)
    assert error.embedded is not None
    assert (error.embedded.source, error.embedded.flags) == (f"{CLIENT}:4005", "S")


def test_an_unanswered_syn_is_a_timeout(lab: Lab, wire: Wire) -> None:
    ip("route add blackhole 192.0.2.67", netns=lab.netns)
    with pytest.raises(TimeoutError, match="is silent"):
        wire.dial_tcp(f"{CLIENT}:4006", "192.0.2.67:80", seconds=0.1)


@FAMILIES
def test_large_transfers_both_ways_use_gso_packets(lab: Lab, wire: Wire, client: str, server: str) -> None:
    payload, taken = bytes(range(256)) * 1200, []

    def give_back() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as source:
            taken.append(source.read(len(payload)))
            connection.sendall(taken[0])

    with Wire(lab.netns, "s0", tap=True) as tap, lab.socket(socket.SOCK_STREAM) as listener:
        listener.listen()
        server_thread = threading.Thread(target=give_back)
        server_thread.start()
        to = end(server, listener.getsockname()[1])
        assert wire.dial_tcp(end(client, 4007), to, payload) == payload
        server_thread.join()
        assert taken == [payload]
        large = tap.expect(lambda packet: packet.gso > 0)  # the tap's thread may lag behind
    assert len(large.payload) > large.gso


@PAIRS
def test_a_gso_packet_is_accepted_as_such(lab: Lab, wire: Wire, client: str, server: str) -> None:
    """One GSO packet: a TC program sees gso_size and gso_segs."""
    with lab.socket(socket.SOCK_DGRAM) as receiver:
        to = end(server, receiver.getsockname()[1])
        wire.send(udp(end(client, 4008), to, bytes(4000)), gso=1000)
        assert [len(receiver.recv(2000)) for _ in range(4)] == [1000] * 4


class Script:
    """A fake wire on which all packets have already arrived, in the given order."""

    def __init__(self, *arriving: bytes) -> None:
        self.sent: list[Packet] = []
        self._arriving = [parse(packet, l2=False) for packet in arriving]

    def send(self, packet: bytes) -> None:
        self.sent.append(parse(packet, l2=False))

    def forget(self, predicate: Any) -> None:
        assert not any(map(predicate, self.sent))

    def soon(self, predicate: Any, seconds: float) -> Packet | None:
        return next((self._arriving.pop(0) for p in self._arriving if predicate(p)), None)


@pytest.mark.parametrize(
    "order",
    [(0, 3, 6), (6, 3, 0), (3, 0, 0, 6, 3), (0, 2, 1, 4, 6)],
    ids=["in order", "reversed", "duplicates", "overlaps"],
)
@pytest.mark.parametrize("first", [1, 2**32 - 4], ids=["small sequence numbers", "sequence numbers wrap"])
def test_segments_in_any_order_are_reassembled(order: tuple[int, ...], first: int) -> None:
    here, there = f"{CLIENT}:4009", f"{SERVER}:{WEB}"
    pieces = [(first + at & 2**32 - 1, b"abcdefghi"[at : at + 3]) for at in order]
    script = Script(*(tcp(there, here, piece, seq=seq) for seq, piece in pieces))
    stream = Stream(cast(Wire, script), here, there)
    stream._ack = first
    assert stream.receive(lambda data: len(data) == 9) == b"abcdefghi"
    last = script.sent[-1].transport
    assert isinstance(last, Tcp)
    assert last.acknowledgement == first + 9 & 2**32 - 1


# ---- UDP, ICMP, neighbours ---------------------------------------------------------------------


@PAIRS
def test_a_datagram_is_answered(wire: Wire, client: str, server: str) -> None:
    answer = wire.ask(udp(end(client, 4010), end(server, DNS), b"?"))
    assert told(answer.payload) == ("server", client)
    assert checksums(answer) == []


@PAIRS
def test_the_kernel_finds_the_wire_by_its_addresses(lab: Lab, wire: Wire, client: str, server: str) -> None:
    """The kernel's neighbour table is empty; the wire answers ARP and neighbour discovery."""
    ip("neigh flush dev s0", netns=lab.netns)
    with lab.socket(socket.SOCK_DGRAM) as s:
        port = s.getsockname()[1]
        s.sendto(b"hello", (f"::ffff:{client}" if "." in client else client, 4011))
        heard = wire.expect(between(end(server, port), end(client, 4011)))
        assert heard.payload == b"hello"
        wire.send(udp(end(client, 4011), end(server, port), b"and to you"))
        assert s.recv(100) == b"and to you"


def test_an_unused_address_is_an_error_that_names_it(wire: Wire) -> None:
    with pytest.raises(AssertionError, match=r"198\.18\.9\.99 is not on the link"):
        wire.neighbour("198.18.9.99", CLIENT, seconds=0.1)


@PAIRS
def test_a_port_unreachable_error_quotes_the_packet(wire: Wire, client: str, server: str) -> None:
    asked = udp(end(client, 4012), end(server, DISCARDED), b"abc", tos=0x10)
    wire.send(asked)
    error = wire.expect(lambda packet: packet.embedded is not None)
    want = icmp_error("port unreachable", server, asked)
    assert error.embedded is not None
    assert error.embedded.packet == asked
    assert checksums(error) == []
    assert parse(want, l2=False).transport == error.transport


ODD = [
    ("plain", {}, {}),
    ("another type of service", {"tos": 0x48}, {"tos": 0x48}),
    ("options", {"options": b"\x01\x01\x01\0"}, {"extensions": [destination()]}),
    ("a router alert", {"options": b"\x94\x04\0\0"}, {"extensions": [hop_by_hop()]}),
]


@pytest.mark.parametrize("odd", ODD, ids=[row[0] for row in ODD])
@PAIRS
def test_the_kernel_accepts_built_packets(
    wire: Wire, client: str, server: str, odd: tuple[str, dict[str, Any], dict[str, Any]]
) -> None:
    ip_header = odd[2 if ":" in client else 1]
    answer = wire.ask(echo(client, server, b"abcdefg", id=7, seq=8, **ip_header))
    assert checksums(answer) == []
    want = echo(server, client, b"abcdefg", id=7, seq=8, reply=True)
    assert (answer.transport, answer.payload) == (
        parse(want, l2=False).transport,
        b"abcdefg",
    )


@PAIRS
def test_the_kernel_reassembles_fragments(wire: Wire, client: str, server: str) -> None:
    payload = os.urandom(3000)
    for piece in reversed(fragments(echo(client, server, payload, id=7), 1300)):
        wire.send(piece)
    pieces = [wire.expect()]
    while pieces[-1].ip is not None and pieces[-1].ip.more:
        pieces.append(wire.expect())
    whole = reassembled(*(piece.packet for piece in pieces))
    assert len(pieces) > 1
    assert checksums(whole, l2=False) == []
    assert parse(whole, l2=False).payload == payload


@PAIRS
def test_the_kernel_drops_packets_with_a_wrong_checksum(lab: Lab, wire: Wire, client: str, server: str) -> None:
    with lab.socket(socket.SOCK_DGRAM) as receiver:
        to = end(server, receiver.getsockname()[1])
        wire.send(udp(end(client, 4013), to, b"wrong", checksum="wrong"))
        wire.send(udp(end(client, 4013), to, b"right"))
        assert receiver.recv(100) == b"right"
    wire.send(echo(client, server, b"wrong")[:-1] + b"?")
    assert wire.ask(echo(client, server, b"right")).payload == b"right"


# ---- the kernel's own packets ------------------------------------------------------------------


def again(packet: Packet) -> bytes:
    """The same packet, built by our builder."""
    header = packet.ip
    assert header is not None
    common: dict[str, Any] = {"ttl": header.ttl, "tos": header.tos}
    if header.version == 4:
        common |= {"df": header.df, "ip_id": header.id, "options": header.options}
    else:
        common |= {"flow": header.flow}
    match packet.transport:
        case Tcp() as segment:
            return tcp(
                packet.source,
                packet.destination,
                packet.payload,
                flags=segment.flags,
                seq=segment.sequence,
                ack=segment.acknowledgement,
                window=segment.window,
                tcp_options=segment.options,
                **common,
            )
        case Udp():
            return udp(packet.source, packet.destination, packet.payload, **common)
        case Icmp() as message:
            inner = packet.embedded.packet if packet.embedded else packet.payload
            return packets.icmp(
                packet.source,
                packet.destination,
                message.type,
                message.code,
                message.rest,
                inner,
                **common,
            )
    raise AssertionError(f"not built here: {packet}")


@pytest.mark.parametrize("offload", [False, True], ids=["checksums by the kernel", "checksum offload"])
@PAIRS
def test_packets_of_the_kernel_are_built_identically(
    lab: Lab, wire: Wire, client: str, server: str, offload: bool
) -> None:
    lab.offload(offload)
    with contextlib.suppress(ConnectionRefusedError):
        wire.dial_tcp(end(client, 4014), end(server, DISCARDED))
    wire.send(udp(end(client, 4015), end(server, DISCARDED), b"unreachable"))
    wire.send(udp(end(client, 4015), end(server, DNS), b"?"))
    wire.send(echo(client, server, b"odd"))
    protocols = ["icmp6" if ":" in client else "icmp"] * 2 + ["tcp", "udp"]
    kernels = [wire.expect() for _ in range(3)]
    # Last: a SYN-ACK is repeated after a second, which the server's answer may take.
    wire.send(tcp(end(client, 4016), end(server, WEB), flags="S", mss=1400))
    kernels.append(wire.expect())
    wire.send(tcp(end(client, 4016), end(server, WEB), flags="R", seq=1001))
    assert sorted(packet.protocol for packet in kernels) == protocols
    for packet in kernels:
        assert checksums(packet) == []
        assert difference(parse(packet.packet, l2=False), parse(again(packet), l2=False)) == ""
        assert packet.packet == again(packet)


def test_offloaded_checksums_look_unfinished_to_a_plain_socket(lab: Lab) -> None:
    """A plain packet socket sees an unfinished checksum, so a wire asks for PACKET_VNET_HDR."""
    lab.offload(True)

    def listen() -> socket.socket:
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        made.settimeout(PATIENCE)
        made.bind(("c0", 0x0800))
        return made

    assert lab.wire.netns is not None
    with netns.run_in(Path("/run/netns") / lab.wire.netns, listen) as plain:
        answer = lab.wire.ask(udp(f"{CLIENT}:4017", f"{SERVER}:{DNS}", b"?"))
        while (heard := parse(plain.recv(2000))).source != f"{SERVER}:{DNS}":
            pass
    assert checksums(heard) == ["udp"]
    assert checksums(answer) == []
    assert difference(heard, answer).startswith("udp checksum: ")


def test_an_offloaded_sctp_crc_is_completed() -> None:
    frame = packets.frame(packets.sctp(f"{CLIENT}:1", f"{SERVER}:2"))
    left = packets.frame(packets.sctp(f"{CLIENT}:1", f"{SERVER}:2", checksum="zero"))
    assert isinstance(parse(left).transport, Sctp)
    assert finished(left, 34, 8) == frame


# ---- listening ---------------------------------------------------------------------------------


def test_a_tap_hears_both_directions(lab: Lab, wire: Wire) -> None:
    with Wire(lab.netns, "s0", tap=True) as tap:
        ask, answer = f"{CLIENT}:4020", f"{SERVER}:{DNS}"
        got = wire.ask(udp(ask, answer, b"?"))
        assert tap.expect(between(ask, answer)).payload == b"?"
        assert difference(tap.expect(between(answer, ask)), got) == ""


def test_unexpected_packets_are_kept_and_named_in_errors(wire: Wire) -> None:
    asked = udp(f"{CLIENT}:4021", f"{SERVER}:{DISCARDED}")
    wire.send(asked, echo(CLIENT, SERVER))
    wire.expect(lambda p: p.protocol == "icmp" and p.embedded is None)
    with pytest.raises(AssertionError, match=r"c0 heard .* icmp type 3 code 3"):
        wire.expect(lambda p: p.protocol == "udp", seconds=0.05)
    with pytest.raises(AssertionError, match=r"icmp type 3 code 3 .* arrived"):
        wire.none(0.05)
    assert [str(packet.embedded) for packet in wire.heard] == [str(parse(asked, l2=False))]
    wire.forget()
    wire.none(0.05)


def test_arrived_packets_are_seen_though_the_thread_lags(lab: Lab, wire: Wire) -> None:
    with Wire(lab.wire.netns, "c0", tap=True) as other, wire._changed:  # the thread's lock
        wire.send(echo(CLIENT, SERVER, b"late"))
        other.expect(lambda packet: packet.source == SERVER)
        assert [packet.payload for packet in wire.heard] == [b"late"]


def test_without_traffic_nothing_is_captured(wire: Wire) -> None:
    wire.none(0.2)


def test_a_closed_wire_leaves_no_socket_or_thread(lab: Lab) -> None:
    def ours() -> set[object]:
        return {*threading.enumerate(), *os.listdir("/proc/self/fd")}

    before = ours()
    with Wire(lab.netns, "s0", tap=True):
        assert ours() - before
    with pytest.raises(OSError, match="No such device"), Wire(lab.netns, "nonesuch"):
        pass
    assert ours() <= before, "threads of other tests may end meanwhile"


@needs("tun")
def test_a_wire_on_a_device_without_a_link_header(lab: Lab) -> None:
    """A tun device: what is written to its descriptor arrives, what is sent is read from it."""
    tunsetiff, tun_without_info = 0x400454CA, 0x1001

    def make() -> int:
        made = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(made, tunsetiff, struct.pack("16sH22x", b"t0", tun_without_info))
        return made

    far = lab.inside(make)
    try:
        ip("link set t0 up", netns=lab.netns)
        with Wire(lab.netns, "t0") as wire:
            for packet in (echo(CLIENT, FAR, b"abc"), echo(CLIENT6, FAR6, b"abc")):
                os.write(far, packet)
                assert wire.expect(lambda p: p.payload == b"abc").raw == packet
                wire.send(packet)
                while (read := os.read(far, 2000)) != packet:
                    assert parse(read, l2=False)  # skip packets that the kernel sent before
            assert wire.mac == ""
    finally:
        os.close(far)

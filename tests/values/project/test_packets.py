# SPDX-License-Identifier: Apache-2.0
"""The judge of packets finds what is wrong, and shares no code with the builder. The kernel judges both:
tests/fuzz/packets sends the same packets through nf_conntrack.
"""

import ast
import struct
from pathlib import Path

import pytest

from tests.support.packets import packets
from tests.support.packets.judge import checksums
from tests.support.packets.packets import (
    crc32c,
    datagram,
    fragments,
    frame,
    icmp,
    icmp_error,
    routing,
    sctp,
    tcp,
    udp,
)

SUPPORT = Path(packets.__file__).parent
A, B, A6, B6 = "198.51.100.7", "192.0.2.1", "2001:db8::7", "2001:db8:1::1"
FROM, TO, FROM6, TO6 = f"{A}:4000", f"{B}:80", f"[{A6}]:4000", f"[{B6}]:80"
SYN = tcp(FROM, TO, flags="S", mss=1460)


def test_crc32c_is_as_published():
    """RFC 3720 appendix B.4."""
    assert crc32c(bytes(range(32))) == 0x46DD794E


INNER = udp(FROM, TO, b"abc", checksum="wrong", ip_checksum="wrong")
INNER6 = tcp(FROM6, TO6, b"abc", checksum="wrong")

WRONG: list[tuple[bytes, list[str]]] = [
    (tcp(FROM, TO, b"abc", checksum="wrong"), ["tcp"]),
    (tcp(FROM, TO, ip_checksum="wrong"), ["ip"]),
    (udp(FROM, TO, b"abc", checksum="zero"), []),
    (udp(FROM6, TO6, b"abc", checksum="zero"), ["udp"]),
    (sctp(FROM, TO, checksum="wrong"), ["sctp"]),
    (icmp(A, B, 8, checksum="wrong"), ["icmp"]),
    (icmp(A6, B6, 128, checksum="wrong"), ["icmp6"]),
    (icmp_error("port unreachable", B, INNER), ["icmp embedded ip", "icmp embedded udp"]),
    (icmp_error("port unreachable", B6, INNER6), ["icmp6 embedded tcp"]),
    (datagram(A, B, 17, struct.pack("!HHHH", 1, 2, 30, 0)), ["udp length"]),
    (datagram(A, B, 6, bytes(12)), ["tcp header"]),
    (SYN[:-4], ["ip length"]),
    (udp(FROM6, TO6, b"abc", extensions=[routing("2001:db8::8", "2001:db8::9")]), []),
    (fragments(udp(FROM, TO, bytes(100), checksum="wrong"), 60)[0], []),
]


@pytest.mark.parametrize(("raw", "wrong"), WRONG)
def test_wrong_headers_are_named(raw: bytes, wrong: list[str]):
    assert checksums(frame(raw)) == wrong


@pytest.mark.parametrize("name", ["packets", "datagrams", "parse", "judge"])
def test_builder_and_parser_import_nothing_of_kbpf_or_of_each_other(name: str):
    tree = ast.parse((SUPPORT / f"{name}.py").read_text())
    named = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    mine = {"packets", "datagrams"} if name in ("packets", "datagrams") else {"parse", "judge"}
    ours = {module for module in named if module.startswith(("kbpf", "tests"))}
    assert ours <= {f"tests.support.packets.{one}" for one in mine}

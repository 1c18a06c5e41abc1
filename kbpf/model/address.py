# SPDX-License-Identifier: Apache-2.0
"""Addresses as the data plane holds them: 16 bytes in network order, IPv4 as ``::ffff:a.b.c.d``.

One type for both families means one code path from the watch to the BPF maps. Text is parsed where
it enters the program and formatted where it is displayed, nowhere in between.
"""

import socket
from typing import TYPE_CHECKING, Final, NewType

from kbpf.errors import ObjectError

if TYPE_CHECKING:
    from kbpf.model.objects import Cidr

Addr = NewType("Addr", bytes)
"""16 bytes in network order; IPv4 is v4-mapped."""


class NodeAddresses(tuple[Addr, ...]):
    """The addresses of a node. `networks`: those of which it has all addresses (AnyIP).
    `subnet_ends`: the network and broadcast addresses of its IPv4 subnets.
    """

    networks: "tuple[Cidr, ...]" = ()
    subnet_ends: frozenset[Addr] = frozenset()


V4_PREFIX: Final = bytes(10) + b"\xff\xff"
ANY4: Final = Addr(V4_PREFIX + bytes(4))
ANY6: Final = Addr(bytes(16))
"""As the address of a NodePort frontend: every NodePort address of this family."""
ANY: Final = {4: ANY4, 6: ANY6}
LOOPBACK6: Final = Addr(bytes(15) + b"\x01")
_LOOPBACK4: Final = V4_PREFIX + b"\x7f"


def parse_addr(text: str) -> Addr:
    """Parses an IPv4 or IPv6 address; IPv4 parts with leading zeros are decimal.

    Kubernetes reads ``010.0.0.1`` as ``10.0.0.1`` (CVE-2021-29923), so we do too. Raises
    ObjectError for anything else, including zone suffixes.
    """
    try:
        if ":" not in text:
            return Addr(V4_PREFIX + socket.inet_pton(socket.AF_INET, text))
        return Addr(socket.inet_pton(socket.AF_INET6, text))
    except OSError:
        pass
    except (TypeError, ValueError) as error:
        raise ObjectError(f"not an IP address: {text!r}") from error
    parts = text.split(".")
    if len(parts) == 4 and all(part.isascii() and part.isdigit() and len(part) <= 16 for part in parts):
        numbers = [int(part) for part in parts]
        if max(numbers) <= 255:
            return Addr(V4_PREFIX + bytes(numbers))
    raise ObjectError(f"not an IP address: {text!r}")


def format_addr(addr: Addr | bytes) -> str:
    """Formats an address: dotted for IPv4, RFC 5952 for IPv6."""
    if addr[:12] == V4_PREFIX:
        return socket.inet_ntop(socket.AF_INET, addr[12:])
    return socket.inet_ntop(socket.AF_INET6, addr)


def family_of(addr: Addr | bytes) -> int:
    """Returns 4 or 6."""
    return 4 if addr[:12] == V4_PREFIX else 6


def to_wire(addr: Addr) -> bytes:
    """The 4 or 16 bytes in a message of the kernel."""
    return addr[12:] if family_of(addr) == 4 else addr


def from_wire(raw: bytes) -> Addr | None:
    """From such bytes; None if they are neither 4 nor 16."""
    if len(raw) == 4:
        return Addr(V4_PREFIX + raw)
    return Addr(raw) if len(raw) == 16 else None


def is_loopback(addr: Addr) -> bool:
    """Whether it is in 127.0.0.0/8, or ::1."""
    return addr.startswith(_LOOPBACK4) or addr == LOOPBACK6


def is_link_local6(addr: Addr) -> bool:
    """Whether it is in fe80::/10, and so means nothing without a device. 169.254.0.0/16 is unlike
    that in Linux.
    """
    return addr[0] == 0xFE and addr[1] & 0xC0 == 0x80


def format_endpoint(addr: Addr | bytes, port: int) -> str:
    """``1.2.3.4:80`` or ``[fd00::1]:80``."""
    text = format_addr(addr)
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"

"""Checks of single fields. Each raises ObjectError with the field's path in the object:
``spec.ports[0].port: 70000 is not a port``.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from kbpf.errors import ObjectError, in_words
from kbpf.model.address import ANY4, ANY6, V4_PREFIX, Addr, format_addr, parse_addr
from kbpf.model.objects import READ_AS, Cidr

T = TypeVar("T")

LINK_LOCAL: Final = "a link-local address"

_LABEL: Final = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_LEADING_ZERO: Final = re.compile(r"(?:^|\.)0[0-9]")
LABEL: Final = re.compile(_LABEL)
SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
LABEL_VALUE: Final = re.compile(r"(?=.{1,63}\Z)[A-Za-z0-9](?:[-_.A-Za-z0-9]*[A-Za-z0-9])?")


def field_error(error: Exception) -> str:
    """msgspec's complaint in our form: ``spec.ports[0].port: expected an integer, ...``."""
    found = re.fullmatch(r"(.*) - at `\$\.?(.*)`", str(error), re.DOTALL)
    text, path = found.groups() if found else (str(error), "")
    return at(path, in_words(text))


def json_error(error: Exception) -> str:
    """The same of an answer: that it is no JSON at all is said first."""
    text = field_error(error)
    is_json = isinstance(error, msgspec.ValidationError | ObjectError)
    return text if is_json else f"broken JSON: {text}"


def at(path: str, text: str) -> str:
    return f"{path}: {text}" if path else text


def one_of(value: str, known: tuple[str, ...], path: str) -> str:
    if value not in known:
        raise ObjectError(at(path, f"{value!r} is not one of {', '.join(known)}"))
    return value


@lru_cache(maxsize=4096)
def label_problem(name: str) -> str:
    """What is wrong with the name of a Service, a namespace or a port; "" when nothing is."""
    if len(name) <= 63 and LABEL.fullmatch(name):
        return ""
    return f"{name!r} is not a DNS label (a-z, 0-9 and - inside, 63 characters at most)"


def label_at(name: str, path: str) -> str:
    if problem := label_problem(name):
        raise ObjectError(at(path, problem))
    return name


def subdomain_at(name: str, path: str) -> str:
    """The name of an EndpointSlice or a Node."""
    if len(name) <= 253 and SUBDOMAIN.fullmatch(name):
        return name
    allowed = "a-z, 0-9, and - and . inside, 253 characters at most"
    raise ObjectError(at(path, f"{name!r} is not a DNS subdomain ({allowed})"))


def shown(name: str) -> str:
    """The same name, on one line whatever is in it: it stands in a key, good or bad."""
    return name if name.isprintable() else repr(name)[1:-1]


def is_local(value: str | None, path: str) -> bool:
    return one_of(value or "Cluster", ("Cluster", "Local"), path) == "Local"


def parse_at(text: str, path: str) -> Addr:
    try:
        return parse_addr(text)
    except (ObjectError, ValueError):
        raise ObjectError(at(path, f"{text!r} is not an IP address")) from None


def leading_zeros(text: str, address: Addr) -> str:
    """What is odd about an IPv4 address that some programs would read as octal; "" if nothing."""
    if not (text.startswith("0") or ".0" in text) or not _LEADING_ZERO.search(text):
        return ""
    return f"{text!r} has leading zeros; {READ_AS} {format_addr(address)}"


def address_at(text: str, path: str) -> Addr:
    address = parse_at(text, path)
    if address in (ANY4, ANY6):
        raise ObjectError(at(path, f"{text} is the unspecified address"))
    return address


def special(address: Addr) -> str:
    """Why an API server refuses this address as an endpoint or external IP; "" when it doesn't.

    Such an address means something else on every node: the node itself, its metadata service.
    (Global multicast and broadcast pass the API server's check, "probably a bug"; not ours. So does
    whatever somebody writes as a load balancer's address.)
    """
    return _special4(address[12:]) if address[:12] == V4_PREFIX else _special6(address)


def _special4(octets: bytes) -> str:
    first = octets[0]
    if first == 127:
        return "a loopback address"
    if first == 169 and octets[1] == 254:
        return LINK_LOCAL
    if octets == bytes(4):
        return "the unspecified address"
    multicast = 224 <= first < 240
    return "not a unicast address" if multicast or octets == b"\xff\xff\xff\xff" else ""


def _special6(address: bytes) -> str:
    first = address[0]
    if first == 0xFE and address[1] & 0xC0 == 0x80:
        return LINK_LOCAL
    if first == 0xFF:
        return "not a unicast address"
    if first == 0 and int.from_bytes(address) <= 1:
        return "a loopback address" if address[15] else "the unspecified address"
    return ""


def parse_cidr(text: str, path: str) -> Cidr:
    """The network in ``10.0.0.0/8`` or ``fd00::/64``; host bits are cleared."""
    head, _, tail = text.partition("/")
    try:
        bits = int(tail) if tail.isascii() and tail.isdigit() else -1
        address = parse_addr(head)
    except (ObjectError, ValueError):
        bits = -1
    width = 128 if ":" in head else 32
    if not 0 <= bits <= width:
        raise ObjectError(at(path, f"{text!r} is not a network in CIDR form"))
    keep = 128 - width + bits
    number = int.from_bytes(address) >> (128 - keep) << (128 - keep)
    return Cidr(Addr(number.to_bytes(16)), keep)


def port_at(number: int | None, path: str) -> int:
    if number is None:
        raise ObjectError(at(path, "missing"))
    if not 1 <= number <= 65535:
        raise ObjectError(at(path, f"{number} is not a port"))
    return number


def or_skip(parse: Callable[[str], T], text: str, path: str, skipped: list[str]) -> T | None:
    try:
        return parse(text)
    except ObjectError as error:
        skipped.append(at(path, str(error)))
        return None

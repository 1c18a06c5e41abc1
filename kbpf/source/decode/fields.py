"""Checks of single fields. Each raises ObjectError with the field's path in the object:
``spec.ports[0].port: 70000 is not a port``.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from kbpf.errors import ObjectError, describe_decode_error
from kbpf.model.address import ANY4, ANY6, V4_PREFIX, Addr, format_addr, parse_addr
from kbpf.model.objects import READ_AS_TEXT, Cidr

T = TypeVar("T")

LINK_LOCAL: Final = "a link-local address"

_LABEL: Final = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_LEADING_ZERO: Final = re.compile(r"(?:^|\.)0[0-9]")
LABEL: Final = re.compile(_LABEL)
SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
LABEL_VALUE: Final = re.compile(r"(?=.{1,63}\Z)[A-Za-z0-9](?:[-_.A-Za-z0-9]*[A-Za-z0-9])?")


def format_decode_error(error: Exception) -> str:
    """msgspec's complaint in our form: ``spec.ports[0].port: expected an integer, ...``."""
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", str(error), re.DOTALL)
    text, path = match.groups() if match else (str(error), "")
    return with_path(path, describe_decode_error(text))


def format_json_error(error: Exception) -> str:
    """The same of an answer: that it is no JSON at all is said first."""
    text = format_decode_error(error)
    is_json = isinstance(error, msgspec.ValidationError | ObjectError)
    return text if is_json else f"broken JSON: {text}"


def with_path(path: str, text: str) -> str:
    return f"{path}: {text}" if path else text


def check_one_of(value: str, allowed: tuple[str, ...], path: str) -> str:
    if value not in allowed:
        raise ObjectError(with_path(path, f"{value!r} is not one of {', '.join(allowed)}"))
    return value


@lru_cache(maxsize=4096)
def label_problem(name: str) -> str:
    """What is wrong with the name of a Service, a namespace or a port; "" when nothing is."""
    if len(name) <= 63 and LABEL.fullmatch(name):
        return ""
    return f"{name!r} is not a DNS label (a-z, 0-9 and - inside, 63 characters at most)"


def check_label(name: str, path: str) -> str:
    if problem := label_problem(name):
        raise ObjectError(with_path(path, problem))
    return name


def check_subdomain(name: str, path: str) -> str:
    """The name of an EndpointSlice or a Node."""
    if len(name) <= 253 and SUBDOMAIN.fullmatch(name):
        return name
    allowed = "a-z, 0-9, and - and . inside, 253 characters at most"
    raise ObjectError(with_path(path, f"{name!r} is not a DNS subdomain ({allowed})"))


def escape_name(name: str) -> str:
    """The same name, on one line whatever is in it: it stands in a key, good or bad."""
    return name if name.isprintable() else repr(name)[1:-1]


def is_local_policy(value: str | None, path: str) -> bool:
    return check_one_of(value or "Cluster", ("Cluster", "Local"), path) == "Local"


def parse_address(text: str, path: str) -> Addr:
    try:
        return parse_addr(text)
    except (ObjectError, ValueError):
        raise ObjectError(with_path(path, f"{text!r} is not an IP address")) from None


def leading_zeros_problem(text: str, address: Addr) -> str:
    """What is odd about an IPv4 address that some programs would read as octal; "" if nothing."""
    if not (text.startswith("0") or ".0" in text) or not _LEADING_ZERO.search(text):
        return ""
    return f"{text!r} has leading zeros; {READ_AS_TEXT} {format_addr(address)}"


def parse_specified_address(text: str, path: str) -> Addr:
    address = parse_address(text, path)
    if address in (ANY4, ANY6):
        raise ObjectError(with_path(path, f"{text} is the unspecified address"))
    return address


def special_address_problem(address: Addr) -> str:
    """Why an API server refuses this address as an endpoint or external IP; "" when it doesn't.

    Such an address means something else on every node: the node itself, its metadata service.
    (Global multicast and broadcast pass the API server's check, "probably a bug"; not ours. So does
    whatever somebody writes as a load balancer's address.)
    """
    return (
        _special_address_problem_v4(address[12:])
        if address[:12] == V4_PREFIX
        else _special_address_problem_v6(address)
    )


def _special_address_problem_v4(octets: bytes) -> str:
    first = octets[0]
    if first == 127:
        return "a loopback address"
    if first == 169 and octets[1] == 254:
        return LINK_LOCAL
    if octets == bytes(4):
        return "the unspecified address"
    multicast = 224 <= first < 240
    return "not a unicast address" if multicast or octets == b"\xff\xff\xff\xff" else ""


def _special_address_problem_v6(address: bytes) -> str:
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
        raise ObjectError(with_path(path, f"{text!r} is not a network in CIDR form"))
    prefix_bits = 128 - width + bits
    number = int.from_bytes(address) >> (128 - prefix_bits) << (128 - prefix_bits)
    return Cidr(Addr(number.to_bytes(16)), prefix_bits)


def check_port(number: int | None, path: str) -> int:
    if number is None:
        raise ObjectError(with_path(path, "missing"))
    if not 1 <= number <= 65535:
        raise ObjectError(with_path(path, f"{number} is not a port"))
    return number


def parse_or_skip(parse: Callable[[str], T], text: str, path: str, skipped: list[str]) -> T | None:
    try:
        return parse(text)
    except ObjectError as error:
        skipped.append(with_path(path, str(error)))
        return None

# SPDX-License-Identifier: Apache-2.0
"""Checks of single fields. Each raises ObjectError with the path of the field in the object:
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
    """Formats an error of msgspec as ``spec.ports[0].port: expected an integer, ...``."""
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", str(error), re.DOTALL)
    text, path = match.groups() if match else (str(error), "")
    return with_path(path, describe_decode_error(text))


def format_json_error(error: Exception) -> str:
    """The same for a response; says first if it is not JSON at all."""
    text = format_decode_error(error)
    is_json = isinstance(error, msgspec.ValidationError | ObjectError)
    return text if is_json else f"invalid JSON: {text}"


def with_path(path: str, text: str) -> str:
    return f"{path}: {text}" if path else text


def check_one_of(value: str, allowed: tuple[str, ...], path: str) -> str:
    if value not in allowed:
        raise ObjectError(with_path(path, f"{value!r} is not one of {', '.join(allowed)}"))
    return value


@lru_cache(maxsize=4096)
def label_problem(name: str) -> str:
    """Returns what is wrong with the name of a Service, a namespace or a port; "" if it is
    valid.
    """
    if len(name) <= 63 and LABEL.fullmatch(name):
        return ""
    return f"{name!r} is not a DNS label (a-z, 0-9 and - inside, at most 63 characters)"


def check_label(name: str, path: str) -> str:
    if problem := label_problem(name):
        raise ObjectError(with_path(path, problem))
    return name


def check_subdomain(name: str, path: str) -> str:
    if len(name) <= 253 and SUBDOMAIN.fullmatch(name):
        return name
    allowed = "a-z, 0-9, and - and . inside, at most 253 characters"
    raise ObjectError(with_path(path, f"{name!r} is not a DNS subdomain ({allowed})"))


def escape_name(name: str) -> str:
    """Escapes a name so that it fits on one line: it appears in keys even if it is invalid."""
    return name if name.isprintable() else repr(name)[1:-1]


def is_local_policy(value: str | None, path: str) -> bool:
    return check_one_of(value or "Cluster", ("Cluster", "Local"), path) == "Local"


def parse_address(text: str, path: str) -> Addr:
    try:
        return parse_addr(text)
    except (ObjectError, ValueError):
        raise ObjectError(with_path(path, f"{text[:64]!r} is not an IP address")) from None


def leading_zeros_problem(text: str, address: Addr) -> str:
    """Describes an IPv4 address with leading zeros, which some programs read as octal; "" if it
    has none.
    """
    if not (text.startswith("0") or ".0" in text) or not _LEADING_ZERO.search(text):
        return ""
    return f"{text!r} has leading zeros; {READ_AS_TEXT} {format_addr(address)}"


def parse_specified_address(text: str, path: str) -> Addr:
    address = parse_address(text, path)
    if address in (ANY4, ANY6):
        raise ObjectError(with_path(path, f"{text} is the unspecified address"))
    return address


def special_address_problem(address: Addr) -> str:
    """Returns why an API server rejects this address as an endpoint or ExternalIP; "" if it does
    not.

    Such an address has another meaning on every node: the node itself, or its metadata service.
    (The API server's check lets global multicast and broadcast pass, "probably a bug"; this one
    does not. The API server does not check the addresses of load balancers at all.)
    """
    return (
        _special_address_problem_v4(address[12:]) if address[:12] == V4_PREFIX else _special_address_problem_v6(address)
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
    try:
        return Cidr.parse(text)
    except ObjectError as error:
        problem = f"{text!r} is not a network in CIDR form"
        raise ObjectError(with_path(path, problem)) from error


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

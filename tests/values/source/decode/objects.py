# SPDX-License-Identifier: Apache-2.0
"""Objects to decode."""

from typing import Any

import msgspec

from kbpf.model.address import parse_addr
from kbpf.model.events import Kind
from kbpf.model.objects import Cidr, Protocol
from kbpf.source.decode import decode

TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP

HEADLESS = "service.kubernetes.io/headless"
OF_SERVICE = "kubernetes.io/service-name"


def read(kind: Kind, obj: dict[str, Any]) -> decode.DecodedObject:
    """Decodes JSON (as from an API server) and a mapping (as from a folder); both must agree."""
    item = decode.decode_object(kind, msgspec.json.encode(obj))
    assert decode.convert_object(kind, obj) == item
    return item


def a(text: str) -> bytes:
    return parse_addr(text)


def cidr(text: str, bits: int) -> Cidr:
    return Cidr(parse_addr(text), bits)

# SPDX-License-Identifier: Apache-2.0
"""Objects to decode."""

from typing import Any

import msgspec
import yaml

from kbpf.model.address import parse_addr
from kbpf.model.events import Kind
from kbpf.model.objects import Cidr
from kbpf.source.decode import decode

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


def fields(text: str) -> dict[str, Any]:
    """Fields of an object, in YAML without the outer braces: ``type: NodePort, ports: [{port: 80}]``."""
    return yaml.safe_load("{" + text + "}")

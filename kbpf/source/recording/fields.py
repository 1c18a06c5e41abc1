# SPDX-License-Identifier: Apache-2.0
"""Reduces an object of the Kubernetes API to the fields that kbpf reads: those of
source/decode/wire.py. An object that kbpf rejects stays one that it rejects for the same reason.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import inspect

from kbpf.model.events import Kind
from kbpf.source.decode import wire

Shape = Mapping[str, Any]
"""Field → the Shape of its value, a list of one for a list's items, str for a text, or None for a
number or a boolean.
"""

_TYPES: Final = {
    Kind.SERVICE: wire.Service,
    Kind.SLICE: wire.EndpointSlice,
    Kind.NODE: wire.Node,
    Kind.POD: wire.Pod,
}


def _shape_of(type_: inspect.Type) -> Any:
    match type_:
        case inspect.UnionType(types=types):
            return next(_shape_of(t) for t in types if not isinstance(t, inspect.NoneType))
        case inspect.StructType(fields=fields):
            return {field.encode_name: _shape_of(field.type) for field in fields}
        case inspect.VarTupleType(item_type=item):
            return [_shape_of(item)]
        case inspect.StrType():
            return str
    return None


SHAPES: Final[Mapping[Kind, Shape]] = {
    kind: _shape_of(inspect.type_info(type_)) for kind, type_ in _TYPES.items()
}


def reduce_object(kind: Kind, value: Any) -> dict[str, Any]:
    """The object with only the fields that kbpf reads, and its kind. `value` is plain JSON."""
    return {"kind": str(kind), **_reduce(value, SHAPES[kind])}


def reduce_json(kind: Kind, raw: bytes | msgspec.Raw) -> dict[str, Any]:
    """The same for the text of an object that decode_object() has accepted or rejected."""
    return reduce_object(kind, msgspec.json.decode(raw))


def _reduce(value: Any, shape: Any) -> Any:
    match value, shape:
        case dict(), dict():
            return {k: _reduce(v, shape[k]) for k, v in value.items() if k in shape}
        case list() | tuple(), [item]:
            return [_reduce(each, item) for each in value]
        case dict(), _:
            return {}  # not what is expected here: its type is the error, its content is not
        case list() | tuple(), _:
            return []
    return value


def list_texts(shape: Any, path: str = "") -> Iterator[str]:
    """The paths of all texts: ``spec.ports[].name``."""
    match shape:
        case dict():
            for name, child in shape.items():
                yield from list_texts(child, f"{path}.{name}" if path else name)
        case [item]:
            yield from list_texts(item, f"{path}[]")
        case type():
            yield path

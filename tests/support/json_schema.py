# SPDX-License-Identifier: Apache-2.0
"""A validator for the part of JSON Schema that `kbpf schema` uses. It also rejects fields that a
schema does not have, which JSON Schema by itself would not.
"""

from collections.abc import Iterator, Mapping
from typing import Any

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


def validate(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """All differences between a parsed JSON document and its schema."""
    return [*_differences(value, schema, schema.get("$defs", {}), "$")]


def _differences(value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    for keyword in ("oneOf", "anyOf"):
        if keyword in schema:
            tried = [[*_differences(value, s, definitions, path)] for s in schema[keyword]]
            matches = sum(not differences for differences in tried)
            if not matches or (keyword == "oneOf" and matches > 1):
                yield f"{path} matches {matches} of {keyword}: {min(tried, key=len)}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is {value!r}, not one of {schema['enum']}"
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{path} is {value!r}, not of type {kind}"
    elif kind == "object":
        properties = schema.get("properties", {})
        yield from (f"{path} has no {name}" for name in schema.get("required", ()) if name not in value)
        for name, field in value.items():
            known = properties.get(name, schema.get("additionalProperties"))
            if known is None:
                yield f"{path} has {name}, which the schema does not have"
            else:
                yield from _differences(field, known, definitions, f"{path}.{name}")
    elif kind == "array":
        for index, item in enumerate(value):
            yield from _differences(item, schema["items"], definitions, f"{path}[{index}]")

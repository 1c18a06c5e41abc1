# SPDX-License-Identifier: Apache-2.0
"""`kbpf schema`: the JSON Schema of the documents that commands print with -o json and yaml.

It is generated from the types of the rows. Their docstrings are the descriptions: that of a field
are the sentences which name it.
"""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from kbpf.errors import NotFoundError
from kbpf.views.page import API_VERSION, Kind

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
SENTENCE_END: Final = re.compile(r"(?<=\.)\s+(?=(?:- )?[`A-Z])|;\s+(?=`)")


def list_kinds() -> tuple[Kind, ...]:
    """All kinds, by name."""
    from kbpf.cli import check, cleanup, compile, demo, sysdump
    from kbpf.views import (
        affinity,
        backends,
        differences,
        endpoints,
        failures,
        maps,
        monitor,
        programs,
        service,
        services,
        sources,
        status,
        top,
        trace_page,
        verification,
    )
    from kbpf.views.packet_path import connections, devices, nat

    modules = (
        affinity,
        backends,
        check,
        cleanup,
        compile,
        connections,
        devices,
        differences,
        endpoints,
        failures,
        maps,
        monitor,
        nat,
        programs,
        service,
        services,
        sources,
        status,
        sysdump,
        top,
        trace_page,
        verification,
    )
    kinds = (*(module.KIND for module in modules), monitor.LEFT_OUT_KIND, demo.result_kind())
    return tuple(sorted(kinds, key=lambda kind: kind.name))


def build_schema(kinds: Iterable[Kind]) -> dict[str, Any]:
    """The JSON Schema of a document that is of one of these kinds."""
    types = [document_type(kind) for kind in kinds]
    references, definitions = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    for definition in definitions.values():
        if "properties" in definition:
            _describe_fields(definition)
    return {"$schema": DIALECT, "oneOf": list(references), "$defs": definitions}


def document_type(kind: Kind) -> type:
    """The struct of a whole document."""
    fields: list[tuple[str, Any]] = [("apiVersion", Literal[API_VERSION]), ("kind", Literal[kind.name])]
    if kind.summary is not None:
        fields += [(field.name, field.type) for field in msgspec.structs.fields(kind.summary)]
    if kind.item is not None:
        fields.append(("items", tuple[kind.item, ...]))  # type: ignore[name-defined]
    doc = kind.summary.__doc__ if kind.summary is not None else None
    return msgspec.defstruct(kind.name, fields, namespace={"__doc__": doc})


def _describe_fields(definition: dict[str, Any]) -> None:
    """Gives the fields their descriptions. All of them are required: they are always printed."""
    description = " ".join(definition.get("description", "").split())
    if description:
        definition["description"] = description
    sentences = SENTENCE_END.split(description)
    for name, field in definition["properties"].items():
        named = [text.strip("- .") + "." for text in sentences if f"`{name}`" in text]
        if named:
            field["description"] = " ".join(named)
        field.pop("default", None)
    definition["required"] = list(definition["properties"])


def schema(
    name: Annotated[str, typer.Argument(metavar="[KIND]", help="Only of this kind: ServiceList, Status, ...")] = "",
) -> None:
    """Print the JSON Schema of what commands print with -o json and -o yaml."""
    kinds = list_kinds()
    chosen = [kind for kind in kinds if name in ("", kind.name)]
    if not chosen:
        names = ", ".join(kind.name for kind in kinds)
        raise NotFoundError(f"there is no kind {name}", "", f"there are {names}")
    print(json.dumps(build_schema(chosen), indent=2, ensure_ascii=False))

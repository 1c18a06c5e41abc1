# SPDX-License-Identifier: Apache-2.0
"""`kbpf schema`: it has every kind that a command can print, and describes it. test_inspect.py
validates the output of all views with it.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbpf.cli import app
from kbpf.cli.schema import build_schema, document_type, list_kinds
from kbpf.views.page import API_VERSION, Kind
from tests.support.json_schema import validate

ROOT = Path(__file__).parents[3]
ALL = build_schema(list_kinds())


def test_every_kind_of_the_sources_has_a_schema():
    sources = "\n".join(path.read_text() for path in (ROOT / "kbpf").rglob("*.py"))
    assert sorted(re.findall(r'\bKind\(\s*"(\w+)"', sources)) == [k.name for k in list_kinds()]


@pytest.mark.parametrize("kind", list_kinds(), ids=lambda kind: kind.name)
def test_kind_keeps_the_names_that_all_documents_share(kind: Kind):
    names = [field.name for field in msgspec.structs.fields(document_type(kind))]
    assert len(names) == len(set(names))
    assert names[:2] == ["apiVersion", "kind"]
    assert ("items" in names) == (kind.item is not None) == kind.name.endswith("List")


class Part(msgspec.Struct):
    """A part. `size` is in bytes; `gone`: it was removed.

    - `size`: never negative.
    """

    size: int | None
    gone: bool = False


class Summary(msgspec.Struct):
    """`parts`: by name."""

    parts: dict[str, Part]


KIND = Kind("PartList", Part, Summary)
SCHEMA = build_schema([KIND])
PART: dict[str, Any] = {"size": 1, "gone": False}
DOCUMENT: dict[str, Any] = {"apiVersion": API_VERSION, "kind": "PartList", "parts": {"a": PART}, "items": [PART]}


def test_fields_have_the_sentences_that_name_them():
    assert SCHEMA["$defs"]["PartList"]["properties"]["parts"]["description"] == "`parts`: by name."
    assert SCHEMA["$defs"]["Part"] == {
        "title": "Part",
        "type": "object",
        "required": ["size", "gone"],
        "description": "A part. `size` is in bytes; `gone`: it was removed. - `size`: never negative.",
        "properties": {
            "size": {
                "anyOf": [{"type": "integer"}, {"type": "null"}],
                "description": "`size` is in bytes. `size`: never negative.",
            },
            "gone": {"type": "boolean", "description": "`gone`: it was removed."},
        },
    }


def test_document_matches_its_schema():
    assert validate(DOCUMENT, SCHEMA) == []
    assert validate(DOCUMENT, ALL) != []
    changed = {**DOCUMENT, "more": 1, "items": [{**PART, "size": "1"}], "parts": {"a": {"size": 1}}}
    (told,) = validate(changed, SCHEMA)
    for words in (
        "parts.a has no gone",
        "items[0].size matches 0 of anyOf",
        "has more, which the schema does not have",
    ):
        assert words in told


def test_command_prints_one_kind_or_all(capsys):
    assert app.call(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == ALL
    assert app.call(["schema", "Status"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert next(iter(status["$defs"])) == "Status"
    assert status["oneOf"] == [{"$ref": "#/$defs/Status"}]
    assert app.call(["schema", "Cow"]) == 1
    assert capsys.readouterr().err.startswith("kbpf: there is no kind Cow; there are AffinityList,")

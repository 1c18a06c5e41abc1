# SPDX-License-Identifier: Apache-2.0
"""Untrusted text in tables, pages, JSON and YAML: no byte of it controls the terminal."""

import json
from typing import Any, NamedTuple

import pytest
import yaml

from kbpf.cli import render
from kbpf.cli.options import Output
from kbpf.errors import KbpfError, KernelError
from kbpf.views.page import Column, Kind, Page, format_facts, format_table

HOSTILE = "a\x1b[2J\x9b1m\x00\x7f\r\n\u202eb\u2066\u200f\u2028c"
SAFE = r"a\x1b[2J\x9b1m\x00\x7f\r\n\u202eb\u2066\u200f\u2028c"


class Row(NamedTuple):
    name: str


COLUMNS = (Column("NAME", lambda row: row.name),)
KIND = Kind("RowList", Row)


def rendered(value: Any, output: Output) -> str:
    return "".join(render.render_page(Page(KIND, [value], COLUMNS), output))


def shows(text: str) -> bool:
    """Whether every line is printable."""
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a table", format_table([Row(HOSTILE)], COLUMNS)),
        ("a stream of rows", rendered(Row(HOSTILE), Output.TABLE)),
        ("facts", format_facts([("error", HOSTILE)])),
        ("an error", str(KbpfError("said " + HOSTILE.replace("\r\n", ""), "x", "y"))),
        ("a kernel's error", str(KernelError("said \x1b]0;x\x07", "x", errno=1))),
    ],
)
def test_hostile_text_is_escaped(name, text):
    assert shows(text), name
    assert r"\x1b" in text
    if name in ("a table", "a stream of rows", "facts"):
        assert SAFE in text


@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
@pytest.mark.parametrize("value", [HOSTILE, "ä 中", "plain"])
def test_json_and_yaml_are_escaped_and_keep_their_value(output: Output, value):
    parse: Any = json.loads if output is Output.JSON else yaml.safe_load
    text = render.format_document([{"name": value}], output)
    assert shows(text)
    assert parse(text) == [{"name": value}]
    streamed = rendered({"name": value}, output)
    assert shows(streamed)
    assert parse(streamed)["items"] == [{"name": value}]
    assert ("ä" in text) == ("ä" in value), "what can be printed stays as it is"

# SPDX-License-Identifier: Apache-2.0
"""Output formats: tables, JSON, YAML, durations and sizes."""

import json
from types import SimpleNamespace

import msgspec
import pytest
import yaml

from kbpf import cli, views
from kbpf.cli import inspect, render, schema
from kbpf.cli.options import Output
from kbpf.cli.render import watch
from kbpf.dataplane.bpf.maps.layout import TcpState
from kbpf.model.inspection import CONNECTION_STATES
from kbpf.views import packet_path
from kbpf.views.page import Column, Kind, Page, format_duration
from kbpf.views.page import format_size as bytes_text
from tests.support.table import pairs

# ---- formats -----------------------------------------------------------------------------------


class Thing(msgspec.Struct):
    name: str
    count: int
    parts: tuple[str, ...] = ("x", "y")


class Above(msgspec.Struct):
    total: int


THINGS = (Thing("a", 1), Thing("a {longer} one", 1000, ()))
COLUMNS = (Column("NAME", "name"), Column("COUNT", "count", right=True), Column("MORE", lambda t: "x", wide=True))
THING_LIST = Kind("ThingList", Thing, Above)
HEAD = {"apiVersion": "kbpf.io/v1alpha1", "kind": "ThingList"}


def rendered(page: Page, output: Output = Output.TABLE, titles: bool = True) -> str:
    return "".join(render.render_page(page, output, titles))


def test_table_is_aligned_without_truncation():
    assert rendered(Page(THING_LIST, iter(THINGS), COLUMNS)).splitlines() == [
        "NAME             COUNT",
        "a                    1",
        "a {longer} one    1000",
    ]


TABLES = [((), True, "NAME   COUNT\n"), ((), False, ""), (THINGS[:1], False, "a          1\n")]


@pytest.mark.parametrize(("rows", "titles", "text"), TABLES)
def test_titles_of_a_table(rows: tuple[Thing, ...], titles: bool, text: str):
    assert rendered(Page(THING_LIST, rows, COLUMNS), titles=titles) == text


def test_wide_adds_columns():
    page = Page(THING_LIST, THINGS, COLUMNS)
    assert rendered(page, Output.WIDE).split()[:3] == ["NAME", "COUNT", "MORE"]


def test_text_is_above_the_table():
    page = Page(THING_LIST, THINGS[:1], COLUMNS[:1], text=lambda wide: f"wide {wide}")
    assert rendered(page) == "wide False\n\nNAME\na\n"
    assert rendered(page, Output.WIDE) == "wide True\n\nNAME\na\n"
    assert rendered(Page(THING_LIST, THINGS, text=lambda wide: "only text")) == "only text\n"


@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
@pytest.mark.parametrize("above", [None, Above(5)])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_list_is_one_document_with_its_items_last(output: Output, above: Above | None, count: int):
    page = Page(THING_LIST, iter(THINGS[:count]), COLUMNS, summary=above)
    text = rendered(page, output)
    total = {"total": 5} if above else {}
    whole = {**HEAD, **total, "items": msgspec.to_builtins(THINGS[:count])}
    if output is Output.JSON:
        assert text == json.dumps(whole, indent=2) + "\n"
    else:
        assert list(yaml.safe_load(text).items()) == list(json.loads(json.dumps(whole)).items())
        assert text.endswith("\n")
        assert not text.endswith("\n\n")


@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
def test_rows_are_written_one_by_one(output: Output):
    pieces = render.render_page(Page(THING_LIST, iter(THINGS), COLUMNS), output)
    assert sum("longer" in piece or '"a"' in piece or ": a\n" in piece for piece in pieces) == 2


@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
def test_what_is_no_list_has_no_items(output: Output):
    text = rendered(Page(Kind("Thing", summary=Thing), text=str, summary=THINGS[0]), output)
    read = json.loads if output is Output.JSON else yaml.safe_load
    assert read(text) == {**HEAD, "kind": "Thing", "name": "a", "count": 1, "parts": ["x", "y"]}


def test_states_to_filter_by_are_those_shown():
    assert tuple(inspect.ConnectionState) == CONNECTION_STATES == tuple(state.name.lower() for state in TcpState)


@pytest.mark.parametrize(("seconds", "text"), pairs("0.9 → 0s\n59 → 59s\n61 → 1m01s\n3600 → 1h00m\n90061 → 1d01h"))
def test_format_duration(seconds: str, text: str):
    assert format_duration(float(seconds)) == text


SORTED = """\
9s, 1m00s, 2h03m, 5d01h
3s ago, 41s ago, 7m00s ago
812B, 1.5KiB, 64KiB, 1.0MiB, 3.0GiB
8, 9, 10
10.0.0.9:80, 10.0.0.10:80
9.0%, 80.0% !
-, 1
""".splitlines()


@pytest.mark.parametrize("cells", SORTED)
def test_cells_are_sorted_by_value(cells: str):
    texts = cells.split(", ")
    page = Page(THING_LIST, [Thing(text, 0) for text in reversed(texts)], COLUMNS)
    assert [row.name for row in page.refined(sort_by="name").rows] == texts


@pytest.mark.parametrize(("count", "text"), pairs("0 → 0B\n812 → 812B\n1536 → 1.5KiB\n65536 → 64KiB\n3e9 → 2.8GiB"))
def test_format_size(count: str, text: str):
    assert bytes_text(int(float(count))) == text
    assert bytes_text(None) == "-"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), ("", "-"), ((), "-"), ("a", "a"), (("a", "b"), "a, b"), (0, "0"), (True, "yes"), (False, "no")],
)
def test_the_text_of_a_field(value: object, text: str):
    row = SimpleNamespace(field=value)
    assert Column("X", "field").text(row) == text
    assert Column("X", "field", lambda value: f"<{value}>").text(row) == ("-" if value is None else f"<{value}>")
    assert Column("X", "field.field").text(SimpleNamespace(field=row)) == text
    assert Column("X", "field.field").text(SimpleNamespace(field=None)) == "-"


def test_columns_name_fields_of_their_rows():
    schema.list_kinds()  # imports all modules with rows
    found = 0
    for module in (*vars(views).values(), *vars(packet_path).values(), *vars(cli).values()):
        kind = getattr(module, "KIND", None)
        if isinstance(kind, Kind) and kind.item is not None:
            for column in getattr(module, "COLUMNS", ()):
                if isinstance(column, Column) and isinstance(column.value, str):
                    name = column.value.partition(".")[0]
                    assert hasattr(kind.item, name), (kind.name, column)
                    found += 1
    assert found > 80


def test_watch_prints_the_page_until_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", nap)
    with pytest.raises(KeyboardInterrupt):
        watch(lambda: f"page {len(naps)}", 2.0)
    assert capsys.readouterr().out == "page 0\n\npage 1\n\npage 2\n\n"
    assert naps == [2.0] * 3

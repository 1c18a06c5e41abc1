# SPDX-License-Identifier: Apache-2.0
"""Tables, durations and sizes. The formats of each view are in tests/golden/inspect."""

import msgspec
import pytest

from kbpf.cli import render
from kbpf.cli.options import Output, Selection
from kbpf.cli.render import watch
from kbpf.dataplane.bpf.maps.layout import TcpState
from kbpf.model.inspection import ConnectionState
from kbpf.views.page import Column, Kind, Page, format_duration
from kbpf.views.page import format_size as bytes_text
from tests.support.table import each_pair


class Thing(msgspec.Struct):
    name: str
    count: int


THINGS = (Thing("a", 1), Thing("a {longer} one", 1000))
COLUMNS = (Column("NAME", "name"), Column("COUNT", "count", right=True))
THING_LIST = Kind("ThingList", Thing)


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
def test_titles_of_a_table(rows: tuple[Thing, ...], titles, text):
    assert rendered(Page(THING_LIST, rows, COLUMNS), titles=titles) == text


@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
def test_rows_are_written_one_by_one(output: Output):
    pieces = render.render_page(Page(THING_LIST, iter(THINGS), COLUMNS), output)
    assert sum("longer" in piece or '"a"' in piece or ": a\n" in piece for piece in pieces) == 2


def test_states_to_filter_by_are_those_shown():
    assert tuple(ConnectionState) == tuple(state.name.lower() for state in TcpState)


@each_pair("seconds, text", "0.9 → 0s\n59 → 59s\n61 → 1m01s\n3600 → 1h00m\n90061 → 1d01h")
def test_format_duration(seconds, text):
    assert format_duration(float(seconds)) == text


SORTED = """\
8, 9, 10
10.0.0.9:80, 10.0.0.10:80
9.0%, 80.0% !
-, 1
""".splitlines()


@pytest.mark.parametrize("cells", SORTED)
def test_cells_are_sorted_by_value(cells):
    texts = cells.split(", ")
    page = Page(THING_LIST, [Thing(text, 0) for text in reversed(texts)], COLUMNS)
    assert [row.name for row in Selection("", "name").apply(page).rows] == texts


OF_A_NUMBER = (
    Column("COUNT", "count", format_duration),
    Column("COUNT", "count", bytes_text),
    Column("COUNT", lambda row: f"{format_duration(row.count)} ago" if row.count else "never", by="count"),
)


@pytest.mark.parametrize("column", OF_A_NUMBER)
def test_cells_that_show_a_number_are_sorted_by_the_number(column: Column):
    counts = [0, 9, 60, 7380, 435_600, 5_000_000]
    page = Page(THING_LIST, [Thing("", count) for count in reversed(counts)], (column,))
    assert [row.count for row in Selection("", "count").apply(page).rows] == counts


@each_pair("count, text", "0 → 0B\n812 → 812B\n1536 → 1.5KiB\n65536 → 64KiB\n3e9 → 2.8GiB")
def test_format_size(count, text):
    assert bytes_text(int(float(count))) == text
    assert bytes_text(None) == "-"


def test_watch_prints_the_page_until_interrupted(monkeypatch, capsys):
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

# SPDX-License-Identifier: Apache-2.0
"""Output formats: tables, JSON, YAML, durations and sizes."""

import json

import msgspec
import pytest
import yaml

from kbpf.cli import inspect, render
from kbpf.cli.options import Output
from kbpf.cli.render import watch
from kbpf.dataplane.bpf.maps.layout import TcpState
from kbpf.model.inspection import CONNECTION_STATES
from kbpf.views.columns import Column, format_duration
from kbpf.views.columns import format_size as bytes_text

# ---- formats -----------------------------------------------------------------------------------

COLUMNS = (
    Column("NAME", lambda r: r["name"]),
    Column("COUNT", lambda r: str(r["count"]), right=True),
    Column("MORE", lambda r: "x", wide=True),
)
ROWS = ({"name": "a", "count": 1}, {"name": "a longer one", "count": 1000})


def test_table_is_aligned_without_truncation():
    assert render.format_rows(ROWS, COLUMNS, Output.TABLE).splitlines() == [
        "NAME           COUNT",
        "a                  1",
        "a longer one    1000",
    ]


def test_table_without_rows_has_its_header():
    assert render.format_rows((), COLUMNS, Output.TABLE) == "NAME   COUNT"


def test_wide_adds_columns():
    assert render.format_rows(ROWS, COLUMNS, Output.WIDE).splitlines()[0].split() == [
        "NAME", "COUNT", "MORE",
    ]  # fmt: skip


def test_json_and_yaml_have_the_same_content_in_the_same_order():
    as_json = render.format_rows(ROWS, COLUMNS, Output.JSON)
    as_yaml = render.format_rows(ROWS, COLUMNS, Output.YAML)
    assert json.loads(as_json) == yaml.safe_load(as_yaml) == list(ROWS)
    assert as_yaml.splitlines()[0] == "- name: a"


class Thing(msgspec.Struct):
    name: str
    count: int
    parts: tuple[str, ...] = ("x", "y")


THINGS = (Thing("a", 1), Thing("a {longer} one", 1000, ()))
THING_COLUMNS = (
    Column("NAME", lambda t: t.name),
    Column("COUNT", lambda t: str(t.count), right=True),
    Column("MORE", lambda t: "", wide=True),
)


@pytest.mark.parametrize("output", Output)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_streamed_rows_equal_formatted_rows(output: Output, count: int):
    some = THINGS[:count]
    streamed = "".join(render.stream_rows(iter(some), THING_COLUMNS, output))
    assert streamed == render.format_rows(some, THING_COLUMNS, output) + "\n"


@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_rows_streamed_below_a_value_are_one_document(output: Output, count: int):
    some = THINGS[:count]
    streamed = "".join(render.stream_rows(iter(some), THING_COLUMNS, output, Thing("above", 5)))
    whole = {**msgspec.to_builtins(Thing("above", 5)), "rows": msgspec.to_builtins(some)}
    read = json.loads if output is Output.JSON else yaml.safe_load
    assert read(streamed) == json.loads(json.dumps(whole))
    assert streamed.count("\n") == streamed.rstrip("\n").count("\n") + 1
    if output is Output.JSON:
        assert streamed == json.dumps(whole, indent=2) + "\n"


def test_states_to_filter_by_are_those_shown():
    assert (
        tuple(inspect.ConnectionState)
        == CONNECTION_STATES
        == tuple(state.name.lower() for state in TcpState)
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0s"), (59, "59s"), (61, "1m01s"), (3600, "1h00m"), (90_061, "1d01h")],
)
def test_format_duration(seconds: float, text: str):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0B"),
        (812, "812B"),
        (1536, "1.5KiB"),
        (64 << 10, "64KiB"),
        (3 << 30, "3.0GiB"),
    ],
)
def test_format_size(count: int | None, text: str):
    assert bytes_text(count) == text


def test_watch_prints_the_page_until_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
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

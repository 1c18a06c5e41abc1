# SPDX-License-Identifier: Apache-2.0
"""Recordings that are cut off, damaged, too large, newer, or something else entirely."""

import contextlib
import gzip
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.cli.origin import read_world
from kbpf.errors import SourceError
from kbpf.model.config import Config
from kbpf.model.events import Event, Kind, Rejected, Synced, Upsert
from kbpf.source.recording import format as recording
from kbpf.source.recording import replay
from kbpf.source.recording.format import RecordingReader
from kbpf.source.recording.replay import read_events
from tests.values.source.recording.samples import (
    END,
    HEADER,
    SYNCED,
    added,
    encode,
    service,
    slice_of,
    write,
)

WEB, DNS = added(service("web")), added(service("dns", "10.96.0.2"))
WHOLE = encode(HEADER, WEB, DNS, *SYNCED, END)


def read(path: Path) -> tuple[list[Event], RecordingReader]:
    reader = RecordingReader(path)
    return [event for _, event in read_events(reader)], reader


def names(events: list[Event]) -> list[str]:
    """The Services and their problems, and how many kinds are synced."""
    kinds = {event.kind for event in events if isinstance(event, Synced)}
    rows = [
        f"{event.key.name}{' rejected' if isinstance(event, Rejected) else ''}"
        for event in events
        if not isinstance(event, Synced)
    ]
    return [*rows, f"{len(kinds)} synced"]


class Row(NamedTuple):
    """The bytes of a file, what is replayed of it, whether it is complete, and its problems."""

    data: bytes
    events: list[str]
    complete: bool
    problems: tuple[str, ...] = ()


CUT = "is cut off"
ROWS = {
    "whole": Row(WHOLE, ["web", "dns", "3 synced"], True),
    "compressed": Row(gzip.compress(WHOLE), ["web", "dns", "3 synced"], True),
    "without its last line": Row(
        encode(HEADER, WEB, DNS), ["web", "dns", "3 synced"], False, (CUT,)
    ),
    "inside a line": Row(encode(HEADER, WEB, DNS)[:-9], ["web", "3 synced"], False, (CUT,)),
    "inside the compressed data": Row(
        gzip.compress(encode(HEADER, WEB, DNS))[:-12], ["web", "3 synced"], False, (CUT,)
    ),
    "damaged compressed data": Row(
        gzip.compress(encode(HEADER, WEB), 0)[:-8] + bytes(8), ["web", "3 synced"], False,
        ("cannot be read further", CUT),
    ),
    "only a header": Row(encode(HEADER), ["3 synced"], False, (CUT,)),
    "its limit was reached": Row(
        encode(HEADER, WEB, *SYNCED, END | {"complete": False}), ["web", "3 synced"], False,
        ("at its --max-bytes",),
    ),
    "a line that is not JSON": Row(
        encode(HEADER, b"\xff\x00{", WEB, END), ["web", "3 synced"], True, ("not an event",)
    ),
    "a line of another type": Row(
        encode(HEADER, [1], "x", {"t": "soon", "type": "ADDED"}, WEB, END), ["web", "3 synced"],  # type: ignore[arg-type]
        True, ("not an event", "not an event", "not an event"),
    ),
    "an empty line": Row(
        encode(HEADER, b"", WEB, END), ["web", "3 synced"], True, ("not an event",)
    ),
    "deeply nested": Row(
        encode(HEADER, b'{"t":0,"type":"ADDED","object":%s}' % (b"[" * 9999 + b"]" * 9999), END),
        ["3 synced"], True, ("not an",),
    ),
    "an unknown event": Row(
        encode(HEADER, {"t": 0, "type": "SHRUNK"}, WEB, END), ["web", "3 synced"], True,
        ("unknown event 'SHRUNK'",),
    ),
    "an unknown kind": Row(
        encode(HEADER, added({"kind": "Secret", "metadata": {"name": "x"}}),
               {"t": 0, "type": "SYNCED", "kind": "Secret"}, WEB, END),
        ["web", "3 synced"], True, ("unknown kind 'Secret'", "unknown kind 'Secret'"),
    ),
    "an object without a name": Row(
        encode(HEADER, added({"kind": "Service", "metadata": {}}), WEB, END),
        ["web", "3 synced"], True, ("metadata.name: missing",),
    ),
    "an object that is rejected": Row(
        encode(HEADER, added(service("web", "10.96.0.300")), DNS, END),
        ["web rejected", "dns", "3 synced"], True,
    ),
    "an object deleted that never was": Row(
        encode(HEADER, {"t": 0, "type": "DELETED", "object": service("web")}, DNS, END),
        ["dns", "3 synced"], True,
    ),
    "lines after the end": Row(
        encode(HEADER, WEB, END, DNS), ["web", "3 synced"], True, ("after the last one",)
    ),
    "control characters": Row(
        encode(HEADER, {"t": 0, "type": "\x1b[31m"}, END), ["3 synced"], True, ("\\x1b[31m",)
    ),
    "time goes back": Row(
        encode(HEADER, added(service("web"), 1e300), added(service("dns", "10.96.0.2"), -5), END),
        ["web", "dns", "3 synced"], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_what_can_be_read_is_replayed(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    path = tmp_path / "recording"
    path.write_bytes(row.data)
    events, reader = read(path)
    assert names(events) == row.events
    assert reader.complete is row.complete
    assert len(reader.problems) == len(row.problems), reader.problems
    for text, problem in zip(row.problems, reader.problems, strict=True):
        assert text in problem
        assert str(path) in problem
        assert problem.isprintable()


def test_a_line_that_is_too_long_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(recording, "SKIPPED_CHUNK", 100)
    large = added(service("large", "10.96.0.3", externalIPs=["192.0.2.1"] * 500))
    events, reader = read(write(tmp_path / "r", HEADER, WEB, large, DNS, END))
    assert names(events) == ["web", "dns", "3 synced"]
    assert "r:3" in reader.problems[0]


def test_a_small_file_that_expands_without_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_READ_BYTES", 1 << 20)
    path = tmp_path / "r.gz"
    path.write_bytes(gzip.compress(encode(HEADER, *(b" " * 10_000 for _ in range(1000)))))
    assert path.stat().st_size < 20_000
    with pytest.raises(SourceError, match="more than"):
        read(path)


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ([added(service(f"s{n}", f"10.96.0.{n}")) for n in range(4)], 4),
        ([added(service(f"s{n}", f"10.96.0.{n}")) for n in range(40)], None),
        ([added(service("web"))] * 400, 1),
        ([added(service("web")), {"t": 0, "type": "DELETED", "object": service("web")}] * 400, 0),
        ([added(service("web", externalIPs=["192.0.2.1"] * 400))], None),
        ([added(service("web", externalIPs=["192.0.2"] * 400))], None),
    ],
    ids=["few", "many", "changes of one", "deleted", "a large one", "a rejected one"],
)
def test_values_that_exist_at_one_time_are_limited(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[dict[str, object]],
    count: int | None,
) -> None:
    """A recording of 4 MB may expand to objects that take 1 GB."""
    monkeypatch.setattr(replay, "MAX_VALUES", 100)
    path, problems = write(tmp_path / "r", HEADER, *lines, END), list[str]()
    if count is not None:
        assert len(read_world(str(path), Config(), problems)) == count + 3  # one Synced per kind
        return
    with pytest.raises(SourceError, match="more than 100 values"):
        read_world(str(path), Config(), problems)


def test_problems_are_limited(tmp_path: Path) -> None:
    _, reader = read(write(tmp_path / "r", HEADER, *[b"x"] * 1000, END))
    assert len(reader.problems) == recording.MAX_PROBLEMS + 1
    assert "only the first" in reader.problems[-1]


NOT_RECORDINGS = {
    "empty": (b"", "not a recording"),
    "text": (b"hello\n", "not a recording"),
    "binary": (bytes(range(256)) * 20, "not a recording"),
    "an executable": (b"\x7fELF" + bytes(10_000), "not a recording"),
    "not really gzip": (b"\x1f\x8b\x08\x00 hello", "not a recording"),
    "a manifest": (json.dumps(service("web")).encode() + b"\n", "not a recording"),
    "newer": (
        encode(HEADER | {"apiVersion": "kbpf.io/v2", "version": "9.0"}),
        "another format, 'kbpf.io/v2', made by kbpf '9.0'",
    ),
}


@pytest.mark.parametrize("name", NOT_RECORDINGS)
def test_other_files_are_one_clear_error(name: str, tmp_path: Path) -> None:
    data, text = NOT_RECORDINGS[name]
    path = tmp_path / "r"
    path.write_bytes(data)
    with pytest.raises(SourceError) as error:
        RecordingReader(path)
    assert text in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("path", ["/nowhere/r", "/proc/self/mem", "/"])
def test_a_file_that_cannot_be_read_is_an_error(path: str) -> None:
    with pytest.raises(SourceError, match=path):
        RecordingReader(Path(path))


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_damaged_recording_never_ends_in_another_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(data.draw(st.sampled_from((WHOLE, gzip.compress(WHOLE)))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        piece = data.draw(st.binary(max_size=4) | st.sampled_from((b"\n", b'"', b"{", b"[", b"0")))
        damaged[at : at + data.draw(st.integers(0, 20))] = piece
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(damaged)
    with contextlib.suppress(SourceError):
        events, reader = read(path)
        assert {e.kind for e in events if isinstance(e, Synced)} >= {Kind.SERVICE, Kind.NODE}
        assert reader.problems or names(events)


def test_deletions_and_versions_are_replayed_in_order(tmp_path: Path) -> None:
    first, second = slice_of("web", "10.1.0.1"), slice_of("web", "10.1.0.2")
    path = write(
        tmp_path / "r", HEADER, added(first), *SYNCED, added(second) | {"type": "MODIFIED", "t": 1},
        {"t": 2, "type": "DELETED", "object": {"kind": "EndpointSlice", "metadata": {
            "name": "web-1", "namespace": "shop"}}},
        END,
    )  # fmt: skip
    rows = [(t, type(event).__name__) for t, event in read_events(RecordingReader(path))]
    assert rows == [
        (0.0, "Upsert"), *[(0.0, "Synced")] * 3, (1.0, "Upsert"), (2.0, "Delete")
    ]  # fmt: skip
    versions = [e for _, e in read_events(RecordingReader(path)) if isinstance(e, Upsert)]
    assert [e.object.endpoints[0].address[-1] for e in versions] == [1, 2]  # type: ignore[union-attr]

# SPDX-License-Identifier: Apache-2.0
"""A recording as the source of the agent: order, speed, status; and what a Tap records."""

import io
import threading
from pathlib import Path

import msgspec
import pytest

from kbpf.cli.arguments import with_node_name
from kbpf.errors import SourceError
from kbpf.model.config import Config
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.source.base import SourceState
from kbpf.source.decode import decode
from kbpf.source.recording.format import RecordingReader, RecordingWriter, make_header
from kbpf.source.recording.replay import RecordingSource, read_events
from kbpf.source.recording.tap import Recorder, Tap
from tests.values.source.recording.samples import (
    END,
    HEADER,
    SYNCED,
    Object,
    added,
    service,
    slice_of,
    write,
)

LINES = (
    added(service("web"), 0.5), *SYNCED, added(slice_of("web", "10.1.0.1"), 10.0),
    added(service("dns", "10.96.0.2"), 20.0), END,
)  # fmt: skip


class Run:
    """A RecordingSource in this thread, whose clock only moves while it waits."""

    def __init__(self, path: Path, speed: float) -> None:
        self.now, self.events = 100.0, list[tuple[float, Event]]()
        self.stop = threading.Event()
        self.source = RecordingSource(
            path, self._emit, speed=speed, clock=lambda: self.now, wait=self._wait
        )
        self.source.run(self.stop)

    def _emit(self, event: Event) -> None:
        self.events.append((round(self.now - 100, 3), event))

    def _wait(self, stop: threading.Event, seconds: float) -> None:
        self.now += seconds
        self.last = self.source.status()
        if self.last.synced or self.last.error:
            stop.set()


@pytest.mark.parametrize(
    ("speed", "times"),
    [(1.0, [0.5, 10.0, 20.0]), (10.0, [0.05, 1.0, 2.0]), (0.5, [1.0, 20.0, 40.0]),
     (0.0, [0.0, 0.0, 0.0])],
)  # fmt: skip
def test_events_come_at_their_time(speed: float, times: list[float], tmp_path: Path) -> None:
    run = Run(write(tmp_path / "r", HEADER, *LINES), speed)
    found = [(t, e) for t, e in run.events if isinstance(e, Upsert)]
    assert [t for t, _ in found] == times
    assert [e.key.name for _, e in found] == ["web", "web-1", "dns"]
    assert run.last.state is SourceState.WATCHING
    assert run.last.authoritative
    assert run.last.problems == ()
    assert run.source.status().state is SourceState.STOPPED


def test_a_cut_recording_is_replayed_and_reported(tmp_path: Path) -> None:
    run = Run(write(tmp_path / "r", HEADER, *LINES[:2]), 0)
    kinds = [e.kind for _, e in run.events if isinstance(e, Synced)]
    assert sorted(kinds) == sorted((Kind.SERVICE, Kind.SLICE, Kind.NODE))
    assert run.last.synced
    assert not run.last.authoritative
    assert len(run.last.problems) == 1


def test_a_recording_that_vanishes_is_an_error(tmp_path: Path) -> None:
    source = RecordingSource(tmp_path / "none", lambda _: None)
    with pytest.raises(SourceError, match="none"):
        source.start()
    run = Run(tmp_path / "none", 1)
    assert "none" in run.last.error
    assert not run.last.authoritative
    assert run.events == []


def test_stopping_ends_a_long_pause(tmp_path: Path) -> None:
    path = write(tmp_path / "r", HEADER, added(service("web"), 1e6), END)
    events: list[Event] = []
    source = RecordingSource(path, events.append)
    source.start()
    source.stop()
    assert events == []


def test_a_recording_is_replayed_for_its_own_node_by_default(tmp_path: Path) -> None:
    path = write(tmp_path / "r", HEADER | {"node": "of-the-recording"}, END)
    assert with_node_name(Config(source=path)).node_name == "of-the-recording"
    assert with_node_name(Config(source=path, node_name="mine")).node_name == "mine"
    assert with_node_name(Config(source=tmp_path)).node_name not in ("", "of-the-recording")
    with pytest.raises(SourceError, match="not a recording"):
        with_node_name(Config(source=write(tmp_path / "x", b"x")))


# ---- taps ----------------------------------------------------------------------------------------


def record(*steps: Object | Event, max_bytes: int = 1 << 20) -> tuple[bytes, Recorder]:
    """What a Tap records of objects that are decoded, and of events that are emitted."""
    file = io.BytesIO()
    header = make_header("n1", "2026-01-01T00:00:00Z")
    recorder = Recorder(RecordingWriter(file, header, max_bytes), clock=lambda: 5.0)
    tap = Tap(recorder)
    for step in steps:
        if isinstance(step, dict):
            tap.decode_object(Kind(step["kind"]), msgspec.json.encode(step))
        else:
            tap.emit(step)
    for kind in Kind:
        tap.emit(Synced(kind))
    recorder.close()
    return file.getvalue(), recorder


def upsert(obj: Object) -> Event:
    item = decode.decode_object(Kind(obj["kind"]), msgspec.json.encode(obj))
    if item.object is None:
        return Rejected(item.key, item.error)
    return Upsert(item.key, item.object, 1.0, item.trigger_time)


def replayed(data: bytes, tmp_path: Path) -> list[Event]:
    path = tmp_path / "recorded"
    path.write_bytes(data)
    reader = RecordingReader(path)
    events = [event for _, event in read_events(reader)]
    assert reader.complete
    assert reader.problems == []
    return [event for event in events if not isinstance(event, Synced)]


WEB, BAD = service("web"), service("web", "not an address")
OTHER = service("web", "10.96.0.8")
KEY = ObjectKey(Kind.SERVICE, "shop", "web")


def test_each_event_is_replayed_with_its_object(tmp_path: Path) -> None:
    data, recorder = record(
        WEB, upsert(WEB), BAD, upsert(BAD), OTHER, upsert(OTHER), Delete(KEY, 1.0),
    )  # fmt: skip
    assert recorder.synced == set(Kind)
    events = replayed(data, tmp_path)
    assert [type(e).__name__ for e in events] == ["Upsert", "Rejected", "Upsert", "Delete"]
    for event, obj in zip(events, (WEB, BAD, OTHER), strict=False):
        expected = upsert(obj)
        if isinstance(event, Upsert):
            assert event.object == expected.object  # type: ignore[union-attr]
        else:
            assert event == expected
    assert data.count(b'"MODIFIED"') == 2


def test_versions_that_are_decoded_together_are_told_apart(tmp_path: Path) -> None:
    file = io.BytesIO()
    recorder = Recorder(RecordingWriter(file, make_header("n1", ""), 1 << 20))
    tap = Tap(recorder)
    items = [
        tap.decode_object(Kind.SERVICE, msgspec.json.encode(service("web", f"10.96.0.{n}")))
        for n in range(1, 6)
    ]
    for item in items[::2]:  # of the others a reflector has no event
        assert item.object is not None
        tap.emit(Upsert(item.key, item.object))
    for kind in Kind:
        tap.emit(Synced(kind))
    recorder.close()
    addresses = [e.object.cluster_ips[0][-1] for e in replayed(file.getvalue(), tmp_path)]  # type: ignore[union-attr]
    assert addresses == [1, 3, 5]


def test_what_kbpf_does_not_read_is_not_recorded(tmp_path: Path) -> None:
    obj = service("web", selector={"app": "hidden"}, externalName="hidden")
    obj["metadata"] |= {
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "hidden"},
        "labels": {"team": "hidden"}, "managedFields": [{"manager": "hidden"}],
    }  # fmt: skip
    obj["status"] = {"conditions": [{"message": "hidden"}]}
    data, _ = record(obj, upsert(obj))
    assert b"hidden" not in data
    assert replayed(data, tmp_path)[0].object == upsert(obj).object  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [{"hidden": "hidden"}, ["hidden"]])
def test_a_value_of_another_type_stays_an_error_without_its_content(
    value: object, tmp_path: Path
) -> None:
    obj = service("web", clusterIP=value)
    data, _ = record(obj, upsert(obj))
    assert b"hidden" not in data
    assert replayed(data, tmp_path) == [upsert(obj)]


def test_a_recording_that_was_ended_before_all_is_listed_is_not_complete(tmp_path: Path) -> None:
    file = io.BytesIO()
    recorder = Recorder(RecordingWriter(file, make_header("n1", ""), 1 << 20))
    tap = Tap(recorder)
    tap.emit(Synced(Kind.SERVICE))
    recorder.close()
    path = tmp_path / "r"
    path.write_bytes(file.getvalue())
    reader = RecordingReader(path)
    assert list(reader.changes())
    assert not reader.complete
    assert "before all objects were listed" in reader.problems[0]


def test_a_recording_ends_at_its_limit(tmp_path: Path) -> None:
    many = [service(f"web-{n}", f"10.96.1.{n}") for n in range(200)]
    steps = [step for obj in many for step in (obj, upsert(obj))]
    data, recorder = record(*steps, max_bytes=5000)
    assert recorder.is_full
    assert len(data) < 5200
    path = tmp_path / "r"
    path.write_bytes(data)
    reader = RecordingReader(path)
    names = [e.key.name for _, e in read_events(reader) if isinstance(e, Upsert)]
    assert names == [f"web-{n}" for n in range(len(names))]
    assert len(names) > 10
    assert not reader.complete


def test_the_first_error_of_the_file_is_raised_at_the_end() -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            if self.tell():
                raise OSError(28, "No space left on device")
            return super().write(data)  # type: ignore[arg-type]

    recorder = Recorder(RecordingWriter(Full(), make_header("n1", ""), 1 << 20))
    tap = Tap(recorder)
    tap.decode_object(Kind.SERVICE, msgspec.json.encode(WEB))
    tap.emit(upsert(WEB))
    with pytest.raises(OSError, match="No space"):
        recorder.close()

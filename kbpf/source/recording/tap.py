# SPDX-License-Identifier: Apache-2.0
"""Records what sources emit, each event with the object as the source has read it.

A source decodes an object first and emits its event later, in the same thread. A Tap replaces both
of these functions: it keeps the object until its event comes.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kbpf.model.events import (
    REQUIRED_KINDS,
    Delete,
    Event,
    Kind,
    ObjectKey,
    Rejected,
    Synced,
    Upsert,
)
from kbpf.model.objects import Service
from kbpf.source.decode import decode
from kbpf.source.recording import format as recording
from kbpf.source.recording.fields import reduce_json, reduce_object
from kbpf.source.recording.format import Entry, RecordingWriter

MAX_WAITING: Final = 64
"""Versions of one object that wait for their events: those of one chunk of a watch."""


class Recorder:
    """Writes the events of several sources to one recording. Thread-safe. `synced`: the kinds that
    are complete. `error`: the first error of the file, after which nothing is written.
    """

    def __init__(
        self, writer: RecordingWriter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._writer, self._clock, self._start = writer, clock, clock()
        self._lock = threading.Lock()
        self._present: set[ObjectKey] = set()
        self.synced: set[Kind] = set()
        self.error: OSError | None = None
        self.events = 0

    @property
    def is_full(self) -> bool:
        return self._writer.is_full

    @property
    def objects(self) -> int:
        return len(self._present)

    def record(self, event: Event, value: dict[str, Any] | None) -> None:
        """Records an event; `value` is its object, None for Delete and Synced."""
        with self._lock:
            entry = self._make_entry(event, value)
            self.events += 1
            try:
                if self.error is None:
                    self._writer.write(entry)
            except OSError as error:
                self.error = error

    def flush(self) -> None:
        """Writes what is buffered to the file, so that it survives the end of this process."""
        with self._lock:
            try:
                self._writer.flush()
            except OSError as error:
                self.error = self.error or error

    def close(self) -> None:
        """Writes the last line. Raises OSError, also an earlier one."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._writer.close(self._seconds(), self.synced >= REQUIRED_KINDS)

    def _make_entry(self, event: Event, value: dict[str, Any] | None) -> Entry:
        seconds = self._seconds()
        if isinstance(event, Synced):
            self.synced.add(event.kind)
            return Entry(seconds, recording.SYNCED, str(event.kind))
        key = event.key
        if isinstance(event, Delete) or value is None:
            self._present.discard(key)
            names = {"name": key.name} | ({"namespace": key.namespace} if key.namespace else {})
            type_, value = recording.DELETED, {"kind": str(key.kind), "metadata": names}
        else:
            type_ = recording.MODIFIED if key in self._present else recording.ADDED
            self._present.add(key)
        return Entry(seconds, type_, object=msgspec.Raw(msgspec.json.encode(value)))

    def _seconds(self) -> float:
        return round(self._clock() - self._start, 6)


class Tap:
    """Between one source and a Recorder: give the source `decode_object` or `convert_object`, and
    `emit`.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: dict[ObjectKey, list[tuple[decode.DecodedObject, dict[str, Any]]]] = {}

    def decode_object(self, kind: Kind, data: bytes | msgspec.Raw) -> decode.DecodedObject:
        """decode.decode_object(), for sources that read JSON."""
        item = decode.decode_object(kind, data)
        return self._keep(item, lambda: reduce_json(kind, data))

    def convert_object(self, kind: Kind, value: object) -> decode.DecodedObject:
        """decode.convert_object(), for sources that read plain values."""
        item = decode.convert_object(kind, value)
        return self._keep(item, lambda: reduce_object(kind, value))

    def emit(self, event: Event) -> None:
        """Records the event with its object."""
        self._recorder.record(event, self._take(event))

    def _keep(
        self, item: decode.DecodedObject, make: Callable[[], dict[str, Any]]
    ) -> decode.DecodedObject:
        if item.object is not None or item.error:
            waiting = self._waiting.setdefault(item.key, [])
            waiting.append((item, make()))
            del waiting[:-MAX_WAITING]
        return item

    def _take(self, event: Event) -> dict[str, Any] | None:
        """The value from which the event's object was decoded."""
        if not isinstance(event, Upsert | Rejected):
            return None
        waiting = self._waiting.get(event.key, [])
        if not waiting:
            return None
        # By identity: a watch may send several versions at once. A folder's Service without a
        # creationTimestamp gets one, so it is not the object that was decoded.
        index = next(
            (i for i, (item, _) in enumerate(waiting) if _is_of(item, event)), len(waiting) - 1
        )
        _, value = waiting[index]
        del self._waiting[event.key]
        if waiting[index + 1 :]:
            self._waiting[event.key] = waiting[index + 1 :]
        if isinstance(event, Upsert) and isinstance(event.object, Service):
            value["metadata"].setdefault("creationTimestamp", event.object.creation_timestamp)
        return value


def _is_of(item: decode.DecodedObject, event: Upsert | Rejected) -> bool:
    if isinstance(event, Upsert):
        return item.object is event.object
    return not item.object and item.error == event.error

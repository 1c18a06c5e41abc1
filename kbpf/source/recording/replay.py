# SPDX-License-Identifier: Apache-2.0
"""A recording as the source: the same events in the same order, at their own speed or another.

What it contains stays in force at its end. A recording that was cut off is replayed up to its last
whole line; `status()` says so, and is not authoritative.
"""

import logging
import threading
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from kbpf.errors import KbpfError, ObjectError, SourceError
from kbpf.kernel.system import threads
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
from kbpf.source.base import EventHandler, FileSource, SourceState
from kbpf.source.decode import decode
from kbpf.source.recording.format import DELETED, SYNCED, RecordedChange, RecordingReader

log = logging.getLogger("kbpf.source")

MAX_WAIT: Final = 1.0
"""The thread reports that it lives at least this often."""
STUCK_TIMEOUT: Final = 60.0
IDLE_INTERVAL: Final = 5.0
MAX_VALUES: Final = 1 << 20
"""Values in the objects that exist at one time, about 100 bytes of memory each: a file of 4 MB may
have ten times as many.
"""


def read_events(
    reader: RecordingReader, clock: Callable[[], float] = lambda: 0.0
) -> Iterator[tuple[float, Event]]:
    """Yields (seconds since the start, event). `clock`: the time of arrival that events get.

    At the end, kinds of which the recording has no complete list count as synced with what was
    recorded of them; exempt Pods do not, since the recording node may not have been permitted to
    read them. Raises SourceError if the objects have more than MAX_VALUES values.
    """
    known: dict[ObjectKey, int] = {}  # number of values in each object
    synced: set[Kind] = set()
    seconds, total = 0.0, 0
    for change in reader.changes():
        seconds = max(seconds, min(change.seconds, 1e9))
        if change.type == SYNCED:
            synced.add(change.kind)
            yield seconds, Synced(change.kind)
        elif event := _decode(change, reader, known, clock()):
            total -= known.pop(event.key, 0)
            if not isinstance(event, Delete):
                known[event.key] = bytes(change.raw).count(b",") + 1
                total += known[event.key]
            if total > MAX_VALUES:
                raise SourceError(f"a recording whose objects have more than {MAX_VALUES} values")
            yield seconds, event
    for kind in sorted(REQUIRED_KINDS - synced):
        yield seconds, Synced(kind)


def _decode(
    change: RecordedChange, reader: RecordingReader, known: Container[ObjectKey], now: float
) -> Upsert | Delete | Rejected | None:
    try:
        item = decode.decode_object(change.kind, change.raw)
    except ObjectError as error:
        reader.add_object_problem(error.what)
        return None
    key = item.key
    if change.type == DELETED or (item.object is None and not item.error):
        if key not in known:
            return None
        return Delete(key, now)
    if item.object is None:
        return Rejected(key, item.error)
    # Without the time of the change: it is long ago, and would look like a slow agent.
    return Upsert(key, item.object, now)


class RecordingSource(FileSource):
    """Replays the recording `path` at `speed` times its own speed; 0: without pauses."""

    def __init__(
        self,
        path: Path,
        emit: EventHandler,
        *,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        super().__init__("recording")
        self._path, self._emit, self._speed = path, emit, speed
        self._clock, self._wait = clock, wait
        self._is_done = False

    def start(self) -> None:
        """Starts the thread. Raises SourceError if the file is not a recording."""
        RecordingReader(self._path).close()
        self._thread = threads.start("recording", partial(self.run, self._stop), STUCK_TIMEOUT)

    def run(self, stop: threading.Event) -> None:
        """Replays everything once, then waits until `stop` is set."""
        self._stop = stop
        try:
            if not self._is_done:  # after a failure the thread starts again
                self._is_done = True
                self._replay(stop)
        except KbpfError as error:
            log.error("the recording cannot be replayed further: %s", error)
            self._status = replace(self._status, error=str(error), failures=1, authoritative=False)
        while not stop.is_set():
            threads.heartbeat()
            self._status = replace(self._status, last_contact=self._clock())
            self._wait(stop, IDLE_INTERVAL)
        self._status = replace(self._status, state=SourceState.STOPPED)

    def _replay(self, stop: threading.Event) -> None:
        reader = RecordingReader(self._path)
        header, start, events = reader.header, self._clock(), 0
        self._status = replace(self._status, state=SourceState.LISTING)
        log.info(
            "replaying path=%s node=%s started=%s version=%s",
            self._path, header.node, header.started_at, header.version,
        )  # fmt: skip
        for seconds, event in read_events(reader, self._clock):
            if self._speed:
                self._wait_until(start + seconds / self._speed, stop)
            if stop.is_set():
                reader.close()
                return
            self._emit(event)
            events += 1
            if events % 1024 == 0:
                threads.heartbeat()
        for problem in reader.problems:
            log.warning("problem in the recording error=%r", problem)
        log.info("the recording has ended path=%s events=%d", self._path, events)
        self._status = replace(
            self._status, state=SourceState.WATCHING, synced=True,
            problems=tuple(reader.problems), authoritative=reader.complete,
        )  # fmt: skip

    def _wait_until(self, due: float, stop: threading.Event) -> None:
        while not stop.is_set() and (remaining := due - self._clock()) > 0:
            threads.heartbeat()
            self._wait(stop, min(remaining, MAX_WAIT))


def check_recording(path: Path) -> None:
    """Raises SourceError if the file is not a recording."""
    RecordingReader(path).close()


def read_node_name(path: Path) -> str:
    """The node for which a recording was made."""
    reader = RecordingReader(path)
    reader.close()
    return reader.header.node

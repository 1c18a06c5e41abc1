# SPDX-License-Identifier: Apache-2.0
"""The format of a recording: lines of JSON, a header and then one event each. It is compressed if
its name ends in `.gz`.

    {"apiVersion":"kbpf.io/v1alpha1","kind":"Recording","version":"0.1.0","node":"n1",...}
    {"t":0.012,"type":"ADDED","object":{"kind":"Service","metadata":{"name":"web",...},...}}
    {"t":0.02,"type":"SYNCED","kind":"Service"}
    {"t":3.2,"type":"DELETED","object":{"kind":"Service","metadata":{...}}}
    {"t":9.1,"type":"END","complete":true}

Objects are those of the Kubernetes API, reduced to the fields that kbpf reads (fields.py). So a
replay decodes them again, and a recording outlives changes of kbpf's own types. `t` is in seconds
since the start. A recording without its last line was cut off; one with `complete` false reached
its limit, or was ended before everything was listed.

A reader trusts nothing: lines and their sum are limited, and what cannot be read is left out and
described in `problems`.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, cast

import msgspec

from kbpf import __version__
from kbpf.errors import ObjectError, SourceError, escape_unprintable
from kbpf.model.events import Kind
from kbpf.source.decode.decode import MAX_OBJECT_BYTES
from kbpf.source.recording.fields import reduce_object

API_VERSION: Final = "kbpf.io/v1alpha1"
KIND: Final = "Recording"
MAX_LINE_BYTES: Final = MAX_OBJECT_BYTES + 4096
"""An object, and the rest of its line."""
MAX_READ_BYTES: Final = 2 << 30
"""Bytes of JSON that are read of one recording: a small compressed file can expand to anything."""
MAX_PROBLEMS: Final = 20
GZIP_MAGIC: Final = b"\x1f\x8b"
SKIPPED_CHUNK: Final = 1 << 20


class Header(msgspec.Struct, frozen=True, rename="camel"):
    """The first line. `version`: of the kbpf that recorded; `node`: for which node; `started_at`:
    RFC 3339. `masked`: names and addresses were replaced (mask.py).
    """

    api_version: str = ""
    kind: str = ""
    version: str = ""
    node: str = ""
    started_at: str = ""
    masked: bool = False


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line after the first. `type` says which of the other fields it has: an `object` (ADDED,
    MODIFIED, DELETED), a `kind` (SYNCED) or `complete` (END).
    """

    t: float
    type: str
    kind: str = ""
    object: msgspec.Raw = msgspec.Raw(b"")
    complete: bool = False


class ObjectKind(msgspec.Struct, frozen=True):
    """The kind of any object."""

    kind: str = ""


class RecordedChange(NamedTuple):
    """An event of a recording: an object or its deletion, or `raw` empty: all of `kind` are
    listed.
    """

    seconds: float
    kind: Kind
    type: str
    raw: msgspec.Raw


ADDED, MODIFIED, DELETED = "ADDED", "MODIFIED", "DELETED"
SYNCED, END = "SYNCED", "END"
_HEADER_DECODER: Final = msgspec.json.Decoder(Header)
_ENTRY_DECODER: Final = msgspec.json.Decoder(Entry)
_KIND_DECODER: Final = msgspec.json.Decoder(ObjectKind)
_DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_KINDS: Final = {str(kind): kind for kind in Kind}


# ---- writing -------------------------------------------------------------------------------------


class RecordingWriter:
    """Writes the lines of a recording, at most `max_bytes` of JSON. Not thread-safe."""

    def __init__(self, file: BinaryIO, header: Header, max_bytes: int) -> None:
        self._file, self._remaining = file, max_bytes
        self.is_full = False
        self._write(header)

    def write(self, entry: Entry) -> None:
        """Writes an event, unless the recording is full. Raises OSError."""
        if not self.is_full:
            self._write(entry)

    def flush(self) -> None:
        self._file.flush()

    def close(self, seconds: float, is_complete: bool = True) -> None:
        """Writes the last line. `is_complete`: all that there is has been written."""
        self._remaining = max(self._remaining, MAX_LINE_BYTES)
        self._write(Entry(seconds, END, complete=is_complete and not self.is_full))

    def _write(self, line: Header | Entry) -> None:
        data = msgspec.json.encode(line) + b"\n"
        if len(data) > self._remaining:
            self.is_full = True
            return
        self._remaining -= len(data)
        self._file.write(data)


def make_header(node: str, started_at: str) -> Header:
    return Header(API_VERSION, KIND, __version__, node, started_at)


def make_entry(change: "RecordedChange") -> Entry | None:
    """The line of an event that was read, reduced again; None if its object is not one."""
    if change.type == SYNCED:
        return Entry(change.seconds, SYNCED, str(change.kind))
    try:
        value = msgspec.json.decode(change.raw)
    except _DECODE_ERRORS:
        return None
    raw = msgspec.Raw(msgspec.json.encode(reduce_object(change.kind, value)))
    return Entry(change.seconds, change.type, object=raw)


# ---- reading -------------------------------------------------------------------------------------


class RecordingReader:
    """Reads one recording from its beginning to its end.

    `header` is read at once: raises SourceError if the file cannot be opened, is not a recording,
    or is one of a newer version. `problems` grows while changes() is read; `complete`, and the time
    `end` of the last line, are known after it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problems: list[str] = []
        self.complete, self.end = False, 0.0
        self._line_number = 0
        self._read_bytes = 0
        try:
            self._raw_file = path.open("rb")
            self._file = _decompress(self._raw_file)
        except OSError as error:
            raise SourceError(f"cannot read the recording: {error.strerror}", str(path)) from error
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()
        self._raw_file.close()  # which GzipFile leaves open

    def changes(self) -> Iterator[RecordedChange]:
        """Yields the events in order, and closes the file. What cannot be read is skipped."""
        try:
            ended = False
            while (line := self._read_line()) is not None:
                if ended:
                    self._add_problem("there are lines after the last one")
                    break
                if (entry := self._decode(line)) is None:
                    continue
                if entry.type == END:
                    self.complete, ended, self.end = entry.complete, True, entry.t
                elif change := self._convert(entry):
                    yield change
            if not ended:
                self._add_problem("the recording is cut off; the events before are used", True)
            elif not self.complete:
                self._add_problem(
                    "the recording ended before all objects were listed, or at its --max-bytes"
                )
        finally:
            self.close()

    def add_object_problem(self, error: str) -> None:
        """Records that the object of the last line cannot be used."""
        self._add_problem(error)

    def _read_header(self) -> Header:
        what, hint = "not a recording", "make one with `kbpf record FILE`"
        line = self._read_line()
        try:
            header = _HEADER_DECODER.decode(line or b"")
        except _DECODE_ERRORS:
            raise SourceError(what, str(self._path), hint) from None
        if header.kind != KIND:
            raise SourceError(what, str(self._path), hint)
        if header.api_version != API_VERSION:
            raise SourceError(
                f"a recording of another format, {header.api_version[:40]!r}, made by kbpf "
                f"{header.version[:40]!r}", str(self._path),
                f"this kbpf, {__version__}, reads {API_VERSION}: use the one that recorded",
            )  # fmt: skip
        return header

    def _decode(self, line: bytes) -> Entry | None:
        try:
            return _ENTRY_DECODER.decode(line)
        except _DECODE_ERRORS as error:
            self._add_problem(f"not an event: {error}")
            return None

    def _convert(self, entry: Entry) -> RecordedChange | None:
        name = entry.kind
        if entry.type in (ADDED, MODIFIED, DELETED):
            try:
                name = _KIND_DECODER.decode(entry.object).kind
            except _DECODE_ERRORS as error:
                self._add_problem(f"not an object: {error}")
                return None
        elif entry.type != SYNCED:
            self._add_problem(f"unknown event {entry.type[:40]!r}")
            return None
        kind = _KINDS.get(name)
        if kind is None:
            self._add_problem(f"unknown kind {name[:40]!r}")
            return None
        return RecordedChange(entry.t, kind, entry.type, entry.object)

    def _read_line(self) -> bytes | None:
        """Returns the next whole line that is not too long; None at the end."""
        while True:
            try:
                line = self._file.readline(MAX_LINE_BYTES + 1)
                is_long = len(line) > MAX_LINE_BYTES
                while is_long and line and not line.endswith(b"\n"):
                    self._count(line)
                    line = self._file.readline(SKIPPED_CHUNK)
            except (EOFError, OSError, zlib.error) as error:
                if not isinstance(error, EOFError):
                    self._add_problem(f"cannot be read further: {error}")
                return None
            self._line_number += 1
            self._count(line)
            if not line.endswith(b"\n"):
                return None  # the end, or inside a line
            if not is_long:
                return line
            self._add_problem(f"a line of more than {MAX_LINE_BYTES >> 20} MiB")

    def _count(self, data: bytes) -> None:
        self._read_bytes += len(data)
        if self._read_bytes > MAX_READ_BYTES:
            what = f"a recording of more than {MAX_READ_BYTES >> 30} GiB"
            raise SourceError(what, str(self._path))

    def _add_problem(self, text: str, always: bool = False) -> None:
        if len(self.problems) < MAX_PROBLEMS or always:
            where = f"{self._path}:{self._line_number}"
            self.problems.append(str(ObjectError(escape_unprintable(text), where)))
        elif len(self.problems) == MAX_PROBLEMS:
            self.problems.append(f"{self._path}: only the first {MAX_PROBLEMS} problems are listed")


def _decompress(file: io.BufferedReader) -> BinaryIO:
    if file.peek(2)[:2] != GZIP_MAGIC:
        return file
    return cast("BinaryIO", gzip.GzipFile(fileobj=file))

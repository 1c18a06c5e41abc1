"""The bytes of one WATCH → what they say. No socket, no clock: feed() can be tested with values.

Rules:
- A line is decoded when its newline is there; a cut one never is.
- `resource_version` is where the watch can be taken up again. It moves with each object (a
  malformed one too, or that one would come again for ever) and each bookmark. In a streaming list
  (`initial`) it stays "" until the end mark: objects of a list come in no order.
- A version that is lower than the one before is one WentBack: an API server's only grow.
- Nothing in the bytes raises. What is no event at all is one Garbled, and the stream goes on.
"""

from typing import Final

import msgspec

from kbpf.errors import ObjectError
from kbpf.model.events import Kind
from kbpf.source.api.versions import went_back
from kbpf.source.decode import decode, wire
from kbpf.source.decode.fields import json_error

MAX_LINE: Final = 8 << 20
"""Bytes without a newline before we give up; see decode.MOST_BYTES."""


class Changed(msgspec.Struct, frozen=True):
    """An object was added or modified, or is `gone`: deleted, or no longer selected."""

    item: decode.Item
    gone: bool = False


class InitialEnd(msgspec.Struct, frozen=True):
    """All objects that existed have come."""


class Expired(msgspec.Struct, frozen=True):
    """410: the resourceVersion is too old to go on from."""

    message: str


class Failed(msgspec.Struct, frozen=True):
    """The server ends the watch with an error; `code` is HTTP's, 0 if it says none."""

    code: int
    message: str


class Garbled(msgspec.Struct, frozen=True):
    """A line that is no watch event."""

    error: str


class WentBack(msgspec.Struct, frozen=True):
    """The server's version has become lower: it does not know all that it said before."""

    before: str
    now: str


Said = Changed | InitialEnd | Expired | Failed | Garbled | WentBack

_LINE: Final = msgspec.json.Decoder(wire.WatchLine)
_BOOKMARK: Final = msgspec.json.Decoder(wire.Bookmark)
_STATUS: Final = msgspec.json.Decoder(wire.Status)


class WatchStream:
    """One response body of a WATCH for one kind of object."""

    def __init__(self, kind: Kind, resource_version: str = "", *, initial: bool = False) -> None:
        self._kind = kind
        self._initial = initial
        self._parts: list[bytes] = []
        self._size = 0
        self.resource_version = "" if initial else resource_version

    def feed(self, data: bytes) -> list[Said]:
        """What the lines say that end in `data`, in order. Any chunking gives the same."""
        head, newline, rest = data.partition(b"\n")
        self._parts.append(head)
        self._size += len(head)
        if not newline:
            return self._too_long() if self._size > MAX_LINE else []
        lines = [b"".join(self._parts), *rest.split(b"\n")]
        tail = lines.pop()
        self._parts, self._size = [tail], len(tail)
        return [said for line in lines if line.strip() for said in self._line(line)]

    @property
    def inside_line(self) -> bool:
        """Whether a line has begun and not ended."""
        return self._size > 0

    def close(self) -> bool:
        """Whether the bytes end inside a line."""
        return any(part.strip() for part in self._parts)

    def _too_long(self) -> list[Said]:
        self._parts, self._size = [], 0
        return [Failed(0, f"a line of more than {MAX_LINE >> 20} MiB")]

    def _line(self, line: bytes) -> list[Said]:
        try:
            event = _LINE.decode(line)
            match event.type:
                case "ADDED" | "MODIFIED" | "DELETED":
                    item = decode.read(self._kind, event.object)
                    return [Changed(item, event.type == "DELETED"), *self._moved(item.version)]
                case "BOOKMARK":
                    return self._bookmark(_BOOKMARK.decode(event.object).metadata)
                case "ERROR":
                    return [_error(_STATUS.decode(event.object))]
                case _:
                    return [Garbled(f"unknown type of event {event.type[:40]!r}")]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ObjectError) as error:
            return [Garbled(f"{json_error(error)}: {line[:60]!r}")]

    def _moved(self, version: str) -> list[Said]:
        before = self.resource_version
        if not version or self._initial:
            return []
        self.resource_version = version
        return [WentBack(before, version)] if went_back(before, version) else []

    def _bookmark(self, meta: wire.BookmarkMeta) -> list[Said]:
        ended = self._initial and meta.annotations is not None and meta.annotations.end == "true"
        self._initial = self._initial and not ended
        moved = self._moved(meta.resource_version)
        return [InitialEnd()] if ended else moved


def _error(status: wire.Status) -> Said:
    message = status.message or status.reason or "no message"
    return Expired(message) if status.code == 410 else Failed(status.code or 0, message)

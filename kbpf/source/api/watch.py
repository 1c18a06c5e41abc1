# SPDX-License-Identifier: Apache-2.0
"""Parses the bytes of one WATCH into messages. No socket and no clock, so it is tested with
values.

- A line is decoded once its newline has arrived; a truncated line never is.
- `resource_version` is where the watch can be resumed. It advances with each bookmark and each
  object, even a malformed one: otherwise every new watch would begin with that object. In a
  streaming list (`initial`) it stays "" until the end mark, because listed objects come in no
  particular order.
- A version lower than the previous one yields a VersionRewind: an API server's versions only grow.
- No input raises. A line that is not an event yields a MalformedLine, and the stream continues.
"""

from typing import Final

import msgspec

from kbpf.errors import ObjectError
from kbpf.model.events import Kind
from kbpf.source.api.versions import is_rewind
from kbpf.source.decode import decode, wire
from kbpf.source.decode.fields import format_json_error

MAX_LINE_BYTES: Final = 8 << 20
"""The maximum length of a line; see decode.MAX_OBJECT_BYTES. Checked after each chunk without a
newline, so a line may be longer by one chunk (transport.READ_SIZE)."""


class ObjectChanged(msgspec.Struct, frozen=True):
    """An object was added or modified. `deleted`: it was deleted, or is no longer selected."""

    item: decode.DecodedObject
    deleted: bool = False


class InitialListEnd(msgspec.Struct, frozen=True):
    """All objects that existed at the start have been sent."""


class VersionExpired(msgspec.Struct, frozen=True):
    """410 Gone: the resourceVersion is too old to resume from."""

    message: str


class WatchFailed(msgspec.Struct, frozen=True):
    """The server ended the watch with an error; `code` is the HTTP status, 0 if it sent none."""

    code: int
    message: str


class MalformedLine(msgspec.Struct, frozen=True):
    """A line that is not a watch event."""

    error: str


class VersionRewind(msgspec.Struct, frozen=True):
    """The server's version has decreased: it has lost changes that it had reported."""

    old_version: str
    new_version: str


WatchMessage = ObjectChanged | InitialListEnd | VersionExpired | WatchFailed | MalformedLine | VersionRewind

_LINE_DECODER: Final = msgspec.json.Decoder(wire.WatchEvent)
_BOOKMARK_DECODER: Final = msgspec.json.Decoder(wire.Bookmark)
_STATUS_DECODER: Final = msgspec.json.Decoder(wire.ApiStatus)


class WatchStream:
    """The response body of one WATCH, for one kind of object."""

    def __init__(self, kind: Kind, resource_version: str = "", *, initial: bool = False) -> None:
        self._kind, self._initial = kind, initial
        self._parts: list[bytes] = []
        self._size = 0
        self.resource_version = "" if initial else resource_version

    def feed(self, data: bytes) -> list[WatchMessage]:
        """Returns the messages of the lines completed by `data`, in order. The chunking does not
        matter.
        """
        # Chunks are joined only when a line is complete: a large object arrives in hundreds.
        head, newline, rest = data.partition(b"\n")
        self._parts.append(head)
        self._size += len(head)
        if not newline:
            if self._size <= MAX_LINE_BYTES:
                return []
            self._parts, self._size = [], 0
            return [WatchFailed(0, f"a line of more than {MAX_LINE_BYTES >> 20} MiB")]
        lines = [b"".join(self._parts), *rest.split(b"\n")]
        tail = lines.pop()
        self._parts, self._size = [tail], len(tail)
        return [message for line in lines if line.strip() for message in self._decode_line(line)]

    @property
    def is_inside_line(self) -> bool:
        """Whether the last line is incomplete."""
        return self._size > 0

    def close(self) -> bool:
        """Returns whether the data ended inside a line."""
        return any(part.strip() for part in self._parts)

    def _decode_line(self, line: bytes) -> list[WatchMessage]:
        try:
            event = _LINE_DECODER.decode(line)
            match event.type:
                case "ADDED" | "MODIFIED" | "DELETED":
                    item = decode.decode_object(self._kind, event.object)
                    return [
                        ObjectChanged(item, event.type == "DELETED"),
                        *self._advance(item.version),
                    ]
                case "BOOKMARK":
                    return self._handle_bookmark(_BOOKMARK_DECODER.decode(event.object).metadata)
                case "ERROR":
                    return [_status_message(_STATUS_DECODER.decode(event.object))]
                case _:
                    return [MalformedLine(f"unknown event type {event.type[:40]!r}")]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ObjectError) as error:
            return [MalformedLine(f"{format_json_error(error)}: {line[:60]!r}")]

    def _advance(self, version: str) -> list[WatchMessage]:
        before = self.resource_version
        if not version or self._initial:
            return []
        self.resource_version = version
        return [VersionRewind(before, version)] if is_rewind(before, version) else []

    def _handle_bookmark(self, meta: wire.BookmarkMeta) -> list[WatchMessage]:
        is_end = self._initial and meta.annotations is not None and meta.annotations.end == "true"
        self._initial = self._initial and not is_end  # first, since _advance() ignores a list
        messages = self._advance(meta.resource_version)
        return [InitialListEnd()] if is_end else messages


def _status_message(status: wire.ApiStatus) -> WatchMessage:
    message = status.message or status.reason or "no message"
    return VersionExpired(message) if status.code == 410 else WatchFailed(status.code or 0, message)

# SPDX-License-Identifier: Apache-2.0
"""What a WATCH says (WatchStream), and the objects that were emitted, in which state (KnownVersions):
the basis for the difference to a new list. No socket and no clock, so it is tested with values.

WatchStream parses the bytes of one WATCH into messages:

- A line is decoded once its newline has arrived; a truncated line never is.
- `resource_version` is where the watch can be resumed. It advances with each bookmark and each
  object, even a malformed one: otherwise every new watch would begin with that object. In a
  streaming list (`initial`) it stays "" until the end mark, because listed objects come in no
  particular order.
- A version lower than the previous one yields a VersionRewind: an API server's versions only grow.
- No input raises. A line that is not an event yields a MalformedLine, and the stream continues.

KnownVersions stores only keys and states; the objects belong to the receiver of the events. A state
is the object's uid, its resourceVersion and a hash of the fields that we read: after an etcd restore
the same version may have another content.
"""

import heapq
from enum import Enum, auto
from typing import Final, NamedTuple

import msgspec

from kbpf.errors import ObjectError
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Rejected, Upsert
from kbpf.source.decode import decode, wire
from kbpf.source.decode.decode import DecodedObject
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
    if status.code == 410:
        return VersionExpired()
    return WatchFailed(status.code or 0, status.message or status.reason or "no message")


# ---- what was emitted ----------------------------------------------------------------------------


class ObjectState(NamedTuple):
    """The state of an object, as far as it is compared here."""

    uid: str
    version: str
    content: int


UNKNOWN_STATE: Final = ObjectState("", "", 0)
MAX_COMPARED: Final = 4
"""How many objects are compared after an outage, until one has not changed in it."""


class History(Enum):
    """Whether a server still has the last change that we know of.

    A restored server may have reached our version again by other changes, so its version alone does
    not show that it has lost some. CHANGED: the watch will report the object, so another one is
    compared. UNCERTAIN: the object is gone, or the last change was a deletion, which leaves nothing
    to compare.
    """

    KNOWN = auto()
    CHANGED = auto()
    UNCERTAIN = auto()
    LOST = auto()


def parse_version(version: str) -> int | None:
    """Returns a resourceVersion as a number, which is ordered (KEP-5504); None if it is not one."""
    return int(version) if version.isascii() and version.isdigit() and len(version) < 20 else None


def is_rewind(before: str, now: str) -> bool:
    """Whether a server that was at version `before` and is at `now` has lost changes."""
    old, new = parse_version(before), parse_version(now)
    return old is not None and new is not None and new < old


def _state_of(item: DecodedObject) -> ObjectState:
    return ObjectState(item.uid, item.version, hash(item.object or item.error))


class KnownVersions:
    """The objects of one kind that the receiver has (or has rejected).

    `drift` is the number of objects in the last list that had changed although no event reported
    it.
    """

    def __init__(self) -> None:
        self._states: dict[ObjectKey, ObjectState] = {}
        self._listed_keys: set[ObjectKey] | None = None
        self._heard_through: int | None = None
        self._is_list_readable = True
        self._last_deletion = 0
        self.drift = 0

    def __len__(self) -> int:
        return len(self._states)

    def newest_keys(self) -> list[ObjectKey]:
        """The objects that changed last, the newest first; none if no version is a number."""
        versions = {
            key: version for key, state in self._states.items() if (version := parse_version(state.version)) is not None
        }
        return heapq.nlargest(MAX_COMPARED, versions, key=versions.__getitem__)

    def check_newest(self, key: ObjectKey | None, item: DecodedObject | None, watched: str) -> History:
        """Compares an object of newest_keys() with the server's, None if it has none. `watched`:
        the version from which a watch would report changes.
        """
        before = self._states.get(key, UNKNOWN_STATE) if key else UNKNOWN_STATE
        now = _state_of(item) if item is not None and item.key == key else UNKNOWN_STATE
        if is_rewind(before.version, now.version):
            return History.LOST
        if is_rewind(now.version, watched):
            return History.CHANGED
        is_last_change = self._last_deletion <= (parse_version(before.version) or 0)
        return History.KNOWN if before == now and is_last_change else History.UNCERTAIN

    def invalidate(self) -> None:
        """Forgets all states, because the receiver may have missed events: the next list emits
        everything.
        """
        self._states = dict.fromkeys(self._states, UNKNOWN_STATE)

    def begin_list(self, heard_through: str) -> None:
        """Starts a new list; update() now gets its objects. `heard_through`: all changes up to
        this version have been received, so an object with an older version that differs has
        drifted.
        """
        self._listed_keys, self._is_list_readable, self.drift = set(), True, 0
        self._heard_through = parse_version(heard_through)

    def mark_unreadable(self) -> None:
        """Records that an object of the list could not be identified: a missing object may be that
        one.
        """
        self._is_list_readable = False

    def end_list(self, now: float) -> list[Delete]:
        """Completes the list and returns the deletions that follow from it."""
        listed_keys, self._listed_keys = self._listed_keys or set(), None
        if not self._is_list_readable:
            return []
        missing_keys = self._states.keys() - listed_keys
        if self._heard_through is not None:
            self.drift += len(missing_keys)
        return [self._delete(key, now) for key in missing_keys]

    def update(self, item: DecodedObject, deleted: bool, now: float) -> Event | None:
        """Returns the event for an object that was received; None if the receiver has that state
        already.
        """
        key = item.key
        if deleted or (item.object is None and not item.error):
            if key not in self._states:
                return None
            self._last_deletion = max(self._last_deletion, parse_version(item.version) or 0)
            return self._delete(key, now)
        state = _state_of(item)
        before = self._states.get(key, UNKNOWN_STATE)
        if self._listed_keys is not None:
            self._listed_keys.add(key)
            self.drift += self._has_drifted(before, state)
        if item.version and before == state:
            return None
        self._states[key] = state
        if item.object is None:
            return Rejected(key, item.error)
        return Upsert(key, item.object, now, item.trigger_time)

    def _has_drifted(self, before: ObjectState, state: ObjectState) -> bool:
        if before == state:
            return False
        if before.version and before[:2] == state[:2]:
            return True  # the same uid and version with another content: etcd was restored
        # A version that the watch has passed already: the change was never reported.
        version = parse_version(state.version)
        return self._heard_through is not None and version is not None and version <= self._heard_through

    def _delete(self, key: ObjectKey, now: float) -> Delete:
        del self._states[key]
        return Delete(key, now)

# SPDX-License-Identifier: Apache-2.0
"""The objects that were emitted, in which state: the basis for the difference to a new list.

Only keys and states are stored; the objects belong to the receiver of the events. A state is the
object's uid, its resourceVersion and a hash of the fields that we read: after an etcd restore the
same version may have another content.
"""

import heapq
from enum import Enum, auto
from typing import Final, NamedTuple

from kbpf.model.events import Delete, Event, ObjectKey, Rejected, Upsert
from kbpf.source.decode.decode import DecodedObject


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

    def begin_list(self, heard_through: str = "") -> None:
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

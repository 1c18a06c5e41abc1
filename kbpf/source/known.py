"""Which objects were said, at which version: what the difference of a new list is taken from.

Only keys and resourceVersions are kept; the objects belong to whoever got the events.
"""

from kbpf.model.events import Delete, Event, ObjectKey, Rejected, Upsert
from kbpf.source.decode import Item


class Known:
    """The objects of one kind that are in force at the receiver (or were rejected there)."""

    def __init__(self) -> None:
        self._versions: dict[ObjectKey, str] = {}
        self._listed: set[ObjectKey] | None = None
        self._sound = True

    def __len__(self) -> int:
        return len(self._versions)

    def doubt(self) -> None:
        """The receiver may have missed something: the next list says everything again."""
        self._versions = dict.fromkeys(self._versions, "")

    def begin_list(self) -> None:
        """From now on objects are those of a new list."""
        self._listed, self._sound = set(), True

    def unreadable(self) -> None:
        """Something in the list could not be told: what is missing may be that, not gone."""
        self._sound = False

    def end_list(self, now: float) -> list[Delete]:
        """The list was complete: the deletions that it means."""
        listed, self._listed = self._listed or set(), None
        if not self._sound:
            return []
        return [self._gone(key, now) for key in self._versions.keys() - listed]

    def take(self, item: Item, gone: bool, now: float) -> Event | None:
        """What to say about an object that came; None when the receiver knows it already."""
        key = item.key
        if gone or (item.object is None and not item.error):
            return self._gone(key, now) if key in self._versions else None
        if self._listed is not None:
            self._listed.add(key)
        if item.version and self._versions.get(key) == item.version:
            return None
        self._versions[key] = item.version
        if item.object is None:
            return Rejected(key, item.error)
        return Upsert(key, item.object, now, item.triggered)

    def _gone(self, key: ObjectKey, now: float) -> Delete:
        del self._versions[key]
        return Delete(key, now)

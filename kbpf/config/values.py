"""Settings on their way to a Config: the value of each field, and where it was said."""

from collections.abc import Callable
from typing import Any, TypeVar

from kbpf.errors import ConfigError

S = TypeVar("S")


class Values:
    """Fields of Config by name (a dot leads into its parts: `sizes.slots`), with what is wrong.
    Places are paths below `prefix`.
    """

    def __init__(self, prefix: str = "") -> None:
        self.found: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.errors: list[ConfigError] = []
        self._prefix = prefix

    def get(self, field: str, default: Any) -> Any:
        """The value of a field, or the default."""
        return self.found.get(field, default)

    def put(self, field: str, place: str, value: object) -> None:
        """Says what a field is."""
        self.found[field], self.places[field] = value, self._prefix + place

    def read(self, field: str, place: str, said: S, reader: Callable[[S, str], Any]) -> Any:
        """Says what a field is, or notes what is wrong; the value, None if it is wrong."""
        value = self.check(place, said, reader)
        if value is not None:
            self.put(field, place, value)
        return value

    def check(self, place: str, said: S, reader: Callable[[S, str], Any]) -> Any:
        """What the reader makes of it, None if it is wrong, which is noted."""
        try:
            return reader(said, self._prefix + place)
        except ConfigError as error:
            self.errors.append(error)
        except ValueError:  # int() of more than 4300 digits
            self.wrong(place, "not a value that can be used", "see docs/configuration.md")
        return None

    def wrong(self, place: str, what: str, hint: str = "") -> None:
        """Notes what is wrong."""
        self.errors.append(ConfigError(what, self._prefix + place, hint))

    def take(self, other: "Values") -> None:
        """What another one says goes before what was said here."""
        self.found |= other.found
        self.places |= other.places
        self.errors += other.errors

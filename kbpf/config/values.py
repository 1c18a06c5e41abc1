"""Settings on their way to a Config: the value of each field, and where it was said."""

from collections.abc import Callable
from typing import Any, TypeVar

from kbpf.errors import ConfigError

S = TypeVar("S")


class ConfigValues:
    """Fields of Config by name (a dot leads into its parts: `sizes.slots`), with what is wrong.
    Places are paths below `prefix`.
    """

    def __init__(self, prefix: str = "") -> None:
        self.fields: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.errors: list[ConfigError] = []
        self._prefix = prefix

    def get(self, field: str, default: Any) -> Any:
        """The value of a field, or the default."""
        return self.fields.get(field, default)

    def set(self, field: str, origin: str, value: object) -> None:
        """Says what a field is."""
        self.fields[field], self.origins[field] = value, self._prefix + origin

    def parse(self, field: str, origin: str, raw: S, parser: Callable[[S, str], Any]) -> Any:
        """Says what a field is, or notes what is wrong; the value, None if it is wrong."""
        value = self.try_parse(origin, raw, parser)
        if value is not None:
            self.set(field, origin, value)
        return value

    def try_parse(self, origin: str, raw: S, parser: Callable[[S, str], Any]) -> Any:
        """What the reader makes of it, None if it is wrong, which is noted."""
        try:
            return parser(raw, self._prefix + origin)
        except ConfigError as error:
            self.errors.append(error)
        except ValueError:  # int() of more than 4300 digits
            self.add_error(origin, "not a value that can be used", "see docs/configuration.md")
        return None

    def add_error(self, origin: str, problem: str, hint: str = "") -> None:
        """Notes what is wrong."""
        self.errors.append(ConfigError(problem, self._prefix + origin, hint))

    def merge(self, values: "ConfigValues") -> None:
        """What another one says goes before what was said here."""
        self.fields |= values.fields
        self.origins |= values.origins
        self.errors += values.errors

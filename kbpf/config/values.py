# SPDX-License-Identifier: Apache-2.0
"""What reading settings yields: the value of each field of Config with its origin, errors, and
remarks that are no errors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from kbpf.errors import ConfigError

S = TypeVar("S")


class Diagnostic(NamedTuple):
    """A line for the log. `is_warning`: the setting is probably not what the operator wanted.
    `event`: the reason of the Event with this text that the agent sends when it starts; "" for
    none.
    """

    text: str
    is_warning: bool = False
    event: str = ""


class ConfigValues:
    """Values of Config's fields by name, and the errors and other diagnostics found. A dot leads
    into a part: `sizes.slots`. Origins are paths below `prefix`.
    """

    def __init__(self, prefix: str = "") -> None:
        self.fields: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.errors: list[ConfigError] = []
        self.notes: list[Diagnostic] = []
        self._prefix = prefix

    def get(self, field: str, default: Any) -> Any:
        """Returns the value of a field, or the default."""
        return self.fields.get(field, default)

    def set(self, field: str, origin: str, value: object) -> None:
        """Sets a field and its origin."""
        self.fields[field], self.origins[field] = value, self._prefix + origin

    def parse(self, field: str, origin: str, raw: S, parser: Callable[[S, str], Any]) -> Any:
        """Parses and sets a field, or records the error. Returns the value, None if it is
        invalid.
        """
        value = self.try_parse(origin, raw, parser)
        if value is not None:
            self.set(field, origin, value)
        return value

    def try_parse(self, origin: str, raw: S, parser: Callable[[S, str], Any]) -> Any:
        """Parses a value without setting a field. Returns None and records the error if it is
        invalid.
        """
        try:
            return parser(raw, self._prefix + origin)
        except ConfigError as error:
            self.errors.append(error)
        except ValueError:  # int() of more than 4300 digits
            self.add_error(origin, "not a value that can be used", "see docs/configuration.md")
        return None

    def add_error(self, origin: str, problem: str, hint: str = "") -> None:
        """Records an error."""
        self.errors.append(ConfigError(problem, self._prefix + origin, hint))

    def merge(self, values: "ConfigValues") -> None:
        """Adds everything in `values`, which takes precedence."""
        self.fields |= values.fields
        self.origins |= values.origins
        self.errors += values.errors
        self.notes += values.notes

"""YAML as kube-proxy reads it. Imported only when there is a file: PyYAML takes 1.3 MB."""

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from kbpf.config.notes import Note

_INT: Final = re.compile(r"[-+]?(?:0b[01]+|0o?[0-7]+|0x[0-9a-fA-F]+|0|[1-9][0-9]*)$")
_FLOAT: Final = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$")
_NUMBERS: Final = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe, in C where PyYAML has it, without dates and numbers of base 60. Of a field that stands
    twice the last counts, as with kube-proxy, and a note says so.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag not in (*_NUMBERS, "tag:yaml.org,2002:timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: bytes, notes: list[Note]) -> None:
        super().__init__(stream)
        self._notes = notes

    @classmethod
    def documents(cls, data: bytes, notes: list[Note]) -> Iterator[Any]:
        """The documents of a text as plain values; notes are added to."""
        loader = cls(data, notes)
        try:
            while loader.check_data():
                yield loader.get_data()
        finally:
            loader.dispose()

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """As the class above, which takes the last of two without a word."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                text = f"line {line}: {key.value} stands twice; the last one counts"
                self._notes.append(Note(text, is_warning=True))
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(_NUMBERS[0], _INT, list("-+0123456789"))
Loader.add_implicit_resolver(_NUMBERS[1], _FLOAT, list("-+.0123456789"))

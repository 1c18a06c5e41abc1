"""Limits on YAML that users write, checked before anything is built from it.

A few bytes of YAML can cost a parser its process: a reference that contains itself, references to
references that multiply (548 bytes are a billion nodes), and nesting, at which libyaml's composer
overflows the C stack (200 KB of "- - - -" end the process with SIGSEGV). Parser events are free of
all three, so they are counted first. A few anchors and merge keys are everyday in manifests and
stay allowed: what a reference stands for is counted each time that it is used.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import yaml


class Limits(NamedTuple):
    """What one text may hold at most. `nodes`: scalars, lists and mappings of one document, with
    those that its references stand for. `depth`: lists and mappings inside of each other.
    """

    size: int
    nodes: int
    depth: int = 64


MANIFESTS: Final = Limits(size=64 << 20, nodes=500_000)
"""A file of Kubernetes objects: about 8,000 Services in one document."""
CONFIGURATION: Final = Limits(size=1 << 20, nodes=20_000)
"""A configuration file."""
KUBECONFIG: Final = Limits(size=4 << 20, nodes=100_000)
"""A kubeconfig: thousands of contexts, each with its certificates."""

NOT_YAML: Final = (
    yaml.YAMLError,
    ValueError,
    RecursionError,
    AttributeError,
    LookupError,
    TypeError,
    ArithmeticError,
)
"""What PyYAML raises for a text: beside its own, whatever its constructors meet in ``!!int ''``,
``!!bool x`` or ``!!timestamp x``."""

_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OPEN: Final = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSE: Final = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


class TooLarge(yaml.MarkedYAMLError):
    """The text is beyond a limit; `problem` says which one."""


def check(data: bytes, limits: Limits) -> None:
    """Raise TooLarge when the text is beyond a limit, and YAMLError when it is not YAML."""
    if len(data) > limits.size:
        raise TooLarge(problem=f"{len(data)} bytes; the limit is {limits.size}")
    document = _Document(limits)
    for event in _events(data):
        if isinstance(event, yaml.DocumentStartEvent):
            document = _Document(limits)
        else:
            document.add(event)


def _events(data: bytes) -> Iterator[Any]:
    return yaml.parse(data, _LOADER)


class _Document:
    """The nodes of one document so far, and how many each anchor stands for."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._nodes = 0
        self._anchors: dict[str, int] = {}
        self._open: list[tuple[str | None, int]] = []  # anchor, and the nodes before it

    def add(self, event: Any) -> None:
        """Count one event. Raises TooLarge."""
        if isinstance(event, yaml.ScalarEvent):
            self._nodes += 1
            if event.anchor:
                self._anchors[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            self._refer(event)
        elif isinstance(event, _OPEN):
            self._open.append((event.anchor, self._nodes))
            self._nodes += 1
            self._anchors.pop(event.anchor or "", None)
            if len(self._open) > self._limits.depth:
                raise _too_large(f"more than {self._limits.depth} levels deep", event)
        elif isinstance(event, _CLOSE):
            anchor, before = self._open.pop()
            if anchor:
                self._anchors[anchor] = self._nodes - before
        if self._nodes > self._limits.nodes:
            what = (
                f"more than {self._limits.nodes} nodes, references counted as what they stand for"
            )
            raise _too_large(what, event)

    def _refer(self, event: Any) -> None:
        if any(anchor == event.anchor for anchor, _ in self._open):
            raise _too_large(f"*{event.anchor} refers to something that contains it", event)
        # An anchor that does not exist is an error of the composer, with its line.
        self._nodes += self._anchors.get(event.anchor, 1)


def _too_large(problem: str, event: Any) -> TooLarge:
    return TooLarge(problem=problem, problem_mark=event.start_mark)

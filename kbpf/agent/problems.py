"""The problem lines of the agent, by what they are about.

A tenant decides how many there are, so nothing here walks over all of them: a change costs what it
is about.
"""

from collections.abc import Hashable, Sequence
from itertools import chain, islice


class Problems:
    """Lines by subject: an object, a Service port. One thread only."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, tuple[str, ...]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def replace(self, subject: Hashable, lines: Sequence[str]) -> list[str]:
        """These are the lines of this subject now; those of them that are new."""
        before = self._lines.get(subject, ())
        if not lines and not before:
            return []
        self._count += len(lines) - len(before)
        if lines:
            self._lines[subject] = tuple(lines)
        else:
            del self._lines[subject]
        old_lines = frozenset(before)
        return [line for line in lines if line not in old_lines]

    def first(self, limit: int) -> list[str]:
        """So many of them at most, those that have lasted longest."""
        return list(islice(chain.from_iterable(self._lines.values()), limit))

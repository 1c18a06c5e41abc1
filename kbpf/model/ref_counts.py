# SPDX-License-Identifier: Apache-2.0
"""Counts of the users of values. A value appears with its first user and vanishes with the last."""

from collections import Counter
from collections.abc import Collection, Set
from typing import TypeVar

T = TypeVar("T")


class RefCounts(Counter[T]):
    """Holds the values that have users."""

    def add(self, values: Collection[T]) -> set[T]:
        """Adds a user of each of these values; returns those that appeared."""
        appeared = {value for value in values if value not in self}
        self.update(values)
        return appeared

    def remove(self, values: Collection[T]) -> set[T]:
        """Removes a user of each of these values; returns those that vanished."""
        self.subtract(values)
        vanished = {value for value in values if not self[value]}
        for value in vanished:
            del self[value]
        return vanished

    def replace(self, before: Set[T], after: Set[T]) -> set[T]:
        """A user has `after` instead of `before`; returns what appeared or vanished."""
        return self.add(after - before) | self.remove(before - after)

"""Marks of short circuits: which Service port has which."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Final

from kbpf.dataplane.ipvs.plan import Element, Part, SetName, externals, wants_mark
from kbpf.model.desired import ServicePortKey, ServiceState

FIRST_MARK: Final = 0x6B620000
"""They count up from here, "kb"; numbers with the masquerade bit are left out."""


class Marks:
    """A mark that was another's is not used again: packets may still carry it."""

    def __init__(self, but: int) -> None:
        """`but`: bits that mean something else."""
        self._but = but
        self._of: dict[ServicePortKey, int] = {}
        self._taken: set[int] = set()
        self._old: dict[tuple[Part, ...], int] = {}  # by frontend, of an earlier agent
        self._last = FIRST_MARK

    def adopt(self, *tables: Iterable[Element]) -> None:
        """What stands in the sets goes on meaning what it meant; in those of the first table, if
        they do not agree.
        """
        self._old.clear()
        for name, parts in chain.from_iterable(tables):
            mark = parts[-1]
            if name in (SetName.MARKS, SetName.OWN_MARKS) and isinstance(mark, int):
                self._last = max(self._last, mark)
                if name is SetName.MARKS and not mark & self._but:
                    self._old.setdefault(parts[:-1], mark)

    def of(self, state: ServiceState) -> int:
        """Of its short circuit; 0 if it needs none."""
        if not wants_mark(state):
            self.drop(state.key)
            return 0
        if state.key not in self._of:
            mark = self._known(state) or self._new()
            self._of[state.key] = mark
            self._taken.add(mark)
        return self._of[state.key]

    def drop(self, key: ServicePortKey) -> None:
        """The Service port is gone."""
        self._taken.discard(self._of.pop(key, 0))

    def _known(self, state: ServiceState) -> int:
        """The one that most of its frontends have had; 0 if there is none, or others have it."""
        had = Counter(self._old.pop(at, 0) for at in externals(state))
        free = had.keys() - self._taken - {0}
        return min(free, key=lambda mark: (-had[mark], mark), default=0)

    def _new(self) -> int:
        self._last += 1
        while taken := self._last & self._but:
            above = taken.bit_length()
            self._last = (self._last >> above) + 1 << above
        return self._last

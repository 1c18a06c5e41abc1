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
        self.unwanted: dict[ServicePortKey, int] = {}
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
                is_free = mark not in self._taken and not mark & self._but
                if name is SetName.MARKS and is_free:
                    self._old.setdefault(parts[:-1], mark)

    def of(self, state: ServiceState) -> int:
        """Of its short circuit; 0 if it has none. One that it wants no more is `unwanted`, and
        stays its own until drop() says that nobody needs it, or its external frontends go.
        """
        key, wants = state.key, wants_mark(state)
        if not externals(state):
            self.drop(key)
            return 0
        mark = self._of.get(key) or self._known(state) or (self._new() if wants else 0)
        if mark:
            self._of[key] = mark
            self._taken.add(mark)
        if mark and not wants:
            self.unwanted[key] = mark
        else:
            self.unwanted.pop(key, None)
        return mark

    def drop(self, key: ServicePortKey) -> None:
        """The Service port is gone, or what its mark has led to."""
        self._taken.discard(self._of.pop(key, 0))
        self.unwanted.pop(key, None)

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

"""Marks of short circuits: which Service port has which."""

from collections.abc import Iterable
from typing import Final

from kbpf.dataplane.ipvs.plan import Element, Part, SetName, wants_mark
from kbpf.model.desired import ServicePortKey, ServiceState

FIRST_MARK: Final = 0x6B620000
"""They count up from here, "kb"; numbers with the masquerade bit are left out."""


class Marks:
    """A mark that was another's is not used again: packets may still carry it."""

    def __init__(self, but: int) -> None:
        """`but`: bits that mean something else."""
        self._but = but
        self._of: dict[ServicePortKey, int] = {}
        self._old: dict[tuple[Part, ...], int] = {}  # by frontend, of an earlier agent
        self._last = FIRST_MARK

    def adopt(self, elements: Iterable[Element]) -> None:
        """What stands in the sets goes on meaning what it meant."""
        for name, parts in elements:
            mark = parts[-1]
            if name in (SetName.SHORT_CIRCUITS, SetName.OWN_MARKS) and isinstance(mark, int):
                self._last = max(self._last, mark)
                if name is SetName.SHORT_CIRCUITS:
                    self._old[parts[:-1]] = mark

    def of(self, state: ServiceState) -> int:
        """Of its short circuit; 0 if it needs none."""
        if not wants_mark(state):
            self.drop(state.key)
            return 0
        if state.key not in self._of:
            ats = ((f.at.address, f.at.protocol, f.at.port) for f in state.frontends)
            known = next((self._old.pop(at) for at in ats if at in self._old), 0)
            if known in self._of.values():
                known = 0
            self._of[state.key] = known or self._new()
        return self._of[state.key]

    def drop(self, key: ServicePortKey) -> None:
        """The Service port is gone."""
        self._of.pop(key, None)

    def _new(self) -> int:
        self._last += 1
        while taken := self._last & self._but:
            above = taken.bit_length()
            self._last = (self._last >> above) + 1 << above
        return self._last

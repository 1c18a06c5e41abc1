"""Marks of short circuits: which Service port has which."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Final

from kbpf.dataplane.ipvs.plan import (
    Element,
    ElementField,
    SetName,
    external_frontend_keys,
    needs_fwmark,
)
from kbpf.model.desired import ServicePortKey, ServiceState

FIRST_FWMARK: Final = 0x6B620000
"""They count up from here, "kb"; numbers with the masquerade bit are left out."""


class FwmarkAllocator:
    """A mark that was another's is not used again: packets may still carry it."""

    def __init__(self, reserved_bits: int) -> None:
        """`but`: bits that mean something else."""
        self._reserved_bits = reserved_bits
        self._by_key: dict[ServicePortKey, int] = {}
        self._used: set[int] = set()
        self.unneeded: dict[ServicePortKey, int] = {}
        self._adopted: dict[tuple[ElementField, ...], int] = {}  # by frontend, of an earlier agent
        self._last_fwmark = FIRST_FWMARK

    def adopt(self, *tables: Iterable[Element]) -> None:
        """What stands in the sets goes on meaning what it meant; in those of the first table, if
        they do not agree.
        """
        self._adopted.clear()
        for name, parts in chain.from_iterable(tables):
            fwmark = parts[-1]
            if name in (SetName.FWMARKS, SetName.OWN_FWMARKS) and isinstance(fwmark, int):
                self._last_fwmark = max(self._last_fwmark, fwmark)
                is_free = fwmark not in self._used and not fwmark & self._reserved_bits
                if name is SetName.FWMARKS and is_free:
                    self._adopted.setdefault(parts[:-1], fwmark)

    def allocate(self, state: ServiceState) -> int:
        """Of its short circuit; 0 if it has none. One that it wants no more is `unwanted`, and
        stays its own until drop() says that nobody needs it, or its external frontends go.
        """
        key, is_needed = state.key, needs_fwmark(state)
        if not external_frontend_keys(state):
            self.release(key)
            return 0
        fwmark = (
            self._by_key.get(key)
            or self._take_adopted(state)
            or (self._next_fwmark() if is_needed else 0)
        )
        if fwmark:
            self._by_key[key] = fwmark
            self._used.add(fwmark)
        if fwmark and not is_needed:
            self.unneeded[key] = fwmark
        else:
            self.unneeded.pop(key, None)
        return fwmark

    def release(self, key: ServicePortKey) -> None:
        """The Service port is gone, or what its mark has led to."""
        self._used.discard(self._by_key.pop(key, 0))
        self.unneeded.pop(key, None)

    def _take_adopted(self, state: ServiceState) -> int:
        """The one that most of its frontends have had; 0 if there is none, or others have it."""
        counts = Counter(
            self._adopted.pop(frontend_key, 0) for frontend_key in external_frontend_keys(state)
        )
        free = counts.keys() - self._used - {0}
        return min(free, key=lambda fwmark: (-counts[fwmark], fwmark), default=0)

    def _next_fwmark(self) -> int:
        self._last_fwmark += 1
        while reserved := self._last_fwmark & self._reserved_bits:
            shift = reserved.bit_length()
            self._last_fwmark = (self._last_fwmark >> shift) + 1 << shift
        return self._last_fwmark

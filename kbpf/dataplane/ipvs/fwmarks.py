# SPDX-License-Identifier: Apache-2.0
"""Allocates fwmarks to the short circuits of Service ports."""

from collections import Counter
from collections.abc import Iterable
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
"""Fwmarks count up from here (ASCII "kb"); numbers that contain the masquerade bit are skipped."""


class FwmarkAllocator:
    """Which Service port has which fwmark. A fwmark is never given to another Service port, since
    packets may still carry it.

    `unneeded`: fwmarks of short circuits that are kept only until they have no connections.
    """

    def __init__(self, reserved_bits: int) -> None:
        """`reserved_bits`: bits of a mark that have another meaning."""
        self._reserved_bits = reserved_bits
        self._by_key: dict[ServicePortKey, int] = {}
        self._used: set[int] = set()
        self.unneeded: dict[ServicePortKey, int] = {}
        # Fwmarks of an earlier agent, by frontend.
        self._adopted: dict[tuple[ElementField, ...], int] = {}
        self._last_fwmark = FIRST_FWMARK

    def adopt(self, elements: Iterable[Element]) -> None:
        """Adopts the fwmarks in these sets, so that they keep their meaning."""
        self._adopted.clear()
        for name, parts in elements:
            fwmark = parts[-1]
            if name in (SetName.FWMARKS, SetName.OWN_FWMARKS) and isinstance(fwmark, int):
                self._last_fwmark = max(self._last_fwmark, fwmark)
                is_free = fwmark not in self._used and not fwmark & self._reserved_bits
                if name is SetName.FWMARKS and is_free:
                    self._adopted[parts[:-1]] = fwmark

    def allocate(self, state: ServiceState) -> int:
        """Returns the fwmark of a Service port's short circuit; 0 if it has none.

        A fwmark that the Service port no longer needs becomes `unneeded`. It is kept until
        release(), or until the Service port has no external frontends any more.
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

    def find(self, key: ServicePortKey) -> int:
        """The fwmark that the Service port has; 0 if it has none."""
        return self._by_key.get(key, 0)

    def release(self, key: ServicePortKey) -> None:
        """Frees the fwmark: the Service port or its short circuit was removed."""
        self._used.discard(self._by_key.pop(key, 0))
        self.unneeded.pop(key, None)

    def _take_adopted(self, state: ServiceState) -> int:
        """The adopted fwmark that most of its frontends had; 0 if there is none, or if another
        Service port has it by now.
        """
        counts = Counter(
            self._adopted.pop(frontend_key, 0) for frontend_key in external_frontend_keys(state)
        )
        free = counts.keys() - self._used - {0}
        return min(free, key=lambda fwmark: (-counts[fwmark], fwmark), default=0)

    def _next_fwmark(self) -> int:
        self._last_fwmark += 1
        # Rounds up past the block of numbers that have the reserved bit set.
        while reserved := self._last_fwmark & self._reserved_bits:
            shift = reserved.bit_length()
            self._last_fwmark = (self._last_fwmark >> shift) + 1 << shift
        return self._last_fwmark

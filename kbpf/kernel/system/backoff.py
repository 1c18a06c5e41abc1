# SPDX-License-Identifier: Apache-2.0
"""How long to wait before the next attempt. Pure rules: nothing can become a tight loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_EXPONENT: Final = 20


@dataclass(slots=True)
class Backoff:
    """The delays of one thing that is tried again: `initial` seconds, doubled each time up to
    `maximum`.

    - With `rng`, which returns 0 to 1, times a random factor between 1/2 and 1, so that the nodes
      of a cluster do not return in step.
    - After a clean end: at once, but a second one without a steady time in between counts as a
      failure.
    - Only what was healthy for `steady_after` seconds resets it. The first signs of success do not:
      a server may send headers, a list or a few events and still fail each time.
    """

    initial: float
    maximum: float
    rng: Callable[[], float] = lambda: 1.0
    steady_after: float = float("inf")
    tries: int = 0

    def next_delay(self, *, failed: bool = True, healthy_for: float = 0.0, retry_after: float = 0.0) -> float:
        """Returns the seconds to wait now. `healthy_for`: how many seconds it worked, 0 if never.
        `retry_after`: the minimum that the other side has asked for.
        """
        if healthy_for >= self.steady_after:
            self.tries = 0
        is_immediate = not failed and self.tries == 0
        jitter = 0.5 + self.rng() / 2
        delay = min(self.maximum, self.initial * 2.0 ** min(self.tries, MAX_EXPONENT)) * jitter
        self.tries += 1
        # A minimum: we wait 1 to 1.5 times as long, so that clients do not return together.
        return max(0.0 if is_immediate else delay, retry_after * (0.5 + jitter))

"""How long to wait before the next try: a pure rule, so that no source can become a tight loop.

- After a failure: 0.2 s, then twice as long each time up to 30 s, each between half and full, so
  that the nodes of a cluster do not come back in step.
- After a clean end: at once; but a second one without a *steady* watch between counts as a failure.
- Only a watch that lived for `steady` seconds makes the count start again. Headers, a list or a few
  events do not: a server can give those and fail each time.
"""

from collections.abc import Callable
from dataclasses import dataclass

LONGEST_EXPONENT = 20


@dataclass(slots=True)
class Pace:
    """The tries in a row so far. `random` gives 0 to 1."""

    random: Callable[[], float]
    first: float = 0.2
    longest: float = 30.0
    steady: float = 5.0
    tries: int = 0

    def after(self, *, failed: bool, lived: float, retry_after: float = 0.0) -> float:
        """Seconds to wait now. `lived`: how long the watch was healthy, 0 if it never was.
        `retry_after`: what the server asked for at least.
        """
        if lived >= self.steady:
            self.tries = 0
        at_once = not failed and self.tries == 0
        spread = 0.5 + self.random() / 2
        delay = min(self.longest, self.first * 2.0 ** min(self.tries, LONGEST_EXPONENT)) * spread
        self.tries += 1
        return max(0.0 if at_once else delay, retry_after * (0.5 + spread))

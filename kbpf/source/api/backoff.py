"""How long to wait before the next try, and how often to log that tries fail: pure rules, so that
no source can become a tight loop, and no outage fills the log or is missing from its last hour.

- After a failure: 0.2 s, then twice as long each time up to 30 s, each between half and full, so
  that the nodes of a cluster do not come back in step.
- After a clean end: at once; but a second one without a *steady* watch between counts as a failure.
- Only a watch that lived for `steady` seconds makes the count start again. Headers, a list or a few
  events do not: a server can give those and fail each time.
- Watches that fail for the same reason are one line. It is repeated after 1 and 5 minutes, and then
  every 10 minutes while it lasts.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

LONGEST_EXPONENT = 20
REPEATS: Final = (60.0, 300.0)
REPEAT_SECONDS: Final = 600.0
"""After the REPEATS."""
MOST_REASONS: Final = 32


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


class Outage(NamedTuple):
    """What to log: the watches that fail, or that work again, and for how long they have failed."""

    names: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class _Reason:
    begun: float
    repeats: int = 0
    failing: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    def due(self) -> float:
        """Seconds from the beginning to the next line."""
        if self.repeats < len(REPEATS):
            return REPEATS[self.repeats]
        return (self.repeats - len(REPEATS) + 1) * REPEAT_SECONDS


class Outages:
    """Those of the watches of one server, from any thread. `now` is any monotonic clock's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}
        self._reasons: dict[str, _Reason] = {}

    def failed(self, name: str, reason: str, now: float) -> Outage | None:
        """A try of this watch has failed. None: that is nothing to log now."""
        with self._lock:
            begun = self._since.setdefault(name, now)
            for known, other in self._reasons.items():
                if known != reason:
                    other.failing.discard(name)
            if len(self._reasons) >= MOST_REASONS:
                self._reasons = {k: r for k, r in self._reasons.items() if r.failing}
            this = self._reasons.get(reason)
            is_new = this is None
            if this is None:
                this = self._reasons[reason] = _Reason(begun)
            this.failing.add(name)
            this.names.add(name)
            lasted = now - this.begun
            if not is_new and lasted < this.due():
                return None
            while lasted >= this.due():
                this.repeats += 1
            return Outage(tuple(sorted(this.failing)), lasted)

    def ended(self, name: str, now: float) -> Outage | None:
        """This watch works. None: that is nothing to log, as others fail for the same reason, or
        it did not fail.
        """
        with self._lock:
            if self._since.pop(name, None) is None:
                return None
            over = {k: r for k, r in self._reasons.items() if r.failing == {name}}
            for reason in self._reasons.values():
                reason.failing.discard(name)
            for key in over if self._since else tuple(self._reasons):
                del self._reasons[key]
            if not over:
                return None
            names = {each for r in over.values() for each in r.names} - self._since.keys()
            return Outage(tuple(sorted(names)), now - min(r.begun for r in over.values()))

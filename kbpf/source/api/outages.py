# SPDX-License-Identifier: Apache-2.0
"""When to log the failures of watches: an outage neither floods the log nor is missing from its
last hour. Watches that fail for the same reason share one log line, which is repeated after 1 and 5
minutes and then every 10 minutes.
"""

import threading
from dataclasses import dataclass, field
from typing import Final, NamedTuple

FIRST_REPEATS: Final = (60.0, 300.0)
REPEAT_INTERVAL: Final = 600.0
"""After FIRST_REPEATS."""
MAX_REASONS: Final = 32


class Outage(NamedTuple):
    """What to log: the watches that fail or have recovered, and how long they had been failing."""

    names: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class _OutageReason:
    start: float
    repeats: int = 0
    failing_names: set[str] = field(default_factory=set)
    affected_names: set[str] = field(default_factory=set)

    def next_log_after(self) -> float:
        """Seconds from the start of the outage to its next log line."""
        if self.repeats < len(FIRST_REPEATS):
            return FIRST_REPEATS[self.repeats]
        return (self.repeats - len(FIRST_REPEATS) + 1) * REPEAT_INTERVAL


class OutageLog:
    """The outages of the watches of one server. Thread-safe. `now` is any monotonic clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failing_since: dict[str, float] = {}
        self._reasons: dict[str, _OutageReason] = {}

    def record_failure(self, name: str, reason: str, now: float) -> Outage | None:
        """Records a failed attempt. Returns None if nothing is to be logged now."""
        with self._lock:
            start = self._failing_since.setdefault(name, now)
            for other_reason, outage in self._reasons.items():
                if other_reason != reason:
                    outage.failing_names.discard(name)
            if len(self._reasons) >= MAX_REASONS:
                self._reasons = {k: r for k, r in self._reasons.items() if r.failing_names}
            current = self._reasons.get(reason)
            is_new = current is None
            if current is None:
                current = self._reasons[reason] = _OutageReason(start)
            current.failing_names.add(name)
            current.affected_names.add(name)
            duration = now - current.start
            if not is_new and duration < current.next_log_after():
                return None
            while duration >= current.next_log_after():
                current.repeats += 1
            return Outage(tuple(sorted(current.failing_names)), duration)

    def record_recovery(self, name: str, now: float) -> Outage | None:
        """Records that a watch works again. Returns None if nothing is to be logged: others still
        fail for the same reason, or this one had not failed.
        """
        with self._lock:
            if self._failing_since.pop(name, None) is None:
                return None
            recovered = {k: r for k, r in self._reasons.items() if r.failing_names == {name}}
            for reason in self._reasons.values():
                reason.failing_names.discard(name)
            # While another watch fails, only the outages that this one had alone are over.
            for key in recovered if self._failing_since else tuple(self._reasons):
                del self._reasons[key]
            if not recovered:
                return None
            names = {watch for r in recovered.values() for watch in r.affected_names} - self._failing_since.keys()
            return Outage(tuple(sorted(names)), now - min(r.start for r in recovered.values()))

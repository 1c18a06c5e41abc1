# SPDX-License-Identifier: Apache-2.0
"""Programs the desired state through the data plane, and decides when to retry.

If the kernel refuses a write, what is programmed continues to serve, perhaps with a part of the
change. After a second the data plane reads the kernel's state again and writes what differs.

Nothing is written while WAITING. The first apply programs everything. It is PARTIAL if some objects
could not be read: state of an earlier agent is then kept until an apply that is complete, and from
there no way leads back.
"""

import logging
import time
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final

from kbpf.agent.problem_book import ProblemBook
from kbpf.agent.recorder import Recorder
from kbpf.dataplane.base import DataPlane, Report
from kbpf.errors import KbpfError, LastError
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.status import VerifiedPart

log = logging.getLogger("kbpf.agent")

RETRY_INTERVAL_S: Final = 1.0


class State(Enum):
    WAITING = auto()  # until every source has listed its objects
    FIRST_APPLY = auto()
    FIRST_RETRY = auto()
    PARTIAL = auto()
    PARTIAL_RETRY = auto()
    SERVING = auto()
    SERVING_RETRY = auto()

    @property
    def has_applied(self) -> bool:
        """Whether an apply has succeeded."""
        return self not in (State.WAITING, State.FIRST_APPLY, State.FIRST_RETRY)

    @property
    def is_complete(self) -> bool:
        """Whether an apply has succeeded for which all objects could be read."""
        return self in (State.SERVING, State.SERVING_RETRY)

    @property
    def is_retrying(self) -> bool:
        """Whether the last apply failed."""
        return self in (State.FIRST_RETRY, State.PARTIAL_RETRY, State.SERVING_RETRY)

    @property
    def last_apply_succeeded(self) -> bool:
        """Whether there was an apply, and the last one succeeded."""
        return self in (State.PARTIAL, State.SERVING)


class Outcome(Enum):
    """What leads from one state to the next: all lists are complete, or an apply has ended."""

    LISTED = auto()
    APPLIED = auto()
    APPLIED_PARTLY = auto()  # some objects could not be read
    FAILED = auto()


def _after_apply(partial: State, failed: State) -> Mapping[Outcome, State]:
    return {
        Outcome.APPLIED: State.SERVING,
        Outcome.APPLIED_PARTLY: partial,
        Outcome.FAILED: failed,
    }


TRANSITIONS: Final[Mapping[State, Mapping[Outcome, State]]] = {
    State.WAITING: {Outcome.LISTED: State.FIRST_APPLY},
    State.FIRST_APPLY: _after_apply(State.PARTIAL, State.FIRST_RETRY),
    State.FIRST_RETRY: _after_apply(State.PARTIAL, State.FIRST_RETRY),
    State.PARTIAL: _after_apply(State.PARTIAL, State.PARTIAL_RETRY),
    State.PARTIAL_RETRY: _after_apply(State.PARTIAL, State.PARTIAL_RETRY),
    State.SERVING: _after_apply(State.SERVING, State.SERVING_RETRY),
    State.SERVING_RETRY: _after_apply(State.SERVING, State.SERVING_RETRY),
}


class Applier:
    """Used by the agent's thread only."""

    def __init__(
        self,
        config: Config,
        plane: DataPlane,
        is_authoritative: Callable[[], bool],
        recorder: Recorder,
        book: ProblemBook,
    ) -> None:
        self._config, self._plane, self._recorder, self._book = config, plane, recorder, book
        self.is_authoritative = is_authoritative
        self.state = State.WAITING
        self.error = LastError()
        self.count = 0
        self.last_ms = 0.0
        self.is_deferred = False
        """Whether the data plane has large Service ports left to program (Report.deferred)."""
        self.deferred_due = 0.0
        self.retry_due = 0.0
        self._last = float("-inf")  # time.monotonic(), like the others
        self._resync_due = 0.0  # not before the first apply
        self.compared: VerifiedPart | None = None
        """What the last comparison of everything had to repair; None before the first."""

    def advance(self, outcome: Outcome) -> None:
        self.state = TRANSITIONS[self.state][outcome]

    def seconds_until_due(self) -> float:
        """Returns the seconds until --min-sync-period allows the next apply."""
        return self._last + self._config.min_sync_period - time.monotonic()

    @property
    def needs_retry(self) -> bool:
        """Whether something is retried without a change: a failed apply, or refused ports."""
        return self.state.is_retrying or bool(self._book.not_programmed)

    def apply(self, desired: DesiredState, keys: set[ServicePortKey] | None, is_resync: bool) -> Report | None:
        """Programs these Service ports; None: all. Returns None if that failed, or if it has to
        wait: after a failure the data plane reads all maps again, so changes wait for the retry.
        `is_resync`: everything was programmed, so what is written now repairs it.
        """
        if self.state.is_retrying and time.monotonic() < self.retry_due:
            return None
        start = time.perf_counter()
        try:
            # Read once: the threads of the sources may change it during apply().
            authoritative = self.is_authoritative()
            report = self._plane.apply(desired, keys, authoritative)
        except KbpfError as error:
            if self.error.replace(error):
                log.error("cannot write to the data plane; retrying: %s", error)
            self.advance(Outcome.FAILED)
            self.retry_due = time.monotonic() + RETRY_INTERVAL_S
            self._recorder.applied(keys, 0.0, None)
            return None
        seconds = time.perf_counter() - start
        self.error.replace(None)
        self.advance(Outcome.APPLIED if authoritative else Outcome.APPLIED_PARTLY)
        self._record(report, keys, seconds, is_resync)
        return report

    def _record(self, report: Report, keys: set[ServicePortKey] | None, seconds: float, is_resync: bool) -> None:
        self._last = time.monotonic()
        if keys is None:
            self._resync_due = self._last + self._config.config_sync_period
        self.last_ms = seconds * 1000
        self.count += 1
        written = sum(report.writes.values())
        log.debug(
            "programmed service_ports=%s entries=%d ms=%.1f",
            "all" if keys is None else len(keys),
            written,
            self.last_ms,
        )
        self._recorder.applied(keys, seconds, written, is_resync)
        if is_resync:
            self.compared = VerifiedPart("maps", written, time.time())
        if is_resync and written:
            counts = " ".join(f"{name}={n}" for name, n in sorted(report.writes.items()) if n)
            log.warning("another process had changed the programmed state; repaired: %s", counts)
        self.is_deferred, self.deferred_due = bool(report.deferred), report.next_apply_at
        # Fewer are refused than before, so there is room again: the others are retried at once.
        more_room = len(report.refused) < len(self._book.not_programmed)
        self.retry_due = self._last + (0.0 if more_room else RETRY_INTERVAL_S)
        self._book.report_limits(report)

    def compare_soon(self) -> None:
        """Makes the comparison of everything due. Any thread may call."""
        self._resync_due = 0.0

    @property
    def resync_due(self) -> bool:
        """Whether `config_sync_period` has passed since everything was compared, and all objects
        could be read.
        """
        is_due = time.monotonic() >= self._resync_due
        return is_due and not self.state.is_retrying and self.is_authoritative()

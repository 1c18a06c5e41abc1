# SPDX-License-Identifier: Apache-2.0
"""The agent's states, and what may follow what: a table.

Nothing is written while WAITING. The first apply programs everything. It is PARTIAL if some objects
could not be read: state of an earlier agent is then kept until an apply that is complete, and from
there no way leads back. A failed apply is retried; what is programmed serves meanwhile.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


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

# SPDX-License-Identifier: Apache-2.0
"""The faults of coming requests, and a record of past ones."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.faults.fault_relay import Decision
from tests.support.faults.fault_wire import Answer, Request
from tests.support.lab.lab import PATIENCE

WAIT_SECONDS = PATIENCE


@dataclass(slots=True)
class _Rule:
    """A fault for requests that `matches`, for `left` more of them (None: for all)."""

    matches: Callable[[Request], bool]
    left: int | None
    decision: Decision


class Script:
    """Faults of coming requests, and the list of past ones; safe to use from any thread.

    `verb` and `resource` select requests by the fields of fault_wire.Request; None matches any.
    `times` is the number of requests that a fault is for; None: until `heal`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all attributes, those of subclasses too
        self._rules: list[_Rule] = []
        self._requests: list[Request] = []
        self._healed = threading.Event()

    def answer(
        self,
        status: int,
        times: int | None = 1,
        *,
        verb: str | None = "watch",
        resource: str | None = None,
        retry_after: int | None = None,
        message: str = "injected by a test",
        where: Callable[[Request], bool] | None = None,
    ) -> None:
        """Answer the next requests with an error; `where` is a further condition on them."""
        decision = Decision(answer=Answer(status, message, retry_after))
        self._add(_Rule(_choice(verb, resource, where), times, decision))

    def refuse_initial_events(self, status: int = 422) -> None:
        """Behave like a server without streaming lists: refuse watches with sendInitialEvents."""
        message = "sendInitialEvents is forbidden for watch unless the WatchList gate is enabled"
        decision = Decision(answer=Answer(status, message))
        streaming = _choice("watch", None, lambda request: "sendInitialEvents" in request.query)
        self._add(_Rule(streaming, None, decision))

    def hold(self, times: int | None = 1, *, verb: str | None = None, resource: str | None = None) -> None:
        """Read the next requests, but answer them only after `heal`."""
        decision = Decision(hold=(self._healed,))
        self._add(_Rule(_choice(verb, resource), times, decision))

    def delay(
        self,
        seconds: float,
        times: int | None = None,
        *,
        verb: str | None = None,
        resource: str | None = None,
    ) -> None:
        self._add(_Rule(_choice(verb, resource), times, Decision(delay=seconds)))

    def requests(self, verb: str | None = None, resource: str | None = None) -> tuple[Request, ...]:
        """Return the requests so far, oldest first."""
        with self._changed:
            return tuple(filter(_choice(verb, resource), self._requests))

    def count(self, verb: str | None = None, resource: str | None = None) -> int:
        return len(self.requests(verb, resource))

    def forget(self) -> None:
        with self._changed:
            self._requests.clear()

    def wait_for_requests(
        self,
        number: int,
        verb: str | None = None,
        resource: str | None = None,
        seconds: float = WAIT_SECONDS,
    ) -> tuple[Request, ...]:
        """Wait until there are this many requests and return them; raises TimeoutError."""
        what = f"{number} requests {verb or 'of any verb'} {resource or ''}"
        self._wait(lambda: self.count(verb, resource) >= number, what, seconds)
        return self.requests(verb, resource)

    def decide(self, request: Request) -> Decision:
        delay = 0.0
        hold: tuple[threading.Event, ...] = ()
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()
            for rule in [rule for rule in self._rules if rule.matches(request)]:
                if rule.left is not None:
                    rule.left -= 1
                    if rule.left == 0:
                        self._rules.remove(rule)
                delay += rule.decision.delay
                hold += rule.decision.hold
                if rule.decision.answer is not None:
                    return Decision(delay, hold, rule.decision.answer)
        return Decision(delay, hold)

    def release(self) -> None:
        """Drop all faults, and release held requests."""
        with self._changed:
            self._rules.clear()
            self._healed.set()
            self._healed = threading.Event()

    def _add(self, rule: _Rule) -> None:
        with self._changed:
            self._rules.append(rule)

    def _wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, seconds):
                seen = [(r.verb, r.resource) for r in self._requests[-20:]]
                raise TimeoutError(f"not within {seconds} s: {what}; the last requests: {seen}")


def _choice(
    verb: str | None, resource: str | None, where: Callable[[Request], bool] | None = None
) -> Callable[[Request], bool]:
    def matches(request: Request) -> bool:
        return (
            verb in {None, request.verb} and resource in {None, request.resource} and (where is None or where(request))
        )

    return matches

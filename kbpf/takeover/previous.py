# SPDX-License-Identifier: Apache-2.0
"""State of another data plane that was found on this node and still serves: how it is drained."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Final

from kbpf.errors import KbpfError, LastError
from kbpf.model.config import Config

log = logging.getLogger("kbpf.agent")

DRAIN_POLL_INTERVAL_S: Final = 2.0
DRAIN_RETRY_INTERVAL_S: Final = 5.0


class PreviousDataPlane(ABC):
    """State that an agent of another mode, or a kube-proxy, left on this node. Called by one
    thread.
    """

    name: ClassVar[str]
    connections: ClassVar[str]
    """What the open connections are, after their number."""
    poll_interval: ClassVar[float] = DRAIN_POLL_INTERVAL_S
    """Interval between two counts of the connections, in seconds."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = -1
        self._due: float | None = None
        self._open_connections = 0

    @abstractmethod
    def claim(self) -> bool:
        """Whether such state exists. If so, no agent of that mode can start until close(). Raises
        KernelError while one runs.
        """

    def drain(self, now: float) -> float | None:
        """Stops new connections and removes what no live connection needs any more; established
        connections continue where the kernel allows it. Returns when to call next
        (time.monotonic), or None when nothing is left.
        """
        if self._due is None:
            self._due = self._stop_new_connections(now)
        if now < self._due:
            return self._due
        self._due = now + self.poll_interval
        self._open_connections = self._remove_idle()
        if self._open_connections:
            return self._due
        self._remove()
        return None

    def _stop_new_connections(self, now: float) -> float:
        """Returns when to count the connections first. Not at once if there is nothing to stop:
        packets may still be on their way to the other data plane.
        """
        return now + self.poll_interval

    @abstractmethod
    def _remove_idle(self) -> int:
        """Removes what no connection uses; returns the number of open connections."""

    @abstractmethod
    def _remove(self) -> None:
        """Removes the rest, after the last connection."""

    def problems(self) -> tuple[str, ...]:
        """A line if connections still use it."""
        return (f"{self._open_connections} {self.connections}",) if self._open_connections else ()

    def close(self) -> None:
        """Releases the lock. The state itself stays."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Takeover:
    """Drains all that still serves on this node besides the data plane of this agent. One thread
    drains; claim() is called before and release() after it.
    """

    def __init__(self) -> None:
        self._previous: list[PreviousDataPlane] = []
        self._error = LastError()
        self._retry_due = float("-inf")

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to drain."""
        return not self._previous

    def claim(self, factories: Iterable[Callable[[], PreviousDataPlane]], mode: str) -> None:
        """Claims what exists, for an agent of this mode; all of it, or nothing and raises."""
        try:
            for factory in factories:
                previous = factory()
                if previous.claim():
                    log.info("mode=%s takes over from %s, which serves until this mode does", mode, previous.name)
                    self._previous.append(previous)
        except KbpfError:
            self.release()
            raise

    def release(self) -> None:
        """Releases all locks. What is left stays, and the next agent takes it over."""
        while self._previous:
            self._previous.pop().close()

    def drain(self, now: float) -> None:
        """Drains what is due at `now` (time.monotonic). Errors are logged, and retried."""
        if now < self._retry_due:
            return
        for previous in tuple(self._previous):
            try:
                next_due = previous.drain(now)
            except KbpfError as error:
                if self._error.replace(error):
                    log.warning("cannot remove what %s left; retrying: %s", previous.name, error)
                self._retry_due = now + DRAIN_RETRY_INTERVAL_S
                return
            if next_due is not None:
                continue
            log.info("%s is drained and removed", previous.name)
            # Only from here on can an agent of that mode start again: this releases its lock.
            previous.close()
            self._previous.remove(previous)
        self._error.replace(None)

    def problems(self) -> tuple[str, ...]:
        """A line for each data plane that still has connections, and the error of the drain."""
        lines = tuple(line for previous in self._previous for line in previous.problems())
        return (*lines, *filter(None, [self._error.text]))

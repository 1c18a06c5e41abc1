# SPDX-License-Identifier: Apache-2.0
"""The interface of every source of objects: the API server, the folder of YAML.

A source emits only Upsert, Delete, Rejected and Synced. It never emits Delete because it failed to
read something: what it emitted last stays in force.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from kbpf.errors import SourceError
from kbpf.model.events import REQUIRED_KINDS, Event, Kind

LIST_TIMEOUT_S: Final = 120.0
POLL_INTERVAL_S: Final = 0.05

EventHandler = Callable[[Event], None]
"""Receives the events, in the source's own thread."""


class SourceState(StrEnum):
    """What a source is doing. RETRYING: it waits for the next attempt. FORBIDDEN: the agent may not
    read it, and works without.
    """

    STARTING = "starting"
    LISTING = "listing"
    WATCHING = "watching"
    RETRYING = "retrying"
    FORBIDDEN = "forbidden"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The status of a source.

    `last_contact` is time.monotonic() of the last received byte or successful read, 0.0 before the
    first. `failures` counts consecutive failed attempts; `error` describes the last one, "" if
    none. `problems` are lines about objects and files that are left out (folder), and about the
    connection to the source. `authoritative` is False while a whole file cannot be read, so that
    objects may be missing. `drift` counts objects that had changed without an event when
    everything was listed again.
    """

    name: str
    kinds: tuple[Kind, ...]
    state: SourceState = SourceState.STARTING
    synced: bool = False
    resource_version: str = ""
    last_contact: float = 0.0
    failures: int = 0
    error: str = ""
    problems: tuple[str, ...] = ()
    authoritative: bool = True
    drift: int = 0


class Source(Protocol):
    """A thread that turns the objects of an API server or a folder into events."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds for which it emits Synced."""

    def start(self) -> None:
        """Starts the thread. Raises ConfigError if the source can never work."""

    def stop(self) -> None:
        """Stops the thread; returns within about one second."""

    def status(self) -> SourceStatus:
        """The current status. Thread-safe."""

    def run(self, stop: threading.Event) -> None:
        """The body of the thread. Setting `stop` ends it eventually; stop() ends it at once."""


def wait_until_listed(sources: Sequence[Source]) -> None:
    """Returns once all kinds are listed, except Pods if they may not be listed. Raises SourceError
    at the first failure: a command does not wait for a server that is down.
    """
    deadline = time.monotonic() + LIST_TIMEOUT_S
    while True:
        statuses = [source.status() for source in sources]
        required = [s for s in statuses if not {*s.kinds}.isdisjoint(REQUIRED_KINDS)]
        if all(s.synced or s.state is SourceState.FORBIDDEN for s in statuses):
            return
        if errors := [s.error for s in required if s.error]:
            raise SourceError(errors[0])
        if all(s.synced for s in required) and any(s.error for s in statuses):
            return  # Pods are optional
        if time.monotonic() > deadline:
            names = ", ".join(s.name for s in statuses if not s.synced)
            raise SourceError(f"no complete list of {names} after {LIST_TIMEOUT_S:.0f} s")
        time.sleep(POLL_INTERVAL_S)

"""What every source of objects looks like from outside: the API server and the folder of YAML.

A source says Upsert, Delete, Rejected and Synced through `put` and nothing else. It never says
Delete because it failed to read something: what it said last stays in force.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kbpf.model.events import Event, Kind

EventHandler = Callable[[Event], None]
"""Where events go. Called from the source's own thread."""


class SourceState(StrEnum):
    """What a source is doing. RETRYING: it waits before the next try."""

    STARTING = "starting"
    LISTING = "listing"
    WATCHING = "watching"
    RETRYING = "retrying"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How a source is doing.

    `last_contact` is time.monotonic() of the last byte or good read, 0.0 before the first.
    `failures` counts tries that failed in a row; `error` is the last one's line, "" when well.
    `sound`: False while a whole file cannot be read, and so nobody knows what it says.
    `problems`: lines about what was read and is left out (folder: files, doubles), and about what
    is wrong with the way to the source. `drift`: objects that differed from what was known when all
    were listed again, though no event can explain it.
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
    """One thread that turns an API server's or a folder's objects into events."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds for which it says Synced."""

    def start(self) -> None:
        """Begin in a thread of its own. Raises ConfigError when that can never work."""

    def stop(self) -> None:
        """End the thread; back within about a second."""

    def status(self) -> SourceStatus:
        """How it is doing; from any thread."""

    def run(self, stop: threading.Event) -> None:
        """What the thread does. Setting `stop` ends it once it notices; stop() at once."""

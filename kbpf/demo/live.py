"""`kbpf demo`: a client asks on while the backends change. Pictures come out as values; drawing
them is the command line's.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import msgspec

from kbpf.demo import manifests
from kbpf.demo.manifests import Pod
from kbpf.demo.once import SILENCE_SECONDS, START_SECONDS, Lines
from kbpf.demo.report import Report, Tally
from kbpf.demo.scene import World

WINDOW_SECONDS: Final = 2.0
"""Shares and rates are those of the last so many seconds."""
RATE: Final = 200.0
"""Requests in a second."""


@dataclass(frozen=True, slots=True)
class Step:
    """What happens, who serves then, and for how long."""

    event: str
    pods: tuple[Pod, ...]
    seconds: float = 6.0


_1, _2, _3, _4 = (Pod(i) for i in range(1, 5))

STEPS: Final = (
    Step("three backends serve", (_1, _2, _3)),
    Step("backend-4 added", (_1, _2, _3, _4)),
    Step("backend-2 terminating: no new connections", (_1, Pod(2, True), _3, _4), 4.0),
    Step("backend-2 removed", (_1, _3, _4)),
    Step("backend-4 terminating", (_1, _3, Pod(4, True)), 3.0),
    Step("backend-4 removed, backend-2 back", (_1, _2, _3)),
    Step("Service has no endpoints: refused", (), 4.0),
)


class Share(msgspec.Struct, frozen=True):
    """A backend: what it is doing, its part of the answers just now (0 to 1), all its answers."""

    name: str
    state: str
    share: float
    total: int


class Picture(msgspec.Struct, frozen=True):
    """One moment of the demo. `refused` counts connections to a Service without endpoints;
    `failed` all else that went wrong. `events` are (seconds, text), the newest last.
    """

    service: str
    seconds: float
    rate: float
    answered: int
    refused: int
    failed: int
    shares: tuple[Share, ...]
    events: tuple[tuple[float, str], ...]


class Gallery:
    """Adds up reports and tells what they look like."""

    def __init__(self) -> None:
        self._total = Report()
        self._recent: deque[Report] = deque()
        self._events: deque[tuple[float, str]] = deque(maxlen=8)
        self._step = STEPS[0]

    def begin(self, step: Step) -> None:
        """The next step."""
        self._step = step
        self._events.append((round(self._total.seconds, 1), step.event))

    def add(self, report: Report) -> None:
        """What the client said."""
        self._total += report
        self._recent.append(report)
        while len(self._recent) > 1 and (
            sum(r.seconds for r in self._recent) - self._recent[0].seconds >= WINDOW_SECONDS
        ):
            self._recent.popleft()

    def picture(self) -> Picture:
        """Now."""
        recent = sum(self._recent, Report())
        both, now = self._total.tcp + self._total.udp, recent.tcp + recent.udp
        refused = both.failed.get("ECONNREFUSED", 0)
        return Picture(
            service=f"{manifests.SERVICE_ADDRESS}:{manifests.HTTP_PORT}",
            seconds=round(self._total.seconds, 1),
            rate=now.requests / recent.seconds if recent.seconds else 0.0,
            answered=both.answers,
            refused=refused,
            failed=both.failures - refused,
            shares=tuple(self._share(pod, now, both) for pod in (_1, _2, _3, _4)),
            events=tuple(self._events),
        )

    def _share(self, pod: Pod, now: Tally, both: Tally) -> Share:
        states = {p.name: "terminating" if p.terminating else "serving" for p in self._step.pods}
        part = now.answered.get(pod.name, 0) / now.answers if now.answers else 0.0
        state = states.get(pod.name, "not in the Service")
        return Share(pod.name, state, part, both.answered.get(pod.name, 0))


def live(world: World, rate: float = RATE) -> Iterator[Picture]:
    """Pictures, five a second, without end: the backends change as STEPS says, over and over."""
    gallery = Gallery()
    world.serve(STEPS[0].pods)
    lines = Lines(world.client(0, rate), world)
    lines.next(START_SECONDS)
    for step in cycle(STEPS):
        world.serve(step.pods)
        gallery.begin(step)
        until = time.monotonic() + step.seconds
        while time.monotonic() < until:
            gallery.add(lines.next(SILENCE_SECONDS))
            yield gallery.picture()

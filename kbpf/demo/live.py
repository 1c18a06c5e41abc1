# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo`: a client sends requests while the backends change. This module yields pictures as
values; cli/demo.py draws them.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import msgspec

from kbpf.demo import manifests
from kbpf.demo.manifests import BackendPod
from kbpf.demo.once import SILENCE_TIMEOUT_S, START_TIMEOUT_S, ReportReader
from kbpf.demo.report import ClientReport, RequestCounts
from kbpf.demo.scene import DemoScene

WINDOW_S: Final = 2.0
"""Shares and rates are computed over this time."""
REQUESTS_PER_SECOND: Final = 200.0


@dataclass(frozen=True, slots=True)
class DemoStep:
    """A change of the endpoints: its description, the endpoints after it, and its duration."""

    event: str
    pods: tuple[BackendPod, ...]
    seconds: float = 6.0


_1, _2, _3, _4 = (BackendPod(i) for i in range(1, 5))

STEPS: Final = (
    DemoStep("three backends serve", (_1, _2, _3)),
    DemoStep("backend-4 added", (_1, _2, _3, _4)),
    DemoStep("backend-2 terminating: no new connections", (_1, BackendPod(2, True), _3, _4), 4.0),
    DemoStep("backend-2 removed", (_1, _3, _4)),
    DemoStep("backend-4 terminating", (_1, _3, BackendPod(4, True)), 3.0),
    DemoStep("backend-4 removed, backend-2 back", (_1, _2, _3)),
    DemoStep("Service has no endpoints: refused", (), 4.0),
)


class Share(msgspec.Struct, frozen=True):
    """One backend. `share`: its part of the answers in the last WINDOW_S (0 to 1). `total`: all its
    answers.
    """

    name: str
    state: str
    share: float
    total: int


class Picture(msgspec.Struct, frozen=True):
    """One moment of the demo. `refused` counts connections to a Service without endpoints;
    `failed` counts all other errors. `events` are (seconds, text), the newest last.
    """

    service: str
    seconds: float
    rate: float
    answered: int
    refused: int
    failed: int
    shares: tuple[Share, ...]
    events: tuple[tuple[float, str], ...]


class DemoProgress:
    """Adds up the client's reports and builds pictures from them."""

    def __init__(self) -> None:
        self._total = ClientReport()
        self._recent: deque[ClientReport] = deque()
        self._events: deque[tuple[float, str]] = deque(maxlen=8)
        self._step = STEPS[0]

    def start_step(self, step: DemoStep) -> None:
        """Records that the endpoints have changed."""
        self._step = step
        self._events.append((round(self._total.seconds, 1), step.event))

    def add_report(self, report: ClientReport) -> None:
        """Adds a report of the client, and drops those that are older than WINDOW_S."""
        self._total += report
        self._recent.append(report)
        while len(self._recent) > 1 and (
            sum(r.seconds for r in self._recent) - self._recent[0].seconds >= WINDOW_S
        ):
            self._recent.popleft()

    def build_picture(self) -> Picture:
        """The picture of this moment."""
        recent = sum(self._recent, ClientReport())
        total, recent_counts = self._total.tcp + self._total.udp, recent.tcp + recent.udp
        refused = total.failed.get("ECONNREFUSED", 0)
        return Picture(
            service=f"{manifests.SERVICE_ADDRESS}:{manifests.HTTP_PORT}",
            seconds=round(self._total.seconds, 1),
            rate=recent_counts.requests / recent.seconds if recent.seconds else 0.0,
            answered=total.answers,
            refused=refused,
            failed=total.failures - refused,
            shares=tuple(
                self._backend_share(pod, recent_counts, total) for pod in (_1, _2, _3, _4)
            ),
            events=tuple(self._events),
        )

    def _backend_share(
        self, pod: BackendPod, recent_counts: RequestCounts, total: RequestCounts
    ) -> Share:
        states = {p.name: "terminating" if p.terminating else "serving" for p in self._step.pods}
        share = (
            recent_counts.answered.get(pod.name, 0) / recent_counts.answers
            if recent_counts.answers
            else 0.0
        )
        state = states.get(pod.name, "not in the Service")
        return Share(pod.name, state, share, total.answered.get(pod.name, 0))


def stream_pictures(scene: DemoScene, rate: float = REQUESTS_PER_SECOND) -> Iterator[Picture]:
    """Yields five pictures a second, without end, while the endpoints change as in STEPS."""
    progress = DemoProgress()
    scene.set_endpoints(STEPS[0].pods)
    reader = ReportReader(scene.start_client(0, rate), scene)
    reader.next(START_TIMEOUT_S)
    for step in cycle(STEPS):
        scene.set_endpoints(step.pods)
        progress.start_step(step)
        deadline = time.monotonic() + step.seconds
        while time.monotonic() < deadline:
            progress.add_report(reader.next(SILENCE_TIMEOUT_S))
            yield progress.build_picture()

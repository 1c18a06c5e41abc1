# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo`: a Pod and a machine outside send requests while backends change, and the agent is
killed and started again. This module yields pictures as values; cli/demo.py draws them.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final

import msgspec

from kbpf.demo import manifests
from kbpf.demo.manifests import BackendPod
from kbpf.demo.once import (
    CLIENTS,
    EXPLANATIONS,
    REFUSED,
    SILENCE_TIMEOUT_S,
    START_TIMEOUT_S,
    Explanation,
    ReportReader,
    explain,
)
from kbpf.demo.report import ClientReport, RequestCounts
from kbpf.demo.scene import DemoScene

WINDOW_S: Final = 2.0
"""Shares and rates are computed over this time."""
REQUESTS_PER_SECOND: Final = 200.0
"""Of each client."""
CHANGE_S: Final = 2.0
"""For this long after a step that refuses connections, a report may still contain refusals."""
LATE_S: Final = 0.5
"""Older reports, which have waited for a command or a busy machine, are added up without a picture,
except for the last one of a step.
"""


@dataclass(frozen=True, slots=True)
class DemoStep:
    """A change: its description, the endpoints after it, and its duration."""

    event: str
    pods: tuple[BackendPod, ...]
    seconds: float = 6.0
    agent_runs: bool = True

    @property
    def refuses(self) -> bool:
        """Whether connections are refused, as expected."""
        return not self.pods or any(pod.refuses for pod in self.pods)


BACKENDS: Final = 4
_1, _2, _3, _4 = (BackendPod(i) for i in range(1, BACKENDS + 1))
_BROKEN: Final = BackendPod(BACKENDS + 1, refuses=True)

STEPS: Final = (
    DemoStep("three backends serve", (_1, _2, _3)),
    DemoStep("backend-4 added", (_1, _2, _3, _4)),
    DemoStep("agent killed with -9: the kernel serves alone", (_1, _2, _3, _4), 4.0, False),
    DemoStep("agent started again", (_1, _2, _3, _4), 4.0),
    DemoStep("backend-2 terminating: no new connections", (_1, BackendPod(2, True), _3, _4)),
    DemoStep("backend-2 removed", (_1, _3, _4)),
    DemoStep("backend-4 terminating", (_1, _3, BackendPod(4, True)), 3.0),
    DemoStep("backend-4 removed, backend-2 back", (_1, _2, _3)),
    DemoStep(f"{_BROKEN.name} is an endpoint where no process listens", (_1, _2, _3, _BROKEN), 4.0),
    DemoStep(f"{_BROKEN.name} removed", (_1, _2, _3)),
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
    """One moment of the demo. `refused` counts connections that were refused in steps in which they
    should be; `failed` counts all other errors. `connect_p50` and `connect_p99`: the seconds in
    which half, and 99 %, of the connect() calls of the last WINDOW_S returned. `events` are
    (seconds, text), the newest last. `explanation`: what kbpf says about the last refusals.
    """

    service: str
    seconds: float
    rate: float
    answered: int
    refused: int
    failed: int
    shares: tuple[Share, ...]
    events: tuple[tuple[float, str], ...]
    connect_p50: float | None = None
    connect_p99: float | None = None
    explanation: Explanation | None = None


class DemoProgress:
    """Adds up the clients' reports and builds pictures from them."""

    def __init__(self) -> None:
        self._total = ClientReport()
        self._recent: deque[ClientReport] = deque()
        self._events: deque[tuple[float, str]] = deque(maxlen=8)
        self._step = STEPS[0]
        self._refused = 0
        self._refuses_until = 0.0
        self.explanation: Explanation | None = None

    def start_step(self, step: DemoStep) -> None:
        """Records that the endpoints have changed."""
        if self._step.refuses:
            self._refuses_until = self._total.seconds + CHANGE_S
        self._step = step
        self._events.append((round(self._total.seconds, 1), step.event))

    def add_report(self, report: ClientReport) -> None:
        """Adds a report, and drops those that are older than WINDOW_S."""
        counts = report.tcp + report.udp
        if self._step.refuses or self._total.seconds < self._refuses_until:
            self._refused += counts.failed.get(REFUSED, 0)
        tcp = msgspec.structs.replace(report.tcp, connect_us={})  # or it would grow for ever
        self._total += msgspec.structs.replace(report, tcp=tcp)
        self._recent.append(report)
        while len(self._recent) > 1 and (
            sum(r.seconds for r in self._recent) - self._recent[0].seconds >= WINDOW_S
        ):
            self._recent.popleft()

    def build_picture(self) -> Picture:
        """The picture of this moment."""
        recent = sum(self._recent, ClientReport())
        total, recent_counts = self._total.tcp + self._total.udp, recent.tcp + recent.udp
        return Picture(
            service=f"{manifests.SERVICE_ADDRESS}:{manifests.HTTP_PORT}",
            seconds=round(self._total.seconds, 1),
            rate=recent_counts.requests / recent.seconds if recent.seconds else 0.0,
            answered=total.answers,
            refused=self._refused,
            failed=total.failures - self._refused,
            shares=tuple(
                self._backend_share(pod, recent_counts, total) for pod in (_1, _2, _3, _4, _BROKEN)
            ),
            events=tuple(self._events),
            connect_p50=recent.tcp.connect_seconds(0.5),
            connect_p99=recent.tcp.connect_seconds(0.99),
            explanation=self.explanation,
        )

    def _backend_share(
        self, pod: BackendPod, recent_counts: RequestCounts, total: RequestCounts
    ) -> Share:
        states = {
            p.name: "terminating" if p.terminating else "refusing" if p.refuses else "serving"
            for p in self._step.pods
        }
        share = (
            recent_counts.answered.get(pod.name, 0) / recent_counts.answers
            if recent_counts.answers
            else 0.0
        )
        state = states.get(pod.name, "not in the Service")
        return Share(pod.name, state, share, total.answered.get(pod.name, 0))


def stream_pictures(scene: DemoScene, rate: float = REQUESTS_PER_SECOND) -> Iterator[Picture]:
    """Yields ten pictures a second, without end, while things change as in STEPS."""
    progress = DemoProgress()
    scene.set_endpoints(STEPS[0].pods)
    readers = [ReportReader(scene.start_client(client, 0, rate), scene) for client in CLIENTS]
    for reader in readers:
        reader.next(START_TIMEOUT_S)
    for step in cycle(STEPS):
        if step.agent_runs != scene.agent_runs:
            (scene.start_agent if step.agent_runs else scene.kill_agent)()
        scene.set_endpoints(step.pods)
        progress.start_step(step)
        yield from _follow(progress, readers, time.monotonic() + step.seconds)
        if any(pod.refuses for pod in step.pods):
            progress.explanation = explain(scene, EXPLANATIONS[0])
            yield from _follow(progress, readers, time.monotonic())


def _follow(
    progress: DemoProgress, readers: Sequence[ReportReader], until: float
) -> Iterator[Picture]:
    """Adds the reports of all that happened until this time (CLOCK_MONOTONIC)."""
    ends = [0.0] * len(readers)
    while min(ends) < until:
        index = ends.index(min(ends))  # one may be behind the other
        report = readers[index].next(SILENCE_TIMEOUT_S)
        ends[index] = report.start + report.seconds
        # both clients run at the same time, so only the seconds of the first one count
        progress.add_report(ClientReport(report.tcp, report.udp, 0.0 if index else report.seconds))
        if time.monotonic() - min(ends) < LATE_S or min(ends) >= until:
            yield progress.build_picture()

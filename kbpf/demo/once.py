"""`kbpf demo --once`: a few hundred requests to a Service with three backends, and who answered."""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Final

import msgspec

from kbpf.demo import manifests
from kbpf.demo.manifests import BackendPod
from kbpf.demo.report import ClientReport, RequestCounts, decode
from kbpf.demo.scene import DemoError, DemoScene

START_TIMEOUT_S: Final = 120.0
"""Until the Service answers; a first compilation is in it."""
SILENCE_TIMEOUT_S: Final = 30.0
"""A client that says nothing for this long is lost."""
BACKENDS: Final = 3


class Distribution(msgspec.Struct, frozen=True):
    """Requests to one port of the Service, and who answered."""

    service: str
    requests: int
    failed: int
    backends: dict[str, int]
    errors: dict[str, int]


class Outcome(msgspec.Struct, frozen=True):
    """What `kbpf demo --once` says: the requests by TCP, those by UDP, and what is wrong with it.

    `seconds` is how long the requests took, without the start of the demo.
    """

    service: str
    requests: int
    failed: int
    backends: dict[str, int]
    errors: dict[str, int]
    seconds: float
    udp: Distribution
    problems: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        """Whether all of it is as it should be."""
        return not self.problems


def build_distribution(
    port: int, counts: RequestCounts, pods: Sequence[BackendPod]
) -> Distribution:
    """In the order of the backends, those without an answer included."""
    names = [*(pod.name for pod in pods)]
    names += sorted(set(counts.answered) - set(names))
    return Distribution(
        f"{manifests.SERVICE_ADDRESS}:{port}",
        counts.requests,
        counts.failures,
        {name: counts.answered.get(name, 0) for name in names},
        dict(sorted(counts.failed.items())),
    )


def evaluate(report: ClientReport, requests: int, pods: Sequence[BackendPod]) -> Outcome:
    """What came of so many requests to these backends."""
    tcp = build_distribution(manifests.HTTP_PORT, report.tcp, pods)
    udp = build_distribution(manifests.DNS_PORT, report.udp, pods)
    return Outcome(
        tcp.service, tcp.requests, tcp.failed, tcp.backends, tcp.errors,
        round(report.seconds, 3), udp, tuple(_problems(tcp, udp, requests, pods)),
    )  # fmt: skip


def _problems(
    tcp: Distribution, udp: Distribution, requests: int, pods: Sequence[BackendPod]
) -> Iterator[str]:
    pod_names = {pod.name for pod in pods}
    if tcp.requests != requests:
        yield f"{tcp.requests} of {requests} requests were sent"
    for protocol, distribution in (("TCP", tcp), ("UDP", udp)):
        if distribution.failed:
            errors = ", ".join(f"{count} x {error}" for error, count in distribution.errors.items())
            yield (
                f"{distribution.failed} of {distribution.requests} requests by {protocol} "
                f"failed: {errors}"
            )
        for name in distribution.backends.keys() - pod_names:
            yield f"{name} answered and is not in the Service"
    for name in sorted(pod_names):
        if not tcp.backends[name]:
            yield f"{name} was not reached"


class ReportReader:
    """Reports of the client, read by a thread of their own."""

    def __init__(self, stream: IO[str], scene: DemoScene) -> None:
        self._scene = scene
        self._queue: queue.SimpleQueue[ClientReport | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(stream,), name="client", daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        try:
            for line in stream:
                self._queue.put(decode(line))
        except (OSError, ValueError, msgspec.DecodeError):
            pass  # it was killed, in the middle of a line
        self._queue.put(None)

    def next(self, seconds: float) -> ClientReport:
        """The next one. DemoError when the agent ends, the client does, or neither says a word."""
        deadline = time.monotonic() + seconds
        while True:
            self._scene.check_agent()
            try:
                report = self._queue.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise DemoError(
                        f"the Service did not answer within {seconds:.0f} s", "",
                        "`kbpf check` may tell why",
                    ) from None  # fmt: skip
                continue
            if report is None:
                raise DemoError("the client died", "", "is this the whole kbpf?")
            return report


def run_once(scene: DemoScene, requests: int) -> Outcome:
    """So many requests to three backends."""
    pods = [BackendPod(i) for i in range(1, BACKENDS + 1)]
    scene.set_endpoints(pods)
    reader = ReportReader(scene.start_client(requests, 0), scene)
    total = reader.next(START_TIMEOUT_S)
    while not total.done:
        total += reader.next(SILENCE_TIMEOUT_S)
    return evaluate(total, requests, pods)

# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo --once`: sends a few hundred requests to a Service with three backends, and counts the
answers of each.
"""

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
"""Limit for the first answer. It includes compiling the BPF programs."""
SILENCE_TIMEOUT_S: Final = 30.0
"""Limit for each further report of the client."""
BACKENDS: Final = 3


class Distribution(msgspec.Struct, frozen=True):
    """The results of requests to one port of the Service. `backends`: answers by backend.
    `errors`: failures by error name.
    """

    service: str
    requests: int
    failed: int
    backends: dict[str, int]
    errors: dict[str, int]


class Outcome(msgspec.Struct, frozen=True):
    """The result of `kbpf demo --once`: of the TCP requests, and in `udp` of the UDP requests.

    `seconds` is the time that the requests took, without the start of the demo. `problems`: a line
    for each difference from the expected result.
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
        """Whether there are no problems."""
        return not self.problems


def build_distribution(
    port: int, counts: RequestCounts, pods: Sequence[BackendPod]
) -> Distribution:
    """Builds the result for one port. It lists all `pods` in this order, also without answers."""
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
    """Compares the client's report with the expected result of `requests` requests."""
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
            yield f"{name} answered, but is not an endpoint of the Service"
    for name in sorted(pod_names):
        if not tcp.backends[name]:
            yield f"{name} was not reached"


class ReportReader:
    """Reads the client's reports in a separate thread."""

    def __init__(self, stream: IO[str], scene: DemoScene) -> None:
        self._scene = scene
        self._queue: queue.SimpleQueue[ClientReport | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(stream,), name="client", daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        try:
            for line in stream:
                self._queue.put(decode(line))
        except (OSError, ValueError, msgspec.DecodeError):
            pass  # the client was killed in the middle of a line
        self._queue.put(None)

    def next(self, seconds: float) -> ClientReport:
        """The next report. Raises DemoError if the agent or the client exits, or on timeout."""
        deadline = time.monotonic() + seconds
        while True:
            self._scene.check_agent()
            try:
                report = self._queue.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise DemoError(
                        f"the Service did not answer within {seconds:.0f} s", "",
                        "`kbpf check` may show why",
                    ) from None  # fmt: skip
                continue
            if report is None:
                raise DemoError("the client exited", "", "is kbpf installed completely?")
            return report


def run_once(scene: DemoScene, requests: int) -> Outcome:
    """Sends `requests` requests to a Service with three backends."""
    pods = [BackendPod(i) for i in range(1, BACKENDS + 1)]
    scene.set_endpoints(pods)
    reader = ReportReader(scene.start_client(requests, 0), scene)
    total = reader.next(START_TIMEOUT_S)
    while not total.is_last:
        total += reader.next(SILENCE_TIMEOUT_S)
    return evaluate(total, requests, pods)

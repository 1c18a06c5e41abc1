# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo --once`: a Pod and a machine outside send requests to a Service in three phases: three
backends serve; the agent is killed and started again; one backend refuses. Each request is counted.
"""

import math
import queue
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kbpf.demo import manifests
from kbpf.demo.manifests import BackendPod
from kbpf.demo.report import ClientReport, RequestCounts, decode
from kbpf.demo.scene import DemoError, DemoScene

START_TIMEOUT_S: Final = 300.0
"""Limit for the first answer. It includes compiling the BPF programs: 20 s of a processor, minutes
on a slow and busy machine.
"""
SILENCE_TIMEOUT_S: Final = 30.0
"""Limit for each further report of a client."""
BACKENDS: Final = 3
RESTART_RATE: Final = 200.0
"""Requests a second of each client while the agent is killed and started again."""
CLIENTS: Final = {
    "client": f"{manifests.SERVICE_ADDRESS}:{manifests.HTTP_PORT}",
    "outside": f"{manifests.NODE_ADDRESS}:{manifests.NODE_PORT}",
}
"""Where a client runs → the address that it dials."""
REFUSED: Final = "ECONNREFUSED"
EXPLANATIONS: Final = (
    ("inspect", "failures", "--service", "default/demo"),
    ("trace", f"default/{manifests.CLIENT}", "default/demo:http"),
)
"""The commands that explain the failures of the last phase."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The endpoints of the Service while both clients send requests. `restarts_agent`: the agent is
    killed and started again meanwhile.
    """

    name: str
    pods: tuple[BackendPod, ...]
    restarts_agent: bool = False

    @property
    def refuses(self) -> bool:
        """Whether connections to one of the pods are refused, as expected."""
        return any(pod.refuses for pod in self.pods)


PODS: Final = tuple(BackendPod(i) for i in range(1, BACKENDS + 1))
BROKEN: Final = BackendPod(BACKENDS + 1, refuses=True)
PHASES: Final = (
    Phase("three backends serve", PODS),
    Phase("agent killed with -9 and restarted", PODS, restarts_agent=True),
    Phase(f"{BROKEN.name} refuses", (*PODS, BROKEN)),
)


class Load(msgspec.Struct, frozen=True):
    """The TCP connections of one client in one phase.

    - `client`: ``client`` is a Pod, ``outside`` a machine outside of the cluster.
    - `failed`: of `requests`; `expected`: of these, refused by the backend that refuses.
    - `backends`: answers by backend.
    - `errors`: failures by error name.
    - `without_agent`: of `requests`, those while no agent ran.
    - `connect_p50`: the median time of connect() in seconds; null if there was none.
    - `connect_p99`: the 99th percentile.
    """

    phase: str
    client: str
    service: str
    requests: int
    failed: int
    expected: int
    backends: dict[str, int]
    errors: dict[str, int]
    without_agent: int
    connect_p50: float | None
    connect_p99: float | None


class Datagrams(msgspec.Struct, frozen=True):
    """The datagrams of the Pod in all phases, with fields as of the connections."""

    service: str
    requests: int
    failed: int
    backends: dict[str, int]
    errors: dict[str, int]


class Explanation(msgspec.Struct, frozen=True):
    """A command of kbpf that explains the failures, and what it printed on this node."""

    command: str
    output: str


class Outcome(msgspec.Struct, frozen=True):
    """The result of `kbpf demo --once`.

    - `requests`: all TCP connections.
    - `failed`: those that failed though they should not have.
    - `expected`: those that were refused by the backend that refuses.
    - `seconds`: how long the phases took, without the start of the demo.
    - `loads`: the connections by phase and client.
    - `udp`: the datagrams.
    - `explanations`: what kbpf says about the failures.
    - `problems`: a line for each difference from the expected result.
    """

    requests: int
    failed: int
    expected: int
    seconds: float
    loads: tuple[Load, ...]
    udp: Datagrams
    explanations: tuple[Explanation, ...]
    problems: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


@dataclass(slots=True)
class PhaseReports:
    """What each client reported in a phase, and how many connections it made while no agent ran."""

    phase: Phase
    totals: dict[str, ClientReport] = field(
        default_factory=lambda: dict.fromkeys(CLIENTS, ClientReport())
    )
    without_agent: Counter[str] = field(default_factory=Counter)


# ---- the result ----------------------------------------------------------------------------------


def evaluate(
    phases: Sequence[PhaseReports], requests: int, seconds: float = 0.0,
    explanations: Sequence[Explanation] = (),
) -> Outcome:  # fmt: skip
    """Compares the reports of the clients with the expected result of `requests` requests of each
    client in a phase; at least `requests` if the agent is restarted.
    """
    loads = [_build_load(reports, client) for reports in phases for client in CLIENTS]
    counts = sum((report.udp for p in phases for report in p.totals.values()), RequestCounts())
    udp = Datagrams(
        f"{manifests.SERVICE_ADDRESS}:{manifests.DNS_PORT}", counts.requests, counts.failures,
        _by_pod(counts, PODS), dict(sorted(counts.failed.items())),
    )  # fmt: skip
    problems = [
        problem
        for load, reports in zip(loads, (p for p in phases for _ in CLIENTS), strict=True)
        for problem in _find_problems(load, reports.phase, requests)
    ]
    problems += _describe_failures(udp.failed, udp.requests, udp.errors, "datagrams")
    problems += _find_unknown(udp.backends, PODS)
    expected = sum(load.expected for load in loads)
    return Outcome(
        sum(load.requests for load in loads), sum(load.failed for load in loads) - expected,
        expected, round(seconds, 3), tuple(loads), udp, tuple(explanations), tuple(problems),
    )  # fmt: skip


def _build_load(reports: PhaseReports, client: str) -> Load:
    phase, tcp = reports.phase, reports.totals[client].tcp
    return Load(
        phase.name, client, CLIENTS[client], tcp.requests, tcp.failures,
        tcp.failed.get(REFUSED, 0) if phase.refuses else 0,
        _by_pod(tcp, phase.pods), dict(sorted(tcp.failed.items())),
        reports.without_agent[client],
        tcp.connect_seconds(0.5), tcp.connect_seconds(0.99),
    )  # fmt: skip


def _by_pod(counts: RequestCounts, pods: Sequence[BackendPod]) -> dict[str, int]:
    """Answers by backend: all `pods` in this order, also those without answers, then others."""
    names = [*(pod.name for pod in pods)]
    names += sorted(set(counts.answered) - set(names))
    return {name: counts.answered.get(name, 0) for name in names}


def _find_problems(load: Load, phase: Phase, requests: int) -> Iterator[str]:
    where = f"{load.phase}, {load.client}: "
    if load.requests < requests or (load.requests > requests and not phase.restarts_agent):
        yield f"{where}{load.requests} of {requests} connections were made"
    errors = dict(load.errors)
    if phase.refuses:
        errors.pop(REFUSED, None)
        if not load.expected:
            yield f"{where}no connection was refused by {BROKEN.name}"
    failed = load.failed - load.expected
    for line in _describe_failures(failed, load.requests, errors, "connections"):
        yield where + line
    if phase.restarts_agent and not load.without_agent:
        yield f"{where}no connection was made while no agent ran"
    for line in _find_unknown(load.backends, phase.pods):
        yield where + line
    for pod in phase.pods:
        if not pod.refuses and not load.backends[pod.name]:
            yield f"{where}{pod.name} was not reached"


def _describe_failures(
    failed: int, requests: int, errors: Mapping[str, int], what: str
) -> Iterator[str]:
    if failed:
        names = ", ".join(f"{count} x {error}" for error, count in errors.items())
        yield f"{failed} of {requests} {what} failed: {names}"


def _find_unknown(backends: Mapping[str, int], pods: Sequence[BackendPod]) -> Iterator[str]:
    for name in sorted(backends.keys() - {pod.name for pod in pods if not pod.refuses}):
        if backends[name]:
            yield f"{name} answered, but is not a backend that serves"


# ---- running -------------------------------------------------------------------------------------


class ReportReader:
    """Reads a client's reports in a separate thread."""

    def __init__(self, client: "subprocess.Popen[str]", scene: DemoScene) -> None:
        self._client = client
        self._scene = scene
        self._queue: queue.SimpleQueue[ClientReport | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="client", daemon=True).start()

    def _read(self) -> None:
        assert self._client.stdout is not None
        try:
            for line in self._client.stdout:
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

    def stop(self) -> None:
        """Lets the client finish its request and send its last report."""
        self._client.terminate()


class _PhaseRun:
    """Both clients while a phase lasts."""

    def __init__(self, scene: DemoScene, phase: Phase, requests: int, waits: bool) -> None:
        self._scene = scene
        self._requests = requests
        self.reports = PhaseReports(phase)
        self._killed = self._started = math.inf  # the agent
        scene.set_endpoints(phase.pods)
        if not waits:  # the agent has programmed the phase before
            _wait("the agent does not serve the new endpoints",
                  lambda: scene.is_served_by(phase.pods))  # fmt: skip
        count, rate = (0, RESTART_RATE) if phase.restarts_agent else (requests, 0.0)
        self._readers = {
            client: ReportReader(scene.start_client(client, count, rate, waits), scene)
            for client in CLIENTS
        }
        for reader in self._readers.values():
            reader.next(START_TIMEOUT_S)

    def run(self) -> PhaseReports:
        """Returns once both clients have sent their last report."""
        if self.reports.phase.restarts_agent:
            self._restart_agent()
        for client, reader in self._readers.items():
            while not self.reports.totals[client].is_last:
                self._add_report(client, reader)
        return self.reports

    def _restart_agent(self) -> None:
        share = -(-self._requests // 3)
        self._load(share)
        self._scene.kill_agent()
        self._killed = time.monotonic()
        while any(self.reports.without_agent[client] < share for client in CLIENTS):
            self._load(0)
        self._started = time.monotonic()
        self._scene.start_agent()
        _wait("the agent that was started again does not serve",
              self._scene.is_synced, lambda: self._load(0))  # fmt: skip
        self._load(share)
        for reader in self._readers.values():
            reader.stop()

    def _load(self, requests: int) -> None:
        """Reads reports of each client: at least one, and those of `requests` more requests."""
        for client, reader in self._readers.items():
            wanted = self.reports.totals[client].tcp.requests + requests
            self._add_report(client, reader)
            while self.reports.totals[client].tcp.requests < wanted:
                self._add_report(client, reader)

    def _add_report(self, client: str, reader: ReportReader) -> None:
        report = reader.next(SILENCE_TIMEOUT_S)
        self.reports.totals[client] += report
        if self._killed <= report.start and report.start + report.seconds <= self._started:
            self.reports.without_agent[client] += report.tcp.requests


def _wait(
    problem: str,
    is_done: Callable[[], bool],
    meanwhile: Callable[[], None] = lambda: time.sleep(0.05),
) -> None:
    """Raises DemoError after START_TIMEOUT_S."""
    start = time.monotonic()
    while not is_done():
        if time.monotonic() - start > START_TIMEOUT_S:
            raise DemoError(problem, "", "`kbpf check` may show why")
        meanwhile()


def run_once(scene: DemoScene, requests: int) -> Outcome:
    """Runs all phases, with `requests` requests of each client in a phase."""
    phases = []
    seconds = 0.0
    for phase in PHASES:
        run = _PhaseRun(scene, phase, requests, waits=phase is PHASES[0])
        start = time.monotonic()
        phases.append(run.run())
        seconds += time.monotonic() - start
    explanations = [explain(scene, command) for command in EXPLANATIONS]
    return evaluate(phases, requests, seconds, explanations)


def explain(scene: DemoScene, command: Sequence[str]) -> Explanation:
    """Runs a command of EXPLANATIONS on the node."""
    return Explanation(f"kbpf {' '.join(command)}", scene.run_command(*command))

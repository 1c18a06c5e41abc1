# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo`: a Pod and a machine outside send requests to a Service in three phases: three
backends serve; the agent is killed and started again; one backend refuses. Each request is counted.
"""

import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kbpf.demo import manifests
from kbpf.demo.client import Request
from kbpf.demo.manifests import BackendPod
from kbpf.demo.scene import BACKENDS, DemoError, DemoScene

START_TIMEOUT_S: Final = 300.0
"""Limit for the first answer. It includes compiling the BPF programs: 20 s of a processor, minutes
on a slow and busy machine.
"""
SILENCE_TIMEOUT_S: Final = 30.0
"""Limit for each further answer."""
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
    """The result of `kbpf demo`.

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
class PhaseRequests:
    """What each client sent in a phase. No agent ran from `killed` to `started`."""

    phase: Phase
    sent: dict[str, list[Request]] = field(default_factory=lambda: {name: [] for name in CLIENTS})
    killed: float = math.inf
    started: float = math.inf

    def connections(self, client: str) -> list[Request]:
        return [request for request in self.sent[client] if not request.is_udp]

    def without_agent(self, client: str) -> int:
        return sum(self.killed <= request.start and request.end <= self.started for request in self.connections(client))


# ---- the result ----------------------------------------------------------------------------------


def evaluate(phases: Sequence[PhaseRequests], requests: int, explanations: Sequence[Explanation] = ()) -> Outcome:
    """Compares what the clients sent with the expected result of `requests` requests of each client
    in a phase; at least `requests` if the agent is restarted.
    """
    loads, problems, seconds = [], [], 0.0
    datagrams: list[Request] = []
    for made in phases:
        for client in CLIENTS:
            load = _build_load(made, client)
            loads.append(load)
            where = f"{load.phase}, {client}: "
            problems += [where + line for line in _find_problems(load, made.phase, requests)]
        both = [request for sent in made.sent.values() for request in sent]
        datagrams += [request for request in both if request.is_udp]
        ends, starts = [request.end for request in both], [request.start for request in both]
        seconds += max(ends, default=0.0) - min(starts, default=0.0)
    backends, errors = _count(datagrams, PODS)
    failed = sum(errors.values())
    address = f"{manifests.SERVICE_ADDRESS}:{manifests.DNS_PORT}"
    problems += _describe_failures(failed, len(datagrams), errors, "datagrams")
    problems += _find_unknown(backends, PODS)
    expected = sum(load.expected for load in loads)
    return Outcome(
        sum(load.requests for load in loads),
        sum(load.failed for load in loads) - expected,
        expected,
        round(seconds, 3),
        tuple(loads),
        Datagrams(address, len(datagrams), failed, backends, errors),
        tuple(explanations),
        tuple(problems),
    )


def _build_load(made: PhaseRequests, client: str) -> Load:
    tcp, phase = made.connections(client), made.phase
    backends, errors = _count(tcp, phase.pods)
    times = sorted(request.connected - request.start for request in tcp if request.connected)
    p50, p99 = (round(times[math.ceil(share * len(times)) - 1], 6) if times else None for share in (0.5, 0.99))
    return Load(
        phase.name,
        client,
        CLIENTS[client],
        len(tcp),
        sum(errors.values()),
        errors.get(REFUSED, 0) if phase.refuses else 0,
        backends,
        errors,
        made.without_agent(client),
        p50,
        p99,
    )


def _count(requests: Sequence[Request], pods: Sequence[BackendPod]) -> tuple[dict[str, int], dict[str, int]]:
    """Answers by backend: all `pods` in this order, also those without answers, then others; and
    failures by error.
    """
    answers = Counter(request.backend for request in requests if not request.error)
    errors = Counter(request.error for request in requests if request.error)
    names = [pod.name for pod in pods]
    names += sorted(set(answers) - set(names))
    return {name: answers[name] for name in names}, dict(sorted(errors.items()))


def _find_problems(load: Load, phase: Phase, requests: int) -> Iterator[str]:
    if load.requests < requests or (load.requests > requests and not phase.restarts_agent):
        yield f"{load.requests} of {requests} connections were made"
    errors = dict(load.errors)
    if phase.refuses:
        errors.pop(REFUSED, None)
        if not load.expected:
            yield f"no connection was refused by {BROKEN.name}"
    yield from _describe_failures(load.failed - load.expected, load.requests, errors, "connections")
    if phase.restarts_agent and not load.without_agent:
        yield "no connection was made while no agent ran"
    yield from _find_unknown(load.backends, phase.pods)
    for pod in phase.pods:
        if not pod.refuses and not load.backends[pod.name]:
            yield f"{pod.name} was not reached"


def _describe_failures(failed: int, requests: int, errors: Mapping[str, int], what: str) -> Iterator[str]:
    if failed:
        names = ", ".join(f"{count} x {error}" for error, count in errors.items())
        yield f"{failed} of {requests} {what} failed: {names}"


def _find_unknown(backends: Mapping[str, int], pods: Sequence[BackendPod]) -> Iterator[str]:
    for name in sorted(backends.keys() - {pod.name for pod in pods if not pod.refuses}):
        if backends[name]:
            yield f"{name} answered, but is not a backend that serves"


# ---- running -------------------------------------------------------------------------------------


class Client:
    """A client process, whose lines a separate thread reads. `requests`: what it sent so far."""

    def __init__(self, scene: DemoScene, place: str, count: int, rate: float = 0.0, waits: bool = False) -> None:
        self.requests: list[Request] = []
        self._scene = scene
        self._process = scene.start_client(place, count, rate, waits)
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        threading.Thread(target=self._read_lines, name="client", daemon=True).start()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._queue.put(msgspec.json.decode(line, type=Request))
        except (OSError, ValueError, msgspec.DecodeError):
            pass  # the client was killed in the middle of a line
        self._queue.put(None)

    def read(self, count: int) -> None:
        """Returns after `count` more connections. Raises DemoError if the client ends before, the
        agent exits, or on timeout.
        """
        while count:
            request = self._read_next()
            if request is None:
                raise DemoError("the client exited", "", "is kbpf installed completely?")
            count -= not request.is_udp

    def read_all(self) -> None:
        """Returns when the client has ended."""
        while self._read_next() is not None:
            pass
        if self._process.wait():
            raise DemoError("the client exited", "", "is kbpf installed completely?")

    def _read_next(self) -> Request | None:
        """The next request; None if the client has ended."""
        limit = SILENCE_TIMEOUT_S if self.requests else START_TIMEOUT_S
        deadline = time.monotonic() + limit
        while True:
            self._scene.check_agent()
            try:
                request = self._queue.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > deadline:
                    problem = f"the Service did not answer within {limit:.0f} s"
                    raise DemoError(problem, "", "`kbpf check` may show why") from None
                continue
            if request is not None:
                self.requests.append(request)
            return request

    def stop(self) -> None:
        """Lets the client finish its request."""
        self._process.terminate()


def run_phases(scene: DemoScene, requests: int) -> Outcome:
    """Runs all phases, with `requests` requests of each client in a phase."""
    phases = [_run_phase(scene, phase, requests) for phase in PHASES]
    explanations = [Explanation(f"kbpf {' '.join(command)}", scene.run_command(*command)) for command in EXPLANATIONS]
    return evaluate(phases, requests, explanations)


def _run_phase(scene: DemoScene, phase: Phase, requests: int) -> PhaseRequests:
    """Returns once both clients have ended."""
    scene.set_endpoints(phase.pods)
    is_first = phase is PHASES[0]
    if not is_first:
        problem = "the agent does not serve the new endpoints"
        _wait(problem, lambda: scene.is_served_by(phase.pods), lambda: time.sleep(0.05))
    count, rate = (0, RESTART_RATE) if phase.restarts_agent else (requests, 0.0)
    clients = {place: Client(scene, place, count, rate, is_first) for place in CLIENTS}
    made = PhaseRequests(phase, {place: client.requests for place, client in clients.items()})
    if phase.restarts_agent:
        _restart_agent(scene, clients, made, -(-requests // 3))
    for client in clients.values():
        client.read_all()
    return made


def _restart_agent(scene: DemoScene, clients: Mapping[str, Client], made: PhaseRequests, share: int) -> None:
    """Lets each client send `share` requests before, while and after no agent runs."""

    def read(count: int) -> None:
        for client in clients.values():
            client.read(count)

    read(share)
    scene.kill_agent()
    made.killed = time.monotonic()
    while any(made.without_agent(place) < share for place in clients):
        read(max(1, share // 10))
    made.started = time.monotonic()
    scene.start_agent()
    problem = "the agent that was started again does not serve"
    _wait(problem, scene.is_synced, lambda: read(1))
    read(share)
    for client in clients.values():
        client.stop()


def _wait(problem: str, is_done: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    """Raises DemoError after START_TIMEOUT_S."""
    start = time.monotonic()
    while not is_done():
        if time.monotonic() - start > START_TIMEOUT_S:
            raise DemoError(problem, "", "`kbpf check` may show why")
        meanwhile()

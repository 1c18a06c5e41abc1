# SPDX-License-Identifier: Apache-2.0
"""200 tenants, some of them hostile: how much the hostile ones slow down the others, and memory.

A hostile tenant's Service flips the readiness of one endpoint every 0.2 s. The other tenants change
one endpoint each in turn, 100 changes a second in total. The agent runs in this process, with real
maps but without the packet path.

The latency is that from an event's arrival until it is in force, for the other tenants' Services.
`cpu_` values are the CPU time that the agent's thread used in between; unlike the latency, they do
not include waiting for a busy CPU. Goals: p99 of the others <= 10 ms, peak memory < 300 MB.
"""

import resource
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from benchmarks.tools.common import goal, say
from kbpf.agent.agent import Agent
from kbpf.agent.inbox import Item
from kbpf.model.address import Addr, parse_addr
from kbpf.model.config import Config
from kbpf.model.events import Kind, ObjectKey, Synced, Upsert
from kbpf.model.objects import (
    Algorithm,
    Endpoint,
    EndpointSlice,
    Node,
    Protocol,
    Service,
    ServiceName,
    ServicePort,
    SlicePort,
    Weights,
)
from tests.support.plane import Site

TENANTS, CHANGES, PAUSE, FLIP_SECONDS = 200, 1_000, 0.01, 0.2
TCP = Protocol.TCP
PIECE: Final = 1_000
"""The API server's limit of endpoints in one EndpointSlice."""


class Hostile(NamedTuple):
    """The number of hostile namespaces, and the ports and endpoints of the Service in each."""

    namespaces: int
    ports: int
    endpoints: int
    maglev: bool = True


CASES: Final = {
    "largest table": Hostile(1, 31, 650),
    "many ports": Hostile(1, 11, 1_024),
    "many endpoints": Hostile(1, 3, 4_100, maglev=False),
    "four namespaces": Hostile(4, 31, 650),
}


class Timed(Agent):
    """Records the latency of each event by Service, and the CPU time used in between (`seen`)."""

    seen: defaultdict[ServiceName, list[tuple[float, float]]]
    put: dict[float, float]
    clock = 0

    def arrive(self, made: Service | EndpointSlice) -> None:
        """Queues an event, and records the CPU time that the agent's thread has used so far."""
        event = upsert(made)
        self.put[event.received_at] = time.clock_gettime(self.clock)
        self._enqueue(event)

    def measure(self) -> None:
        """Begins to record."""
        self.seen, self.put = defaultdict(list), {}
        computer = self.reconciler.computer
        record_programmed = computer.record_programmed

        def record(deferred: Set[ServiceName]) -> None:
            done, used = time.monotonic(), time.thread_time()
            for name in computer._unprogrammed_arrivals.keys() - deferred:
                self.seen[name] += [
                    (done - at, used - self.put.pop(at, used)) for at in computer._unprogrammed_arrivals[name]
                ]
            record_programmed(deferred)

        computer.record_programmed = record  # type: ignore[method-assign]


def address(number: int, net: int) -> Addr:
    return parse_addr(f"{net}.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}")


def service(tenant: int, ports: int, **more: Any) -> Service:
    listed = tuple(ServicePort(f"p{n}", TCP, 80 + n) for n in range(ports))
    return Service(namespace(tenant), "web", "ClusterIP", (address(tenant + 1, 11),), listed, **more)


def namespace(tenant: int) -> str:
    return f"tenant-{tenant:03}"


def slices(tenant: int, ports: int, ends: int, down: int = -1) -> Iterator[EndpointSlice]:
    """The EndpointSlices of a tenant's Service; endpoint `down` is not ready."""
    for start in range(0, ends, PIECE):
        yield EndpointSlice(
            namespace(tenant),
            f"web-{start}",
            "web",
            4,
            tuple(
                Endpoint(address(tenant * 8192 + n, 10), ready=n != down, serving=n != down)
                for n in range(start, min(ends, start + PIECE))
            ),
            tuple(SlicePort(f"p{n}", TCP, 8080 + n) for n in range(ports)),
        )


def upsert(made: Service | EndpointSlice) -> Upsert:
    kind = Kind.SERVICE if isinstance(made, Service) else Kind.SLICE
    key = ObjectKey(kind, made.namespace, made.name)
    return Upsert(key, made, received_at=time.monotonic())


def play(agent: Timed, case: Hostile, flips: bool) -> dict[str, Any]:
    """Makes the changes; returns their latencies."""
    agent.seen = defaultdict(list)
    stop = threading.Event()

    def flip() -> None:
        for number in count(1):
            for tenant in range(case.namespaces):
                if stop.wait(FLIP_SECONDS / case.namespaces):
                    return
                down = number % min(PIECE, case.endpoints)
                agent.arrive(next(slices(tenant, case.ports, case.endpoints, down)))

    flipper = threading.Thread(target=flip)
    if flips:
        flipper.start()
    others = TENANTS - case.namespaces
    for number in range(CHANGES):
        tenant = case.namespaces + number % others
        agent.arrive(next(slices(tenant, 1, 10, number // others % 10)))
        time.sleep(PAUSE)
    stop.set()
    if flips:
        flipper.join()
    hostile = {namespace(tenant) for tenant in range(case.namespaces)}
    return {
        **figures([one for name, each in agent.seen.items() if name.namespace not in hostile for one in each]),
        "hostile": figures([one for name, each in agent.seen.items() if name.namespace in hostile for one in each]),
    }


def figures(latencies: list[tuple[float, float]]) -> dict[str, Any]:
    result: dict[str, Any] = {"changes": len(latencies)}
    for name, which in (("", 0), ("cpu_", 1)):
        values = sorted(one[which] * 1000 for one in latencies)
        if values:
            result[f"{name}p50_ms"] = round(values[len(values) // 2], 2)
            result[f"{name}p99_ms"] = round(values[len(values) * 99 // 100], 2)
            result[f"{name}max_ms"] = round(values[-1], 2)
    return result


def run() -> dict[str, Any]:
    """Measures each case, and first one without flips (`quiet`)."""
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        with begun(case) as agent:
            if not results:
                results["quiet"] = play(agent, case, flips=False)
                say(f"quiet: {results['quiet']}")
            results[name] = play(agent, case, flips=True)
            say(f"{name}: {results[name]}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    worst = max(results[name]["p99_ms"] for name in CASES)
    return {
        **results,
        "peak_mb": round(peak, 1),
        "goal": goal(worst, at_most=10.0),
        "cpu_goal": goal(max(results[name]["cpu_p99_ms"] for name in CASES), at_most=10.0),
        "memory_goal": goal(peak, at_most=300.0),
    }


@contextmanager
def begun(case: Hostile) -> Iterator[Timed]:
    """Runs an agent that has programmed all tenants."""
    with TemporaryDirectory() as cache:
        site = Site(Path(cache))
        try:
            yield from _begun(site, case)
        finally:
            site.close()


def _begun(site: Site, case: Hostile) -> Iterator[Timed]:
    plane = site.plane(system_namespaces=("kube-system",))
    agent = Timed(Config("me", packet_path=False, pin_dir=site.pins), plane, lambda _: ())
    agent.measure()
    items: list[Item] = [Upsert(ObjectKey(Kind.NODE, "", "me"), Node("me"))]
    for tenant in range(TENANTS):
        if tenant >= case.namespaces:
            made = [service(tenant, 1), *slices(tenant, 1, 10)]
        elif case.maglev:
            weights = Weights(addresses=((address(tenant * 8192 + 1, 10), 3),))
            web = service(tenant, case.ports, algorithm=Algorithm.MAGLEV, weights=weights)
            made = [web, *slices(tenant, case.ports, case.endpoints)]
        else:
            made = [service(tenant, case.ports), *slices(tenant, case.ports, case.endpoints)]
        items += map(upsert, made)
    for item in (*items, *(Synced(kind) for kind in Kind)):
        agent._enqueue(item)
    thread = threading.Thread(target=agent.run)
    thread.start()
    agent.clock = time.pthread_getcpuclockid(thread.ident or 0)
    while not agent.reconciler.state.has_applied:
        time.sleep(0.01)
    yield agent
    say(f"backend_slots: {plane.fill()['backend_slots']}")
    agent.stop()
    thread.join()

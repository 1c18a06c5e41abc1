"""200 tenants, one of them hostile: what its Service costs the others, and memory.

The hostile Service has 31 ports, Maglev, weights and 650 endpoints, one of which flips its
readiness every 0.2 s: what the limits allow for one table. 199 others change an endpoint, 100
changes a second in all. The agent runs in this process, on real maps, without the packet path; the
figures are from an event's arrival to its being in force. Goals: p99 of the others <= 10 ms, peak
memory < 300 MB.
"""

import resource
import threading
import time
from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import goal, say
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

TENANTS, PORTS, ENDPOINTS = 200, 31, 650
CHANGES, PAUSE, FLIP_SECONDS = 3_000, 0.01, 0.2
TCP = Protocol.TCP


class Timed(Agent):
    """Keeps the latencies of each Service."""

    seen: defaultdict[ServiceName, list[float]]

    def _note_latencies(self, deferred: Set[ServiceName]) -> None:
        done = time.monotonic()
        for name in self._computed.keys() - deferred:
            self.seen[name] += [done - at for at in self._computed[name]]
        super()._note_latencies(deferred)


def address(number: int, net: int) -> Addr:
    return parse_addr(f"{net}.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}")


def objects(tenant: int, ports: int, ends: int, down: int = -1, **more: Any) -> list[Any]:
    """A Service and its slice; endpoint `down` is not ready."""
    namespace = f"tenant-{tenant:03}"
    listed = tuple(ServicePort(f"p{n}", TCP, 80 + n) for n in range(ports))
    web = Service(namespace, "web", "ClusterIP", (address(tenant + 1, 11),), listed, **more)
    piece = EndpointSlice(
        namespace, "web-1", "web", 4,
        tuple(Endpoint(address(tenant * 4096 + n, 10), ready=n != down, serving=n != down)
              for n in range(ends)),
        tuple(SlicePort(f"p{n}", TCP, 8080 + n) for n in range(ports)),
    )  # fmt: skip
    return [web, piece]


def upsert(made: Service | EndpointSlice) -> Upsert:
    kind = Kind.SERVICE if isinstance(made, Service) else Kind.SLICE
    key = ObjectKey(kind, made.namespace, made.name)
    return Upsert(key, made, received=time.monotonic())


def play(agent: Timed, hostile: bool) -> dict[str, Any]:
    """The changes, and what they took."""
    agent.seen = defaultdict(list)
    stop = threading.Event()

    def flip() -> None:
        number = 0
        while not stop.wait(FLIP_SECONDS):
            number += 1
            agent._put(upsert(objects(0, PORTS, ENDPOINTS, number % ENDPOINTS)[1]))

    flipper = threading.Thread(target=flip)
    if hostile:
        flipper.start()
    for number in range(CHANGES):
        agent._put(upsert(objects(1 + number % (TENANTS - 1), 1, 10, number // 199 % 10)[1]))
        time.sleep(PAUSE)
    stop.set()
    if hostile:
        flipper.join()
    others = sorted(
        one for name, each in agent.seen.items() if name.namespace != "tenant-000" for one in each
    )
    own = sorted(agent.seen[ServiceName("tenant-000", "web")])
    return {
        "changes": len(others),
        "p50_ms": round(others[len(others) // 2] * 1000, 2),
        "p99_ms": round(others[len(others) * 99 // 100] * 1000, 2),
        "max_ms": round(others[-1] * 1000, 2),
        "hostile_changes": len(own),
        "hostile_p50_ms": round(own[len(own) // 2] * 1000, 1) if own else None,
    }


def run() -> dict[str, Any]:
    """Without the hostile tenant's flips, and with them."""
    with TemporaryDirectory() as cache:
        site = Site(Path(cache))
        try:
            return _run(site)
        finally:
            site.close()


def _run(site: Site) -> dict[str, Any]:
    plane = site.plane(system_namespaces=("kube-system",))
    agent = Timed(Config("me", packet_path=False, pin_dir=site.pins), plane, lambda _: ())
    agent.seen = defaultdict(list)
    weights = Weights(addresses=((address(1, 10), 3),))
    items: list[Item] = [Upsert(ObjectKey(Kind.NODE, "", "me"), Node("me"))]
    items += [upsert(one) for n in range(1, TENANTS) for one in objects(n, 1, 10)]
    items += [upsert(one) for one in objects(0, PORTS, ENDPOINTS, algorithm=Algorithm.MAGLEV,
                                             weights=weights)]  # fmt: skip
    for item in (*items, *(Synced(kind) for kind in Kind)):
        agent._put(item)
    thread = threading.Thread(target=agent.run)
    thread.start()
    while not agent._complete:
        time.sleep(0.01)
    say("programmed")
    quiet = play(agent, hostile=False)
    say(f"quiet: {quiet}")
    noisy = play(agent, hostile=True)
    fill = plane.fill()["backend_slots"]
    agent.stop()
    thread.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "quiet": quiet,
        "hostile": noisy,
        "backend_slots": fill,
        "peak_mb": round(peak, 1),
        "goal": goal(noisy["p99_ms"], at_most=10.0),
        "memory_goal": goal(peak, at_most=300.0),
    }

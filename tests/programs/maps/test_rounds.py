# SPDX-License-Identifier: Apache-2.0
"""What one round of the agent does is bounded, whatever the size of the object that changed; and
the change of another tenant is in force at the end of the round it arrived in.

Executed lines of Python are counted, not seconds, and time slices are over at once, so that a round
does one piece of each kind of work.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pytest

from kbpf.agent.agent import Agent
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.model.address import Addr, parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import ServicePortKey
from kbpf.model.events import Kind, ObjectKey, Synced, Upsert
from kbpf.model.objects import Algorithm, Endpoint, EndpointSlice, Node, Protocol, Service, ServicePort, SlicePort
from tests.support.plane import Site, flush
from tests.support.runtime.lines import lines_run

TCP = Protocol.TCP
MOST_ROUNDS = 3_000


def address(number: int, net: int = 10) -> Addr:
    return parse_addr(f"{net}.{number >> 16}.{number >> 8 & 255}.{number & 255}")


def service(name: str, ports: int = 1, **more: Any) -> Upsert:
    listed = tuple(ServicePort(f"p{n}", TCP, 80 + n) for n in range(ports))
    at = (address(crc32(name.encode()) & 0xFFFF, 11),)
    made = Service("ns", name, "ClusterIP", at, listed, **more)
    return Upsert(ObjectKey(Kind.SERVICE, "ns", name), made)


def slice_(name: str, ends: int, ports: int = 1, number: int = 0, down: int = -1) -> Upsert:
    made = EndpointSlice(
        "ns",
        f"{name}-{number}",
        name,
        4,
        tuple(Endpoint(address(number * 1000 + n), ready=n != down, serving=n != down) for n in range(ends)),
        tuple(SlicePort(f"p{n}", TCP, 1000 + n) for n in range(ports)),
    )
    return Upsert(ObjectKey(Kind.SLICE, "ns", f"{name}-{number}"), made, received_at=1.0)


@dataclass
class Case:
    """A Service with its slices by size, and the change of one slice. `slope`: how the cost of a
    round may grow when the size doubles, as a power of two; 0: not at all.
    """

    objects: Callable[[int], list[Upsert]]
    change: Callable[[int], Upsert]
    sizes: tuple[int, int]
    slope: float = 0.0
    rounds: list[int] = field(default_factory=list)


CASES = {
    "ports with many endpoints": Case(
        lambda n: [service("big", n), slice_("big", 300, n)], lambda n: slice_("big", 300, n, down=5), (8, 16)
    ),
    "ports with few endpoints": Case(
        lambda n: [service("big", n), slice_("big", 10, n)], lambda n: slice_("big", 10, n, down=5), (200, 400)
    ),
    "ports that share a Maglev table": Case(
        lambda n: [service("big", n, algorithm=Algorithm.MAGLEV), slice_("big", 300, n)],
        lambda n: slice_("big", 300, n, down=5),
        (8, 16),
    ),
    "endpoints of one port": Case(
        lambda n: [service("big"), *(slice_("big", 500, number=at) for at in range(n // 500))],
        lambda _: slice_("big", 500, down=5),
        (2000, 4000),
        slope=1.1,
    ),
    "endpoints that are not ready": Case(
        lambda n: [service("big", n), slice_("big", 300, n, down=5)], lambda n: slice_("big", 300, n), (8, 16)
    ),
}


class Rounds:
    """An agent that has programmed a large Service and a small one."""

    def __init__(self, site: Site, objects: list[Upsert]) -> None:
        self.plane: BpfPlane = site.plane(clock=time.monotonic)
        self.plane.open()
        config = Config("me", packet_path=False, pin_dir=site.pins)
        self.agent = Agent(config, self.plane, lambda _: ())
        node = Upsert(ObjectKey(Kind.NODE, "", "me"), Node("me"))
        small = [service("small"), slice_("small", 3)]
        self.agent.step([node, *objects, *small, *(Synced(kind) for kind in Kind)])
        flush(self.plane)

    def round(self, *items: Upsert) -> None:
        self.agent.step(items)
        self.agent._seconds_until_due()

    def backends(self, name: str) -> int:
        programmed = self.plane._state.programmed[ServicePortKey("ns", name, "p0", TCP, 4)]
        return len(programmed.cluster.backends)

    def busy(self, old: bool = True) -> Iterator[None]:
        """Repeats until everything is programmed and, with `old`, old sets are deleted."""
        for _ in range(MOST_ROUNDS):
            if not self.agent.reconciler.is_busy and not (old and self.plane._state.grace_queue.due):
                return
            yield
        raise AssertionError("it never ends")


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch) -> None:
    """No time passes. What an agent does every few seconds is no part of the cost of a round, and
    costs more.
    """
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)


@pytest.fixture(autouse=True)
def shortest_slices(monkeypatch) -> None:
    """A slice ends after one piece of work. Old sets are deleted at once; Services have no
    cooldown.
    """
    monkeypatch.setattr("kbpf.agent.reconciler.COMPUTE_BUDGET_S", 0.0)
    monkeypatch.setattr("kbpf.dataplane.bpf.plane.SLICE_BUDGET_S", 1e-9)
    monkeypatch.setattr("kbpf.dataplane.bpf.plane.GRACE_PERIOD_S", 0.0)
    monkeypatch.setattr("kbpf.agent.computer.MAX_COOLDOWN_S", 0.0)
    monkeypatch.setattr("kbpf.agent.reporter.Reporter.write_status", lambda _: None)


@pytest.mark.parametrize("name", CASES)
def test_cost_of_a_round_does_not_grow_with_the_object(site: Site, name: str):
    case = CASES[name]
    most = []
    for size in case.sizes:
        rounds = Rounds(site, case.objects(size))
        change = case.change(size)
        costs = [lines_run(lambda: rounds.round(change))]  # noqa: B023
        costs += [lines_run(rounds.round) for _ in rounds.busy()]
        most.append(max(costs))
        site.close_planes()
    assert most[1] <= most[0] * 2**case.slope * 1.15, most


@pytest.mark.parametrize("name", CASES)
def test_change_of_another_service_is_in_force_after_its_round(site: Site, name: str):
    case = CASES[name]
    size = case.sizes[0]
    rounds = Rounds(site, case.objects(size))
    rounds.round(case.change(size))
    for number, _ in enumerate(rounds.busy(old=False)):
        rounds.round(slice_("small", 3 + number % 2))
        assert rounds.backends("small") == 3 + number % 2, number

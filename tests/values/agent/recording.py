# SPDX-License-Identifier: Apache-2.0
"""A data plane that records its calls, and a clock set by the test."""

from collections.abc import Collection

from kbpf.agent.agent import Agent
from kbpf.dataplane.base import Report, TickResult
from kbpf.errors import KernelError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.events import Kind, ObjectKey, Synced, Upsert
from kbpf.model.objects import Node, Protocol, Service, ServicePort
from tests.support.faults.fake_plane import FakePlane


class RecordingPlane(FakePlane):
    """A data plane that records which Services each apply() touched (None: all)."""

    name = "counting"

    def __init__(self) -> None:
        self.applied: list[set[str] | None] = []
        self.sound: list[bool] = []
        self.doubts = 0
        self.writes: dict[str, int] = {}
        self.refused: dict[ServicePortKey, str] = {}
        self.plain: dict[ServicePortKey, str] = {}
        self.error = ""

    def apply(
        self,
        _: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        self.applied.append(None if touched is None else {key.name for key in touched})
        self.sound.append(authoritative)
        return Report(self.writes, 0, self.refused, self.plain)

    def invalidate(self) -> None:
        self.doubts += 1

    def tick(self, _: float) -> TickResult:
        if self.error:
            raise KernelError(self.error)
        return TickResult()


class Clock:
    """Replaces the module `time`; all its functions return `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __getattr__(self, _: str):
        return lambda *_: self.now


def service(name: str) -> Upsert:
    ports = (ServicePort("", Protocol.TCP, 80),)
    made = Service("ns", name, "ClusterIP", (parse_addr(f"10.96.0.{ord(name)}"),), ports)
    return Upsert(ObjectKey(Kind.SERVICE, "ns", name), made)


def begun(period: float) -> tuple[Agent, RecordingPlane]:
    plane = RecordingPlane()
    agent = Agent(Config("me", min_sync_period=period), plane, lambda _: ())
    node = Upsert(ObjectKey(Kind.NODE, "", "me"), Node("me"))
    agent.step([node, *(Synced(kind) for kind in Kind)])
    assert plane.applied == [None]
    return agent, plane

# SPDX-License-Identifier: Apache-2.0
"""A data plane that records its calls, and a clock set by the test."""

from collections.abc import Collection

from kbpf.agent.agent import Agent
from kbpf.dataplane.base import Report, TickResult
from kbpf.errors import KernelError
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.events import Kind, Synced, Upsert
from kbpf.model.objects import Node
from kbpf.serve.server import AgentServer
from tests.support.faults.fake_plane import FakePlane
from tests.support.prometheus import Family, parse
from tests.values.policy import services as texts
from tests.values.policy.services import up


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
        self.apply_error = ""
        self.failed_applies = 0

    def apply(
        self,
        _: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        if self.apply_error:
            self.failed_applies += 1
            raise KernelError(self.apply_error)
        self.applied.append(None if touched is None else {key.name for key in touched})
        self.sound.append(authoritative)
        return Report(self.writes, self.refused, self.plain)

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
    return up(texts.service(f"{name} ClusterIP ip=10.96.0.{ord(name)}"))


SYNCED = [Synced(kind) for kind in Kind]
NODE = up(Node("me"))


def begun(period: float, server: AgentServer | None = None) -> tuple[Agent, RecordingPlane]:
    plane = RecordingPlane()
    agent = Agent(Config("me", min_sync_period=period), plane, lambda _: (), server)
    agent.step([NODE, *SYNCED])
    assert plane.applied == [None]
    return agent, plane


def metrics(agent: Agent) -> dict[str, Family]:
    return parse(agent._server.format_metrics().decode())
